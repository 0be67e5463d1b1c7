"""The dtypes that ops take, and check_qtype, which reads a user's name for one."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

INT4 = jnp.dtype(jnp.int4)
INT8 = jnp.dtype(jnp.int8)
INT32 = jnp.dtype(jnp.int32)
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)

QTYPES = (INT8, FLOAT8)  # of products with two quantized sides
WEIGHT_QTYPES = (INT4, INT8)  # of weights that float activations are multiplied by
SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))

_ALIASES = {"fp8": FLOAT8, "float8": FLOAT8, "e4m3": FLOAT8}


def check_qtype(name: str, qtype: Any, qtypes: Sequence[Any] = QTYPES) -> Any:
    """`qtype` as one of the dtypes `qtypes`, or a TypeError that names the argument `name`.

    >>> check_qtype("qtype", "fp8")
    dtype(float8_e4m3fn)
    """
    try:
        dtype = _ALIASES.get(qtype) if isinstance(qtype, str) and qtype in _ALIASES else jnp.dtype(qtype)
    except TypeError:
        dtype = None
    if dtype not in qtypes:
        raise TypeError(f"{name} is {qtype!r}, needs {' or '.join(map(str, qtypes))}")
    return dtype


def array_bytes(x: Any) -> int:
    """The bytes of an array on a device, where two int4 values share one.

    >>> array_bytes(jnp.zeros((3, 5), jnp.int4)), array_bytes(jnp.zeros((3, 5), jnp.bfloat16))
    (8, 30)
    """
    bits = 4 if x.dtype == INT4 else 8 * x.dtype.itemsize
    return -(-math.prod(x.shape) * bits // 8)
