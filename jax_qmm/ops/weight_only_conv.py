"""Convolutions of a float lhs with weights of 4 or 8 bits, whose scales may belong to blocks of channels and to taps.

A window of one value is a product, which `block_scaled_mm` computes. For all others the weights are dequantized to the
dtype of lhs at each call, and XLA convolves in it: with many pixels, reading weights takes little of the time.

The jaxpr of the latter has a jit of the name `DEQUANTIZED_CONV`, so that `explain` can tell.
"""

import functools

import jax
import jax.numpy as jnp

from jax_qmm.ops.block_scaled_mm import block_scaled_mm
from jax_qmm.ops.product import transposed
from jax_qmm.ops.weight_only_dot import is_weight_only as is_weight_only  # which weights they are
from jax_qmm.reference import activation as activations

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
    return jax_qmm_dequantized_conv(form, activation, out_dtype, precision, lhs, rhs, bias)


def _packed_elsewhere(form, rhs):
    """Whether rhs is packed along another axis than its input channels."""
    return rhs.is_packed and rhs.storage_axes()[form.numbers.rhs_spec[1]] != rhs.ndim - 1


def _as_given(activation):
    return (activation.low, activation.high) if activation.name == "clamp" else _NAMES[activation]


_NAMES = {activations.NONE: None, activations.NAMED["gelu"]: "gelu", activations.NAMED["silu"]: "silu"}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def jax_qmm_dequantized_conv(form, activation, out_dtype, precision, lhs, rhs, bias):
    y = form.of_floats(lhs, rhs.dequantize(lhs.dtype), precision, None).astype(jnp.float32)
    y = y if bias is None else y + form.along_channels(bias).astype(jnp.float32)
    return activations.activate(y, activation).astype(out_dtype)
