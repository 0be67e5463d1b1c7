"""Matrix products of int8 and fp8 with scales, zero points and bias applied to the sums in one kernel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_qmm import _compat, _extension
from jax_qmm.dtypes import INT8, INT32
from jax_qmm.ops import checks, dispatch, matmul_form
from jax_qmm.ops.sharding import partitioned
from jax_qmm.reference import scaled_mm as reference

# Public functions


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `scale_a * scale_b * (a @ b.T) + bias`.

    int8 products are summed exactly in int32, fp8 products in float32 or less (see `precision`). The rest is
    float32, `fma(scale_a, scale_b * sums, bias)`, rounded once to `out_dtype`.

    Differentiable by the scales and the bias; a and b are constants to differentiation.

    Sharded over M or N there is no communication. Sharded over K on either side, each device sums its part
    and one all-reduce of the sums comes before the scales. Where one mesh axis shards a and b in dimensions
    that don't go together, the operand that has it on K is gathered (of M and N, the one that the result is
    not sharded by); the vectors follow a and b. Gathered are also: what is sharded over the automatic axes
    inside a partly manual `jax.shard_map`, and a dimension that its mesh axes don't divide. JAX's persistent
    compilation cache finds a program with sharded operands again if the option
    `jax_remove_custom_partitioning_ptr_from_cache_key` is set.

    Args:
      a: `(..., M, K)`, int8 or float8_e4m3fn.
      b: `(N, K)`, of the same dtype. Batched only through `jax.vmap`.
      scale_a: float32, bfloat16 or float16. Per tensor: `()`, or 1 in every dimension of a. Per row of a:
        `(..., M)` or `(..., M, 1)`; which one is meant follows from the rank.
      scale_b: likewise `()` or `(1, 1)` per tensor, `(N,)` or `(1, N)` per column of the result.
      bias: `(N,)`, float32 or `out_dtype`, or None.
      out_dtype: bfloat16, float16, float32, or int32 for the sums of int8 products; the scales are then the
        constant 1.0.
      precision: of fp8 sums; int8 is always exact. Hopper's wgmma instructions keep fewer bits of a sum than
        float32 has. By default that holds for all of K; `jax.lax.Precision.HIGHEST` starts a new sum every 128
        products and adds these sums in float32.
      out_sharding: the sharding of the result, as in `jax.lax.dot_general`. On an Explicit mesh it is needed
        where K is sharded in both a and b.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array or has a wrong dtype.
      ValueError: if a shape does not fit.

    >>> import jax.numpy as jnp, jax_qmm
    >>> a, b = jnp.int8([[1, 2], [3, 4]]), jnp.int8([[5, 6], [7, 8], [9, 10]])
    >>> jax_qmm.scaled_mm(a, b, jnp.float32([0.5, 1.0]), 2.0, out_dtype=jnp.float32).tolist()
    [[17.0, 23.0, 29.0], [78.0, 106.0, 134.0]]
    """
    a, b = checks.matrices(a, b)
    out_dtype = checks.out_dtype(out_dtype)
    if out_dtype == jnp.int32:
        checks.raw_sums(a, scale_a, scale_b, bias)
        return _bind(a, b, out_dtype, out_sharding)
    fast_accum = not _compat.asks_highest_precision(precision) and a.dtype != jnp.int8
    return _scaled(a, b, scale_a, scale_b, bias, out_dtype, out_sharding, fast_accum)


