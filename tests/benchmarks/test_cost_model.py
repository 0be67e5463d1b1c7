"""The fit of the cost model: its model is the extension's, and it finds costs that choose the fastest kernels."""

import csv
import math
import types
from statistics import geometric_mean

import numpy as np
import pytest

from jax_qmm import tuning

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


def test_terms_of_kernels_that_the_model_may_choose(extension, gpu):
    def terms(kernel, m, k=4096):
        problem = extension.ScaledMmProblem(m, 4096, k, 1, "int8", "bfloat16", False)
        return {extension.describe_scaled_mm(choice): problem.terms(choice, gpu) for choice in problem.choices(gpu)}[
            kernel
        ]

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
        assert extension.ScaledMmProblem(512, 4096, 4096, 1, "int8", "bfloat16", False).terms((kernel, 1), gpu) is None


def test_model_chooses_what_the_extension_does(cost_model, extension, gpu):
    costs = {
        (cost.dtype, cost.kernel): np.array((cost.k_tile, cost.tile, cost.launch, cost.reading))
        for cost in tuning.load_costs(tuning.packaged(gpu))
    }
    for product in cost_model.products(400, seed=1):
        if cost_model.has_full_epilogue(product):
            continue

        def cost_of(choice, dtype=product.dtype):
            return costs[dtype, extension.describe_scaled_mm((choice[0], 1)).removesuffix(" swizzle 1")]

        times = {
            choice: float(cost_model.predict(cost_of(choice), *terms))
            for choice, terms in cost_model.terms_of(extension, gpu, product).items()
        }
        assert extension.ScaledMmProblem(*product).select(gpu) == min(times, key=times.get), product


def test_finds_costs_that_choose_the_fastest(cost_model, extension, gpu):
    products = [
        cost_model.Product(*product[:4], "int8", "bfloat16", False) for product in cost_model.products(150, seed=0)
    ]
    times = {}
    for product in products:
        of_product = times[product] = {}
        for (kernel, swizzle), terms in cost_model.terms_of(extension, gpu, product).items():
            name = extension.describe_scaled_mm((kernel, swizzle))
            # Not what tiles suggest: each second kernel multiplies half as fast, each third ends a tile late.
            costs = np.array([2 * cost_model.least_k_tile_us(name) * (1 + kernel % 2), 1 + kernel % 3, 1, 1])
            of_product[name] = float(cost_model.predict(costs, *terms))
    unchosen = {products[0]: times[products[0]] | {"a kernel that the model never chooses": 0.5}}
    assert cost_model.Measured(extension, gpu, unchosen).fastest == [0.5]
    measured = cost_model.Measured(extension, gpu, times)
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


def test_costs_are_kept_by_the_words_of_kernels(cost_model, extension, gpu, tmp_path):
    (first, second) = tuning.load_costs(tuning.packaged(gpu))[:2]
    (choice,) = (
        choice
        for choice in extension.ScaledMmProblem(512, 4096, 4096, 1, second.dtype, "bfloat16", False).choices(gpu)
        if extension.describe_scaled_mm(choice) == second.kernel + " swizzle 1"
    )
    key = second.dtype, second.kernel
    found = dict(cost_model.costs_by_words(extension, second.dtype, {choice[0]: [1.0, 2.0, 3.0, 4.0]}, {key: second}))
    assert found == {key: second._replace(k_tile=1.0, tile=2.0, launch=3.0, reading=4.0)}
    file = tmp_path / "costs.json"
    tuning.save_costs(file, gpu, [first, *found.values()])
    assert tuning.load_costs(file) == [first, *found.values()]


def test_choices_are_compared_with_the_fastest_where_they_were_measured(cost_model):
    class Problem(tuple):
        def select(self, gpu):
            return "wide" if self[0] > 16 else "narrow"

    kernels = types.SimpleNamespace(ScaledMmProblem=lambda *product: Problem(product), describe_scaled_mm=str)
    products = [tuning.Product(m, 128, 128, 1, "int8", "bfloat16", False) for m in (1, 16, 32)]
    times = dict(zip(products, ({"narrow": 2.0, "wide": 1.0}, {"wide": 1.0}, {"narrow": 3.0, "wide": 3.0})))
    assert cost_model.behind_now(kernels, None, times) == {products[0]: 2.0, products[2]: 1.0}


