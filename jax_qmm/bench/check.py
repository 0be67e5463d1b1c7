"""`python -m jax_qmm bench --check FILE.csv`: whether products became slower than FILE says."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jax_qmm.bench import report
from jax_qmm.bench.shapes import DTYPES, product
from jax_qmm.tuning import Product

TOLERANCE = 0.05  # beyond the slowest turn of FILE: the same kernels, measured again later, differ by up to about that


class Reference(NamedTuple):
    """An earlier run.

    Attributes:
      path: of the CSV.
      gpu: that was measured; "" in files from before it was written there.
      us: the median and the most microseconds of jax_qmm for each product.
    """

    path: Path
    gpu: str
    us: dict[Product, tuple[float, float]]


def read(path: Path) -> Reference:
    """Reads a CSV of `bench`.

    Raises:
      ValueError: if it is none.
    """
    us, gpu = {}, ""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                m, n, k = (int(row[name]) for name in "mnk")
                median = float(row["ours_us"])
                us[product(m, n, k, DTYPES[row["dtype"]], row["out_dtype"])] = (
                    median,
                    float(row.get("ours_most_us", median)),
                )
                gpu = row.get("gpu", "")
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} can't be read as a CSV of bench: {error!r}") from None
    if not us:
        raise ValueError(f"{path} holds no products")
    return Reference(path, gpu, us)


def slower(rows: Sequence[report.Row], reference: Reference) -> list[report.Row]:
    """The rows whose median is beyond the slowest turn of the reference by more than TOLERANCE."""
    return [row for row in rows if row.us["ours"] > (1 + TOLERANCE) * _there(row, reference)[1]]


def _there(row, reference):
    return reference.us[product(*row.shape, DTYPES[row.columns["dtype"]], row.columns["out_dtype"])]


def table(slower: Sequence[report.Row], count: int, reference: Reference) -> str:
    """What became slower, of `count` products."""
    lines = []
    for row in slower:
        us, (median, most) = row.us["ours"], _there(row, reference)
        shape = map(str, row.shape)
        times = (report.format_us(of) for of in (us, median, most))
        lines.append((row.kind, *shape, *times, f"{us / median:.2f}x", row.kernel))
    words = f"{len(slower)} of {count} products are more than {TOLERANCE:.0%} slower than their slowest turn in "
    words += str(reference.path)
    if not lines:
        return words
    header = ("dtype", "M", "N", "K", "us", "us there", "slowest there", "ratio", "kernel")
    return f"{report.align(header, lines)}\n{words}"
