"""Times every kernel of block_scaled_mm of two QArrays that may be the best, beside scaled_mm and XLA's bfloat16.

    python benchmarks/block_quantized_mm/kernels.py --csv kernels.csv

The cost model in cuda/block_quantized_mm/select.cc is fitted to these times. Needs a GPU that has kernels. Operands
together exceed the L2 cache. All kernels of a product run in one compiled program of many calls, outside of CUDA
graphs, so that each run chooses anew; times are the host's, less that of a program of one small kernel.
"""

import argparse
import csv
import os
import re
import statistics
import time
from pathlib import Path

os.environ["JAX_QMM_RECORD"] = "0"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_qmm
from jax_qmm import QArray, _extension
from jax_qmm.bench import measure
from jax_qmm.dtypes import FLOAT8

WEIGHTS = ((4096, 14336), (8192, 8192), (28672, 8192), (6144, 4096))  # N, K
ROWS = (1, 16, 64, 128, 1024, 4096)
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
PROGRAM_US = 3000  # that a program is to take, of up to 120 calls


def may_be_best(words: str, m: int) -> bool:
    """Whether the kernel's tiles fit m rows: neither many of the smallest, nor one that is mostly empty."""
    tile = int(re.findall(r"(\d+)x\d+x\d+", words)[0])
    if "128 rows" in words:
        return m > 16
    return tile < max(4 * m, 17) and (tile >= m or tile >= 128 or ("sm90" in words and 4 * tile >= m))


def timed(function, sets) -> float:
    """Microseconds of a call, of those for all `sets` in one program: the median of 5 runs."""

    def run():
        begin = time.perf_counter()
        jax.block_until_ready(function(sets))
        return 1e6 * (time.perf_counter() - begin)

    run()
    return (statistics.median(run() for _ in range(5)) - empty_us()) / len(sets)


def empty_us() -> float:
    """Of a program that does nothing to speak of, from its start by the host to the host's knowing its end."""
    if not _EMPTY:
        function, one = jax.jit(lambda x: x + 1), jnp.zeros(8)
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            jax.block_until_ready(function(one))
            times.append(1e6 * (time.perf_counter() - begin))
        _EMPTY.append(statistics.median(times))
    return _EMPTY[0]


_EMPTY: list[float] = []


def each(function):
    return jax.jit(lambda sets: [function(*arguments) for arguments in sets])


def values(rows, k, dtype, seed):
    return jnp.asarray(np.resize(np.roll(measure._pattern(jnp.dtype(dtype)), 4099 * seed + 1), (rows, k)))


def side(rows, k, dtype, block, zero_points, shared, seed) -> QArray:
    groups = rows // shared, k // block
    zero_point = jnp.full(groups, 3, jnp.int32) if zero_points else None
    return QArray(values(rows, k, dtype, seed), jnp.full(groups, 0.01), zero_point, tile_size=block)


def measure_product(kind, m: int, n: int, k: int, kernels, gpu):
    """Yields what runs, and its microseconds."""
    dtype, block, zero_points, shared = kind
    size = (m + n) * k + 2 * m * n
    roofline = 1e6 * max(size / gpu.copy_rate, 2 * m * n * k / gpu.peak)
    count = measure.count_sets(size, 8)
    calls = int(min(120, max(count, PROGRAM_US / roofline)))
    chained = lambda sets: (sets * calls)[:calls]
    operands = [
        (side(m, k, dtype, block, zero_points, 1, i), side(n, k, dtype, block, False, shared, i + count))
        for i in range(count)
    ]
    function = each(lambda x, w: jax_qmm.block_scaled_mm(x, w, out_dtype=jnp.bfloat16))
    problem = kernels.BlockQuantizedMmProblem(
        m, n, k, 1, str(jnp.dtype(dtype)), "bfloat16", block, zero_points, shared == 128
    )
    for words in problem.choices(gpu):
        if may_be_best(words, m):
            kernels.restrict_block_quantized_mm(words)
            yield words, timed(function, chained(operands))
            kernels.restrict_block_quantized_mm("")
    if block == 128 and not zero_points and (shared == 128 or dtype == jnp.int8):
        ones = jnp.ones(m), jnp.ones(n)
        rows = [(x.qvalue, w.qvalue, *ones) for x, w in operands]
        yield "scaled_mm", timed(each(jax_qmm.scaled_mm), chained(rows))
    if kind == KINDS[0]:
        floats = [
            (values(m, k, jnp.bfloat16, i), values(n, k, jnp.bfloat16, i + count), None, None)
            for i in range(measure.count_sets(2 * size, 8))
        ]
        yield "XLA bfloat16", timed(each(measure.xla_bf16), chained(floats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other product is begun")
    options = parser.parse_args()
    _, gpu = measure.open_gpu("kernels.py")
    kernels = _extension._load()[0]
    end = time.monotonic() + options.seconds
    todo = [(kind, m, n, k) for kind in KINDS for n, k in WEIGHTS[: 4 if kind in KINDS[:2] else 2] for m in ROWS]
    with options.csv.open("w", newline="") as file, tqdm(todo, unit="product") as bar:
        writer = csv.writer(file)
        writer.writerow(["gpu", "dtype", "zero_points", "shared", "block", "n", "k", "m", "kernel", "us"])
        for kind, m, n, k in bar:
            if time.monotonic() > end:
                break
            dtype, block, zero_points, shared = kind
            of_kind = jnp.dtype(dtype).name, "int" if zero_points else "", shared if shared > 1 else ""
            for words, us in measure_product(kind, m, n, k, kernels, gpu):
                of_block = block if words.startswith("sm") else ""  # others have none
                writer.writerow([gpu.name, *of_kind, of_block, n, k, m, words, f"{us:.1f}"])
            file.flush()


if __name__ == "__main__":
    main()
