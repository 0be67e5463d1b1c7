"""How to quantize a product (W8A8), and for which layers (Rule)."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_qmm.qarray import QTYPES


@dataclasses.dataclass(frozen=True)
class W8A8:
    """8-bit weights times 8-bit activations, both of the same type.

    Weights get one scale per output channel. Activations are quantized inside the product: with scales
    computed from the data, or static ones where `activation_scale` is given.

    Args:
      dtype: `jnp.int8` or `jnp.float8_e4m3fn`.
      activation: "per_token" (one scale per row) or "per_tensor".
      symmetric: False gives activations a zero point too; int8 only.
      activation_scale: static scale, a float or a float array of shape (), for instance from a calibration.
        Also inside a transformation: the scheme may hold a tracer.
      activation_zero_point: static zero point, an int or an integer array of shape (); needed with a static
        scale when `symmetric` is False.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W8A8()
    W8A8(int8, per_token)
    >>> W8A8("int8", symmetric=False, activation_scale=0.1, activation_zero_point=-3)
    W8A8(int8, per_tensor static, asymmetric)
    """

    dtype: Any = jnp.int8
    activation: str = "per_token"
    symmetric: bool = True
    activation_scale: Any = None
    activation_zero_point: Any = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", check_qtype("dtype", self.dtype))
        if self.activation not in ("per_token", "per_tensor"):
            raise ValueError(f"activation is {self.activation!r}, needs 'per_token' or 'per_tensor'")
        if not isinstance(self.symmetric, (bool, np.bool_)):
            raise TypeError(f"symmetric is {self.symmetric!r}, needs True or False")
        if not self.symmetric and self.dtype != jnp.int8:
            raise ValueError(f"symmetric=False was given with dtype {self.dtype}, needs int8")
        _check_scalar("activation_scale", self.activation_scale, jnp.floating)
        _check_scalar("activation_zero_point", self.activation_zero_point, jnp.integer)
        if self.activation_scale is None and self.activation_zero_point is not None:
            raise ValueError("activation_zero_point was given without activation_scale")
        if self.activation_scale is not None and self.symmetric != (self.activation_zero_point is None):
            raise ValueError(
                f"activation_zero_point is {self.activation_zero_point}, needs "
                + ("None with symmetric=True" if self.symmetric else "a value with symmetric=False")
            )

    def __repr__(self):
        static = self.activation_scale is not None
        activation = "per_tensor static" if static else self.activation
        return f"W8A8({self.dtype}, {activation}{'' if self.symmetric else ', asymmetric'})"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Names the scheme of all layers whose path matches; of several rules the first that matches counts.

    Args:
      path: regular expression that must match the whole path of the layer, such as "encoder.*attention.*".
      scheme: a `W8A8`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> Rule(".*mlp.*", W8A8())
    Rule(path='.*mlp.*', scheme=W8A8(int8, per_token))
    """

    path: str
    scheme: W8A8

    def __post_init__(self):
        if not isinstance(self.path, str):
            raise TypeError(f"path is {self.path!r}, needs a regular expression as str")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(f"path is {self.path!r}, needs a regular expression: {error}") from None
        check_scheme(self.scheme)


def check_scheme(scheme):
    """Raises TypeError if `scheme` is no W8A8."""
    if not isinstance(scheme, W8A8):
        raise TypeError(f"scheme is {scheme!r}, needs a W8A8")


def check_qtype(name, qtype):
    """`qtype` as a dtype, or a TypeError that names the argument `name`."""
    try:
        dtype = jnp.dtype(qtype)
    except TypeError:
        dtype = None
    if dtype not in QTYPES:
        raise TypeError(f"{name} is {qtype!r}, needs {' or '.join(map(str, QTYPES))}")
    return dtype


def _check_scalar(name, value, kind):
    if value is None:
        return
    try:
        dtype = jnp.result_type(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, needs a number or an array") from None
    if not jnp.issubdtype(dtype, kind):
        raise TypeError(f"{name} has dtype {dtype}, needs {kind.__name__}")
    if np.shape(value) != ():
        raise ValueError(f"{name} has shape {np.shape(value)}, needs ()")
