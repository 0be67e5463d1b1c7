"""The benchmark's results as text and as CSV."""

import csv
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from jax_qmm.text_table import format_table

Shape = tuple[int, int, int]  # M, N, K
Labels = Mapping[str, tuple[str, str | None]]  # by key: the name in tables, and the key that it is compared with


@dataclasses.dataclass
class Row:
    """One product and its times.

    Attributes:
      kind: of its operands, in a word.
      shape: M, N and K.
      columns: what the CSV says of it before its shape.
      kernel: the kernel chosen and why, in words.
      nbytes: of the operands and the result.
      roofline_us: microseconds of the bytes, or of the operations at the peak.
      labels: what may be measured; "ours" is what the table compares with the roofline.
      layer: what has this N and K, where these do not say it.
      times: microseconds of each turn by key of `labels`; what is not there was not measured.
    """

    kind: str
    shape: Shape
    columns: Mapping[str, str]
    kernel: str
    nbytes: int
    roofline_us: float
    labels: Labels
    layer: str = ""
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def us(self) -> dict[str, float]:
        """The median of each one's turns."""
        return {name: median(times) for name, times in self.times.items()}

    def share(self, name: str) -> float:
        """The part of the roofline that `name` reaches."""
        return self.roofline_us / self.us[name]

    def speedup(self, name: str) -> float | None:
        """How many times as long `name` takes as what it is compared with."""
        mine = self.labels[name][1]
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
    """A table for each kind and weight; each peer's time has in parentheses how many times ours it is."""
    others = [name for name in rows[0].labels if name != "ours"]
    header = ("M", "us", "roofline", "TB/s", "Tera-ops/s", *(rows[0].labels[name][0] for name in others), "kernel")
    for (*words, n, k), group in itertools.groupby(rows, lambda row: (row.kind, row.layer, *row.shape[1:])):
        lines = []
        for row in group:
            m, us = row.shape[0], row.us["ours"]
            lines.append(
                (
                    str(m),
                    format_us(us),
                    f"{row.share('ours'):.0%}",
                    f"{row.nbytes / us / 1e6:.2f}",
                    f"{2 * m * n * k / us / 1e6:.0f}",
                    *(_with_speedup(row, name) for name in others),
                    row.kernel,
                )
            )
        yield f"{', '.join(filter(None, words))}, N {n}, K {k}\n{align(header, lines)}"


def _with_speedup(row, name):
    speedup = row.speedup(name)
    return format_us(row.us.get(name)) + (f" ({speedup:.2f}x)" if speedup else "")


def summary(rows: Sequence[Row]) -> str:
    """For each kind, the part of the roofline and the speed over each peer: the mean and the worst."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        lines.append((kind, "of the roofline", *_mean_and_worst([(row.share("ours"), row) for row in mine], "{:.0%}")))
        for name, (label, _) in rows[0].labels.items():
            speedups = [(speedup, row) for row in mine if (speedup := row.speedup(name))]
            if speedups:
                lines.append((kind, f"speed over {label}", *_mean_and_worst(speedups, "{:.2f}x")))
    return format_table(("", "", "geometric mean", "worst", "at"), lines)


def _mean_and_worst(values, text):
    value, worst = min(values, key=lambda pair: pair[0])
    mean = geometric_mean(value for value, _ in values)
    at = "M {}, N {}, K {}".format(*worst.shape) + (worst.layer and f" ({worst.layer})")
    return f"{text.format(mean)} of {len(values)}", text.format(value), at


def write_csv(path: Path, rows: Sequence[Row], bandwidth: float, gpu: str) -> None:
    """Writes a line for each product.

    Times are in microseconds, the median, the least and the most of the turns; what was not measured is empty.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        times = [f"{name}{of}_us" for name in rows[0].labels for of in ("", "_least", "_most")]
        writer.writerow(["gpu", *rows[0].columns, "m", "n", "k", "kernel", "copy_tb_per_s", "roofline_us", *times])
        for row in rows:
            turns = [row.times.get(name) for name in row.labels]
            us = [f"{of(each):.3f}" if each else "" for each in turns for of in (median, min, max)]
            rates = f"{bandwidth / 1e12:.3f}", f"{row.roofline_us:.3f}"
            writer.writerow([gpu, *row.columns.values(), *row.shape, row.kernel, *rates, *us])


def show(rows: Sequence[Row], failures: Sequence[str], roofline: str, notes: str) -> None:
    """Prints the tables, the summary, how they are to be read, and what failed."""
    if rows:
        print()
        print(*tables(rows), summary(rows), f"{roofline}\n{notes}", sep="\n\n")
    print(*failures, sep="\n", end="\n" if failures else "")


def roofline_words(bandwidth: float, peak: float) -> str:
    """What the roofline is made of.

    >>> roofline_words(4.3e12, 989.5e12)
    'roofline: bytes at 4.30 TB/s, what a copy reached in this run, or operations at 989.5 Tera-ops/s'
    """
    rate = f"bytes at {bandwidth / 1e12:.2f} TB/s, what a copy reached in this run"
    return f"roofline: {rate}, or operations at {peak / 1e12:g} Tera-ops/s"
