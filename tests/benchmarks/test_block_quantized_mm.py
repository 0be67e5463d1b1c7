"""The cost model of block_scaled_mm of two QArrays against the times of kernels that were measured."""

import csv
import math


def test_choices_are_near_the_fastest_that_was_measured(extension, h200, stored):
    products = {}
    with stored("block_quantized_mm_kernels.csv").open() as file:
        for row in csv.DictReader(file):
            if row["block"]:  # else what they are compared with
                sizes = (int(row[name]) for name in ("m", "n", "k", "block"))
                key = row["run"], *sizes, row["dtype"], row["zero_points"], row["shared"]
                products.setdefault(key, {})[row["kernel"]] = float(row["us"])
    ratios = {}
    for key, times in products.items():
        _, m, n, k, block, dtype, zero_points, shared = key
        kind = dtype, "bfloat16", block, bool(zero_points), bool(shared)
        chosen = extension.BlockQuantizedMmProblem(m, n, k, 1, *kind).select(h200)
        if chosen in times:
            ratios[key] = times[chosen] / min(times.values())
    assert len(ratios) >= 0.9 * len(products)
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.02 and max(ratios.values()) < 1.15, ratios
