"""How to quantize a product (W8A8, W4A8, W4A16, W8A16), and for which layers (Rule)."""

import dataclasses
import re

from jax_qmm.dtypes import INT8
from jax_qmm.schemes.float_activations import W4A16 as W4A16, W8A16 as W8A16
from jax_qmm.schemes.w4a8 import W4A8 as W4A8
from jax_qmm.schemes.w8a8 import W8A8 as W8A8

Scheme = W8A8 | W4A8 | W4A16 | W8A16


@dataclasses.dataclass(frozen=True)
class Rule:
    """Names the scheme of all layers whose path matches; of several rules the first that matches counts.

    Args:
      path: regular expression that must match the whole path of the layer, such as "encoder.*attention.*".
      scheme: a `W8A8`, `W4A8`, `W4A16` or `W8A16`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> Rule(".*mlp.*", W8A8())
    Rule(path='.*mlp.*', scheme=W8A8(int8, per_token))
    """

    path: str
    scheme: Scheme

    def __post_init__(self):
        if not isinstance(self.path, str):
            raise TypeError(f"path is {self.path!r}, needs a regular expression as str")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(f"path is {self.path!r}, needs a regular expression: {error}") from None
        check_scheme(self.scheme)


def check_scheme(scheme):
    """Raises TypeError if `scheme` is no scheme."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme is {scheme!r}, needs a W8A8, W4A8, W4A16 or W8A16")


def check_weight(q, scheme):
    """Raises ValueError if `q` is no weight for `scheme`."""
    if q.qtype != scheme.dtype:
        raise ValueError(f"scheme has dtype {scheme.dtype}, needs that of the QArray, {q.qtype}")
    of_int8 = isinstance(scheme, W4A8) and scheme.of_activations.dtype == INT8
    if q.is_packed and (isinstance(scheme, W8A8) or of_int8):
        raise ValueError(f"{q} is packed, {scheme!r} needs it plain: take its .unpack()")
    if q.merged_axes and (isinstance(scheme, W8A8) or of_int8):
        raise ValueError(f"{q} has merged axes, {scheme!r} needs a weight of its own: take its quantize_weight")
    if q.scale_step is None and of_int8:
        raise ValueError(f"{q} has no scale_step, {scheme!r} needs one, as its quantize_weight gives it")
