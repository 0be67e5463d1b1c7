"""`python -m jax_qmm tune`: measures every kernel on the user's products and GPU, and stores the fastest."""

import math
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median

from tqdm import tqdm

from jax_qmm import _extension, tuning
from jax_qmm.bench import measure, report
from jax_qmm.tuning import Entry, Product

FINALISTS = 6
TURNS = 3
ROUNDS = 9
LARGE_US = 100  # of operations at the peak, from where on the power they draw lowers the clock, by about 12 %
NOISE = 0.99  # what takes a larger part of the default's time is no gain: medians repeat to about 1 %


def is_large(product: Product) -> bool:
    """Whether the power that a product draws lowers the clock."""
    return measure.roofline_us(product, bandwidth=math.inf) > LARGE_US


def first_us(kernels, product: Product, choices: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Microseconds of each choice, measured once, or three times for large products, to tell the fast ones."""
    return dict(zip(choices, measure.kernel_us(kernels, product, choices, 3 if is_large(product) else 1)))


def alone_us(kernels, product: Product, choice: tuple[int, int]) -> float:
    """Microseconds of a choice, measured many times in a row, after the pause in which its operands are made.

    Large products lower the clock by the power they draw, so that kernels without pauses would lend each other theirs.
    No longer than others, though: what is the fastest at a clock that has settled is slower in bursts, as of `bench`.
    """
    return measure.kernel_us(kernels, product, [choice], ROUNDS)[0]


def fastest(kernels, product: Product, gpu, default: tuple[int, int]) -> tuple[tuple[int, int], float, float]:
    """The fastest kernel, its microseconds, and those of `default`, which stays where the gain is noise."""
    first = first_us(kernels, product, kernels.ScaledMmProblem(*product).choices(gpu))
    finalists = list(dict.fromkeys([default, *sorted(first, key=first.__getitem__)[:FINALISTS]]))
    # Several times and in other orders, as the clock is what kernels before have left: measured once with the default
    # first, large products got kernels 0.5 % behind the fastest, by the median of three times 0.25 %.
    orders = [random.Random(turn).sample(finalists, len(finalists)) for turn in range(TURNS)]
    turns = [{choice: alone_us(kernels, product, choice) for choice in order} for order in orders]
    us = {choice: median(turn[choice] for turn in turns) for choice in finalists}
    best = min(finalists, key=us.__getitem__)
    if us[best] > NOISE * us[default]:
        best = default
    return best, us[best], us[default]


def main(*, products: Sequence[Product], file: Path | None) -> None:
    """Measures, and writes after every product; see `python -m jax_qmm tune --help`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the tuning file")  # said below, with what to do about it
        kernels, gpu = measure.open_gpu("tune")
    file = file or tuning.path() or tuning.default_path()
    if file.is_dir():
        _stop(f"{file} is a folder; name a file with --file.")
    entries = {}
    try:
        if file.exists():
            entries = {entry.product: entry for entry in tuning.load(file, kernels, gpu)}
    except tuning.RefusedError as error:
        _stop(
            f"{file} would be overwritten, and is no tuning file for this GPU and build: {error}. "
            "Remove it, or name another with --file."
        )
    _save(file, gpu, entries)  # now, not after minutes, if it can't be written

    kernels.clear_scaled_mm_tuning()  # the defaults are the cost model's
    measured = {}
    try:
        with tqdm(products, desc="tune", unit="product") as bar:
            for product in bar:
                bar.set_postfix_str(f"M {product.m}, N {product.n}, K {product.k}")
                default = kernels.ScaledMmProblem(*product).select(gpu)
                try:
                    best, us, default_us = fastest(kernels, product, gpu, default)
                except RuntimeError as error:  # of CUDA: too little memory
                    bar.write(f"left out: {product} ({error})")
                    continue
                more = entries | {product: Entry(product, kernels.describe_scaled_mm(best), us)}
                _save(file, gpu, more)
                entries = more
                measured[product] = default, default_us
    finally:
        if measured:
            print("", *_report(kernels, gpu, entries, measured), sep="\n")
        print(
            f"{file} holds {len(entries)} products on {gpu.name}"
            + ("" if tuning.path() == file else f"; set JAX_QMM_TUNING={file.absolute()} to load it")
        )


def _report(kernels, gpu, entries, measured):
    words = lambda kernel: _extension.as_compiled(kernels, kernel, gpu)
    rows, gains = [], []
    for product, (default, default_us) in measured.items():
        _, kernel, us = entries[product]
        gains.append(default_us / us)
        default = kernels.describe_scaled_mm(default)
        gain = "" if kernel == default else f"{gains[-1]:.2f}x {words(default)}"
        shape = map(str, product[:3])
        epilogue = "full" if product.full_epilogue else ""
        rows.append((product.dtype, product.out_dtype, epilogue, *shape, report.format_us(us), words(kernel), gain))
    header = ("dtype", "out", "epilogue", "M", "N", "K", "us", "kernel", "times as fast as the cost model's")
    others = sum(bool(row[-1]) for row in rows)
    yield report.align(header, rows, left=2)
    yield (
        f"\n{others} of {len(rows)} products get another kernel than the cost model's: "
        f"{geometric_mean(gains):.3f} times as fast (geometric mean of all)"
    )


def _save(file, gpu, entries):
    try:
        tuning.save(file, gpu, entries.values())
    except OSError as error:
        _stop(f"{file} can't be written: {error.strerror}")


def _stop(message):
    print(message, file=sys.stderr)
    raise SystemExit(2)
