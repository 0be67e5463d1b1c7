"""Products of int8 and of int4 that a kernel makes int8 on the way to the tensor cores."""

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
from jax_qmm.reference.scaled_mm import epilogue

COLUMNS = 32  # K and blocks are multiples of it


def serves_blocks(k: int, block: int) -> bool:
    """Whether kernels serve k columns in such blocks."""
    return k % COLUMNS == 0 and (block % COLUMNS == 0 or block >= k)


def expanded_mm(
    x, w, multiple, zero_point=None, *, num_batch=0, block, out_dtype=jnp.int32, out_sharding=None, **vectors
):
    """`reference.expanded_mm`, by a kernel where there is one."""
    optional = {"zero_point": zero_point, **vectors}
    optional = {name: leaf for name, leaf in optional.items() if leaf is not None}
    return expanded_mm_p.bind(
        *_compat.align_varying([x, w, multiple, *optional.values()]),
        names=tuple(optional),
        num_batch=num_batch,
        block=block,
        out_dtype=jnp.dtype(out_dtype),
        out_sharding=out_sharding,
    )


# The primitive: operands x, w, multiple and those that `names` lists, of the form in `matmul_form`

expanded_mm_p = Primitive("expanded_mm")
_SUMMED = ("zero_point",)  # belongs to the sums; the others to what becomes of them


def _labels(names):
    return [reference.LABELS[name] for name in ("x", "w", "multiple", *names)]


# Abstract evaluation


def _abstract_eval(*operands, num_batch, out_dtype, out_sharding, **params):
    return matmul_form.abstract_result("expanded_mm", operands, num_batch, out_dtype, out_sharding)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(*operands, names, num_batch, block, out_dtype, workspace):
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    result = jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), n), out_dtype)
    out, *_ = jax.ffi.ffi_call("jax_qmm_expanded_mm", dispatch.with_workspace(result, workspace))(
        *matmul_form.fold(operands, _labels(names), num_batch),
        block=np.int32(_whole(block, k)),
        names=" ".join(names),
    )
    return out.reshape(*batch, *rows, n)


def _reference(x, w, multiple, *optional, names, **params):
    return reference.expanded_mm(x, w, multiple, **dict(zip(names, optional)), **params)


def _unserved(platform, devices, operands, *, num_batch, block, **params):
    *_, k = matmul_form.sizes(operands, num_batch)
    if why := _extension.fallback_reason(platform, devices):
        return why
    if serves_blocks(k, block):
        return None
    return f"K is {k} and blocks have {block} columns; the kernel serves multiples of {COLUMNS}"


def _describe(operands, results, *, names, block, **params):
    return f"expanded_mm ({', '.join([f'blocks of {block}', *names])})", operands[:2]


def _workspace(devices, operands, **params):
    product = _product(operands, **params)
    return _extension.expanded_mm_workspace(devices, product) if product else 0


def _choice(operands, results, **params):
    product = _product(operands, **params)
    if product is None:
        return "kernel, chosen at run time: the shapes are symbolic"
    return _extension.describe_expanded_mm(product)


def _product(operands, *, num_batch, block, out_dtype, **params):
    """What `ExpandedMmProblem` is made of; None where shapes are symbolic."""
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    sizes = math.prod(rows), n, k, math.prod(batch)
    return (*sizes, str(out_dtype), _whole(block, k)) if all(isinstance(size, int) for size in sizes) else None


def _whole(block, k):
    """The columns of a block as kernels take them, who know no block that is longer than K."""
    return max(COLUMNS, k) if block >= k else block


# Batching


def _batch(operands, dims, *, names, num_batch, out_sharding, **params):
    operands, num_batch, out_sharding, at = matmul_form.batch_operands(
        operands, dims, _labels(names), num_batch, out_sharding
    )
    return expanded_mm_p.bind(*operands, names=names, num_batch=num_batch, out_sharding=out_sharding, **params), at


# Sharding


def _partitioned(run, shapes, *, names, num_batch, block, out_dtype):
    operands, result = matmul_form.factors(shapes, _labels(names), num_batch)
    local = functools.partial(run, OP, num_batch=num_batch, block=block)
    whole = functools.partial(local, names=names, out_dtype=out_dtype)

    def across(axes):
        def sum_over_k(*operands):
            optional = dict(zip(names, operands[3:]))
            summed = {name: optional.pop(name) for name in _SUMMED if name in optional}
            sums = local(*operands[:3], *summed.values(), names=tuple(summed), out_dtype=jnp.dtype(jnp.int32))
            return epilogue(jax.lax.psum(sums, axes), num_batch=num_batch, out_dtype=out_dtype, **optional)

        return sum_over_k

    k, groups = shapes[0][-1], shapes[2][-1]
    size = COLUMNS if groups == 1 else block
    units = {"k": k // size if k % size == 0 else 1}
    sides = ("x", "w", "multiple", *names)
    return partitioned(whole, operands, [result], shapes, names=sides, over=("k",), across=across, units=units)


# Registration

OP = dispatch.Op(
    name="expanded_mm",
    targets=("jax_qmm_expanded_mm",),
    kernel=_kernel,
    reference=_reference,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
    workspace=_workspace,
)
dispatch.register(expanded_mm_p, OP)
expanded_mm_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[expanded_mm_p] = _batch
