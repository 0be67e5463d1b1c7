"""The activations of an epilogue, on float32: their definition, and their derivatives."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Activation(NamedTuple):
    """What is applied to the float32 result of a product before it is rounded.

    Attributes:
      name: "none", "clamp", "gelu" (the tanh form) or "silu".
      low, high: the bounds of "clamp"; relu is a clamp from 0 to infinity.
    """

    name: str = "none"
    low: float = -math.inf
    high: float = math.inf

    def __str__(self):
        return f"clamp {self.low:g}..{self.high:g}" if self.name == "clamp" else self.name


NONE = Activation()
NAMED = {
    "relu": Activation("clamp", 0.0),
    "relu6": Activation("clamp", 0.0, 6.0),
    "gelu": Activation("gelu"),
    "silu": Activation("silu"),
}


def activate(y, activation):
    """`activation` of the float32 array `y`.

    A clamp is exact and keeps NaN; of two zeros it gives the bound at `low`, and y at `high`.

    gelu and silu are off the exact function of y by less than 2^-20 |y|, here and in
    the kernels: with q = exp(-x) the result y / (1 + q) is off by the relative error of q times q / (1 + q), of which
    1 / (1 + q) scales the whole, and by those of the sum and the division. exp and the division are within 2 ulp,
    2^-22 of their values, the sum within 2^-24, and gelu's x = 2u, computed in seven roundings, within 7 * 2^-24 of
    itself, so that q is off by |x| times that. As |x| q / (1 + q)^2 is below 0.23 and the other factors are at most 1,
    all of it is below (2^-22 + 2^-22 + 2^-24 + 0.23 * 7 * 2^-24) |y|. Where q overflows the result is 0 in place of
    less than 2^-119.

    >>> activate(jnp.float32([-1, 2, 7]), NAMED["relu6"]).tolist()
    [0.0, 2.0, 6.0]
    """
    if activation.name == "clamp":
        return jnp.where(y <= activation.low, activation.low, jnp.where(y > activation.high, activation.high, y))
    if activation.name == "silu":
        return y / (1 + jnp.exp(-y))
    return y / (1 + jnp.exp(-_gelu_exponent(y))) if activation.name == "gelu" else y


def fuses(dtype, bias, activation, out_dtype):
    """Whether XLA for GPUs can add a bias, or None, and apply an activation within its product or convolution.

    It can where all is bfloat16 and the activation is relu or none, written as `ended` has it; else both take a pass
    over sums that are in memory. So it does with convolutions, and products that cuBLASLt computes (jaxlib 0.11.2).
    """
    dtypes = {jnp.dtype(dtype), jnp.dtype(out_dtype)} | (set() if bias is None else {jnp.dtype(bias.dtype)})
    return dtypes == {jnp.dtype(jnp.bfloat16)} and activation in (NONE, NAMED["relu"])


def ended(y, bias, activation, out_dtype):
    """`activate(y + bias, activation)` as `out_dtype`, of a bias along the last dimensions of y, or None.

    In float32, or in bfloat16 where that `fuses`; zeros may have any sign then.

    >>> ended(jnp.bfloat16([-3, 1]), jnp.bfloat16([1, 1]), NAMED["relu"], jnp.bfloat16).tolist()
    [0.0, 2.0]
    """
    bias = None if bias is None else jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))
    if fuses(y.dtype, bias, activation, out_dtype):
        y = y if bias is None else y + bias
        return y if activation == NONE else jnp.maximum(y, 0)
    y = y.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return activate(y, activation).astype(out_dtype)


def tangent(y, change, activation):
    """The tangent of `activate` at y, of a y that moves by `change`: 0 at the bounds of a clamp, as of `jax.nn.relu`.

    Beyond the bounds it is 0 whatever `change` is, where a factor 0 would make NaN of an infinite one.

    >>> tangent(jnp.float32([-1, 0, 2]), jnp.float32([5, 5, 5]), NAMED["relu"]).tolist()
    [0.0, 0.0, 5.0]
    """
    if activation.name == "clamp":
        return jnp.where((y > activation.low) & (y < activation.high), change, 0)
    if activation.name == "silu":
        share = jax.nn.sigmoid(y)
        return change * (share * (1 + y * (1 - share)))
    if activation.name == "gelu":
        y = jnp.clip(y, -16.0, 16.0)  # beyond, the derivative is 0 or 1, and y^3 soon infinite
        share = jax.nn.sigmoid(_gelu_exponent(y))
        return change * (share * (1 + y * (1 - share) * _GELU_SLOPE * (1 + 3 * _GELU_CUBE * y * y)))
    return change


# gelu(y) = y / (1 + exp(-2u)), u = sqrt(2 / pi) * (y + 0.044715 y^3): Hendrycks and Gimpel, Gaussian error linear
# units.
_GELU_SLOPE, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu_exponent(y):
    return _GELU_SLOPE * (y + _GELU_CUBE * (y * y * y))
