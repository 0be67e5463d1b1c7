"""Times every kernel of block_scaled_mm of two QArrays that may be the best, beside scaled_mm and XLA's bfloat16.

    python benchmarks/block_quantized_mm/kernels.py --csv kernels.csv
    python benchmarks/block_quantized_mm/kernels.py --w4a8 --csv kernels.csv    # those of expanded_mm

The cost models in cuda/block_quantized_mm/select.cc and cuda/expanded_mm/select.cc are fitted to such times. Needs a
GPU that has kernels. Times are JAX's profiler's, of programs of many calls whose operands together exceed the L2 cache.
"""

import argparse
import csv
import functools
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_qmm
from jax_qmm import QArray, _extension
from jax_qmm.bench import measure
from jax_qmm.dtypes import FLOAT8
from jax_qmm.ops.expanded_mm import expanded_mm
from jax_qmm.tuning import Product

WEIGHTS = ((4096, 14336), (8192, 8192), (28672, 4096), (6144, 4096))  # N, K
ROWS = (1, 8, 16, 64, 128, 256, 512, 1024, 4096)
# Of the operands: dtype, block, whether a has zero points, and rows of b that share their scales. The first two are of
# all weights, the others of two.
KINDS = (
    (jnp.int8, 128, False, 1),
    (FLOAT8, 128, False, 128),
    (FLOAT8, 128, False, 1),
    (jnp.int8, 128, True, 1),
    (jnp.int8, 64, False, 1),
    (jnp.int8, 256, False, 1),
)
# N, K and M of int4 weights in blocks of 128 beside int8.
W4A8_PRODUCTS = tuple(
    (n, k, m)
    for n, k in ((28672, 8192), (28672, 4096), (8192, 8192), (4096, 14336), (6144, 4096), (4096, 4096))
    for m in (16, 32, 64, 128, 256, 512, 1024, 4096)
)


def may_be_best(words: str, m: int) -> bool:
    """Whether the kernel's tiles fit m rows: neither many of the smallest, nor one that is mostly empty."""
    tile = int(re.findall(r"(\d+)x\d+x\d+", words)[0])
    if "128 rows" in words:
        return m > 16
    often = 4 if "sm90" in words else 2 if "few rows" in words else 1
    return tile < max(4 * m, 17) and (often * tile >= m or tile >= 128) and ("multistage" not in words or m <= 128)


def values(rows, k, dtype, seed):
    return jnp.asarray(np.resize(np.roll(measure._pattern(jnp.dtype(dtype)), 4099 * seed + 1), (rows, k)))


def side(rows, k, dtype, block, zero_points, shared, seed) -> QArray:
    groups = rows // shared, k // block
    zero_point = jnp.full(groups, 3, jnp.int32) if zero_points else None
    return QArray(values(rows, k, dtype, seed), jnp.full(groups, 0.01), zero_point, tile_size=block)


def roofline_us(nbytes: int, m: int, n: int, k: int, gpu) -> float:
    return 1e6 * max(nbytes / gpu.copy_rate, 2 * m * n * k / gpu.peak)


def measure_product(kind, m: int, n: int, k: int, kernels, gpu):
    """Yields what runs, and its microseconds."""
    dtype, block, zero_points, shared = kind
    size = (m + n) * k + 2 * m * n
    chained = functools.partial(measure.chain, us=roofline_us(size, m, n, k, gpu))
    count = measure.count_sets(size, 8)
    operands = [
        (side(m, k, dtype, block, zero_points, 1, i), side(n, k, dtype, block, False, shared, i + count))
        for i in range(count)
    ]
    sets = chained(operands)
    function = functools.partial(jax_qmm.block_scaled_mm, out_dtype=jnp.bfloat16)
    problem = kernels.BlockQuantizedMmProblem(
        m, n, k, 1, str(jnp.dtype(dtype)), "bfloat16", block, "a" if zero_points else "", shared == 128
    )
    for words in problem.choices(gpu):
        if may_be_best(words, m):
            us = lambda: measure.jit_us(function, sets)
            yield words, measure.by_kernel(kernels.restrict_block_quantized_mm, words, us)
    if block == 128 and not zero_points and (shared == 128 or dtype == jnp.int8):
        ones = jnp.ones(m), jnp.ones(n)
        rows = [(x.qvalue, w.qvalue, *ones) for x, w in operands]
        yield "scaled_mm", measure.jit_us(jax_qmm.scaled_mm, chained(rows))
    if kind == KINDS[0]:
        floats = [
            (values(m, k, jnp.bfloat16, i), values(n, k, jnp.bfloat16, i + count), None, None)
            for i in range(measure.count_sets(2 * size, 8))
        ]
        yield "XLA bfloat16", measure.jit_us(measure.xla_bf16, chained(floats))


