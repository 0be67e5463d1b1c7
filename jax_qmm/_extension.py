"""The one door to the compiled extension: loads it, registers its FFI targets, says whether its kernels run."""

import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jax_qmm import _compat, tuning


@functools.cache
def _load() -> tuple[Any, str | None]:
    """Imports and registers the extension: (module, None), or (None, why there is none)."""
    try:
        kernels = importlib.import_module("jax_qmm._kernels")
    except ModuleNotFoundError as error:
        if error.name != "jax_qmm._kernels":
            return None, f"the extension failed to load: {error}"
        why = "set JAX_QMM_CUDA_ARCHS, to 80 for an A100 or to 90a for an H100, and install again"
        return None, f"jax_qmm was built without kernels ({why})"
    except ImportError as error:
        return None, f"the extension failed to load: {error}"
    tuning.describe_gpus(kernels)
    kernels.call_before_first_kernel(_load_tuning)
    if _is_emulated(kernels) or _why_not_recorded():
        _register(kernels)
    else:
        jax.ffi.register_ffi_target("jax_qmm_recording", kernels.register_recording(), platform="CUDA")
        _compat.after_plugins(lambda: kernels.why_not_recorded() and _register(kernels))
    return kernels, None


def _register(kernels):
    """Registers the targets without the stage "record": XLA launches their kernels outside of CUDA graphs."""
    platform = "cpu" if _is_emulated(kernels) else "CUDA"
    for target, handlers in kernels.registrations().items():
        jax.ffi.register_ffi_target(target, handlers, platform=platform)


def _is_emulated(kernels):
    """Whether the extension is a build on tests/emulator, whose kernels run on the CPU."""
    return getattr(kernels, "runtime", lambda: "static")() == "emulator"


def platform() -> str:
    """The platform that the kernels run on: "cuda", or "cpu" where they are emulated."""
    kernels, _ = _load()
    return "cpu" if _is_emulated(kernels) else "cuda"


@dataclasses.dataclass(frozen=True)
class _EmulatedGpu:
    """What a CPU device lacks of a GPU of JAX."""

    compute_capability: str
    core_count: int
    device_kind: str = "emulator"
    local_hardware_id: int = 0


@functools.cache
def _why_not_recorded():
    """Why no recording is asked for; None where it is."""
    if os.environ.get("JAX_QMM_RECORD") == "0":
        return "JAX_QMM_RECORD=0"
    return _compat.why_not_recorded()


def launches() -> str:
    """How kernels are launched, in words: "recorded" into XLA's CUDA graphs, or why not; "" without the extension."""
    kernels, _ = _load()
    if kernels is None:
        return ""
    if _is_emulated(kernels):
        return "emulated"
    why = _why_not_recorded() or kernels.why_not_recorded()
    way = f"outside of CUDA graphs: {why}" if why else "recorded"
    return way if kernels.launches_overlap() else f"{way}; no launch overlaps another (JAX_QMM_PDL=0)"


def _gpus():
    if platform() == "cpu":
        emulated = _load()[0].Gpu.of_device(0)
        return [_EmulatedGpu(f"{emulated.arch // 10}.{emulated.arch % 10}", emulated.sm_count)]
    try:
        return jax.devices("cuda")
    except RuntimeError:  # no CUDA backend in this process
        return []


def why_none_runs() -> str | None:
    """Why this process can run no kernel, for commands that need a GPU; None where it can."""
    if not _gpus():
        return 'JAX sees no NVIDIA GPU here: there is none, or jax lacks its plugin (pip install "jax[cuda13]")'
    return fallback_reason(platform())


def default_devices() -> tuple[str, frozenset[Any]]:
    """What this process computes on by default: the platform, named as lowering names it ("cuda"), and the devices."""
    with jax.ensure_compile_time_eval():
        devices = frozenset(jnp.zeros(()).devices())
    platform = next(iter(devices)).platform
    # Lowering names GPUs by their maker.
    return ("cuda" if platform == "gpu" and not devices.isdisjoint(_gpus()) else platform), devices


