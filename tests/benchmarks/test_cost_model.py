"""The fit of the cost model: its model is the extension's, and it finds costs that choose the fastest kernels."""

import math

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is absent, with which benchmarks/cost_model.py fits")


@pytest.fixture(scope="module")
def cost_model(load_script):
    return load_script("benchmarks/cost_model.py")


def test_draws_alike_every_time_and_large_ones_among_them(cost_model):
    drawn = cost_model.products(200, seed=5)
    assert drawn == cost_model.products(200, seed=5) != cost_model.products(200, seed=6)
    assert {product.dtype for product in drawn} == {"int8", "float8_e4m3fn"}
    assert sum(map(cost_model.tune.is_large, drawn)) == 40
    assert max(cost_model.measure.roofline_us(product, math.inf) for product in drawn) < cost_model.MOST_US


def test_terms_of_kernels_that_the_model_may_choose(extension):
    def terms(kernel, m, k=4096):
        product = m, 4096, k, 1, "int8", "bfloat16", False
        return {
            extension.describe_scaled_mm(choice): extension.scaled_mm_terms(*product, choice, 132)
            for choice in extension.scaled_mm_choices(*product)
        }[kernel]

    # 4 x 32 tiles on 132 SMs; int8 and bfloat16 at 4.3 TB/s.
    assert terms("sm90 128x128x128 cluster 1x1 pingpong swizzle 1", 512) == pytest.approx(
        (1, 32, (512 * 4096 + 4096 * 4096 + 2 * 512 * 4096) / 4.3e6)
    )
    assert terms("sm90 128x128x128 cluster 1x1 pingpong swizzle 1", 8192)[0] == 16  # 64 x 32 tiles
    assert terms("sm90 64x32x128 cluster 1x1 one tile swapped split-K 6", 32, k=16384)[:2] == (4, 22)  # on 102 SMs
    # Squares of tiles where there are few, generic kernels, and many waves of one-tile kernels.
    assert terms("sm90 128x128x128 cluster 1x1 pingpong swizzle 8", 512) is None
    assert terms("generic 64x64x64 mma.sync", 512) is None
    assert terms("sm90 64x64x256 cluster 1x1 one tile", 8192) is None
    for kernel in (-1, 16, 10**7):  # generic, of fp8, no kernel
        assert extension.scaled_mm_terms(512, 4096, 4096, 1, "int8", "bfloat16", False, (kernel, 1), 132) is None


def test_model_chooses_what_the_extension_does(cost_model, extension):
    assert cost_model.same_table(extension)
    costs = [
        tuple(map(float, cost.split(", "))) for _, cost, _ in cost_model.LINE.findall(cost_model.TABLE.read_text())
    ]
    for product in cost_model.products(400, seed=1):
        times = {
            choice: float(cost_model.predict(np.array(costs[choice[0]]), *terms))
            for choice, terms in cost_model.terms_of(extension, product).items()
        }
        assert extension.select_scaled_mm(*product, cost_model.SMS) == min(times, key=times.get), product


@pytest.mark.parametrize(
    "change", [lambda lines: lines[1:], lambda lines: lines + lines[:1], lambda lines: lines[::-1]]
)
def test_another_table_is_told_from_that_of_the_extension(cost_model, extension, monkeypatch, tmp_path, change):
    lines = [line for line in cost_model.TABLE.read_text().splitlines() if cost_model.LINE.match(line)]
    other = tmp_path / "instances_sm90.def"
    other.write_text("\n".join(change(lines)))
    monkeypatch.setattr(cost_model, "TABLE", other)
    assert not cost_model.same_table(extension)


def test_finds_costs_that_choose_the_fastest(cost_model, extension):
    products = [
        cost_model.Product(*product[:4], "int8", "bfloat16", False) for product in cost_model.products(150, seed=0)
    ]
    times = {}
    for product in products:
        of_product = times[product] = {}
        for (kernel, swizzle), terms in cost_model.terms_of(extension, product).items():
            name = extension.describe_scaled_mm((kernel, swizzle))
            # Not what tiles suggest: each second kernel multiplies half as fast, each third ends a tile late.
            costs = np.array([2 * cost_model.least_k_tile_us(name) * (1 + kernel % 2), 1 + kernel % 3, 1, 1])
            of_product[name] = float(cost_model.predict(costs, *terms))
    unchosen = {products[0]: times[products[0]] | {"a kernel that the model never chooses": 0.5}}
    assert cost_model.Measured(extension, unchosen).fastest == [0.5]
    measured = cost_model.Measured(extension, times)
    rows = np.arange(len(measured.products))
    start, end = (measured.behind(cost_model.fit(measured, rows, steps), rows).mean() - 1 for steps in (1, 500))
    assert end < 0.01 and end < start / 10


@pytest.mark.parametrize(
    "m, times",
    [
        (64, {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 15.0, 6: 16.0}),  # each as measured in turns
        (8192, {0: 20.0, 1: 22.0, 2: 30.0, 3: 26.0, 4: 28.0, 5: 30.0, 6: 32.0}),  # alone twice as slow, or 2.5 times
    ],
)
def test_measures_the_fastest_of_a_large_products_kernels_alone(cost_model, monkeypatch, m, times):
    alone = {0: 20.0, 1: 22.0, 2: 30.0, 3: 26.0, 4: 28.0}
    measured = []
    monkeypatch.setattr(cost_model.tune, "first_us", lambda kernels, product, choices: {i: 10.0 + i for i in choices})
    monkeypatch.setattr(
        cost_model.tune, "alone_us", lambda kernels, product, choice: measured.append(choice) or alone[choice]
    )
    product = cost_model.Product(m, 8192, 8192, 1, "int8", "bfloat16", False)
    assert cost_model.measure_one(None, product, range(7)) == times
    assert measured == ([] if m == 64 else list(alone))


def test_results_of_4_bytes_get_the_costs_of_2(cost_model):
    table = "\n".join(
        (
            "// COST(of no kernel)",
            "ONE_TILE(COST(1, 1, 1, 1), kS8, 2, 64, 32, 256, 4, 1, 1, 1, true)",
            "ONE_TILE(COST(1, 1, 1, 1), kS8, 4, 64, 32, 256, 4, 1, 1, 1, true)",
            "ONE_TILE(COST(1, 1, 1, 1), kF8E4M3, 4, 64, 32, 256, 4, 1, 1, 1, true)",
        )
    )
    lines = cost_model.replace_costs(table, {0: (0.5, 2, 3, 4)}).splitlines()
    assert [line.count("COST(0.500, 2.00, 3.00, 4.00)") for line in lines] == [0, 1, 1, 0]
