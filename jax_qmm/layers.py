"""What quantized nnx and linen layers share: rules, contracted axes, kernels, static scales, products."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jax_qmm.ops.dot_general import dot_general, einsum
from jax_qmm.ops.quantize import quantize
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W8A8, Rule, check_scheme


class RuleBook:
    """Rules in order, which remember whether they were used.

    >>> rules = [Rule(r".*\\.query", W8A8()), Rule(".*", W8A8(symmetric=False)), Rule("head", W8A8())]
    >>> book = RuleBook(rules)
    >>> book.scheme("head").symmetric
    False
    >>> [rule.path for rule in book.unused()]
    ['.*\\\\.query', 'head']
    """

    def __init__(self, rules: Sequence[Rule]):
        self._rules = tuple(rules) if isinstance(rules, Iterable) else (rules,)
        if isinstance(rules, Rule) or not all(isinstance(rule, Rule) for rule in self._rules):
            raise TypeError(f"rules must be a sequence of jax_qmm.Rule, got {rules!r}")
        self._used = set()

    def scheme(self, path: str) -> W8A8 | None:
        """The scheme of the first rule whose regular expression matches all of `path`; None if none does."""
        for i, rule in enumerate(self._rules):
            if re.fullmatch(rule.path, path):
                self._used.add(i)
                return rule.scheme
        return None

    def unused(self) -> tuple[Rule, ...]:
        """The rules that were first to match no path so far."""
        return tuple(rule for i, rule in enumerate(self._rules) if i not in self._used)


def by_hand(why: str, names: Iterable[str]) -> str:
    """The reason to skip weights that no known layer multiplies."""
    return f"{why}: quantize {', '.join(names)} by hand and use jax_qmm.einsum"


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


def quantize_kernel(kernel: jax.Array, contracted: Sequence[int], scheme: W8A8) -> QArray:
    """Quantizes a weight per channel and stores its contracted axes last, as the kernels read them.

    Args:
      kernel: float array of any shape; axes in front of the layer's own (stacked layers) are channels too.
      contracted: the axes that the layer contracts with its input, counted from the end; they share a scale.
      scheme: for asymmetric activations the weight's sums are stored with it.

    Returns:
      A QArray with the shape of `kernel`.

    >>> quantize_kernel(jnp.ones((3, 4, 5)), (-3,), W8A8())
    QArray(int8[3,4,5], scale=float32[1,4,5], stored=[4,5,3])
    """
    check_scheme(scheme)
    n = kernel.ndim
    last = [axis % n for axis in contracted]
    order = [axis for axis in range(n) if axis not in last] + last
    q = quantize(kernel.transpose(order), scheme.dtype, axis=tuple(range(n - len(last), n)))
    q = q.transpose([order.index(axis) for axis in range(n)])
    return q if scheme.symmetric else q.with_azp_adj(tuple(last))


def static_range(low: jax.Array, high: jax.Array, scheme: W8A8) -> tuple[jax.Array, jax.Array | None]:
    """The static scale and zero point for activations that were seen between `low` and `high`.

    Args:
      low, high: float32 arrays of one shape, () for one layer.
      scheme: its dtype and symmetry decide.

    Returns:
      Scale float32 and zero point int32 (None where symmetric) of that shape.

    >>> scale, zero_point = static_range(jnp.float32(-1.0), jnp.float32(1.55), W8A8(symmetric=False))
    >>> round(float(scale), 6), int(zero_point)
    (0.01, -28)
    """
    q = quantize(jnp.stack([low, high], axis=-1), scheme.dtype, axis=-1, symmetric=scheme.symmetric)
    return q.scale[..., 0], None if q.zero_point is None else q.zero_point[..., 0]


def takes_calibration(scheme: W8A8) -> bool:
    """Whether calibration is to find the scale of the activations."""
    return scheme.activation == "per_tensor" and scheme.activation_scale is None


def check_calibration(paths: Collection[str]) -> None:
    """Raises ValueError if there is no layer to calibrate."""
    if not paths:
        raise ValueError(
            "calibration was given, but none of the layers to quantize takes it: that needs a "
            "scheme with activation='per_tensor' and no activation_scale"
        )


def check_ranges(ranges: Mapping[str, tuple[jax.Array, jax.Array]]) -> None:
    """Raises ValueError if calibration found nothing, or a range that is not finite."""
    if not ranges:
        raise ValueError("calibration held no batch that reached a layer which needs it")
    for path, (low, high) in ranges.items():
        if not jnp.isfinite(jnp.stack([low, high])).all():
            raise ValueError(f"calibration saw inputs of {path} that are not finite: from {low} to {high}")


def describe(scheme: W8A8, static=None) -> str:
    """The scheme in words, with a static activation scale if `static` is not None.

    >>> describe(W8A8(activation="per_tensor"), static=(1.0, None))
    'int8, per_tensor static'
    """
    if static is not None:
        scheme = with_static(scheme, 1.0, None if scheme.symmetric else 0)
    return str(scheme).removeprefix("W8A8(").removesuffix(")")


def static_leaves(scale, zero_point, stack=()):
    """A static scale and zero point (either may be None) as arrays, repeated for a stack of layers."""
    given = (scale, jnp.float32), (zero_point, jnp.int32)
    return tuple(
        value if value is None else jnp.broadcast_to(jnp.asarray(value, dtype), stack) for value, dtype in given
    )


def without_static(scheme: W8A8) -> W8A8:
    """The scheme without its static activation scale."""
    return dataclasses.replace(scheme, activation_scale=None, activation_zero_point=None)


def with_static(scheme: W8A8, scale, zero_point) -> W8A8:
    """The scheme with a static activation scale unless that is None; the opposite of `without_static`."""
    if scale is None:
        return scheme
    return dataclasses.replace(scheme, activation_scale=scale, activation_zero_point=zero_point)


def promoted_dtype(dtype, inputs, kernel_dtype, bias):
    """The dtype in which Flax runs a layer: `dtype`, or else what input, float kernel and bias promote to."""
    if dtype is not None:
        return jnp.dtype(dtype)
    return jnp.result_type(*(x for x in (inputs, kernel_dtype, bias) if x is not None))


def product(inputs, kernel, dimension_numbers, bias, dtype, **options):
    """`dot_general` of an input and a quantized kernel, plus a bias or None.

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

    >>> q = quantize_kernel(jnp.ones((8, 2, 4)), (-2,), W8A8())
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


def _with_out_dtype(options, bias, dtype):
    wanted = options.get("preferred_element_type") or dtype
    return options | {"preferred_element_type": wanted if bias is None else jnp.promote_types(wanted, dtype)}
