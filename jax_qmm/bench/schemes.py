"""`python -m jax_qmm bench --scheme w4a16`: products of bfloat16 activations, the roofline and XLA's bfloat16."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench import measure, report
from jax_qmm.bench.report import Row, Shape
from jax_qmm.dtypes import FLOAT8
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W4A8, W4A16, W8A8, W8A16, Scheme
from jax_qmm.text_table import first_line

SCHEMES = {
    "w4a16": W4A16(),
    "w8a16": W8A16(),
    "w8a8-block": W8A8(tile_size=128),
    "fp8-block": W8A8(FLOAT8, tile_size=128, weight_tile=(128, 128)),
    "w4a8": W4A8(),
    "w4a8-fp8": W4A8(activation_dtype=FLOAT8),
}
LABELS = {"ours": ("jax_qmm in jit", None), "xla_bf16": ("bf16 XLA in jit", "ours")}
NOTES = """\
The bytes are those of the weight with its scales, of x and of the result, both bfloat16. What quantizes x, and makes
8 bits of int4 weights, is in the time and not in the bytes. The peak is that of dense products of what is multiplied:
8 bits, or bfloat16, which has half of it.
A copy reads and writes: kernels that almost only read, those of small M, pass the roofline by several per cent.
us: by JAX's profiler, in one program of many such calls, whose operands together exceed the L2 cache several times.
Both are measured three times, each time in another random order; the times are the medians.
(1.20x): takes 1.20 times as long as jax_qmm."""


def xla_bf16(x, w):
    """The product that quantizing replaces."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def product(scheme: Scheme) -> Callable[[jax.Array, QArray], jax.Array]:
    """The product of x `(M, K)` and a weight `(N, K)`, and all that the scheme does to them."""

    def ours(x, w):
        return jax_qmm.einsum("mk,nk->mn", x, w, scheme=scheme, preferred_element_type=jnp.bfloat16)

    return ours


def multiplies_8_bits(scheme: Scheme) -> bool:
    """Whether activations are quantized."""
    return isinstance(scheme, W8A8 | W4A8)


def nbytes(scheme: Scheme, shape: Shape) -> int:
    """Bytes of x, of a weight with its scales, and of the result.

    >>> nbytes(W4A16(), (1, 4096, 8192))  # values, scales, x and y
    17850368
    """
    m, n, k = shape
    return jax.eval_shape(lambda: weight_of(scheme, n, k, 0)).nbytes + 2 * m * k + 2 * m * n


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def weight_of(scheme: Scheme, n: int, k: int, seed: Any) -> QArray:
    """A random weight `(N, K)` as the scheme quantizes it."""
    return scheme.quantize_weight(jax.random.normal(jax.random.key(seed), (n, k)), (-1,))


def calls(scheme: Scheme, shape: Shape, roofline_us: float) -> dict[str, Callable[[], float]]:
    """What measures, inside jitted programs: the scheme's product, and XLA's of bfloat16."""
    m, n, k = shape
    x = lambda i: jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16)
    weight = functools.partial(weight_of, scheme, n, k)
    dense = lambda i: jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16)
    call = lambda function, w, size: measure.jit_call(function, lambda i: (x(i), w(i)), size, roofline_us)
    return {
        "ours": call(product(scheme), weight, nbytes(scheme, shape)),
        "xla_bf16": call(xla_bf16, dense, 2 * (n * k + m * k + m * n)),
    }


def measure_all(
    name: str, shapes: Sequence[Shape], bandwidth: float, peak: float, rows: list[Row], failures: list[str]
) -> Iterator[None]:
    """Measures the scheme of that name and shows a progress bar; appends to `rows` and `failures`, and yields each."""
    scheme = SCHEMES[name]
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    tqdm.write("XLA chooses its kernels")
    try:
        measure.autotune_xla([(xla_bf16, (bf16(m, k), bf16(n, k))) for m, n, k in shapes])
    except RuntimeError as error:  # one by one, then
        failures.append(f"XLA failed on all products together: {first_line(error)}")
    with tqdm(shapes, desc="bench", unit="product") as bar:
        for shape in bar:
            m, n, k = shape
            size = nbytes(scheme, shape)
            roofline_us = 1e6 * max(size / bandwidth, 2 * m * n * k / peak)
            operands = jax.eval_shape(lambda: (jnp.zeros((m, k), jnp.bfloat16), weight_of(scheme, n, k, 0)))
            *_, op = jax_qmm.explain(product(scheme), *operands).rows  # what quantizes x comes before it
            row = Row(name, shape, {"scheme": name}, op.runs_on, size, roofline_us, LABELS)
            timed = calls(scheme, shape, roofline_us)
            measure_row(row, timed, f"M {m}, N {n}, K {k}", bar, rows, failures)
            yield


def measure_row(
    row: Row,
    timed: dict[str, Callable[[], float]],
    where: str,
    bar: tqdm,
    rows: list[Row],
    failures: list[str],
) -> None:
    """Measures in turns what takes part in a row, which `where` names; appends it to `rows` when ours is measured."""
    for what in measure.turns(timed, where):
        label = row.labels[what][0]
        bar.set_postfix_str(f"{where}, {label}")
        try:
            us = timed[what]()
        except RuntimeError as error:  # of CUDA or XLA: too little memory, a convolution that it lacks
            failures.append(f"{label} failed on {where}: {first_line(error)}")
            continue
        row.times.setdefault(what, []).append(us)
        if what == "ours" and len(row.times[what]) == 1:
            rows.append(row)


def run_and_report(
    run: Callable[[float, float, list[Row], list[str]], Iterator[None]],
    count: int,
    peak: float,
    notes: str,
    csv: Path | None,
    gpu: str,
) -> None:
    """Calls `run` with a copy's bandwidth, the peak, and lists for `count` rows and for failures; reports these.

    The CSV is written whenever `run` yields, too: XLA may end the process, and what took minutes with it.
    """
    bandwidth = measure.copy_bandwidth()
    rows, failures = [], []
    try:
        for _ in run(bandwidth, peak, rows, failures):
            if rows and csv:
                report.write_csv(csv, rows, bandwidth, gpu)
    finally:
        if len(rows) < count:
            failures.append(f"{len(rows)} of {count} products were measured")
        report.show(rows, failures, report.roofline_words(bandwidth, peak), notes)
        if rows and csv:
            report.write_csv(csv, rows, bandwidth, gpu)
            print(f"wrote {csv}")


def main(*, scheme: str, shapes: Sequence[Shape], csv: Path | None) -> None:
    """Measures and prints the report, if interrupted of what there is; see `python -m jax_qmm bench --help`."""
    _, gpu = measure.open_gpu("bench")
    peak = gpu.peak if multiplies_8_bits(SCHEMES[scheme]) else gpu.peak / 2
    print(f"jax_qmm on {_extension.described_gpu()}, jax {jax.__version__}, {SCHEMES[scheme]}", flush=True)
    run_and_report(functools.partial(measure_all, scheme, shapes), len(shapes), peak, NOTES, csv, gpu.name)
