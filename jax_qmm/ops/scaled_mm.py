"""Matrix products of int8 and fp8 with scales, zero points and bias applied to the sums in one kernel."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from jax_qmm import _compat, reference
from jax_qmm.ops import checks
from jax_qmm.ops.partitioning import even_spec, mesh_axes, named_sharding, register_lowerings, without_mesh
from jax_qmm.reference import is_one

# Public functions


def scaled_mm(a, b, scale_a, scale_b, bias=None, *, out_dtype=jnp.bfloat16, precision=None, out_sharding=None):
    """Computes `scale_a * scale_b * (a @ b.T) + bias`.

    int8 products are summed exactly in int32, fp8 products in float32 or less (see `precision`). The rest is
    float32, `fma(scale_a, scale_b * sums, bias)`, rounded once to `out_dtype`.

    Differentiable by the scales and the bias; a and b are constants to differentiation.

    Sharded over M or N there is no communication. Sharded over K on either side, each device sums its part
    and one all-reduce of the sums comes before the scales. Where one mesh axis shards a and b in dimensions
    that don't go together, the operand that has it on K is gathered (of M and N, the one that the result is
    not sharded by), as is what is sharded over the automatic axes inside a partly manual `jax.shard_map`, and
    a dimension that its mesh axes don't divide.

    Args:
      a: `(..., M, K)`, int8 or float8_e4m3fn.
      b: `(N, K)`, of the same dtype. Batched only through `jax.vmap`.
      scale_a: float32, bfloat16 or float16. Per tensor: `()`, or 1 in every dimension of a. Per row of a:
        `(..., M)` or `(..., M, 1)`; which one is meant follows from the rank.
      scale_b: likewise `()` or `(1, 1)` per tensor, `(N,)` or `(1, N)` per column of the result.
      bias: `(N,)`, float32 or `out_dtype`, or None.
      out_dtype: bfloat16, float16, float32, or int32 for the sums of int8 products; the scales are then the
        constant 1.0.
      precision: of fp8 sums; int8 is always exact. Hopper's wgmma instructions keep about 14 bits of a sum. By
        default that holds for all of K; `jax.lax.Precision.HIGHEST` starts a new sum every 128 products and
        adds these sums in float32.
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


def scaled_mm_azp(a, b, scale_a, scale_b, azp_with_adj, bias=None, *, out_dtype=jnp.bfloat16, out_sharding=None):
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
    a, b = checks.matrices(a, b, checks.INT8)
    adj = checks.along_columns("azp_with_adj", checks.array("azp_with_adj", azp_with_adj, checks.INT32), b)
    return _scaled(a, b, scale_a, scale_b, bias, checks.out_dtype(out_dtype), out_sharding, azp_adj=adj)


def scaled_mm_azp_per_token(
    a, b, scale_a, scale_b, azp_adj, azp, bias=None, *, out_dtype=jnp.bfloat16, out_sharding=None
):
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
    a, b = checks.matrices(a, b, checks.INT8)
    adj = checks.along_columns("azp_adj", checks.array("azp_adj", azp_adj, checks.INT32), b)
    azp = checks.along_rows("azp", checks.array("azp", azp, checks.INT32), a)
    out_dtype = checks.out_dtype(out_dtype)
    return _scaled(a, b, scale_a, scale_b, bias, out_dtype, out_sharding, azp_adj=adj, azp=azp)


def azp_adjustment(b):
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
    b = checks.array("b", b, checks.INT8)
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


# The primitive
#
# Operands: a (*B, *R, K), b (*B, N, K) and the vectors that `names` lists, out of scale_a and azp (*B, *R)
# or with 1 for all of R, and scale_b, bias and azp_adj (*B, N) or (*B, 1). B are the first `num_batch`
# dimensions; any operand may have 1 for any of them. The result is (*B, *R, N). R stays unfolded until the
# operands are one device's part, because each of its dimensions can be sharded.

scaled_mm_p = Primitive("scaled_mm")

_ROW_VECTORS = ("scale_a", "azp")


# Abstract evaluation


def _batch_shape(shapes, num_batch):
    return tuple(next((s[i] for s in shapes if not is_one(s[i])), 1) for i in range(num_batch))


def _abstract_eval(a, b, *vectors, names, num_batch, out_dtype, fast_accum, out_sharding):
    del names, fast_accum
    batch = _batch_shape([x.shape for x in (a, b, *vectors)], num_batch)
    shape = (*batch, *a.shape[num_batch:-1], b.shape[-2])
    if not _compat.explicit_mesh(a):
        return a.update(shape=shape, dtype=out_dtype)
    spec = out_sharding.spec if out_sharding else _explicit_spec(a.sharding.spec, b.sharding.spec, num_batch)
    return a.update(shape=shape, dtype=out_dtype, sharding=a.sharding.update(spec=spec))


