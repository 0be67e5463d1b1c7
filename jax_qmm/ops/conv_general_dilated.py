"""conv_general_dilated that takes QArrays: checks, the order of the axes, and the derivative."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0
from jax.typing import ArrayLike, DTypeLike

from jax_qmm import _compat
from jax_qmm.dtypes import INT8, INT32, SCALE_DTYPES
from jax_qmm.explicit_axes import on_auto_axes
from jax_qmm.ops import checks, conv, conv_form, weight_only_conv
from jax_qmm.ops.checks import Activation
from jax_qmm.ops.contraction import float_operand, operand_scheme
from jax_qmm.ops.conv_form import ConvForm
from jax_qmm.ops.fake_quantize import straight_through
from jax_qmm.ops.product import transposed
from jax_qmm.qarray import QArray
from jax_qmm.reference import activation as activations
from jax_qmm.schemes import W8A8, Scheme

# The public function


def conv_general_dilated(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    scheme: Scheme | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | QArray | None = None,
    activation: Activation = None,
    out_dtype: DTypeLike | None = None,
    out_scale: ArrayLike | None = None,
    out_zero_point: ArrayLike | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` for a QArray as rhs; without QArrays and keywords it is that function.

    With an int8 rhs of a scale for each output channel, or one for all, it computes

        activation(scale_lhs * scale_rhs * sum (lhs - zero_point_lhs) * (rhs - zero_point_rhs) + bias + residual)

    The sum is over the window and the channels, exact in int32 modulo 2^32; padding is the real 0, so it adds nothing.
    The rest is float32 as in `scaled_mm`, rounded once to the dtype of the result. The residual is what a shortcut
    brings, for which the result is written once and not read again. A float lhs is quantized inside, as
    `scheme` says; its scale is of one image ("per_token") or of all ("per_tensor").

    With any other rhs (int4, packed, with float zero points, with blocks of channels or scales for each tap) lhs stays
    float, and so does the product; `explain` says what computes it. A window of one value, as a 1x1 kernel of stride 1
    has, is a product: without a residual `scaled_mm` or `block_scaled_mm` computes it.

    Weights are best stored as (output channels, spatial axes, input channels) and images with their channels last:
    `W8A8().quantize_weight(kernel, contracted)` does that for a kernel of any order, with its axes but the output
    channels as `contracted`. Other orders are transposed at each call, which `explain` shows.

    The derivative by a float lhs is that of the convolution with the dequantized rhs, straight through the quantizer;
    the bias and a float residual have one too. QArrays are constants, and 8-bit results and int32 have no derivative.

    Sharded over images or output channels there is no communication, with one group of channels. Sharded over input
    channels there is one all-reduce of the sums, before bias and activation: of int32, and with a float lhs of float32
    (of sums that each device rounds to the dtype of lhs, where XLA convolves). Blocks of channels that are sharded
    need to be whole, of packed weights in parts of 128 channels. All else is gathered, as `explain` shows: spatial
    axes but those of a product, and channels of several groups. On Explicit axes of a mesh the result is sharded as
    images and output channels are. Where XLA convolves by itself, the compiler decides what is exchanged.

    Args:
      lhs: QArray of int8 with one scale or one for each image, or float32, bfloat16 or float16 array.
      rhs: QArray of int8 or int4.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count:
        as in `jax.lax.conv_general_dilated`.
      precision: of a float product, as there; int8 is always exact.
      preferred_element_type: `out_dtype` by its name there.
      scheme: a `W8A8` for a float lhs, or a `W4A16` or `W8A16`, which leave it as it is. By default as said above.
      bias: `(output channels,)`, float32, bfloat16 or float16, or None.
      residual: array of the result's shape, float32, bfloat16 or float16, or QArray of int8 with one scale, or None.
        Kernels add it but in depthwise convolutions and those of a float lhs, where XLA does.
      activation: as in `scaled_mm`.
      out_dtype: float32, bfloat16 or float16; for int8 operands also int8 or float8_e4m3fn, with `out_scale`, and
        int32, the sums without scales, bias, residual and activation. By default the result type of the float operand
        and the scale.
      out_scale, out_zero_point: of an 8-bit result, as in `scaled_mm`.

    Returns:
      Array of the shape that `jax.lax.conv_general_dilated` has.

    Raises:
      TypeError, ValueError: for an argument that does not fit, or zero points of lhs that int8 does not hold. Traced
        ones can't be seen: they wrap.

    >>> import jax_qmm
    >>> kernel = jax_qmm.W8A8().quantize_weight(jnp.ones((3, 3, 2, 4)), (0, 1, 2))  # HWIO
    >>> f = functools.partial(conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    >>> f(jnp.ones((1, 5, 5, 2)), kernel, (2, 2), "SAME")[0, :, :, 0].tolist()
    [[8.0, 12.0, 8.0], [12.0, 18.0, 12.0], [8.0, 12.0, 8.0]]
    >>> x = QArray(jnp.ones((1, 5, 5, 2), jnp.int8), jnp.full((1, 1, 1, 1), 2.0))
    >>> f(x, kernel, (2, 2), "VALID", out_dtype=jnp.int8, out_scale=0.5, activation="relu")[0, :, :, 0].tolist()
    [[72, 72], [72, 72]]
    >>> shortcut = QArray(jnp.full((1, 2, 2, 4), -10, jnp.int8), jnp.full((1, 1, 1, 1), 2.0))
    >>> f(x, kernel, (2, 2), "VALID", out_dtype=jnp.int8, out_scale=0.5, residual=shortcut)[0, :, :, 0].tolist()
    [[32, 32], [32, 32]]
    """
    window = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    groups = feature_group_count, batch_group_count
    epilogue = (bias, residual, activation, out_dtype, out_scale, out_zero_point)
    if not isinstance(lhs, QArray) and not isinstance(rhs, QArray):
        if any(x is not None for x in epilogue):
            raise TypeError(f"rhs is a {type(rhs).__name__}; it needs to be a QArray for the keywords beside lax's")
        dense = jnp.asarray(lhs), jnp.asarray(rhs)
        return jax.lax.conv_general_dilated(
            *dense, *window, *groups, precision, preferred_element_type=preferred_element_type
        )
    lhs, rhs = _check_operands(lhs, rhs)
    form = conv_form.read(lhs, rhs, *window, *groups)
    weight_only, static = _is_weight_only(form, lhs, rhs, scheme), (None, None)
    if scheme is not None or not weight_only:
        scheme, static = operand_scheme(scheme, (lhs, rhs))
    out_dtype = _check_out_dtype(out_dtype, preferred_element_type, lhs, rhs)
    if bias is not None:
        bias = _check_bias(bias, rhs.shape[form.numbers.rhs_spec[0]])
    if residual is not None:
        residual = _check_residual(residual, form.result_shape(lhs, rhs))
    applied = checks.activation(activation)
    output = checks.output(out_dtype, out_scale, out_zero_point)
    if weight_only:
        if out_dtype not in SCALE_DTYPES:
            raise TypeError(f"out_dtype is {out_dtype}; with {rhs} it needs to be float32, bfloat16 or float16")
        if residual is None:
            return weight_only_conv.conv(form, lhs, rhs, bias, applied, out_dtype, precision)
        y = weight_only_conv.conv(form, lhs, rhs, bias, activations.NONE, jnp.dtype(jnp.float32), precision)
        added = residual.dequantize(jnp.float32) if isinstance(residual, QArray) else residual.astype(jnp.float32)
        return activations.activate(y + added, applied).astype(out_dtype)
    if out_dtype == INT32 and (bias is not None or residual is not None or applied != activations.NONE):
        raise ValueError("out_dtype int32 gives the sums: bias, residual and activation need to be None")
    return _conv(_Conv(form, scheme, applied, out_dtype, precision), lhs, rhs, bias, residual, static, output)


