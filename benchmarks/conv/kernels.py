"""Times every kernel that serves int8 convolutions with 8-bit results, beside XLA's in bfloat16.

    python benchmarks/conv/kernels.py --images 64 --csv kernels.csv
    python benchmarks/conv/kernels.py --images 1 8 --scheme conv-w4a16 --csv weight_only_kernels.csv

The cost models in cuda/conv/select.cc are fitted to such times, those of weights of 4 bits in
cuda/block_scaled_mm/select.cc. Needs a GPU that has kernels. Times are JAX's profiler's, of programs of many calls
whose operands together exceed the L2 cache.
"""

import argparse
import csv
from pathlib import Path
from unittest import mock

from tqdm import tqdm

from jax_qmm import _extension
from jax_qmm.bench import convs, measure
from jax_qmm.ops.conv import padded_channels
from jax_qmm.ops.conv_form import Window


def window_of(layer: convs.Layer):
    """The window of a layer, and with it what `in_kernels` gives."""
    padding = ((layer.window // 2,) * 2,) * 2
    window = Window((layer.stride,) * 2, padding, (1, 1), (1, 1), layer.groups)
    return window, window.in_kernels(*((size, size) for size in (layer.size, layer.window, layer.out_size)))


def problem_of(kernels, layer: convs.Layer, images: int):
    """What the extension knows of a layer: batch, images, channels and groups, sizes, moves, and the result."""
    window, axes = window_of(layer)
    weights = layer.out, layer.window, layer.window, layer.channels // layer.groups
    channels = padded_channels(weights, window)
    return kernels.ConvProblem(1, images, channels, layer.out, layer.groups, *axes, "int8", False)


def weight_only_problem_of(kernels, layer: convs.Layer, images: int):
    """Likewise of a layer with weights of 4 bits."""
    _, axes = window_of(layer)
    kind = "bfloat16", "bfloat16", 4, convs.block_of(layer), None
    return kernels.BlockScaledMmProblem(*layer.shape(images), 1, *kind, (images, layer.channels, *axes))


def measure_layer(scheme: str, layer: convs.Layer, images: int, kernels, gpu):
    """Yields what runs, and its microseconds."""
    m, n, k = layer.shape(images)
    of_operations = 2e6 * m * n * k / gpu.peak
    timed = convs.calls(scheme, layer, images, of_operations)
    if scheme == "conv":
        for words in problem_of(kernels, layer, images).choices(gpu):
            yield words, measure.by_kernel(kernels.restrict_conv, words, timed["ours"])
    else:
        for words, _ in weight_only_problem_of(kernels, layer, images).choices(gpu):
            yield words, measure.by_kernel(kernels.restrict_block_scaled_mm, words, timed["ours"])
        measure._call_each.clear_cache()
        with mock.patch.object(_extension, "dequantizes_once", return_value=True):
            yield "dequantized once, then XLA", timed["ours"]()
    yield "XLA bfloat16", timed["xla_bf16"]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--scheme", choices=convs.WORDS, default="conv", help="(%(default)s)")
    parser.add_argument("--images", type=int, nargs="+", default=(8, 64), help="(%(default)s)")
    options = parser.parse_args()
    _, gpu = measure.open_gpu("kernels.py")
    kernels = _extension._load()[0]
    # Windows of one value that do not move are products.
    layers = [layer for _, layer in convs.layers_of(options.scheme) if layer.window > 1 or layer.stride > 1]
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["gpu", "images", "layer", "kernel", "us"])
        for images, layer in tqdm([(images, layer) for images in options.images for layer in layers], unit="layer"):
            for words, us in measure_layer(options.scheme, layer, images, kernels, gpu):
                writer.writerow([gpu.name, images, layer, words, f"{us:.1f}"])
            file.flush()


if __name__ == "__main__":
    main()