def scaled_mm_azp(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    azp_with_adj: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `scale_a * scale_b * (a @ b.T - azp_with_adj) + bias`: one zero point for all of a.

    Args:
      a: `(..., M, K)` int8.
      b: `(N, K)` int8.
      scale_a: as in `scaled_mm`.
      scale_b: as in `scaled_mm`.
      azp_with_adj: `(N,)` int32, `azp * azp_adjustment(b)`; subtracted from the sums in int32.
      bias: as in `scaled_mm`.
      out_dtype: bfloat16, float16 or float32.
      out_sharding: as in `scaled_mm`.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array or has a wrong dtype.
      ValueError: if a shape does not fit.

    >>> import jax.numpy as jnp, jax_qmm
    >>> a, b = jnp.int8([[11, 12]]), jnp.int8([[3, 4], [5, 6]])
    >>> azp_with_adj = 10 * jax_qmm.azp_adjustment(b)
    >>> jax_qmm.scaled_mm_azp(a, b, 0.5, 1.0, azp_with_adj, out_dtype=jnp.float32).tolist()
    [[5.5, 8.5]]
    """
    a, b = checks.matrices(a, b, (INT8,))
    adj = checks.along_columns("azp_with_adj", checks.array("azp_with_adj", azp_with_adj, (INT32,)), b)
    return _scaled(a, b, scale_a, scale_b, bias, checks.out_dtype(out_dtype), out_sharding, azp_adj=adj)


def scaled_mm_azp_per_token(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    azp_adj: ArrayLike,
    azp: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `scale_a * scale_b * (a @ b.T - azp * azp_adj) + bias`: one zero point for each row of a.

    Args:
      a: `(..., M, K)` int8.
      b: `(N, K)` int8.
      scale_a: as in `scaled_mm`.
      scale_b: as in `scaled_mm`.
      azp_adj: `(N,)` int32, `azp_adjustment(b)`.
      azp: int32 zero points in any of the shapes of scale_a. The product and difference are taken in int32.
      bias: as in `scaled_mm`.
      out_dtype: bfloat16, float16 or float32.
      out_sharding: as in `scaled_mm`.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array or has a wrong dtype.
      ValueError: if a shape does not fit.

    >>> import jax.numpy as jnp, jax_qmm
    >>> a, b = jnp.int8([[11, 12], [21, 22]]), jnp.int8([[3, 4], [5, 6]])
    >>> adj, azp = jax_qmm.azp_adjustment(b), jnp.int32([10, 20])
    >>> jax_qmm.scaled_mm_azp_per_token(a, b, 0.5, 1.0, adj, azp, out_dtype=jnp.float32).tolist()
    [[5.5, 8.5], [5.5, 8.5]]
    """
    a, b = checks.matrices(a, b, (INT8,))
    adj = checks.along_columns("azp_adj", checks.array("azp_adj", azp_adj, (INT32,)), b)
    azp = checks.along_rows("azp", checks.array("azp", azp, (INT32,)), a)
    out_dtype = checks.out_dtype(out_dtype)
    return _scaled(a, b, scale_a, scale_b, bias, out_dtype, out_sharding, azp_adj=adj, azp=azp)


def azp_adjustment(b: ArrayLike) -> jax.Array:
    """The sum of each row of b, by which a zero point of a shifts the result.

    Args:
      b: `(N, K)` int8.

    Returns:
      `(N,)` int32.

    Raises:
      TypeError: if b is no int8 array.
      ValueError: if b does not have two dimensions.

    >>> import jax.numpy as jnp, jax_qmm
    >>> jax_qmm.azp_adjustment(jnp.int8([[3, 4], [5, -128]])).tolist()
    [7, -123]
    """
    b = checks.array("b", b, (INT8,))
    if b.ndim != 2:
        raise ValueError(f"b has shape {b.shape}; it needs two dimensions, (N, K)")
    return jnp.sum(b, axis=1, dtype=jnp.int32)


def _scaled(a, b, scale_a, scale_b, bias, out_dtype, out_sharding, fast_accum=False, **vectors):
    if out_dtype == jnp.int32:
        raise ValueError(
            "out_dtype is int32, which only scaled_mm has; with zero points it needs to be bfloat16, float16 or float32"
        )
    vectors["scale_a"] = checks.along_rows("scale_a", checks.scale("scale_a", scale_a), a)
    vectors["scale_b"] = checks.along_columns("scale_b", checks.scale("scale_b", scale_b), b, scalar=True)
    if bias is not None:
        dtypes = dict.fromkeys((jnp.dtype(jnp.float32), out_dtype))
        vectors["bias"] = checks.along_columns("bias", checks.array("bias", bias, tuple(dtypes)), b)
    return _bind(a, b, out_dtype, out_sharding, fast_accum, **vectors)


def _bind(a, b, out_dtype, out_sharding, fast_accum=False, **vectors):
    return scaled_mm_p.bind(
        *_compat.align_varying([a, b, *vectors.values()]),
        names=tuple(vectors),
        num_batch=0,
        out_dtype=out_dtype,
        fast_accum=fast_accum,
        out_sharding=_compat.canonicalize_out_sharding(out_sharding, "scaled_mm"),
    )


# The primitive: operands a, b and the vectors that `names` lists, of the form in `matmul_form`

scaled_mm_p = Primitive("scaled_mm")


def _labels(names):
    return [reference.LABELS[name] for name in ("a", "b", *names)]


# Abstract evaluation


def _abstract_eval(*operands, names, num_batch, out_dtype, fast_accum, out_sharding):
    del names, fast_accum
    return matmul_form.abstract_result("scaled_mm", operands, num_batch, out_dtype, out_sharding)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(*operands, names, num_batch, out_dtype, fast_accum):
    batch, rows, n, _ = matmul_form.sizes(operands, num_batch)
    result = jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), n), out_dtype)
    call = jax.ffi.ffi_call("jax_qmm_scaled_mm", result)
    attributes = dict(activation="none", low=np.float32(-np.inf), high=np.float32(np.inf))
    out = call(*matmul_form.fold(operands, num_batch), names=" ".join(names), fast_accum=fast_accum, **attributes)
    return out.reshape(*batch, *rows, n)