def _check_operands(lhs, rhs):
    if not isinstance(rhs, QArray):
        raise TypeError(f"rhs is a {type(rhs).__name__}; it needs to be a QArray, as W8A8().quantize_weight returns it")
    if rhs.qtype not in (jnp.int8, jnp.int4):
        raise TypeError(f"rhs has values of {rhs.qtype}; it needs int8 or int4")
    if not isinstance(lhs, QArray):
        return float_operand("lhs", lhs), rhs
    if lhs.qtype != INT8 or lhs.is_packed or lhs.merged_axes:
        raise TypeError(f"lhs is {lhs}; it needs values of int8 that are not packed, each axis apart in memory")
    if lhs.zero_point is not None and lhs.zero_point.dtype != INT32:
        raise TypeError(f"lhs has zero points of {lhs.zero_point.dtype}; it needs int32")
    return lhs, rhs


def _is_weight_only(form, lhs, rhs, scheme):
    """Whether lhs is to stay float; checks the granularities."""
    if isinstance(scheme, Scheme) and not scheme.convolves:
        raise ValueError(f"scheme is {scheme!r}; convolutions take a W8A8 without tile_size, W4A16 and W8A16")
    of_channel = _scales_along(rhs, form.numbers.rhs_spec[0])
    weight_only = weight_only_conv.is_weight_only(rhs) or not of_channel
    if weight_only and (isinstance(lhs, QArray) or isinstance(scheme, W8A8)):
        beside = "a QArray as lhs" if isinstance(lhs, QArray) else f"scheme {scheme!r}"
        raise ValueError(
            f"rhs is {rhs}; beside {beside} it needs int8 values that are not packed, with one scale for each output "
            "channel or one for all, and integer zero points"
        )
    if isinstance(lhs, QArray) and not _scales_along(lhs, form.numbers.lhs_spec[0]):
        raise ValueError(f"lhs is {lhs}; it needs one scale, or one for each image")
    return weight_only or not isinstance(scheme, W8A8 | None)


