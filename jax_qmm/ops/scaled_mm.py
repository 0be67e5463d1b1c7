"""Matrix products of int8 and fp8 with scales, zero points and bias applied to the sums in one kernel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_qmm import _compat, _extension
from jax_qmm.dtypes import QTYPES
from jax_qmm.ops import checks, dispatch, matmul_form
from jax_qmm.ops.checks import Activation
from jax_qmm.ops.sharding import partitioned
from jax_qmm.reference import activation as activations, scaled_mm as reference

# The public function; those with zero points are in ops/zero_points.py


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    out_scale: ArrayLike | None = None,
    out_zero_point: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `activation(scale_a * scale_b * (a @ b.T) + bias)`.

    int8 products are summed exactly in int32, fp8 products in float32 or less (see `precision`). The rest is
    float32, `y = activation(fma(scale_a, scale_b * sums, bias))`, rounded once to `out_dtype`. An int8 result is
    `saturate(round(y / out_scale) + out_zero_point)`, a float8 one `saturate(y / out_scale)`: what `quantize` makes
    of y with these. NaN gives 0 in int8.

    Differentiable by the scales and the bias; a and b are constants to differentiation. 8-bit results have no
    derivative, and differentiating through one is an error.

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
      bias: `(N,)`, float32 or `out_dtype` (of an 8-bit result float32, bfloat16 or float16), or None.
      activation: None, "relu", "relu6", `(lo, hi)` for a clamp to these two numbers, "gelu" (the tanh form) or "silu".
        The clamps are exact and keep NaN; gelu and silu are off the exact function of y by less than 2**-20 |y|.
      out_scale: the step of an 8-bit result, `()`, float32, bfloat16 or float16; finite and not 0. Neither it nor
        `out_zero_point` is for other results.
      out_zero_point: the integer that stands for 0 in an int8 result, `()` int32; None is 0.
      out_dtype: bfloat16, float16 or float32; int8 or float8_e4m3fn, which need `out_scale`; or int32 for the sums of
        int8 products: the scales are then the constant 1.0, and there is no bias and no activation.
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
    >>> jax_qmm.scaled_mm(a, b, 1.0, 1.0, activation=(20, 40), out_scale=0.5, out_dtype=jnp.int8).tolist()
    [[40, 46, 58], [78, 80, 80]]
    """
    a, b = checks.matrices(a, b)
    return scaled_product(
        *(a, b, scale_a, scale_b, bias, {}),
        activation=activation,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        fast_accum=not _compat.asks_highest_precision(precision) and a.dtype != jnp.int8,
    )


def scaled_product(
    a, b, scale_a, scale_b, bias, zero_points, *, out_dtype, out_sharding, fast_accum=False, activation, **output
):
    """The product that the public functions describe, of a and b and vectors of zero points that they have checked."""
    out_dtype, vectors = checks.out_dtype(out_dtype), dict(zero_points)
    if out_dtype == jnp.int32:
        checks.raw_sums(a, scale_a, scale_b, zero_points, bias=bias, activation=activation, **output)
    else:
        vectors["scale_a"] = checks.along_rows("scale_a", checks.scale("scale_a", scale_a), a)
        vectors["scale_b"] = checks.along_columns("scale_b", checks.scale("scale_b", scale_b), b, scalar=True)
        if bias is not None:
            vectors["bias"] = checks.along_columns("bias", checks.array("bias", bias, checks.bias_dtypes(out_dtype)), b)
        vectors |= checks.output(out_dtype, **output)
    return scaled_mm_p.bind(
        *_compat.align_varying([a, b, *vectors.values()]),
        names=tuple(vectors),
        num_batch=0,
        activation=checks.activation(activation),
        out_dtype=out_dtype,
        fast_accum=fast_accum,
        out_sharding=_compat.canonicalize_out_sharding(out_sharding, "scaled_mm"),
    )


# The primitive: operands a, b and the vectors that `names` lists, of the form in `matmul_form`

scaled_mm_p = Primitive("scaled_mm")


def _labels(names):
    return [reference.LABELS[name] for name in ("a", "b", *names)]


# Abstract evaluation


def _abstract_eval(*operands, num_batch, out_dtype, out_sharding, **params):
    return matmul_form.abstract_result("scaled_mm", operands, num_batch, out_dtype, out_sharding)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(*operands, names, num_batch, out_dtype, fast_accum, activation, workspace):
    batch, rows, n, _ = matmul_form.sizes(operands, num_batch)
    result = jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), n), out_dtype)
    out, *_ = jax.ffi.ffi_call("jax_qmm_scaled_mm", dispatch.with_workspace(result, workspace))(
        *matmul_form.fold(operands, _labels(names), num_batch),
        names=" ".join(names),
        fast_accum=fast_accum,
        activation=activation.name,
        low=np.float32(activation.low),
        high=np.float32(activation.high),
    )
    return out.reshape(*batch, *rows, n)


