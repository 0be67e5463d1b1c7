"""The sharding of a quantized kernel's leaves, from that of the kernel in the order in which a layer sees its axes."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_qmm.qarray import QArray


def leaf_specs(q: QArray, spec: PartitionSpec) -> QArray:
    """The partition spec of each leaf of `q`.

    Args:
      q: a quantized kernel; its leaves may be ShapeDtypeStructs.
      spec: mesh axes, or logical names, for the axes of `q`; those that it does not reach are None.

    Returns:
      `q` with a PartitionSpec in place of each leaf. Scales, zero points and sums are replicated along the
      axes that share one.

    >>> import jax.numpy as jnp, jax_qmm
    >>> q = jax_qmm.quantize(jnp.ones((4, 8))).T  # (8, 4), stored (4, 8)
    >>> specs = leaf_specs(q, PartitionSpec(None, "model"))
    >>> tuple(specs.qvalue), tuple(specs.scale)
    (('model', None), ('model', None))
    >>> specs = leaf_specs(q, PartitionSpec("model", None))
    >>> tuple(specs.qvalue), tuple(specs.scale)
    ((None, 'model'), (None, None))
    """
    stored = dict(zip(q.storage_axes(), spec))
    whole = q.qvalue.shape
    entry = lambda axis, size: stored.get(axis) if size == whole[axis] else None
    return jax.tree.map(lambda leaf: PartitionSpec(*map(entry, range(len(whole)), leaf.shape)), q)


def leaf_shardings(q: QArray, sharding: NamedSharding) -> QArray:
    """As `leaf_specs`, with a NamedSharding in place of each leaf."""
    return jax.tree.map(lambda spec: NamedSharding(sharding.mesh, spec), leaf_specs(q, sharding.spec))


def abstract_leaves(q: QArray, sharding: Any) -> QArray:
    """`q` with a ShapeDtypeStruct in place of each leaf, sharded as `leaf_shardings` says, or not where it is None."""
    if not isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), q)
    return jax.tree.map(
        lambda leaf, each: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=each),
        q,
        leaf_shardings(q, sharding),
    )
