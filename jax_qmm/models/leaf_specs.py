"""The sharding of a quantized kernel's leaves, from that of the kernel in the order in which a layer sees its axes."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_qmm.qarray import QArray
from jax_qmm.reference.packing import COLUMNS


def leaf_specs(q: QArray, spec: PartitionSpec, mesh: Any = None) -> QArray:
    """The partition spec of each leaf of `q`.

    Args:
      q: a quantized kernel; its leaves may be ShapeDtypeStructs.
      spec: mesh axes, or logical names, for the axes of `q`; those that it does not reach are None.
      mesh: of these axes; None for the mesh that is set, if there is one.

    Returns:
      `q` with a PartitionSpec in place of each leaf. Scales, zero points and sums are replicated along the
      axes that share one. The last axis in memory is sharded at boundaries of its blocks, those of a packed `q` at
      boundaries of 128 columns too; what the mesh does not divide there is replicated. Axes that are merged in memory
      are sharded as the first of them, where the others are not.

    >>> import jax.numpy as jnp, jax_qmm
    >>> q = jax_qmm.quantize(jnp.ones((4, 8))).T  # (8, 4), stored (4, 8)
    >>> specs = leaf_specs(q, PartitionSpec(None, "model"))
    >>> tuple(specs.qvalue), tuple(specs.scale)
    (('model', None), ('model', None))
    >>> specs = leaf_specs(q, PartitionSpec("model", None))
    >>> tuple(specs.qvalue), tuple(specs.scale)
    ((None, 'model'), (None, None))
    >>> q = jax_qmm.W4A16().quantize_weight(jnp.ones((512, 8)), (0,))
    >>> specs = leaf_specs(q, PartitionSpec("model", None))
    >>> tuple(specs.qvalue), tuple(specs.scale)
    ((None, 'model'), (None, 'model'))
    """
    stored = dict(zip(q.storage_axes(), spec))
    whole, last = q.qvalue.shape, q.ndim - 1
    if q.merged_axes:
        first, *others = (stored.pop(axis, None) for axis in range(q.ndim - q.merged_axes, q.ndim))
        stored[last] = None if any(others) else first
    parts = _divides(q, stored.get(last), mesh or jax.sharding.get_abstract_mesh())

    def entry(axis, size):
        if axis == last and (q.is_packed or q.merged_axes or size != whole[axis]):
            return stored.get(axis) if parts and size != 1 else None
        return stored.get(axis) if size == whole[axis] else None

    return jax.tree.map(lambda leaf: PartitionSpec(*map(entry, range(len(whole)), leaf.shape)), q)


def _divides(q, names, mesh):
    """Whether the mesh axes `names` divide the last axis in memory at boundaries of its blocks and packed columns."""
    if q.ndim == 0 or names is None:
        return False
    first, size = q.stored_shape[q.ndim - max(q.merged_axes, 1)], q.values_shape[-1]
    unit = math.lcm(q.tile_size if q.scale.shape[-1] != 1 else 1, COLUMNS if q.is_packed else 1)
    devices = math.prod(mesh.shape.get(name, 1) for name in (names if isinstance(names, tuple) else (names,)))
    return first % devices == 0 and size % unit == 0 and size // unit % devices == 0


def leaf_shardings(q: QArray, sharding: NamedSharding) -> QArray:
    """As `leaf_specs`, with a NamedSharding in place of each leaf."""
    mesh = sharding.mesh
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), leaf_specs(q, sharding.spec, mesh))


def abstract_leaves(q: QArray, sharding: Any) -> QArray:
    """`q` with a ShapeDtypeStruct in place of each leaf, sharded as `leaf_shardings` says, or not where it is None."""
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), q)
    return jax.tree.map(
        lambda leaf, each: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=each),
        q,
        leaf_shardings(q, sharding),
    )
