"""Times scaled_mm with each of its epilogues, beside the plain one: scales alone, to bfloat16.

    python benchmarks/epilogues.py --out epilogues.csv

Times are of JAX's profiler, in one program of many calls whose operands together exceed the L2 cache. All epilogues of a
product are measured three times, each time in another random order: the CSV has the medians, the least and the most.
"""

import argparse
import csv
import functools
from statistics import median

import jax
import jax.numpy as jnp

import jax_qmm
from jax_qmm.bench import measure, shapes

WEIGHTS = ((6144, 4096), (8192, 8192), (256, 64))  # N, K; the last is a convolution's with windows of 1
ROWS = {(256, 64): (200704,)}  # of other weights:
MOST_ROWS = (16, 128, 1024, 4096)


def epilogues(m: int, n: int) -> dict[str, functools.partial]:
    """The products of a and b with two scales, by the words for their epilogues."""
    bias = jnp.linspace(-1.0, 1.0, n)
    of_a, of_b = jnp.arange(m, dtype=jnp.int32) % 7, jnp.arange(n, dtype=jnp.int32) % 5
    eight = {"int8": {"out_dtype": jnp.int8, "out_scale": 9.0}, "fp8": {"out_dtype": jnp.float8_e4m3fn, "out_scale": 3.0}}
    zero_points = functools.partial(
        jax_qmm.scaled_mm_zero_points, zero_point_a=of_a, sums_a=of_a, zero_point_b=of_b, sums_b=of_b
    )
    return {
        "plain": functools.partial(jax_qmm.scaled_mm),
        "bias": functools.partial(jax_qmm.scaled_mm, bias=bias),
        "zero points on both sides": zero_points,
        **{
            str(activation): functools.partial(jax_qmm.scaled_mm, activation=activation)
            for activation in ("relu", "relu6", (-3.0, 5.0), "gelu", "silu")
        },
        **{name: functools.partial(jax_qmm.scaled_mm, **out) for name, out in eight.items()},
        "bias, relu, int8": functools.partial(jax_qmm.scaled_mm, bias=bias, activation="relu", **eight["int8"]),
    }


def lines_of(m: int, n: int, k: int):
    """The lines of a product in the CSV."""
    product = shapes.product(m, n, k, "int8", "bfloat16")
    sets = measure.chain(measure.operands(product, "int8"), measure.roofline_us(product, 3e12))
    calls = {words: functools.partial(measure.jit_us, function, sets) for words, function in epilogues(m, n).items()}
    times = measure.times(calls, f"{m} {n} {k}")
    plain = median(times["plain"])
    for words, took in times.items():
        yield {
            **{"m": m, "n": n, "k": k, "epilogue": words, "us": round(median(took), 2)},
            **{"of_plain": round(median(took) / plain, 3), "least_us": round(min(took), 2), "most_us": round(max(took), 2)},
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="CSV file to write")
    args = parser.parse_args()
    _, gpu = measure.open_gpu("epilogues.py")
    print(gpu.name, "jax", jax.__version__)
    with open(args.out, "w", newline="") as file:
        writer = None
        for n, k in WEIGHTS:
            for m in ROWS.get((n, k), MOST_ROWS):
                for line in lines_of(m, n, k):
                    writer = writer or csv.DictWriter(file, line)
                    if file.tell() == 0:
                        writer.writeheader()
                    writer.writerow(line)
                    print(*line.values(), sep="\t", flush=True)
                file.flush()


if __name__ == "__main__":
    main()