def _reference(a, b, *vectors, names, fast_accum, **params):
    return reference.scaled_mm(a, b, **params, **dict(zip(names, vectors)))


def _unserved(platform, devices, operands, **params):
    return _extension.fallback_reason(platform, devices)


def _describe(operands, results, *, names, activation, **params):
    terms = [*names, *([] if activation == activations.NONE else [str(activation)])]
    return f"scaled_mm ({', '.join(terms) or 'sums'})", operands[:2]


def _workspace(devices, operands, **params):
    product = _product(operands, **params)
    return _extension.scaled_mm_workspace(devices, *product) if product else 0


def _choice(operands, results, **params):
    product = _product(operands, **params)
    return _extension.describe_scaled_mm(*product) if product else "kernel, chosen at run time: the shapes are symbolic"


def _product(operands, *, names, num_batch, out_dtype, fast_accum, activation):
    """What a kernel is chosen by; None where shapes are symbolic."""
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    sizes = math.prod(rows), n, k, math.prod(batch)
    if not all(isinstance(size, int) for size in sizes):
        return None
    full_epilogue = activation != activations.NONE or "azp_b" in names
    return *sizes, operands[0].dtype, out_dtype, fast_accum, full_epilogue


# Batching


def _batch(operands, dims, *, names, num_batch, out_sharding, **params):
    operands, num_batch, out_sharding, at = matmul_form.batch_operands(
        operands, dims, _labels(names), num_batch, out_sharding
    )
    return scaled_mm_p.bind(*operands, names=names, num_batch=num_batch, out_sharding=out_sharding, **params), at


# Differentiation


def _jvp(primals, tangents, *, names, num_batch, activation, out_dtype, fast_accum, out_sharding):
    """By scale_a, scale_b and bias; a and b are constants, fp8 too, and 8-bit results have no derivative."""
    params = {"num_batch": num_batch, "fast_accum": fast_accum, "out_sharding": out_sharding}
    out = scaled_mm_p.bind(*primals, names=names, activation=activation, out_dtype=out_dtype, **params)
    spread = lambda x, name: reference.along_output(x, name, out.ndim, num_batch).astype(jnp.float32)
    moving = {name: t for name, t in zip(names, tangents[2:]) if not isinstance(t, ad.Zero) and t.dtype != float0}
    if not moving:
        return out, _compat.zero_tangent(out)
    if out_dtype in QTYPES:
        raise TypeError(
            f"scaled_mm with out_dtype {out_dtype} has no derivative, and {', '.join(moving)} would need one; where no "
            "gradient is wanted, pass jax.lax.stop_gradient of them"
        )
    moving = {name: spread(t, name) for name, t in moving.items()}
    terms, y = [moving["bias"]] if "bias" in moving else [], None
    if activation != activations.NONE or "scale_a" in moving or "scale_b" in moving:
        vectors = dict(zip(names, primals[2:]))
        acc = scaled_mm_p.bind(
            *primals[:2], names=(), activation=activations.NONE, out_dtype=_sum_dtype(primals[0]), **params
        )
        acc = reference.subtract_zero_points(acc, num_batch, vectors).astype(jnp.float32)
        scale_a, scale_b = (spread(vectors[name], name) if name in vectors else 1.0 for name in ("scale_a", "scale_b"))
        terms += [moving["scale_a"] * (acc * scale_b)] if "scale_a" in moving else []
        terms += [moving["scale_b"] * (acc * scale_a)] if "scale_b" in moving else []
        if activation != activations.NONE:
            y = scale_a * (scale_b * acc) + (spread(vectors["bias"], "bias") if "bias" in vectors else 0.0)
    tangent = jnp.broadcast_to(sum(terms[1:], start=terms[0]), out.shape)
    return out, activations.tangent(y, tangent, activation).astype(out_dtype)


def _sum_dtype(a):
    return jnp.dtype(jnp.int32 if a.dtype == jnp.int8 else jnp.float32)


# Sharding


def _partitioned(run, shapes, *, names, num_batch, fast_accum, **output):
    operands, result = matmul_form.factors(shapes, _labels(names), num_batch)
    local = functools.partial(run, OP, num_batch=num_batch, fast_accum=fast_accum)

    def across(axes):
        def sum_over_k(a, b, *vectors):
            acc = local(a, b, names=(), activation=activations.NONE, out_dtype=_sum_dtype(a))
            vectors = dict(zip(names, vectors))
            return reference.epilogue(jax.lax.psum(acc, axes), num_batch=num_batch, **output, **vectors)

        return sum_over_k

    whole = functools.partial(local, names=names, **output)
    return partitioned(whole, operands, [result], shapes, names=("a", "b", *names), over=("k",), across=across)


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
    workspace=_workspace,
)
dispatch.register(scaled_mm_p, OP)
scaled_mm_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[scaled_mm_p] = _batch
ad.primitive_jvps[scaled_mm_p] = _jvp
