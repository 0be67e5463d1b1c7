"""Tells what the layers of a linen model do with their kernels, by the parameters or by watching calls."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import empty_node
from jax.core import Tracer

from jax_qmm.models import layer_kinds, linen_layers
from jax_qmm.models.calibration import squares
from jax_qmm.models.layer_kinds import KernelUse
from jax_qmm.models.plan import Conversion
from jax_qmm.qarray import QArray

Path = tuple[str, ...]
_OTHER = "not a Dense, DenseGeneral, Einsum or Conv"
_NOT_CALLED = "the example did not call it"
_MARK = "jax_qmm.observed"  # no parameter of a module has a dot in its name
_ATTENTION = {"query", "key", "value", "out"}


def weight_layers(params: Mapping[Path, Any]) -> dict[Path, dict[str, Any]]:
    """The parameters, out of their boxes, of each module that holds one of two dimensions or more, by path.

    Args:
      params: flattened, so by path of the parameter.
    """
    found: dict[Path, dict[str, Any]] = {}
    for (*path, name), value in params.items():
        if value is not empty_node:
            found.setdefault(tuple(path), {})[name] = linen_layers.unboxed(value)
    return {path: own for path, own in found.items() if layer_kinds.at_least_matrices(own)}


def kernel_uses(
    layers: Mapping[Path, Mapping[str, Any]], called: Mapping[str, KernelUse] | None
) -> dict[str, KernelUse]:
    """What each module of `weight_layers` does with its kernel, by path joined by slashes.

    Args:
      layers: the parameters of each by path.
      called: what an `Observer` saw, or None to tell layers by their parameters.
    """
    uses = {}
    for path, own in layers.items():
        use = guess(path, own, {other[-1] for other in layers if other and other[:-1] == path[:-1]})
        if called is not None:
            seen = called.get("/".join(path), KernelUse("?", reason=_NOT_CALLED))
            unknown = "kernel" not in own and seen.reason in (_OTHER, _NOT_CALLED)
            use = dataclasses.replace(use, op=seen.op) if unknown else seen
        if "kernel" in own and not use.reason:
            use = dataclasses.replace(use, reason=layer_kinds.why_not(own["kernel"], use.shape))
        uses["/".join(path)] = use
    return uses


def guess(path: Path, params: Mapping[str, Any], siblings: Collection[str]) -> KernelUse:
    """Tells a layer by its parameters.

    Args:
      path: of the layer.
      params: its own parameters by name.
      siblings: names next to it.

    >>> guess(("mlp", "up"), {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, ["up", "down"])
    KernelUse(op='Dense', contracted=(-2,), shape=(3, 4), reason=None)
    """
    name = path[-1] if path else ""
    if "kernel" not in params:
        if "embedding" in params:
            return KernelUse("Embed", reason=layer_kinds.TABLE_OR_HEAD)
        return KernelUse("?", reason=layer_kinds.by_hand(layer_kinds.at_least_matrices(params)))
    kernel, bias = np.shape(params["kernel"]), params.get("bias")
    bias = None if bias is None else np.shape(bias)
    if name.startswith("Conv"):
        stack = 0 if bias is None else len(bias) - 1
        if _own_name(name, "") == "Conv" and bias in (None, kernel[:stack] + kernel[-1:]):
            contracted = layer_kinds.window_contracted(len(kernel) - stack - 2)
            return KernelUse("Conv", contracted, kernel[stack:], integers=True)
        return KernelUse("Conv", reason=layer_kinds.CONVOLUTION)
    if len(kernel) == 2:
        if bias in (None, kernel[1:]):
            return KernelUse(_own_name(name, "Dense"), (-2,), kernel)
    elif _ATTENTION <= set(siblings) and name in _ATTENTION:
        return KernelUse("DenseGeneral", (-3, -2) if name == "out" else (-3,), kernel[-3:])
    elif bias is not None:
        told = list(_splits(kernel, bias))
        if len(told) == 1:
            return dataclasses.replace(told[0], op=_own_name(name, told[0].op))
    return KernelUse(
        "?",
        reason=f"no telling what it does with a kernel of shape {kernel} and "
        f"{'no bias' if bias is None else f'a bias of shape {bias}'}: give an example",
    )


def _own_name(name, default):
    """The class in the name that linen gives a layer without one, as "Einsum_0"."""
    named = name.rpartition("_")[0]
    return named if named in {layer.__name__ for layer in layer_kinds.LINEN} else default


def _splits(kernel, bias):
    """The ways to read these shapes as (stack, in, out) and (stack, out).

    Two axes contracted to one are left out: a convolution looks the same.
    """
    n_in = len(kernel) - len(bias)
    for n_out in range(1, len(bias) + 1):
        stack = len(bias) - n_out
        if n_in >= 1 and not n_in > 1 == n_out and bias == kernel[:stack] + kernel[len(kernel) - n_out :]:
            rank = n_in + n_out
            op = "Dense" if rank == 2 else "DenseGeneral"
            yield KernelUse(op, tuple(range(-rank, -n_out)), kernel[stack:])


@jax.tree_util.register_static
class _Mark:
    """No two are equal: in the structure of variables it makes caches take them for new ones."""


def marked(params: Mapping[Path, Any]) -> dict[Path, Any]:
    """Flattened parameters that no cache of traces (nn.jit has one) knows, so that interceptors see the model run."""
    return {**params, **{(*path, _MARK): _Mark() for path in {path[:-1] for path in params}}}


class Observer:
    """An interceptor that notes what layers do with their kernels, ranges of inputs, and errors of outputs.

    Args:
      ranges: paths of the layers whose input ranges are wanted.
      errors: how to quantize those whose errors are wanted, by path.

    Attributes:
      kernels: what each layer that was called does, by path.
      ranges: smallest (or 0) and largest (or 0) input of each wanted layer that was called, by path.
      errors: the sums of squares of the error and of the float output of each wanted layer, by path.
    """

    def __init__(self, ranges: Collection[str] = (), errors: Mapping[str, Conversion] | None = None):
        self.kernels: dict[str, KernelUse] = {}
        self.ranges: dict[str, tuple[Any, Any]] = {}
        self.errors: dict[str, tuple[Any, Any]] = {}
        self._wanted, self._conversions, self._normalizers = ranges, errors or {}, 0

    def __call__(self, next_function, args, kwargs, context):
        module = context.module
        if module.scope is None:
            return next_function(*args, **kwargs)
        path = "/".join(module.path)
        if isinstance(module, nn.Embed) and context.method_name == "attend":
            self.kernels[path] = KernelUse(type(module).__name__, reason=layer_kinds.TIED_HEAD)
        if context.method_name != "__call__":
            return next_function(*args, **kwargs)
        if linen_layers.is_call_of_layer(context):
            return self._layer(path, module, next_function, *args, **kwargs)
        found = layer_kinds.kind_of(module, layer_kinds.LINEN)
        own = found and layer_kinds.own_mathematics(type(module), found[0])
        self.kernels.setdefault(
            path, KernelUse(type(module).__name__, reason=layer_kinds.why_never(module) or own or _OTHER)
        )
        normalizes = isinstance(module, layer_kinds.NORMALIZERS)
        self._normalizers += normalizes
        try:
            return next_function(*args, **kwargs)
        finally:
            self._normalizers -= normalizes

    def _layer(self, path, module, next_function, inputs, *args, **kwargs):
        use = _tell(module, *args, **kwargs)
        self.kernels[path] = dataclasses.replace(use, reason=layer_kinds.NORMALIZED) if self._normalizers else use
        if path in self._wanted:
            low, high = inputs.min(initial=0).astype(jnp.float32), inputs.max(initial=0).astype(jnp.float32)
            inputs = _noting(self.ranges, path, (np.minimum, np.maximum), (np.min, np.max), (low, high), inputs)
        out = next_function(inputs, *args, **kwargs)
        if path in self._conversions:
            conversion, kernel = self._conversions[path], linen_layers.parameter(module, "kernel")
            scheme = conversion.scheme.with_static(*conversion.static) if conversion.static else conversion.scheme
            qarray = conversion.quantize(kernel)
            quantized = linen_layers.multiply(module, qarray, kernel.dtype, inputs, *args, **kwargs, scheme=scheme)
            sums = (np.add, np.add), (np.sum, np.sum)
            out = _noting(self.errors, path, *sums, squares(quantized, out), out)
        return out


def _noting(noted, path, combine, reduce, values, data):
    """`data`, which takes along two numbers, to be combined with those that `noted` has for `path`."""

    def note(*values):
        new = [reduce(value) for reduce, value in zip(reduce, values)]
        old = noted.get(path, (0, 0))
        noted[path] = tuple(combine(*both) for combine, *both in zip(combine, old, new))
        return np.zeros(np.shape(values[0]), np.float32)

    if not any(isinstance(value, Tracer) for value in values):
        note(*values)
        return data
    # nn.scan takes a callback with a side effect for a broken promise, so this one is part of the data.
    zero = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), *values, vmap_method="broadcast_all")
    return data + zero.astype(data.dtype)


def _tell(module, einsum_str=None):
    op = type(module).__name__
    if reason := linen_layers.own_callable(module):
        return KernelUse(op, reason=reason)
    kernel = linen_layers.parameter(module, "kernel")
    if isinstance(kernel, QArray):
        return KernelUse(op, reason="quantized already")
    try:
        if einsum_str:
            return KernelUse(op, layer_kinds.einsum_contracted(einsum_str), np.shape(kernel))
        kind = layer_kinds.check_kind(module, layer_kinds.LINEN)
        return KernelUse(op, kind.contracted(module), np.shape(kernel), integers=kind.integers)
    except ValueError as error:
        return KernelUse(op, reason=str(error))
