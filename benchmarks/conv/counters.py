"""What the emulator counts of the kernels of int8 convolutions for one image, a layer of each kind, and times from it.

python tests/emulator/build.py
EMU_CC=80 python benchmarks/conv/counters.py
"""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = 8  # of the times
# By their datasheets: warp instructions a second at boost clock, 8-bit operations a second, bytes a second.
GPUS = {"A100": (108 * 4 * 1.41e9, 624e12, 2.04e12), "H200": (132 * 4 * 1.98e9, 1979e12, 4.8e12)}
LAYERS = (56, 64, 64), (56, 256, 64, 1), (224, 3, 64, 7, 2), (224, 3, 32, 3, 2), (56, 144, 144, 3, 1, 144)


def run(sizes):
    """Runs one layer on the emulator; prints its words, the bytes of operands and result, and the products."""
    (built,) = (ROOT / "build" / "emulator").glob("_kernels*.so")
    spec = importlib.util.spec_from_file_location("jax_qmm._kernels", built)
    assert spec and spec.loader
    kernels = sys.modules["jax_qmm._kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    from jax_qmm.bench import convs

    layer = convs.Layer(*sizes)
    function, make = convs.contestants("conv", layer, 1)["ours"]
    operands = make(0)
    out = function(*operands).block_until_ready()  # eager: what XLA runs beside the kernel is not the emulator's
    m, n, k = layer.shape(1)
    print(json.dumps([f"{layer}, to {layer.out}", sum(each.nbytes for each in (*operands, out)), m * n * k]))


def main():
    columns = "layer", "kernel", "blocks", "warp instructions", "products of one", "bytes"
    columns += "read", "asked", "conflicts", *(f"us on {gpu}" for gpu in GPUS)
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for sizes in LAYERS:
        with tempfile.NamedTemporaryFile() as stats:
            own = {"EMU_STATS": stats.name, "EMU_CHECK": "none", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, *map(str, sizes)]
            done = subprocess.run(command, check=True, env=os.environ | own, capture_output=True, text=True)
            (launch,) = json.loads(Path(stats.name).read_text())
        layer, needed, products = json.loads(done.stdout.splitlines()[-1])
        instructions, ideal = launch["warp_instructions"], launch["shared_wavefronts_ideal"]
        found = f"{launch['shared_wavefronts'] - ideal} of {ideal}"
        ratios = [f"{launch[key] / needed:.2f}" for key in ("global_loaded_once_bytes", "global_load_bytes")]
        work = instructions, 2 * products, needed
        times = [f"{IMAGES * 1e6 * max(a / b for a, b in zip(work, rates)):.1f}" for rates in GPUS.values()]
        kernel = re.search(r"(\w+)<", launch["kernel"])[1]  # pyright: ignore[reportOptionalSubscript]
        per_warp = f"{products / instructions:.1f}"
        cells = layer, kernel, math.prod(launch["grid"]), instructions, per_warp, needed, *ratios, found, *times
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    run([*map(int, sys.argv[1:])]) if len(sys.argv) > 1 else main()
