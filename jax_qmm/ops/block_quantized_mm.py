"""block_scaled_mm of two QArrays: int8 or fp8 operands that both have scales for blocks of columns."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_qmm import _compat, _extension
from jax_qmm.dtypes import QTYPES
from jax_qmm.ops import dispatch, matmul_form
from jax_qmm.ops.product import transposed
from jax_qmm.ops.sharding import partitioned
from jax_qmm.reference import activation as activations, block_quantized_mm as reference
from jax_qmm.reference.quantize import spread

# What the public function, ops/block_scaled_mm.py, does with two QArrays


def block_quantized_mm(x, w, bias, **params):
    """The product of the QArrays x and w of shapes that fit, and a bias that was checked."""
    for name, q in (("x", x), ("w", w)):
        if q.qtype not in QTYPES:
            raise TypeError(f"{name} has values of {q.qtype}; beside a QArray it needs int8 or float8_e4m3fn")
        if q.is_packed:
            raise ValueError(f"{name} is {q}; it needs to be plain, as products of two QArrays read it: its .unpack()")
        if q.merged_axes:
            raise ValueError(f"{name} is {q}; it needs each axis apart in memory")
    if x.qtype != w.qtype:
        raise TypeError(f"x has values of {x.qtype} and w of {w.qtype}; they need the same")
    if x.zero_point is not None and jnp.issubdtype(x.zero_point.dtype, jnp.floating):
        raise TypeError(f"x has zero points of {x.zero_point.dtype}; it needs int32 ones")
    return product_in_blocks(in_blocks(x), in_blocks(w), bias, num_batch=0, **params)


class InBlocks(NamedTuple):
    """One side of a product."""

    values: Any  # (*batch, *rows, K) or (*batch, N, K)
    scale: Any  # (*batch, *rows, G) or (*batch, N, G)
    zero_point: Any  # likewise, or None
    sums: Any  # of the values over each block, likewise, or None where they are not known
    block: int  # columns that share a scale
    shared: int = 1  # rows after one another, from the first on, that share theirs

    @property
    def count(self):
        """G."""
        return self.scale.shape[-1]


def in_blocks(q, contracted=1):
    """A QArray `(..., *K)` with its leaves in logical order, a scale for each row, and all that is contracted in one.

    Args:
      q: of one scale for all of K, or blocks that lie within the last of its axes.
      contracted: how many axes K has.
    """
    axes, first = q.storage_axes(), q.ndim - contracted
    rows, whole = q.shape[:first], q.shape[first:]
    counts = [q.scale.shape[axis] for axis in axes]
    one_block = all(count == 1 for count in counts[first:])

    def of_rows(leaf):
        leaf = transposed(leaf, axes)
        for axis in range(first):
            if leaf.shape[axis] != rows[axis]:  # several rows share a scale
                leaf = spread(leaf, q.tile_along(axes[axis]), rows[axis], axis)
        blocks = (*leaf.shape[first:-1],) if one_block else whole[:-1]
        leaf = jnp.broadcast_to(leaf, (*rows, *blocks, leaf.shape[-1]))
        return leaf.reshape(*rows, math.prod(leaf.shape[first:]))

    tile = q.tile_along(axes[first - 1]) if first else 1
    # Sums are those of one row each, or they are computed anew.
    known = q.azp_adj is not None and q.azp_adj.shape == q.scale.shape and counts[:first] == [*rows]
    leaves = (None if leaf is None else of_rows(leaf) for leaf in (q.scale, q.zero_point, q.azp_adj if known else None))
    values = transposed(q.qvalue, axes).reshape(*rows, math.prod(whole))
    block = max(1, math.prod(whole)) if one_block else q.tile_along(axes[-1])
    return InBlocks(values, *leaves, block, tile if first and rows[-1] % tile == 0 else 1)


def product_in_blocks(x: InBlocks, w: InBlocks, bias, **params):
    """The product of two sides; of different blocks one side needs a single one."""
    x, w = _with_blocks_of(x, w), _with_blocks_of(w, x)
    if x.block != w.block or x.count != w.count:
        raise ValueError(
            f"x has scales for blocks of {x.block} columns and w of {w.block}; they need the same blocks, or one of "
            "them a scale for all columns"
        )
    vectors = {"scale_a": x.scale, "scale_b": w.scale, "zero_point_a": x.zero_point, "zero_point_b": w.zero_point}
    vectors["sums_a"] = None if w.zero_point is None else x.sums
    vectors["sums_b"] = None if x.zero_point is None else w.sums
    vectors["bias"] = bias
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    operands = _compat.align_varying([x.values, w.values, *vectors.values()])
    params |= {"block": x.block, "shared_b": w.shared}
    return block_quantized_mm_p.bind(*operands, names=tuple(vectors), **params)


def _with_blocks_of(side, other):
    """A side with one block of columns in as many as the other has."""
    count = other.count
    if side.count != 1 or count == 1:
        return side
    scale, zero_point = (None if leaf is None else spread(leaf, count, count) for leaf in (side.scale, side.zero_point))
    return side._replace(scale=scale, zero_point=zero_point, sums=None, block=other.block)


# The primitive: operands a, b and the vectors that `names` lists, of the form in `matmul_form`

block_quantized_mm_p = Primitive("block_quantized_mm")


def _labels(names):
    return [reference.LABELS[name] for name in ("a", "b", *names)]


# Abstract evaluation


def _abstract_eval(*operands, num_batch, out_dtype, out_sharding, **params):
    return matmul_form.abstract_result("block_scaled_mm", operands, num_batch, out_dtype, out_sharding)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(*operands, names, num_batch, block, shared_b, activation, out_dtype):
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    a, b, *vectors = operands
    vectors = dict(zip(names, vectors))
    bias = vectors.pop("bias", None)
    scales = {name: vectors.pop(name) for name in ("scale_a", "scale_b")}
    vectors = scales | reference.zero_point_terms(a, b, block, **vectors)
    vectors = {name: vector.astype(jnp.float32) for name, vector in vectors.items()}  # integers are below 2^24
    vectors |= {} if bias is None else {"bias": bias}
    if _shares(n, shared_b):
        *outer, _, groups = vectors["scale_b"].shape
        # Of what `in_blocks` spread, XLA leaves nothing to do; of a slice with a stride it makes a kernel at each call.
        vectors["scale_b"] = vectors["scale_b"].reshape(*outer, n // _SHARED, _SHARED, groups)[..., 0, :]
    names = tuple(vectors)
    if k % _ALIGNED:
        a, b = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _padded(k) - k)]) for x in (a, b))
    kernel_block: Any = np.int32(_kernel_block(block, k) or 0)  # `_unserved` has refused those without one
    result = jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), n), out_dtype)
    out = jax.ffi.ffi_call("jax_qmm_block_quantized_mm", result)(
        *matmul_form.fold([a, b, *vectors.values()], _labels(names), num_batch),
        block=kernel_block,
        names=" ".join(names),
        activation=activation.name,
        low=np.float32(activation.low),
        high=np.float32(activation.high),
    )
    return out.reshape(*batch, *rows, n)


_ALIGNED, _PADDED = 4, 16  # columns: kernels copy 4 bytes at least, and 16 at once
_BLOCKS = (32, 64, 128, 256)
_SHARED = 128  # rows of b whose scales kernels take as one
OLDEST = 80  # compute capability 8.0, the first that they were tested for


def _kernel_block(block, k):
    """The block as kernels have it: a single one may be shorter; None where none of theirs is as long."""
    return next((size for size in _BLOCKS if size == block or block >= k and size >= k), None)


def _shares(n, shared_b):
    """Whether kernels get one scale for 128 rows of b: where a device's rows begin and end with those that share it."""
    return n % _SHARED == 0 and shared_b % _SHARED == 0


