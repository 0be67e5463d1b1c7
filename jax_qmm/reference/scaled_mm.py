"""scaled_mm once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests.

The kernels follow this arithmetic bit for bit but for fp8 sums, which tensor cores round more coarsely.
"""

import jax
import jax.numpy as jnp

from jax_qmm import _compat

# What each operand has after its batch dimensions: r the rows of a, n those of b, k what is summed.
LABELS = {"a": "rk", "b": "nk", "scale_a": "r", "azp": "r", "scale_b": "n", "bias": "n", "azp_adj": "n"}


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
    ones_a, ones_b = (tuple(i for i in batch if x.shape[i] == 1) for x in (a, b))
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
    acc = subtract_zero_point(acc, num_batch, vectors)
    if out_dtype == jnp.int32:
        return acc
    scale_a, scale_b, bias = (
        along_output(vectors[name], name, acc.ndim, num_batch).astype(jnp.float32) if name in vectors else None
        for name in ("scale_a", "scale_b", "bias")
    )
    out = acc.astype(jnp.float32)
    if scale_b is not None:
        # The barrier keeps XLA from multiplying constant scales with each other first.
        out = jax.lax.optimization_barrier(scale_b) * out
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
    return jnp.expand_dims(vector, -1 if LABELS[name] == "r" else tuple(range(num_batch, ndim - 1)))


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
