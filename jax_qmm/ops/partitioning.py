"""Lowering to a kernel or to the reference, whole or on the parts that custom_partitioning makes."""

import dataclasses
import functools
import math

import jax
from jax.interpreters import mlir

from jax_qmm import _compat, _ffi


def register_lowerings(primitive, op, kernel, reference, partitioned):
    """Lowers `primitive` to `kernel` on platforms where kernels run and to `reference` elsewhere, saying so.

    Args:
      primitive: its parameters are those of `kernel` and `reference`, and perhaps out_sharding.
      op: what messages call it.
      kernel: function of the operands that one device holds.
      reference: likewise.
      partitioned: called with one of these two bound to its parameters and the shapes of the operands, makes
        a custom_partitioning of it.
    """

    def lower(ctx, *operands, **params):
        params.pop("out_sharding", None)  # in ctx.avals_out
        reasons = list(filter(None, map(_ffi.fallback_reason, _compat.lowering_platforms(ctx))))
        for why in reasons:
            _ffi.note_fallback(op, why)
        function = functools.partial(reference if reasons else kernel, **params)
        mesh_ctx = find_mesh(ctx)
        if mesh_ctx is not None:
            function = partitioned(function, [x.shape for x in ctx.avals_in])
        lower_function = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
        out = lower_function(_compat.without_shardings(mesh_ctx or ctx), *operands)
        return [_compat.lower_with_sharding_in_types(ctx, *pair) for pair in zip(out, ctx.avals_out)]

    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cuda")


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
    return ctx.replace(
        module_context=ctx.module_context.replace(axis_context=dataclasses.replace(axis_context, abstract_mesh=mesh))
    )


def mesh_axes(entry):
    """The entry of a PartitionSpec as a tuple."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def even_spec(mesh, x):
    """The mesh axes of each dimension of `x`; none where they don't divide it, as XLA pads parts by junk."""
    spec = [mesh_axes(entry) for entry in x.sharding.spec]
    spec += [()] * (len(x.shape) - len(spec))
    return [
        axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else () for axes, size in zip(spec, x.shape)
    ]


def named_sharding(mesh, spec):
    """The sharding of an array with these mesh axes for each dimension."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(axes or None for axes in spec)))


def without_mesh(function):
    """`function` on the parts of one device, which the types of a mesh around the compilation don't fit."""

    def local(*operands):
        with jax.sharding.use_abstract_mesh(_compat.NO_MESH):
            return function(*operands)

    return local
