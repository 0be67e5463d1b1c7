"""Every private or version-dependent JAX name that jax_qmm uses, for jax 0.10 to 0.12."""

import functools
import re
from pathlib import Path

import jax
from jax._src import core, dispatch
from jax._src.interpreters import mlir
from jax._src.lax.lax import canonicalize_precision
from jax._src.sharding_impls import canonicalize_sharding
from jax.interpreters import ad, xla

NO_MESH = jax.sharding.AbstractMesh((), ())
ShardingTypeError = core.ShardingTypeError
enable_x64 = jax.enable_x64
lower_with_sharding_in_types = mlir.lower_with_sharding_in_types
canonicalize_out_sharding = functools.partial(canonicalize_sharding, check_mesh_consistency=False)


def records_kernels():
    """Whether XLA takes kernels into its CUDA graphs by the FFI stage "record", in a version that was tested."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "record_c_api.h")
    if not header.exists():
        return False
    version = re.findall(r"#define XLA_FFI_Extension_Record_M\w+Version (\d+)", header.read_text())
    return version in (["0", "1"], ["0", "2"])


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


def has_manual_axes(ctx):
    """Whether a lowering rule runs inside a shard_map."""
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def without_shardings(ctx):
    """The context of a lowering rule with operand types that carry no sharding."""
    return ctx.replace(avals_in=[core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in])
