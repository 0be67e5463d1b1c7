"""cuBLASLt by PyTorch: which of it is measured, and how, on a stand-in for PyTorch."""

import contextlib
import sys
import types

import pytest

from jax_qmm.bench import cublaslt
from jax_qmm.tuning import Product


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 1.0  # millisecond


@pytest.fixture
def log(monkeypatch):
    """The events of a stand-in for torch, whose runs and replays all take a millisecond."""
    log = []
    graph = types.SimpleNamespace(replay=lambda: log.append("replay"), reset=lambda: log.append("reset"))

    @contextlib.contextmanager
    def capture(captured, capture_error_mode):
        assert captured is graph and capture_error_mode == "thread_local"  # XLA has threads of its own
        log.append("capture")
        yield
        log.append("captured")

    cuda = types.SimpleNamespace(
        Event=Event,
        CUDAGraph=lambda: graph,
        graph=capture,
        synchronize=lambda: None,
        empty_cache=lambda: log.append("empty"),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return log


@pytest.mark.parametrize(
    ("dtype", "m", "names"),
    [
        ("int8", 16, ["cublas_bf16"]),  # PyTorch refuses so few rows
        ("int8", 17, ["cublas_bf16", "cublaslt"]),
        ("float8_e4m3fn", 1, ["cublas_bf16", "cublaslt", "cublaslt_tensorwise"]),
    ],
)
def test_what_is_measured(log, dtype, m, names):
    assert list(cublaslt.calls(Product(m, 64, 32, 1, dtype, "bfloat16", False))) == names


def test_a_replayed_graph_is_timed_by_call(log):
    sets = iter(range(100))
    us = cublaslt._graph_us(lambda: lambda number=next(sets): log.append(number), 200_000_000, rounds=2)
    assert us == pytest.approx(1e3 / 6)  # a millisecond for three runs over two sets
    assert log == [0, 1, 0, 1, "capture", 0, 1, 0, 1, 0, 1, "captured", "replay", "replay", "replay", "reset", "empty"]


def test_torch_may_be_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cublaslt.missing().startswith("PyTorch does not load here")
