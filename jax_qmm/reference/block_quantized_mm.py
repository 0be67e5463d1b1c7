"""Products of two operands of 8 bits in blocks once more in plain jax.numpy: the definition of `block_scaled_mm` of two
QArrays, the lowering where no kernel runs, and the oracle of the tests.

The kernels follow this arithmetic bit for bit but for fp8 sums, which tensor cores round more coarsely.
"""

import jax
import jax.numpy as jnp

from jax_qmm import _compat
from jax_qmm.reference import activation as activations, block_scaled_mm as weight_only, scaled_mm as products
from jax_qmm.reference.block_scaled_mm import epilogue

# What each operand has after its batch dimensions: r the rows of a, n those of b, k what is summed, g its blocks.
LABELS = {
    "a": "rk",
    "b": "nk",
    **dict.fromkeys(("scale_a", "zero_point_a", "sums_a"), "rg"),
    **dict.fromkeys(("scale_b", "zero_point_b", "sums_b"), "ng"),
    "bias": "n",
}


def block_quantized_mm(
    a, b, scale_a, scale_b, bias=None, *, num_batch=0, block, activation=activations.NONE, out_dtype, **zero_points
):
    """`activation(sum_g scale_a * scale_b * sum_{k in g} (a - zero_point_a) * (b - zero_point_b) + bias)`.

    Each step is rounded as the kernels round it, see `sums`.

    Args:
      a: `(*B, *R, K)` int8 or float8_e4m3fn, B the first `num_batch` dimensions, R at least one.
      b: `(*B, N, K)` of the same dtype. A dimension of B may be 1 in any operand.
      scale_a: `(*B, *R, G)` float, G blocks of `block` columns, of which the last may be short.
      scale_b: `(*B, N, G)` float.
      bias: `(*B, N)` float, or None.
      num_batch: the length of B.
      block: columns that share a scale.
      activation: an `Activation`.
      out_dtype: bfloat16, float16 or float32.
      **zero_points: `zero_point_a` int32 and `sums_a`, the sums of a over each block, `(*B, *R, G)`; `zero_point_b` and
        `sums_b` `(*B, N, G)`. Each may be absent; sums that a zero point of the other side needs are then computed.

    Returns:
      `(*B, *R, N)` of `out_dtype`.

    >>> a, b = jnp.int8([[1, 2, 3]]), jnp.int8([[1, 1, 1], [4, 5, 6]])
    >>> scales = jnp.float32([[0.5, 10]]), jnp.float32([[1, 1], [2, 1]])
    >>> block_quantized_mm(a, b, *scales, block=2, out_dtype=jnp.float32).tolist()
    [[31.5, 194.0]]
    """
    total = sums(a, b, scale_a, scale_b, num_batch=num_batch, block=block, **zero_points)
    return epilogue(total, bias, num_batch=num_batch, activation=activation, out_dtype=out_dtype)


def sums(a, b, scale_a, scale_b, *, num_batch, block, **zero_points):
    """The scaled sums in float32, before the bias.

    Block after block from the first to the last, `total = fma(scale_a, scale_b * t, total)`, with t of the block:
    its products summed in int32 (float32 of fp8), then as float32 `fma(-zero_point_a, sums_b, t)` and
    `fma(-zero_point_b, sums_a, t)`, see `zero_point_terms`. With zero points in the range of int8, t is exact in blocks
    of up to 256 columns: 256 * 255 * 255 is below 2**24.
    """
    vectors = {"scale_a": scale_a, "scale_b": scale_b, **zero_point_terms(a, b, block, **zero_points)}
    count = scale_a.shape[-1]

    def blocks_first(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * block - x.shape[-1])])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], count, block), -2, 0)

    def along_output(vector, name):
        vector = jnp.moveaxis(vector.astype(jnp.float32), -1, 0)
        missing = (-1,) if LABELS[name] == "rg" else range(1 + num_batch, a.ndim)
        return jnp.expand_dims(vector, tuple(missing))

    def add_block(total, of_block):
        a, b, vectors = of_block
        t = products.sums(a, b, num_batch).astype(jnp.float32)
        for zero_point, others in (("zero_point_a", "sums_b"), ("zero_point_b", "sums_a")):
            if zero_point in vectors:
                t = products.fused_multiply_add(-vectors[zero_point], vectors[others], t)
        return products.fused_multiply_add(vectors["scale_a"], vectors["scale_b"] * t, total), None

    vectors = {name: along_output(vector, name) for name, vector in vectors.items()}
    of_blocks = blocks_first(a), blocks_first(b), vectors
    shape = jax.eval_shape(lambda a, b: products.sums(a, b, num_batch), a, b).shape
    total, *_ = _compat.align_varying([jnp.zeros(shape, jnp.float32), *jax.tree.leaves(of_blocks)])
    return jax.lax.scan(add_block, total, of_blocks)[0]


def zero_point_terms(a, b, block, zero_point_a=None, zero_point_b=None, sums_a=None, sums_b=None):
    """What the zero points of each side are multiplied by: `sums_b`, and as `sums_a` those of a less its zero point."""
    terms = {}
    if zero_point_a is not None:
        terms |= {"zero_point_a": zero_point_a, "sums_b": block_sums(b, block) if sums_b is None else sums_b}
    if zero_point_b is not None:
        sums_a = block_sums(a, block) if sums_a is None else sums_a
        columns = jnp.minimum(block, a.shape[-1] - block * jnp.arange(sums_a.shape[-1], dtype=jnp.int32))  # of each
        shift = 0 if zero_point_a is None else columns * zero_point_a
        terms |= {"zero_point_b": zero_point_b, "sums_a": sums_a - shift}
    return terms


def linear(
    a, b, scale_a, scale_b, zero_point_a=None, zero_point_b=None, bias=None, *, num_batch, block, out_sharding, **sums
):
    """The product of the dequantized operands plus bias in float32, as it is differentiated."""
    x = weight_only.dequantized(a, scale_a, zero_point_a, qtype=a.dtype, packed=False, block=block, k=a.shape[-1])
    return weight_only.linear(
        *(x, b, scale_b, zero_point_b, bias),
        **dict(num_batch=num_batch, qtype=b.dtype, packed=False, block=block, out_sharding=out_sharding),
    )


def block_sums(q, block):
    """The sums of int8 `(..., K)` over blocks of `block` columns as int32 `(..., G)`; the last may be short.

    >>> block_sums(jnp.int8([[-128, 127, 5]]), 2).tolist()
    [[-1, 5]]
    """
    *leading, k = q.shape
    q = jnp.pad(q, [(0, 0)] * len(leading) + [(0, -k % block)])
    return jnp.sum(q.reshape(*leading, -(-k // block), block), -1, dtype=jnp.int32)
