"""Measures int8 products by the multistage kernels' PTX on a newer GPU, beside what bounds them and the cost model.

    nvcc -std=c++17 -O3 -I cuda -gencode arch=compute_80,code=compute_80 benchmarks/sm80/mma_rate.cu -o mma_rate
    python benchmarks/sm80/portable.py ./mma_rate portable.csv --kernels portable_kernels.csv.gz

For a build with JAX_QMM_CUDA_ARCHS=80. Of each product: the kernel that the model chooses and the fastest one, the
time of its bytes by a copy and of its operations in a loop of nothing but mma.sync, both in this run, and with --xla
the same product in jit, and XLA's own. --kernels keeps the times of all kernels that were measured: those that the
model predicts at up to twice the time of the one that it chooses. Both files are written as it goes.
"""

import argparse
import csv
import gzip
import subprocess
import time
from itertools import chain
from statistics import geometric_mean, median

from tqdm import tqdm

from jax_qmm.bench import measure, shapes

COLUMNS = (
    *("gpu", "m", "n", "k", "copy_us", "mma_us"),
    *("kernel", "us", "predicted_us", "fastest", "fastest_us", "jit_us", "xla_us"),
)
FIELDS = ("dtype", "fast_accum", "m", "n", "k", "kernel", "us")  # as cost_model.py has them
ROUNDS = 3


def candidates(problem, gpu) -> dict[tuple[int, int], float]:
    """What the model predicts of the kernels that it takes for fast, the chosen one first."""
    predicted = {choice: problem.predict(choice, gpu) for choice in problem.choices(gpu)}
    chosen = problem.select(gpu)
    fast = {choice: us for choice, us in predicted.items() if us < 2 * predicted[chosen]}
    return {chosen: fast[chosen]} | fast


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mma_rate", help="the compiled mma_rate.cu")
    parser.add_argument("out", help="CSV file to write")
    parser.add_argument("--kernels", help="CSV file, gzipped, of every kernel's times")
    parser.add_argument("--xla", action="store_true", help="measure XLA's product, too, which takes some seconds each")
    parser.add_argument("--m", default=",".join(map(str, shapes.ROWS)), help="numbers of tokens (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no product later than this (%(default)s)")
    args = parser.parse_args()
    began = time.monotonic()
    kernels, gpu = measure.open_gpu("portable.py")
    print(f"{time.monotonic() - began:.1f} s until the kernels were loaded")
    rate = float(subprocess.run([args.mma_rate], capture_output=True, text=True, check=True).stdout)
    bandwidth = measure.copy_bandwidth()
    print(f"{gpu.name}: mma.sync {rate} Tera-operations/s, a copy {bandwidth / 1e12:.2f} TB/s")
    rows = [int(m) for m in args.m.split(",")]
    weights = list(chain.from_iterable(shapes.MODELS.values()))
    products = [shapes.product(m, *weight, "int8", "bfloat16") for m in rows for weight in weights]
    if args.xla:
        measure.autotune_xla([(measure.xla_scaled_mm, measure.specs(product, "int8")) for product in products])
        print(f"{time.monotonic() - began:.1f} s until XLA had chosen its kernels")
    measured, times = [], []
    for product in tqdm(products, unit="product"):
        if time.monotonic() - began > args.seconds:
            break
        m, n, k = product[:3]
        problem = kernels.ScaledMmProblem(*product)
        predicted = candidates(problem, gpu)
        words = {choice: kernels.describe_scaled_mm(choice) for choice in predicted}
        us = dict(zip(predicted, measure.kernel_us(kernels, product, list(predicted), ROUNDS)))
        chosen, fastest = next(iter(predicted)), min(us, key=us.__getitem__)
        bounds = 1e6 * measure.nbytes(product) / bandwidth, 2e-6 * m * n * k / rate
        row = [gpu.name, m, n, k, *bounds, words[chosen], us[chosen], predicted[chosen], words[fastest], us[fastest]]
        if args.xla:
            calls = measure.in_jit(product)
            in_jit = measure.times({name: calls[name] for name in ("jit", "xla")}, str(product))
            row += [median(in_jit[name]) for name in ("jit", "xla")]
        measured.append(dict(zip(COLUMNS, (round(x, 3) if isinstance(x, float) else x for x in row))))
        times += [("int8", 0, m, n, k, words[choice], round(us[choice], 3)) for choice in us]
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(measured)
        if args.kernels:
            with gzip.open(args.kernels, "wt", newline="") as file:
                csv.writer(file).writerows([FIELDS, *times])
    report(measured)


def report(rows):
    """Prints the ratios that decide."""
    ratios = {
        "predicted / measured": [row["predicted_us"] / row["us"] for row in rows],
        "chosen / fastest": [row["us"] / row["fastest_us"] for row in rows],
        "copy / chosen, M up to 16 and 64 MB or more": [
            row["copy_us"] / row["us"] for row in rows if row["m"] <= 16 and row["n"] * row["k"] >= 64e6
        ],
        "mma.sync / chosen, from 100 us of mma.sync on": [
            row["mma_us"] / row["us"] for row in rows if row["mma_us"] >= 100
        ],
        "XLA / ours, in jit": [row["xla_us"] / row["jit_us"] for row in rows if row.get("xla_us")],
    }
    for name, values in ratios.items():
        if values:
            print(f"{name}: {geometric_mean(values):.3f} of {len(values)}, {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
