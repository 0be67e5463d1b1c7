"""The quantizers once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests.

The kernels follow this arithmetic bit for bit.
"""

import jax
import jax.numpy as jnp

SMALLEST_SCALE = 1.17549435e-38  # float32's smallest normal number: a row of zeros divides by this


def quantize_dynamic(x, qtype, axes, symmetric):
    """Quantizes `x` with scales computed from the data.

    Args:
      x: float array of any shape; the arithmetic is float32.
      qtype: `jnp.int8` or `jnp.float8_e4m3fn`.
      axes: tuple of the axes that share one scale.
      symmetric: False computes an int8 zero point too; float8 is always symmetric.

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
        largest = 127.0 if jnp.issubdtype(qtype, jnp.integer) else 448.0
        return jnp.maximum(_divide(extrema[0], largest), SMALLEST_SCALE), None
    minus_lo, hi = extrema
    unit = jnp.where(jnp.isinf(hi + minus_lo), 0.5, 1.0)  # a range that overflows is taken by halves
    scale = jnp.maximum(_divide(unit * hi + unit * minus_lo, unit * 255.0), SMALLEST_SCALE)
    zero_point = jnp.clip(jnp.rint(-128.0 + _divide(minus_lo, scale)), -128, 127)
    return scale, jnp.where(jnp.isnan(zero_point), 0, zero_point).astype(jnp.int32)


def quantize_static(x, scale, zero_point, qtype):
    """Quantizes `x` with a given scale: round half to even, saturate; NaN gives int8 0 and float8 NaN.

    Args:
      x: float array.
      scale: float32, broadcastable to x.
      zero_point: int32, broadcastable to x, or None.
      qtype: `jnp.int8` or `jnp.float8_e4m3fn`.

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
    return jnp.where(jnp.isnan(rounded), 0, jnp.clip(rounded, -128, 127)).astype(qtype)


def sums(qvalue, axes):
    """The sums of int8 values over `axes`, int32, with 1 on these.

    >>> sums(jnp.int8([[-128, 127]]), (1,)).tolist()
    [[-1]]
    """
    return jnp.sum(qvalue, axis=axes, dtype=jnp.int32, keepdims=True)


def dequantize(qvalue, scale, zero_point=None, dtype=None):
    """`(qvalue - zero_point) * scale`, computed in float32 and cast to `dtype` (default: the scale's).

    >>> dequantize(jnp.int8([[-128, 127]]), jnp.float32(0.5), jnp.int32(-128)).tolist()
    [[0.0, 127.5]]
    """
    if zero_point is not None:
        qvalue = qvalue.astype(jnp.int32) - zero_point
    return (qvalue.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype or scale.dtype)


def _positive_part(x):
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.maximum(x, 0.0))


def _divide(x, y):
    # XLA rewrites x / broadcast(y) to x * broadcast(1 / y), one more rounding; a selected divisor it leaves.
    return x / jnp.where(jnp.isnan(x), 1.0, y)
