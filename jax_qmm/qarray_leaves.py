"""Which leaves a QArray may have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_qmm.dtypes import INT4, INT8, INT32, QTYPES, SCALE_DTYPES, WEIGHT_QTYPES

LEAVES = {
    "qvalue": (*QTYPES, INT4),
    "scale": SCALE_DTYPES,
    "zero_point": (INT32, *SCALE_DTYPES),
    "azp_adj": (INT32,),
    "scale_step": SCALE_DTYPES,
}


def check(q, tile_size):
    """Raises an error unless the leaves of a plain QArray fit each other and `tile_size`."""
    if q.scale_step is not None and getattr(q.qvalue, "dtype", INT4) != INT4:
        raise TypeError(f"scale_step was given with qvalue of dtype {q.qvalue.dtype}, needs int4")
    for name, dtypes in LEAVES.items():
        leaf: Any = getattr(q, name)
        if name in ("scale", "zero_point") and q.scale_step is not None:
            dtypes = (INT8,)
        needs = ", ".join(map(str, dtypes))
        if leaf is None and name in ("zero_point", "azp_adj", "scale_step"):
            continue
        if leaf is None or not hasattr(leaf, "dtype"):
            raise TypeError(f"{name} is a {type(leaf).__name__}, needs an array of {needs}")
        if leaf.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {leaf.dtype}, needs {needs}")
    shape, scale_shape = q.qvalue.shape, q.scale.shape
    last, needs = shape[-1:], "dimensions that divide its dimensions"
    if tile_size is not None:
        if isinstance(tile_size, bool) or not isinstance(tile_size, (int, np.integer)) or tile_size < 1 or not shape:
            raise ValueError(f"tile_size is {tile_size!r}, needs to be a positive int, with a qvalue of rank 1 or more")
        last = (-(-shape[-1] // tile_size),)
        needs += f", of the last the {last[0]} blocks of tile_size {tile_size}"
    fits = len(shape) == len(scale_shape) and all(map(_divides, scale_shape[:-1], shape[:-1]))
    if not fits or not (all(map(_divides, scale_shape[-1:], last)) if tile_size is None else scale_shape[-1:] == last):
        raise ValueError(f"scale has shape {scale_shape}, needs the rank of qvalue {shape} and {needs}")
    if q.zero_point is not None:
        if q.qvalue.dtype not in WEIGHT_QTYPES:
            raise TypeError(f"zero_point was given with qvalue of dtype {q.qvalue.dtype}, needs int8 or int4")
        if q.zero_point.shape != scale_shape:
            raise ValueError(f"zero_point has shape {q.zero_point.shape}, needs that of scale {scale_shape}")
        if q.zero_point.dtype in (INT8, INT32):
            cast("zero_point", q.zero_point, q.qvalue.dtype)
    sums = () if q.azp_adj is None else q.azp_adj.shape
    of_axes = len(sums) == len(shape) and all(n in (1, size) for n, size in zip(sums, shape))
    if sums and not of_axes and sums != scale_shape:
        raise ValueError(
            f"azp_adj has shape {sums}, needs that of qvalue {shape} with 1 on summed axes, or that of scale, "
            f"{scale_shape}"
        )
    steps = scale_shape if q.scale_step is None else q.scale_step.shape
    if len(steps) != len(scale_shape) or not all(step in (1, count) for step, count in zip(steps, scale_shape)):
        raise ValueError(
            f"scale_step has shape {steps}, needs that of scale {scale_shape} with 1 for what shares a step"
        )


def _divides(part, whole):
    return part == whole or (part != 0 and whole % part == 0)


def cast(name, x, dtype):
    """Integers as `dtype`, which must hold them. Traced ones can't be seen: they wrap."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} is {getattr(x, 'dtype', type(x).__name__)}, needs an array of integers")
    bounds = jnp.iinfo(dtype)
    if not isinstance(x, Tracer) and x.size:
        with jax.ensure_compile_time_eval():
            least, most = int(x.min()), int(x.max())
        if least < bounds.min or bounds.max < most:
            raise ValueError(
                f"{name} has values from {least} to {most}, needs {bounds.min} to {bounds.max} for {dtype}"
            )
    return x.astype(dtype)
