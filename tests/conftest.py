"""Eight CPU devices for the sharding tests, and no tuning file of the machine's.

Tests marked `gpu` need a GPU that the installed kernels fit.
"""

import os

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
