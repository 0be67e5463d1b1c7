"""Flax linen: `quantize_model` for a model and its variables, and `QuantDense`, with a quantized kernel."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from flax.core import FrozenDict, freeze, meta, unfreeze
from tqdm import tqdm

from jax_qmm import layers, linen_layers, report
from jax_qmm.explain import trace
from jax_qmm.qarray import SCALE_DTYPES, QArray
from jax_qmm.schemes import W8A8, Rule

Variables = Mapping[str, Any]
_SCALE, _ZERO_POINT = "activation_scale", "activation_zero_point"


class QuantDense(nn.Dense):
    """An nn.Dense whose kernel is quantized from the start.

    Its parameters are those of nn.Dense, with a `QArray` of the same logical shape as `kernel`, and
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

    scheme: W8A8 = W8A8()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer to the last axis of `inputs`."""
        if own := linen_layers.own_callable(self):
            raise ValueError(f"QuantDense can't be run: {own}")

        def init_kernel(key, shape, dtype):
            return layers.quantize_kernel(meta.unbox(self.kernel_init(key, shape, dtype)), (-2,), self.scheme)

        self.param("kernel", init_kernel, (inputs.shape[-1], self.features), self.param_dtype)
        if self.use_bias:
            self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        for name, value in _static_params(self.scheme).items():
            self.param(name, lambda key, value=value: value)
        return _run(self, _Layer(self.scheme, self.param_dtype), inputs)

    @classmethod
    def from_dense(cls, dense: nn.Dense, variables: Variables, scheme: W8A8 = W8A8()) -> tuple[QuantDense, dict]:
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
        params = dict(meta.unbox(unfreeze(variables))["params"])
        quantized = isinstance(params["kernel"], QArray)
        reason = "it is quantized already" if quantized else linen_layers.own_callable(dense)
        if reason:
            raise ValueError(f"dense can't be quantized: {reason}")
        params["kernel"] = layers.quantize_kernel(params["kernel"], (-2,), scheme)
        params |= _static_params(scheme)
        fields = {
            field.name: getattr(dense, field.name) for field in dataclasses.fields(nn.Dense) if field.name != "parent"
        }
        return cls(**fields, scheme=scheme), {**variables, "params": params}


@dataclasses.dataclass(frozen=True)
class _Layer:
    """How a quantized layer runs: its scheme without static scales, and its kernel's dtype when float."""

    scheme: W8A8
    kernel_dtype: Any


class QuantizedModel(nn.Module):
    """A model whose quantized kernels run as such; made by `quantize_model`, used like the model it holds.

    Its variables have the paths of that model's. It can be a submodule of another.

    Attributes:
      model: the model as given.
      layers: how each quantized layer runs, by path.
    """

    model: nn.Module
    layers: Mapping[str, _Layer]

    def setup(self):
        nn.share_scope(self, self.model)

    def __call__(self, *args, **kwargs):
        """Calls the model."""
        with nn.intercept_methods(functools.partial(self._intercept, len(self.path))):
            return self.model(*args, **kwargs)

    @nn.nowrap
    def apply(self, variables: Variables, *args, **kwargs):
        """As `model.apply`, so that `method` can name any method of the model."""
        with nn.intercept_methods(functools.partial(self._intercept, 0)):
            return self.model.apply(variables, *args, **kwargs)

    @nn.nowrap
    def _intercept(self, depth, next_function, args, kwargs, context):
        module = context.module
        layer = module.scope and self.layers.get("/".join(module.path[depth:]))
        if layer is None or not isinstance(_param(module, "kernel"), QArray):
            return next_function(*args, **kwargs)
        if linen_layers.is_call_of_layer(context):
            return _run(module, layer, *args, **kwargs)
        if context.method_name == "__call__" and not isinstance(module, linen_layers.LAYERS):
            raise TypeError(
                f"the kernel of {'/'.join(module.path)} was quantized, but {type(module).__name__} can't use "
                "it: keep it from the rules of quantize_model, or give that an example to tell the layers by"
            )
        return next_function(*args, **kwargs)


