"""linen layers: giving them quantized kernels, and running them by intercepting their calls.

Modules of linen exist only while a model runs, so nothing can be exchanged in them. A quantized layer is one that
finds a `QuantizedKernel` among its parameters while `run_quantized` intercepts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from jax_qmm.models import layer_kinds, products
from jax_qmm.models.linen_kernel import QuantizedBox, QuantizedKernel
from jax_qmm.models.plan import Static
from jax_qmm.qarray import QArray
from jax_qmm.schemes import Scheme, check_weight

SCALE, ZERO_POINT = "activation_scale", "activation_zero_point"
_OWN = ("promote_dtype", "dot_general", "dot_general_cls", "conv_general_dilated", "conv_general_dilated_cls", "mask")
_FIELDS = dataclasses.fields(nn.DenseGeneral)
_LAX = jax.lax.dot_general, jax.lax.conv_general_dilated
_DEFAULTS = [*_LAX, *(field.default for field in _FIELDS if field.name in _OWN)]


def own_callable(module: nn.Module) -> str | None:
    """Why a layer that brings its own arithmetic can't be quantized; None where it does not."""
    if type(module).param is not nn.Module.param:  # by which some normalize their kernel at each call
        return "it brings its own param"
    return layer_kinds.own_callable(module, _OWN, _DEFAULTS)


def is_call_of_layer(context: nn.module.InterceptorContext) -> bool:
    """Whether an interceptor stands before the `__call__` of Flax's own Dense, DenseGeneral, Einsum or Conv.

    A subclass that overrides `__call__` and calls the original gets there in the end.
    """
    if isinstance(context.module, _ConvOfProduct):  # inside of a layer
        return False
    function, found = context.orig_method.func, layer_kinds.kind_of(context.module, layer_kinds.LINEN)
    own = found and found[0].__call__.__qualname__  # Conv inherits its own from a class that ConvLocal has too
    return function.__module__ == "flax.linen.linear" and function.__qualname__ == own


def static_params(scheme: Scheme, static: Static | None = None, stack: Sequence[int] = ()) -> dict[str, jax.Array]:
    """The parameters for a static scale and zero point, `static` or else those of the scheme."""
    leaves = products.static_leaves(*static or (scheme.activation_scale, scheme.activation_zero_point), stack)
    return {name: value for name, value in zip((SCALE, ZERO_POINT), leaves) if value is not None}


def install(
    params: Mapping[str, Any], qarray: QArray, scheme: Scheme, static: Static | None = None, stack: Sequence[int] = ()
) -> dict[str, Any]:
    """The parameters of one layer with a quantized kernel.

    Args:
      params: those of the float layer; the kernel may be abstract, and in a box with sharding metadata.
      qarray: the kernel quantized, of the same shape, with the contracted axes last in memory.
      scheme: how to quantize the layer's input.
      static: scale and zero point (or None) of the input in place of those of the scheme.
      stack: the axes in front of the kernel's own, where layers are stacked.

    Returns:
      The parameters with a `QuantizedKernel`, in a box if the float kernel is in one, and static scales, if
      any, as `activation_scale` and `activation_zero_point`.

    Raises:
      TypeError: if the kernel is quantized already.
      ValueError: if `qarray` has another shape than the kernel, or does not fit the scheme: another dtype, or
        packed for W8A8.

    >>> from jax_qmm import W8A8
    >>> params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    >>> scheme = W8A8(activation_scale=0.5)
    >>> list(install(params, scheme.quantize_weight(params["kernel"], (-2,)), scheme))
    ['kernel', 'bias', 'activation_scale']
    """
    box = params["kernel"]
    kernel = unboxed(box)
    if isinstance(kernel, QArray):
        raise TypeError("params has a quantized kernel already, needs a float one")
    if qarray.shape != kernel.shape:
        raise ValueError(f"qarray is {qarray}, needs the kernel's shape {kernel.shape}")
    check_weight(qarray, scheme)
    quantized = QuantizedKernel(qarray, scheme, kernel.dtype)
    if isinstance(box, meta.AxisMetadata):
        quantized = QuantizedBox(quantized, box)
    return {**params, "kernel": quantized, **static_params(scheme, static, stack)}


def unboxed(value: Any) -> Any:
    """A value out of its boxes, without the sharding constraints that `nn.unbox` puts on it under a mesh."""
    while isinstance(value, meta.AxisMetadata):
        value = value.unbox(apply_constraint=False) if isinstance(value, meta.Partitioned) else value.unbox()
    return value


def parameter(module: nn.Module, name: str) -> Any:
    """A parameter of a bound module, out of its boxes; None if there is none."""
    return unboxed(module.get_variable("params", name)) if module.has_variable("params", name) else None