def _reference(a, b, *vectors, names, num_batch, out_dtype, fast_accum):
    del fast_accum
    return reference.scaled_mm(a, b, num_batch=num_batch, out_dtype=out_dtype, **dict(zip(names, vectors)))


def _unserved(platform, devices, operands, **params):
    return _extension.fallback_reason(platform, devices)


def _describe(operands, results, *, names, **params):
    return f"scaled_mm ({', '.join(names) or 'sums'})", operands[:2]


def _choice(operands, results, *, num_batch, fast_accum, **params):
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    m, count = math.prod(rows), math.prod(batch)
    if not all(isinstance(size, int) for size in (m, n, k, count)):
        return "kernel, chosen at run time: the shapes are symbolic"
    return _extension.describe_scaled_mm(m, n, k, count, operands[0].dtype, results[0].dtype, fast_accum)


# Batching


def _batch(operands, dims, *, names, num_batch, out_sharding, **params):
    operands, num_batch, out_sharding, at = matmul_form.batch_operands(
        operands, dims, _labels(names), num_batch, out_sharding
    )
    return scaled_mm_p.bind(*operands, names=names, num_batch=num_batch, out_sharding=out_sharding, **params), at


# Differentiation


def _jvp(primals, tangents, *, names, num_batch, out_dtype, fast_accum, out_sharding):
    """By scale_a, scale_b and bias; a and b are constants, fp8 too."""
    params = {"num_batch": num_batch, "fast_accum": fast_accum, "out_sharding": out_sharding}
    out = scaled_mm_p.bind(*primals, names=names, out_dtype=out_dtype, **params)

    def spread(x, name):
        return reference.along_output(x, name, out.ndim, num_batch).astype(jnp.float32)

    vectors = dict(zip(names, primals[2:]))
    moving = {
        name: spread(t, name)
        for name, t in zip(names, tangents[2:])
        if name in ("scale_a", "scale_b", "bias") and not isinstance(t, ad.Zero)
    }
    terms = [moving["bias"]] if "bias" in moving else []
    if "scale_a" in moving or "scale_b" in moving:
        acc = scaled_mm_p.bind(*primals[:2], names=(), out_dtype=_sum_dtype(primals[0]), **params)
        acc = reference.subtract_zero_point(acc, num_batch, vectors).astype(jnp.float32)
        for name, other in (("scale_a", "scale_b"), ("scale_b", "scale_a")):
            if name in moving:
                factor = acc * spread(vectors[other], other) if other in vectors else acc
                terms.append(moving[name] * factor)
    if not terms:
        return out, _compat.zero_tangent(out)
    tangent = sum(terms[1:], start=terms[0])
    return out, jnp.broadcast_to(tangent, out.shape).astype(out_dtype)


def _sum_dtype(a):
    return jnp.dtype(jnp.int32 if a.dtype == jnp.int8 else jnp.float32)


# Sharding


def _partitioned(run, shapes, *, names, num_batch, out_dtype, **params):
    operands, result = matmul_form.factors(shapes, _labels(names), num_batch)
    local = functools.partial(run, OP, num_batch=num_batch, **params)

    def across(axes):
        def sum_over_k(a, b, *vectors):
            acc = jax.lax.psum(local(a, b, names=(), out_dtype=_sum_dtype(a)), axes)
            vectors = dict(zip(names, vectors))
            return reference.epilogue(acc, num_batch=num_batch, out_dtype=out_dtype, **vectors)

        return sum_over_k

    whole = functools.partial(local, names=names, out_dtype=out_dtype)
    return partitioned(whole, operands, [result], shapes, over=("k",), across=across)


# Registration

OP = dispatch.Op(
    name="scaled_mm",
    targets=("jax_qmm_scaled_mm",),
    kernel=_kernel,
    reference=_reference,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
)
dispatch.register(scaled_mm_p, OP)
scaled_mm_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[scaled_mm_p] = _batch
ad.primitive_jvps[scaled_mm_p] = _jvp
