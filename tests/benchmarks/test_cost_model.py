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
    costs = [tuple(map(float, cost.split(", "))) for _, cost, _ in cost_model.LINE.findall(cost_model.TABLE.read_text())]
    for product in cost_model.products(400, seed=1):
        terms = {choice: extension.scaled_mm_terms(*product, choice, cost_model.SMS)
                 for choice in extension.scaled_mm_choices(*product)}
        times = {(kernel, swizzle): float(cost_model.predict(np.array(costs[kernel]), *of_choice))
                 for (kernel, swizzle), of_choice in terms.items() if of_choice}
        assert extension.select_scaled_mm(*product, cost_model.SMS) == min(times, key=times.get), product


def test_finds_costs_that_choose_the_fastest(cost_model, extension):
    products = [cost_model.Product(*product[:4], "int8", "bfloat16", False) for product in cost_model.products(150, seed=0)]
    times = {}
    for product in products:
        of_product = times[product] = {}
        for kernel, swizzle in extension.scaled_mm_choices(*product):
            if terms := extension.scaled_mm_terms(*product, (kernel, swizzle), cost_model.SMS):
                name = extension.describe_scaled_mm((kernel, swizzle))
                # Not what tiles suggest: each second kernel multiplies half as fast, each third ends a tile late.
                costs = np.array([2 * cost_model.least_k_tile_us(name) * (1 + kernel % 2), 1 + kernel % 3, 1, 1])
                of_product[name] = float(cost_model.predict(costs, *terms))
    measured = cost_model.Measured(extension, times)
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
    lines = cost_model.replace_costs(table, {0: (0.5, 2, 3, 4)}).splitlines()
    assert [line.count("COST(0.500, 2.00, 3.00, 4.00)") for line in lines] == [0, 1, 1, 0]
