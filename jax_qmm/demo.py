"""`python -m jax_qmm demo`: a small transformer on handwritten digits, float32 and quantized eight ways."""

import dataclasses
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jax_qmm
from jax_qmm.explanation import explain
from jax_qmm.models.report import nbytes
from jax_qmm.text_table import format_bytes, format_table

CLASSES = 10
WIDTH = 64
HEADS = 4
BLOCKS = 2
HELD_OUT = 500
BATCH = 64
SCHEMES = {
    "int8 symmetric": jax_qmm.W8A8(),
    "int8 asymmetric": jax_qmm.W8A8(symmetric=False),
    "fp8 e4m3": jax_qmm.W8A8(dtype=jnp.float8_e4m3fn),
    "int8 weights": jax_qmm.W8A16(),
    "int4 weights": jax_qmm.W4A16(32, symmetric=False, clip_search=True),
    "int8 blocks": jax_qmm.W8A8(tile_size=64),
    "fp8 blocks": jax_qmm.W8A8(dtype=jnp.float8_e4m3fn, tile_size=64, weight_tile=(64, 64)),
    "int4 x int8": jax_qmm.W4A8(32, symmetric=False, clip_search=True),
}


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class DigitTransformer(nnx.Module):
    """Reads the rows of an 8x8 image as eight tokens and names the digit.

    Args:
      rngs: for the initial parameters.

    >>> model = DigitTransformer(rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 8, 8))).shape
    (3, 10)
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(8, WIDTH, rngs=rngs)
        self.position = nnx.Embed(8, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        """images are float32 `(batch, 8, 8)` in [0, 1]; returns logits `(batch, 10)`."""
        x = self.embed(images) + self.position(jnp.arange(8))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=-2))


def digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """scikit-learn's 1797 handwritten digits, split by `seed` with each digit's share kept.

    Returns:
      images to train on `(1297, 8, 8)` in [0, 1], images held out `(500, 8, 8)`, and the labels of both.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = (np.asarray(pixels).reshape(-1, 8, 8) / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=HELD_OUT, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = map(np.asarray, parts)
    return train_images, test_images, train_labels, test_labels


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss(model):
        # Smooth labels gain a point of accuracy on the held-out images.
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
        return optax.softmax_cross_entropy(model(images), targets).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train(images, labels, *, epochs: int, seed: int, make: Callable[..., Any] = DigitTransformer) -> Any:
    """Trains a model with AdamW on a one-cycle schedule and shows a progress bar.

    Args:
      images: `(count, 8, 8)` in [0, 1].
      labels: `(count,)` integers in [0, 10).
      epochs: passes over the images.
      seed: of the initial parameters and of the order of the images.
      make: the model, of images to logits, given `rngs`.

    Returns:
      The trained float32 model.
    """
    model = make(rngs=nnx.Rngs(seed))
    steps = len(images) // BATCH
    schedule = optax.cosine_onecycle_schedule(epochs * steps, 3e-3)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.05), wrt=nnx.Param)
    rng = np.random.default_rng(seed)
    with tqdm(total=epochs * steps, desc="train", unit="step") as bar:
        for _ in range(epochs):
            for chosen in rng.permutation(len(images))[: steps * BATCH].reshape(steps, BATCH):
                loss = train_step(model, optimizer, images[chosen], labels[chosen])
                bar.update()
            bar.set_postfix(loss=f"{loss:.4f}")
    return model


@dataclasses.dataclass(frozen=True)
class Result:
    """What one variant of the model did on the held-out images.

    Attributes:
      name: "float32" or the scheme in words.
      accuracy: share of the images named rightly.
      nbytes: bytes of all parameters.
      logit_difference: largest absolute difference between its logits and those of float32.
      seconds: median time of one batch of all held-out images, after compilation.
      runs_on: "XLA", "kernel", or "reference: why".
      operations: the layers quantized and, as a table, what each operation ran on; "" for float32.
    """

    name: str
    accuracy: float
    nbytes: int
    logit_difference: float
    seconds: float
    runs_on: str
    operations: str


def run_batch(model, images, repeats: int = 20) -> tuple[np.ndarray, float]:
    """The model's logits for `images` and the median seconds of `repeats` runs after the first."""
    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, images: nnx.merge(graph, state)(images))
    images = jnp.asarray(images)
    logits = jax.block_until_ready(forward(state, images))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(forward(state, images))
        seconds.append(time.perf_counter() - start)
    return np.asarray(logits), float(np.median(seconds))


