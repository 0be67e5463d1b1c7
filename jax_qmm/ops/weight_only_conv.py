"""Convolutions of a float lhs with weights of 4 or 8 bits, whose scales may belong to blocks of channels and to taps.

A window of one value is a product, which `block_scaled_mm` computes. Of all others, a kernel computes those of few
pixels, for which reading the weights takes most of the time; for many pixels the weights are dequantized to the dtype
of lhs at each call, and XLA convolves in it. A cost model decides.

Weights that are no matrix of outputs by taps and channels, and windows that the kernel has not, are XLA's always. The
jaxpr has a jit of the name `DEQUANTIZED_CONV` there, so that `explain` can tell.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from jax_qmm import _compat, _extension
from jax_qmm.ops import dispatch
from jax_qmm.ops.block_scaled_mm import (
    OLDEST,
    block_scaled_mm,
    dequantized_by_kernel,
    jvp_of,
    packed_leaves,
    unserved_blocks,
    weight_kind,
)
from jax_qmm.ops.product import transposed
from jax_qmm.ops.sharding import partitioned
from jax_qmm.ops.weight_only_dot import is_weight_only as is_weight_only  # which weights they are
from jax_qmm.reference import activation as activations, block_scaled_mm as products, packing

DEQUANTIZED_CONV = "jax_qmm_dequantized_conv"


def conv(form, lhs, rhs, bias, activation, out_dtype, precision):
    """`activation(conv(lhs, rhs.dequantize()) + bias)` of operands that were checked, in the user's order."""
    taps = [rhs.shape[axis] for axis in form.taps_of]
    if form.window.is_product(taps) and form.batch_groups == 1 and not _packed_elsewhere(form, rhs):
        out, *_, channels = form.rhs_order
        w = rhs.transpose(form.rhs_order).reshape(rhs.shape[out], rhs.shape[channels])
        bias = None if bias is None else bias.astype(jnp.float32)
        x = transposed(lhs, form.lhs_order)
        return form.out(block_scaled_mm(x, w, bias, activation=_as_given(activation), out_dtype=out_dtype))
    if form.batch_groups > 1 or form.window.groups > 1 or any(by != 1 for by in form.window.lhs_dilation):
        weights = None
    else:
        weights = _matrix(form, rhs)
    if weights is None:
        return jax_qmm_dequantized_conv(form, activation, out_dtype, precision, lhs, rhs, bias)
    w, vectors, block = weights
    vectors |= {} if bias is None else {"bias": bias}
    operands = _compat.align_varying([transposed(lhs, form.lhs_order), w, *vectors.values()])
    out = weight_only_conv_p.bind(
        *operands,
        names=tuple(vectors),
        window=form.window,
        taps=tuple(taps),
        qtype=rhs.qtype,
        packed=rhs.is_packed,
        block=block,
        activation=activation,
        out_dtype=out_dtype,
        precision=precision,
    )
    return form.out(out)


def _packed_elsewhere(form, rhs):
    """Whether rhs is packed along another axis than its input channels."""
    return rhs.is_packed and rhs.storage_axes()[form.numbers.rhs_spec[1]] != rhs.ndim - 1


def _as_given(activation):
    return (activation.low, activation.high) if activation.name == "clamp" else _NAMES[activation]


_NAMES = {activations.NONE: None, activations.NAMED["gelu"]: "gelu", activations.NAMED["silu"]: "silu"}


def _matrix(form, rhs):
    """rhs as a matrix of outputs by taps and channels, its scale and zero point by blocks of these, and the length of
    a block; None where its values or its blocks lie otherwise in memory."""
    order = form.rhs_order
    stored = [rhs.storage_axes()[axis] for axis in order]
    sizes, counts = [rhs.shape[axis] for axis in order], [rhs.scale.shape[axis] for axis in stored]
    block = rhs.tile_along(stored[-1])
    one_tap = all(size == 1 for size in sizes[1 : -max(1, rhs.merged_axes)])  # or taps and channels are merged
    if rhs.merged_axes:
        if stored != sorted(stored) or not one_tap:
            return None
    elif rhs.is_packed and (stored[-1] != rhs.ndim - 1 or not (one_tap or sizes[-1] % packing.COLUMNS == 0)):
        return None
    elif all(count == 1 for count in counts[1:]):
        block = math.prod(sizes[1:])  # an output channel has one scale
    elif (sizes[-1] % block and not one_tap) or any(
        count not in (1, size) for count, size in zip(counts[1:-1], sizes[1:-1])
    ):
        return None
    else:
        counts[1:-1] = sizes[1:-1]
    counts[0] = sizes[0]
    vectors = {"scale": rhs.scale} | ({} if rhs.zero_point is None else {"zero_point": rhs.zero_point})
    of_rows = lambda leaf: leaf.reshape(sizes[0], math.prod(leaf.shape[1:]))
    vectors = {name: of_rows(jnp.broadcast_to(transposed(x, stored), counts)) for name, x in vectors.items()}
    return of_rows(transposed(rhs.qvalue, stored)), vectors, block


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def jax_qmm_dequantized_conv(form, activation, out_dtype, precision, lhs, rhs, bias):
    y = form.of_floats(lhs, rhs.dequantize(lhs.dtype), precision, None).astype(jnp.float32)
    y = y if bias is None else y + form.along_channels(bias).astype(jnp.float32)
    return activations.activate(y, activation).astype(out_dtype)