def _explicit_spec(a, b, num_batch):
    if a[-1] is not None and b[-1] is not None:
        raise _compat.ShardingTypeError(
            f"scaled_mm: K is sharded in a ({a}) and in b ({b}), so it is ambiguous how the result is; pass "
            "out_sharding to say so"
        )
    batch = [x if x is not None else y for x, y in zip(a[:num_batch], b[:num_batch])]
    spec = [*batch, *a[num_batch:-1], b[-2]]
    axes = [axis for entry in spec for axis in mesh_axes(entry)]
    if len(axes) != len(set(axes)):
        raise _compat.ShardingTypeError(
            f"scaled_mm: with a sharded as {a} and b as {b}, the result would be sharded twice over one mesh "
            "axis; reshard one of them or pass out_sharding"
        )
    return PartitionSpec(*spec)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _call_kernel(a, b, *vectors, names, num_batch, out_dtype, fast_accum):
    batch = _batch_shape([x.shape for x in (a, b, *vectors)], num_batch)
    rows, n = a.shape[num_batch:-1], b.shape[-2]

    def fold(x, *tail):  # B to one dimension, 1 or all of it; the rest to `tail`
        if not all(is_one(size) for size in x.shape[:num_batch]):
            x = jnp.broadcast_to(x, (*batch, *x.shape[num_batch:]))
        return x.reshape(math.prod(x.shape[:num_batch]), *tail)

    k, m = a.shape[-1], math.prod(rows)
    result = jax.ShapeDtypeStruct((math.prod(batch), m, n), out_dtype)
    out = jax.ffi.ffi_call("jax_qmm_scaled_mm", result)(
        fold(a, m, k),
        fold(b, n, k),
        *(fold(x, math.prod(x.shape[num_batch:])) for x in vectors),
        names=" ".join(names),
        fast_accum=fast_accum,
    )
    return out.reshape(*batch, *rows, n)


def _call_reference(a, b, *vectors, names, num_batch, out_dtype, fast_accum):
    del fast_accum
    return reference.scaled_mm(a, b, num_batch=num_batch, out_dtype=out_dtype, **dict(zip(names, vectors)))


# Batching


def _batch(operands, dims, *, names, num_batch, out_sharding, **params):
    in_rows = [True, False, *(name in _ROW_VECTORS for name in names)]
    fold = dims[0] is not None and all(in_row for dim, in_row in zip(dims, in_rows) if dim is not None)
    at = num_batch if fold else 0  # where only rows are batched, the batch becomes one more dimension of them
    operands = [
        x if fold and not in_row else jnp.expand_dims(x, at) if dim is None else jnp.moveaxis(x, dim, at)
        for x, dim, in_row in zip(operands, dims, in_rows)
    ]
    if fold:
        rows = operands[0].shape[num_batch:-1]
        for i, name in enumerate(names, start=2):
            batch, own = operands[i].shape[:num_batch], operands[i].shape[num_batch:]
            if name in _ROW_VECTORS and not all(map(is_one, own)):
                operands[i] = jnp.broadcast_to(operands[i], (*batch, *rows))
    else:
        num_batch += 1
    if out_sharding is not None:
        entry = next(jax.typeof(x).sharding.spec[at] for x, dim in zip(operands, dims) if dim is not None)
        spec = out_sharding.spec
        out_sharding = out_sharding.update(spec=PartitionSpec(*spec[:at], entry, *spec[at:]))
    params |= {"names": names, "num_batch": num_batch, "out_sharding": out_sharding}
    return scaled_mm_p.bind(*operands, **params), at


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


def _factors(shapes, names, num_batch):
    """Names each dimension of the operands and the result; dimensions of one name are sharded alike."""
    batch = [f"b{i}" for i in range(num_batch)]
    rows = [f"r{i}" for i in range(len(shapes[0]) - num_batch - 1)]
    factors = [[*batch, *rows, "k"], [*batch, "n", "k"]]
    factors += [[*batch, *rows] if name in _ROW_VECTORS else [*batch, "n"] for name in names]
    return factors, [*batch, *rows, "n"]


def _partitioned(local, shapes):
    """`local` on operands that are sharded over several devices."""
    params = local.keywords
    factors, out_factors = _factors(shapes, params["names"], params["num_batch"])
    ones = (f"one{i}" for i in itertools.count())  # a dimension of 1 does not share its factor's sharding
    operands = [
        [next(ones) if is_one(size) else factor for size, factor in zip(shape, operand)]
        for shape, operand in zip(shapes, factors)
    ]
    known = {factor for operand in operands for factor in operand}
    results = [factor if factor in known else next(ones) for factor in out_factors]
    rule = f"{', '.join(map(' '.join, operands))} -> {' '.join(results)}"

    def partition(mesh, args, result):
        axes = _assign(operands, [even_spec(mesh, x) for x in args], results, even_spec(mesh, result))

        def sharding(dims):
            return named_sharding(mesh, [axes.get(dim) for dim in dims])

        def sum_over_k(*parts):
            raw = {"names": (), "out_dtype": _sum_dtype(parts[0])}
            acc = jax.lax.psum(functools.partial(local, **raw)(*parts[:2]), axes["k"])
            return reference.epilogue(
                acc,
                num_batch=params["num_batch"],
                out_dtype=params["out_dtype"],
                **dict(zip(params["names"], parts[2:])),
            )

        lower = without_mesh(sum_over_k if axes.get("k") else local)
        return mesh, lower, sharding(results), tuple(map(sharding, operands))

    wrapped = custom_partitioning(lambda *operands: local(*operands))
    wrapped.def_partition(partition=partition, sharding_rule=rule)
    return wrapped


def _assign(operands, specs, results, result_spec):
    """The mesh axes of each factor: no axis twice, what the result has first, K last."""
    found = {}
    for dims, spec in zip(operands, specs):
        for dim, axes in zip(dims, spec):
            if axes and not dim.startswith("one"):
                found.setdefault(dim, axes)
    wanted = dict(zip(results, result_spec))
    order = sorted((f for f in found if f != "k"), key=lambda f: wanted.get(f) != found[f])
    taken, assigned = set(), {}
    for factor in [*order, "k"]:
        axes = found.get(factor, ())
        if not taken & set(axes):
            assigned[factor] = axes
            taken |= set(axes)
    return assigned


# Registration

_compat.define_impl(scaled_mm_p)
scaled_mm_p.def_abstract_eval(_abstract_eval)
register_lowerings(scaled_mm_p, "scaled_mm", _call_kernel, _call_reference, _partitioned)
batching.primitive_batchers[scaled_mm_p] = _batch
ad.primitive_jvps[scaled_mm_p] = _jvp
