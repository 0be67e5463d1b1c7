"""What the kernels' machine code must keep, whatever the compiler moves: no load ahead of the kernel before them.

A kernel may start while the one before it ends, and waits for that one's results (griddepcontrol.wait, in machine code
ACQBULK) before it reads global memory. Nothing tells the compiler that plain loads must stay behind CUTLASS' wait.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# What reads global memory. Prefetches (CCTL, UTMAPF) may come early: they change no value.
PLAIN_LOAD = re.compile(r"(LDG|LD|LDGSTS|ATOM|ATOMG|RED|REDG)(\.|$)")
BULK_LOAD = re.compile(r"(UTMALDG|UBLKCP)(\.|$)")
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*(.*?)\s*;")


def early_loads(code: list[tuple[int, str, str, str]]) -> list[str]:
    """Loads that are reached before the wait, of a kernel's (address, predicate, opcode, operands).

    What the bulk loads of another warp have brought comes after that warp's wait: behind a wait on an mbarrier, or for
    the products of it, plain loads are in order, too.
    """
    at = {address: i for i, (address, *_) in enumerate(code)}
    found, seen = set(), set()
    paths = [(0, False)]  # where a path goes on, and whether it has waited for data of bulk loads
    while paths:
        i, ordered = path = paths.pop()
        if i >= len(code) or path in seen or (i, False) in seen:
            continue
        seen.add(path)
        address, predicate, opcode, operands = code[i]
        if opcode == "ACQBULK" and not predicate:
            continue
        if BULK_LOAD.match(opcode) or (PLAIN_LOAD.match(opcode) and not ordered):
            found.add(f"{address:04x} {opcode} {operands}")
        ordered = ordered or "TRYWAIT" in opcode or opcode == "WARPGROUP.DEPBAR.LE"
        if opcode.startswith(("BRX", "JMX", "JMP", "CALL.ABS")):
            raise NotImplementedError(f"{opcode} {operands}: where it goes is not known here")
        target = re.search(r"(?:0x|`\(\.L_x_)?([0-9a-f]+)\)?$", operands)
        if opcode.startswith(("BRA", "CALL")) and target:
            paths.append((at[int(target[1], 16)], ordered))
        ends = opcode.startswith(("BRA", "EXIT", "RET")) and not predicate and "," not in operands
        if not ends:
            paths.append((i + 1, ordered))
    return sorted(found)


def parse(text: str) -> dict[str, list[tuple[int, str, str, str]]]:
    """The kernels in what cuobjdump -sass prints, by their architecture and name."""
    kernels, arch = {}, ""
    for line in text.splitlines():
        if "code for sm_" in line:
            arch = line.split("code for ")[1].strip()
        elif "Function : " in line:
            code = kernels[f"{arch} {line.split('Function : ')[1].strip()}".strip()] = []
        elif match := INSTRUCTION.match(line):
            address, predicate, opcode, operands = match.groups()
            code.append((int(address, 16), predicate or "", opcode, operands))
    return kernels


@functools.cache
def cuobjdump():
    """CUDA's disassembler, which Triton's wheel has too; None without one."""
    triton = importlib.util.find_spec("triton")
    folders = [Path(folder) / "backends/nvidia/bin" for folder in triton.submodule_search_locations] if triton else []
    return shutil.which("cuobjdump") or next((path for f in folders if (path := f / "cuobjdump").exists()), None)


@pytest.fixture(scope="module")
def kernels():
    from jax_qmm import _extension

    extension, why = _extension._load()
    if extension is None:
        pytest.skip(why)
    if cuobjdump() is None:
        pytest.skip("cuobjdump is absent: it comes with CUDA and with the package triton")
    done = subprocess.run([cuobjdump(), "-sass", extension.__file__], capture_output=True, text=True, check=True)
    kernels = parse(done.stdout)
    if not kernels:
        pytest.skip("this build has no machine code")  # as on tests/emulator
    return kernels


def test_no_kernel_loads_before_the_results_of_the_kernel_before_it(kernels):
    """Of those that may start early: see launches_overlap in cuda/core/launch.h."""
    kernels = {name: code for name, code in kernels.items() if int(re.match(r"sm_(\d+)", name)[1]) >= 90}
    if not kernels:
        pytest.skip("this build has no machine code for Hopper or later")
    assert all(any(opcode == "ACQBULK" for _, _, opcode, _ in code) for code in kernels.values())
    early = {name: loads for name, code in kernels.items() if (loads := early_loads(code))}
    assert not early


def sass(*lines):
    (code,) = parse("Function : kernel\n" + "\n".join(f"/*{16 * i:04x}*/ {x} ;" for i, x in enumerate(lines))).values()
    return code


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        (["ACQBULK", "LDG.E R0, [R2]", "EXIT"], []),
        (["LDG.E R0, [R2]", "ACQBULK", "EXIT"], ["0000 LDG.E R0, [R2]"]),
        (["@P0 BRA 0x30", "ACQBULK", "EXIT", "LDG.E R0, [R2]", "EXIT"], ["0030 LDG.E R0, [R2]"]),
        (["@P0 ACQBULK", "@!P0 LDG.E R0, [R2]", "EXIT"], ["0010 LDG.E R0, [R2]"]),
        (["CCTL.E.PF2 [R2]", "UTMAPF.L2.3D [UR8], [UR4]", "ACQBULK", "UTMALDG.3D [UR8], [UR4]", "EXIT"], []),
        (["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3", "LDG.E R0, [R2]", "EXIT"], []),
        (["@P0 BRA 0x20", "HGMMA.64x8x32.F32 R0", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LDG.E R0, [R2]", "EXIT"], []),
        (["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3", "UTMALDG.3D [UR8], [UR4]"], ["0010 UTMALDG.3D [UR8], [UR4]"]),
        (["BRA 0x20", "LDG.E R0, [R2]", "ACQBULK", "BRA 0x10"], []),
    ],
)
def test_early_loads_are_found(lines, early):
    assert early_loads(sass(*lines)) == early
