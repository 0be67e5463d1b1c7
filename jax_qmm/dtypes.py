"""The dtypes that ops take, and check_qtype, which reads a user's name for one."""

from typing import Any

import jax.numpy as jnp

INT8 = jnp.dtype(jnp.int8)
INT32 = jnp.dtype(jnp.int32)
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)

QTYPES = (INT8, FLOAT8)
SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))

_ALIASES = {"fp8": FLOAT8, "float8": FLOAT8, "e4m3": FLOAT8}


def check_qtype(name: str, qtype: Any) -> Any:
    """`qtype` as a dtype, or a TypeError that names the argument `name`.

    >>> check_qtype("qtype", "fp8")
    dtype(float8_e4m3fn)
    """
    try:
        dtype = _ALIASES.get(qtype) if isinstance(qtype, str) and qtype in _ALIASES else jnp.dtype(qtype)
    except TypeError:
        dtype = None
    if dtype not in QTYPES:
        raise TypeError(f"{name} is {qtype!r}, needs {' or '.join(map(str, QTYPES))}")
    return dtype
