"""Loading the extension, its ABI, and what is said where it does not serve."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_qmm
from jax_qmm import _compat, _ffi

_PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


H200 = types.SimpleNamespace(compute_capability="9.0", device_kind="H200")
A100 = types.SimpleNamespace(compute_capability="8.0", device_kind="A100")


@pytest.fixture
def reload():
    """Lets a test load another extension, and the real one be loaded again after it."""
    _ffi._load.cache_clear()
    yield
    _ffi._load.cache_clear()


def test_in_a_checkout_the_installed_kernels_are_found(tmp_path):
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(
        Path(jax_qmm.__file__).parent, checkout / "jax_qmm", ignore=shutil.ignore_patterns("_kernels*", "__pycache__")
    )
    (site / "jax_qmm").mkdir(parents=True)
    (site / "jax_qmm" / "__init__.py").touch()
    (site / "jax_qmm" / "_kernels.py").write_text("registrations = lambda record: {}")
    command = [sys.executable, "-c", "import jax_qmm, sys; print(sys.modules['jax_qmm._kernels'].__file__)"]
    run = subprocess.run(
        command, cwd=checkout, env=os.environ | {"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == str(site / "jax_qmm" / "_kernels.py")


def test_headers_are_those_of_the_oldest_supported_jaxlib():
    (oldest,) = (re.fullmatch(r"jax>=([\d.]+)", x).group(1) for x in _PYPROJECT["project"]["dependencies"])
    requires = _PYPROJECT["build-system"]["requires"]
    (headers,) = (x.removeprefix("jaxlib==") for x in requires if x.startswith("jaxlib"))
    assert headers.split(".")[:2] == oldest.split(".")[:2]


def test_extension_has_the_oldest_runtimes_ffi_version():
    kernels, why = _ffi._load()
    if kernels is None:
        pytest.skip(why)
    assert kernels.ffi_api_version() == (0, 3)  # jaxlib 0.10.0's


def test_targets_are_those_registered():
    kernels, why = _ffi._load()
    if kernels is None:
        pytest.skip(why)
    assert set(kernels.registrations(False)) == set(_ffi.TARGETS)


def record_header(folder, major, minor):
    """An include directory of a jaxlib with this version of the stage "record"."""
    header = folder / "xla" / "ffi" / "api" / "record_c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        f"#define XLA_FFI_Extension_Record_MajorVersion {major}\n"
        f"#define XLA_FFI_Extension_Record_MinorVersion {minor}\n"
    )
    return str(folder)


def test_kernels_are_recorded_in_the_known_versions_alone(monkeypatch, tmp_path):
    def records(folder):
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: folder)
        return _compat.records_kernels()

    assert not records(str(tmp_path))
    assert records(record_header(tmp_path / "0.1", 0, 1))
    assert records(record_header(tmp_path / "0.2", 0, 2))
    assert not records(record_header(tmp_path / "0.3", 0, 3))
    assert not records(record_header(tmp_path / "1.1", 1, 1))


REGISTER_ALL = """
import sys
import jax
jax.ffi.include_dir = lambda: sys.argv[1]
from jax.experimental.topologies import make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from conftest import h200_topology
import jax_qmm
mesh = make_mesh(h200_topology(1), (1,), ("d",))
x = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))
def f(x):
    a, b = jax_qmm.quantize(x), jax_qmm.quantize(x, scale=0.1)
    return jax_qmm.scaled_mm(a.qvalue, b.qvalue, a.scale, 0.1)
print(jax.jit(f).lower(x).compile().as_text())
"""


def test_the_handler_that_registers_all_targets_does(run_for_h200, tmp_path):
    kernels, why = _ffi._load()
    if kernels is None or jax.__version_info__ < (0, 11, 2):
        pytest.skip(why or "XLA has no stage record")
    text = run_for_h200("-c", REGISTER_ALL, record_header(tmp_path, 0, 1))
    assert set(re.findall(r'custom_call_target="(jax_qmm_\w+)"', text)) == set(_ffi.TARGETS)


def test_build_without_kernels_is_named(reload, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_qmm._kernels", None)
    assert _ffi._load()[0] is None
    monkeypatch.setattr(_ffi, "_gpus", lambda: [H200])
    assert "without kernels" in _ffi.fallback_reason("cuda")


def test_extension_that_fails_to_load_is_named(reload, monkeypatch):
    def fail(name):
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(_ffi.importlib, "import_module", fail)
    monkeypatch.setattr(_ffi, "_gpus", lambda: [H200])
    assert "libfoo.so" in _ffi.fallback_reason("cuda")


def test_gpu_without_kernels_is_named(monkeypatch):
    kernels = types.SimpleNamespace(architectures=lambda: ["90a"])
    monkeypatch.setattr(_ffi, "_load", lambda: (kernels, None))
    monkeypatch.setattr(_ffi, "_gpus", lambda: [A100])
    reason = _ffi.fallback_reason("cuda")
    assert "A100" in reason and "8.0" in reason and "90a" in reason
    monkeypatch.setattr(_ffi, "_gpus", lambda: [H200])
    assert _ffi.fallback_reason("cuda") is None


def test_fallback_is_said_once():
    _ffi._warn.cache_clear()
    a = jnp.ones((2, 4), jnp.int8)
    with pytest.warns(UserWarning, match="scaled_mm runs on the pure-JAX reference.*platform cpu"):
        jax.jit(lambda a: jax_qmm.scaled_mm(a, a, 1.0, 1.0))(a)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda a: jax_qmm.scaled_mm(a, a, 2.0, 1.0))(a)


def test_strict_makes_a_fallback_an_error(monkeypatch):
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    a = jnp.ones((2, 4), jnp.int8)
    with pytest.raises(RuntimeError, match="JAX_QMM_STRICT"):
        jax.jit(lambda a: jax_qmm.scaled_mm(a, a, 3.0, 1.0))(a)


def test_a_missing_flax_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax_qmm.nnx", raising=False)
    monkeypatch.delitem(vars(jax_qmm), "nnx", raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r"jax_qmm\[flax\]"):
        jax_qmm.nnx
