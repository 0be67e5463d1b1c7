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

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench import measure, schemes

WEIGHTS = ((28672, 8192), (57344, 8192), (8192, 8192), (6144, 4096), (4096, 14336))  # N, K
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCK = 128


def may_be_best(words: str, m: int) -> bool:
    """Whether the kernel's tiles fit m rows: neither many of the smallest, nor one that is mostly empty."""
    tile = int(re.findall(r"(\d+)x\d+x\d+", words)[0])
    scaled_each = int(words.split("each ")[1].split(",")[0])  # smaller units have more instructions
    return scaled_each >= 64 and tile < max(4 * m, 16) and (tile >= m or tile >= 64)


def timed(function, sets) -> float:
    measure._call_each.clear_cache()  # the same function runs other kernels
    return measure.jit_us(function, sets)


def measure_product(name: str, m: int, n: int, k: int, kernels, gpu):
    """Yields what runs, and its microseconds."""
    scheme = schemes.SCHEMES[name]
    size = schemes.nbytes(scheme, (m, n, k))
    packed = jax.jit(functools.partial(schemes.weight_of, scheme, n, k))
    x = lambda i: jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16)
    chained = functools.partial(measure.chain, us=1e6 * max(size / gpu.copy_rate, 4 * m * n * k / gpu.peak))
    sets = chained([(x(i), packed(i)) for i in range(measure.count_sets(size, 8))])
    problem = kernels.BlockScaledMmProblem(
        m, n, k, 1, "bfloat16", "bfloat16", jnp.iinfo(scheme.dtype).bits, BLOCK, None
    )
    for words, _ in problem.choices(gpu):
        if may_be_best(words, m):
            kernels.restrict_block_scaled_mm(words)
            yield words, timed(jax_qmm.block_scaled_mm, sets)
            kernels.restrict_block_scaled_mm("")
    dense = lambda i: jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16)
    floats = [(x(i), dense(i)) for i in range(measure.count_sets(2 * n * k, 8))]
    yield "XLA bfloat16", timed(schemes.xla_bf16, chained(floats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--scheme", nargs="+", choices=["w4a16", "w8a16"], default=["w4a16", "w8a16"])
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