def _scales_along(x, axis):
    """Whether a QArray has one scale, or one for each index of the logical axis."""
    own = x.storage_axes()[axis]
    fits = (count in (1, size if i == own else 1) for i, (count, size) in enumerate(zip(x.scale.shape, x.stored_shape)))
    return all(fits)


def _check_out_dtype(out_dtype, preferred, lhs, rhs):
    if out_dtype is None and preferred is None:
        return jnp.result_type(lhs.dtype, rhs.dtype)
    found = [checks.out_dtype(dtype) for dtype in (out_dtype, preferred) if dtype is not None]
    if found[0] != found[-1]:
        raise ValueError(f"out_dtype is {found[0]} and preferred_element_type {found[1]}; they need to be the same")
    return found[0]


def _check_bias(bias, channels):
    bias = checks.array("bias", bias, SCALE_DTYPES)
    if bias.shape != (channels,):
        raise ValueError(f"bias has shape {bias.shape}; it needs {(channels,)}, a value for each output channel")
    return bias


def _check_residual(residual, shape):
    if isinstance(residual, QArray):
        integers = residual.zero_point is None or residual.zero_point.dtype == INT32
        if residual.qtype != INT8 or residual.is_packed or residual.scale.size != 1 or not integers:
            raise TypeError(
                f"residual is {residual}; it needs values of int8 that are not packed, with one scale and an int32 "
                "zero point or none"
            )
    else:
        residual = checks.array("residual", residual, SCALE_DTYPES)
    if residual.shape != shape:
        raise ValueError(f"residual has shape {residual.shape}; it needs that of the result, {shape}")
    return residual


# From the user's operands to the primitive's: a float lhs is quantized, and all are brought into its order


class _Conv(NamedTuple):
    form: ConvForm
    scheme: W8A8 | None
    activation: activations.Activation
    out_dtype: Any
    precision: Any


@functools.partial(jax.jit, static_argnums=0)
def _conv(described, lhs, rhs, bias, residual, static, output):
    # Named for checkpoint policies, which don't look into a function with a derivative of its own.
    out = _differentiable_conv(described, lhs, rhs, bias, residual, static, output)
    return checkpoint_name(out, "quantized_product")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable_conv(described, lhs, rhs, bias, residual, static, output):
    form = described.form
    if not isinstance(lhs, QArray):
        lhs = _quantized(described, lhs, static)
    values = [
        form.grouped(_in_order(x, x.qvalue, order)) for x, order in ((lhs, form.lhs_order), (rhs, form.rhs_order))
    ]
    vectors = {}
    if described.out_dtype != INT32:
        vectors = {"scale_lhs": _vector(form, lhs, lhs.scale), "scale_rhs": _vector(form, rhs, rhs.scale, False)}
    if lhs.zero_point is not None:
        vectors["zero_point_lhs"] = _vector(form, lhs, lhs.zero_point.astype(INT8))
        if rhs.azp_adj is not None and rhs.azp_adj.size == rhs.shape[form.numbers.rhs_spec[0]]:
            vectors["sums_rhs"] = _vector(form, rhs, rhs.azp_adj, False)
    if rhs.zero_point is not None:
        vectors["zero_point_rhs"] = _vector(form, rhs, rhs.zero_point, False)
    if bias is not None:
        vectors["bias"] = form.grouped(bias)
    num_batch = int(form.batch_groups > 1)
    of_all = dict(output)
    if isinstance(residual, QArray):
        vectors["residual"] = form.of_result(_in_order(residual, residual.qvalue, range(residual.ndim)))
        of_all["scale_residual"] = residual.scale
        if residual.zero_point is not None:
            of_all["zero_point_residual"] = residual.zero_point
    elif residual is not None:
        vectors["residual"] = form.of_result(residual)
    vectors |= {name: x.reshape((1,) * num_batch) for name, x in of_all.items()}
    out = conv.bind(
        *values,
        vectors,
        num_batch=num_batch,
        window=form.window,
        activation=described.activation,
        out_dtype=described.out_dtype,
    )
    return form.out(out)


