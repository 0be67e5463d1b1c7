"""The benchmark's results as text and as CSV."""

import csv
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from jax_qmm.bench.measure import nbytes
from jax_qmm.bench.shapes import DTYPES
from jax_qmm.text_table import format_table
from jax_qmm.tuning import Product

# What is measured: its name in tables, and what of ours its time is compared with.
LABELS = {
    "ours": ("jax_qmm", None),
    "cublaslt": ("cuBLASLt", "ours"),
    "cublaslt_tensorwise": ("cuBLASLt tensorwise", "ours"),
    "cublas_bf16": ("bf16 cuBLAS", "ours"),
    "jit": ("jax_qmm in jit", None),
    "xla": ("XLA in jit", "jit"),
    "xla_bf16": ("bf16 XLA in jit", "jit"),
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclasses.dataclass
class Row:
    """One product and its times.

    Attributes:
      product: its shape and dtypes.
      kernel: the kernel chosen and why, in words.
      roofline_us: microseconds by `measure.roofline_us`.
      times: microseconds of each turn by key of `LABELS`; what is not there was not measured.
    """

    product: Product
    kernel: str
    roofline_us: float
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def us(self) -> dict[str, float]:
        """The median of each one's turns."""
        return {name: median(times) for name, times in self.times.items()}

    def share(self, name: str) -> float:
        """The part of the roofline that `name` reaches."""
        return self.roofline_us / self.us[name]

    def speedup(self, name: str) -> float | None:
        """How many times as long `name` takes as ours does, measured in the same way."""
        mine = LABELS[name][1]
        return self.us[name] / self.us[mine] if mine in self.us and name in self.us else None


def align(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with all columns but the last `left` ones flush right; columns without text are left out.

    >>> print(align(("M", "us", "kernel"), [("1", "9.5", "stream"), ("128", "10.5", "gemm")]))
      M    us  kernel
      1   9.5  stream
    128  10.5  gemm
    """
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    flush = len(header) - left
    header, *rows = (
        [cell and cell.rjust(width) if i < flush else cell for i, (cell, width) in enumerate(zip(line, widths))]
        for line in [header, *rows]
    )
    return format_table(header, rows)


def format_us(microseconds: float | None) -> str:
    """Three digits or more, as the runs repeat to: `9.53`, `95.3`, `953`.

    >>> [format_us(us) for us in (9.531, 95.31, 9531.2, None)]
    ['9.53', '95.3', '9531', '']
    """
    if microseconds is None:
        return ""
    return f"{microseconds:.{2 if microseconds < 10 else 1 if microseconds < 100 else 0}f}"


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each dtype and weight; each peer's time has in parentheses how many times ours it is."""
    others = [name for name in LABELS if name != "ours"]
    header = ("M", "us", "roofline", "TB/s", "Tera-ops/s", *(LABELS[name][0] for name in others), "kernel")
    for key, group in itertools.groupby(rows, lambda row: (row.product.dtype, row.product.n, row.product.k)):
        dtype, n, k = key
        lines = []
        for row in group:
            m, us = row.product.m, row.us["ours"]
            lines.append(
                (
                    str(m),
                    format_us(us),
                    f"{row.share('ours'):.0%}",
                    f"{nbytes(row.product) / us / 1e6:.2f}",
                    f"{2 * m * n * k / us / 1e6:.0f}",
                    *(_with_speedup(row, name) for name in others),
                    row.kernel,
                )
            )
        yield f"{KINDS[dtype]}, N {n}, K {k}\n{align(header, lines)}"


def _with_speedup(row, name):
    speedup = row.speedup(name)
    return format_us(row.us.get(name)) + (f" ({speedup:.2f}x)" if speedup else "")


def summary(rows: Sequence[Row]) -> str:
    """For each dtype, the part of the roofline and the speed over each peer: the mean and the worst."""
    lines = []
    for dtype, kind in KINDS.items():
        mine = [row for row in rows if row.product.dtype == dtype]
        if mine:
            shares = [(row.share("ours"), row) for row in mine]
            lines.append((kind, "of the roofline", *_mean_and_worst(shares, "{:.0%}")))
        for name, (label, _) in LABELS.items():
            speedups = [(speedup, row) for row in mine if (speedup := row.speedup(name))]
            if speedups:
                lines.append((kind, f"speed over {label}", *_mean_and_worst(speedups, "{:.2f}x")))
    return format_table(("dtype", "", "geometric mean", "worst", "at"), lines)


def _mean_and_worst(values, text):
    value, worst = min(values, key=lambda pair: pair[0])
    mean = geometric_mean(value for value, _ in values)
    at = f"M {worst.product.m}, N {worst.product.n}, K {worst.product.k}"
    return f"{text.format(mean)} of {len(values)}", text.format(value), at


def write_csv(path: Path, rows: Sequence[Row], bandwidth: float, gpu: str) -> None:
    """Writes a line for each product.

    Times are in microseconds, the median, the least and the most of the turns; what was not measured is empty.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "gpu",
                "dtype",
                "out_dtype",
                "m",
                "n",
                "k",
                "kernel",
                "copy_tb_per_s",
                "roofline_us",
                *(f"{name}{of}_us" for name in LABELS for of in ("", "_least", "_most")),
            ]
        )
        for row in rows:
            p = row.product
            times = [row.times.get(name) for name in LABELS]
            writer.writerow(
                [
                    gpu,
                    KINDS[p.dtype],
                    p.out_dtype,
                    p.m,
                    p.n,
                    p.k,
                    row.kernel,
                    f"{bandwidth / 1e12:.3f}",
                    f"{row.roofline_us:.3f}",
                    *(f"{of(turns):.3f}" if turns else "" for turns in times for of in (median, min, max)),
                ]
            )
