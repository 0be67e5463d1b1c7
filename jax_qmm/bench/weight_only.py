"""`python -m jax_qmm bench --scheme w4a16`: products of float activations, against the roofline and XLA's bfloat16."""

import csv
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench import measure
from jax_qmm.bench.report import align, format_us
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W4A16, W8A16
from jax_qmm.text_table import format_table

SCHEMES = {"w4a16": W4A16(), "w8a16": W8A16()}
LABELS = {"ours": "jax_qmm in jit", "xla_bf16": "bf16 XLA in jit"}
NOTES = """\
The bytes are those of the packed weight with its scales, of x and of the result, both bfloat16; the peak is that of
dense bfloat16 products, half of that of 8 bits.
A copy reads and writes: kernels that almost only read, those of small M, pass the roofline by several per cent.
us: by JAX's profiler, in one program of many such calls, whose operands together exceed the L2 cache several times.
Both are measured three times, each time in another random order; the times are the medians.
(1.20x): takes 1.20 times as long as jax_qmm."""

Shape = tuple[int, int, int]  # M, N, K


@dataclasses.dataclass
class Row:
    """One product and its times.

    Attributes:
      shape: M, N and K.
      kernel: what runs it, in words.
      nbytes: bytes of the operands and the result.
      roofline_us: microseconds of the bytes, or of the operations at the peak.
      times: microseconds of each turn by key of `LABELS`; what is not there was not measured.
    """

    shape: Shape
    kernel: str
    nbytes: int
    roofline_us: float
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def us(self) -> dict[str, float]:
        """The median of each one's turns."""
        return {name: median(times) for name, times in self.times.items()}


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


def measure_all(scheme, shapes: Sequence[Shape], bandwidth: float, peak: float, rows: list[Row], failures: list[str]):
    """Measures and shows a progress bar; appends to `rows` and `failures` as it goes."""
    with tqdm(shapes, desc="bench", unit="product") as bar:
        for shape in bar:
            m, n, k = shape
            size = nbytes(scheme, shape)
            roofline_us = 1e6 * max(size / bandwidth, 2 * m * n * k / peak)
            operands = jax.eval_shape(lambda: (jnp.zeros((m, k), jnp.bfloat16), _weight(scheme, n, k, 0)))
            (op,) = jax_qmm.explain(jax_qmm.block_scaled_mm, *operands).rows
            row = Row(shape, op.runs_on, size, roofline_us)
            timed = calls(scheme, shape, roofline_us)
            for name in measure.turns(timed, str(shape)):
                bar.set_postfix_str(f"M {m}, N {n}, K {k}, {LABELS[name]}")
                try:
                    us = timed[name]()
                except RuntimeError as error:  # of CUDA or XLA: too little memory
                    first_line = str(error).partition("\n")[0]
                    failures.append(f"{LABELS[name]} failed on M {m}, N {n}, K {k}: {first_line}")
                    continue
                row.times.setdefault(name, []).append(us)
                if len(row.times.get("ours", ())) == 1 and row not in rows:
                    rows.append(row)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each weight; XLA's time has in parentheses how many times ours it is."""
    header = ("M", "us", "roofline", "TB/s", "Tera-ops/s", LABELS["xla_bf16"], "kernel")
    for (n, k), group in itertools.groupby(rows, lambda row: row.shape[1:]):
        lines = []
        for row in group:
            m, us, peer = row.shape[0], row.us["ours"], row.us.get("xla_bf16")
            lines.append(
                (
                    str(m),
                    format_us(us),
                    f"{row.roofline_us / us:.0%}",
                    f"{row.nbytes / us / 1e6:.2f}",
                    f"{2 * m * n * k / us / 1e6:.0f}",
                    format_us(peer) + (f" ({peer / us:.2f}x)" if peer else ""),
                    row.kernel,
                )
            )
        yield f"N {n}, K {k}\n{align(header, lines)}"


def summary(rows: Sequence[Row]) -> str:
    """The part of the roofline and the speed over bfloat16: the mean and the worst."""
    lines = []
    shares = [(row.roofline_us / row.us["ours"], row) for row in rows]
    speeds = [(row.us["xla_bf16"] / row.us["ours"], row) for row in rows if "xla_bf16" in row.us]
    for words, text, values in (("of the roofline", "{:.0%}", shares), ("speed over bf16 XLA", "{:.2f}x", speeds)):
        if values:
            value, worst = min(values, key=lambda pair: pair[0])
            mean = geometric_mean(value for value, _ in values)
            at = "M {}, N {}, K {}".format(*worst.shape)
            lines.append((words, f"{text.format(mean)} of {len(values)}", text.format(value), at))
    return format_table(("", "geometric mean", "worst", "at"), lines)


def write_csv(path: Path, rows: Sequence[Row], scheme: str, bandwidth: float, gpu: str) -> None:
    """Writes a line for each product: microseconds, the median, the least and the most of the turns."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        times = [f"{name}{of}_us" for name in LABELS for of in ("", "_least", "_most")]
        writer.writerow(["gpu", "scheme", "m", "n", "k", "kernel", "copy_tb_per_s", "roofline_us", *times])
        for row in rows:
            turns = [row.times.get(name) for name in LABELS]
            us = [f"{of(each):.3f}" if each else "" for each in turns for of in (median, min, max)]
            rates = f"{bandwidth / 1e12:.3f}", f"{row.roofline_us:.3f}"
            writer.writerow([gpu, scheme, *row.shape, row.kernel, *rates, *us])


def main(*, scheme: str, shapes: Sequence[Shape], csv: Path | None) -> None:
    """Measures and prints the report, if interrupted of what there is; see `python -m jax_qmm bench --help`."""
    _, gpu = measure.open_gpu("bench")
    peak = gpu.peak / 2
    print(f"jax_qmm on {_extension.described_gpu()}, jax {jax.__version__}, {SCHEMES[scheme]}", flush=True)
    bandwidth = measure.copy_bandwidth()
    rows, failures = [], []
    try:
        measure_all(SCHEMES[scheme], shapes, bandwidth, peak, rows, failures)
    finally:
        if len(rows) < len(shapes):
            failures.append(f"{len(rows)} of {len(shapes)} products were measured")
        if rows:
            roofline = f"roofline: bytes at {bandwidth / 1e12:.2f} TB/s, what a copy reached in this run, or "
            roofline += f"operations at {peak / 1e12:.1f} Tera-ops/s"
            print()
            print(*tables(rows), summary(rows), f"{roofline}\n{NOTES}", sep="\n\n")
        print(*failures, sep="\n", end="\n" if failures else "")
        if rows and csv:
            write_csv(csv, rows, scheme, bandwidth, gpu.name)
            print(f"wrote {csv}")
