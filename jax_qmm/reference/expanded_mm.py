"""Products of int8 and of int4 that becomes int8 on the way, once more in plain jax.numpy."""

import jax.numpy as jnp

from jax_qmm.dtypes import INT8
from jax_qmm.reference.quantize import spread
from jax_qmm.reference.scaled_mm import epilogue, sums

# What each operand has after its batch dimensions: r the rows of x, n those of w, k what is summed, g its blocks.
LABELS = {
    "x": "rk",
    "w": "nk",
    **dict.fromkeys(("multiple", "zero_point"), "ng"),
    "scale_a": "r",
    **dict.fromkeys(("scale_b", "bias"), "n"),
}


def expanded_mm(x, w, multiple, zero_point=None, *, num_batch=0, block, out_dtype=jnp.int32, **vectors):
    """`scale_a * scale_b * sum_k x * multiple * (w - zero_point) + bias`, the sums exactly.

    Args:
      x: `(*B, *R, K)` int8, B the first `num_batch` dimensions, R at least one.
      w: `(*B, N, K)` int4. A dimension of B may be 1 in any operand.
      multiple, zero_point: `(*B, N, G)` int8, of G blocks of `block` columns, of which the last may be short;
        zero_point may be None. What is multiplied to x has to be in the range of int8.
      num_batch: the length of B.
      block: columns of a block.
      out_dtype: bfloat16, float16 or float32; or int32 for the sums.
      **vectors: `scale_a` `(*B, *R)` or with every dimension of R 1; `scale_b` and `bias` `(*B, N)` or `(*B, 1)`. Each
        may be absent.

    Returns:
      `(*B, *R, N)` of `out_dtype`.

    >>> x, w = jnp.int8([[1, 2, 3]]), jnp.array([[1, -7, 2]], jnp.int4)
    >>> expanded_mm(x, w, jnp.int8([[3, 10]]), block=2).tolist()
    [[21]]
    """
    along = lambda leaf: spread(leaf, block, w.shape[-1], leaf.ndim - 1)
    values = w.astype(INT8) if zero_point is None else w.astype(INT8) - along(zero_point)
    acc = sums(x, values * along(multiple), num_batch)
    return epilogue(acc, num_batch=num_batch, out_dtype=out_dtype, **vectors)
