"""What the emulator counts of products of 8 bits in blocks, and what time 4096 x 4096 x 4096 takes at least by it.

python tests/emulator/build.py
EMU_CC=80 python benchmarks/block_quantized_mm/counters.py   # as an A100; without EMU_CC as an H200
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZE, PART = 4096, 256  # of the product, and M and N of the part that is run, with all of K
# By their datasheets: SMs, warp instructions a second at boost clock, 8-bit operations a second, bytes a second.
GPUS = {
    "90": ("NVIDIA H200", 132, 132 * 4 * 1.98e9, 1979e12, 4.8e12),
    "80": ("NVIDIA A100-SXM4-80GB", 108, 108 * 4 * 1.41e9, 624e12, 2.04e12),
}
# dtype (int4: of w, beside int8 that W4A8 makes of x), block, zero points of x
KINDS = (
    ("int8", 128, 0),
    ("float8_e4m3fn", 128, 0),
    ("int8", 128, 1),
    ("int8", 256, 0),
    ("int8", 64, 0),
    ("int8", 32, 0),
    ("int4", 128, 0),
)


def run(arch, dtype, block, zero_points):
    """Runs the part on the emulator, by the kernel that is chosen for the product; prints its words."""
    (built,) = (ROOT / "build" / "emulator").glob("_kernels*.so")
    spec = importlib.util.spec_from_file_location("jax_qmm._kernels", built)
    assert spec and spec.loader
    kernels = sys.modules["jax_qmm._kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    import jax.numpy as jnp

    import jax_qmm

    name, sms, *_ = GPUS[arch]
    gpu, groups = kernels.Gpu(name, sms, int(arch)), (PART, SIZE // block)
    if dtype == "int4":
        from jax_qmm.ops.expanded_mm import expanded_mm

        words = kernels.ExpandedMmProblem(SIZE, SIZE, SIZE, 1, "bfloat16", block).select(gpu)
        kernels.restrict_expanded_mm(words)
        operands = jnp.ones((PART, SIZE), "int8"), jnp.ones((PART, SIZE), "int4"), jnp.ones(groups, "int8")
        scales = {"scale_a": jnp.ones(PART), "scale_b": jnp.ones(PART)}
        expanded_mm(*operands, block=block, out_dtype=jnp.bfloat16, **scales).block_until_ready()
        return print(words)
    problem = kernels.BlockQuantizedMmProblem(SIZE, SIZE, SIZE, 1, dtype, "bfloat16", block, "a" if zero_points else "")
    words = problem.select(gpu)
    kernels.restrict_block_quantized_mm(words)
    ones = jnp.ones((PART, SIZE), dtype), jnp.ones(groups)
    x = jax_qmm.QArray(*ones, jnp.ones(groups, jnp.int32) if zero_points else None, tile_size=block)
    w = jax_qmm.QArray(*ones, azp_adj=jnp.full(groups, block, jnp.int32), tile_size=block)
    jax_qmm.block_scaled_mm(x, w, out_dtype=jnp.bfloat16).block_until_ready()
    print(words)


def main():
    arch = os.environ.get("EMU_CC", "90")
    name, _, *rates = GPUS[arch]
    columns = "operands", "kernel", "products of a warp instruction", "conflicts"
    columns += "us of instructions", "of products", "of bytes"
    print(f"{name}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for kind in KINDS:
        with tempfile.NamedTemporaryFile() as stats:
            own = {"EMU_STATS": stats.name, "EMU_CHECK": "none", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, __file__, arch, *map(str, kind)]
            done = subprocess.run(command, check=True, env=os.environ | own, capture_output=True, text=True)
            (launch,) = json.loads(Path(stats.name).read_text())
        dtype, block, zero_points = kind
        nbytes = 2 * SIZE**2 * (1 + 4 / block * (1 + zero_points)) + 2 * SIZE**2  # values with their terms, the result
        if dtype == "int4":
            nbytes = SIZE**2 * (1 + 1 / 2 + 1 / block) + 2 * SIZE**2
        parts, ideal = (SIZE / PART) ** 2, launch["shared_wavefronts_ideal"]
        as_16_bits = arch == "80" and dtype == "float8_e4m3fn"  # which takes the tensor cores twice as long
        work = parts * launch["warp_instructions"], 2 * SIZE**3 * (1 + as_16_bits), nbytes
        times = [f"{1e6 * each / rate:.0f}" for each, rate in zip(work, rates)]
        cells = f"{dtype}, blocks of {block}{', zero points' * zero_points}", done.stdout.splitlines()[-1]
        cells += (
            f"{PART**2 * SIZE / launch['warp_instructions']:.0f}",
            f"{launch['shared_wavefronts'] - ideal} of {ideal}",
        )
        cells += tuple(times)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    arch, dtype, *numbers = sys.argv[1:] or ["", ""]
    run(arch, dtype, *map(int, numbers)) if arch else main()
