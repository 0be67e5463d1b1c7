"""Every private or version-dependent JAX name that jax_qmm uses, for jax 0.10 to 0.12."""

import functools
from importlib import metadata
from typing import Any

import jax
from jax._src import core, dispatch, xla_bridge
from jax._src.interpreters import mlir
from jax._src.lax.lax import canonicalize_precision
from jax._src.sharding_impls import canonicalize_sharding
from jax.interpreters import ad, xla

NO_MESH = jax.sharding.AbstractMesh((), ())
ShardingTypeError = core.ShardingTypeError
enable_x64 = jax.enable_x64
lower_with_sharding_in_types = mlir.lower_with_sharding_in_types
canonicalize_out_sharding = functools.partial(canonicalize_sharding, check_mesh_consistency=False)


# The releases of JAX with which the FFI stage "record" was tested. Its ABI is not stable: cuda/ffi/record_abi.h has it,
# and tests/ffi compares it with the headers of each.
RECORDING_RELEASES = ("0.11.2", "0.12.0", "0.12.0.1")


def why_not_recorded() -> str | None:
    """Why kernels can't be recorded into CUDA graphs with the installed packages; None where they can."""
    for package in ("jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"recording needs {package}, which is not installed"
        if version not in RECORDING_RELEASES:
            return f"recording was tested with {', '.join(RECORDING_RELEASES)} of {package}, not with {version}"
    return None


def after_plugins(callback):
    """Calls `callback` when JAX has loaded its plugins; at once if it has."""
    xla_bridge.register_plugin_callbacks(lambda c_api: callback())


def define_impl(primitive):
    """Lets `primitive` run outside jit, and lets its lowering contain a custom_partitioning."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))


def asks_highest_precision(precision):
    """Whether a dot's `precision` argument, or the default when it is None, is the highest."""
    parsed = canonicalize_precision(precision)
    return jax.lax.Precision.HIGHEST in (parsed if isinstance(parsed, tuple) else (parsed,))


def explicit_mesh(aval):
    """Whether the type of an array carries its sharding."""
    return not aval.sharding.mesh.empty and aval.sharding.mesh._any_axis_explicit


def align_varying(arrays):
    """Casts all arrays to vary over the manual mesh axes that one of them varies over, as jax.lax does."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - v)), to="varying") if union - v else x for x, v in zip(arrays, varying)
    ]


def zero_tangent(x):
    """The tangent of an output that no differentiated input reaches."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def lowering_platforms(ctx):
    """The platforms that a lowering rule is asked for."""
    return ctx.platforms or ctx.module_context.platforms


def lowering_devices(ctx):
    """The devices that a lowering rule is asked for; none where they are not known, as in an export."""
    if ctx.module_context.lowering_parameters.for_export:
        return frozenset()
    axis_context = ctx.module_context.axis_context
    mesh: Any = getattr(axis_context, "mesh", None)  # inside a shard_map
    if isinstance(mesh, jax.sharding.Mesh):
        return frozenset(mesh.devices.flat)
    return frozenset(getattr(axis_context, "device_assignment", None) or ())


def has_manual_axes(ctx):
    """Whether a lowering rule runs inside a shard_map."""
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def without_shardings(ctx):
    """The context of a lowering rule with operand types that carry no sharding."""
    return ctx.replace(avals_in=[core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in])
