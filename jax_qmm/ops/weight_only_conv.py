"""Convolutions of a float lhs with weights of 4 or 8 bits, whose scales may belong to blocks of channels and to taps.

A window of one value is a product, which `block_scaled_mm` computes. Of all others, kernels compute those of few
pixels, for which reading the weights takes most of the time, and on Hopper those of many, with results of 16 bits,
channels in multiples of 64 and outputs in multiples of 8. Else the weights are dequantized to the dtype of lhs at each
call, and XLA convolves in it. A cost model decides.

Weights that lie otherwise in memory than as outputs, taps and channels, and windows that the kernel has not, are XLA's
always. The jaxpr has a jit of the name `DEQUANTIZED_CONV` there, so that `explain` can tell.
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
from jax_qmm.explicit_axes import gathered_unless_divided, on_auto_axes
from jax_qmm.ops import conv_form, dispatch, matmul_form
from jax_qmm.ops.block_scaled_mm import (
    OLDEST,
    block_scaled_mm,
    dequantized_by_kernel,
    ends_apart,
    jvp_of,
    packed_leaves,
    unserved_blocks,
    weight_kind,
)
from jax_qmm.ops.conv_form import SPATIAL, in_three
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
        if bias is not None and bias.dtype != out_dtype:
            bias = bias.astype(jnp.float32)
        x = transposed(lhs, form.lhs_order)
        sharding = form.result_sharding(lhs, rhs, spatial=True)
        if sharding is not None and bias is not None:
            bias = jax.sharding.reshard(bias, sharding.update(spec=PartitionSpec(sharding.spec[-1])))
        options = {"activation": _as_given(activation), "out_dtype": out_dtype, "out_sharding": sharding}
        return form.out(block_scaled_mm(x, w, bias, **options))
    if form.batch_groups > 1 or form.window.groups > 1 or any(by != 1 for by in form.window.lhs_dilation):
        weights = None
    else:
        weights = _in_order(form, rhs)
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


def _in_order(form, rhs):
    """rhs as the primitive has it, its scale and zero point, and the length of a block of channels; None where its
    values or its blocks lie otherwise in memory."""
    order = form.rhs_order
    stored = [rhs.storage_axes()[axis] for axis in order]
    sizes, counts = [rhs.shape[axis] for axis in order], [rhs.scale.shape[axis] for axis in stored]
    block = rhs.tile_along(stored[-1])
    if counts[0] not in (1, sizes[0]):
        return None  # several outputs share a scale
    one_tap = all(size == 1 for size in sizes[1 : -max(1, rhs.merged_axes)])  # or taps and channels are merged
    apart = lambda leaf: leaf
    if rhs.merged_axes:
        if stored != sorted(stored) or not one_tap:
            return None
        unit = math.lcm(block if counts[-1] > 1 else 1, packing.COLUMNS if rhs.is_packed else 1)
        if sizes[-1] % unit == 0 and 0 not in sizes:
            apart = functools.partial(_taps_apart, sizes[1:-1])
    elif rhs.is_packed and (stored[-1] != rhs.ndim - 1 or not (one_tap or sizes[-1] % packing.COLUMNS == 0)):
        return None
    elif counts[-1] > 1 and sizes[-1] % block and not one_tap:
        return None  # a block ends within a tap
    elif any(count not in (1, size) for count, size in zip(counts[1:-1], sizes[1:-1])):
        return None
    vectors = {"scale": rhs.float_scale()} | ({} if rhs.zero_point is None else {"zero_point": rhs.zero_point})
    vectors = {name: apart(transposed(x, stored)) for name, x in vectors.items()}
    return apart(transposed(rhs.qvalue, stored)), vectors, block


def _taps_apart(taps, leaf):
    """A leaf whose taps and channels are merged with each an axis, so that devices can take their channels of it."""
    if leaf.shape[-1] == 1:
        return leaf
    leaf = gathered_unless_divided(leaf, -1, taps[0])
    return leaf.reshape(leaf.shape[0], *taps, leaf.shape[-1] // math.prod(taps))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def jax_qmm_dequantized_conv(form, activation, out_dtype, precision, lhs, rhs, bias):
    def of_floats(lhs, rhs, bias):
        y = form.of_floats(lhs, rhs.dequantize(lhs.dtype), precision, None)
        bias = None if bias is None else form.along_channels(bias)
        return activations.ended(y, bias, activation, out_dtype)

    return on_auto_axes(of_floats, form.out_sharding(lhs, rhs), lhs, rhs, bias)


# The primitive: operands lhs (I, *S, C), w (O, *K, C) or its packed bytes, and the vectors that `names` lists: scale
# and zero_point (O, *K, G), of which any may be 1, for blocks of channels, and bias (O,). Where w has taps and channels
# merged, and no boundary of blocks between taps, K are ones and C stands for both.

weight_only_conv_p = Primitive("weight_only_conv")


def _out_shape(lhs, w, window, taps):
    return (lhs.shape[0], *window.out_shape(lhs.shape[1:-1], taps), w.shape[0])


def _abstract_eval(lhs, w, *vectors, window, taps, out_dtype, **params):
    return conv_form.abstract_result(lhs, w, _out_shape(lhs, w, window, taps), out_dtype)


# Lowerings: to the kernel, to XLA and to the reference; each for the operands that one device holds


def _kernel(lhs, w, *vectors, names, window, taps, qtype, packed, block, activation, out_dtype, precision, workspace):
    block = _columns_of_a_scale(lhs, w, vectors[0], taps, block)
    w, *vectors = _rows(w, *vectors)
    if not packed:
        w, vectors = packed_leaves(w, vectors)
    shape = _out_shape(lhs, w, window, taps)
    of_kernel = lambda shape: (shape[0], *in_three(shape[1:-1]), shape[-1])
    result = jax.ShapeDtypeStruct(of_kernel(shape), out_dtype)
    strides, before, dilation = (np.array(sizes, np.int32) for sizes in window.moves())
    out, *_ = jax.ffi.ffi_call("jax_qmm_weight_only_conv", dispatch.with_workspace(result, workspace))(
        *(lhs.reshape(of_kernel(lhs.shape)), *(x[None] for x in (w, *vectors))),
        taps=np.array(in_three(taps), np.int32),
        strides=strides,
        before=before,
        dilation=dilation,
        bits=np.int32(jnp.iinfo(qtype).bits),
        block=np.int32(block),
        names=" ".join(names[1:]),
        activation=activation.name,
        low=np.float32(activation.low),
        high=np.float32(activation.high),
    )
    return out.reshape(shape)


_ALIGNED = 8  # channels: kernels copy 16 bytes
_UNIT = 32  # channels of a block: kernels scale the sums of so many, and with float zero points of half of them


def _rows(w, *vectors):
    """w and its vectors as kernels take them: a row of taps and channels for each output, and its scales."""

    def rows(x):
        if x.ndim == 1:  # the bias
            return x
        taps = x.shape[1:-1] if all(size == 1 for size in x.shape[1:]) else w.shape[1:-1]
        return jnp.broadcast_to(x, (w.shape[0], *taps, x.shape[-1])).reshape(w.shape[0], math.prod(taps) * x.shape[-1])

    return [rows(x) for x in (w, *vectors)]


def _columns(lhs, w, taps):
    """How many values the last axis of w has: channels of a tap, or of all taps where these are merged."""
    return lhs.shape[-1] if w.shape[1:-1] == tuple(taps) else math.prod(taps) * lhs.shape[-1]


def _columns_of_a_scale(lhs, w, scale, taps, block):
    """How many values of a row of `_rows` share a scale."""
    if scale.shape[-1] != 1:
        return block
    per_channel = all(size == 1 for size in scale.shape[1:])
    return math.prod(taps) * lhs.shape[-1] if per_channel else _columns(lhs, w, taps)


def _of_floats(
    lhs,
    w,
    scale,
    zero_point=None,
    bias=None,
    *,
    window,
    taps,
    precision,
    activation=activations.NONE,
    out_dtype=jnp.float32,
    dequantize=products.dequantized,
    **weight,
):
    """The convolution by XLA, with weights in the dtype of lhs."""
    axes = (0, lhs.ndim - 1, *range(1, lhs.ndim - 1))
    numbers = jax.lax.ConvDimensionNumbers(axes, axes, axes)

    def of_floats(lhs, w, scale, zero_point, bias):
        dense = dequantize(w, scale, zero_point, k=_columns(lhs, w, taps), dtype=lhs.dtype, **weight)
        dense = dense.reshape(dense.shape[0], *taps, lhs.shape[-1])
        y = jax.lax.conv_general_dilated(lhs, dense, *window[:4], numbers, precision=precision)
        return activations.ended(y, bias, activation, out_dtype)

    sharding = conv_form.result_sharding(jax.typeof(lhs), jax.typeof(w))
    return on_auto_axes(of_floats, sharding, lhs, w, scale, zero_point, bias)


def _reference(lhs, w, *vectors, names, **params):
    """In float32, as kernels scale and sum."""
    return _of_floats(lhs.astype(jnp.float32), w, **dict(zip(names, vectors)), **params)


def _by_xla_on_gpu(lhs, w, *vectors, names, packed, taps, block, **params):
    params |= {"packed": packed, "taps": taps}
    if not packed:  # XLA reads these as fast as memory gives them
        return _of_floats(lhs, w, **dict(zip(names, vectors)), block=block, **params)
    params |= {"block": _columns_of_a_scale(lhs, w, vectors[0], taps, block), "dequantize": dequantized_by_kernel}
    w, *vectors = _rows(w, *vectors)
    return _of_floats(lhs, w, **dict(zip(names, vectors)), **params)


def _unserved(platform, devices, operands, *, window, taps, block, **params):
    if why := _extension.fallback_reason(platform, devices, OLDEST):
        return why
    if not all(isinstance(size, int) for size in (*operands[0].shape[1:], *operands[1].shape)):
        return "only the images may be symbolic for kernels"
    block = _columns_of_a_scale(*operands[:3], taps, block)
    return unserved_blocks(block, math.prod(taps) * operands[0].shape[-1])


def _by_xla(devices, operands, *, window, taps, **params):
    lhs, columns = operands[0], _columns_of_a_scale(*operands[:3], taps, params["block"])
    why, rest = "", f"weights dequantized once, then a convolution of {lhs.dtype}"
    if lhs.dtype == jnp.float32:
        why = ", which kernels do not take"
    elif lhs.shape[-1] % _ALIGNED or lhs.shape[-1] == 0:
        why = f": kernels take channels in multiples of {_ALIGNED}, and there are {lhs.shape[-1]}"
    elif len(taps) > SPATIAL:
        why = f": there are {len(taps)} spatial axes, and kernels have {SPATIAL}"
    elif (
        columns % _UNIT
        and columns < math.prod(taps) * lhs.shape[-1]
        and not _has_float_zeros(operands, params["names"])
    ):
        why = f": kernels take blocks in multiples of {_UNIT} channels, and they have {columns}"
    elif (problem := _problem(operands, window=window, taps=taps, **params)) is not None:
        if _extension.dequantizes_once(devices, problem):
            why = ", which is predicted to be faster than kernels"
    return f"{rest}{why}" if why else None


def _has_float_zeros(operands, names):
    zero_point = dict(zip(names, operands[2:])).get("zero_point")
    return zero_point is not None and zero_point.dtype != jnp.int8


def _problem(operands, *, names, window, taps, qtype, block, activation, out_dtype, **params):
    """What `BlockScaledMmProblem` is made of; None where shapes are symbolic."""
    lhs, w, scale, *_ = operands
    *pixels, n = _out_shape(lhs, w, window, taps)
    if not all(isinstance(size, int) for size in pixels):
        return None
    block = _columns_of_a_scale(lhs, w, scale, taps, block)
    sizes = math.prod(pixels), n, math.prod(taps) * lhs.shape[-1], 1
    windows = lhs.shape[0], lhs.shape[-1], *window.in_kernels(lhs.shape[1:-1], taps, pixels[1:])
    dtypes, weights = (str(lhs.dtype), str(out_dtype)), weight_kind(names, operands, qtype, block)
    return *sizes, *dtypes, *weights, windows, ends_apart(operands, names, activation, out_dtype)


def _workspace(devices, operands, **params):
    problem = _problem(operands, **params)
    return _extension.block_scaled_mm_workspace(devices, problem) if problem else 0


def _describe(operands, results, *, names, window, taps, qtype, packed, block, activation, **params):
    lhs, w, scale, *_ = operands
    columns = _columns_of_a_scale(lhs, w, scale, taps, block)
    per_channel = all(size == 1 for size in scale.shape[1:])
    terms = ["per channel" if per_channel else f"blocks of {columns}", "packed" if packed else "plain"]
    terms += [*names[1:], *([] if activation == activations.NONE else [str(activation)])]
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
        at = int(conv_form.mapped_behind(lhs, dims[0]))
        lhs = jnp.moveaxis(lhs, dims[0], at)
        out = weight_only_conv_p.bind(lhs.reshape(lhs.shape[0] * lhs.shape[1], *lhs.shape[2:]), *weights, **params)
        return out.reshape(*lhs.shape[:2], *out.shape[1:]), at

    names = params.pop("names")

    def jax_qmm_dequantized_conv(lhs, w, *vectors):
        return _of_floats(lhs, w, **dict(zip(names, vectors)), **params)

    return jax.vmap(jax.jit(jax_qmm_dequantized_conv), in_axes=dims)(*operands), 0


# Sharding


def _partitioned(run, shapes, *, names, taps, packed, block, activation, out_dtype, **params):
    of_weight = ["o", *"k" * len(taps), "c"]
    operands = [["i", *"s" * len(taps), "c"], of_weight, *(of_weight if len(x) > 1 else ["o"] for x in shapes[2:])]
    local = functools.partial(run, OP, taps=taps, packed=packed, block=block, **params)

    output = {"activation": activation, "out_dtype": out_dtype}
    entire, across = matmul_form.whole_and_across(local, names, num_batch=0, **output)
    (*_, channels), (_, *apart, _), (*_, blocks) = shapes[:3]
    unit = math.lcm(1 if blocks == 1 else block, packing.COLUMNS if packed else 1)
    divisible = channels % unit == 0 and tuple(apart) == taps
    units = {"s": 1, "k": 1, "c": channels // unit if divisible else 1}
    result, sides = ["i", *"s" * len(taps), "o"], ("lhs", "rhs", *names)
    return partitioned(entire, operands, [result], shapes, names=sides, over=("c",), across=across, units=units)


# Registration

OP = dispatch.Op(
    name="conv_general_dilated",
    targets=("jax_qmm_weight_only_conv", "jax_qmm_dequantize_weights"),
    kernel=_kernel,
    reference=_reference,
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
ad.primitive_jvps[weight_only_conv_p] = jvp_of(weight_only_conv_p, _of_floats)
