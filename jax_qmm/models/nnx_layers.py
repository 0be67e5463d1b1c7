"""nnx layers: telling what they do with their kernels, giving them quantized ones, and watching them in float.

A quantized layer keeps its class. Its kernel is a `QuantizedParam` that holds a `QArray` of the same shape, and
two of the callables that Flax lets one inject are replaced: `dot_general` (`einsum_op` of an Einsum) by a
small module that quantizes the input and multiplies, and `promote_dtype` by one that leaves the kernel as it
is and hands over the bias.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.sharding import NamedSharding, PartitionSpec

from jax_qmm.models import layer_kinds, products
from jax_qmm.models.calibration import squares
from jax_qmm.models.layer_kinds import KernelUse
from jax_qmm.models.leaf_specs import abstract_leaves, leaf_shardings, leaf_specs
from jax_qmm.models.plan import Conversion, Plan, Static
from jax_qmm.qarray import QArray
from jax_qmm.schemes import Scheme, check_weight


class QuantizedParam(nnx.Variable):
    """A quantized kernel: saved with the model, frozen, and so no `nnx.Param`.

    `nnx.grad` and `nnx.Optimizer(wrt=nnx.Param)` leave it alone. It holds a `QArray` and keeps the metadata of
    the float kernel: `nnx.get_partition_spec`, `nnx.get_named_sharding` and `nnx.eval_shape` under a mesh give
    each array in the QArray the sharding that `out_sharding` asks for in the kernel's order of axes.

    >>> from jax_qmm import W8A8
    >>> linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> linear.kernel.set_metadata("out_sharding", (None, "model"))
    >>> install(linear, W8A8().quantize_weight(linear.kernel[...], (-2,)), W8A8())
    >>> tuple(nnx.get_partition_spec(nnx.state(linear))["kernel"].get_value().qvalue)  # stored as (4, 8)
    ('model', None)
    """

    @property
    def sharding(self):
        """The sharding of the 8-bit values as stored; None where they are abstract and have none."""
        raw = self.get_raw_value()
        return getattr(raw.qvalue, "sharding", None) if isinstance(raw, QArray) else None

    def set_value(self, value, **options):
        """As `nnx.Variable.set_value`. Flax's single spec, sharding or ShapeDtypeStruct is spread over the leaves."""
        super().set_value(self._spread(value), **options)

    def replace(self, *args, **options):
        """As `nnx.Variable.replace`, with the value spread as by `set_value`."""
        return super().replace(*map(self._spread, args), **options)

    def _spread(self, value):
        q = self.get_raw_value()
        if not isinstance(q, QArray):
            return value
        if isinstance(value, PartitionSpec):
            return leaf_specs(q, value)
        if isinstance(value, NamedSharding):
            return leaf_shardings(q, value)
        return abstract_leaves(q, value.sharding) if isinstance(value, jax.ShapeDtypeStruct) else value

    def __jax_array__(self):
        raise TypeError(_NO_ARRAY)


_NO_ARRAY = (
    "this kernel is quantized, and only its own layer can use it: keep layers whose kernels the model reads "
    "from the rules of quantize_model, or multiply by kernel[...] with jax_qmm.matmul or jax_qmm.einsum"
)


class ActivationScale(nnx.Variable):
    """A static scale or zero point of a layer's input: saved with the model, not trained."""


