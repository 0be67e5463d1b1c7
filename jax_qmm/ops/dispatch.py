"""What runs an op: its kernel where the platform has one for the operands, its reference elsewhere, which is said."""

import dataclasses
import functools
import os
import sys
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_qmm import _compat, _extension
from jax_qmm.ops.sharding import find_mesh


@dataclasses.dataclass(frozen=True)
class Op:
    """Everything that lowering and `explain` know about one op.

    The functions take the primitive's parameters as keywords, `out_sharding` left out. Operands and results
    are those that one device holds; `unserved`, `describe` and `choice` read only their shapes and dtypes.

    Attributes:
      name: what messages and tables call it.
      targets: the names of its FFI handlers.
      kernel: the op by its kernel, a function of the operands.
      reference: the same in plain jax.numpy.
      unserved: called with the program's platform, its devices as far as they are known, and the operands, says why
        the kernel does not serve them; None if it does.
      describe: called with the operands and results, gives the op in words and the operands worth showing.
      choice: called likewise, gives the kernel in words.
      partitioned: called with `run` for the platforms at hand and the shapes of whole operands, gives a function
        of operands that may be sharded.
      workspace: called with the program's devices and the operands, gives what the kernel gets as `workspace`: the
        bytes that it needs beside its result. None where it needs none. Kernels for devices that are not known get 0.
      by_xla: called likewise, says why a GPU is to run `xla` and no kernel; None if the kernel is to run. That is a
        choice and no fallback: nothing warns.
      xla: the op in operations of XLA, a function of the operands, for `by_xla`.
      prepared: called likewise, gives the operands as the kernels of these devices take them, and the parameters that
        fit these.
    """

    name: str
    targets: tuple[str, ...]
    kernel: Callable
    reference: Callable
    unserved: Callable
    describe: Callable
    choice: Callable
    partitioned: Callable
    workspace: Callable | None = None
    by_xla: Callable = lambda devices, operands, **params: None
    xla: Callable | None = None
    prepared: Callable = lambda devices, operands, **params: (operands, params)


OPS: dict[Primitive, Op] = {}


def register(primitive: Primitive, op: Op) -> None:
    """Lowers `primitive` as `op` says, and has `explain` list it."""

    def lower(ctx, *operands, **params):
        params.pop("out_sharding", None)  # in ctx.avals_out
        run_here = functools.partial(run, _compat.lowering_platforms(ctx), _compat.lowering_devices(ctx))
        mesh_ctx = find_mesh(ctx)
        if mesh_ctx is None:
            function = functools.partial(run_here, op, **params)
        else:
            function = op.partitioned(run_here, [x.shape for x in ctx.avals_in], **params)
        lower_function = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
        out = lower_function(_compat.without_shardings(mesh_ctx or ctx), *operands)
        return [_compat.lower_with_sharding_in_types(ctx, *pair) for pair in zip(out, ctx.avals_out)]

    OPS[primitive] = op
    _compat.define_impl(primitive)
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cuda")


def run(platforms, devices, op, *operands, **params):
    """`op` on what one device holds: by its kernel, or its reference if one of `platforms` or `devices` needs that."""
    reasons = [why for platform in platforms if (why := op.unserved(platform, devices, operands, **params))]
    for why in reasons:
        note_fallback(op.name, why)
    if reasons:
        return op.reference(*operands, **params)
    if op.by_xla(devices, operands, **params):
        assert op.xla is not None
        return op.xla(*operands, **params)
    operands, params = op.prepared(devices, operands, **params)
    if op.workspace is not None:
        params["workspace"] = op.workspace(devices, operands, **params) if devices else 0
    return op.kernel(*operands, **params)


def with_workspace(result: jax.ShapeDtypeStruct, workspace: int) -> list[jax.ShapeDtypeStruct]:
    """What the custom call of a kernel gives: its result, and as many bytes of workspace, if it needs any."""
    return [result, *([jax.ShapeDtypeStruct((workspace,), jnp.uint8)] if workspace else [])]


_noted = set()


def note_fallback(op: str, reason: str) -> None:
    """Warns once that `op` runs the reference lowering, at the line that called into jax_qmm or JAX.

    Raises:
      RuntimeError: if the environment has JAX_QMM_STRICT=1.
    """
    message = f"jax_qmm.{op} runs on the pure-JAX reference, not on a kernel: {reason}"
    if os.environ.get("JAX_QMM_STRICT") == "1":
        raise RuntimeError(f"{message} (JAX_QMM_STRICT=1)")
    if message not in _noted:
        _noted.add(message)
        warnings.warn(message, stacklevel=_users_level())


def _users_level():
    """The `stacklevel` by which `note_fallback` warns at the user's line. Python 3.11 has no skip_file_prefixes."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level


_NOT_THE_USERS = {"jax_qmm", "jax", "jaxlib", "flax", "contextlib", "functools"}


def what_runs(op: Op, platform, devices, operands, results, **params) -> str:
    """What runs `op` on these operands, in words."""
    if why := op.unserved(platform, devices, operands, **params):
        return f"reference: {why}"
    if why := op.by_xla(devices, operands, **params):
        return f"XLA: {why}"
    return op.choice(operands, results, **params)


def exchanged(op: Op, operands, results, shardings, **params) -> str:
    """What the devices of a mesh exchange for `op`, in words; "" for nothing.

    Args:
      operands, results: their types.
      shardings: of each operand, a `NamedSharding`, or None where only the compiler knows it.
    """
    mesh = next((each.mesh for each in shardings if each is not None and any(each.spec)), None)
    if mesh is None and None not in shardings:
        return ""
    specs = [None if each is None else each.spec for each in shardings]
    typed = [(x.shape, x.sharding.spec) for x in results if _compat.explicit_mesh(x)]
    function = op.partitioned(run, [x.shape for x in operands], **params)
    return function.exchanged(mesh, specs, typed or None)


def runs_on(oldest: int = 0) -> str:
    """Where products of this process run: "kernel", or "reference: why".

    Args:
      oldest: the compute capability at which their kernels begin, as in `_extension.fallback_reason`.
    """
    reason = _extension.fallback_reason(*_extension.default_devices(), oldest)
    return "kernel" if reason is None else f"reference: {reason}"


def export_disabled_checks() -> list[export.DisabledSafetyCheck]:
    """The safety checks of `jax.export.export` that programs with jax_qmm's custom calls need disabled.

    Returns:
      A list for the argument `disabled_checks`.

    >>> import jax, jax.numpy as jnp, jax_qmm
    >>> f = jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 0.5, 0.25))
    >>> spec = jax.ShapeDtypeStruct((16, 32), jnp.int8)
    >>> checks = jax_qmm.export_disabled_checks()
    >>> jax.export.export(f, platforms=["cuda"], disabled_checks=checks)(spec, spec).out_avals[0].shape
    (16, 16)
    """
    return [export.DisabledSafetyCheck.custom_call(target) for target in targets()]


def targets() -> list[str]:
    """The FFI handlers of all ops."""
    return [target for op in OPS.values() for target in op.targets]
