"""Times the quantizers beside a device-to-device copy of as many bytes.

    python benchmarks/quantize.py --out figures.csv
    python benchmarks/quantize.py --granularities "blocks of 128" --out figures.csv    # with sums of blocks, too

One program quantizes (or copies) enough different inputs to overflow the L2 cache several times. Times are of JAX's
profiler. Bytes count values that are read, once, and that are written. All quantizers of a shape and their copy are
measured three times, each time in another random order: the CSV has the medians, the least and the most.
"""

import argparse
import csv
import functools
import itertools
import math
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import jax_qmm
from jax_qmm.bench import measure

SHAPES = ((8192, 8192), (1, 8192), (64, 8192), (4096, 4096), (2048, 28672))
KINDS = {
    "int8": (jnp.int8, True),
    "int8 zero point": (jnp.int8, False),
    "fp8": (jnp.float8_e4m3fn, True),
}
GRANULARITIES = {"per token": {"axis": -1}, "per tensor": {"axis": None}, "blocks of 128": {"tile_size": 128}}


def ways_of(granularities):
    """Kind, granularity and mode of the quantizers."""
    for kind, granularity in itertools.product(KINDS, granularities):
        of_blocks = ("dynamic", "dynamic, sums") if kind.startswith("int8") else ("dynamic",)
        for mode in of_blocks if granularity.startswith("blocks") else ("dynamic", "static"):
            yield kind, granularity, mode


def quantizer(shape, kind, granularity, mode):
    """A quantizer of arrays of `shape`."""
    qtype, symmetric = KINDS[kind]
    given: dict[str, Any] = {"symmetric": symmetric, "sums": mode.endswith("sums"), **GRANULARITIES[granularity]}
    if mode == "static":
        given["scale"] = jnp.full((shape[0], 1) if given["axis"] else (), 0.03)
        if not symmetric:
            given["zero_point"] = jnp.full_like(given["scale"], -3, jnp.int32)
    return functools.partial(jax_qmm.quantize, qtype=qtype, **given)


def rows_of(shape, dtype, ways):
    """The lines of the inputs of a shape and dtype in the CSV."""
    moved = math.prod(shape) * (dtype.dtype.itemsize + 1)
    count = measure.count_sets(moved, 256)
    key = jax.random.key(0)
    sets = [(jax.random.normal(jax.random.fold_in(key, i), shape, dtype),) for i in range(count)]
    names = {"shape": "x".join(map(str, shape)), "dtype": jnp.dtype(dtype).name}
    calls: dict[Any, Any] = {way: functools.partial(measure.jit_us, quantizer(shape, *way), sets) for way in ways}
    calls["copy"] = lambda: moved / measure.copy_bandwidth(moved // 2, count) * 1e6
    times = measure.times(calls, str(names))
    copy = median(times["copy"])
    for way in ways:
        took = median(times[way])
        yield {
            **names,
            **dict(zip(("kind", "granularity", "mode"), way)),
            "us": round(took, 2),
            "GB_per_s": round(moved / took * 1e-3),
            "copy_us": round(copy, 2),
            "percent_of_copy": round(100 * copy / took, 1),
            "least_us": round(min(times[way]), 2),
            "most_us": round(max(times[way]), 2),
            "copy_least_us": round(min(times["copy"]), 2),
            "copy_most_us": round(max(times["copy"]), 2),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="CSV file to write")
    parser.add_argument("--granularities", nargs="+", choices=GRANULARITIES, default=[*GRANULARITIES])
    args = parser.parse_args()
    _, gpu = measure.open_gpu("quantize.py")
    print(gpu.name, "jax", jax.__version__)
    rows = []
    for shape, dtype in itertools.product(SHAPES, (jnp.bfloat16, jnp.float32, jnp.float16)):
        for row in rows_of(shape, dtype, [*ways_of(args.granularities)]):
            rows.append(row)
            print(*row.values(), sep="\t", flush=True)
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
