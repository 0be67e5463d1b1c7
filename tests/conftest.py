"""Eight CPU devices for the sharding tests, and no tuning file of the machine's.

Tests marked `gpu` need a GPU that the installed kernels fit.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_QMM_TUNING"] = "0"
os.environ["JAX_PLATFORM_NAME"] = "cpu"  # meshes are of the default platform's devices, also where there are GPUs

import hypothesis
import jax
import pytest

from jax_qmm import _ffi

hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("default")


def _no_gpu():
    """Why tests marked `gpu` can't run here, or None."""
    if not _ffi._gpus():
        return "no GPU"
    return _ffi.fallback_reason("cuda")


def pytest_collection_modifyitems(items):
    reason = _no_gpu()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def device(request):
    """Tests marked `gpu` run on the first GPU, all others on the CPU, wherever they are."""
    platform = "cuda" if request.node.get_closest_marker("gpu") else "cpu"
    with jax.default_device(jax.devices(platform)[0]):
        yield


@pytest.fixture
def extension():
    """The extension, whose host code runs without a GPU too, and whose choices a test may fix; skips where it is not built."""
    kernels, why = _ffi._load()
    if kernels is None:
        pytest.skip(why)
    kernels.clear_scaled_mm_tuning()
    yield kernels
    kernels.clear_scaled_mm_tuning()


@pytest.fixture(scope="session")
def load_script():
    """Imports a script that is no part of the package, by its path from the project's root."""

    def load(path):
        path = Path(__file__).parents[1] / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def run_for_h200():
    """Runs Python with these arguments, where it can compile for an H200 (`h200_topology`); gives what it prints."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the plugin jax-cuda13-plugin is not installed")

    def run(*arguments):
        own = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        path = os.pathsep.join([str(Path(__file__).parent / "ops"), *sys.path])
        own |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