def _reference(a, b, *vectors, names, shared_b, **params):
    return reference.block_quantized_mm(a, b, **dict(zip(names, vectors)), **params)


def _unserved(platform, devices, operands, *, num_batch, block, **params):
    *_, k = matmul_form.sizes(operands, num_batch)
    if why := _extension.fallback_reason(platform, devices, OLDEST):
        return why
    if not isinstance(k, int):
        return "K is symbolic"
    return unserved_blocks(block, k)


def unserved_blocks(block: int, k: int) -> str | None:
    """Why kernels don't serve k columns in such blocks; None where they do."""
    if _kernel_block(block, k) is None:
        return f"blocks have {block} columns; kernels serve {', '.join(map(str, _BLOCKS))}"
    return None


def _describe(operands, results, *, names, block, activation, **params):
    shown = [name for name in names if not name.startswith(("scale", "sums"))]
    terms = [*shown, *([] if activation == activations.NONE else [str(activation)])]
    return f"block_scaled_mm ({', '.join([f'blocks of {block}', *terms])})", operands[:2]


def _choice(operands, results, **params):
    *_, k = matmul_form.sizes(operands, params["num_batch"])
    product = _product(operands, **params)
    if product is None:
        kernel = "kernel, chosen at run time: the shapes are symbolic"
    else:
        kernel = _extension.describe_block_quantized_mm(product)
    return f"{kernel}, K padded to {_padded(k)} at each call" if k % _ALIGNED else kernel


