"""Times ResNet-50 as one chain of int8 convolutions beside the same network in bfloat16, each in one jitted program.

    python benchmarks/conv/resnet50.py --csv resnet50.csv

The int8 network has jax_qmm's convolutions, which add shortcuts and give int8 results; XLA pools. Batch normalization
is folded into weights and bias, as for serving. Weights are random; how near the logits of both networks are, as the
least cosine of an image's, says that they compute the same. Needs a GPU that has kernels.
"""

import argparse
import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_qmm
from jax_qmm import QArray
from jax_qmm.bench import convs, measure

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, and channels within them; four times as many leave a block
STEP = 0.06  # of int8 activations, whose deviation is about 1: up to 7.6


def make_parameters(seed: int) -> dict:
    """Weights `(O, H, W, I)` and bias `(O,)` in float32, by the name of a convolution."""
    rng = np.random.default_rng(seed)

    def layer(out, window, channels, gain=1.0):
        spread = gain * (2 / (window**2 * channels)) ** 0.5
        w = rng.normal(0, spread, (out, window, window, channels))
        return jnp.asarray(w, jnp.float32), jnp.asarray(rng.normal(0, 0.05, out), jnp.float32)

    found, channels = {"first": layer(64, 7, 3)}, 64
    for s, (blocks, inner) in enumerate(STAGES):
        for b in range(blocks):
            name = f"{s}.{b}"
            found[f"{name} in"] = layer(inner, 1, channels)
            found[f"{name} window"] = layer(inner, 3, inner)
            found[f"{name} out"] = layer(4 * inner, 1, inner, 0.3)  # sums over blocks stay of the size of 1
            if b == 0:
                found[f"{name} shortcut"] = layer(4 * inner, 1, channels, 0.7)
            channels = 4 * inner
    found["last"] = layer(1000, 1, channels)
    return found


def geometry(x, w, stride: int) -> dict:
    return convs.geometry(convs.Layer(x.shape[1], x.shape[3], w.shape[0], w.shape[1], stride))


def in_bf16(parameters):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters)


def bf16_conv(x, layer, stride, activation, shortcut=None):
    w, bias = layer
    y = jax.lax.conv_general_dilated(x, w, **geometry(x, w, stride)) + bias
    y = y if shortcut is None else y + shortcut
    return jax.nn.relu(y) if activation else y


def bf16_head(x, layer):
    w, bias = layer
    return x.mean((1, 2)) @ w[:, 0, 0].T + bias


def in_int8(parameters):
    """Weights with a scale for each output channel."""
    return {name: (jax_qmm.quantize(w, axis=(1, 2, 3)), bias) for name, (w, bias) in parameters.items()}


def int8_conv(x, layer, stride, activation, shortcut=None):
    w, bias = layer
    quantized = lambda values: QArray(values, jnp.full((1,) * 4, STEP, jnp.float32))
    given = dict(bias=bias, activation="relu" if activation else None, out_dtype=jnp.int8, out_scale=STEP)
    residual = None if shortcut is None else quantized(shortcut)
    return jax_qmm.conv_general_dilated(quantized(x), w, **geometry(x, w, stride), residual=residual, **given)


def int8_head(x, layer):
    w, bias = layer
    features = jax_qmm.quantize(STEP * x.astype(jnp.float32).mean((1, 2)), jnp.int8)
    return jax_qmm.scaled_mm(
        features.qvalue, w.qvalue[:, 0, 0], features.scale, w.scale.reshape(-1), bias, out_dtype=jnp.bfloat16
    )


def resnet50(conv, head, parameters, x):
    """Logits `(images, 1000)` of `(images, 224, 224, 3)`, by what computes a convolution and the last layer."""
    x = conv(x, parameters["first"], 2, True)
    least = jnp.array(-128 if x.dtype == jnp.int8 else -jnp.inf, x.dtype)
    x = jax.lax.reduce_window(x, least, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for s, (blocks, _) in enumerate(STAGES):
        for b in range(blocks):
            name, stride = f"{s}.{b}", 2 if s > 0 and b == 0 else 1
            shortcut = conv(x, parameters[f"{name} shortcut"], stride, False) if b == 0 else x
            y = conv(x, parameters[f"{name} in"], 1, True)
            y = conv(y, parameters[f"{name} window"], stride, True)
            x = conv(y, parameters[f"{name} out"], 1, True, shortcut)
    return head(x, parameters["last"])


def int8_resnet50(parameters, x):
    return resnet50(int8_conv, int8_head, parameters, x)


def bf16_resnet50(parameters, x):
    return resnet50(bf16_conv, bf16_head, parameters, x)


def least_cosine(a, b) -> float:
    a, b = (np.asarray(each, np.float64) for each in (a, b))
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def measure_images(images: int, parameters) -> dict:
    """A line of the CSV."""
    rng = np.random.default_rng(images)
    x = jnp.asarray(rng.normal(size=(images, 224, 224, 3)), jnp.float32)
    int8 = in_int8(parameters), jnp.clip(jnp.rint(x / STEP), -127, 127).astype(jnp.int8)
    bf16 = in_bf16(parameters), x.astype(jnp.bfloat16)
    cosine = least_cosine(jax.jit(int8_resnet50)(*int8), jax.jit(bf16_resnet50)(*bf16))
    calls = {
        name: lambda function=function, operands=operands: measure.jit_us(function, [operands] * 2)
        for name, function, operands in (("int8_us", int8_resnet50, int8), ("bf16_us", bf16_resnet50, bf16))
    }
    times = {name: float(np.median(each)) for name, each in measure.times(calls, str(images)).items()}
    return {"images": images, **{name: f"{us:.1f}" for name, us in times.items()}, "cosine": f"{cosine:.5f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    _, gpu = measure.open_gpu("resnet50.py")
    parameters = make_parameters(0)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["gpu", "images", "int8_us", "bf16_us", "cosine"])
        writer.writeheader()
        for images in tqdm((1, 8, 64), unit="batch"):
            writer.writerow({"gpu": gpu.name, **measure_images(images, parameters)})
            file.flush()


if __name__ == "__main__":
    main()
