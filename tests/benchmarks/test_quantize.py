"""Quantizers are measured in shuffled turns; times are those of the fixture, never checked for what they are."""

import csv

import jax.numpy as jnp

from jax_qmm.bench import measure


def test_lines_have_the_median_and_the_spread_of_shuffled_turns(run_main, monkeypatch, stored):
    monkeypatch.setattr(measure, "count_sets", lambda nbytes, most: 2)
    timed, lines = run_main("benchmarks/quantize.py", SHAPES=((4, 8),))
    rows = [*csv.DictReader(lines)]
    assert lines[0].startswith(stored("quantize.csv").read_text().splitlines()[0] + ",")
    assert len(rows) == 3 * 17 and len(timed) == 3 * 18 * measure.TURNS
    for row in rows:
        assert float(row["least_us"]) < float(row["us"]) < float(row["most_us"])
        assert float(row["copy_least_us"]) < float(row["copy_us"]) < float(row["copy_most_us"])
    copies = [i % 18 for i, function in enumerate(timed) if function is jnp.copy]
    assert len(copies) == 3 * measure.TURNS and len(set(copies)) > 1  # not always at the same place


def test_static_quantizers_have_a_scale_and_a_zero_point(load_script):
    quantizer = load_script("benchmarks/quantize.py").quantizer
    q = quantizer((4, 8), "int8 zero point", "per token", "static")(jnp.ones((4, 8)))
    assert q.scale.shape == q.zero_point.shape == (4, 1) and q.zero_point[0, 0] == -3
    q = quantizer((4, 8), "fp8", "per tensor", "dynamic")(jnp.ones((4, 8)))
    assert q.qtype == jnp.float8_e4m3fn and q.scale.shape == (1, 1) and q.zero_point is None


def test_blocks_have_sums_of_integers(load_script):
    script = load_script("benchmarks/quantize.py")
    ways = [*script.ways_of(["blocks of 128"])]
    assert [kind for kind, _, mode in ways if mode == "dynamic, sums"] == ["int8", "int8 zero point"]
    q = script.quantizer((4, 256), *ways[1])(jnp.ones((4, 256)))
    assert q.scale.shape == q.azp_adj.shape == (4, 2)
