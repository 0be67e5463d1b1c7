"""Arrays whose types have a sharding, that on Explicit axes of a mesh: it is for the program to gather them."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_qmm import _compat


def on_auto_axes(function: Callable, out_sharding: NamedSharding | None, *operands: Any) -> Any:
    """`function(*operands)`, on Explicit axes with the compiler to shard what happens inside.

    JAX has no types for convolutions of which channels are sharded, or of spatial axes that no longer divide.

    Args:
      out_sharding: of the result; None where no axis is Explicit, and then it is just the call.
    """
    if out_sharding is None:
        return function(*operands)
    axes = out_sharding.mesh.explicit_axes
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding)(*operands)


def gathered_unless_divided(x: jax.Array, axis: int, parts: int) -> jax.Array:
    """`x`, with `axis` gathered where Explicit axes share it among devices whose number does not divide `parts`.

    On Auto axes, where the compiler gathers, it is `x` itself.
    """
    aval = jax.typeof(x)
    if not _compat.explicit_mesh(aval):
        return x
    spec = [*aval.sharding.spec] + [None] * (x.ndim - len(aval.sharding.spec))
    names = spec[axis] if isinstance(spec[axis], tuple) else () if spec[axis] is None else (spec[axis],)
    if parts % math.prod(aval.sharding.mesh.shape[name] for name in names) == 0:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, aval.sharding.update(spec=PartitionSpec(*spec)))
