"""The fit of the cost model: its model is the extension's, and it finds the costs that times were made with."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_qmm import _ffi

pytest.importorskip("optax", reason="optax is absent, with which benchmarks/cost_model.py fits")


@pytest.fixture(scope="module")
def cost_model():
    file = Path(__file__).parents[2] / "benchmarks" / "cost_model.py"
    spec = importlib.util.spec_from_file_location("cost_model", file)
    module = sys.modules["cost_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cost_model"]


def predict(cost, waves, k_tiles, copy):
    k_tile, tile, launch, reading = cost
    return launch + math.cbrt((waves * (k_tiles * k_tile + tile))**3 + (copy * reading)**3)


def test_draws_different_products_alike_every_time(cost_model):
    drawn = cost_model.products(200, seed=3)
    assert drawn == cost_model.products(200, seed=3) != cost_model.products(200, seed=4)
    assert len(set(drawn)) == 200 and {product.dtype for product in drawn} == {"int8", "float8_e4m3fn"}


@pytest.mark.skipif(_ffi._load()[0] is None, reason="the extension is not built")
def test_model_chooses_what_the_extension_does(cost_model, kernels):
    table = list(cost_model.read_kernels())
    for product in cost_model.products(400, seed=1):
        m, n, k, _, dtype, _, fast_accum = product
        best, name = math.inf, ""
        for kernel in table:
            *numbers, swizzle = cost_model.terms(kernel, m, n, k)
            if numbers[0] and kernel.serves(dtype, fast_accum, m) and predict(kernel.cost, *numbers) < best:
                best, name = predict(kernel.cost, *numbers), kernel.full_name(swizzle)
        chosen = kernels.select_scaled_mm(*product, cost_model.SMS)
        assert kernels.describe_scaled_mm(chosen) == name, product


def test_finds_the_costs_that_times_were_made_with(cost_model):
    kind = "int8", False
    table = [kernel for kernel in cost_model.read_kernels() if kernel.kind == kind and kernel.schedule != "skinny"]
    times = {}
    for product in cost_model.products(150, seed=0):
        m, n, k = product[:3]
        named = times[*kind, m, n, k] = {}
        for kernel in table:
            *numbers, swizzle = cost_model.terms(kernel, m, n, k)
            if numbers[0]:
                named[kernel.full_name(swizzle)] = predict(kernel.cost, *numbers)
    measured = cost_model.Measured(kind, table, times)
    rows = np.arange(len(measured.products))
    assert measured.behind(cost_model.fit(measured, rows, steps=1), rows).mean() > 1.03
    assert measured.behind(cost_model.fit(measured, rows, steps=500), rows).mean() < 1.003


def test_results_of_4_bytes_get_the_costs_of_2(cost_model):
    table = "\n".join((
        "// COST(of no kernel)",
        "ONE_TILE(COST(1, 1, 1, 1), kS8, 2, 64, 32, 256, 4, 1, 1, 1, true)",
        "ONE_TILE(COST(1, 1, 1, 1), kS8, 4, 64, 32, 256, 4, 1, 1, 1, true)",
        "ONE_TILE(COST(1, 1, 1, 1), kF8E4M3, 4, 64, 32, 256, 4, 1, 1, 1, true)"))
    costs = {"kS8, 2, 64, 32, 256, 4, 1, 1, 1, true": (0.5, 2, 3, 4)}
    lines = cost_model.replace_costs(table, costs).splitlines()
    assert [line.count("COST(0.500, 2.00, 3.00, 4.00)") for line in lines] == [0, 1, 1, 0]
