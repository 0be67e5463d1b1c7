"""Flax linen: `quantize_model` for a model and its variables, and the layers `QuantDense` and `QuantConv`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

try:
    from flax import linen as nn, traverse_util
    from flax.core import FrozenDict, freeze, meta, unfreeze

    from jax_qmm.models import calibration as calibrate, layer_kinds, linen_layers, linen_observer, report
    from jax_qmm.models.linen_kernel import QuantizedBox, QuantizedKernel
    from jax_qmm.models.linen_layers import install, run_quantized
    from jax_qmm.models.plan import make_plan
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{__name__} needs {error.name}: pip install "jax_qmm[flax]"', name=error.name) from error

from jax_qmm.explanation import trace
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W8A8, Rule, Scheme, check_scheme

__all__ = ["QuantConv", "QuantDense", "QuantizedBox", "QuantizedKernel", "QuantizedModel", "install", "quantize_model"]

Variables = Mapping[str, Any]


class QuantDense(nn.Dense):
    """An nn.Dense whose kernel is quantized from the start.

    Its parameters are those of nn.Dense, with a `QuantizedKernel` of the same logical shape as `kernel`, and
    `activation_scale` and `activation_zero_point` where the scheme gives them. The bias is added before the
    one rounding of the output. Gradients reach the input and the bias; the kernel is frozen.

    Attributes:
      scheme: how to quantize. All others are those of nn.Dense, except that `promote_dtype`, `dot_general`
        and `dot_general_cls` must be left alone.

    >>> layer = QuantDense(4)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> variables["params"]["kernel"]
    QArray(int8[3,4], scale=float32[1,4], stored=[4,3])
    >>> layer.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)
    """

    scheme: Scheme = W8A8()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer to the last axis of `inputs`."""
        check_scheme(self.scheme)
        _declare_quantized(self, (inputs.shape[-1], self.features), (-2,))
        with nn.intercept_methods(run_quantized):
            return super().__call__(inputs)

    @classmethod
    def from_dense(cls, dense: nn.Dense, variables: Variables, scheme: Scheme = W8A8()) -> tuple[QuantDense, dict]:
        """Converts a trained layer; `dense` and `variables` stay as they are.

        Args:
          dense: float layer.
          variables: its variables, {"params": {"kernel": ..., "bias": ...}}.
          scheme: how to quantize.

        Returns:
          The QuantDense and its variables.

        Raises:
          ValueError: if `dense` brings its own promote_dtype or dot_general, or is quantized already.

        >>> dense = nn.Dense(4)
        >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 3)))
        >>> layer, variables = QuantDense.from_dense(dense, variables, W8A8(symmetric=False))
        >>> layer.apply(variables, jnp.ones((2, 3))).shape
        (2, 4)
        """
        params = dict(variables["params"])
        kernel = linen_layers.unboxed(params["kernel"])
        quantized = isinstance(kernel, QArray)
        reason = "it is quantized already" if quantized else linen_layers.own_callable(dense)
        if reason:
            raise ValueError(f"dense can't be quantized: {reason}")
        params = install(params, scheme.quantize_weight(kernel, (-2,)), scheme)
        fields = {
            field.name: getattr(dense, field.name) for field in dataclasses.fields(nn.Dense) if field.name != "parent"
        }
        return cls(**fields, scheme=scheme), {**variables, "params": params}


