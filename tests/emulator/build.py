"""Builds the extension with the emulator in place of a GPU, where `pytest --emulator` finds it: build/emulator.

    python tests/emulator/build.py

Needs a C++ compiler and no GPU. CUDA's compiler and all else come from the package registry, into a virtual environment
beside the build. Later calls build only what has changed.

With JAX_QMM_CUDA_ARCHS in the first call it compiles all of the package's kernels, and for these architectures as well,
so that pip makes a wheel without compiling them again, as `.ci/run` does.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emulator"
REQUIRES = "import jax_qmm_build; print(*jax_qmm_build.get_requires_for_build_wheel())"


def run(*command, **kwargs):
    # Whatever the architectures, REQUIRES are the same.
    own = {"JAX_QMM_CUDA_ARCHS": "90a", "PYTHONPATH": str(ROOT / "build_backend")}
    return subprocess.run(command, check=True, cwd=ROOT, env=os.environ | own, **kwargs)


def make_environment(folder: Path) -> None:
    """Makes a virtual environment of this Python that has what a build with kernels needs."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "scikit-build-core>=1.0")
    requires = run(python, "-c", REQUIRES, stdout=subprocess.PIPE, text=True).stdout.split()
    run(python, "-m", "pip", "install", "--quiet", "cmake", "ninja", *requires)


def build(source: Path = ROOT, folder: Path = BUILD) -> None:
    """Builds the sources in `source`, with the environment in `BUILD`, into `folder`."""
    tools, backend = BUILD / "venv" / "bin", ROOT / "build_backend" / "jax_qmm_build.py"
    made_for = BUILD / "venv" / backend.name  # which names the requirements
    if not made_for.exists() or made_for.read_bytes() != backend.read_bytes():
        make_environment(BUILD / "venv")
        made_for.write_bytes(backend.read_bytes())
    if not (folder / "build.ninja").exists():
        definitions = {
            "CMAKE_MAKE_PROGRAM": tools / "ninja",
            "JAX_QMM_CUDA_ARCHS": os.environ.get("JAX_QMM_CUDA_ARCHS", ""),
            "JAX_QMM_EMULATOR": "ON",
            "Python_EXECUTABLE": tools / "python",
            "SKBUILD_SABI_VERSION": "3.12" if sys.version_info >= (3, 12) else "",
        }
        defined = [f"-D{name}={value}" for name, value in definitions.items()]
        run(tools / "cmake", "-S", source, "-B", folder, "-G", "Ninja", *defined)
    run(tools / "cmake", "--build", folder, "--target", "emulated_kernels", "tests/emulator/all")
    for built in folder.glob("_kernels*.so"):
        built.touch()  # newer than all sources: tests/conftest.py refuses an older one


if __name__ == "__main__":
    build()