def measure_w4a8(m: int, n: int, k: int, kernels, gpu):
    """Yields what runs, and its microseconds: kernels of int4 weights, and what has 8 and 16 bits in their place."""
    nbytes, block = m * k + n * k // 2 + 2 * m * n, 128
    chained = functools.partial(measure.chain, us=roofline_us(nbytes, m, n, k, gpu))
    scales = jnp.full(m, 0.01), jnp.full(n, 0.01)
    multiples = jnp.full((n, k // block), 7, jnp.int8)
    make_int4 = jax.jit(lambda x: (x >> 4).astype(jnp.int4))
    packed = [
        (values(m, k, jnp.int8, i), make_int4(values(n, k, jnp.int8, i + 12)), multiples, *scales)
        for i in range(measure.count_sets(nbytes, 12))
    ]

    def product(x, w, multiples, scale_a, scale_b):
        return expanded_mm(x, w, multiples, block=block, scale_a=scale_a, scale_b=scale_b, out_dtype=jnp.bfloat16)

    for words, _ in kernels.ExpandedMmProblem(m, n, k, 1, "bfloat16", block).choices(gpu):
        if may_be_best(words, m):
            us = lambda: measure.jit_us(product, chained(packed))
            yield words, measure.by_kernel(kernels.restrict_expanded_mm, words, us)
    for name, function, dtype in (
        ("scaled_mm", jax_qmm.scaled_mm, "int8"),
        ("XLA bfloat16", measure.xla_bf16, "bfloat16"),
    ):
        dense = measure.operands(Product(m, n, k, 1, dtype, "bfloat16", False), dtype)
        yield name, measure.jit_us(function, chained(dense))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other product is begun")
    parser.add_argument("--w4a8", action="store_true", help="those of int4 weights beside int8")
    options = parser.parse_args()
    _, gpu = measure.open_gpu("kernels.py")
    kernels = _extension._load()[0]
    end = time.monotonic() + options.seconds
    # The sizes, what the CSV says of the operands beside a kernel's words, and what measures.
    if options.w4a8:
        names, todo = [], [(sizes, lambda words: [], measure_w4a8) for sizes in W4A8_PRODUCTS]
    else:
        names = ["dtype", "zero_points", "shared", "block"]
        todo = [
            ((n, k, m), functools.partial(columns, kind), functools.partial(measure_product, kind))
            for kind in KINDS
            for n, k in WEIGHTS[: 4 if kind in KINDS[:2] else 2]
            for m in ROWS
        ]
    with options.csv.open("w", newline="") as file, tqdm(todo, unit="product") as bar:
        writer = csv.writer(file)
        writer.writerow(["gpu", *names, "n", "k", "m", "kernel", "us"])
        for (n, k, m), of_operands, run in bar:
            if time.monotonic() > end:
                break
            for words, us in run(m, n, k, kernels, gpu):
                writer.writerow([gpu.name, *of_operands(words), n, k, m, words, f"{us:.1f}"])
            file.flush()


def columns(kind, words: str) -> list:
    """What the CSV says of a kind's operands; only our kernels have blocks."""
    dtype, block, zero_points, shared = kind
    of_block = block if words.startswith("sm") else ""
    return [jnp.dtype(dtype).name, "int" if zero_points else "", shared if shared > 1 else "", of_block]


if __name__ == "__main__":
    main()