def _product(operands, *, names, num_batch, block, shared_b, out_dtype, **params):
    """What `BlockQuantizedMmProblem` is made of; None where shapes are symbolic."""
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    m, count = math.prod(rows), math.prod(batch)
    if not all(isinstance(size, int) for size in (m, n, count)):
        return None
    zero_points = "".join(side for side in "ab" if f"zero_point_{side}" in names)
    sizes = m, n, _padded(k) if k % _ALIGNED else k, count
    kernel = _kernel_block(block, k), zero_points, _shares(n, shared_b)
    return *sizes, str(operands[1].dtype), str(out_dtype), *kernel


def _padded(k):
    return -(-k // _PADDED) * _PADDED


# Batching


def _batch(operands, dims, *, names, num_batch, out_sharding, **params):
    operands, num_batch, out_sharding, at = matmul_form.batch_operands(
        operands, dims, _labels(names), num_batch, out_sharding
    )
    out = block_quantized_mm_p.bind(*operands, names=names, num_batch=num_batch, out_sharding=out_sharding, **params)
    return out, at


# Differentiation


def _jvp(primals, tangents, *, names, shared_b, activation, out_dtype, **params):
    """By the scales, float zero points and bias, as of a product of the dequantized operands."""
    product = functools.partial(block_quantized_mm_p.bind, *primals, names=names, shared_b=shared_b, **params)
    values, vectors = primals[:2], dict(zip(names, primals[2:]))
    moving = {
        name: tangent
        for name, tangent in zip(names, tangents[2:])
        if not isinstance(tangent, ad.Zero) and tangent.dtype != float0
    }
    out, y = matmul_form.result_and_argument(product, moving, activation, out_dtype)
    if not moving:
        return out, _compat.zero_tangent(out)
    at = {name: vectors[name] for name in moving}
    linear = lambda at: reference.linear(*values, **{**vectors, **at}, **params)
    _, tangent = jax.jvp(linear, (at,), (moving,))
    if y is not None:
        tangent = activations.tangent(y, tangent, activation)
    return out, tangent.astype(out_dtype)


# Sharding


def _partitioned(run, shapes, *, names, num_batch, block, activation, out_dtype, **params):
    operands, result = matmul_form.factors(shapes, _labels(names), num_batch)
    local = functools.partial(run, OP, num_batch=num_batch, block=block, **params)

    output = {"activation": activation, "out_dtype": out_dtype}
    whole, across = matmul_form.whole_and_across(local, names, num_batch=num_batch, **output)
    k = shapes[0][-1]
    units = {"k": k // block if k % block == 0 else 1}
    sides = ("x", "w", *names)
    return partitioned(whole, operands, [result], shapes, names=sides, over=("k",), across=across, units=units)


# Registration

OP = dispatch.Op(
    name="block_scaled_mm",
    targets=("jax_qmm_block_quantized_mm",),
    kernel=_kernel,
    reference=_reference,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
)
dispatch.register(block_quantized_mm_p, OP)
block_quantized_mm_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[block_quantized_mm_p] = _batch
ad.primitive_jvps[block_quantized_mm_p] = _jvp