def quantize_model(
    model: nn.Module,
    variables: Variables,
    rules: Sequence[Rule],
    *,
    example: Any = None,
    calibration: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Variables, Any], Any] | None = None,
) -> tuple[nn.Module, Variables, report.Report]:
    """Quantizes the layers of a model that rules name.

    Dense, DenseGeneral (so attention projections too) and Einsum are quantized; the report says why others
    were not. Paths are those of the parameters, joined by slashes: "encoder/layers_0/attention/query". Layers
    stacked by nn.scan or nn.vmap along a leading axis of the parameters are quantized as a stack.

    A linen model tells the class of its layers only when called. Without an input, layers are told by their
    parameters: a `kernel` of rank 2 is one of Dense; kernels of higher rank are told by their bias and by the
    names that attention gives its projections, and skipped where that leaves a doubt. An `example` settles
    it; it is traced, not run.

    Nothing is patched and nothing that was given is changed: the model returned intercepts the calls of those
    layers while it runs. Sharding metadata (boxes) of quantized kernels is dropped; their arrays stay where
    they are.

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
      forward: called as `forward(model, variables, batch)` for each batch in place of the above. It must not
        be a function that was jitted and run before.

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
    book = layers.RuleBook(rules)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, needs a linen.Module")
    if not isinstance(variables, Mapping) or "params" not in variables:
        held = list(variables) if isinstance(variables, Mapping) else f"a {type(variables).__name__}"
        raise TypeError(f'variables is {held}, needs a mapping with "params"')
    forward = forward or _forward
    if calibration is not None:
        calibration = iter(tqdm(calibration, desc="calibrating", unit="batch"))
        if example is None:
            example = next(calibration, None)
            calibration = itertools.chain([] if example is None else [example], calibration)
    called = None if example is None else _watch(model, variables, example, forward)

    params = traverse_util.flatten_dict(unfreeze(variables["params"]), keep_empty_nodes=True)
    found = _layers(params)
    chosen, skipped = {}, {}
    for path, own in found.items():
        scheme, kernel = book.scheme("/".join(path)), _tell(path, own, found, called)
        if scheme is None or kernel.reason:
            skipped[path] = kernel.op, kernel.reason if scheme else "no rule matches"
        else:
            chosen[path] = kernel, scheme
    wanted = {"/".join(path) for path, (_, scheme) in chosen.items() if layers.takes_calibration(scheme)}
    ranges = {} if calibration is None else _calibrate(model, variables, wanted, calibration, forward)

    rows, how = [], {}
    for path, own in found.items():
        name, before, note = "/".join(path), report.nbytes(own), ""
        if path in skipped:
            op, reason = skipped[path]
            rows.append(report.LayerRow(name, op, "", "", before, before, reason))
            continue
        kernel, scheme = chosen[path]
        static = None
        if name in ranges:
            static = layers.static_range(*map(jnp.asarray, ranges[name]), scheme)
        elif ranges and name in wanted:
            note = "no calibration batch reached it: its scale is computed at each call"
        stack = own["kernel"].shape[: own["kernel"].ndim - len(kernel.shape)]
        own = {
            **own,
            "kernel": layers.quantize_kernel(own["kernel"], kernel.contracted, scheme),
            **_static_params(scheme, static, stack),
        }
        params |= {(*path, leaf): value for leaf, value in own.items() if leaf != "bias"}
        how[name] = _Layer(layers.without_static(scheme), found[path]["kernel"].dtype)
        rows.append(
            report.LayerRow(
                name, kernel.op, layers.describe(scheme, static), report.runs_on(), before, report.nbytes(own), note
            )
        )

    quantized = {**variables, "params": traverse_util.unflatten_dict(params)}
    totals = (report.nbytes(tree["params"]) for tree in (variables, quantized))
    return (
        QuantizedModel(model, how),
        freeze(quantized) if isinstance(variables, FrozenDict) else quantized,
        report.Report(tuple(rows), book.unused(), *totals),
    )


def _layers(params):
    """The parameters, out of their boxes, of each module that holds a weight of rank 2 or more, by path."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for (*path, name), value in params.items():
        if value is not traverse_util.empty_node:
            found.setdefault(tuple(path), {})[name] = meta.unbox(value)
    return {path: own for path, own in found.items() if any(getattr(x, "ndim", 0) >= 2 for x in own.values())}


