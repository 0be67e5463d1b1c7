"""What the layers of Flax do with their kernels: the classes that can be quantized, and why others can't.

A new kind of layer begins as a row of `NNX` and of `LINEN`.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

from jax_qmm.dtypes import SCALE_DTYPES
from jax_qmm.qarray import QArray
from jax_qmm.schemes import Scheme, check_scheme


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A class of layers that multiply their input by a kernel.

    Attributes:
      product: the attribute that holds the callable which multiplies.
      contracted: gives the kernel's axes that a layer contracts with its input, counted from the end; raises
        ValueError where a layer does something else.
      shape: gives the shape of a layer's kernel, without the axes in front that stacking layers adds; None
        where the kernel itself tells, because it is seen inside of the stack.
      integers: whether its quantized kernel needs to have integers.
    """

    product: str
    contracted: Callable[[Any], tuple[int, ...]]
    shape: Any = None
    integers: bool = False


@dataclasses.dataclass(frozen=True)
class KernelUse:
    """What one layer does with its kernel.

    Attributes:
      op: the layer's class, as "Linear".
      contracted: the kernel's axes that are contracted with the input, counted from the end.
      shape: that of one layer's kernel; axes in front of these come from stacking layers.
      reason: why it can't be quantized, or None.
      integers: whether the quantized kernel needs to have integers.
    """

    op: str
    contracted: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    reason: str | None = None
    integers: bool = dataclasses.field(default=False, repr=False)

    def why_not(self, scheme: Scheme) -> str | None:
        """Why a scheme does not fit what the layer does; None if it does."""
        if not self.integers:
            return None
        if not jnp.issubdtype(scheme.dtype, jnp.integer):
            return f"a {self.op} has no product of {scheme.dtype}: take int8"
        return None if scheme.convolves else f"a {self.op} takes a W8A8 without tile_size, W4A16 and W8A16"


def einsum_contracted(equation: str) -> tuple[int, ...]:
    """The axes of an einsum's second operand that are contracted with the first, counted from the end.

    Args:
      equation: two operands and an explicit output, such as "...ta,hab->...thb".

    Raises:
      ValueError: if the equation says something else than a (batched) product of the two operands.

    >>> einsum_contracted("nta,hab->nthb")
    (-2,)
    """
    inputs, out = equation.replace(" ", "").split("->")
    lhs, rhs = inputs.split(",")
    if "." in rhs:
        raise ValueError(f"the weight has an ellipsis in {equation!r}")
    for term in (lhs, rhs, out):
        letters = term.replace(".", "")
        if len(set(letters)) != len(letters):
            raise ValueError(f"{term!r} repeats an index in {equation!r}")
    alone = [c for c in lhs + rhs if (c in lhs) != (c in rhs) and c not in out]
    if alone:
        raise ValueError(f"{alone[0]!r} is summed over one operand alone in {equation!r}")
    axes = tuple(i - len(rhs) for i, c in enumerate(rhs) if c in lhs and c not in out)
    if not axes:
        raise ValueError(f"{equation!r} contracts nothing")
    return axes


def _general(n_in, n_out):
    return tuple(range(-n_in - n_out, -n_out))


def _of_window(layer):
    return window_contracted(_count(layer.kernel_size))


def window_contracted(rank: int) -> tuple[int, ...]:
    """The axes of a convolution's kernel that are contracted, of so many spatial axes: these and the channels."""
    return _general(rank + 1, 1)


def _count(axes):
    return len(axes) if isinstance(axes, Sequence) else 1


NNX: Mapping[type, LayerKind] = {
    nnx.Linear: LayerKind("dot_general", lambda layer: (-2,), lambda layer: (layer.in_features, layer.out_features)),
    nnx.LinearGeneral: LayerKind(
        "dot_general",
        lambda layer: _general(len(layer.in_features), len(layer.out_features)),
        lambda layer: (*layer.batch_axis.values(), *layer.in_features, *layer.out_features),
    ),
    nnx.Einsum: LayerKind(
        "einsum_op", lambda layer: einsum_contracted(layer.einsum_str), lambda layer: tuple(layer.kernel_shape)
    ),
    nnx.Conv: LayerKind("conv_general_dilated", _of_window, lambda layer: tuple(layer.kernel_shape), integers=True),
}
LINEN: Mapping[type, LayerKind] = {
    linen.Dense: LayerKind("dot_general", lambda layer: (-2,)),
    linen.DenseGeneral: LayerKind("dot_general", lambda layer: _general(_count(layer.axis), _count(layer.features))),
    linen.Einsum: LayerKind("dot_general", lambda layer: einsum_contracted(layer.einsum_str)),
    linen.Conv: LayerKind("conv_general_dilated", _of_window, integers=True),
}
CONVOLUTION = "a convolution"
TABLE = "a table that is looked up"
TABLE_OR_HEAD = f"{TABLE}; if attend uses it as a tied head, that product stays in float"
TIED_HEAD = f"{TABLE}, and a tied head: its attend multiplies in float"
ADAPTER = "LoRA: its factors are there to be trained, and stay in float"
_NOT_QUANTIZED: Mapping[type, str] = {
    nnx.ConvTranspose: CONVOLUTION,
    nnx.Embed: TABLE_OR_HEAD,
    nnx.LoRA: ADAPTER,
    linen.ConvTranspose: CONVOLUTION,
    linen.ConvLocal: CONVOLUTION,
    linen.Embed: TABLE,
}
NORMALIZED = "its parent normalizes its weights anew at each call"
NORMALIZERS = (nnx.WeightNorm, nnx.SpectralNorm, linen.WeightNorm, linen.SpectralNorm)


