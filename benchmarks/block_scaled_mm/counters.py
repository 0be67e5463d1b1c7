"""What the emulator counts of block_scaled_mm's kernels for 4096 x 4096 weights, bfloat16 x and blocks of 128 columns.

    python benchmarks/block_scaled_mm/counters.py

Needs the emulator's build (tests/emulator/build.py).
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZE, BLOCK = 4096, 128


def run(rows, bits):
    """Runs one product on the emulator."""
    import jax.numpy as jnp

    (built,) = (ROOT / "build" / "emulator").glob("_kernels*.so")
    spec = importlib.util.spec_from_file_location("jax_qmm._kernels", built)
    assert spec and spec.loader
    kernels = sys.modules["jax_qmm._kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    import jax_qmm

    values = jnp.ones((SIZE, SIZE), f"int{bits}")
    w = jax_qmm.QArray(values, jnp.ones((SIZE, SIZE // BLOCK), jnp.bfloat16), tile_size=BLOCK).pack()
    jax_qmm.block_scaled_mm(jnp.ones((rows, SIZE), jnp.bfloat16), w).block_until_ready()


def main():
    columns = "bits", "rows of x", "blocks", "PTX instructions a weight"
    columns += "bytes needed", "read / needed", "asked / needed", "conflicts"
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for bits in (4, 8):
        for rows in (1, 16):
            with tempfile.NamedTemporaryFile() as stats:
                own = {"EMU_STATS": stats.name, "EMU_CHECK": "none", "PYTHONPATH": str(ROOT)}
                subprocess.run([sys.executable, __file__, str(rows), str(bits)], check=True, env=os.environ | own)
                (launch,) = json.loads(Path(stats.name).read_text())
            needed = SIZE * SIZE * bits // 8 + SIZE * SIZE // BLOCK * 2 + rows * SIZE * 2
            instructions = launch["lane_instructions"] / SIZE**2
            ideal = launch["shared_wavefronts_ideal"]
            found = f"{launch['shared_wavefronts'] - ideal} of {ideal}"
            ratios = [f"{launch[key] / needed:.3f}" for key in ("global_loaded_once_bytes", "global_load_bytes")]
            cells = bits, rows, launch["grid"][0], f"{instructions:.2f}", needed, *ratios, found
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    run(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else main()
