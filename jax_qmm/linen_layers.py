"""Tells what the layers of a linen model do with their kernels, by the parameters or by watching a call."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta

from jax_qmm import layers

LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum)
_ATTENTION = {"query", "key", "value", "out"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a layer does with its kernel.

    Attributes:
      op: the layer's class, as "Dense".
      contracted: the kernel's axes that are contracted with the input, counted from the end.
      shape: that of one layer's kernel; axes in front of these come from stacking layers.
      reason: why it can't be quantized, or None.
    """

    op: str
    contracted: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    reason: str | None = None


def is_call_of_layer(context: nn.module.InterceptorContext) -> bool:
    """Whether an interceptor stands before the `__call__` of Flax's own Dense, DenseGeneral or Einsum.

    A subclass that overrides `__call__` and calls the original gets there in the end.
    """
    function = context.orig_method.func
    return function.__module__ == "flax.linen.linear" and function.__qualname__ in {
        f"{layer.__name__}.__call__" for layer in LAYERS
    }


def own_callable(module: nn.Module) -> str | None:
    """Why a layer that brings its own arithmetic can't be quantized; None where it does not."""
    for name in ("promote_dtype", "dot_general", "dot_general_cls"):
        default = {field.name: field.default for field in dataclasses.fields(nn.DenseGeneral)}[name]
        if getattr(module, name, default) not in (default, jax.lax.dot_general):
            return f"it brings its own {name}"
    return None


def guess(path: tuple[str, ...], params: Mapping[str, Any], siblings: Collection[str]) -> Kernel:
    """Tells a layer by its parameters.

    Args:
      path: of the layer.
      params: its own parameters by name.
      siblings: names next to it.

    >>> guess(("mlp", "up"), {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, ["up", "down"])
    Kernel(op='Dense', contracted=(-2,), shape=(3, 4), reason=None)
    """
    name = path[-1] if path else ""
    if "kernel" not in params:
        if "embedding" in params:
            return Kernel("Embed", reason="a table that is looked up")
        return Kernel("?", reason=layers.by_hand("no kernel", params))
    kernel, bias = np.shape(params["kernel"]), params.get("bias")
    bias = None if bias is None else np.shape(bias)
    if name.startswith("Conv"):
        return Kernel("Conv", reason="a convolution")
    if len(kernel) == 2:
        if bias in (None, kernel[1:]):
            return Kernel(_own_name(name, "Dense"), (-2,), kernel)
    elif _ATTENTION <= set(siblings) and name in _ATTENTION:
        return Kernel("DenseGeneral", (-3, -2) if name == "out" else (-3,), kernel[-3:])
    elif bias is not None:
        told = list(_splits(kernel, bias))
        if len(told) == 1:
            return dataclasses.replace(told[0], op=_own_name(name, told[0].op))
    return Kernel(
        "?",
        reason=f"no telling what it does with a kernel of shape {kernel} and "
        f"{'no bias' if bias is None else f'a bias of shape {bias}'}: give an example",
    )


def _own_name(name, default):
    """The class in the name that linen gives a layer without one, as "Einsum_0"."""
    named = name.rpartition("_")[0]
    return named if named in {layer.__name__ for layer in LAYERS} else default


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
            yield Kernel(op, tuple(range(-rank, -n_out)), kernel[stack:])


class Observer:
    """An interceptor that notes what layers do with their kernels, and the ranges of the inputs of some.

    Args:
      wanted: paths of the layers whose input ranges are wanted.

    Attributes:
      kernels: what each layer that was called does, by path.
      ranges: smallest (or 0) and largest (or 0) input of each wanted layer that was called, by path.
    """

    def __init__(self, wanted: Collection[str] = ()):
        self.kernels: dict[str, Kernel] = {}
        self.ranges: dict[str, tuple[Any, Any]] = {}
        self._wanted = wanted

    def __call__(self, next_function, args, kwargs, context):
        module = context.module
        if module.scope is not None and context.method_name == "__call__":
            path = "/".join(module.path)
            if not is_call_of_layer(context):
                other = Kernel(type(module).__name__, reason="not a Dense, DenseGeneral or Einsum")
                self.kernels.setdefault(path, other)
            else:
                self.kernels[path] = _tell(module, *args, **kwargs)
                if path in self._wanted:
                    if args:
                        args = (self._record(path, args[0]), *args[1:])
                    else:
                        kwargs = kwargs | {"inputs": self._record(path, kwargs["inputs"])}
        return next_function(*args, **kwargs)

    def _record(self, path, inputs):
        """Notes the range of `inputs` and returns them."""
        low, high = inputs.min(initial=0).astype(jnp.float32), inputs.max(initial=0).astype(jnp.float32)

        def note(low, high):
            old = self.ranges.get(path, (0, 0))
            self.ranges[path] = np.minimum(old[0], np.min(low)), np.maximum(old[1], np.max(high))
            return np.zeros(np.shape(low), np.float32)

        if not isinstance(low, jax.core.Tracer):
            note(low, high)
            return inputs
        # nn.scan takes a callback with a side effect for a broken promise, so this one is part of the data.
        zero = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), low, high, vmap_method="broadcast_all")
        return inputs + zero.astype(inputs.dtype)


def _tell(module, inputs, einsum_str=None):
    op = type(module).__name__
    if reason := own_callable(module):
        return Kernel(op, reason=reason)
    shape = np.shape(meta.unbox(module.get_variable("params", "kernel")))
    if isinstance(module, nn.Einsum):
        try:
            return Kernel(op, layers.einsum_contracted(einsum_str or module.einsum_str), shape)
        except ValueError as error:
            return Kernel(op, reason=str(error))
    n_out = len(module.features) if isinstance(module.features, Sequence) else 1
    axis = module.axis if isinstance(module, nn.DenseGeneral) else -1
    n_in = len(axis) if isinstance(axis, Sequence) else 1
    return Kernel(op, tuple(range(-n_in - n_out, -n_out)), shape)