def _quantized(described, x, static):
    """A float lhs as the scheme quantizes it: images first, where they are not."""
    images = described.form.numbers.lhs_spec[0]
    order = [images, *(axis for axis in range(x.ndim) if axis != images)]
    q = described.scheme.with_static(*static).quantize_activation(transposed(x, order), x.ndim - 1)
    return q if images == 0 else q.transpose([order.index(axis) for axis in range(x.ndim)])


def _in_order(x, leaf, order):
    stored = x.storage_axes()
    return transposed(leaf, [stored[axis] for axis in order])


def _vector(form, x, leaf, of_lhs=True):
    """A leaf along the first axis of the kernel's order alone."""
    leaf = _in_order(x, leaf, form.lhs_order if of_lhs else form.rhs_order)
    return form.grouped(leaf.reshape(leaf.shape[0]))


# Differentiation


def _jvp(described, primals, tangents):
    """Straight through the quantizer of a float lhs, with rhs dequantized; QArrays are constants."""
    out = _differentiable_conv(described, *primals)
    lhs, rhs, bias, residual, static, output = primals
    given = lambda x, tangent: None if isinstance(x, QArray | None) or isinstance(tangent, SymbolicZero) else tangent
    moving = {
        "lhs": None if isinstance(lhs, QArray) else _lhs_tangent(lhs, tangents[0], static, tangents[4][0]),
        "bias": given(bias, tangents[2]),
        "residual": given(residual, tangents[3]),
    }
    moving = {name: tangent for name, tangent in moving.items() if tangent is not None}
    is_float = described.out_dtype in SCALE_DTYPES
    if not moving:
        return out, jnp.zeros_like(out) if is_float else np.zeros(out.shape, float0)
    if not is_float:
        raise TypeError(
            f"conv_general_dilated with out_dtype {described.out_dtype} has no derivative, and {', '.join(moving)} "
            "would need one; where no gradient is wanted, pass jax.lax.stop_gradient of them"
        )

    def tangent_of(moving, rhs):
        terms = []
        if "lhs" in moving:
            terms.append(_tangent_conv(described, moving["lhs"], rhs))
        if "bias" in moving:
            terms.append(described.form.along_channels(moving["bias"]).astype(jnp.float32))
        if "residual" in moving:
            terms.append(moving["residual"].astype(jnp.float32))
        return jnp.broadcast_to(sum(terms[1:], start=terms[0]), out.shape)

    y, kind = None, jax.typeof(out)
    if described.activation != activations.NONE:
        linear = described._replace(activation=activations.NONE, out_dtype=jnp.dtype(jnp.float32))
        y = _differentiable_conv(linear, *primals)
    tangent = on_auto_axes(tangent_of, kind.sharding if _compat.explicit_mesh(kind) else None, moving, rhs)
    tangent = activations.tangent(y, tangent, described.activation)
    return out, _compat.align_varying([tangent.astype(described.out_dtype), out])[0]


_differentiable_conv.defjvp(_jvp, symbolic_zeros=True)


def _lhs_tangent(x, tangent, static, scale_tangent):
    tangent, scale_tangent = (None if isinstance(t, SymbolicZero) else t for t in (tangent, scale_tangent))
    if static[0] is None or tangent is scale_tangent is None:
        return tangent
    return straight_through(x, *static, INT8, tangent, scale_tangent)


def _tangent_conv(described, moving, rhs):
    # Rematerialized: the 8-bit operand waits for the backward pass, not its dequantized copy.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_floats(moving, rhs):
        dtype = moving.dtype if moving.dtype == described.out_dtype else jnp.dtype(jnp.float32)
        return described.form.of_floats(moving.astype(dtype), rhs.dequantize(dtype), described.precision, dtype)

    return of_floats(moving, rhs)
