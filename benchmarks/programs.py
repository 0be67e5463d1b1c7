"""Times jitted programs: quantizing inside against XLA in bfloat16, and what zero points cost.

    python benchmarks/programs.py --out programs.csv
    python benchmarks/programs.py --epilogues --m 1,16,128,1024,4096 --shapes 6144,4096 --out epilogues.csv

With --epilogues: what may follow the sums over scales alone, and row sums from `quantize`. Every call has operands of
its own, which together exceed the L2 cache several times. Times are of JAX's profiler. All that is measured of a
product is measured three times, each time in another random order: the CSV has the medians, the least and the most.
"""

import argparse
import csv
import functools
from statistics import geometric_mean, median

import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm.bench import measure, shapes
from jax_qmm.dtypes import FLOAT8

# What is compared: its words in the CSV, and keys of `calls`.
PROGRAMS = {
    "quantize + scaled_mm, over XLA's bf16": ("quantized", "bf16"),
    "zero point per tensor, over none": ("per tensor", "none"),
    "zero point per token, over none": ("per token", "none"),
}
ACTIVATIONS = {"relu": "relu", "relu6": "relu6", "clip": (-8.0, 8.0), "gelu": "gelu", "silu": "silu"}
OUTPUTS = {"int8": jnp.int8, "fp8": FLOAT8}  # of 8 bits
EPILOGUES = {
    "zero points of both sides, over none": ("both sides", "none"),
    **{f"{name}, over none": (name, "none") for name in (*ACTIVATIONS, *OUTPUTS)},
    "quantize with row sums, over without": ("sums", "no sums"),
}
COLUMNS = (
    *("what", "dtype", "m", "n", "k", "us", "compared_with_us", "ratio"),
    *("least_us", "most_us", "compared_with_least_us", "compared_with_most_us"),
)


def quantized(x, w, scale_w):
    """The product of a float activation with a quantized weight."""
    a = jax_qmm.quantize(x, w.dtype)
    return jax_qmm.scaled_mm(a.qvalue, w, a.scale, scale_w)


def timed(product, function, sets):
    """What gives the microseconds of a call of `function`."""
    return functools.partial(measure.jit_us, function, measure.chain(sets, measure.roofline_us(product, 4e12)))


def programs(product):
    """What is measured of a product: functions that give microseconds, by name."""
    few = measure.operands(product, product.dtype)
    found = {}
    if product.m >= 512:
        floats = [(a.astype(jnp.bfloat16), b, scale_b) for a, b, _, scale_b in few]
        found["quantized"] = timed(product, quantized, floats)
        found["bf16"] = timed(product, measure.xla_bf16, measure.operands(product, "bfloat16"))
    if product.dtype == "int8":
        adj, azp = jnp.ones(product.n, jnp.int32), jnp.ones(product.m, jnp.int32)
        found["none"] = timed(product, jax_qmm.scaled_mm, few)
        found["per tensor"] = timed(product, lambda *given: jax_qmm.scaled_mm_azp(*given, adj), few)
        found["per token"] = timed(product, lambda *given: jax_qmm.scaled_mm_azp_per_token(*given, adj, azp), few)
    return found


def epilogues(product):
    """The same of what follows a product's sums; zero points and sums are constants, as those of weights are."""
    few = measure.operands(product, product.dtype)
    ours = lambda **given: timed(product, functools.partial(jax_qmm.scaled_mm, **given), few)
    found = {"none": ours()}
    found |= {name: ours(activation=activation) for name, activation in ACTIVATIONS.items()}
    found |= {name: ours(out_dtype=dtype, out_scale=0.3) for name, dtype in OUTPUTS.items()}
    if product.dtype == "int8":
        row, column = jnp.arange(product.m, dtype=jnp.int32), jnp.arange(product.n, dtype=jnp.int32)
        given = {"zero_point_a": row, "sums_a": row, "zero_point_b": column, "sums_b": column}
        found["both sides"] = timed(product, functools.partial(jax_qmm.scaled_mm_zero_points, **given), few)
        x = [a for a, *_ in measure.operands(product, "bfloat16")]
        for name, sums in ("sums", True), ("no sums", False):
            quantize = functools.partial(jax_qmm.quantize, sums=sums)
            found[name] = timed(product, quantize, [(each,) for each in x])
    return found


def rows_of(product, calls, ratios):
    """The lines of a product in the CSV."""
    times = measure.times(calls(product), str(product))
    for what, pair in ratios.items():
        if pair[0] in times:
            mine, other = (times[name] for name in pair)
            us = [round(of(turns), 2) for turns in (mine, other) for of in (median, min, max)]
            ratio = round(median(mine) / median(other), 3)
            yield what, product.dtype, *product[:3], us[0], us[3], ratio, *us[1:3], *us[4:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes.add_arguments(parser)
    parser.set_defaults(m=(16, 512, 2048))
    parser.add_argument("--epilogues", action="store_true", help="what follows the sums, instead")
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    measure.open_gpu("programs.py")
    products = shapes.products(model=args.model, shapes=args.shapes, m=args.m, dtype=args.dtype)
    calls, ratios = (epilogues, EPILOGUES) if args.epilogues else (programs, PROGRAMS)
    rows = [
        dict(zip(COLUMNS, row)) for product in tqdm(products, unit="product") for row in rows_of(product, calls, ratios)
    ]
    for what in ratios:
        mine = [row for row in rows if row["what"] == what]
        if mine:
            each = [row["ratio"] for row in mine]
            spread = max(row["most_us"] / row["least_us"] for row in mine)
            print(
                f"{what}: {geometric_mean(each):.3f} times as long (geometric mean), {min(each)} to {max(each)}; "
                f"the slowest turn of one took {spread:.3f} times its fastest at most"
            )
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
