"""The cost models of convolutions against the times of kernels that were measured."""

import csv
import math

from jax_qmm.bench.convs import NETWORKS

LAYERS = {str(layer): layer for layers in NETWORKS.values() for layer in layers}


def times_of(path):
    """By layer and images: microseconds of each kernel."""
    found = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            found.setdefault((row["layer"], int(row["images"])), {})[row["kernel"]] = float(row["us"])
    return found


def test_choices_of_int8_are_near_the_fastest_that_was_measured(extension, h200, stored, load_script):
    """Of each layer the fastest kernels are known. Those that are not choose among depthwise kernels, by no times."""
    problem_of = load_script("benchmarks/conv/kernels.py").problem_of
    ratios, layers = {}, times_of(stored("conv_kernels.csv"))
    for (words, images), times in layers.items():
        layer = LAYERS[words]
        problem = problem_of(extension, layer, images)
        chosen = problem.select(h200)
        if layer.groups == 1 and chosen in times:
            ratios[words, images] = times[chosen] / min(us for kernel, us in times.items() if "XLA" not in kernel)
    assert len(ratios) >= 10
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.05 and max(ratios.values()) < 1.2, ratios


def test_choices_of_weights_alone_are_near_the_fastest_that_was_measured(extension, h200, stored, load_script):
    problem_of = load_script("benchmarks/conv/kernels.py").weight_only_problem_of
    ratios = {}
    for (words, images), times in times_of(stored("weight_only_conv_kernels.csv")).items():
        problem = problem_of(extension, LAYERS[words], images)
        once = "dequantized once, then XLA"
        chosen = once if problem.dequantizes_once(h200) else problem.select(h200)
        if chosen in times:
            ratios[words, images] = times[chosen] / min(us for kernel, us in times.items() if kernel != "XLA bfloat16")
    assert len(ratios) >= 15
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.03 and max(ratios.values()) < 1.15, ratios
