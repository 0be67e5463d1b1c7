"""A stand-in for the extension and its GPU, whose kernels take the times that a test gives them."""

import types

import pytest

from jax_qmm import _ffi

KERNELS = ["generic", "sm90 narrow swizzle 1", "sm90 narrow swizzle 8", "sm90 wide"]
GPU = types.SimpleNamespace(device_kind="NVIDIA H200", core_count=132, compute_capability="9.0")


class Extension:
    """Chooses the last kernel where no other is fixed; only the generic one serves an odd K."""

    def __init__(self):
        self.us = {words: 10.0 + i for i, words in enumerate(KERNELS)}
        self.tuned = {}
        self.measured = []  # (product without the batch, choices, rounds)
        self.interrupt_after = None  # calls of measure_scaled_mm

    def architectures(self):
        return ["90a"]

    def scaled_mm_choices(self, m, n, k, batch, dtype, out_dtype, fast_accum):
        return [(i - 1, 1) for i in range(len(KERNELS) if k % 16 == 0 else 1)]

    def describe_scaled_mm(self, choice):
        return KERNELS[choice[0] + 1]

    def select_scaled_mm(self, *arguments):
        *product, sm_count = arguments
        assert sm_count == GPU.core_count
        return self.tuned.get(tuple(product), self.scaled_mm_choices(*product)[-1])

    def tune_scaled_mm(self, *arguments):
        *product, choice = arguments
        self.tuned[tuple(product)] = choice

    def tuned_scaled_mm(self, *product):
        return product[0] if product in self.tuned else None

    def clear_scaled_mm_tuning(self):
        self.tuned.clear()

    def measure_scaled_mm(self, m, n, k, dtype, out_dtype, fast_accum, choices, pattern, rounds):
        if len(self.measured) == self.interrupt_after:
            raise KeyboardInterrupt
        assert isinstance(pattern, bytes) and len(set(pattern[:4096])) > 100  # random ones
        self.measured.append(((m, n, k, dtype, out_dtype, fast_accum), choices, rounds))
        return [self.us[self.describe_scaled_mm(choice)] for choice in choices]


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """The extension of a process on a GPU, with a cache directory of its own."""
    extension = Extension()
    monkeypatch.setattr(_ffi, "_load", lambda: (extension, None))
    monkeypatch.setattr(_ffi, "_gpus", lambda: [GPU])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_QMM_TUNING", raising=False)
    _ffi._load_tuning.cache_clear()
    yield extension
    _ffi._load_tuning.cache_clear()