def run_quantized(next_function, args, kwargs, context):
    """The interceptor (see nn.intercept_methods) under which layers use the quantized kernels that they hold."""
    module: Any = context.module
    if module.scope is None:
        return next_function(*args, **kwargs)
    if context.method_name == "__call__":
        _check_normalizer(module)
    kernel = parameter(module, "kernel")
    if isinstance(kernel, Mapping) and "qvalue" in kernel:
        raise TypeError(
            f"the kernel of {_name(module)} is a dict of {sorted(kernel)}: a quantized kernel that was restored "
            "without a target. Restore with the variables that quantize_model returns as the target, as arrays or "
            "as the ShapeDtypeStructs of jax.eval_shape"
        )
    if not isinstance(kernel, QArray):
        return next_function(*args, **kwargs)
    if not isinstance(kernel, QuantizedKernel):
        needs = "a QuantizedKernel, which jax_qmm.linen.install makes of it"
        raise TypeError(f"the kernel of {_name(module)} is a QArray without a scheme, needs {needs}")
    if is_call_of_layer(context):
        if reason := own_callable(module):
            raise TypeError(_refused(module, reason))
        return run_layer(module, kernel, *args, **kwargs)
    if context.method_name == "__call__":
        found = layer_kinds.kind_of(module, layer_kinds.LINEN)
        cls = type(module)
        reason = layer_kinds.own_mathematics(cls, found[0]) if found else f"{cls.__name__} can't use it"
        if reason:
            raise TypeError(_refused(module, reason))
    return next_function(*args, **kwargs)


def _check_normalizer(module):
    if not isinstance(module, layer_kinds.NORMALIZERS):
        return
    layer: Any = module.layer_instance
    own = layer.variables.get("params", {}) if layer.scope is not None else {}
    if any(isinstance(x, QArray) for x in jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, QArray))):
        raise TypeError(_refused(layer, layer_kinds.NORMALIZED))


def _name(module):
    return "/".join(module.path) or "the model"


def _refused(module, reason):
    return (
        f"the kernel of {_name(module)} was quantized, but {reason}: keep the layer from the rules of quantize_model, "
        "or give that an example to tell the layers by"
    )


def run_layer(module: nn.Module, kernel: QuantizedKernel, inputs: Any, einsum_str: str | None = None) -> jax.Array:
    """A bound Dense, DenseGeneral, Einsum or Conv with a `QuantizedKernel`."""
    scheme = kernel.scheme.with_static(parameter(module, SCALE), parameter(module, ZERO_POINT))
    return multiply(module, kernel.qarray(), kernel.float_dtype, inputs, einsum_str, scheme=scheme)


def multiply(module, kernel, float_dtype, inputs, einsum_str=None, **options):
    """What a bound Dense, DenseGeneral, Einsum or Conv computes, with this kernel in place of its own."""
    bias = parameter(module, "bias")
    dtype = products.promoted_dtype(module.dtype, inputs, float_dtype, bias)
    inputs, bias = jnp.asarray(inputs, dtype), None if bias is None else jnp.asarray(bias, dtype)
    if isinstance(module, nn.Conv):
        return _convolve(module, kernel, inputs, bias, dtype, **options)
    options["precision"] = module.precision
    if isinstance(module, nn.Einsum):
        options["preferred_element_type"] = module.preferred_element_type
        return products.einsum_product(einsum_str or module.einsum_str, inputs, kernel, bias, dtype, **options)
    axis, batch = -1, ()
    if isinstance(module, nn.DenseGeneral):
        axis, batch = module.axis, module.batch_dims
    axis, batch = (
        tuple(sorted(i % inputs.ndim for i in (axes if isinstance(axes, Sequence) else [axes])))
        for axes in (axis, batch)
    )
    n = len(batch)
    numbers = (axis, tuple(range(n, n + len(axis)))), (batch, tuple(range(n)))
    return products.product(inputs, kernel, numbers, bias, dtype, **options)


class _ConvOfProduct(nn.Conv):
    """A Conv of Flax, which has paddings that lax lacks, whose convolution brings its own kernel and bias."""


def _convolve(module, kernel, inputs, bias, dtype, **own):
    def conv(inputs, _, strides, padding, **options):
        return products.conv_product(inputs, kernel, strides, padding, bias, dtype, **options, **own)

    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(nn.Conv)}
    as_they_are = lambda *arrays, dtype: arrays
    fields |= dict(conv_general_dilated=conv, promote_dtype=as_they_are, use_bias=False, parent=None, name=None)
    out: Any = _ConvOfProduct(**fields).apply({"params": {"kernel": jnp.zeros(kernel.shape, dtype)}}, inputs)
    return out  # of which XLA drops these zeros
