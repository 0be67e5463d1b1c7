"""The int32 sums of int8 and of int4 that a kernel makes int8 on the way to the tensor cores."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_qmm import _compat, _extension
from jax_qmm.ops import dispatch, matmul_form
from jax_qmm.ops.sharding import partitioned
from jax_qmm.reference import expanded_mm as reference

MOST_ROWS = 64  # of x; with more of them, w rather becomes int8 once
COLUMNS = 32  # K and blocks are multiples of it


def is_faster(m: int, k: int, block: int) -> bool:
    """Whether m rows of x, k columns and such blocks are for the kernel, rather than for a product of int8."""
    return m <= MOST_ROWS and k % COLUMNS == 0 and (block % COLUMNS == 0 or block >= k)


def expanded_mm(x, w, multiple, zero_point, *, num_batch, block, out_sharding=None):
    """`reference.expanded_mm`, by a kernel where there is one."""
    leaves = [x, w, multiple, *([] if zero_point is None else [zero_point])]
    params = dict(num_batch=num_batch, block=block, out_sharding=out_sharding)
    return expanded_mm_p.bind(*_compat.align_varying(leaves), **params)


# The primitive: operands x, w, multiple and maybe zero_point, of the form in `matmul_form`

expanded_mm_p = Primitive("expanded_mm")
_LABELS = tuple(reference.LABELS.values())


def _labels(operands):
    return _LABELS[: len(operands)]


# Abstract evaluation


def _abstract_eval(*operands, num_batch, block, out_sharding):
    return matmul_form.abstract_result("expanded_mm", operands, num_batch, jnp.dtype(jnp.int32), out_sharding)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(*operands, num_batch, block):
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    result = jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), n), jnp.int32)
    out = jax.ffi.ffi_call("jax_qmm_expanded_mm", result)(
        *matmul_form.fold(operands, _labels(operands), num_batch),
        block=np.int32(max(COLUMNS, k) if block >= k else block),
    )
    return out.reshape(*batch, *rows, n)


def _unserved(platform, devices, operands, *, num_batch, block):
    *_, k = matmul_form.sizes(operands, num_batch)
    if why := _extension.fallback_reason(platform, devices):
        return why
    if is_faster(0, k, block):
        return None
    return f"K is {k} and blocks have {block} columns; the kernel serves multiples of {COLUMNS}"


def _describe(operands, results, *, num_batch, block):
    zero_point = ", zero_point" if len(operands) == 4 else ""
    return f"expanded_mm (blocks of {block}{zero_point})", operands[:2]


def _choice(operands, results, *, num_batch, block):
    return "kernel, int8 made of int4 in registers"


# Batching


def _batch(operands, dims, *, num_batch, block, out_sharding):
    operands, num_batch, out_sharding, at = matmul_form.batch_operands(
        operands, dims, _labels(operands), num_batch, out_sharding
    )
    return expanded_mm_p.bind(*operands, num_batch=num_batch, block=block, out_sharding=out_sharding), at


# Sharding


def _partitioned(run, shapes, *, num_batch, block):
    operands, result = matmul_form.factors(shapes, _LABELS[: len(shapes)], num_batch)
    local = functools.partial(run, OP, num_batch=num_batch, block=block)
    across = lambda axes: lambda *operands: jax.lax.psum(local(*operands), axes)
    k, groups = shapes[0][-1], shapes[2][-1]
    size = COLUMNS if groups == 1 else block
    units = {"k": k // size if k % size == 0 else 1}
    return partitioned(
        local, operands, [result], shapes, names=[*reference.LABELS], over=("k",), across=across, units=units
    )


# Registration

OP = dispatch.Op(
    name="expanded_mm",
    targets=("jax_qmm_expanded_mm",),
    kernel=_kernel,
    reference=reference.expanded_mm,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
)
dispatch.register(expanded_mm_p, OP)
expanded_mm_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[expanded_mm_p] = _batch
