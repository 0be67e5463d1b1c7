"""The public function `fake_quantize`: quantized values as floats, with straight-through gradients."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from jax_qmm.dtypes import WEIGHT_QTYPES
from jax_qmm.ops import checks
from jax_qmm.ops.quantize import quantize


def fake_quantize(
    x: ArrayLike,
    qtype: DTypeLike = jnp.int8,
    *,
    axis: int | Sequence[int] | None = -1,
    tile_size: int | None = None,
    symmetric: bool = True,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
) -> jax.Array:
    """`quantize(x, ...).dequantize()` with straight-through gradients: quantization-aware training in one line.

    The value is that of the quantized array, bit for bit, in x's dtype. The derivative takes rounding for the identity.
    With scales computed from the data, so is the whole function. With a given scale s, and the zero point taken off:

    - by x: 1 where x / s is in the range of the type, 0 where it saturates;
    - by s: `round(x / s) - x / s` in the range, and the bound of the range where x / s saturates.

    That is the gradient of LSQ (Esser et al., Learned Step Size Quantization, 2020) without its factor
    `1 / sqrt(x.size * 127)`, which an optimizer's learning rate for the scales can hold. A zero point is a constant.
    `W8A8(activation_scale=s)` in a product has the same derivatives.

    Args:
      x, qtype, axis, tile_size, symmetric, scale, zero_point: as in `quantize`.

    Returns:
      Array of x's shape and dtype.

    Raises:
      TypeError, ValueError: for an argument that does not fit; the message names it.

    >>> import jax, jax_qmm
    >>> jax_qmm.fake_quantize(jnp.array([0.4, 1.7, 300.0]), scale=1.0).tolist()
    [0.0, 2.0, 127.0]
    >>> by_x, by_scale = jax.grad(lambda x, s: fake_quantize(x, scale=s).sum(), (0, 1))(jnp.array([1.75, 300.0]), 1.0)
    >>> by_x.tolist(), float(by_scale)
    ([1.0, 0.0], 127.25)
    >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
    >>> jax.grad(lambda w: (x @ fake_quantize(w, axis=0)).sum())(w)[0].tolist()
    [2.0, 2.0, 2.0]
    """
    options = {"axis": axis, "tile_size": tile_size, "symmetric": symmetric, "zero_point": zero_point}
    x = checks.asarray("x", x)  # a Flax parameter is no array, and would be differentiated inside quantize
    if scale is not None:
        scale = checks.asarray("scale", scale)
    q = quantize(
        jax.lax.stop_gradient(x), qtype, scale=None if scale is None else jax.lax.stop_gradient(scale), **options
    )
    static = None
    if scale is not None:
        scale = jnp.broadcast_to(jnp.asarray(scale).astype(jnp.float32), q.scale.shape)
        static = tuple(None if v is None else q.along_values(v) for v in (scale, q.zero_point))
    return _with_value(q.qtype, q.dequantize(x.dtype), x, static)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_value(qtype, value, x, static):
    """`value`, with the derivatives of `x` quantized."""
    return value


def _jvp(qtype, primals, tangents):
    value, x, static = primals
    if static is None:
        return value, jnp.zeros_like(value) if isinstance(tangents[1], SymbolicZero) else tangents[1]
    moving = (None if isinstance(t, SymbolicZero) else t for t in (tangents[1], tangents[2][0]))
    return value, straight_through(x, *static, qtype, *moving)


_with_value.defjvp(_jvp, symbolic_zeros=True)


def straight_through(x, scale, zero_point, qtype, x_tangent, scale_tangent):
    """The tangent of `x` quantized with a static scale, by the rules of `fake_quantize`, in x's dtype.

    Args:
      x: float array.
      scale: float32, broadcastable to x.
      zero_point: int32, broadcastable to x, or None.
      qtype: int8, int4 or float8_e4m3fn.
      x_tangent, scale_tangent: None where they are zero, but not both.
    """
    scaled = x.astype(jnp.float32) / scale
    if qtype in WEIGHT_QTYPES:
        shift = 0.0 if zero_point is None else zero_point.astype(jnp.float32)
        low, high = jnp.iinfo(qtype).min - shift, jnp.iinfo(qtype).max - shift
        rounded = jnp.rint(scaled)
        inside = (rounded >= low) & (rounded <= high)
    else:
        low, high = -448.0, 448.0
        inside = (scaled >= low) & (scaled <= high)
        rounded = jnp.clip(scaled, low, high).astype(qtype).astype(jnp.float32)
    tangent = 0.0
    if x_tangent is not None:
        tangent = jnp.where(inside, x_tangent, jnp.zeros_like(x_tangent))
    if scale_tangent is not None:
        by_scale = scale_tangent * jnp.where(inside, rounded - scaled, jnp.clip(rounded, low, high))
        tangent = tangent + by_scale.astype(x.dtype)
    return tangent
