"""Loading the extension, its ABI, and what is said where it does not serve."""

import os
import re
import shutil
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_qmm
from jax_qmm import _compat, _extension
from jax_qmm.ops import dispatch

H200 = types.SimpleNamespace(compute_capability="9.0", device_kind="H200")
A100 = types.SimpleNamespace(compute_capability="8.0", device_kind="A100")


@pytest.fixture
def reload():
    """Lets a test load another extension, and the real one be loaded again after it."""
    clear = lambda: [cached.cache_clear() for cached in (_extension._load, _extension._why_not_recorded)]
    clear()
    yield
    clear()


def test_in_a_checkout_the_installed_kernels_are_found(tmp_path):
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(
        Path(jax_qmm.__file__).parent, checkout / "jax_qmm", ignore=shutil.ignore_patterns("_kernels*", "__pycache__")
    )
    (site / "jax_qmm").mkdir(parents=True)
    (site / "jax_qmm" / "__init__.py").touch()
    # A stand-in that does nothing, whatever it is called.
    (site / "jax_qmm" / "_kernels.py").write_text("__getattr__ = lambda name: lambda *_, **__: {}")
    command = [sys.executable, "-c", "import jax_qmm, sys; print(sys.modules['jax_qmm._kernels'].__file__)"]
    run = subprocess.run(
        command, cwd=checkout, env=os.environ | {"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == str(site / "jax_qmm" / "_kernels.py")


def test_extension_has_the_oldest_runtimes_ffi_version():
    kernels, why = _extension._load()
    if kernels is None:
        pytest.skip(why)
    assert kernels.ffi_api_version() == (0, 3)  # jaxlib 0.10.0's


def test_targets_are_those_registered():
    kernels, why = _extension._load()
    if kernels is None:
        pytest.skip(why)
    assert set(kernels.registrations()) == set(dispatch.targets())


@pytest.fixture
def registered(reload, monkeypatch):
    """Loads a stand-in for the extension: what it registers by name, and what follows once JAX has its plugins."""
    state = types.SimpleNamespace(targets={}, plugins=[], why="")
    kernels = types.SimpleNamespace(
        registrations=lambda: {target: "launched" for target in dispatch.targets()},
        register_recording=lambda: "recorded",
        call_before_first_kernel=lambda function: None,
        why_not_recorded=lambda: state.why,
        launches_overlap=lambda: True,
        describe_gpu=lambda *_, **__: None,
        Gpu=lambda *_: None,
        set_scaled_mm_cost=lambda *_: None,
    )
    monkeypatch.setitem(sys.modules, "jax_qmm._kernels", kernels)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, fn, platform: state.targets.update({name: fn}))
    monkeypatch.setattr(_compat, "after_plugins", state.plugins.append)
    monkeypatch.setattr(_compat, "why_not_recorded", lambda: None)
    return state


def test_recording_registers_one_handler_that_registers_all(registered):
    assert _extension.launches() == "recorded"
    (after_plugins,) = registered.plugins
    after_plugins()
    assert registered.targets == {"jax_qmm_recording": "recorded"}


def test_calls_are_launched_where_the_runtime_is_unknown(registered):
    _extension._load()
    registered.why = "another runtime"
    (after_plugins,) = registered.plugins
    after_plugins()
    assert set(registered.targets) == {"jax_qmm_recording", *dispatch.targets()}
    assert _extension.launches() == "outside of CUDA graphs: another runtime"


def test_calls_are_launched_with_untested_releases(registered, monkeypatch):
    monkeypatch.setattr(_compat, "why_not_recorded", lambda: "another release")
    assert _extension.launches() == "outside of CUDA graphs: another release"
    assert set(registered.targets) == set(dispatch.targets()) and not registered.plugins


def test_recording_can_be_switched_off(registered, monkeypatch):
    monkeypatch.setenv("JAX_QMM_RECORD", "0")
    assert _extension.launches() == "outside of CUDA graphs: JAX_QMM_RECORD=0"
    assert set(registered.targets) == set(dispatch.targets()) and not registered.plugins


def test_launches_say_that_none_overlaps(registered):
    _extension._load()[0].launches_overlap = lambda: False
    assert _extension.launches() == "recorded; no launch overlaps another (JAX_QMM_PDL=0)"


@pytest.mark.parametrize("package", ["jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"])
def test_recording_needs_tested_releases_of_all_packages(monkeypatch, package):
    versions = {name: "0.12.0" for name in ("jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")}

    def version(name):
        if versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert _compat.why_not_recorded() is None
    versions[package] = "0.12.1"
    assert f"of {package}, not with 0.12.1" in _compat.why_not_recorded()
    versions[package] = None
    assert f"{package}, which is not installed" in _compat.why_not_recorded()


REGISTER_ALL = """
import jax
from jax.experimental.topologies import make_mesh
from jax.sharding import NamedSharding, PartitionSpec
from conftest import h200_topology
import jax_qmm
mesh = make_mesh(h200_topology(1), (1,), ("d",))
x = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))
def f(x):
    a, b = jax_qmm.quantize(x), jax_qmm.quantize(x, scale=0.1)
    w = jax_qmm.QArray(b.qvalue, a.scale)
    image = jax_qmm.QArray(a.qvalue.reshape(1, 8, 8, 64), jax.numpy.ones((1, 1, 1, 1)))
    kernel = jax_qmm.QArray(b.qvalue.reshape(16, 2, 2, 64), jax.numpy.ones((1, 1, 1, 1)))
    window = (1, 1), "SAME", None, None, ("NHWC", "OHWI", "NHWC")
    blocks = jax_qmm.W8A16(64).quantize_weight(x.reshape(16, 2, 2, 64), (1, 2, 3))
    return [
        jax_qmm.scaled_mm(a.qvalue, b.qvalue, a.scale, 0.1),
        jax_qmm.block_scaled_mm(x, w),
        jax_qmm.block_scaled_mm(x.astype("float32"), w.pack()),
        jax_qmm.block_scaled_mm(a, w),
        jax_qmm.matmul(x[:8], jax_qmm.W4A8(32).quantize_weight(x, (0,)), scheme=jax_qmm.W4A8(32)),
        jax_qmm.conv_general_dilated(image, kernel, *window),
        jax_qmm.conv_general_dilated(x.reshape(1, 8, 8, 64), blocks, *window),
    ]
print(jax.jit(f).lower(x).compile().as_text(), jax_qmm._extension.launches())
"""


def test_the_handler_that_registers_all_targets_does(run_for_h200):
    kernels, why = _extension._load()
    if kernels is None or (why := _compat.why_not_recorded()):
        pytest.skip(why)
    text = run_for_h200("-c", REGISTER_ALL)
    assert set(re.findall(r'custom_call_target="(jax_qmm_\w+)"', text)) == set(dispatch.targets())
    assert text.split()[-1] == "recorded"


def test_build_without_kernels_is_named(reload, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_qmm._kernels", None)
    assert _extension._load()[0] is None
    monkeypatch.setattr(_extension, "_gpus", lambda: [H200])
    assert "without kernels" in _extension.fallback_reason("cuda")


def test_extension_that_fails_to_load_is_named(reload, monkeypatch):
    def fail(name):
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(_extension.importlib, "import_module", fail)
    monkeypatch.setattr(_extension, "_gpus", lambda: [H200])
    assert "libfoo.so" in _extension.fallback_reason("cuda")


@pytest.fixture
def gpus(monkeypatch):
    """GPUs of this process, of which those of compute capability 9.0 are fit under a driver of CUDA 13."""
    kernels = types.SimpleNamespace(
        driver_version=lambda: 13000,
        why_unfit=lambda name, capability, driver: "" if (capability, driver) == (90, 13000) else f"{name} is unfit",
        compiled_for=lambda capability: 75,
    )
    gpus = []
    monkeypatch.setattr(_extension, "_load", lambda: (kernels, None))
    monkeypatch.setattr(_extension, "_load_tuning", lambda: None)
    monkeypatch.setattr(_extension, "_gpus", lambda: gpus)
    return gpus


def test_every_device_is_judged_by_itself(gpus):
    gpus += [A100, H200]
    assert _extension.fallback_reason("cuda", [H200]) is None
    assert _extension.fallback_reason("cuda", [A100]) == "A100 is unfit"
    assert _extension.fallback_reason("cuda", [H200, A100]) == "A100 is unfit"


def test_an_op_can_need_code_for_later_gpus(gpus):
    gpus.append(H200)
    assert _extension.fallback_reason("cuda", [H200], 75) is None
    assert "H200 runs code for 7.5" in _extension.fallback_reason("cuda", [H200], 80)


def test_one_fit_gpu_suffices_for_devices_that_are_not_known(gpus):
    assert _extension.fallback_reason("cuda") is None  # for another machine
    gpus.append(A100)
    assert _extension.fallback_reason("cuda") == "A100 is unfit"
    gpus.append(H200)
    assert _extension.fallback_reason("cuda") is None
    assert _extension.fallback_reason("cuda", jax.devices("cpu")) is None


def test_the_default_devices_are_found_also_while_tracing():
    cpus = jax.devices("cpu")
    assert _extension.default_devices() == ("cpu", {cpus[0]})
    with jax.default_device(cpus[3]):
        jax.eval_shape(lambda x: [_extension.default_devices(), x][1], jnp.ones(3))
        assert _extension.default_devices() == ("cpu", {cpus[3]})
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        assert _extension.default_devices() == ("cpu", set(cpus[:4]))


def test_an_unfit_gpu_is_named_with_what_it_lacks(extension):
    assert extension.why_unfit("NVIDIA H200", 90, 13000) == extension.why_unfit("NVIDIA H200", 90, 0) == ""
    why = extension.why_unfit("Tesla V100-SXM2-16GB", 70, 13000)
    archs = ", ".join(extension.architectures())
    assert why.startswith(f"Tesla V100-SXM2-16GB has compute capability 7.0; this build has kernels for {archs}")


def test_an_old_driver_is_named_with_what_helps(extension):
    why = extension.why_unfit("NVIDIA H200", 90, 12080)
    assert why.startswith("the NVIDIA driver is for CUDA 12.8 and this build of jax_qmm for CUDA 13.")
    assert "install a driver for CUDA 13" in why and "CUDACXX" in why


def test_a_missing_flax_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax_qmm.nnx", raising=False)
    monkeypatch.delitem(vars(jax_qmm), "nnx", raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r"jax_qmm\[flax\]"):
        _ = jax_qmm.nnx