def fallback_reason(platform: str, devices: Collection[Any] = (), oldest: int = 0) -> str | None:
    """Why a program runs the reference lowering; None where the kernels run.

    One program is lowered for all of its devices: an unfit GPU among them takes the kernels from them all, and from
    no other program. A process without a GPU lowers for another machine, which is taken to have the kernels.

    Args:
      platform: of the program.
      devices: of the program, as far as they are known. Where none is a GPU of this process, as in an export, one
        fit GPU suffices; the kernels refuse to run on another.
      oldest: the compute capability (80 is 8.0) for which code must have been compiled to have the op's kernels.
    """
    kernels, why = _load()
    if platform != ("cpu" if _is_emulated(kernels) else "cuda"):
        return f"platform {platform} has no kernels"
    gpus = _gpus()
    if not gpus:
        return None
    if kernels is None:
        return why
    _load_tuning()
    reasons = [_why_unfit(kernels, gpu, oldest) for gpu in gpus]
    if own := [why for gpu, why in zip(gpus, reasons) if gpu in devices]:
        return next(filter(None, own), None)
    return reasons[0] if all(reasons) else None


def _why_unfit(kernels, gpu, oldest=0):
    """Why the kernels don't run on a GPU; "" where they do."""
    capability = int(gpu.compute_capability.replace(".", ""))
    if why := kernels.why_unfit(gpu.device_kind, capability, kernels.driver_version()):
        return why
    if oldest and (code := kernels.compiled_for(capability)) < oldest:
        return f"{gpu.device_kind} runs code for {code / 10}, which has no kernels for it; that for {oldest / 10} has"
    return ""


@functools.cache
def _load_tuning():
    """Gives the tuning files to the extension, once: when a kernel is first lowered, described or run.

    Not when the extension is loaded: whether a file serves depends on the GPU, and an import must not start
    JAX's backends. A program that was lowered in another process is only run.
    """
    kernels, _ = _load()
    if kernels is None:
        return
    models = {(gpu.device_kind, gpu.core_count): gpu for gpu in reversed(_fit_gpus(kernels))}
    tuning.apply(kernels, [kernels.Gpu.of_device(device.local_hardware_id) for device in models.values()])


def _fit_gpus(kernels):
    """The GPUs of this process, without those of others, that the kernels fit."""
    return [gpu for gpu in _gpus() if gpu.local_hardware_id is not None and not _why_unfit(kernels, gpu)]


def gpu():
    """The extension's description of the default device, or else of the first GPU here, that its kernels fit.

    Where there is none, it is of an H200.
    """
    kernels, why = _load()
    assert kernels is not None, why
    fit = _fit_gpus(kernels)
    if not fit:
        return tuning.default_gpu(kernels)
    _, default = default_devices()
    device = next((device for device in default if device in fit), fit[0])
    return kernels.Gpu.of_device(device.local_hardware_id)


def scaled_mm_workspace(devices, m, n, k, batch, a_dtype, out_dtype, fast_accum, full_epilogue) -> int:
    """Bytes that the kernels for this product need for partial sums, on the GPUs of this process among `devices`."""
    product = m, n, k, batch, str(a_dtype), str(out_dtype), fast_accum, full_epilogue
    return _workspace("ScaledMmProblem", devices, product)


def block_scaled_mm_workspace(devices, product) -> int:
    """Likewise for a `BlockScaledMmProblem`."""
    return _workspace("BlockScaledMmProblem", devices, product)


def expanded_mm_workspace(devices, product) -> int:
    """Likewise for an `ExpandedMmProblem`."""
    return _workspace("ExpandedMmProblem", devices, product)


def _workspace(problem, devices, product):
    kernels, _ = _load()
    return max((getattr(kernels, problem)(*product).workspace(gpu) for gpu in _gpus_among(devices)), default=0)


def _gpus_among(devices):
    """The extension's descriptions of those GPUs of this process among `devices` that its kernels fit."""
    kernels, _ = _load()
    if kernels is None:
        return []
    here = (gpu for gpu in _fit_gpus(kernels) if gpu in devices or platform() == "cpu")
    return [kernels.Gpu.of_device(gpu.local_hardware_id) for gpu in here]


