"""What the build backend asks for and builds, by JAX_QMM_CUDA_ARCHS; nothing is compiled."""

import os
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")

PROJECT = Path(__file__).parents[1]


@pytest.fixture
def backend(load_script, monkeypatch):
    monkeypatch.chdir(PROJECT)
    monkeypatch.delenv("JAX_QMM_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("CUDACXX", raising=False)
    return load_script("build_backend/jax_qmm_build.py")


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Makes nvidia-smi tell of GPUs with these compute capabilities; it fails without any, as with no driver."""

    def make(*capabilities):
        program = tmp_path / "nvidia-smi"
        lines = [f"echo {capability}" for capability in capabilities] or ["exit 9"]
        program.write_text("\n".join(["#!/bin/sh", *lines]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_without_kernels_nothing_is_fetched(backend, gpus, monkeypatch, kind):
    requires = getattr(backend, f"get_requires_for_build_{kind}")
    gpus()
    assert requires() == []
    gpus("6.1", "7.0", "[N/A]")
    assert requires() == []
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", "none")
    gpus("9.0")
    assert requires() == []


@pytest.mark.parametrize("archs", ["", "auto"])
def test_gpus_that_the_kernels_fit_have_them_built(backend, gpus, monkeypatch, archs):
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", archs)
    gpus("9.0", "7.0", "8.0", "9.0")
    assert backend.archs() == ["80", "90a"]
    gpus("8.6", "7.5")
    assert backend.archs() == ["75", "86"]
    gpus("12.1", "13.0")  # by the PTX of 12.0
    assert backend.archs() == ["120"]
    gpus("9.0")
    assert backend.archs() == ["90a"]
    names = {requirement.partition("=")[0].partition(">")[0] for requirement in backend.get_requires_for_build_wheel()}
    assert {"nanobind", "jaxlib", "nvidia-cutlass", "nvidia-cuda-nvcc"} <= names


def test_an_own_compiler_is_not_fetched(backend, monkeypatch):
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", "90a")
    monkeypatch.setenv("CUDACXX", "/usr/local/cuda/bin/nvcc")
    requires = " ".join(backend.get_requires_for_build_wheel())
    assert "nanobind" in requires and "nvcc" not in requires


def test_lists_and_all(backend, monkeypatch):
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", "89;80;89")
    assert backend.archs() == ["89", "80"]
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", "all")
    assert backend.archs() == list(backend.ARCHS)
    assert backend._settings(None)["cmake.define.JAX_QMM_CUDA_ARCHS"] == "75;80;86;87;89;90a;100;103;120"


@pytest.mark.parametrize("archs", ["banana", "90a;banana", "90", "70", "80;72", "80 89", "80;all"])
def test_an_architecture_without_kernels_is_refused_in_words(backend, monkeypatch, archs):
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", archs)
    with pytest.raises(
        SystemExit, match=f"no kernels for '{archs.split(';')[-1]}'.*auto, all, none, or a list of: 75, 80"
    ):
        backend.get_requires_for_build_wheel()


def test_the_wheel_without_kernels_is_pure(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_QMM_CUDA_ARCHS", "none")
    name = backend.build_wheel(str(tmp_path))
    assert name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(tmp_path / name) as wheel:
        files = wheel.namelist()
    assert {"jax_qmm/__init__.py", "jax_qmm/py.typed", "jax_qmm/tuned/nvidia-h200.json"} <= set(files)
    assert not [file for file in files if not file.startswith("jax_qmm") or file.endswith(".so")]


def test_the_sdist_has_the_sources_without_the_measurements(backend, tmp_path):
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        files = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"cuda/bindings.cc", "jax_qmm/tuned/nvidia-h200.json", "tests/conftest.py", "benchmarks/README.md"} <= files
    assert not [file for file in files if file.endswith((".csv", ".gz", ".png", ".so"))]


def test_headers_are_those_of_the_oldest_supported_jaxlib(backend):
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    (oldest,) = (re.fullmatch(r"jax>=([\d.]+)", requirement)[1] for requirement in project["dependencies"])
    (headers,) = (requirement[8:] for requirement in backend.REQUIRES if requirement.startswith("jaxlib=="))
    assert headers.split(".")[:2] == oldest.split(".")[:2]


def test_cmake_has_the_same_architectures(backend):
    (archs,) = re.findall(r"set\(EXISTING_ARCHS (.*)\)", (PROJECT / "CMakeLists.txt").read_text())
    assert tuple(archs.split()) == backend.ARCHS
