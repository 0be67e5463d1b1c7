"""The build backend: scikit-build-core, which runs CMake and fetches its requirements only where kernels are built.

The environment variable JAX_QMM_CUDA_ARCHS names the GPU architectures: "auto" (those of this machine's GPUs, the
default), a list such as "80;90a" (several are separated by semicolons), "all", or "none". Without kernels the wheel is
pure Python, `py3-none-any`.
"""

import os
import subprocess

from scikit_build_core import build as scikit_build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ARCHS = ("75", "80", "86", "87", "89", "90a", "100", "103", "120")  # for which there are kernels

REQUIRES = [
    "nanobind>=3.0",
    "nvidia-cutlass==4.2.0.0",
    # The FFI headers are those of the oldest jaxlib that we support: older runtimes refuse a newer one's handlers.
    "jaxlib==0.10.0",
]
COMPILER = [  # unless CUDACXX names another
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
]


def archs() -> list[str]:
    """The architectures to build kernels for.

    Raises:
      SystemExit: if JAX_QMM_CUDA_ARCHS names one for which there are no kernels.
    """
    wanted = os.environ.get("JAX_QMM_CUDA_ARCHS") or "auto"
    if wanted == "none":
        return []
    if wanted == "all":
        return list(ARCHS)
    if wanted == "auto":
        return [arch for arch in ARCHS if arch in {_arch_for(capability) for capability in _capabilities()}]
    named = wanted.split(";")
    if unknown := [arch for arch in named if arch not in ARCHS]:
        raise SystemExit(
            f"JAX_QMM_CUDA_ARCHS is {wanted!r}; jax_qmm has no kernels for {', '.join(map(repr, unknown))}. "
            f"It takes auto, all, none, or a list of: {', '.join(ARCHS)}"
        )
    return list(dict.fromkeys(named))


def _arch_for(capability: int) -> str | None:
    """The architecture to build for GPUs of a compute capability; None where they have no kernels.

    For a GPU that is newer than all of them it is the latest, whose PTX the GPU compiles for itself.
    """
    capabilities = {int(arch.rstrip("a")): arch for arch in ARCHS}
    if capability in capabilities:
        return capabilities[capability]
    earlier = [known for known in capabilities if known < capability and not capabilities[known].endswith("a")]
    return capabilities[max(earlier)] if earlier else None


def _capabilities():
    """The compute capabilities of this machine's GPUs, such as {90} for 9.0."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no driver
        return set()
    names = (line.strip().replace(".", "") for line in listed.splitlines())
    return {int(name) for name in names if name.isdigit()}  # of a GPU that the driver can't ask it says "[N/A]"


def _settings(given):
    """The settings of scikit-build-core: those of pyproject.toml are of a pure wheel."""
    named = archs()
    if not named:
        return given
    kernels = {"wheel.cmake": "true", "wheel.py-api": "cp312", "cmake.define.JAX_QMM_CUDA_ARCHS": ";".join(named)}
    return kernels | (given or {})


def _requires(hook, given):
    requires = hook(_settings(given))
    if archs():
        requires += REQUIRES
        if "CUDACXX" not in os.environ:
            requires += COMPILER
    return requires


def get_requires_for_build_wheel(config_settings=None):
    return _requires(scikit_build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _requires(scikit_build.get_requires_for_build_editable, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return scikit_build.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return scikit_build.prepare_metadata_for_build_editable(metadata_directory, _settings(config_settings))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return scikit_build.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return scikit_build.build_editable(wheel_directory, _settings(config_settings), metadata_directory)
