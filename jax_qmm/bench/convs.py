"""`python -m jax_qmm bench --scheme conv`: the convolutions of networks, the roofline and XLA's."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench import measure, report, schemes
from jax_qmm.bench.report import Row
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W4A16
from jax_qmm.text_table import first_line

IMAGES = (1, 8, 64)
WORDS = {
    "conv": "int8 images and weights, a scale for each output channel, bias, relu and int8 results",
    "conv-w4a16": "bfloat16 images, int4 weights in blocks of 128 or 64 channels, bias and relu",
}
LABELS = {
    "ours": ("jax_qmm in jit", None),
    "xla": ("int8 XLA in jit", "ours"),
    "xla_bf16": ("bf16 XLA in jit", "ours"),
}
NOTES = """\
M: pixels of the result; N: output channels; K: the window's values of one group. The bytes are those of images, weights
and results. XLA's int8 computes the same with sums in float32, its bfloat16 the convolution, bias and relu.
A copy reads and writes: kernels that almost only read pass the roofline by several per cent.
us: by JAX's profiler, in one program of many such calls, whose operands together exceed the L2 cache several times,
or are twelve where they are small. All are measured three times, each time in another random order; the times are the
medians.
(1.20x): takes 1.20 times as long as jax_qmm."""
STEP_IN, STEP_OUT = 0.01, 0.5  # of int8 images and results


class Layer(NamedTuple):
    """A convolution of square images and windows, padded by half a window.

    >>> Layer(56, 64, 128, stride=2).out_size, str(Layer(56, 64, 64, groups=64))
    (28, '56x56x64, 3x3, 64 groups')
    """

    size: int
    channels: int
    out: int
    window: int = 3
    stride: int = 1
    groups: int = 1

    @property
    def out_size(self) -> int:
        return (self.size + 2 * (self.window // 2) - self.window) // self.stride + 1

    def shape(self, images: int) -> report.Shape:
        """M, N and K as of a product; of one group where there are several, with the N of all."""
        return images * self.out_size**2, self.out, self.window**2 * self.channels // self.groups

    def __str__(self):
        words = [f"{self.size}x{self.size}x{self.channels}", f"{self.window}x{self.window}"]
        words += [f"stride {self.stride}"] if self.stride > 1 else []
        words += [f"{self.groups} groups"] if self.groups > 1 else []
        return ", ".join(words)


def _depthwise(size, channels, stride=1):
    return Layer(size, channels, channels, 3, stride, channels)


# Each different one once. ResNet-50 with its strides in windows of 3, as it is trained today.
NETWORKS = {
    "resnet-50": (
        *(Layer(224, 3, 64, 7, 2), Layer(56, 64, 64, 1), Layer(56, 64, 64), Layer(56, 64, 256, 1)),
        *(Layer(56, 256, 64, 1), Layer(56, 256, 128, 1), Layer(56, 128, 128, 3, 2), Layer(28, 128, 512, 1)),
        *(Layer(56, 256, 512, 1, 2), Layer(28, 512, 128, 1), Layer(28, 128, 128), Layer(28, 512, 256, 1)),
        *(Layer(28, 256, 256, 3, 2), Layer(14, 256, 1024, 1), Layer(28, 512, 1024, 1, 2), Layer(14, 1024, 256, 1)),
        *(Layer(14, 256, 256), Layer(14, 1024, 512, 1), Layer(14, 512, 512, 3, 2), Layer(7, 512, 2048, 1)),
        *(Layer(14, 1024, 2048, 1, 2), Layer(7, 2048, 512, 1), Layer(7, 512, 512)),
    ),
    "mobilenet-v2": (
        *(Layer(224, 3, 32, 3, 2), _depthwise(112, 32), Layer(112, 16, 96, 1), _depthwise(112, 96, 2)),
        *(Layer(56, 24, 144, 1), _depthwise(56, 144), _depthwise(56, 144, 2), Layer(28, 192, 32, 1)),
        *(_depthwise(28, 192), _depthwise(28, 192, 2), Layer(14, 64, 384, 1), _depthwise(14, 384)),
        *(Layer(14, 576, 96, 1), _depthwise(14, 576, 2), Layer(7, 160, 960, 1), _depthwise(7, 960)),
    ),
    "unet": (  # of Stable Diffusion 1 with latents of 64 x 64
        *(Layer(64, 320, 320), Layer(64, 320, 320, 3, 2), Layer(64, 960, 320), Layer(64, 960, 320, 1)),
        *(Layer(32, 320, 640), Layer(32, 640, 640), Layer(16, 640, 1280), Layer(16, 1280, 1280), Layer(8, 1280, 1280)),
    ),
}


def geometry(layer: Layer) -> dict[str, Any]:
    """How its window moves, as keywords of a convolution of NHWC images and OHWI weights."""
    return dict(
        window_strides=(layer.stride,) * 2,
        padding=[(layer.window // 2,) * 2] * 2,
        dimension_numbers=("NHWC", "OHWI", "NHWC"),
        feature_group_count=layer.groups,
    )


def int8_conv(layer, x, w, scale, bias):
    """Ours, of int8 x and w `(O, H, W, I)` with a scale `(O,)` for each output channel."""
    x, w = QArray(x, jnp.full((1,) * 4, STEP_IN, jnp.float32)), QArray(w, scale[:, None, None, None])
    return jax_qmm.conv_general_dilated(
        x, w, **geometry(layer), bias=bias, activation="relu", out_dtype=jnp.int8, out_scale=STEP_OUT
    )


def xla_int8_conv(layer, x, w, scale, bias):
    """The same, written for XLA alone, which has no sums of int32 on a GPU."""
    sums = jax.lax.conv_general_dilated(x, w, **geometry(layer), preferred_element_type=jnp.float32)
    y = jax.nn.relu(STEP_IN * (scale * sums) + bias)
    return jnp.clip(jnp.rint(y / STEP_OUT), -128, 127).astype(jnp.int8)


def weight_only_conv(layer, x, w, bias):
    """Ours, of bfloat16 x and a packed w."""
    return jax_qmm.conv_general_dilated(x, w, **geometry(layer), bias=bias, activation="relu", out_dtype=x.dtype)


def xla_bf16_conv(layer, x, w, bias):
    """The convolution that quantizing replaces."""
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, **geometry(layer)) + bias)


def layers_of(scheme: str) -> list[tuple[str, Layer]]:
    """The layers that are measured, with the names of their networks: weight-only those that blocks fit."""
    every = [(name, layer) for name, layers in NETWORKS.items() for layer in layers]
    whole = lambda layer: layer.channels % 64 == 0 and layer.groups == 1
    return every if scheme == "conv" else [(name, layer) for name, layer in every if whole(layer)]


def block_of(layer: Layer) -> int:
    """Channels that share a scale, where weights have blocks."""
    return 128 if layer.channels % 128 == 0 else 64


@functools.cache  # for what makes operands is compiled once for all
def contestants(scheme: str, layer: Layer, images: int) -> dict[str, tuple[Callable, Callable[[int], tuple]]]:
    """For each of `LABELS` that takes part: the function, and what makes its random operands, given a seed."""
    of_x = images, layer.size, layer.size, layer.channels
    of_w = layer.out, layer.window, layer.window, layer.channels // layer.groups

    def arrays(draw, seed):
        return (draw(jax.random.key(2 * seed + i), shape) for i, shape in enumerate((of_x, of_w)))

    def int8(seed):
        x, w = arrays(lambda key, shape: jax.random.randint(key, shape, -127, 128, jnp.int8), seed)
        return x, w, jnp.full(layer.out, 0.01), jnp.ones(layer.out)

    def bf16(seed):
        x, w = arrays(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), seed)
        return x, w, jnp.ones(layer.out, jnp.bfloat16)

    def packed(seed):
        x, w, bias = bf16(seed)
        return x, W4A16(block_of(layer)).quantize_weight(w, (1, 2, 3)), bias

    of = lambda function, make: (functools.partial(function, layer), jax.jit(make))
    if scheme == "conv":
        mine = {"ours": of(int8_conv, int8), "xla": of(xla_int8_conv, int8)}
    else:
        mine = {"ours": of(weight_only_conv, packed)}
    return mine | {"xla_bf16": of(xla_bf16_conv, bf16)}


def _bytes(operands: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(operands))


def row_of(scheme: str, network: str, layer: Layer, images: int, bandwidth: float, peak: float) -> Row:
    """A row without times."""
    function, make = contestants(scheme, layer, images)["ours"]
    operands = jax.eval_shape(make, 0)
    kernel = jax_qmm.explain(function, *operands).rows[-1].runs_on
    size = _bytes(operands) + _bytes(jax.eval_shape(function, *operands))
    shape = layer.shape(images)
    roofline_us = 1e6 * max(size / bandwidth, 2 * shape[0] * shape[1] * shape[2] / peak)
    columns = {"scheme": scheme, "network": network, "layer": str(layer), "images": str(images)}
    return Row(network, shape, columns, kernel, size, roofline_us, LABELS, str(layer))


def calls(scheme: str, layer: Layer, images: int, roofline_us: float) -> dict[str, Callable[[], float]]:
    """What measures each of `contestants` inside jitted programs."""
    measure._call_each.clear_cache()  # of the layers before  # pyright: ignore[reportAttributeAccessIssue]
    return {
        name: measure.jit_call(function, make, _bytes(jax.eval_shape(make, 0)), max(roofline_us, 60))
        for name, (function, make) in contestants(scheme, layer, images).items()
    }


def autotune_xla(scheme: str, layers: Sequence[tuple[str, Layer]], images: int) -> None:
    """Has XLA choose its kernels for all layers."""
    measure.autotune_xla(
        [
            (function, jax.eval_shape(make, 0))
            for _, layer in layers
            for name, (function, make) in contestants(scheme, layer, images).items()
            if name != "ours"
        ]
    )


def measure_all(scheme, layers, images, bandwidth, peak, rows, failures) -> Iterator[None]:
    """Measures the layers at each number of images and shows a progress bar, as that of `schemes`."""
    for count in tqdm(images, desc="XLA compiles", unit="images"):
        try:
            autotune_xla(scheme, layers, count)
        except RuntimeError as error:  # one by one, then
            failures.append(f"XLA failed on all layers of {count} together: {first_line(error)}")
    with tqdm([(*each, count) for each in layers for count in images], desc="bench", unit="layer") as bar:
        for network, layer, count in bar:
            row = row_of(scheme, network, layer, count, bandwidth, peak)
            timed = calls(scheme, layer, count, row.roofline_us)
            schemes.measure_row(row, timed, f"{count} x {layer}", bar, rows, failures)
            yield


def main(*, scheme: str, images: Sequence[int], csv: Path | None) -> None:
    """Measures and prints the report, if interrupted of what there is; see `python -m jax_qmm bench --help`."""
    _, gpu = measure.open_gpu("bench")
    peak = gpu.peak if scheme == "conv" else gpu.peak / 2
    print(f"jax_qmm on {_extension.described_gpu()}, jax {jax.__version__}, {WORDS[scheme]}", flush=True)
    layers = layers_of(scheme)
    run = functools.partial(measure_all, scheme, layers, images)
    schemes.run_and_report(run, len(layers) * len(images), peak, NOTES, csv, gpu.name)