# The primitive: operands lhs (I, *S, C), w (O, taps * C) or its packed bytes, and the vectors that `names` lists: scale
# and zero_point (O, G), bias (O,)

weight_only_conv_p = Primitive("weight_only_conv")


def _out_shape(lhs, w, window, taps):
    return (lhs.shape[0], *window.out_shape(lhs.shape[1:-1], taps), w.shape[0])


def _abstract_eval(lhs, w, *vectors, window, taps, out_dtype, **params):
    shape = _out_shape(lhs, w, window, taps)
    if not _compat.explicit_mesh(lhs):
        return lhs.update(shape=shape, dtype=out_dtype, weak_type=False)
    images, out = lhs.sharding.spec[0], w.sharding.spec[0]
    spec = PartitionSpec(images, *(None,) * len(taps), None if out == images else out)
    return lhs.update(shape=shape, dtype=out_dtype, weak_type=False, sharding=lhs.sharding.update(spec=spec))


# Lowerings: to the kernel, to XLA and to the reference; each for the operands that one device holds


def _kernel(lhs, w, *vectors, names, window, taps, qtype, packed, block, activation, out_dtype, precision, workspace):
    rank = len(taps)
    three = lambda sizes, other=1: np.array((*(other,) * (_SPATIAL - rank), *sizes), np.int32)
    if not packed:
        w, vectors = packed_leaves(w, vectors)
    shape = _out_shape(lhs, w, window, taps)
    in_three = lambda shape: (shape[0], *(1,) * (_SPATIAL - rank), *shape[1:])
    results = [jax.ShapeDtypeStruct(in_three(shape), out_dtype)]
    if workspace:
        results.append(jax.ShapeDtypeStruct((workspace,), jnp.uint8))
    out, *_ = jax.ffi.ffi_call("jax_qmm_weight_only_conv", results)(
        *(lhs.reshape(in_three(lhs.shape)), *(x[None] for x in (w, *vectors))),
        taps=three(taps),
        strides=three(window.strides),
        before=three([before for before, _ in window.padding], 0),
        dilation=three(window.rhs_dilation),
        bits=np.int32(jnp.iinfo(qtype).bits),
        block=np.int32(block),
        names=" ".join(names[1:]),
        activation=activation.name,
        low=np.float32(activation.low),
        high=np.float32(activation.high),
    )
    return out.reshape(shape)


_SPATIAL = 3  # axes that kernels have
_ALIGNED = 8  # channels: kernels copy 16 bytes


