"""Convolutions of int8 with scales, zero points and bias applied to the sums."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_qmm import _compat, _extension
from jax_qmm.dtypes import INT32
from jax_qmm.ops import conv_form, dispatch, matmul_form
from jax_qmm.ops.conv_form import SPATIAL, in_three
from jax_qmm.ops.pointwise_conv import as_product
from jax_qmm.ops.sharding import partitioned
from jax_qmm.reference import activation as activations, conv as reference


def bind(lhs, rhs, vectors, *, num_batch, window, activation, out_dtype):
    """The convolution of operands in the primitive's order, by whichever primitive computes it."""
    lhs, rhs, *values = _compat.align_varying([lhs, rhs, *vectors.values()])
    vectors = dict(zip(vectors, values))
    zero_points = any(name.startswith("zero_point") for name in vectors)
    sums_alone = out_dtype == INT32 and zero_points
    if window.is_product(rhs.shape[num_batch + 1 : -1]) and not sums_alone and "residual" not in vectors:
        return as_product(lhs, rhs, vectors, num_batch=num_batch, activation=activation, out_dtype=out_dtype)
    return conv_p.bind(
        *(lhs, rhs, *values),
        names=tuple(vectors),
        num_batch=num_batch,
        window=window,
        activation=activation,
        out_dtype=out_dtype,
    )


# The primitive: operands lhs (*B, I, *S, C), rhs (*B, O, *K, C / groups) and the vectors that `names` lists, as
# `reference.conv` has them

conv_p = Primitive("conv")


def _labels(names):
    return [reference.LABELS[name] for name in ("lhs", "rhs", *names)]


# Abstract evaluation


def _out_shape(operands, num_batch, window):
    lhs, rhs = (x.shape[num_batch:] for x in operands[:2])
    return (*matmul_form.batch_shape(operands, num_batch), lhs[0], *window.out_shape(lhs[1:-1], rhs[1:-1]), rhs[0])


def _abstract_eval(*operands, num_batch, window, out_dtype, **params):
    lhs, rhs = operands[:2]
    shape = _out_shape(operands, num_batch, window)
    return conv_form.abstract_result(lhs, rhs, shape, out_dtype, num_batch, grouped=window.groups > 1)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(lhs, rhs, *vectors, names, num_batch, window, activation, out_dtype):
    shape = _out_shape((lhs, rhs, *vectors), num_batch, window)
    if "residual" in names and _is_depthwise(rhs.shape[num_batch:], window):
        run = functools.partial(_kernel, num_batch=num_batch, window=window)
        return _after_sums(run, lhs, rhs, dict(zip(names, vectors)), num_batch, activation, out_dtype)
    rank = len(window.strides)
    labels = [label.replace("s", "s" * rank).replace("k", "k" * rank) for label in _labels(names)]
    lhs, rhs, *vectors = matmul_form.fold([lhs, rhs, *vectors], labels, num_batch)
    vectors = _with_sums(lhs, rhs, dict(zip(names, vectors)), window)
    if "residual" in vectors:
        residual = vectors["residual"]
        vectors["residual"] = residual.reshape(residual.shape[0], math.prod(shape[num_batch:-1]), shape[-1])
    if (together := _groups_together(rhs.shape[1:], window, names)) > 1:
        rhs, window = _with_zeros(rhs, window.groups, together), _regrouped(window, together)
    if (padded := padded_channels(rhs.shape[1:], window)) != rhs.shape[-1]:
        lhs, rhs = _pad_groups(lhs, window.groups, padded), _pad_groups(rhs, 1, padded)
    reshaped = lambda x: x.reshape(*x.shape[:2], *in_three(x.shape[2:-1]), x.shape[-1])
    result = (math.prod(shape[:num_batch]), shape[num_batch], *in_three(shape[num_batch + 1 : -1]), shape[-1])
    strides, before, dilation = (np.array(sizes, np.int32) for sizes in window.moves())
    out = jax.ffi.ffi_call("jax_qmm_conv", jax.ShapeDtypeStruct(result, out_dtype))(
        *(reshaped(lhs), reshaped(rhs), *vectors.values()),
        strides=strides,
        before=before,
        dilation=dilation,
        groups=np.int32(window.groups),
        names=" ".join(vectors),
        activation=activation.name,
        low=np.float32(activation.low),
        high=np.float32(activation.high),
    )
    return out.reshape(shape)


def _after_sums(run, lhs, rhs, vectors, num_batch, activation, out_dtype, of_all=lambda sums: sums):
    """The result of sums that `run` computes, to which XLA applies all else; `of_all` adds those of devices up."""
    vectors.pop("sums_rhs", None)
    zero_points = {name: vectors.pop(name) for name in ("zero_point_lhs", "zero_point_rhs") if name in vectors}
    sums = run(
        *(lhs, rhs, *zero_points.values()), names=tuple(zero_points), activation=activations.NONE, out_dtype=INT32
    )
    return reference.epilogue(of_all(sums), num_batch=num_batch, activation=activation, out_dtype=out_dtype, **vectors)


