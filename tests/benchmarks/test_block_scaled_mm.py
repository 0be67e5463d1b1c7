"""The cost model of block_scaled_mm against the times of kernels that were measured."""

import csv
import math

from jax_qmm import _extension

BITS = {"w4a16": 4, "w8a16": 8}


def test_choices_are_near_the_fastest_that_was_measured(extension, stored):
    _extension._load()  # which describes GPUs
    gpu = extension.Gpu("NVIDIA H200", 132, 90)
    products = {}
    with stored("block_scaled_mm_kernels.csv").open() as file:
        for row in csv.DictReader(file):
            key = BITS[row["scheme"]], int(row["m"]), int(row["n"]), int(row["k"])
            products.setdefault(key, {})[row["kernel"]] = float(row["us"])
    ratios = {}
    for (bits, m, n, k), times in products.items():
        ours = {kernel: us for kernel, us in times.items() if kernel != "XLA bfloat16"}
        problem = extension.BlockScaledMmProblem(m, n, k, 1, "bfloat16", "bfloat16", bits, 128, None)
        chosen = "dequantized once" if problem.dequantizes_once(gpu) else problem.select(gpu)
        if chosen in ours:
            ratios[bits, m, n, k] = ours[chosen] / min(ours.values())
    assert len(ratios) >= 0.9 * len(products)
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.03 and max(ratios.values()) < 1.25, ratios
