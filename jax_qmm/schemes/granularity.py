"""Which values of a weight or an activation share a scale."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_qmm.ops.quantize import quantize
from jax_qmm.reference.quantize import spread


def contracted_last(kernel, contracted):
    """A kernel with its contracted axes last, and the order of axes that takes it back."""
    last = [axis % kernel.ndim for axis in contracted]
    order = [axis for axis in range(kernel.ndim) if axis not in last] + last
    return kernel.transpose(order), [order.index(axis) for axis in range(kernel.ndim)]


def granularity_of(tile, sizes) -> dict[str, Any]:
    """How `quantize` is to share scales within the last axes of an array, which have these sizes and are contracted."""
    *outer, inner = sizes
    if tile is None or tile >= math.prod(sizes):
        return {"axis": tuple(range(-len(sizes), 0))}
    return {"tile_size": math.gcd(tile, inner) if outer else tile}


def share_scales(x, q, options, axis, rows):
    """`x` as `q`, which is quantized with these options, but with a scale for each `rows` along `axis`."""
    size = x.shape[axis]
    rows = max(1, min(rows, size))
    count = -(-size // rows)
    padding = [(0, count * rows - size if i == axis else 0) for i in range(x.ndim)]
    scale = jnp.pad(q.scale, padding)
    largest = scale.reshape(*scale.shape[:axis], count, rows, *scale.shape[axis + 1 :]).max(axis + 1)
    largest = jnp.maximum(largest, float(jnp.finfo(jnp.float32).tiny))  # tiles of zeros divide by it
    of_rows = spread(largest, rows, size, axis)
    q = quantize(x, q.qtype, scale=of_rows, **options)
    return q if size % rows else q._replace(scale=largest)


def sums_like_scale(x, q):
    """The sums of `x` over the blocks, within its last axis, and the whole axes that share a scale of `q`."""
    count = q.scale.shape[-1]
    tile = q.tile_size if count != 1 else max(x.shape[-1], 1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * tile - x.shape[-1])])
    x = x.reshape(*x.shape[:-1], count, tile).sum(-1)
    return x.sum(tuple(axis for axis in range(x.ndim - 1) if q.scale.shape[axis] == 1), keepdims=True)


def is_positive_int(size):
    return isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size > 0


def checked_tile_size(tile):
    if tile is not None and not is_positive_int(tile):
        raise ValueError(f"tile_size is {tile!r}, needs a positive int, or None for one scale per channel")
    return tile if tile is None else int(tile)