_ALIGNED = 4  # channels: kernels copy 4 bytes at least
_TILE = 64  # columns of the smallest tile
_MOST_TAPS, _MOST_GROUPS = 256, 65535  # as cuda/conv/conv.h has them
_OLDEST = 80  # compute capability 8.0, the first that they were tested for


def _groups_together(rhs, window, names):
    """How many groups become one for kernels, given the shape of rhs: few channels and outputs leave most of a tile
    empty. The sums of windows by zero points of rhs are of each group."""
    out, *_, channels = rhs
    if channels >= 16 or window.groups == 1 or "zero_point_rhs" in names or _is_depthwise(rhs, window):
        return 1
    most = _TILE // max(channels, out // window.groups)
    return max((count for count in range(1, most + 1) if window.groups % count == 0), default=1)


def _regrouped(window, together):
    return window._replace(groups=window.groups // together)


def _with_zeros(rhs, groups, together):
    """rhs (B, O, *K, C) as (B, O, *K, together * C), with zeros for the channels of the other groups."""
    own = jnp.arange(rhs.shape[1]) // (rhs.shape[1] // groups) % together
    is_own = jax.nn.one_hot(own, together, dtype=rhs.dtype)
    is_own = is_own.reshape(rhs.shape[1], *(1,) * (rhs.ndim - 3), together, 1)
    return (rhs[..., None, :] * is_own).reshape(*rhs.shape[:-1], together * rhs.shape[-1])


def padded_channels(rhs, window):
    """Channels of a group as kernels have them, with zeros behind: whole copies of 16, of few channels shorter ones."""
    channels = rhs[-1]
    if channels % _ALIGNED == 0 or _is_depthwise(rhs, window):
        return channels
    return next((size for size in (4, 8) if size > channels), -(-channels // 16) * 16)


def _pad_groups(x, groups, padded):
    """x (..., groups * channels) as (..., groups * padded), with zeros behind the channels of each group."""
    of_groups = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    pads = [(0, 0)] * x.ndim + [(0, padded - of_groups.shape[-1])]
    return jnp.pad(of_groups, pads).reshape(*x.shape[:-1], groups * padded)


def _with_sums(lhs, rhs, vectors, window):
    """The vectors with the sums by which zero points shift those of the kernel, which takes lhs as it is, and outside
    of an image its zero point."""
    axes = tuple(range(2, rhs.ndim))
    zero_point = vectors.get("zero_point_lhs")
    if zero_point is None:
        vectors.pop("sums_rhs", None)
    else:
        vectors["zero_point_lhs"] = zero_point.astype(jnp.int32)
        vectors.setdefault("sums_rhs", jnp.sum(rhs, axes, dtype=jnp.int32))
    if "zero_point_rhs" in vectors:
        x = lhs.reshape(*lhs.shape[:-1], window.groups, rhs.shape[-1])
        sums = jnp.sum(x, -1, dtype=jnp.int32)
        if zero_point is not None:
            sums -= rhs.shape[-1] * jnp.expand_dims(vectors["zero_point_lhs"], axes)
        pads = [(0, 0, 0)] * 2 + [(*pair, 0) for pair in window.padding] + [(0, 0, 0)]
        of_all = lambda sizes: (1, 1, *sizes, 1)
        sums = jax.lax.reduce_window(
            *(jax.lax.pad(sums, jnp.int32(0), pads), np.int32(0), jax.lax.add),
            *(of_all(rhs.shape[2:-1]), of_all(window.strides), "VALID"),
            window_dilation=of_all(window.rhs_dilation),
        )
        vectors["sums_lhs"] = sums.reshape(sums.shape[0], math.prod(sums.shape[1:]))
    return vectors


def _reference(lhs, rhs, *vectors, names, **params):
    return reference.conv(lhs, rhs, **params, **dict(zip(names, vectors)))


def _unserved(platform, devices, operands, *, num_batch, window, **params):
    if why := _extension.fallback_reason(platform, devices, _OLDEST):
        return why
    lhs, rhs = (x.shape[num_batch:] for x in operands[:2])
    rank = len(window.strides)
    if rank > SPATIAL:
        return f"there are {rank} spatial axes; kernels serve up to {SPATIAL}"
    if not all(isinstance(size, int) for size in (*lhs[1:], *rhs)):
        return "only the batch may be symbolic for kernels"
    if any(by != 1 for by in window.lhs_dilation):
        return "lhs is dilated, which kernels do not serve"
    if math.prod(rhs[1:]) == 0:
        return "the window has no values"
    if window.groups > _MOST_GROUPS and not _is_depthwise(rhs, window):
        return f"there are {window.groups} groups; kernels serve up to {_MOST_GROUPS}"
    return None


def _is_depthwise(rhs, window):
    """Whether the kernel for groups of one channel and one output serves rhs, given its shape."""
    out, *taps, channels = rhs
    return channels == 1 and window.groups == out and out % _ALIGNED == 0 and math.prod(taps) <= _MOST_TAPS


def _describe(operands, results, *, names, num_batch, window, activation, **params):
    taps = operands[1].shape[num_batch + 1 : -1]
    terms = [name for name in names if name != "sums_rhs"]
    terms += [] if activation == activations.NONE else [str(activation)]
    return f"conv ({window.words(taps)}; {', '.join(terms) or 'sums'})", operands[:2]


def _choice(operands, results, *, names, num_batch, window, out_dtype, **params):
    shape, rhs = _out_shape(operands, num_batch, window), operands[1].shape[num_batch:]
    _, *taps, channels = rhs
    if not all(isinstance(size, int) for size in shape):
        return "kernel, chosen at run time: the shapes are symbolic"
    together = _groups_together(rhs, window, names)
    channels, window = channels * together, _regrouped(window, together)
    padded = padded_channels((*rhs[:-1], channels), window)
    axes = slice(num_batch + 1, -1)
    sizes = window.in_kernels(operands[0].shape[axes], taps, shape[axes])
    images = math.prod(shape[:num_batch]), shape[num_batch]
    has_zero_points = "zero_point_lhs" in names or "zero_point_rhs" in names
    residual = str(operands[2 + names.index("residual")].dtype) if "residual" in names else ""
    by_xla = residual and _is_depthwise(rhs, window)
    output = ("int32", has_zero_points, "") if by_xla else (str(out_dtype), has_zero_points, residual)
    convolution = *images, padded, shape[-1], window.groups, *sizes, *output
    words = [_extension.describe_conv(convolution)]
    words += [f"{together} groups in one with zeros between them, made at each call"] if together > 1 else []
    words += [f"channels padded to {padded} at each call"] if padded != channels else []
    words += ["sums of windows by XLA"] if "zero_point_rhs" in names else []
    words += ["what follows the sums by XLA"] if by_xla else []
    return ", ".join(words)


# Batching


def _batch(operands, dims, *, names, num_batch, **params):
    of_images = ["i" in label for label in _labels(names)]
    if dims[0] is not None and all(of for of, dim in zip(of_images, dims) if dim is not None):
        return _batch_images(operands, dims, of_images, names, num_batch, **params)
    operands = [jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims)]
    return conv_p.bind(*operands, names=names, num_batch=num_batch + 1, **params), 0


def _batch_images(operands, dims, of_images, names, num_batch, **params):
    """Where only images are mapped they become one longer axis."""
    at, count = num_batch, operands[0].shape[dims[0]]
    images = operands[0].shape[num_batch + (dims[0] <= num_batch)]
    behind = conv_form.mapped_behind(operands[0], dims[0], num_batch)
    sizes = (images, count) if behind else (count, images)

    def longer(x, dim, of):
        if not of or (dim is None and x.shape[at] == 1):
            return x
        x = jnp.expand_dims(x, at + behind) if dim is None else jnp.moveaxis(x, dim, at + behind)
        x = jnp.broadcast_to(x, (*x.shape[:at], *sizes, *x.shape[at + 2 :]))
        return x.reshape(*x.shape[:at], count * images, *x.shape[at + 2 :])

    out = conv_p.bind(*map(longer, operands, dims, of_images), names=names, num_batch=num_batch, **params)
    return out.reshape(*out.shape[:at], *sizes, *out.shape[at + 1 :]), at + behind


# Sharding


def _partitioned(run, shapes, *, names, num_batch, window, **output):
    rank, batch = len(window.strides), [f"b{i}" for i in range(num_batch)]
    spell = lambda label: [*batch, *label.replace("s", "s" * rank).replace("k", "k" * rank)]
    units = dict.fromkeys("sk" if window.groups == 1 else "skco", 1)  # a device has all channels of several groups
    local = functools.partial(run, OP, num_batch=num_batch, window=window)

    def across(axes):
        def sum_over_channels(lhs, rhs, *vectors):
            of_all = lambda sums: jax.lax.psum(sums, axes)
            return _after_sums(local, lhs, rhs, dict(zip(names, vectors)), num_batch, **output, of_all=of_all)

        return sum_over_channels

    entire = functools.partial(local, names=names, **output)
    operands = [spell(label) for label in _labels(names)]
    sides = ("lhs", "rhs", *names)
    out = [spell("iso")]
    return partitioned(entire, operands, out, shapes, names=sides, over=("c",), across=across, units=units)


# Registration

OP = dispatch.Op(
    name="conv_general_dilated",
    targets=("jax_qmm_conv",),
    kernel=_kernel,
    reference=_reference,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
)
dispatch.register(conv_p, OP)
conv_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[conv_p] = _batch
