"""Times every kernel of block_scaled_mm that may be the best on some weights, beside XLA's bfloat16 product.

    python benchmarks/block_scaled_mm/kernels.py --csv kernels.csv

The cost model in cuda/block_scaled_mm/select.cc is fitted to these times. Needs a GPU that has kernels. Times are of
calls in one jitted program, by JAX's profiler, with operands that together exceed the L2 cache.
"""

import argparse
import csv
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jax_qmm import _extension
from jax_qmm.bench import measure, schemes
from jax_qmm.ops.block_scaled_mm import weight_product
from jax_qmm.reference.activation import NONE

WEIGHTS = ((28672, 8192), (57344, 8192), (8192, 8192), (6144, 4096), (4096, 14336))  # N, K
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCK = 128
SCHEMES = {"w4a16": ("w4a16", "bfloat16"), "w8a16": ("w8a16", "bfloat16"), "w4a8-fp8": ("w4a16", "float8_e4m3fn")}


def may_be_best(words: str, m: int) -> bool:
    """Whether the kernel's tiles fit m rows: neither many of the smallest, nor one that is mostly empty."""
    tile = int(re.findall(r"(\d+)x\d+x\d+", words)[0])
    scaled_each = int(words.split("each ")[1].split(",")[0])  # smaller units have more instructions
    return scaled_each >= 64 and tile <= max(2 * m, 16) and (tile >= m or tile >= 64)


def product(x, w):
    """Of x of any dtype that kernels take."""
    of_weights = {"qtype": w.qtype, "packed": True, "block": BLOCK}
    output = {"activation": NONE, "out_dtype": jnp.dtype(jnp.bfloat16), "out_sharding": None}
    return weight_product(x, w.qvalue, {"scale": w.scale}, **of_weights, **output)


def measure_product(name: str, m: int, n: int, k: int, kernels, gpu):
    """Yields what runs, and its microseconds."""
    weights, dtype = SCHEMES[name]
    scheme = schemes.SCHEMES[weights]
    size = schemes.nbytes(scheme, (m, n, k))
    packed = jax.jit(functools.partial(schemes.weight_of, scheme, n, k))
    x = lambda i: jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16).astype(dtype)
    chained = functools.partial(measure.chain, us=1e6 * max(size / gpu.copy_rate, 4 * m * n * k / gpu.peak))
    sets = chained([(x(i), packed(i)) for i in range(measure.count_sets(size, 8))])
    bits = jnp.iinfo(scheme.dtype).bits
    for each in (dtype, "float16") if dtype == "float8_e4m3fn" else (dtype,):  # as which it may run
        for words, _ in kernels.BlockScaledMmProblem(m, n, k, 1, each, "bfloat16", bits, BLOCK, None).choices(gpu):
            if may_be_best(words, m):
                us = lambda: measure.jit_us(product, sets)
                yield words, measure.by_kernel(kernels.restrict_block_scaled_mm, words, us)
    dense = lambda i: jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16)
    floats = [(x(i).astype(jnp.bfloat16), dense(i)) for i in range(measure.count_sets(2 * n * k, 8))]
    yield "XLA bfloat16", measure.jit_us(schemes.xla_bf16, chained(floats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["w4a16", "w8a16"])
    options = parser.parse_args()
    _, gpu = measure.open_gpu("kernels.py")
    kernels = _extension._load()[0]
    todo = [(name, m, n, k) for name in options.scheme for n, k in WEIGHTS for m in ROWS]
    with options.csv.open("w", newline="") as file, tqdm(todo, unit="product") as bar:
        writer = csv.writer(file)
        writer.writerow(["gpu", "scheme", "n", "k", "m", "kernel", "us"])
        for name, m, n, k in bar:
            bar.set_postfix_str(f"{name}, M {m}, N {n}, K {k}")
            for words, us in measure_product(name, m, n, k, kernels, gpu):
                writer.writerow([gpu.name, name, n, k, m, words, f"{us:.2f}"])
            file.flush()


if __name__ == "__main__":
    main()
