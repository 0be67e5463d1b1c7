"""What CMake refuses before it looks for a compiler."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def cmake_version():
    if shutil.which("cmake") is None:
        return (0, 0)
    said = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"(\d+)\.(\d+)", said).groups()))


pytestmark = pytest.mark.skipif(cmake_version() < (3, 26), reason="cmake 3.26 is absent; the extra dev has it")


def configure(folder, *options):
    source = Path(__file__).parents[1]
    command = ["cmake", "-S", source, "-B", folder, "-DCMAKE_CXX_COMPILER=/no/compiler", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_an_architecture_without_kernels_is_refused_before_a_compiler_is_looked_for(tmp_path):
    code, said = configure(tmp_path, "-DJAX_QMM_CUDA_ARCHS=90a;70")
    assert code != 0 and "JAX_QMM_CUDA_ARCHS has 70, for which there are no kernels; there are for: 75" in said
    assert "/no/compiler" not in said


def test_an_architecture_must_be_named(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_QMM_CUDA_ARCHS", raising=False)
    code, said = configure(tmp_path)
    assert code != 0 and "JAX_QMM_CUDA_ARCHS is not set; there are kernels for: 75" in said


@pytest.mark.parametrize(
    ("archs", "code"),
    [
        ("90a", "90a"),
        ("75", "75 and PTX of 75"),
        ("80;90a", "80 90a and PTX of 80"),
        ("86;80;87", "80 and PTX of 80"),  # which have the same code
        ("all", "75 80 89 90a 100 120 and PTX of 120"),
        ("89;103", "89 100 and PTX of 100"),
    ],
)
def test_architectures_with_kernels_get_as_far_as_the_compiler(tmp_path, archs, code):
    done, said = configure(tmp_path, f"-DJAX_QMM_CUDA_ARCHS={archs}")
    assert done != 0 and "/no/compiler" in said
    assert f"building kernels for {code}." in said
