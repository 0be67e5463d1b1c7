"""scaled_mm once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests.

The kernels follow this arithmetic bit for bit but for fp8 sums, which tensor cores round more coarsely.
"""

import jax
import jax.numpy as jnp

from jax_qmm import _compat
from jax_qmm.dtypes import QTYPES
from jax_qmm.reference import activation as activations
from jax_qmm.reference.quantize import quantize_static

# What each operand has after its batch dimensions: r the rows of a, n those of b, k what is summed.
LABELS = {
    "a": "rk",
    "b": "nk",
    **dict.fromkeys(("scale_a", "azp", "sums_a"), "r"),
    **dict.fromkeys(("scale_b", "bias", "azp_adj", "azp_b"), "n"),
    **dict.fromkeys(("out_scale", "out_zero_point"), ""),
}


def scaled_mm(a, b, *, num_batch=0, out_dtype, activation=activations.NONE, **vectors):
    """`activation(scale_a * scale_b * (a @ b.T - azp * azp_adj - sums_a * azp_b) + bias)`.

    Each step is rounded as the kernels round it.

    Args:
      a: `(*B, *R, K)` int8 or float8_e4m3fn, B the first `num_batch` dimensions, R at least one.
      b: `(*B, N, K)` of the same dtype. A dimension of B may be 1 in any operand.
      num_batch: the length of B.
      out_dtype: bfloat16, float16 or float32; int8 or float8_e4m3fn, which need `out_scale`; or int32 for the exact
        sums of int8.
      activation: an `Activation`.
      **vectors: `scale_a`, `azp` and `sums_a` (the row sums of a less its zero point) `(*B, *R)` or with every
        dimension of R 1; `scale_b`, `bias`, `azp_adj` (the row sums of b) and `azp_b` `(*B, N)` or `(*B, 1)`;
        `out_scale` and `out_zero_point` `B`. Each may be absent; a factor without the other has no effect, but azp_adj
        alone is the product.

    Returns:
      `(*B, *R, N)` of `out_dtype`.

    >>> a, b = jnp.int8([[1, 2]]), jnp.int8([[3, 4], [5, 6]])
    >>> vectors = dict(scale_a=jnp.float32([0.5]), bias=jnp.float32([10, 20]))
    >>> scaled_mm(a, b, out_dtype=jnp.float32, **vectors).tolist()
    [[15.5, 28.5]]
    """
    acc = sums(a, b, num_batch)
    return epilogue(acc, num_batch=num_batch, out_dtype=out_dtype, activation=activation, **vectors)


def sums(
    a,
    b,
    num_batch=0,
    precision: jax.lax.Precision | None = jax.lax.Precision.HIGHEST,
    out_sharding=None,
    rounded_to=jnp.float32,
):
    """`a @ b.T` per batch: int32, exact but for wrap-around, for int8; for floats float32, or `rounded_to` another."""
    if not jnp.issubdtype(a.dtype, jnp.integer) and (a.dtype != b.dtype or a.dtype.itemsize == 1):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # einsum by numbered dimensions: batch, rows, N and K. A batch dimension of 1 is left out and put back.
    batch, rows = range(num_batch), range(num_batch, a.ndim - 1)
    n, k = a.ndim - 1, a.ndim
    ones_a, ones_b = (tuple(i for i in batch if x.shape[i] == 1) for x in (a, b))
    labels_a = [i for i in (*batch, *rows, k) if i not in ones_a]
    labels_b = [i for i in (*batch, n, k) if i not in ones_b]
    ones = set(ones_a) & set(ones_b)
    if out_sharding is not None:
        kept = (entry for i, entry in enumerate(out_sharding.spec) if i not in ones)
        out_sharding = out_sharding.update(spec=jax.sharding.PartitionSpec(*kept))
    out = jnp.einsum(
        a.squeeze(ones_a),
        labels_a,
        b.squeeze(ones_b),
        labels_b,
        [i for i in (*batch, *rows, n) if i not in ones],
        precision=precision,
        out_sharding=out_sharding,
        preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else rounded_to,
    )
    return jnp.expand_dims(out, tuple(ones))


def epilogue(acc, *, num_batch=0, out_dtype, activation=activations.NONE, residual=None, **vectors):
    """The result of `scaled_mm`, given its `sums`; of a convolution perhaps with a residual, a scale or None and a
    float32 array, whose product is added before the activation."""
    acc = subtract_zero_points(acc, num_batch, vectors)
    if out_dtype == jnp.int32:
        return acc
    along = lambda name: along_output(vectors[name], name, acc.ndim, num_batch) if name in vectors else None
    scale_a, scale_b, bias = (
        None if vector is None else vector.astype(jnp.float32) for vector in map(along, ("scale_a", "scale_b", "bias"))
    )
    out = acc.astype(jnp.float32)
    if scale_b is not None:
        # The barrier keeps XLA from multiplying constant scales with each other first.
        out = jax.lax.optimization_barrier(scale_b) * out
    if bias is not None:
        out = fused_multiply_add(scale_a, out, bias)
    elif scale_a is not None:
        out = scale_a * out
    # The CPU backend merges a product with a sum that uses it, which skips a rounding; a selection stops it.
    rounded = lambda x: jnp.where(jnp.isnan(x), jnp.nan, x)
    if residual is not None:
        scale, values = residual
        out = rounded(out) + values if scale is None else fused_multiply_add(scale, values, rounded(out))
    out = activations.activate(rounded(out), activation)
    if out_dtype in QTYPES:
        return quantize_static(out, along("out_scale"), along("out_zero_point"), out_dtype)
    return out.astype(out_dtype)


def subtract_zero_points(acc, num_batch, vectors):
    """`acc - azp * azp_adj - sums_a * azp_b` in int32 with wrap-around."""
    along = lambda name: along_output(vectors[name], name, acc.ndim, num_batch)
    if "azp_adj" in vectors:
        acc = acc - (along("azp") * along("azp_adj") if "azp" in vectors else along("azp_adj"))
    return acc - along("sums_a") * along("azp_b") if "azp_b" in vectors else acc


def along_output(vector, name, ndim, num_batch):
    """A vector of `scaled_mm` with 1 on the dimensions of the output that it does not run along."""
    missing = {"r": (ndim - 1,), "n": range(num_batch, ndim - 1), "": range(num_batch, ndim)}[LABELS[name]]
    return jnp.expand_dims(vector, tuple(missing))


def fused_multiply_add(x, y, z):
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
