"""The one door to the compiled extension: loads it, registers its FFI targets, says whether its kernels run."""

import functools
import importlib
import os
import warnings

import jax
from jax import export

from jax_qmm import _compat, tuning

TARGETS = ("jax_qmm_scaled_mm", "jax_qmm_quantize_dynamic", "jax_qmm_quantize_static")


@functools.cache
def _load():
    """Imports and registers the extension: (module, None), or (None, why there is none)."""
    try:
        kernels = importlib.import_module("jax_qmm._kernels")
    except ModuleNotFoundError as error:
        if error.name != "jax_qmm._kernels":
            return None, f"the extension failed to load: {error}"
        return None, "jax_qmm was built without kernels (set JAX_QMM_CUDA_ARCHS=90a and install again)"
    except ImportError as error:
        return None, f"the extension failed to load: {error}"
    for target, handlers in kernels.registrations(_compat.records_kernels()).items():
        jax.ffi.register_ffi_target(target, handlers, platform="CUDA")
    return kernels, None


def _gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:  # no CUDA backend in this process
        return []


def fallback_reason(platform: str) -> str | None:
    """Why `platform` of this process runs the reference lowering; None where the kernels run.

    Lowering for "cuda" in a process without a GPU is for another machine, which is taken to have the kernels.
    """
    if platform != "cuda":
        return f"platform {platform} has no kernels"
    kernels, why = _load()
    for gpu in _gpus():
        if kernels is None:
            return why
        built = kernels.architectures()
        if gpu.compute_capability.replace(".", "") not in (arch.rstrip("a") for arch in built):
            return (
                f"{gpu.device_kind} has compute capability {gpu.compute_capability}; "
                f"this build has kernels for {', '.join(built)}"
            )
    _load_tuning()
    return None


@functools.cache
def _load_tuning():
    """Gives the tuning files to the extension, once.

    Not when the extension is loaded: whether a file serves depends on the GPU, and an import must not start
    JAX's backends.
    """
    kernels, _ = _load()
    gpus = _gpus()
    if kernels and gpus:
        tuning.apply(kernels, gpus[0])


@functools.cache
def _warn(message):
    warnings.warn(message, stacklevel=3)


def note_fallback(op: str, reason: str) -> None:
    """Says once that `op` runs the reference lowering.

    Raises:
      RuntimeError: if the environment has JAX_QMM_STRICT=1.
    """
    message = f"jax_qmm.{op} runs on the pure-JAX reference, not on a kernel: {reason}"
    if os.environ.get("JAX_QMM_STRICT") == "1":
        raise RuntimeError(f"{message} (JAX_QMM_STRICT=1)")
    _warn(message)


def describe_scaled_mm(m, n, k, batch, a_dtype, out_dtype, fast_accum) -> str:
    """The kernel that the extension chooses for this product and why, in words; "" without the extension."""
    kernels, _ = _load()
    if kernels is None:
        return ""
    _load_tuning()
    gpus = _gpus()
    product = tuning.Product(m, n, k, batch, str(a_dtype), str(out_dtype), fast_accum)
    if (measured := kernels.tuned_scaled_mm(*product)) is not None:
        why = "tuned" if measured == m else f"tuned at M {measured}"
    elif len(kernels.scaled_mm_choices(*product)) == 1:
        why = "the only one for this alignment"
    else:
        why = "by the cost model"
    chosen = kernels.select_scaled_mm(*product, gpus[0].core_count if gpus else 132)
    return f"{kernels.describe_scaled_mm(chosen)} ({why})"


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
    return [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


_load()
