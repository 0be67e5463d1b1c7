"""The products of quantized layers: an input in float, a quantized kernel and a bias, in the dtypes of Flax."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_qmm.ops.conv_general_dilated import conv_general_dilated
from jax_qmm.ops.dot_general import dot_general, einsum
from jax_qmm.qarray import QArray


def promoted_dtype(dtype, inputs, kernel_dtype, bias):
    """The dtype in which Flax runs a layer: `dtype`, or else what input, float kernel and bias promote to."""
    if dtype is not None:
        return jnp.dtype(dtype)
    return jnp.result_type(*(x for x in (inputs, kernel_dtype, bias) if x is not None))


def static_leaves(scale, zero_point, stack=()):
    """A static scale and zero point (either may be None) as arrays, repeated for a stack of layers."""
    given = (scale, jnp.float32), (zero_point, jnp.int32)
    return tuple(
        value if value is None else jnp.broadcast_to(jnp.asarray(value, dtype), stack) for value, dtype in given
    )


def product(inputs, kernel, dimension_numbers, bias, dtype, **options):
    """`dot_general` of an input and a kernel, quantized or not, plus a bias or None.

    The bias has the batch and free axes of the kernel. The result has the `preferred_element_type` in
    `options`, if that is not None, and at least `dtype` where there is a bias; else it has `dtype`.
    """
    if bias is not None:
        (contracted, _), (batch, _) = dimension_numbers
        n = len(batch)
        bias = bias.reshape(*bias.shape[:n], *(1,) * (inputs.ndim - n - len(contracted)), *bias.shape[n:])
    return dot_general(inputs, kernel, dimension_numbers, bias=bias, **_with_out_dtype(options, bias, dtype))


def einsum_product(equation, inputs, kernel, bias, dtype, **options):
    """As `product`, for an einsum layer: the axes of the bias are those of the output that the kernel has.

    >>> from jax_qmm import W8A8
    >>> q = W8A8().quantize_weight(jnp.ones((8, 2, 4)), (-2,))
    >>> einsum_product("...ta,hab->...thb", jnp.ones((16, 11, 2)), q, jnp.ones((8, 4)), jnp.float32).shape
    (16, 11, 8, 4)
    """
    if bias is not None:
        terms, out = equation.replace(" ", "").split("->")
        lhs, rhs = terms.split(",")
        sizes = dict(zip(rhs, kernel.shape))
        letters = out.replace("...", "." * (inputs.ndim + 3 - len(lhs)))
        bias = bias.reshape([sizes.get(letter, 1) for letter in letters])
    return einsum(equation, inputs, kernel, bias=bias, **_with_out_dtype(options, bias, dtype))


def conv_product(inputs, kernel, strides, padding, bias, dtype, *, scheme, out_sharding=None, **options):
    """As `product`, for a convolution with the arguments of `jax.lax.conv_general_dilated`."""
    if out_sharding is not None:
        raise ValueError(f"out_sharding is {out_sharding}; a quantized convolution needs None: reshard its result")
    options = _with_out_dtype(options, bias, dtype)
    if isinstance(kernel, QArray):
        return conv_general_dilated(inputs, kernel, strides, padding, bias=bias, scheme=scheme, **options)
    out = jax.lax.conv_general_dilated(inputs, kernel, strides, padding, **options)
    return out if bias is None else out + bias


def _with_out_dtype(options, bias, dtype) -> dict[str, Any]:
    wanted = options.get("preferred_element_type") or dtype
    return options | {"preferred_element_type": wanted if bias is None else jnp.promote_types(wanted, dtype)}
