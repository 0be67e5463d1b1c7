"""Flax nnx: `quantize_model` for an existing model, and `QuantLinear`, an nnx.Linear with a quantized kernel.

A quantized layer keeps its class. Its kernel is an `nnx.Param` that holds a `QArray` of the same shape, and
two of the callables that Flax lets one inject are replaced: `dot_general` (`einsum_op` of an Einsum) by a
small module that quantizes the input and multiplies, and `promote_dtype` by one that leaves the kernel as it
is and hands over the bias.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from tqdm import tqdm

from jax_qmm import layers, report
from jax_qmm.qarray import SCALE_DTYPES, QArray
from jax_qmm.schemes import W8A8, Rule


class ActivationScale(nnx.Variable):
    """A static scale or zero point of a layer's input: saved with the model, not trained."""


class QuantLinear(nnx.Linear):
    """An nnx.Linear whose kernel is quantized from the start.

    The kernel is initialised in float, quantized and dropped; `kernel` then holds a `QArray` of the same
    shape, (in_features, out_features). Input, bias and output have the dtypes that they have in nnx.Linear,
    and the bias is added before the one rounding of the output. Gradients reach the input and the bias; the
    kernel is frozen, so nnx.grad needs a filter that leaves it out, such as `nnx.PathContains("bias")`.

    Args:
      in_features: size of the last axis of the input.
      out_features: size of the last axis of the output.
      scheme: how to quantize.
      rngs: as for nnx.Linear.
      **options: all others of nnx.Linear except `dot_general` and `promote_dtype`.

    Raises:
      TypeError: for an option that nnx.Linear does not have, or one of those two.

    >>> layer = QuantLinear(3, 4, rngs=nnx.Rngs(0))
    >>> layer.kernel[...]
    QArray(int8[3,4], scale=float32[1,4], stored=[4,3])
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(self, in_features: int, out_features: int, *, scheme: W8A8 = W8A8(), rngs: nnx.Rngs, **options):
        for name in ("dot_general", "promote_dtype"):
            if name in options:
                raise TypeError(f"QuantLinear brings its own {name}")
        super().__init__(in_features, out_features, rngs=rngs, **options)
        _quantize_layer(self, (-2,), scheme)

    @classmethod
    def from_linear(cls, linear: nnx.Linear, scheme: W8A8 = W8A8()) -> "QuantLinear":
        """Converts a trained layer, which stays as it is.

        Args:
          linear: float layer.
          scheme: how to quantize.

        Returns:
          A QuantLinear with the quantized kernel and the bias of `linear`.

        Raises:
          TypeError: if `linear` is no nnx.Linear or `scheme` no W8A8.
          ValueError: if `linear` brings its own dot_general or promote_dtype, or is quantized already.

        >>> linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> QuantLinear.from_linear(linear, W8A8(symmetric=False))(jnp.ones((2, 3))).shape
        (2, 4)
        """
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}, needs an nnx.Linear")
        _, reason = _contracted(linear)
        if reason:
            raise ValueError(f"linear can't be quantized: {reason}")
        given = lambda variable: lambda key, shape, dtype: variable[...]
        return cls(
            linear.in_features,
            linear.out_features,
            scheme=scheme,
            use_bias=linear.bias is not None,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            precision=linear.precision,
            kernel_init=given(linear.kernel),
            bias_init=given(linear.bias),
            preferred_element_type=linear.preferred_element_type,
            rngs=nnx.Rngs(0),
        )


def quantize_model(
    model: nnx.Module,
    rules: Sequence[Rule],
    *,
    calibration: Iterable[Any] | None = None,
    forward: Callable[[nnx.Module, Any], Any] | None = None,
) -> tuple[nnx.Module, report.Report]:
    """Quantizes the layers of a model that rules name.

    Linear, LinearGeneral (so the projections of MultiHeadAttention too), Einsum and subclasses that call them
    are quantized; the report says why others were not. Paths are those of `nnx.iter_modules` joined by dots,
    such as "encoder.layers.0.attn.query"; that of the model itself is "". Layers stacked by nnx.vmap along a
    leading axis are quantized as a stack.

    No input is needed, nothing is patched outside of the model returned, and the model given stays as it is;
    layers that are not quantized share its arrays. Sharding metadata of a quantized kernel is dropped; its
    arrays stay where they are.

    To restore a saved model, make an abstract one of the same structure with `nnx.eval_shape`; where static
    scales came from a calibration, any `activation_scale` in the rules gives the same structure. To serialize
    what `jax.export` made of a model, export a function of `nnx.to_pure_dict` of its state: JAX serializes no
    nnx types, those of a float model neither.

    Args:
      model: float model.
      rules: the first whose regular expression matches all of a layer's path decides.
      calibration: batches for the static activation scales of the layers whose scheme has
        `activation="per_tensor"` and no `activation_scale`: the float model runs on each, and the range of
        each layer's input is recorded. A batch that is a tuple holds positional arguments of the model, one
        that is a dict keyword arguments, and anything else is the only argument. Without it these scales are
        computed from the data at each call.
      forward: called as `forward(model, batch)` for each batch in place of the above.

    Returns:
      The quantized model and a `Report`.

    Raises:
      TypeError: if `model` is no nnx.Module or rules are no `Rule`s.
      ValueError: if `calibration` is given and there is nothing to calibrate, or no batch, or a range is not
        finite.

    >>> model = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=nnx.Rngs(0))
    >>> model, report = quantize_model(model, [Rule("query|key", W8A8()), Rule("mlp", W8A8())])
    >>> [row.path for row in report.quantized], report.unused_rules
    (['key', 'query'], (Rule(path='mlp', scheme=W8A8(int8, per_token)),))
    >>> model(jnp.ones((1, 3, 4))).shape
    (1, 3, 4)
    """
    book = layers.RuleBook(rules)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model is a {type(model).__name__}, needs an nnx.Module")
    quantized = nnx.clone(model)
    chosen, skipped = {}, {}
    for path, layer in _layers(quantized).items():
        scheme, (contracted, reason) = book.scheme(path), _contracted(layer)
        if scheme is None or reason:
            skipped[path] = reason if scheme else "no rule matches"
        else:
            chosen[path] = contracted, scheme
    uncalibrated = {path for path, (_, scheme) in chosen.items() if layers.takes_calibration(scheme)}
    ranges = {}
    if calibration is not None:
        ranges = _calibrate(quantized, uncalibrated, calibration, forward or _forward)

    rows = []
    for path, layer in _layers(quantized).items():
        op, before, note = type(layer).__name__, _own_bytes(layer), ""
        if path in skipped:
            rows.append(report.LayerRow(path, op, "", "", before, before, skipped[path]))
            continue
        contracted, scheme = chosen[path]
        static = None
        if path in ranges:
            static = layers.static_range(*ranges[path], scheme)
        elif ranges and path in uncalibrated:
            note = "no calibration batch reached it: its scale is computed at each call"
        _quantize_layer(layer, contracted, scheme, static)
        words = layers.describe(scheme, static)
        rows.append(report.LayerRow(path, op, words, report.runs_on(), before, _own_bytes(layer), note))
    totals = (report.nbytes(nnx.state(m, nnx.Param)) for m in (model, quantized))
    return quantized, report.Report(tuple(rows), book.unused(), *totals)


def _layers(model):
    """The modules that hold a weight of two or more dimensions, by path."""
    return {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if _weights(module)}


def _weights(module):
    own = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return [name for name, value in own.items() if getattr(value.get_value(), "ndim", 0) >= 2]


def _own_bytes(layer):
    return report.nbytes([own.get_value() for own in vars(layer).values() if isinstance(own, nnx.Variable)])


def _product_name(layer):
    """The attribute of a layer that holds the callable which multiplies."""
    return "einsum_op" if isinstance(layer, nnx.Einsum) else "dot_general"


def _kernel_shape(layer):
    """The shape that the kernel of a layer has when it is not one of a stack."""
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nnx.Einsum):
        return tuple(layer.kernel_shape)
    return *layer.batch_axis.values(), *layer.in_features, *layer.out_features


def _contracted(layer):
    """The contracted axes of a kernel, counted from the end, and why it can't be quantized or None."""
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        return (), "a convolution"
    if isinstance(layer, nnx.Embed):
        return (), "a table that is looked up"
    if not isinstance(layer, nnx.Linear | nnx.LinearGeneral | nnx.Einsum):
        return (), layers.by_hand("not a layer of Flax", _weights(layer))
    kernel, shape = layer.kernel.get_value(), _kernel_shape(layer)
    product = getattr(layer, _product_name(layer))
    if isinstance(kernel, QArray):
        return (), "quantized already"
    if kernel.dtype not in SCALE_DTYPES:
        return (), f"its kernel has dtype {kernel.dtype}"
    if kernel.shape[kernel.ndim - len(shape) :] != shape:
        return (), f"its kernel has shape {kernel.shape}, which does not end in {shape}"
    if getattr(layer, "dot_general_cls", None) or product not in (None, jax.lax.dot_general, jnp.einsum):
        return (), f"it brings its own {_product_name(layer)}"
    if layer.promote_dtype is not dtypes.promote_dtype:
        return (), "it brings its own promote_dtype"
    if isinstance(layer, nnx.Einsum):
        try:
            return layers.einsum_contracted(layer.einsum_str), None
        except ValueError as error:
            return (), str(error)
    n_in = n_out = 1
    if isinstance(layer, nnx.LinearGeneral):
        n_in, n_out = len(layer.in_features), len(layer.out_features)
    return tuple(range(-n_in - n_out, -n_out)), None


