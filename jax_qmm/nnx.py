"""Flax nnx: `quantize_model` for an existing model, and `QuantLinear` and `QuantConv`, with quantized kernels."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

try:
    from flax import nnx

    from jax_qmm.models import calibration as calibrate, layer_kinds, nnx_layers, report
    from jax_qmm.models.nnx_layers import ActivationScale, QuantizedParam, install
    from jax_qmm.models.plan import make_plan
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{__name__} needs {error.name}: pip install "jax_qmm[flax]"', name=error.name) from error

from jax_qmm.schemes import W8A8, Rule, Scheme, check_scheme

__all__ = ["ActivationScale", "QuantConv", "QuantLinear", "QuantizedParam", "install", "quantize_model"]


class QuantLinear(nnx.Linear):
    """An nnx.Linear whose kernel is quantized from the start.

    The kernel is initialised in float, quantized and dropped; `kernel` then is a `QuantizedParam` with a
    `QArray` of the same shape, (in_features, out_features). Input, bias and output have the dtypes that they
    have in nnx.Linear, and the bias is added before the one rounding of the output. Gradients reach the input
    and the bias; the kernel is frozen.

    Args:
      in_features: size of the last axis of the input.
      out_features: size of the last axis of the output.
      scheme: how to quantize.
      rngs: as for nnx.Linear.
      **options: all others of nnx.Linear except `dot_general` and `promote_dtype`.

    Raises:
      TypeError: for an option that nnx.Linear does not have, or one of those two.

    >>> import jax.numpy as jnp
    >>> layer = QuantLinear(3, 4, rngs=nnx.Rngs(0))
    >>> layer.kernel[...]
    QArray(int8[3,4], scale=float32[1,4], stored=[4,3])
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    def __init__(self, in_features: int, out_features: int, *, scheme: Scheme = W8A8(), rngs: nnx.Rngs, **options):
        _refuse_own(("dot_general", "promote_dtype"), options, "QuantLinear")
        check_scheme(scheme)
        super().__init__(in_features, out_features, rngs=rngs, **options)
        install(self, scheme.quantize_weight(self.kernel[...], (-2,)), scheme)

    @classmethod
    def from_linear(cls, linear: nnx.Linear, scheme: Scheme = W8A8()) -> "QuantLinear":
        """Converts a trained layer, which stays as it is.

        Args:
          linear: float layer.
          scheme: how to quantize.

        Returns:
          A QuantLinear with the quantized kernel and the bias of `linear`.

        Raises:
          TypeError: if `linear` is no nnx.Linear or `scheme` no scheme.
          ValueError: if `linear` brings its own dot_general or promote_dtype, or is quantized already.

        >>> import jax.numpy as jnp
        >>> linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> QuantLinear.from_linear(linear, W8A8(symmetric=False))(jnp.ones((2, 3))).shape
        (2, 4)
        """
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}, needs an nnx.Linear")
        if reason := nnx_layers.kernel_use(linear).reason:
            raise ValueError(f"linear can't be quantized: {reason}")
        given = lambda variable: lambda key, shape, dtype: variable[...]
        layer: Any = cls(
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
        # Given to the constructor, metadata would ask for a mesh to shard the float kernel on.
        layer.kernel = QuantizedParam.from_metadata(layer.kernel.get_value(), linear.kernel.get_metadata())
        if linear.bias is not None:
            layer.bias = nnx.Param.from_metadata(linear.bias.get_value(), linear.bias.get_metadata())
        return layer


class QuantConv(nnx.Conv):
    """An nnx.Conv whose kernel is quantized from the start; `quantize_model` converts a trained one.

    The kernel is initialised in float, quantized and dropped; `kernel` then is a `QuantizedParam` with a
    `QArray` of the same shape, (*kernel_size, in_features // feature_group_count, out_features). Input, bias and
    output are as in `QuantLinear`, and so are gradients.

    Args:
      in_features: size of the last axis of the input, its channels.
      out_features: size of the last axis of the output.
      kernel_size: sizes of the window, or one for a convolution of one axis.
      strides: for each spatial axis, or one for all.
      scheme: how to quantize: `W8A8` of int8 without tile_size, `W4A16` or `W8A16`.
      rngs: as for nnx.Conv.
      **options: all others of nnx.Conv except `conv_general_dilated`, `mask` and `promote_dtype`.

    Raises:
      TypeError: for an option that nnx.Conv does not have, or one of those three.
      ValueError: for another scheme.

    >>> import jax.numpy as jnp
    >>> layer = QuantConv(8, 16, (3, 3), strides=2, rngs=nnx.Rngs(0))
    >>> layer.kernel[...]
    QArray(int8[3,3,8,16], scale=float32[1,1,1,16], stored=[16,3,3,8])
    >>> layer(jnp.ones((2, 6, 6, 8))).shape
    (2, 3, 3, 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        scheme: Scheme = W8A8(),
        rngs: nnx.Rngs,
        **options,
    ):
        _refuse_own(("conv_general_dilated", "mask", "promote_dtype"), options, "QuantConv")
        layer_kinds.check_convolves(scheme, "QuantConv")
        super().__init__(in_features, out_features, kernel_size, strides, rngs=rngs, **options)
        contracted = layer_kinds.window_contracted(len(self.kernel_size))
        install(self, scheme.quantize_weight(self.kernel[...], contracted), scheme)


def _refuse_own(names, options, layer):
    for name in names:
        if name in options:
            raise TypeError(f"{layer} brings its own {name}")


def quantize_model(
    model: nnx.Module,
    rules: Sequence[Rule],
    *,
    calibration: Iterable[Any] | None = None,
    sensitivity: Iterable[Any] | None = None,
    forward: Callable[[nnx.Module, Any], Any] | None = None,
) -> tuple[nnx.Module, report.Report]:
    """Quantizes the layers of a model that rules name.

    Linear, LinearGeneral (so the projections of MultiHeadAttention too), Einsum, Conv and subclasses that call them
    are quantized; the report says why others were not. Paths are those of `nnx.iter_modules` joined by dots,
    such as "encoder.layers.0.attn.query"; that of the model itself is "". Layers stacked by nnx.vmap along a
    leading axis are quantized as a stack.

    No input is needed, nothing is patched outside of the model returned, and the model given stays as it is;
    layers that are not quantized share its arrays. A quantized kernel is a `QuantizedParam`, which nnx.grad and
    optimizers of nnx.Param leave alone. It keeps the kernel's metadata, and its arrays stay where they are.
    Layers that share one kernel share the quantized one, if the same scheme is for all of them.

    To restore a saved model, make an abstract one of the same structure with `nnx.eval_shape`, or on a mesh with
    `nnx.get_abstract_model`; where static scales came from a calibration, any `activation_scale` in the rules
    gives the same structure. To serialize what `jax.export` made of a model, export a function of
    `nnx.to_pure_dict` of its state: JAX serializes no nnx types, those of a float model neither.

    For `calibration` and `sensitivity`, layers must run under nnx's own transformations: inside a bare
    jax.checkpoint or jax.jit Flax raises a TraceContextError; take nnx.remat or nnx.jit in place of them.

    Args:
      model: float model.
      rules: the first whose regular expression matches all of a layer's path decides.
      calibration: batches for the static activation scales of the layers whose scheme has
        `activation="per_tensor"` and no `activation_scale`: the float model runs on each, and the range of
        each layer's input is recorded. A batch that is a tuple holds positional arguments of the model, one
        that is a dict keyword arguments, and anything else is the only argument. Without it these scales are
        computed from the data at each call.
      sensitivity: batches for the error of each layer: the float model runs on each, every layer to be
        quantized runs both ways on its float input, and the report's rows have the relative L2 error of the
        outputs. Which layers to leave in float, if any, shows there.
      forward: called as `forward(model, batch)` for each batch in place of the above.

    Returns:
      The quantized model and a `Report`.

    Raises:
      TypeError: if `model` is no nnx.Module or rules are no `Rule`s.
      ValueError: if `calibration` is given and there is nothing to calibrate, or no batch, or a range is not
        finite.

    >>> import jax.numpy as jnp
    >>> model = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, rngs=nnx.Rngs(0))
    >>> model, report = quantize_model(model, [Rule("query|key", W8A8()), Rule("mlp", W8A8())])
    >>> [row.path for row in report.quantized], report.unused_rules
    (['key', 'query'], (Rule(path='mlp', scheme=W8A8(int8, per_token)),))
    >>> model(jnp.ones((1, 3, 4))).shape
    (1, 3, 4)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model is a {type(model).__name__}, needs an nnx.Module")
    plan = make_plan(nnx_layers.kernel_uses(model), rules, nnx_layers.kernels(model))
    forward = forward or calibrate.call
    run = lambda batches, words: lambda probe: calibrate.run(batches, lambda batch: forward(probe, batch), words)
    if calibration is not None:
        calibrate.check_paths(wanted := plan.to_calibrate())
        uses = {path: each.use for path, each in plan.conversions.items() if path in wanted}
        ranges = nnx_layers.record(model, nnx_layers.RangeRecorder, uses, run(calibration, "calibrating"))
        calibrate.check_ranges(ranges)
        plan = plan.calibrated(ranges)
    errors = {}
    if sensitivity is not None:
        sums = nnx_layers.record(
            model, nnx_layers.ErrorRecorder, plan.conversions, run(sensitivity, "measuring sensitivity")
        )
        errors = {path: calibrate.relative_error(*both) for path, both in sums.items()}

    quantized = nnx.clone(model)
    layers = nnx_layers.weight_layers(quantized)
    before = {path: _own_bytes(layer) for path, layer in layers.items()}
    plan = nnx_layers.install_all(layers, plan)
    after = {path: _own_bytes(layer) for path, layer in layers.items()}
    total = lambda model: report.nbytes(nnx.state(model, (nnx.Param, QuantizedParam)))
    return quantized, report.make_report(plan, before, after, (total(model), total(quantized)), errors)


def _own_bytes(layer):
    return report.nbytes([own.get_value() for own in vars(layer).values() if isinstance(own, nnx.Variable)])
