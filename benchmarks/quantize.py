"""Times the quantizers beside a device-to-device copy of as many bytes.

    python benchmarks/quantize.py --out figures.csv

One program quantizes (or copies) enough different inputs to overflow the L2 cache several times. Times are of JAX's
profiler. Bytes count what is read once and what is written.
"""

import argparse
import csv
import functools
import math

import jax
import jax.numpy as jnp

import jax_qmm
from jax_qmm.bench import measure

SHAPES = ((8192, 8192), (1, 8192), (64, 8192), (4096, 4096), (2048, 28672))
KINDS = (("int8", jnp.int8, True), ("int8 zero point", jnp.int8, False), ("fp8", jnp.float8_e4m3fn, True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    _, gpu = measure.open_gpu("quantize.py")
    print(gpu.name, "jax", jax.__version__)
    rows = []
    for shape in SHAPES:
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16):
            moved = math.prod(shape) * (dtype.dtype.itemsize + 1)
            count = measure.count_sets(moved, 256)
            key = jax.random.key(0)
            xs = [jax.random.normal(jax.random.fold_in(key, i), shape, dtype) for i in range(count)]
            copy = moved / measure.copy_bandwidth(moved // 2, count) * 1e6
            for name, qtype, symmetric in KINDS:
                for granularity, axis in (("per token", -1), ("per tensor", None)):
                    for mode in ("dynamic", "static"):
                        given = {"symmetric": symmetric}
                        if mode == "static":
                            given["scale"] = jnp.full((shape[0], 1) if axis else (), 0.03)
                            if not symmetric:
                                given["zero_point"] = jnp.full_like(given["scale"], -3, jnp.int32)
                        quantize = functools.partial(jax_qmm.quantize, qtype=qtype, axis=axis, **given)
                        took = measure.jit_us(quantize, [(x,) for x in xs])
                        row = {
                            "shape": "x".join(map(str, shape)),
                            "dtype": jnp.dtype(dtype).name,
                            "kind": name,
                            "granularity": granularity,
                            "mode": mode,
                            "us": round(took, 2),
                            "GB_per_s": round(moved / took * 1e-3),
                            "copy_us": round(copy, 2),
                            "percent_of_copy": round(100 * copy / took, 1),
                        }
                        rows.append(row)
                        print(*row.values(), sep="\t", flush=True)
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
