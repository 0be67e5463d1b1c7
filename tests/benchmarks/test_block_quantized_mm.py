"""The cost models of block_scaled_mm of two QArrays and of expanded_mm against measured times of their kernels."""

import csv
import math

import pytest


def test_choices_are_near_the_fastest_that_was_measured(extension, h200, stored):
    products = {}
    with stored("block_quantized_mm_kernels.csv").open() as file:
        for row in csv.DictReader(file):
            if row["block"]:  # else what they are compared with
                key = *(int(row[name]) for name in ("m", "n", "k", "block")), row["dtype"], row["zero_points"]
                products.setdefault((*key, row["shared"]), {})[row["kernel"]] = float(row["us"])
    ratios, many_rows = {}, 0
    for key, times in products.items():
        m, n, k, block, dtype, zero_points, shared = key
        if shared:  # which the other kernels take too, in the same time
            times = products.get((*key[:-1], ""), {}) | times
        kind = dtype, "bfloat16", block, "a" if zero_points else "", bool(shared)
        chosen = extension.BlockQuantizedMmProblem(m, n, k, 1, *kind).select(h200)
        if chosen in times:  # persistent kernels were measured with some of the weights
            ratios[key] = times[chosen] / min(times.values())
            many_rows += m >= 128 and block >= 64 and len(times) > 1
    assert len(ratios) > 400 and many_rows > 40
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.02 and max(ratios.values()) < 1.3, ratios


@pytest.mark.parametrize(
    ("name", "fewest", "mean", "worst"),
    [
        # Costs are fitted to the H200's. The first has other kernels for fewer rows than there are.
        ("h100/expanded_mm_kernels.csv", 65, 1.02, 1.26),
        ("h100/expanded_mm_few_rows.csv", 1, 1.03, 1.21),
        ("h200/expanded_mm_kernels.csv", 1, 1.01, 1.1),
    ],
)
def test_choices_of_w4a8_are_near_the_fastest_that_was_measured(
    extension, h100, h200, stored, name, fewest, mean, worst
):
    gpu, out_dtype = (h200, "bfloat16") if name.startswith("h200") else (h100, "int32")  # no persistent blocks
    products = {}
    with stored(f"../{name}").open() as file:
        for row in csv.DictReader(file):
            if row["kernel"].startswith("sm") and int(row["m"]) >= fewest:
                products.setdefault((row["m"], row["n"], row["k"]), {})[row["kernel"]] = float(row["us"])
    ratios = {}
    for sizes, times in products.items():
        chosen = extension.ExpandedMmProblem(*map(int, sizes), 1, out_dtype, 128).select(gpu)
        ratios[sizes] = times[chosen] / min(times.values())
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < mean and max(ratios.values()) < worst, ratios
