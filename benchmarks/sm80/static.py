"""What can be said of the multistage kernels without a GPU: of their machine code, and of their shared memory.

    python benchmarks/sm80/static.py NVCC CUOBJDUMP

Compiles the kernels that serve a product of 4096 x 4096 x 4096 on sm_80 and sm_89, and prints their registers, spills
and the share of tensor-core instructions in their main loops. Where the emulator's build is (tests/emulator/build.py),
it runs them there for two K and prints the bank conflicts that the longer K adds, which are those of the main loop.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = (  # dtype of the operands, line of the table, words
    ("int8", "kS8, kFull, 128, 128, 64, 2, 2, 1, 3", "sm80 128x128x64 3 stages"),
    ("float8_e4m3fn", "kF8E4M3, kFast, 128, 256, 64, 2, 4, 1, 4", "sm80 128x256x64 4 stages"),
    ("float8_e4m3fn", "kF8E4M3, kFull, 128, 128, 64, 2, 4, 1, 3", "sm80 128x128x64 3 stages full accumulation"),
)
SOURCE = """
#include "scaled_mm/gemm_sm80.cuh"
#define MULTISTAGE(...) template struct JAX_QMM_MULTISTAGE(__VA_ARGS__);
MULTISTAGE(%s)
"""
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
TENSOR = ("IMMA", "HMMA", "QMMA")


def compile_kernel(nvcc, line, arch, folder):
    """Compiles one kernel; gives the object file and what ptxas says."""
    source, target = Path(folder, "kernel.cu"), Path(folder, "kernel.o")
    source.write_text(SOURCE % line)
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-O3", "-DNDEBUG", f"-I{ROOT / 'cuda'}", "-Xptxas", "-v"]
    code = f"arch=compute_{arch},code=sm_{arch}"
    done = subprocess.run(
        [nvcc, *flags, "-gencode", code, "-c", source, "-o", target], capture_output=True, text=True, check=True
    )
    return target, done.stderr


def main_loop(sass):
    """The instructions of the loop that has the most tensor-core instructions, as it runs for rows of 16 bytes."""
    code = [(int(m[1], 16), m[2], m[3]) for m in map(INSTRUCTION.match, sass.splitlines()) if m]
    jumps = {
        at: int(target[1], 16)
        for at, opcode, operands in code
        if opcode.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)$", operands))
    }
    loops = [(target, at) for at, target in jumps.items() if target < at]
    products = {at for at, opcode, _ in code if opcode.startswith(TENSOR)}
    first, last = max(loops, key=lambda loop: (sum(loop[0] <= at <= loop[1] for at in products), loop[0] - loop[1]))
    blocks, starts = [[]], {*jumps.values()}
    for at, opcode, _ in code:
        if not first <= at <= last:
            continue
        if at in starts:
            blocks.append([])
        blocks[-1].append(opcode)
        if at in jumps:
            blocks.append([])
    in_parts = lambda block: any(op.startswith("LDGSTS") and not op.endswith("128") for op in block)
    return [op for block in blocks if not in_parts(block) for op in block]


def conflicts(dtype, words, capability):
    """Wavefronts of shared memory in the main loop of a kernel, and the fewest possible."""
    counts = []
    for k in (512, 1024):
        with tempfile.NamedTemporaryFile() as stats:
            own = {"EMU_STATS": stats.name, "EMU_CC": capability, "EMU_CHECK": "none", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, "--run", dtype, words, str(k)]
            subprocess.run(command, check=True, env=os.environ | own)
            (launch,) = json.loads(Path(stats.name).read_text())
            counts.append((launch["shared_wavefronts"], launch["shared_wavefronts_ideal"]))
    return [long - short for short, long in zip(*counts)]


def run(dtype, words, k):
    """Runs one product by one kernel on the emulator."""
    import importlib.util

    import jax
    import jax.numpy as jnp

    (built,) = (ROOT / "build" / "emulator").glob("_kernels*.so")
    spec = importlib.util.spec_from_file_location("jax_qmm._kernels", built)
    assert spec and spec.loader
    kernels = sys.modules["jax_qmm._kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    import jax_qmm
    from jax_qmm import _extension, tuning

    highest = "full accumulation" in words
    product = tuning.Product(256, 256, k, 1, dtype, "bfloat16", dtype != "int8" and not highest)
    gpu = _extension.gpu()
    kernels.ScaledMmProblem(*product).tune(tuning.choices(kernels, product, gpu)[words], gpu)
    x = jnp.ones((256, k), dtype)
    one, precision = jnp.float32(1), "highest" if highest else None
    jax.jit(lambda x: jax_qmm.scaled_mm(x, x, one, one, precision=precision))(x).block_until_ready()


def main(nvcc, cuobjdump):
    emulated = any((ROOT / "build" / "emulator").glob("_kernels*.so"))
    columns = "kernel", "operands", "arch", "registers", "spilled bytes", "main loop", "tensor cores", "conflicts"
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for dtype, line, words in KERNELS:
        for arch in ("80", "89"):
            with tempfile.TemporaryDirectory() as folder:
                target, said = compile_kernel(nvcc, line, arch, folder)
                sass = subprocess.run([cuobjdump, "-sass", target], capture_output=True, text=True, check=True).stdout
            registers = re.search(r"Used (\d+) registers", said)
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
            assert registers and spills
            body = main_loop(sass)
            tensor = sum(op.startswith(TENSOR) for op in body)
            found = "not run"
            if emulated:
                wavefronts, ideal = conflicts(dtype, words, arch)
                found = f"{wavefronts - ideal} of {ideal}"
            print(
                f"| {words} | {dtype} | sm_{arch} | {registers[1]} | {int(spills[1]) + int(spills[2])} | {len(body)} | "
                f"{tensor} ({tensor / len(body):.0%}) | {found} |"
            )


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(*sys.argv[1:])
