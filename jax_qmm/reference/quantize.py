"""The quantizers once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests.

The kernels follow this arithmetic bit for bit.
"""

import jax
import jax.numpy as jnp

from jax_qmm import _compat

SMALLEST_SCALE = 1.17549435e-38  # float32's smallest normal number: a row of zeros divides by this


def quantize_dynamic(x, qtype, axes, symmetric):
    """Quantizes `x` with scales computed from the data.

    Args:
      x: float array of any shape; the arithmetic is float32.
      qtype: `jnp.int8`, `jnp.int4` or `jnp.float8_e4m3fn`.
      axes: tuple of the axes that share one scale.
      symmetric: False computes a zero point in the range of the integers too; float8 is always symmetric.

    Returns:
      `(qvalue, scale, zero_point)`: qvalue of x's shape; float32 scale of x's rank with 1 on `axes`; int32
      zero point of the same shape, or None when symmetric.

    >>> q, scale, _ = quantize_dynamic(jnp.array([[0.5, -127.0]]), jnp.int8, (1,), True)
    >>> q.tolist(), scale.tolist()
    ([[0, -127]], [[1.0]])
    """
    x = x.astype(jnp.float32)
    scale, zero_point = scale_and_zero_point(extrema(x, axes, symmetric), qtype)
    return quantize_static(x, scale, zero_point, qtype), scale, zero_point


def extrema(x, axes, symmetric):
    """What a dynamic scale depends on: `(absmax,)`, or `(-min, max)` of a range that holds 0.

    Each is a non-negative float32 given by its bits as int32, in which NaN is the largest: XLA's maximum of
    floats drops NaN on the CPU. Parts of an array, sharded ones too, combine by the maximum of these.
    """
    x = x.astype(jnp.float32)
    parts = (jnp.abs(x),) if symmetric else (_positive_part(-x), _positive_part(x))
    bits = (jax.lax.bitcast_convert_type(part, jnp.int32) for part in parts)
    return tuple(jnp.max(b, axis=axes, keepdims=True, initial=0) for b in bits)


def scale_and_zero_point(extrema, qtype):
    """The scale and zero point (None when symmetric) of a dynamic quantization, given its `extrema`."""
    extrema = [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in extrema]
    if len(extrema) == 1:
        largest = float(jnp.iinfo(qtype).max) if jnp.issubdtype(qtype, jnp.integer) else 448.0
        return jnp.maximum(_divide(extrema[0], largest), SMALLEST_SCALE), None
    minus_lo, hi = extrema
    unit = jnp.where(jnp.isinf(hi + minus_lo), 0.5, 1.0)  # a range that overflows is taken by halves
    least, most = float(jnp.iinfo(qtype).min), float(jnp.iinfo(qtype).max)
    scale = jnp.maximum(_divide(unit * hi + unit * minus_lo, unit * (most - least)), SMALLEST_SCALE)
    zero_point = jnp.clip(jnp.rint(least + _divide(minus_lo, scale)), least, most)
    return scale, jnp.where(jnp.isnan(zero_point), 0, zero_point).astype(jnp.int32)


def quantize_static(x, scale, zero_point, qtype):
    """Quantizes `x` with a given scale: round half to even, saturate; NaN gives 0 in integers and NaN in float8.

    Args:
      x: float array.
      scale: float32, broadcastable to x.
      zero_point: int32, broadcastable to x, or None.
      qtype: `jnp.int8`, `jnp.int4` or `jnp.float8_e4m3fn`.

    Returns:
      Array of `qtype` and x's shape.

    >>> quantize_static(jnp.array([0.5, 1.5, 300.0]), jnp.float32(1), None, jnp.int8).tolist()
    [0, 2, 127]
    """
    scaled = _divide(x.astype(jnp.float32), scale)
    if not jnp.issubdtype(qtype, jnp.integer):
        return jnp.clip(scaled, -448.0, 448.0).astype(qtype)
    rounded = jnp.rint(scaled)
    if zero_point is not None:
        rounded = rounded + zero_point.astype(jnp.float32)
    bounds = jnp.iinfo(qtype)
    return jnp.where(jnp.isnan(rounded), 0, jnp.clip(rounded, bounds.min, bounds.max)).astype(qtype)


CLIPS = 16  # how many scales `least_error_scale` compares


def least_error_scale(x, scale, zero_point, qtype, axes, dtype):
    """Of `scale * (1 - i / 32)`, i < 16, each rounded to `dtype`, those of the least squared error over `axes`.

    The zero point is that of all of them: it follows from the ratio of the range's ends, which shrink alike. Where an
    error is NaN, the scale stays.
    """
    x = x.astype(jnp.float32)

    def compare(i, best):
        tried = (scale * (1 - i / (2.0 * CLIPS))).astype(dtype).astype(jnp.float32)
        off = dequantize(quantize_static(x, tried, zero_point, qtype), tried, zero_point) - x
        error = jnp.sum(off * off, axis=axes, keepdims=True)
        return tuple(jnp.where(error < best[0], new, old) for new, old in zip((error, tried), best))

    return jax.lax.fori_loop(0, CLIPS, compare, (jnp.full_like(scale, jnp.inf), scale))[1]


def sums(qvalue, axes):
    """The sums of int8 values over `axes`, int32, with 1 on these.

    >>> sums(jnp.int8([[-128, 127]]), (1,)).tolist()
    [[-1]]
    """
    return jnp.sum(qvalue, axis=axes, dtype=jnp.int32, keepdims=True)


def spread(parameter, tile, size, axis=-1):
    """A parameter of blocks of `tile` along `axis` with a value for each of the `size` elements that they divide.

    >>> spread(jnp.int32([1, 2]), 3, 5).tolist()
    [1, 1, 1, 2, 2]
    """
    kind = jax.typeof(parameter)
    spread = jnp.repeat(parameter, tile, axis, out_sharding=kind.sharding if _compat.explicit_mesh(kind) else None)
    return spread if spread.shape[axis] == size else jax.lax.slice_in_dim(spread, 0, size, axis=axis)


def dequantize(qvalue, scale, zero_point=None, dtype=None):
    """`(qvalue - zero_point) * scale`, computed in float32 and cast to `dtype` (default: the scale's).

    >>> dequantize(jnp.int8([[-128, 127]]), jnp.float32(0.5), jnp.int32(-128)).tolist()
    [[0.0, 127.5]]
    """
    if zero_point is not None and jnp.issubdtype(zero_point.dtype, jnp.integer):
        qvalue = qvalue.astype(jnp.int32) - zero_point.astype(jnp.int32)
    elif zero_point is not None:
        qvalue = qvalue.astype(jnp.float32) - zero_point.astype(jnp.float32)
    return (qvalue.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype or scale.dtype)


def _positive_part(x):
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.maximum(x, 0.0))


def _divide(x, y):
    # XLA rewrites x / broadcast(y) to x * broadcast(1 / y), one more rounding; a selected divisor it leaves.
    return x / jnp.where(jnp.isnan(x), 1.0, y)