def described_gpu() -> str:
    """That GPU in words, with the architecture whose code it runs; "" without the extension.

    PTX is what the driver compiles for GPUs that are newer than the build.
    """
    kernels, _ = _load()
    if kernels is None:
        return ""
    on = gpu()
    code = kernels.compiled_for(on.arch)
    kind = "code" if code // 10 == on.arch // 10 else "PTX"
    return f"{on.name} (compute capability {on.arch / 10}, {kind} for {code / 10})"


def as_compiled(kernels, words: str, on) -> str:
    """A kernel's words as people read them: with the architecture that its code was compiled for, for the GPU `on`.

    In tuning files it is the one that the kernel was written for, so that files outlive a build.
    """
    code = kernels.compiled_for(on.arch)
    return re.sub(r"^sm\d+ ", f"sm{code} ", words) if code else words


def describe_scaled_mm(m, n, k, batch, a_dtype, out_dtype, fast_accum, full_epilogue=False) -> str:
    """The kernel that the extension chooses for this product and why, in words; "" without the extension.

    The arguments are those of a `tuning.Product`.
    """
    kernels, _ = _load()
    if kernels is None:
        return ""
    _load_tuning()
    on = gpu()
    kind = batch, str(a_dtype), str(out_dtype), fast_accum, full_epilogue
    problem = kernels.ScaledMmProblem(m, n, k, *kind)
    if (measured := problem.tuned(on)) is not None:
        why = "tuned" if measured == m else f"tuned at M {measured}"
    elif len(problem.choices(on)) == 1:
        aligned = kernels.ScaledMmProblem(m, _multiple_of_16(n), _multiple_of_16(k), *kind)
        why = "the only one for this " + ("alignment" if len(aligned.choices(on)) > 1 else "product")
    elif (like := kernels.scaled_mm_costs_of(on)) == on.name:
        why = "by the cost model"
    elif like:
        why = f"by the cost model of {like}"
    else:
        why = "by the cost model, not measured on this GPU; run tune"
    return f"{as_compiled(kernels, kernels.describe_scaled_mm(problem.select(on)), on)} ({why})"


def dequantizes_once(devices, product) -> bool:
    """Whether XLA's product of dequantized weights is faster than kernels on this process' GPUs among `devices`."""
    kernels, _ = _load()
    gpus = _gpus_among(devices)
    return bool(gpus) and all(kernels.BlockScaledMmProblem(*product).dequantizes_once(gpu) for gpu in gpus)


def multiplies_float8(devices, product) -> bool:
    """Whether kernels are faster with x in float8 than in float16 on this process' GPUs among `devices`.

    Args:
      product: what a `BlockScaledMmProblem` of float8 x is made of.
    """
    kernels, _ = _load()
    gpus = _gpus_among(devices)
    if not gpus:
        return False
    in_float8 = kernels.BlockScaledMmProblem(*product)
    in_float16 = kernels.BlockScaledMmProblem(*product[:4], "float16", *product[5:])
    return all(in_float8.predict(gpu) < in_float16.predict(gpu) for gpu in gpus)


def describe_block_scaled_mm(product) -> str:
    """The kernel that the extension chooses for a `BlockScaledMmProblem`, in words; "" without the extension."""
    return _describe("BlockScaledMmProblem", product, "by the cost model, not measured")


def describe_block_quantized_mm(product) -> str:
    """Likewise for a `BlockQuantizedMmProblem`."""
    return _describe("BlockQuantizedMmProblem", product, "by a formula, not measured")


def describe_expanded_mm(product) -> str:
    """Likewise for an `ExpandedMmProblem`."""
    return _describe("ExpandedMmProblem", product, "by a formula, not measured")


def describe_conv(convolution) -> str:
    """Likewise for a `ConvProblem`."""
    return _describe("ConvProblem", convolution, "by a formula, not measured")


def _describe(problem, arguments, why):
    kernels, _ = _load()
    if kernels is None:
        return ""
    on = gpu()
    words = getattr(kernels, problem)(*arguments).select(on)
    return f"{as_compiled(kernels, words, on)} ({why})"


def _multiple_of_16(size):
    return -(-size // 16) * 16


_load()
