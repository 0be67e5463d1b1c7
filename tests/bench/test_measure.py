"""What is measured. Times are checked for how they are computed, never for what they are."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench import measure
from jax_qmm.tuning import Product

INT8 = Product(4, 16, 32, 1, "int8", "bfloat16", False)
FP8 = Product(4, 16, 32, 1, "float8_e4m3fn", "bfloat16", True)


@pytest.mark.parametrize("product", [INT8, FP8], ids=["int8", "fp8"])
def test_xla_computes_the_same(product):
    sets = measure.operands(product, product.dtype)
    assert len(sets) == 12
    for a, b, *_ in sets:
        assert a.shape == (4, 32) and b.shape == (16, 32) and a.dtype == b.dtype == product.dtype
    ours, theirs = (np.asarray(f(*sets[0]), np.float32) for f in (jax_qmm.scaled_mm, measure.xla_scaled_mm))
    # Each rounds once to bfloat16, and the float32 before may differ in its last bits.
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-7)
    assert np.abs(ours).max() > 0


def test_xla_chooses_for_all_in_one_program():
    seen = []

    def first(a, b, *scales):
        seen.append((a, b))
        return a

    measure.autotune_xla([(first, measure.specs(product, product.dtype)) for product in (INT8, FP8)])
    assert [(a.shape, b.shape, a.dtype, b.dtype) for a, b in seen] == [
        ((4, 32), (16, 32), dtype, dtype) for dtype in ("int8", "float8_e4m3fn")
    ]
    shapes = lambda arrays: [(each.shape, each.dtype) for each in arrays]
    assert shapes(measure.specs(INT8, "bfloat16")) == shapes(measure.operands(INT8, "bfloat16")[0])


def test_bf16_has_as_many_operands_of_its_own():
    (a, b, *_), *_ = sets = measure.operands(INT8, "bfloat16")
    assert a.dtype == b.dtype == jnp.bfloat16
    a, b, got = (np.asarray(x, np.float32) for x in (a, b, measure.xla_bf16(*sets[0])))
    np.testing.assert_allclose(got, a @ b.T, rtol=2.0**-7, atol=2.0**-18 * (abs(a) @ abs(b.T)).max())


def test_no_two_sets_are_alike():
    matrices = [np.asarray(x) for a, b, *_ in measure.operands(INT8._replace(m=16), "int8") for x in (a, b)]
    assert len({matrix.tobytes() for matrix in matrices}) == len(matrices)


def test_sets_exceed_the_cache_without_filling_the_memory():
    assert measure.count_sets(1, 24) == 24
    assert measure.count_sets(25_000_000, 24) == 16
    assert measure.count_sets(10**9, 24) == 2


class Trace:
    """A profile of 7 runs of two kernels, 10 us and 4 us long, of which the second starts `gap` us later."""

    def __init__(self, gap, kernels=14):
        events = []
        for run in range(7):
            start = 1e6 * run
            events += [(start, 10e3), (start + 10e3 + gap * 1e3, 4e3)]
        events = [types.SimpleNamespace(start_ns=start, duration_ns=ns) for start, ns in events[:kernels]]
        line = types.SimpleNamespace(name="Stream #1(Kernel)", events=events[::-1])
        other = types.SimpleNamespace(name="XLA Ops", events=events[:3])
        self.planes = [
            types.SimpleNamespace(name="/device:GPU:0", lines=[line, other]),
            types.SimpleNamespace(name="/host:CPU", lines=[line]),
        ]


@pytest.mark.parametrize("gap, span", [(2, 16), (-1, 13)], ids=["apart", "overlapping"])
def test_time_is_that_of_one_call(monkeypatch, gap, span):
    monkeypatch.setattr(measure.ProfileData, "from_file", lambda path: Trace(gap))
    seen = []

    def function(x):
        seen.append(x)
        return x + 1

    sets = [(jnp.full(3, i),) for i in range(4)]
    for _ in range(2):  # compiled once
        assert measure.jit_us(function, sets) == pytest.approx(span / 4)  # a program is 4 calls
    assert len(seen) == 4 and all(isinstance(x, jax.core.Tracer) for x in seen)


def test_several_gpus_are_timed_from_when_the_last_one_starts(monkeypatch):
    first, late = Trace(2), Trace(5)
    for event in late.planes[0].lines[0].events:
        event.start_ns += 3e3
    first.planes += [late.planes[0], types.SimpleNamespace(name="/device:GPU:2", lines=[])]
    monkeypatch.setattr(measure.ProfileData, "from_file", lambda path: first)
    assert measure.jit_us(jnp.negative, [(jnp.ones(3),)]) == pytest.approx(19)  # 10, 5 between, 4


@pytest.mark.parametrize("kernels", [0, 13])
def test_a_profile_without_all_kernels_is_an_error(monkeypatch, kernels):
    monkeypatch.setattr(measure.ProfileData, "from_file", lambda path: Trace(0, kernels))
    with pytest.raises(RuntimeError, match=f"{kernels} kernels in 7 runs"):
        measure.jit_us(jnp.negative, [(jnp.ones(3),)])


def test_copies_count_what_is_read_and_written(monkeypatch):
    monkeypatch.setattr(measure, "jit_us", lambda function, sets: 2.0)
    assert measure.copy_bandwidth(1000) == pytest.approx(1e9)


def test_in_jit_measures_ours_and_xla(monkeypatch):
    measured = []
    monkeypatch.setattr(
        measure, "jit_us", lambda function, sets: measured.append((function, sets[0][0].dtype, len(sets)))
    )
    for call in measure.in_jit(FP8).values():
        call()
    assert measured == [
        (jax_qmm.scaled_mm, jnp.float8_e4m3fn, 32),
        (measure.xla_scaled_mm, jnp.float8_e4m3fn, 32),
        (measure.xla_bf16, jnp.bfloat16, 32),
    ]


def test_in_jit_makes_operands_once(monkeypatch):
    made = []
    operands = measure.operands
    monkeypatch.setattr(measure, "operands", lambda product, dtype: made.append(dtype) or operands(product, dtype))
    monkeypatch.setattr(measure, "jit_us", lambda function, sets: 1.0)
    calls = measure.in_jit(FP8)
    for name in [*calls, *reversed(calls)]:
        calls[name]()
    assert made == ["float8_e4m3fn", "bfloat16"]


def test_all_are_measured_in_turns_of_another_order():
    order = measure.turns("abcdef", "seed")
    turns = [tuple(order[i : i + 6]) for i in range(0, 18, 6)]
    assert len(set(turns)) == measure.TURNS == 3 and {frozenset(turn) for turn in turns} == {frozenset("abcdef")}
    assert order == measure.turns("abcdef", "seed") != measure.turns("abcdef", "another")
    clock = iter(range(6))
    found = measure.times({name: lambda: next(clock) for name in "ab"}, "seed")
    assert [found[name].pop(0) for name in measure.turns("ab", "seed")] == [*range(6)]


def test_roofline_is_that_of_bytes_or_of_operations():
    few, many = (Product(m, 8192, 8192, 1, "int8", "float32", False) for m in (1, 8192))
    assert measure.nbytes(few) == 8192 + 8192 * 8192 + 4 * 8192
    assert measure.roofline_us(few, 4e12) == pytest.approx(measure.nbytes(few) / 4e6)
    assert measure.roofline_us(many, 4e12) == pytest.approx(2 * 8192**3 / 1979e6)


def test_without_a_gpu_or_kernels_the_process_ends(monkeypatch, capsys, kernels):
    assert measure.open_gpu("bench")[0] is kernels
    monkeypatch.setattr(_extension, "fallback_reason", lambda platform: "built without kernels")
    for message in ("bench measures the kernels on a GPU, and can't: built without kernels", "JAX sees no NVIDIA GPU"):
        with pytest.raises(SystemExit) as exit:
            measure.open_gpu("bench")
        assert exit.value.code == 2
        assert message in capsys.readouterr().err
        monkeypatch.setattr(_extension, "_gpus", list)