def _linear(lhs, w, scale, zero_point=None, bias=None, *, window, taps, precision, by_kernel=False, **weight):
    """The convolution with weights in the dtype of lhs, as float32 with the bias."""
    dequantized = dequantized_by_kernel if by_kernel else products.dequantized
    dense = dequantized(w, scale, zero_point, k=math.prod(taps) * lhs.shape[-1], dtype=lhs.dtype, **weight)
    axes = (0, lhs.ndim - 1, *range(1, lhs.ndim - 1))
    numbers = jax.lax.ConvDimensionNumbers(axes, axes, axes)
    dense = dense.reshape(dense.shape[0], *taps, lhs.shape[-1])
    y = jax.lax.conv_general_dilated(lhs, dense, *window[:4], numbers, precision=precision).astype(jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


def _by_floats(lhs, w, *vectors, names, activation, out_dtype, **params):
    y = _linear(lhs, w, **dict(zip(names, vectors)), **params)
    return activations.activate(y, activation).astype(out_dtype)


def _by_xla_on_gpu(*operands, packed, **params):
    return _by_floats(*operands, packed=packed, by_kernel=packed, **params)


def _unserved(platform, devices, operands, *, window, taps, block, **params):
    if why := _extension.fallback_reason(platform, devices, OLDEST):
        return why
    if not all(isinstance(size, int) for size in (*operands[0].shape[1:], *operands[1].shape)):
        return "only the images may be symbolic for kernels"
    return unserved_blocks(block, math.prod(taps) * operands[0].shape[-1])


def _by_xla(devices, operands, *, window, taps, **params):
    lhs = operands[0]
    why, rest = "", f"weights dequantized once, then a convolution of {lhs.dtype}"
    if lhs.dtype == jnp.float32:
        why = ", which kernels do not take"
    elif lhs.shape[-1] % _ALIGNED or lhs.shape[-1] == 0:
        why = f": kernels take channels in multiples of {_ALIGNED}, and there are {lhs.shape[-1]}"
    elif len(taps) > _SPATIAL:
        why = f": there are {len(taps)} spatial axes, and kernels have {_SPATIAL}"
    elif (problem := _problem(operands, window=window, taps=taps, **params)) is not None:
        if _extension.dequantizes_once(devices, problem):
            why = ", which is predicted to be faster than kernels"
    return f"{rest}{why}" if why else None


def _problem(operands, *, names, window, taps, qtype, block, out_dtype, **params):
    """What `BlockScaledMmProblem` is made of; None where shapes are symbolic."""
    lhs, w, *_ = operands
    *pixels, n = _out_shape(lhs, w, window, taps)
    if not all(isinstance(size, int) for size in pixels):
        return None
    sizes = math.prod(pixels), n, math.prod(taps) * lhs.shape[-1], 1
    return *sizes, str(lhs.dtype), str(out_dtype), *weight_kind(names, operands, qtype, block), True


def _workspace(devices, operands, **params):
    problem = _problem(operands, **params)
    return _extension.block_scaled_mm_workspace(devices, problem) if problem and devices else 0


def _describe(operands, results, *, names, window, taps, qtype, packed, block, activation, **params):
    lhs, w, scale, *_ = operands
    terms = ["per channel" if scale.shape[-1] == 1 else f"blocks of {block}", "packed" if packed else "plain"]
    terms += [*names[1:], *([] if activation == activations.NONE else [str(activation)])]
    if _compat.explicit_mesh(lhs) and any(lhs.sharding.spec[1:]):
        terms.append("spatial axes gathered")
    weights = jax.ShapeDtypeStruct((w.shape[0], *taps, lhs.shape[-1]), qtype)
    return f"weight-only conv ({window.words(taps)}; {', '.join(terms)})", [lhs, weights]


def _choice(operands, results, *, packed, **params):
    problem = _problem(operands, **params)
    words = "kernel, chosen at run time: the shapes are symbolic"
    if problem is not None:
        words = _extension.describe_block_scaled_mm(problem)
    return words if packed else f"{words}, rhs packed at each call"


# Batching


def _batch(operands, dims, **params):
    """Images that are mapped become one longer axis; weights that are mapped, XLA's grouped convolution."""
    lhs, *weights = operands
    if all(dim is None for dim in dims[1:]):
        lhs = jnp.moveaxis(lhs, dims[0], 0)
        out = weight_only_conv_p.bind(lhs.reshape(-1, *lhs.shape[2:]), *weights, **params)
        return out.reshape(*lhs.shape[:2], *out.shape[1:]), 0

    def jax_qmm_dequantized_conv(*operands):
        return _by_floats(*operands, **params)

    return jax.vmap(jax.jit(jax_qmm_dequantized_conv), in_axes=dims)(*operands), 0


# Sharding


def _partitioned(run, shapes, *, names, taps, **params):
    """By images and outputs, with no collective; a tap's channels are parts of blocks, and stay whole."""
    spatial = [None] * len(taps)
    of_rows = [["o", None] if len(shape) == 2 else ["o"] for shape in shapes[1:]]
    local = functools.partial(run, OP, names=names, taps=taps, **params)
    operands, result = [["i", *spatial, None], *of_rows], ["i", *spatial, "o"]
    return partitioned(local, operands, [result], shapes, names=("lhs", "rhs", *names))


# Registration

OP = dispatch.Op(
    name="conv_general_dilated",
    targets=("jax_qmm_weight_only_conv", "jax_qmm_dequantize_weights"),
    kernel=_kernel,
    reference=_by_floats,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
    workspace=_workspace,
    by_xla=_by_xla,
    xla=_by_xla_on_gpu,
)
dispatch.register(weight_only_conv_p, OP)
weight_only_conv_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[weight_only_conv_p] = _batch
ad.primitive_jvps[weight_only_conv_p] = jvp_of(weight_only_conv_p, _linear)
