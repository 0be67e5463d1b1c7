"""Times the quantizers beside a device-to-device copy of as many bytes.

    python benchmarks/quantize.py --out figures.csv

One program quantizes (or copies) enough different inputs to overflow the L2 cache several times, and is called many
times over, so that neither launches nor the cache flatter or hide anything. Bytes count what is read once and what is
written.
"""

import argparse
import csv
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm

SHAPES = ((8192, 8192), (1, 8192), (64, 8192), (4096, 4096), (2048, 28672))
KINDS = (("int8", jnp.int8, True), ("int8 zero point", jnp.int8, False), ("fp8", jnp.float8_e4m3fn, True))
L2_BYTES = 60 << 20


def seconds(function, xs, calls=20, repeats=5):
    """Median seconds of one of the len(xs) operations in the compiled function of xs."""
    jax.block_until_ready([function(xs) for _ in range(3)])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = None
        for _ in range(calls):
            out = function(xs)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls / len(xs))
    return float(np.median(times))


def copy_seconds(count, size):
    """Seconds to copy `size` bytes on the device, which reads and writes 2 * size."""
    xs = [jnp.full((size,), i, jnp.int8) for i in range(count)]
    # The inputs must stay as they are and each output needs its own buffer, so XLA can only copy.
    copies = jax.jit(lambda xs: [jnp.copy(x) for x in xs]).lower(xs).compile()
    text = copies.as_text()
    assert " copy(" in text or "copy-start(" in text or "wrapped_copy" in text, text
    return seconds(copies, xs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    print("kernels:", jax_qmm._ffi.fallback_reason("cuda") or "yes")
    rows = []
    for shape in SHAPES:
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16):
            moved = int(np.prod(shape)) * (dtype.dtype.itemsize + 1)
            count = min(256, max(8, -(-4 * L2_BYTES // moved)))
            key = jax.random.key(0)
            xs = [jax.random.normal(jax.random.fold_in(key, i), shape, dtype) for i in range(count)]
            copy = copy_seconds(count, moved // 2)
            for name, qtype, symmetric in KINDS:
                for granularity, axis in (("per token", -1), ("per tensor", None)):
                    for mode in ("dynamic", "static"):
                        given = {"symmetric": symmetric}
                        if mode == "static":
                            given["scale"] = jnp.full((shape[0], 1) if axis else (), 0.03)
                            if not symmetric:
                                given["zero_point"] = jnp.full_like(given["scale"], -3, jnp.int32)
                        quantize = lambda x: jax_qmm.quantize(x, qtype, axis=axis, **given)
                        took = seconds(jax.jit(lambda xs: [quantize(x) for x in xs]).lower(xs).compile(), xs)
                        row = {"shape": "x".join(map(str, shape)), "dtype": jnp.dtype(dtype).name, "kind": name,
                               "granularity": granularity, "mode": mode, "us": round(took * 1e6, 2),
                               "GB_per_s": round(moved / took * 1e-9), "copy_us": round(copy * 1e6, 2),
                               "percent_of_copy": round(100 * copy / took, 1)}
                        rows.append(row)
                        print(*row.values(), sep="\t", flush=True)
    if args.out:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