def _tell(path, own, found, called):
    """The `Kernel` of the layer at `path`; `called` are those seen in a call of the model, or None."""
    told = linen_layers.guess(path, own, {other[-1] for other in found if other and other[:-1] == path[:-1]})
    if called is not None:
        seen = called.get("/".join(path), linen_layers.Kernel("?", reason="the example did not call it"))
        told = seen if "kernel" in own else dataclasses.replace(told, op=seen.op)
    if "kernel" not in own or told.reason:
        return told
    kernel, reason = own["kernel"], None
    if isinstance(kernel, QArray):
        reason = "quantized already"
    elif kernel.dtype not in SCALE_DTYPES:
        reason = f"its kernel has dtype {kernel.dtype}"
    elif kernel.shape[kernel.ndim - len(told.shape) :] != told.shape:
        reason = f"its kernel has shape {kernel.shape}, which does not end in {told.shape}"
    return dataclasses.replace(told, reason=reason)


def _watch(model, variables, example, forward):
    observer = linen_layers.Observer()
    with nn.intercept_methods(observer):
        trace(forward, model, variables, example)
    return observer.kernels


def _calibrate(model, variables, paths, batches, forward):
    """The range of the input of each layer in `paths` that the batches reached."""
    layers.check_calibration(paths)
    observer = linen_layers.Observer(paths)
    with nn.intercept_methods(observer):
        for batch in batches:
            jax.block_until_ready(forward(model, variables, batch))
    layers.check_ranges(observer.ranges)
    return observer.ranges


def _forward(model, variables, batch):
    if isinstance(batch, tuple):
        return model.apply(variables, *batch)
    return model.apply(variables, **batch) if isinstance(batch, Mapping) else model.apply(variables, batch)


def _static_params(scheme, static=None, stack=()):
    """The parameters for a static scale and zero point, `static` or else those of the scheme."""
    static = layers.static_leaves(*static or (scheme.activation_scale, scheme.activation_zero_point), stack)
    return {name: value for name, value in zip((_SCALE, _ZERO_POINT), static) if value is not None}


def _param(module, name):
    return meta.unbox(module.get_variable("params", name)) if module.has_variable("params", name) else None


def _run(module, layer, inputs, einsum_str=None):
    """Dense, DenseGeneral or Einsum with a quantized kernel."""
    kernel, bias = _param(module, "kernel"), _param(module, "bias")
    scheme = layers.with_static(layer.scheme, _param(module, _SCALE), _param(module, _ZERO_POINT))
    dtype = layers.promoted_dtype(module.dtype, inputs, layer.kernel_dtype, bias)
    inputs, bias = jnp.asarray(inputs, dtype), None if bias is None else jnp.asarray(bias, dtype)
    options = {"precision": module.precision, "scheme": scheme}
    if isinstance(module, nn.Einsum):
        options["preferred_element_type"] = module.preferred_element_type
        return layers.einsum_product(einsum_str or module.einsum_str, inputs, kernel, bias, dtype, **options)
    axis, batch = -1, ()
    if isinstance(module, nn.DenseGeneral):
        axis, batch = module.axis, module.batch_dims
    axis, batch = (
        tuple(sorted(i % inputs.ndim for i in (axes if isinstance(axes, Sequence) else [axes])))
        for axes in (axis, batch)
    )
    n = len(batch)
    numbers = (axis, tuple(range(n, n + len(axis)))), (batch, tuple(range(n)))
    return layers.product(inputs, kernel, numbers, bias, dtype, **options)
