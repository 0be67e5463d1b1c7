"""Times jitted programs: quantizing inside against XLA in bfloat16, and what zero points cost.

    python benchmarks/programs.py --out programs.csv

Every call has operands of its own, which together exceed the L2 cache several times. Times are of JAX's profiler.
"""

import argparse
import csv
from statistics import geometric_mean

import jax.numpy as jnp
from tqdm import tqdm

import jax_qmm
from jax_qmm.bench import measure, shapes


def quantized(x, w, scale_w):
    """The product of a float activation with a quantized weight."""
    a = jax_qmm.quantize(x, w.dtype)
    return jax_qmm.scaled_mm(a.qvalue, w, a.scale, scale_w)


def rows_of(product):
    """What is measured of a product: name, microseconds, and those it is compared with."""
    few = measure.operands(product, product.dtype)
    if product.m >= 512:
        bf16 = measure.jit_us(measure.xla_bf16, measure.chain(product, measure.operands(product, "bfloat16")))
        floats = [(a.astype(jnp.bfloat16), b, scale_b) for a, b, _, scale_b in few]
        yield "quantize + scaled_mm, over XLA's bf16", measure.jit_us(quantized, measure.chain(product, floats)), bf16
    if product.dtype == "int8":
        adj, azp = jnp.ones(product.n, jnp.int32), jnp.ones(product.m, jnp.int32)
        calls = measure.chain(product, few)
        plain = measure.jit_us(jax_qmm.scaled_mm, calls)
        tensor = measure.jit_us(lambda *given: jax_qmm.scaled_mm_azp(*given, adj), calls)
        token = measure.jit_us(lambda *given: jax_qmm.scaled_mm_azp_per_token(*given, adj, azp), calls)
        yield "zero point per tensor, over none", tensor, plain
        yield "zero point per token, over none", token, plain


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", default="16,512,2048", help="numbers of tokens (%(default)s)")
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    measure.open_gpu("programs.py")
    products = shapes.products(
        model="llama-3-8b", shapes=None, m=[int(m) for m in args.m.split(",")], dtype=shapes.DTYPES
    )
    rows = []
    for product in tqdm(products, unit="product"):
        for name, us, other in rows_of(product):
            rows.append((name, product.dtype, *product[:3], round(us, 2), round(other, 2), round(us / other, 3)))
    for name in dict.fromkeys(row[0] for row in rows):
        ratios = [row[-1] for row in rows if row[0] == name]
        print(f"{name}: {geometric_mean(ratios):.3f} times as long (geometric mean), {min(ratios)} to {max(ratios)}")
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("what", "dtype", "m", "n", "k", "us", "compared_with_us", "ratio"))
            writer.writerows(rows)


if __name__ == "__main__":
    main()