def compare(model, images, labels) -> list[Result]:
    """Runs the float32 model and its quantized variants.

    Args:
      model: a trained float32 model.
      images: `(count, 8, 8)` in [0, 1], not trained on.
      labels: `(count,)` integers in [0, 10).

    Returns:
      A result for float32 and one for each of `SCHEMES`, in this order.
    """
    variants = {"float32": (model, "XLA", "")}
    for name, scheme in SCHEMES.items():
        quantized, report = jax_qmm.nnx.quantize_model(model, [jax_qmm.Rule(".*", scheme)])
        left = "".join(f", not {row.path} ({row.reason})" for row in report.skipped)
        layers = f"{len(report.quantized)} of {len(report.rows)} layers quantized{left}"
        operations = f"{layers}\n{explain(quantized, images)}"
        variants[name] = quantized, report.quantized[0].runs_on, operations

    results, exact = [], None
    for name, (variant, runs_on, operations) in tqdm(variants.items(), desc="run", unit="model"):
        logits, seconds = run_batch(variant, images)
        exact = logits if exact is None else exact
        results.append(
            Result(
                name=name,
                accuracy=float((logits.argmax(-1) == labels).mean()),
                nbytes=nbytes(nnx.state(variant, (nnx.Param, jax_qmm.nnx.QuantizedParam))),
                logit_difference=float(np.abs(logits - exact).max()),
                seconds=seconds,
                runs_on=runs_on,
                operations=operations,
            )
        )
    return results


def table(results: list[Result]) -> str:
    """The results as text: what ran where in each quantized model, then a line for each model."""
    header = ("model", "accuracy", "parameters", "largest logit difference", "time per batch", "runs on")
    rows = [
        (
            r.name,
            f"{r.accuracy:.1%}",
            format_bytes(r.nbytes),
            f"{r.logit_difference:.4f}",
            f"{r.seconds * 1e3:.2f} ms",
            r.runs_on,
        )
        for r in results
    ]
    operations = [f"{r.name}: {r.operations}\n" for r in results if r.operations]
    return "\n".join([*operations, format_table(header, rows)])


def figure(results: list[Result], title: str) -> Figure:
    """The results as bars, one panel for each quantity, and below them what ran where."""
    panels = [
        ("accuracy", [100 * r.accuracy for r in results], "{:.1f} %"),
        ("parameters", [r.nbytes / 1024 for r in results], "{:.0f} KiB"),
        ("largest logit difference", [r.logit_difference for r in results], "{:.3f}"),
        (f"time per batch of {HELD_OUT}", [r.seconds * 1e3 for r in results], "{:.2f} ms"),
    ]
    drawing = Figure(figsize=(12, 5.4), layout="constrained")
    drawing.suptitle(title, fontsize="medium", x=0.01, ha="left")
    names = [r.name for r in results]
    colors = ["0.6", "C0", "C0", "C1", "C2", "C2", "C0", "C1", "C2"]
    for axes, (quantity, values, text) in zip(drawing.subplots(1, len(panels), sharey=True), panels):
        bars = axes.barh(names, values, color=colors, height=0.6)
        axes.bar_label(bars, [text.format(value) for value in values], padding=4)
        axes.set_title(quantity, fontsize="medium")
        axes.set_xlim(0, 1.4 * max(values))
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    axes.invert_yaxis()  # shared: float32 on top
    ran = "\n".join(["what ran where", *(f"{r.name}: {r.runs_on}" for r in results)])
    drawing.supxlabel(ran, fontsize="small", x=0.01, ha="left")
    return drawing


def main(*, seed: int, epochs: int, png: Path | None) -> None:
    """Trains, quantizes, and prints the comparison; see `python -m jax_qmm demo --help`."""
    where = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
    print(where)
    train_images, test_images, train_labels, test_labels = digits(seed)
    model = train(train_images, train_labels, epochs=epochs, seed=seed)
    with warnings.catch_warnings():
        # The report says the same for each layer.
        warnings.filterwarnings("ignore", message="jax_qmm.* runs on the pure-JAX reference")
        results = compare(model, test_images, test_labels)
    print(f"\n{table(results)}\n")
    print(f"Accuracy, logits and time are those of one batch of {len(test_images)} images not trained on.")
    if any(r.runs_on.startswith("reference") for r in results):
        print("Times of the reference show that it works without a GPU, not how fast the kernels are.")
    if png:
        title = f"A transformer of {BLOCKS} blocks on {len(test_images)} handwritten digits, {where}"
        figure(results, title).savefig(png, format="png", dpi=150)
        print(f"wrote {png}")
