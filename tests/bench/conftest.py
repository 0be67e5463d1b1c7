"""A stand-in for the extension and its GPU, whose kernels take the times that a test gives them."""

import types
from typing import NamedTuple

import pytest

from jax_qmm import _extension
from jax_qmm.tuning import Product

KERNELS = ["generic", "sm90 narrow swizzle 1", "sm90 narrow swizzle 8", "sm90 wide"]
DEVICE = types.SimpleNamespace(device_kind="NVIDIA H200", core_count=132, compute_capability="9.0", local_hardware_id=0)
GPU = types.SimpleNamespace(name="NVIDIA H200", sm_count=132, arch=90, peak=1979e12, prepare=lambda: None)


class Extension:
    """Chooses the last kernel where no other is fixed; only the generic one serves an odd K."""

    Gpu = types.SimpleNamespace(of_device=lambda device: GPU)

    def __init__(self):
        self.us = {words: 10.0 + i for i, words in enumerate(KERNELS)}
        self.tuned = {}
        self.measured = []  # (product without the batch, choices, rounds)
        self.interrupt_after = None  # calls of measure_scaled_mm
        self.code = 90

    def driver_version(self):
        return 13000

    def why_unfit(self, name, capability, driver):
        return "" if capability == 90 else f"{name} is unfit"

    def compiled_for(self, capability):
        return self.code

    def scaled_mm_choices(self, m, n, k, *_):
        return [(i - 1, 1) for i in range(len(KERNELS) if k % 16 == 0 else 1)]

    def describe_scaled_mm(self, choice):
        return KERNELS[choice[0] + 1]

    def scaled_mm_costs_of(self, gpu):
        return gpu.name

    def ScaledMmProblem(self, *product):  # noqa: N802, a class of the extension
        return Problem(self, Product(*product))

    def clear_scaled_mm_tuning(self):
        self.tuned.clear()

    def measure_scaled_mm(self, m, n, k, dtype, out_dtype, fast_accum, full_epilogue, choices, pattern, rounds):
        if len(self.measured) == self.interrupt_after:
            raise KeyboardInterrupt
        assert isinstance(pattern, bytes) and len(set(pattern[:4096])) > 100  # random ones
        self.measured.append(((m, n, k, dtype, out_dtype, fast_accum, full_epilogue), choices, rounds))
        return [self.us[self.describe_scaled_mm(choice)] for choice in choices]


class Problem(NamedTuple):
    kernels: Extension
    product: Product

    def choices(self, gpu):
        assert gpu is GPU
        return self.kernels.scaled_mm_choices(*self.product)

    def select(self, gpu):
        return self.kernels.tuned.get(self.product, self.choices(gpu)[-1])

    def tune(self, choice, gpu):
        assert gpu is GPU
        self.kernels.tuned[self.product] = choice

    def tuned(self, gpu):
        return self.product.m if self.product in self.kernels.tuned else None

    def measure(self, choices, gpu, pattern, rounds):
        m, n, k, batch, *kind = self.product
        assert gpu is GPU and batch == 1
        return self.kernels.measure_scaled_mm(m, n, k, *kind, choices, pattern, rounds)


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """The extension of a process on a GPU, with a cache directory of its own."""
    extension = Extension()
    monkeypatch.setattr(_extension, "_load", lambda: (extension, None))
    monkeypatch.setattr(_extension, "_gpus", lambda: [DEVICE])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_QMM_TUNING", raising=False)
    _extension._load_tuning.cache_clear()
    yield extension
    _extension._load_tuning.cache_clear()
