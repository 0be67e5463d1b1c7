"""`python -m jax_qmm bench --scheme w4a16`: products of float activations, against the roofline and XLA's bfloat16."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench import measure, report
from jax_qmm.bench.report import Row, Shape
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W4A16, W8A16

SCHEMES = {"w4a16": W4A16(), "w8a16": W8A16()}
LABELS = {"ours": ("jax_qmm in jit", None), "xla_bf16": ("bf16 XLA in jit", "ours")}
NOTES = """\
The bytes are those of the packed weight with its scales, of x and of the result, both bfloat16; the peak is that of
dense bfloat16 products, half of that of 8 bits.
A copy reads and writes: kernels that almost only read, those of small M, pass the roofline by several per cent.
us: by JAX's profiler, in one program of many such calls, whose operands together exceed the L2 cache several times.
Both are measured three times, each time in another random order; the times are the medians.
(1.20x): takes 1.20 times as long as jax_qmm."""


def xla_bf16(x, w):
    """The product that quantizing replaces."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def nbytes(scheme: W4A16 | W8A16, shape: Shape) -> int:
    """Bytes of x, of a packed weight with its scales, and of the result.

    >>> nbytes(W4A16(), (1, 4096, 8192))  # values, scales, x and y
    17850368
    """
    m, n, k = shape
    return jax.eval_shape(lambda: _weight(scheme, n, k, 0)).nbytes + 2 * m * k + 2 * m * n


def _weight(scheme, n, k, seed) -> QArray:
    return scheme.quantize_weight(jax.random.normal(jax.random.key(seed), (n, k)), (-1,))


def calls(scheme: W4A16 | W8A16, shape: Shape, roofline_us: float) -> dict[str, Callable[[], float]]:
    """What measures, inside jitted programs: `block_scaled_mm`, and XLA's product of bfloat16."""
    m, n, k = shape
    x = lambda i: jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16)
    packed = jax.jit(functools.partial(_weight, scheme, n, k))
    dense = lambda i: jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16)

    def timed(function, weight, size):
        sets = [(x(i), weight(i)) for i in range(measure.count_sets(size, 12))]
        return measure.jit_us(function, measure.chain(sets, roofline_us))

    return {
        "ours": lambda: timed(jax_qmm.block_scaled_mm, packed, nbytes(scheme, shape)),
        "xla_bf16": lambda: timed(xla_bf16, dense, 2 * (n * k + m * k + m * n)),
    }


def measure_all(
    name: str, shapes: Sequence[Shape], bandwidth: float, peak: float, rows: list[Row], failures: list[str]
) -> None:
    """Measures the scheme of that name and shows a progress bar; appends to `rows` and `failures` as it goes."""
    scheme = SCHEMES[name]
    with tqdm(shapes, desc="bench", unit="product") as bar:
        for shape in bar:
            m, n, k = shape
            size = nbytes(scheme, shape)
            roofline_us = 1e6 * max(size / bandwidth, 2 * m * n * k / peak)
            operands = jax.eval_shape(lambda: (jnp.zeros((m, k), jnp.bfloat16), _weight(scheme, n, k, 0)))
            (op,) = jax_qmm.explain(jax_qmm.block_scaled_mm, *operands).rows
            row = Row(name, shape, {"scheme": name}, op.runs_on, size, roofline_us, LABELS)
            timed = calls(scheme, shape, roofline_us)
            for what in measure.turns(timed, str(shape)):
                label = LABELS[what][0]
                bar.set_postfix_str(f"M {m}, N {n}, K {k}, {label}")
                try:
                    us = timed[what]()
                except RuntimeError as error:  # of CUDA or XLA: too little memory
                    first_line = str(error).partition("\n")[0]
                    failures.append(f"{label} failed on M {m}, N {n}, K {k}: {first_line}")
                    continue
                row.times.setdefault(what, []).append(us)
                if what == "ours" and len(row.times[what]) == 1:
                    rows.append(row)


def main(*, scheme: str, shapes: Sequence[Shape], csv: Path | None) -> None:
    """Measures and prints the report, if interrupted of what there is; see `python -m jax_qmm bench --help`."""
    _, gpu = measure.open_gpu("bench")
    peak = gpu.peak / 2
    print(f"jax_qmm on {_extension.described_gpu()}, jax {jax.__version__}, {SCHEMES[scheme]}", flush=True)
    bandwidth = measure.copy_bandwidth()
    rows, failures = [], []
    try:
        measure_all(scheme, shapes, bandwidth, peak, rows, failures)
    finally:
        if len(rows) < len(shapes):
            failures.append(f"{len(rows)} of {len(shapes)} products were measured")
        report.show(rows, failures, report.roofline_words(bandwidth, peak), NOTES)
        if rows and csv:
            report.write_csv(csv, rows, bandwidth, gpu.name)
            print(f"wrote {csv}")
