"""Times jitted programs: quantizing inside against XLA in bfloat16, and what zero points cost.

    python benchmarks/programs.py --out programs.csv

Every call has operands of its own, which together exceed the L2 cache several times. Times are of JAX's profiler. All
that is measured of a product is measured three times, each time in another random order: the CSV has the medians, the
least and the most.
"""

import argparse
import csv
import functools
from statistics import geometric_mean, median

import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm.bench import measure, shapes

# What is compared: its words in the CSV, and keys of `calls`.
RATIOS = {
    "quantize + scaled_mm, over XLA's bf16": ("quantized", "bf16"),
    "zero point per tensor, over none": ("per tensor", "none"),
    "zero point per token, over none": ("per token", "none"),
}
COLUMNS = (
    *("what", "dtype", "m", "n", "k", "us", "compared_with_us", "ratio"),
    *("least_us", "most_us", "compared_with_least_us", "compared_with_most_us"),
)


def quantized(x, w, scale_w):
    """The product of a float activation with a quantized weight."""
    a = jax_qmm.quantize(x, w.dtype)
    return jax_qmm.scaled_mm(a.qvalue, w, a.scale, scale_w)


def calls(product):
    """What is measured of a product: functions that give microseconds, by name."""
    few = measure.operands(product, product.dtype)
    timed = lambda function, sets: functools.partial(
        measure.jit_us, function, measure.chain(sets, measure.roofline_us(product, 4e12))
    )
    found = {}
    if product.m >= 512:
        floats = [(a.astype(jnp.bfloat16), b, scale_b) for a, b, _, scale_b in few]
        found["quantized"] = timed(quantized, floats)
        found["bf16"] = timed(measure.xla_bf16, measure.operands(product, "bfloat16"))
    if product.dtype == "int8":
        adj, azp = jnp.ones(product.n, jnp.int32), jnp.ones(product.m, jnp.int32)
        found["none"] = timed(jax_qmm.scaled_mm, few)
        found["per tensor"] = timed(lambda *given: jax_qmm.scaled_mm_azp(*given, adj), few)
        found["per token"] = timed(lambda *given: jax_qmm.scaled_mm_azp_per_token(*given, adj, azp), few)
    return found


def rows_of(product):
    """The lines of a product in the CSV."""
    times = measure.times(calls(product), str(product))
    for what, pair in RATIOS.items():
        if pair[0] in times:
            mine, other = (times[name] for name in pair)
            us = [round(of(turns), 2) for turns in (mine, other) for of in (median, min, max)]
            ratio = round(median(mine) / median(other), 3)
            yield what, product.dtype, *product[:3], us[0], us[3], ratio, *us[1:3], *us[4:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", default="16,512,2048", help="numbers of tokens (%(default)s)")
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    measure.open_gpu("programs.py")
    products = shapes.products(
        model="llama-3-8b", shapes=None, m=[int(m) for m in args.m.split(",")], dtype=shapes.DTYPES
    )
    rows = [dict(zip(COLUMNS, row)) for product in tqdm(products, unit="product") for row in rows_of(product)]
    for what in RATIOS:
        mine = [row for row in rows if row["what"] == what]
        if mine:
            ratios = [row["ratio"] for row in mine]
            spread = max(row["most_us"] / row["least_us"] for row in mine)
            print(
                f"{what}: {geometric_mean(ratios):.3f} times as long (geometric mean), {min(ratios)} to {max(ratios)}; "
                f"the slowest turn of one took {spread:.3f} times its fastest at most"
            )
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
