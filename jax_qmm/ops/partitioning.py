"""Where a lowering rule can leave the sharding of its operands to custom_partitioning."""

import dataclasses

import jax

from jax_qmm import _compat


def find_mesh(ctx):
    """The context of a lowering rule with the mesh by which custom_partitioning reads shardings.

    jit knows the mesh when an operand or a constraint in it has a NamedSharding. Under `jax.set_mesh` with
    nothing but unsharded arguments and bare PartitionSpecs it does not.

    Returns:
      A context for the lowering of a custom_partitioning; None where there is no use for one: inside a
      shard_map, on one device, or where no mesh is to be found, so that XLA gathers operands that are sharded
      all the same.
    """
    axis_context = ctx.module_context.axis_context
    if _compat.has_manual_axes(ctx) or getattr(axis_context, "num_devices", 1) == 1:
        return None
    mesh = axis_context.abstract_mesh or jax.sharding.get_abstract_mesh()
    if mesh.size != axis_context.num_devices:
        return None
    return ctx.replace(module_context=ctx.module_context.replace(
        axis_context=dataclasses.replace(axis_context, abstract_mesh=mesh)))