def weight_layers(model: nnx.Module) -> dict[str, nnx.Module]:
    """The modules that hold a parameter of two dimensions or more, by path."""
    modules = ((".".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return {path: module for path, module in modules if layer_kinds.at_least_matrices(own_parameters(module))}


def own_parameters(module: nnx.Module) -> dict[str, Any]:
    """The values of a module's own parameters by name."""
    own = ((name, value) for name, value in vars(module).items() if isinstance(value, nnx.Param | QuantizedParam))
    return {name: variable.get_value() for name, variable in own}


def kernel_uses(model: nnx.Module) -> dict[str, KernelUse]:
    """What each module of `weight_layers` does with its kernel, by path."""
    normalizers = [module for _, module in nnx.iter_modules(model) if isinstance(module, layer_kinds.NORMALIZERS)]
    normalized = {id(module) for each in normalizers for _, module in nnx.iter_modules(each.layer_instance)}
    uses = {}
    for path, layer in weight_layers(model).items():
        use = kernel_use(layer)
        uses[path] = dataclasses.replace(use, reason=layer_kinds.NORMALIZED) if id(layer) in normalized else use
    return uses


def kernels(model: nnx.Module) -> dict[str, Any]:
    """The values of the kernels of `weight_layers`, by path."""
    own = ((path, own_parameters(layer)) for path, layer in weight_layers(model).items())
    return {path: parameters["kernel"] for path, parameters in own if "kernel" in parameters}


_PRODUCTS = jax.lax.dot_general, jnp.einsum, jax.lax.conv_general_dilated  # Flax's own


def kernel_use(layer: Any) -> KernelUse:
    """What a layer does with its kernel, and why it can't be quantized if it can't."""
    op, found = type(layer).__name__, layer_kinds.kind_of(layer, layer_kinds.NNX)
    if found is None:
        weights = layer_kinds.at_least_matrices(own_parameters(layer))
        return KernelUse(op, reason=layer_kinds.why_never(layer) or layer_kinds.by_hand(weights))
    base, kind = found
    shape = kind.shape(layer)
    reason = (
        layer_kinds.why_not(layer.kernel.get_value(), shape)
        or layer_kinds.own_callable(layer, [kind.product, "dot_general_cls", "mask"], _PRODUCTS)
        or layer_kinds.own_callable(layer, ["promote_dtype"], [dtypes.promote_dtype])
        or layer_kinds.own_mathematics(type(layer), base)
    )
    if reason:
        return KernelUse(op, reason=reason)
    try:
        return KernelUse(op, kind.contracted(layer), shape, integers=kind.integers)
    except ValueError as error:
        return KernelUse(op, reason=str(error))


def install(layer: Any, qarray: QArray, scheme: Scheme, static: Static | None = None) -> None:
    """Gives a float layer, in place, a quantized kernel.

    Args:
      layer: an nnx.Linear, LinearGeneral, Einsum or Conv with a float kernel, which may be abstract.
      qarray: its kernel quantized, of the same shape, with the contracted axes last in memory.
      scheme: how to quantize the layer's input.
      static: scale and zero point (or None) of the input, () or of the shape of a stack of layers, in place of
        those of the scheme.

    Raises:
      TypeError: if `layer` is none of these, or quantized already.
      ValueError: if `qarray` has another shape than the kernel, or does not fit the scheme: another dtype, or
        packed for W8A8.

    >>> from jax_qmm import W8A8
    >>> linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> scheme = W8A8()
    >>> install(linear, scheme.quantize_weight(linear.kernel[...], (-2,)), scheme)
    >>> linear(jnp.ones((2, 3))).shape
    (2, 4)
    """
    kind, float_kernel = layer_kinds.check_kind(layer, layer_kinds.NNX), layer.kernel
    if isinstance(float_kernel, QuantizedParam):
        raise TypeError("layer is quantized already, needs a float kernel")
    if qarray.shape != float_kernel.shape:
        raise ValueError(f"qarray is {qarray}, needs the kernel's shape {float_kernel.shape}")
    check_weight(qarray, scheme)
    stack = qarray.shape[: qarray.ndim - len(kind.shape(layer))]
    # The constructor would shard all leaves by the metadata, which is that of the kernel.
    layer.kernel = QuantizedParam.from_metadata(qarray, float_kernel.get_metadata())
    leaves = products.static_leaves(*static or (scheme.activation_scale, scheme.activation_zero_point), stack)
    layer.promote_dtype = _Promote(jnp.dtype(float_kernel.dtype), isinstance(layer, _INSIST))
    setattr(layer, kind.product, nnx.data(_Product(scheme, *leaves)))


def install_all(layers: Mapping[str, Any], plan: Plan) -> Plan:
    """Quantizes the layers of a plan in place.

    Layers that share a kernel go on sharing it where it is quantized for all of them in the same way.

    Args:
      layers: all that `weight_layers` finds, by path.
      plan: what to do with them.

    Returns:
      The plan, with a note for each layer that no longer shares its kernel.
    """
    holders: dict[int, list[tuple[str, nnx.Variable]]] = {}
    for path, layer in layers.items():
        for variable in vars(layer).values():
            if isinstance(variable, nnx.Param):
                holders.setdefault(id(variable), []).append((path, variable))
    way = lambda path: (
        path in plan.conversions
        and (
            plan.conversions[path].use.contracted,
            plan.conversions[path].scheme.with_static(None),
        )
    )
    conversions, made = {}, {}
    for path, conversion in plan.conversions.items():
        layer, shared = layers[path], id(layers[path].kernel)
        key = shared, way(path)
        qarray = made[key].get_value() if key in made else conversion.quantize(layer.kernel.get_value())
        install(layer, qarray, conversion.scheme, conversion.static)
        layer.kernel = made.setdefault(key, layer.kernel)
        apart = [other for other, _ in holders[shared] if way(other) != way(path)]
        if apart:
            note = (
                f"it shared its kernel with {', '.join(other or '(the model)' for other in apart)}; now it has its own"
            )
            conversion = dataclasses.replace(conversion, note="; ".join(filter(None, [conversion.note, note])))
        conversions[path] = conversion
    return dataclasses.replace(plan, conversions=conversions)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What `_Promote` hands to a product in place of a kernel."""

    value: Any
    bias: jax.Array | None
    dtype: jnp.dtype


_INSIST = nnx.Linear, nnx.Conv


@dataclasses.dataclass(frozen=True)
class _Promote:
    """Flax's promote_dtype for a quantized kernel, which counts with the dtype that it had as a float array.

    The bias goes with the kernel, to be added before the output is rounded. nnx.Linear and Conv insist on one to
    add where they have one: they get -0.0, which changes nothing and which XLA drops.
    """

    kernel_dtype: jnp.dtype
    insists: bool

    def __call__(self, args, *, dtype=None):
        inputs, kernel, bias = args
        dtype = products.promoted_dtype(dtype, inputs, self.kernel_dtype, bias)
        inputs = jnp.asarray(inputs, dtype)
        if bias is None:
            return inputs, _Kernel(kernel, None, dtype), None
        left = jnp.full(1, -0.0, dtype) if self.insists else None
        return inputs, _Kernel(kernel, jnp.asarray(bias, dtype), dtype), left


class _Product(nnx.Module):
    """What multiplies in a quantized layer, in place of its dot_general, with the static scale of its input if any."""

    def __init__(self, scheme, scale=None, zero_point=None):
        self.scheme = scheme.with_static(None)
        self.scale = nnx.data(None if scale is None else ActivationScale(scale))
        self.zero_point = nnx.data(None if zero_point is None else ActivationScale(zero_point))

    def __call__(self, *operands, **options):
        read = lambda variable: None if variable is None else variable[...]
        scheme = self.scheme.with_static(read(self.scale), read(self.zero_point))
        if isinstance(operands[0], str):
            equation, inputs, kernel = operands
            multiply, arguments = products.einsum_product, (equation, inputs, kernel.value)
        elif len(operands) == 3:
            inputs, kernel, numbers = operands
            multiply, arguments = products.product, (inputs, kernel.value, numbers)
        else:
            inputs, kernel, strides, padding = operands
            multiply, arguments = products.conv_product, (inputs, kernel.value, strides, padding)
        return multiply(*arguments, kernel.bias, kernel.dtype, scheme=scheme, **options)


class RangeRecorder(nnx.Module):
    """The promote_dtype of a float layer under calibration: keeps the range, with 0 in it, of its input."""

    def __init__(self, layer: Any, use: KernelUse):
        stack = _stack(layer, use)
        self.low, self.high = (nnx.Variable(jnp.zeros(stack, jnp.float32)) for _ in range(2))
        self.reached = nnx.Variable(jnp.zeros(stack, bool))
        layer.promote_dtype = nnx.data(self)

    def __call__(self, args, *, dtype=None):
        promoted = dtypes.promote_dtype(args, dtype=dtype)
        inputs = promoted[0].astype(jnp.float32)
        self.low.set_value(jnp.minimum(self.low[...], inputs.min(initial=0)))
        self.high.set_value(jnp.maximum(self.high[...], inputs.max(initial=0)))
        self.reached.set_value(self.reached[...] | True)
        return promoted

    def result(self) -> tuple[jax.Array, jax.Array] | None:
        """The range, or None if no batch reached all layers of a stack."""
        return (self.low[...], self.high[...]) if self.reached[...].all() else None


class ErrorRecorder(nnx.Module):
    """The product of a float layer that also runs quantized: adds up the squares of the error and of the output."""

    def __init__(self, layer: Any, conversion: Conversion):
        stack = _stack(layer, conversion.use)
        kind = layer_kinds.check_kind(layer, layer_kinds.NNX)
        self.conversion = Conversion(conversion.use, conversion.scheme.with_static(None))
        static = conversion.static or (conversion.scheme.activation_scale, conversion.scheme.activation_zero_point)
        self.product = _Product(conversion.scheme, *products.static_leaves(*static, stack))
        self.error, self.size = (nnx.Variable(jnp.zeros(stack, jnp.float32)) for _ in range(2))
        self.reached = nnx.Variable(jnp.zeros(stack, bool))
        layer.promote_dtype = _Promote(jnp.dtype(layer.kernel.dtype), isinstance(layer, _INSIST))
        setattr(layer, kind.product, nnx.data(self))

    def __call__(self, *operands, **options):
        kernel = next(each for each in operands if isinstance(each, _Kernel))
        values = kernel.value.astype(kernel.dtype), self.conversion.quantize(kernel.value)
        out, quantized = (
            self.product(
                *(dataclasses.replace(kernel, value=value) if each is kernel else each for each in operands), **options
            )
            for value in values
        )
        error, size = squares(quantized, out)
        self.error.set_value(self.error[...] + error)
        self.size.set_value(self.size[...] + size)
        self.reached.set_value(self.reached[...] | True)
        return out

    def result(self) -> tuple[jax.Array, jax.Array] | None:
        """Both sums of squares, or None if no batch reached all layers of a stack."""
        return (self.error[...], self.size[...]) if self.reached[...].all() else None


def _stack(layer, use):
    shape = layer.kernel.shape
    return shape[: len(shape) - len(use.shape)]


def record(
    model: nnx.Module,
    recorder: Callable[[nnx.Module, Any], Any],
    wanted: Mapping[str, Any],
    run: Callable[[nnx.Module], None],
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What recorders in a copy of a float model saw.

    Args:
      model: stays as it is.
      recorder: makes one of a layer and what `wanted` has for it.
      wanted: by path of the layer.
      run: runs the copy on all batches.

    Returns:
      Two numbers for each layer that was reached, by path.
    """
    probe = nnx.clone(model)
    layers = weight_layers(probe)
    recorders = {path: recorder(layers[path], argument) for path, argument in wanted.items()}
    run(probe)
    results = ((path, each.result()) for path, each in recorders.items())
    return {path: result for path, result in results if result is not None}
