"""The fit of the cost model: its model is the extension's, and it finds costs that choose the fastest kernels."""

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is absent, with which benchmarks/cost_model.py fits")


@pytest.fixture(scope="module")
def cost_model(load_script):
    return load_script("benchmarks/cost_model.py")


def test_draws_different_products_alike_every_time(cost_model):
    drawn = cost_model.products(200, seed=3)
    assert drawn == cost_model.products(200, seed=3) != cost_model.products(200, seed=4)
    assert len(set(drawn)) == 200 and {product.dtype for product in drawn} == {"int8", "float8_e4m3fn"}


def test_model_chooses_what_the_extension_does(cost_model, extension):
    table = list(cost_model.read_kernels())
    for product in cost_model.products(400, seed=1):
        m, n, k, _, dtype, _, fast_accum = product
        serving = [kernel for kernel in table if kernel.serves(dtype, fast_accum, m)]
        waves, k_tiles, copy, swizzles = np.array([cost_model.terms(kernel, m, n, k) for kernel in serving]).T
        times = cost_model.predict(np.array([kernel.cost for kernel in serving]), waves, k_tiles, copy)
        best = np.where(waves > 0, times, np.inf).argmin()
        chosen = extension.select_scaled_mm(*product, cost_model.SMS)
        assert extension.describe_scaled_mm(chosen) == serving[best].full_name(int(swizzles[best])), product


def test_finds_costs_that_choose_the_fastest(cost_model):
    table = [kernel for kernel in cost_model.read_kernels() if kernel.kind == ("int8", False) and kernel.schedule != "skinny"]
    # Not what tiles suggest: each second kernel multiplies half as fast, each third ends a tile late.
    costs = np.array([(np.prod(kernel.tile) / 7e6 * (1 + i % 2), 1 + i % 3, 1, 1) for i, kernel in enumerate(table)])
    times = {}
    for m, n, k, *_ in cost_model.products(150, seed=0):
        waves, k_tiles, copy, swizzles = np.array([cost_model.terms(kernel, m, n, k) for kernel in table]).T
        us = cost_model.predict(costs, waves, k_tiles, copy)
        times["int8", False, m, n, k] = {kernel.full_name(int(swizzles[i])): us[i] for i, kernel in enumerate(table) if waves[i]}
    measured = cost_model.Measured("int8", table, times)
    rows = np.arange(len(measured.products))
    start, end = (measured.behind(cost_model.fit(measured, rows, steps), rows).mean() - 1 for steps in (1, 500))
    assert end < 0.01 and end < start / 10


@pytest.mark.parametrize("m, times", [
    (64, {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 15.0, 6: 16.0}),  # each as measured in turns
    (8192, {0: 20.0, 1: 22.0, 2: 24.0, 3: 26.0, 4: 28.0, 5: 30.0, 6: 32.0}),  # alone twice as slow, five of them measured
])
def test_measures_large_products_at_the_clock_of_the_fastest(cost_model, monkeypatch, m, times):
    alone = []
    monkeypatch.setattr(cost_model.tune, "first_us", lambda kernels, product, choices: {i: 10.0 + i for i in choices})
    monkeypatch.setattr(cost_model.tune, "alone_us",
                        lambda kernels, product, choice: alone.append(choice) or 20.0 + 2 * choice)
    product = cost_model.Product(m, 8192, 8192, 1, "int8", "bfloat16", False)
    assert cost_model.measure_one(None, product, range(7)) == times
    assert alone == ([] if m == 64 else [0, 1, 2, 3, 4])


def test_results_of_4_bytes_get_the_costs_of_2(cost_model):
    table = "\n".join((
        "// COST(of no kernel)",
        "ONE_TILE(COST(1, 1, 1, 1), kS8, 2, 64, 32, 256, 4, 1, 1, 1, true)",
        "ONE_TILE(COST(1, 1, 1, 1), kS8, 4, 64, 32, 256, 4, 1, 1, 1, true)",
        "ONE_TILE(COST(1, 1, 1, 1), kF8E4M3, 4, 64, 32, 256, 4, 1, 1, 1, true)"))
    costs = {"kS8, 2, 64, 32, 256, 4, 1, 1, 1, true": (0.5, 2, 3, 4)}
    lines = cost_model.replace_costs(table, costs).splitlines()
    assert [line.count("COST(0.500, 2.00, 3.00, 4.00)") for line in lines] == [0, 1, 1, 0]