class QuantConv(nn.Conv):
    """An nn.Conv whose kernel is quantized from the start; `quantize_model` converts a trained one.

    Its parameters are those of nn.Conv, with a `QuantizedKernel` of the same logical shape as `kernel`, and static
    scales as in `QuantDense`. So are bias and gradients.

    Attributes:
      scheme: how to quantize: `W8A8` of int8 without tile_size, `W4A16` or `W8A16`. All others are those of nn.Conv,
        except that `mask`, `promote_dtype`, `conv_general_dilated` and `conv_general_dilated_cls` must be left alone.

    >>> layer = QuantConv(16, (3, 3), strides=2)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 6, 6, 8)))
    >>> variables["params"]["kernel"]
    QArray(int8[3,3,8,16], scale=float32[1,1,1,16], stored=[16,3,3,8])
    >>> layer.apply(variables, jnp.ones((2, 6, 6, 8))).shape
    (2, 3, 3, 16)
    """

    scheme: Scheme = W8A8()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer to `inputs` `(*batch, *spatial, channels)`."""
        layer_kinds.check_convolves(self.scheme, "QuantConv")
        window = (self.kernel_size,) if isinstance(self.kernel_size, int) else tuple(self.kernel_size)
        shape = (*window, inputs.shape[-1] // self.feature_group_count, self.features)
        _declare_quantized(self, shape, layer_kinds.window_contracted(len(window)))
        with nn.intercept_methods(run_quantized):
            return super().__call__(inputs)


def _declare_quantized(layer, shape, contracted):
    """Declares the parameters of a bound layer whose kernel, of `shape`, is quantized from the start."""
    if own := linen_layers.own_callable(layer):
        raise ValueError(f"{type(layer).__name__} can't be run: {own}")

    def init_kernel(key, shape, dtype):
        box = layer.kernel_init(key, shape, dtype)
        qarray = layer.scheme.quantize_weight(meta.unbox(box), contracted)
        return install({"kernel": box}, qarray, layer.scheme)["kernel"]

    layer.param("kernel", init_kernel, shape, layer.param_dtype)
    if layer.use_bias:
        layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype)
    for name, value in linen_layers.static_params(layer.scheme).items():
        layer.param(name, lambda key, value=value: value)


class QuantizedModel(nn.Module):
    """Mixed into the class of a model by `quantize_model`: layers then run with the quantized kernels they hold.

    The model is otherwise as it was: it has its fields, methods, submodules and paths, is as hashable, and can
    be a submodule of another or go through transformations. Its `init` gives float variables. Submodules of a bound
    model run quantized through its methods and `apply(method=...)`, not when they are called themselves.

    >>> dense, x = nn.Dense(4), jnp.ones((2, 3))
    >>> model, variables, _ = quantize_model(dense, dense.init(jax.random.key(0), x), [Rule("", W8A8())])
    >>> isinstance(model, QuantizedModel), isinstance(model, nn.Dense), model.features
    (True, True, 4)
    """

    @nn.nowrap
    def apply(self, variables: Variables, *args, **kwargs):
        """As `nn.Module.apply`."""
        with nn.intercept_methods(run_quantized):
            return super().apply(variables, *args, **kwargs)

    _float_class: ClassVar[type[nn.Module]]  # of which `_quantized_class` made this one

    @nn.nowrap
    def __reduce__(self):  # pickle would look for the class by its name
        return _make, (self._float_class, _fields(self))


def _fields(model):
    names = (field.name for field in dataclasses.fields(model) if field.init)
    return {name: getattr(model, name) for name in names if name != "parent"}


def _make(cls, fields):
    return _quantized_class(cls)(**fields)


@functools.cache
def _quantized_class(cls):
    """`cls` with each method of its own intercepted by `run_quantized`; the same class for the same `cls`."""
    own = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
    methods = {name: f for base in reversed(own) for name, f in vars(base).items() if inspect.isfunction(f)}

    def intercepted(name, original):
        def call(self, *args, **kwargs):
            with nn.intercept_methods(run_quantized):
                return getattr(super(quantized, self), name)(*args, **kwargs)

        return nn.nowrap(functools.wraps(original, updated=())(call))

    taken = {
        name: intercepted(name, f)
        for name, f in methods.items()
        if name == "__call__" or not (name.startswith("__") or name == "setup" or hasattr(f, "nowrap"))
    }
    namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__, "_float_class": cls, **taken}
    quantized = type(cls)(f"Quantized{cls.__name__}", (QuantizedModel, cls), namespace)
    return quantized


def quantize_model(
    model: nn.Module,
    variables: Variables,
    rules: Sequence[Rule],
    *,
    example: Any = None,
    calibration: Iterable[Any] | None = None,
    sensitivity: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Variables, Any], Any] | None = None,
) -> tuple[nn.Module, Variables, report.Report]:
    """Quantizes the layers of a model that rules name.

    Dense, DenseGeneral (so attention projections too), Einsum and Conv are quantized; the report says why others
    were not. Paths are those of the parameters, joined by slashes: "encoder/layers_0/attention/query". Layers
    stacked by nn.scan or nn.vmap along a leading axis of the parameters are quantized as a stack.

    A linen model tells the class of its layers only when called. Without an input, layers are told by their
    parameters: a `kernel` of rank 2 is one of Dense; kernels of higher rank are told by their bias, by the names
    that attention gives its projections and by the name that Flax gives a Conv, and skipped where that leaves a
    doubt. An `example` settles it; it is traced, not run. Where a layer turns out to do something else with its
    kernel, the quantized model raises a TypeError that names it.

    Nothing is patched and nothing that was given is changed. The model returned is of a class that inherits from
    the given model's; it intercepts the calls of layers while it runs. A quantized kernel among its variables is a
    `QuantizedKernel`: it holds the scheme, so one model runs variables of any scheme. Where the float kernel is in a
    box with sharding metadata, the quantized one is in a `QuantizedBox` with the same metadata, from which
    `nn.get_partition_spec` and `nn.get_sharding` make one spec for each array of the kernel. Arrays stay where they
    are.

    `flax.serialization` and orbax save and restore the variables, given those that this function returns (or what
    jax.eval_shape makes of them) as the target.

    Args:
      model: float model.
      variables: its variables; only "params" is changed.
      rules: the first whose regular expression matches all of a layer's path decides.
      example: a batch (see `calibration`) of arrays or ShapeDtypeStructs.
      calibration: batches for the static activation scales of those layers whose scheme has
        `activation="per_tensor"` and no `activation_scale`: the float model runs on each, and the range of
        each layer's input is recorded (one range for all layers of a stack). A batch that is a tuple holds
        positional arguments of the model, one that is a dict keyword arguments, and anything else is the only
        argument. Without it these scales are computed from the data at each call.
      sensitivity: batches for the error of each layer: the float model runs on each, every layer to be
        quantized runs both ways on its float input, and the report's rows have the relative L2 error of the
        outputs. Which layers to leave in float, if any, shows there.
      forward: called as `forward(model, variables, batch)` for each batch in place of the above. It may be
        jitted, if it takes the variables as an argument.

    Returns:
      The quantized model, its variables and a `Report`. Static scales are parameters next to the kernel.

    Raises:
      TypeError: if `model` is no linen.Module, `variables` has no "params", or rules are no `Rule`s.
      ValueError: if `calibration` is given and there is nothing to calibrate, or it held no batch or one with
        NaN.

    >>> model = nn.MultiHeadDotProductAttention(num_heads=2)
    >>> x = jnp.ones((1, 3, 4))
    >>> variables = model.init(jax.random.key(0), x)
    >>> rules = [Rule("query|key", W8A8()), Rule("mlp", W8A8())]
    >>> model, variables, report = quantize_model(model, variables, rules)
    >>> sorted(row.path for row in report.quantized), report.unused_rules
    (['key', 'query'], (Rule(path='mlp', scheme=W8A8(int8, per_token)),))
    >>> model.apply(variables, x).shape
    (1, 3, 4)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, needs a linen.Module")
    if not isinstance(variables, Mapping) or "params" not in variables:
        held = list(variables) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
        raise TypeError(f'variables is {held}, needs a mapping with "params"')
    params = traverse_util.flatten_dict(unfreeze(variables["params"]), keep_empty_nodes=True)
    layers = linen_observer.weight_layers(params)
    forward = forward or (lambda model, variables, batch: calibrate.call(model.apply, batch, variables))

    called = None
    if calibration is not None and example is None:
        example, calibration = _peek(calibration)
    elif sensitivity is not None and example is None:
        example, sensitivity = _peek(sensitivity)
    if example is not None:
        observer = linen_observer.Observer()
        with nn.intercept_methods(observer):
            trace(forward, model, _with_params(variables, linen_observer.marked(params)), example)
        called = observer.kernels
    kernels = {"/".join(path): own["kernel"] for path, own in layers.items() if "kernel" in own}
    plan = make_plan(linen_observer.kernel_uses(layers, called), rules, kernels)

    def observed(batches, words, **wanted):
        observer = linen_observer.Observer(**wanted)
        fresh = _with_params(variables, linen_observer.marked(params))
        with nn.intercept_methods(observer):
            calibrate.run(batches, lambda batch: forward(model, fresh, batch), words)
        return observer

    if calibration is not None:
        calibrate.check_paths(plan.to_calibrate())
        ranges = observed(calibration, "calibrating", ranges=plan.to_calibrate()).ranges
        calibrate.check_ranges(ranges)
        plan = plan.calibrated({path: (jnp.asarray(low), jnp.asarray(high)) for path, (low, high) in ranges.items()})
    errors = {}
    if sensitivity is not None:
        sums = observed(sensitivity, "measuring sensitivity", errors=plan.conversions).errors
        errors = {path: calibrate.relative_error(*both) for path, both in sums.items()}

    before, after = {}, {}
    for path, own in layers.items():
        name = "/".join(path)
        before[name] = after[name] = report.nbytes(own)
        if name in plan.conversions:
            conversion, boxed = plan.conversions[name], {leaf: params[*path, leaf] for leaf in own}
            stack = own["kernel"].shape[: own["kernel"].ndim - len(conversion.use.shape)]
            qarray = conversion.quantize(own["kernel"])
            own = install(boxed, qarray, conversion.scheme, conversion.static, stack)
            params |= {(*path, leaf): value for leaf, value in own.items()}
            after[name] = report.nbytes(own)

    quantized = _with_params(variables, params)
    totals = report.nbytes(variables["params"]), report.nbytes(quantized["params"])
    return _quantized(model), quantized, report.make_report(plan, before, after, totals, errors)


def _quantized(model):
    return model if isinstance(model, QuantizedModel) else _make(type(model), _fields(model))


def _with_params(variables, params) -> Variables:
    """The variables with other, flattened, parameters."""
    new = {**variables, "params": traverse_util.unflatten_dict(params)}
    return freeze(new) if isinstance(variables, FrozenDict) else new


def _peek(batches):
    """The first batch, or None if there is none, and all batches."""
    batches = iter(batches)
    first = next(batches, None)
    return first, itertools.chain([] if first is None else [first], batches)