def test_ends_of_tiles_with_the_full_epilogue_are_found_as_they_are_predicted(cost_model, extension, gpu):
    costs = {(cost.dtype, cost.kernel): cost for cost in tuning.load_costs(tuning.packaged(gpu))}
    drawn = [product for product in cost_model.products(400, seed=3) if product.full_epilogue]
    times = {}
    for product in drawn:
        problem = extension.ScaledMmProblem(*product)
        predicted = {choice: problem.predict(choice, gpu) for choice in problem.choices(gpu)}
        times[product] = {
            extension.describe_scaled_mm(choice): us
            for choice, us in predicted.items()
            if us < 3 * min(predicted.values())
        }
    assert len(times) > 60 and {cost_model.has_full_epilogue(product) for product in times} == {True}
    unknown = {key: cost._replace(full_tile=0.0) for key, cost in costs.items()}
    found = dict(cost_model.fit_full_tiles(extension, gpu, times, unknown))
    assert len(found) > 20
    for key, cost in found.items():
        # Where no product shows it, a pingpong kernel's may be anything below its products' time.
        assert "pingpong" in cost.kernel or cost.full_tile == pytest.approx(costs[key].full_tile, rel=0.05), cost


def test_what_is_measured_is_read_again(cost_model, extension, h200, monkeypatch, tmp_path):
    monkeypatch.setattr(cost_model.measure, "open_gpu", lambda command: (extension, h200))
    monkeypatch.setattr(cost_model, "measure_one", lambda kernels, product, choices: {c: 1.5 for c in choices[:2]})
    file = tmp_path / "kernels.csv.gz"
    cost_model.measure_all(file, 60, 0)
    times = cost_model.read_times([file])
    drawn = cost_model.products(60, 0)
    assert list(times) == drawn and {product.full_epilogue for product in drawn} == {False, True}
    for product, by_name in times.items():
        words = map(extension.describe_scaled_mm, extension.ScaledMmProblem(*product).choices(h200))
        assert set(by_name.values()) == {1.5} and set(by_name) <= set(words)


@pytest.mark.parametrize("gpu, file, plain, full", [
    ("NVIDIA H100 80GB HBM3", "../h100/kernels.csv.gz", (800, 1.02, 1.4), (165, 1.025, 1.6)),
    ("NVIDIA H200", "full_epilogue_kernels.csv.gz", (180, 1.05, 2.0), (285, 1.025, 1.5)),
])  # fmt: skip
def test_choices_are_near_the_fastest_with_both_epilogues(cost_model, extension, stored, gpu, file, plain, full):
    """With the plain epilogue and with the full one, among them convolutions with windows of one pixel."""
    times = cost_model.read_times([stored(file)])
    behind = cost_model.behind_now(extension, tuning.packaged_gpu(extension, gpu), times)
    for has_full, (least, mean, most) in ((False, plain), (True, full)):
        found = [ratio for product, ratio in behind.items() if cost_model.has_full_epilogue(product) == has_full]
        assert len(found) >= least and geometric_mean(found) < mean and max(found) < most


def test_times_of_resident_columns_are_predicted(extension, h200, stored):
    """As its estimate says, which is fitted to these and to convolutions: to 6 % (root mean square); where rows are
    joined, in a later run by the extension itself, to 13 %."""
    off = {False: [], True: []}
    with stored("resident_kernels.csv").open() as file:
        for row in csv.DictReader(file):
            if row["layer"]:
                continue
            m, n, k = (int(row[name]) for name in "mnk")
            problem = extension.ScaledMmProblem(m, n, k, 1, "int8", "int8", False, True)
            (choice,) = (c for c in problem.choices(h200) if extension.describe_scaled_mm(c) == row["kernel"])
            off[k % 16 > 0 or n % 64 > 0].append(np.log(problem.predict(choice, h200) / float(row["us"])))
    rms = {joined: np.sqrt(np.mean(np.square(each))) for joined, each in off.items()}
    assert [*map(len, off.values())] == [32, 20] and rms[False] < 0.065 and rms[True] < 0.13