def kind_of(layer: Any, kinds: Mapping[type, LayerKind]) -> tuple[type, LayerKind] | None:
    """The class of Flax that a layer is or inherits from, and its kind; None if that is not in `kinds`."""
    return next(((cls, kinds[cls]) for cls in type(layer).__mro__ if cls in kinds), None)


def check_kind(layer: Any, kinds: Mapping[type, LayerKind]) -> LayerKind:
    """The kind of a layer, or a TypeError if it is none of `kinds`."""
    found = kind_of(layer, kinds)
    if found is None:
        raise TypeError(f"layer is a {type(layer).__name__}, needs {', '.join(cls.__name__ for cls in kinds)}")
    return found[1]


def why_never(layer: Any) -> str | None:
    """Why layers of this class of Flax are not quantized; None for other classes."""
    return next((reason for cls, reason in _NOT_QUANTIZED.items() if isinstance(layer, cls)), None)


def own_mathematics(cls: type, base: type) -> str | None:
    """Why a subclass can't be quantized: it overrides the `__call__` of `base` and does not call it.

    >>> class Squared(nnx.Linear):
    ...     def __call__(self, x):
    ...         return x @ self.kernel[...] ** 2
    >>> own_mathematics(Squared, nnx.Linear)
    'the __call__ of Squared never calls that of Linear'
    """
    for each in reversed([*itertools.takewhile(lambda each: each is not base, cls.__mro__)]):
        call = vars(each).get("__call__")
        code = getattr(inspect.unwrap(call), "__code__", None) if callable(call) else None
        # super() without arguments leaves its trace in the free variables.
        if code and "__class__" not in code.co_freevars and not {"super", "__call__"} & {*code.co_names}:
            return f"the __call__ of {each.__name__} never calls that of {base.__name__}"
    return None


def why_not(kernel: Any, shape: tuple[int, ...]) -> str | None:
    """Why a kernel can't be quantized as that of a layer of `shape`, or of a stack of such layers; None if it can.

    >>> import jax.numpy as jnp
    >>> why_not(jnp.ones((3, 8, 8)), (8, 8))
    >>> why_not(jnp.ones((8, 8, 8)), (8, 8))
    'its kernel has shape (8, 8, 8): the axis along which layers of shape (8, 8) are stacked could be 0, 1 or 2'
    """
    if isinstance(kernel, QArray):
        return "quantized already"
    if kernel.dtype not in SCALE_DTYPES:
        return f"its kernel has dtype {kernel.dtype}"
    rank, stacked = len(kernel.shape), len(kernel.shape) - len(shape)
    if kernel.shape[stacked:] != shape:
        return f"its kernel has shape {kernel.shape}, which does not end in {shape}"
    fits = [
        axes
        for axes in itertools.combinations(range(rank), stacked)
        if tuple(size for axis, size in enumerate(kernel.shape) if axis not in axes) == shape
    ]
    if len(fits) > 1:
        *first, last = (str(axes[0] if stacked == 1 else axes) for axes in fits)
        which = "axis along which layers" if stacked == 1 else "axes along which layers"
        are = f"of shape {shape} are stacked could be {', '.join(first)} or {last}"
        return f"its kernel has shape {kernel.shape}: the {which} {are}"
    return None


def by_hand(weights: Mapping[str, Any]) -> str:
    """Why parameters stay in float that no layer of Flax multiplies by, with advice for those that look like weights.

    >>> import jax.numpy as jnp
    >>> by_hand({"experts": jnp.ones((4, 8, 8)), "cls_token": jnp.ones((1, 1, 8))})
    'no layer of Flax: if the model computes x @ experts, keep jax_qmm.quantize(experts.mT).mT and use jax_qmm.matmul'
    >>> by_hand({"position_embeddings": jnp.ones((1, 16, 8))})
    'no layer of Flax, and no weight of a product by its name and shape'
    """
    names = [name for name, value in weights.items() if _looks_multiplied(name, value.shape)]
    if not names:
        return "no layer of Flax, and no weight of a product by its name and shape"
    advice = f"if the model computes x @ {names[0]}, keep jax_qmm.quantize({names[0]}.mT).mT and use jax_qmm.matmul"
    return f"no layer of Flax: {advice}" + (f"; likewise {', '.join(names[1:])}" if names[1:] else "")


def _looks_multiplied(name, shape):
    matrix = sum(size > 1 for size in shape) >= 2
    return matrix and not re.search("bias|embed|pos|token|scale|table", name.lower())


def at_least_matrices(own: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of two dimensions or more."""
    return {name: value for name, value in own.items() if len(getattr(value, "shape", ())) >= 2}


def check_convolves(scheme: Any, op: str) -> None:
    """Raises a TypeError if `scheme` is none, a ValueError if it does not fit a convolution, the layer `op`."""
    check_scheme(scheme)
    if reason := KernelUse(op, integers=True).why_not(scheme):
        raise ValueError(f"scheme is {scheme}; {reason}")


def own_callable(layer: Any, names: Iterable[str], defaults: Iterable[Any]) -> str | None:
    """Why a layer that brings its own arithmetic can't be quantized; None where it does not."""
    defaults = [None, *defaults]
    for name in names:
        if not any(getattr(layer, name, None) is default for default in defaults):
            return f"it brings its own {name}"
    return None
