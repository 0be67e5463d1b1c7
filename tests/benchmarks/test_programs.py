"""Programs are measured in shuffled turns; times are those of the fixture, never checked for what they are."""

import csv

import pytest

from jax_qmm.bench import measure, shapes


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.MODELS, "llama-3-8b", ((32, 64),))


def test_lines_have_the_median_and_the_spread_of_shuffled_turns(small, run_main, capsys):
    timed, lines = run_main("benchmarks/programs.py", "--m", "16,512")
    rows = [*csv.DictReader(lines)]
    # M 16 of int8 has three calls, M 512 five, and of fp8 two.
    assert len(timed) == (3 + 5 + 2) * measure.TURNS
    assert [(row["dtype"], row["m"]) for row in rows] == [("int8", "16")] * 2 + [("int8", "512")] * 3 + [
        ("float8_e4m3fn", "512")
    ]
    for row in rows:
        assert float(row["least_us"]) < float(row["us"]) < float(row["most_us"])
        assert float(row["compared_with_least_us"]) < float(row["compared_with_us"])
        assert float(row["ratio"]) == pytest.approx(float(row["us"]) / float(row["compared_with_us"]), abs=1e-3)
    first, *others = (timed[start : start + 5] for start in (9, 14, 19))  # the turns of int8 with M 512
    assert all(set(turn) == set(first) for turn in others) and any(turn != first for turn in others)
    assert capsys.readouterr().out.count("of one took") == 3


def test_what_follows_the_sums_is_compared_with_scales_alone(small, run_main):
    timed, lines = run_main("benchmarks/programs.py", "--epilogues", "--m", "16", "--shapes", "32,64")
    rows = [*csv.DictReader(lines)]
    # Scales alone, five activations and two outputs; of int8 zero points and two quantizers, too.
    assert len(timed) == (11 + 8) * measure.TURNS
    assert [(row["dtype"], row["n"]) for row in rows] == [("int8", "32")] * 9 + [("float8_e4m3fn", "32")] * 7
    assert len({row["what"] for row in rows}) == 9


def test_columns_are_those_of_the_stored_figures_and_more(small, run_main, stored):
    _, (header, *_) = run_main("benchmarks/programs.py", "--m", "16")
    assert header.startswith(stored("programs.csv").read_text().splitlines()[0] + ",")
