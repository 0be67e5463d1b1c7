"""block_scaled_mm once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests."""

import jax
import jax.numpy as jnp

from jax_qmm.reference import activation as activations, packing, scaled_mm as products
from jax_qmm.reference.quantize import dequantize, spread

# What each operand has after its batch dimensions: r the rows of x, n those of w, k what is summed, g its blocks.
LABELS = {"x": "rk", "w": "nk", "scale": "ng", "zero_point": "ng", "bias": "n"}


def block_scaled_mm(
    x, w, scale, zero_point=None, bias=None, *, num_batch=0, qtype, packed, block, activation, out_dtype
):
    """`activation(x @ dequantized(w).T + bias)`, with the sums and all that follows them in float32.

    Args:
      x: `(*B, *R, K)` float, float8_e4m3fn too, B the first `num_batch` dimensions, R at least one.
      w: `(*B, N, K)` of `qtype`, or `(*B, N, bytes)` uint8 if `packed`. A dimension of B may be 1 in any operand.
      scale: `(*B, N, G)` float, G blocks of `block` columns, of which the last may be short.
      zero_point: int32, int8 or float of the shape of scale, or None.
      bias: `(*B, N)` float, or None.
      num_batch: the length of B.
      qtype: int8 or int4.
      packed: whether w is in the order of `reference.packing`.
      block: columns that share a scale.
      activation: an `Activation`.
      out_dtype: bfloat16, float16 or float32.

    Returns:
      `(*B, *R, N)` of `out_dtype`.

    >>> w, scale = jnp.int8([[1, 2, 3]]), jnp.float32([[1, 10]])
    >>> options = dict(qtype=jnp.int8, packed=False, block=2, activation=activations.NONE, out_dtype=jnp.float32)
    >>> block_scaled_mm(jnp.float32([[1, 1, 1]]), w, scale, **options).tolist()
    [[33.0]]
    """
    dense = dequantized(w, scale, zero_point, qtype=qtype, packed=packed, block=block, k=x.shape[-1])
    sums = products.sums(x, dense, num_batch)
    return epilogue(sums, bias, num_batch=num_batch, activation=activation, out_dtype=out_dtype)


def dequantized_once(
    x,
    w,
    scale,
    zero_point=None,
    bias=None,
    *,
    num_batch,
    qtype,
    packed,
    block,
    activation,
    out_dtype,
    dequantize=None,
):
    """As `block_scaled_mm`, by a product of x and weights that are rounded to its dtype: what XLA has fast kernels for.

    float16 has no range for every scale: there each row of weights is multiplied by a power of two, which brings the
    largest value that it can have to between 2^14 and 2^15, and its sums are multiplied by the inverse. So nothing
    overflows, and a weight is off by 2^-11 of itself or 2^-39 of that largest value, whichever is more: weights below
    2^-28 of it are subnormal in float16. `dequantize` takes the place of `dequantized`.

    Where XLA can fuse what follows the product, as `reference.activation.fuses` has it, the product is asked for in
    bfloat16, to which sums are rounded where it does not.
    """
    power = None
    if x.dtype == jnp.float16:
        zeros = 0 if zero_point is None else jnp.abs(zero_point.astype(jnp.float32))
        most = jnp.max(jnp.abs(scale.astype(jnp.float32)) * (zeros + 2.0 ** (jnp.iinfo(qtype).bits - 1)), -1, initial=0)
        power = jnp.where(jnp.isfinite(most) & (most > 0), 15 - jnp.frexp(most)[1], 0)
        scale = jnp.ldexp(scale.astype(jnp.float32), power[..., None])
    weight = {"qtype": qtype, "packed": packed, "block": block, "k": x.shape[-1], "dtype": x.dtype}
    dense = (dequantize or dequantized)(w, scale, zero_point, **weight)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    fuses = num_batch == 0 and activations.fuses(x.dtype, bias, activation, out_dtype)
    sums = products.sums(x, dense, num_batch, precision, rounded_to=x.dtype if fuses else jnp.float32)
    if power is not None:
        sums = jnp.ldexp(sums, -jnp.expand_dims(power, tuple(range(num_batch, sums.ndim - 1))))
    return epilogue(sums, bias, num_batch=num_batch, activation=activation, out_dtype=out_dtype)


def linear(x, w, scale, zero_point=None, bias=None, *, num_batch, out_sharding, **weight):
    """`x @ dequantized(w).T + bias` in float32, as it is differentiated: of 16-bit x in XLA's default precision."""
    dense = dequantized(w, scale, zero_point, k=x.shape[-1], **weight)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    sums = products.sums(x, dense, num_batch, precision, out_sharding)
    return epilogue(sums, bias, num_batch=num_batch, activation=activations.NONE, out_dtype=jnp.float32)


def dequantized(w, scale, zero_point, *, qtype, packed, block, k, dtype=jnp.float32):
    """`(w - zero_point) * scale` in float32, rounded to `dtype`, as `(*B, N, K)`."""
    if packed:
        w = packing.unpack(w, qtype, k)
    if scale.shape[-1] != 1:
        scale, zero_point = (None if leaf is None else spread(leaf, block, k) for leaf in (scale, zero_point))
    # A product of XLA's that dequantizes int4 values itself can be wrong on a GPU (Triton's, as of jaxlib 0.11.2).
    return jax.lax.optimization_barrier(dequantize(w, scale, zero_point, dtype))


def epilogue(sums, bias, *, num_batch, activation, out_dtype):
    """The result, given the sums."""
    if bias is not None:
        bias = jnp.expand_dims(bias, tuple(range(num_batch, sums.ndim - 1)))
    return activations.ended(sums, bias, activation, out_dtype)
