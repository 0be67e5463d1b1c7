"""Compiling the C++ of cuda/ffi with stand-ins for XLA and for the CUDA runtime: needs no GPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "cuda"


@pytest.fixture(scope="session")
def compile_cc():
    """Calls the C++ compiler."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler {compiler}")

    def compile_cc(*arguments):
        command = [compiler, "-std=c++17", "-Wall", "-Wno-invalid-offsetof", f"-I{CUDA}", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return compile_cc


@pytest.fixture(scope="session")
def build_cases(compile_cc, tmp_path_factory):
    """Builds a program of cases; gives a function that runs one, with variables in its environment."""
    packages = (Path(folder, "nvidia", "cu13") for folder in sys.path)
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *packages]
    headers = next((root / "include" for root in roots if (root / "include" / "cuda_runtime_api.h").exists()), None)
    if headers is None:
        pytest.skip("no CUDA headers: install nvidia-cuda-runtime and nvidia-cuda-crt, or set CUDA_HOME")

    def build(name, *sources, archs='"90a"', ptx=0):
        program = tmp_path_factory.mktemp(name) / name
        files = [HERE / f"{name}.cc", *(CUDA / source for source in sources)]
        include = ("-isystem", jax.ffi.include_dir(), "-isystem", headers)
        compile_cc(*include, f"-DJAX_QMM_ARCHS={archs}", f"-DJAX_QMM_PTX={ptx}", *files, "-o", program)

        def run(case, **environment):
            done = subprocess.run([program, case], env=os.environ | environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

        return run

    return build


def pytest_generate_tests(metafunc):
    """test_x in test_x.py runs for each case of x.cc."""
    if metafunc.function.__name__ == metafunc.module.__name__.rpartition(".")[2]:
        source = HERE / metafunc.function.__name__.replace("test_", "", 1)
        metafunc.parametrize("case", re.findall(r"CASE\((\w+)\)", source.with_suffix(".cc").read_text()))
