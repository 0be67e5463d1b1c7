"""Every op once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests.

The arithmetic here is the definition. The kernels follow it bit for bit but for fp8 sums, which tensor cores
round more coarsely.
"""

import jax
import jax.numpy as jnp

from jax_qmm import _compat

SMALLEST_SCALE = 1.17549435e-38  # float32's smallest normal number: a row of zeros divides by this


def scaled_mm(a, b, *, num_batch=0, out_dtype, **vectors):
    """`scale_a * scale_b * (a @ b.T - azp * azp_adj) + bias`, each step rounded as the kernels round it.

    Args:
      a: `(*B, *R, K)` int8 or float8_e4m3fn, B the first `num_batch` dimensions, R at least one.
      b: `(*B, N, K)` of the same dtype. A dimension of B may be 1 in any operand.
      num_batch: the length of B.
      out_dtype: bfloat16, float16 or float32, or int32 for the exact sums of int8.
      **vectors: `scale_a` and `azp` `(*B, *R)` or with every dimension of R 1; `scale_b`, `bias` and
        `azp_adj` `(*B, N)` or `(*B, 1)`. Each may be absent; an azp without azp_adj has no effect.

    Returns:
      `(*B, *R, N)` of `out_dtype`.

    >>> a, b = jnp.int8([[1, 2]]), jnp.int8([[3, 4], [5, 6]])
    >>> vectors = dict(scale_a=jnp.float32([0.5]), bias=jnp.float32([10, 20]))
    >>> scaled_mm(a, b, out_dtype=jnp.float32, **vectors).tolist()
    [[15.5, 28.5]]
    """
    return epilogue(sums(a, b, num_batch), num_batch=num_batch, out_dtype=out_dtype, **vectors)


def sums(a, b, num_batch=0):
    """`a @ b.T` per batch: int32, exact but for wrap-around, for int8; float32 for float8."""
    if not jnp.issubdtype(a.dtype, jnp.integer):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # einsum by numbered dimensions: batch, rows, N and K. A batch dimension of 1 is left out and put back.
    batch, rows = range(num_batch), range(num_batch, a.ndim - 1)
    n, k = a.ndim - 1, a.ndim
    ones_a, ones_b = (tuple(i for i in batch if is_one(x.shape[i])) for x in (a, b))
    labels_a = [i for i in (*batch, *rows, k) if i not in ones_a]
    labels_b = [i for i in (*batch, n, k) if i not in ones_b]
    ones = set(ones_a) & set(ones_b)
    out = jnp.einsum(
        a.squeeze(ones_a),
        labels_a,
        b.squeeze(ones_b),
        labels_b,
        [i for i in (*batch, *rows, n) if i not in ones],
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else jnp.float32,
    )
    return jnp.expand_dims(out, tuple(ones))


def epilogue(acc, *, num_batch=0, out_dtype, **vectors):
    """The result of `scaled_mm`, given its `sums`."""
    # The barrier keeps XLA from multiplying constant scales with each other first.
    acc, vectors = jax.lax.optimization_barrier((acc, vectors))
    acc = subtract_zero_point(acc, num_batch, vectors)
    if out_dtype == jnp.int32:
        return acc
    scale_a, scale_b, bias = (
        along_output(vectors[name], name, acc.ndim, num_batch).astype(jnp.float32) if name in vectors else None
        for name in ("scale_a", "scale_b", "bias")
    )
    out = acc.astype(jnp.float32)
    if scale_b is not None:
        out = scale_b * out
    if bias is not None:
        out = _fused_multiply_add(scale_a, out, bias)
    elif scale_a is not None:
        out = scale_a * out
    # The CPU backend merges a product with a sum that uses it, which skips a rounding; a selection stops it.
    return jnp.where(jnp.isnan(out), jnp.nan, out).astype(out_dtype)


def subtract_zero_point(acc, num_batch, vectors):
    """`acc - azp * azp_adj` in int32 with wrap-around."""
    if "azp_adj" not in vectors:
        return acc
    correction = along_output(vectors["azp_adj"], "azp_adj", acc.ndim, num_batch)
    if "azp" in vectors:
        correction = along_output(vectors["azp"], "azp", acc.ndim, num_batch) * correction
    return acc - correction


def along_output(vector, name, ndim, num_batch):
    """A vector of `scaled_mm` with 1 on the dimensions of the output that it does not run along."""
    return jnp.expand_dims(vector, -1 if name in ("scale_a", "azp") else tuple(range(num_batch, ndim - 1)))


def is_one(size):
    """Whether a dimension is 1; a symbolic one is not."""
    return isinstance(size, int) and size == 1


def _fused_multiply_add(x, y, z):
    """`x * y + z` of float32 with one rounding; `x` None stands for 1."""
    with _compat.enable_x64(True):
        x = 1.0 if x is None else x.astype(jnp.float64)
        product, z = x * y.astype(jnp.float64), z.astype(jnp.float64)  # exact: twice 24 bits fit in 53
        total = product + z
        # The exact rest that `total` lacks (Knuth's two-sum) makes it odd, so that its rounding to float32 is
        # that of the exact sum (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
        part = total - product
        rest = (product - (total - part)) + (z - part)
        bits = jax.lax.bitcast_convert_type(total, jnp.int64)
        step = jnp.where((rest > 0) == (total > 0), 1, -1)
        inexact = ((rest > 0) | (rest < 0)) & (bits & 1 == 0)
        total = jax.lax.bitcast_convert_type(jnp.where(inexact, bits + step, bits), jnp.float64)
        return total.astype(jnp.float32)


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
    scale = jnp.maximum(_divide(hi + minus_lo, 255.0), SMALLEST_SCALE)
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