def _quantize_layer(layer, contracted, scheme, static=None):
    """Quantizes a layer in place. `static`: scale and zero point of its input, or those of the scheme."""
    kernel = layer.kernel.get_value()
    stack = kernel.shape[: kernel.ndim - len(_kernel_shape(layer))]
    layer.kernel = nnx.Param(layers.quantize_kernel(kernel, contracted, scheme))
    static = layers.static_leaves(*static or (scheme.activation_scale, scheme.activation_zero_point), stack)
    layer.promote_dtype = _Promote(jnp.dtype(kernel.dtype), isinstance(layer, nnx.Linear))
    setattr(layer, _product_name(layer), nnx.data(_Product(scheme, *static)))


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What `_Promote` hands to `_Product` in place of a kernel."""

    qarray: QArray
    bias: jax.Array | None
    dtype: jnp.dtype


@dataclasses.dataclass(frozen=True)
class _Promote:
    """Flax's promote_dtype for a quantized kernel, which counts with the dtype that it had as a float array.

    The bias goes with the kernel, to be added before the output is rounded. nnx.Linear insists on one to add
    where it has one: it gets -0.0, which changes nothing and which XLA drops.
    """

    kernel_dtype: jnp.dtype
    insists: bool

    def __call__(self, args, *, dtype=None):
        inputs, kernel, bias = args
        dtype = layers.promoted_dtype(dtype, inputs, self.kernel_dtype, bias)
        inputs = jnp.asarray(inputs, dtype)
        if bias is None:
            return inputs, _Kernel(kernel, None, dtype), None
        left = jnp.full(1, -0.0, dtype) if self.insists else None
        return inputs, _Kernel(kernel, jnp.asarray(bias, dtype), dtype), left


class _Product(nnx.Module):
    """The dot_general or einsum_op of a quantized layer, with the static scale of its input if it has one."""

    def __init__(self, scheme, scale=None, zero_point=None):
        self.scheme = layers.without_static(scheme)
        self.scale = nnx.data(None if scale is None else ActivationScale(scale))
        self.zero_point = nnx.data(None if zero_point is None else ActivationScale(zero_point))

    def __call__(self, *operands, **options):
        read = lambda variable: None if variable is None else variable[...]
        options["scheme"] = layers.with_static(self.scheme, read(self.scale), read(self.zero_point))
        if isinstance(operands[0], str):
            equation, inputs, kernel = operands
            return layers.einsum_product(equation, inputs, kernel.qarray, kernel.bias, kernel.dtype, **options)
        inputs, kernel, numbers = operands
        return layers.product(inputs, kernel.qarray, numbers, kernel.bias, kernel.dtype, **options)


class _Recorder(nnx.Module):
    """The promote_dtype of a float layer under calibration: keeps the range, with 0 in it, of its input."""

    def __init__(self, stack):
        self.low, self.high = nnx.Variable(jnp.zeros(stack)), nnx.Variable(jnp.zeros(stack))
        self.reached = nnx.Variable(jnp.zeros(stack, bool))

    def __call__(self, args, *, dtype=None):
        promoted = dtypes.promote_dtype(args, dtype=dtype)
        inputs = promoted[0].astype(jnp.float32)
        self.low.set_value(jnp.minimum(self.low[...], inputs.min(initial=0)))
        self.high.set_value(jnp.maximum(self.high[...], inputs.max(initial=0)))
        self.reached.set_value(self.reached[...] | True)
        return promoted


def _forward(model, batch):
    if isinstance(batch, tuple):
        return model(*batch)
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def _calibrate(model, paths, batches, forward):
    """The range of the input of each layer in `paths` that the batches reached."""
    layers.check_calibration(paths)
    probe = nnx.clone(model)
    recorders = {}
    for path, layer in _layers(probe).items():
        if path in paths:
            kernel = layer.kernel.get_value()
            recorders[path] = _Recorder(kernel.shape[: kernel.ndim - len(_kernel_shape(layer))])
            layer.promote_dtype = nnx.data(recorders[path])
    for batch in tqdm(batches, desc="calibrating", unit="batch"):
        forward(probe, batch)
    ranges = {
        path: (recorder.low[...], recorder.high[...])
        for path, recorder in recorders.items()
        if recorder.reached[...].all()
    }
    layers.check_ranges(ranges)
    return ranges
