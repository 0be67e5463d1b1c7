"""Breaks the kernels, one place at a time, and says whether the GPU tests on the emulator notice, and by what.

    python tests/emulator/mutants.py [PART OF A NAME ...]

Works on a copy of the sources in build/emulator/mutants, where each mutant compiles only what it changes, for a minute.
Ends with 1 if a mutant that must be noticed is not, or if the tests of the unchanged kernels fail.
"""

import os
import re
import subprocess
import sys

from build import BUILD, ROOT, build
from mutations import MUTANTS, TESTS

COPY = BUILD / "mutants"
# A few kernels, so that compiling a mutant is quick: of each family those that have all its parts.
KERNELS = """
GEMM(kS8, kFull, 2, 128, 128, 128, 2, 1, kPingpong, false)
GEMM(kS8, kFull, 2, 256, 128, 128, 1, 2, kCooperative, false)
SKINNY(kS8, 2, 16, 2, 2)
MULTISTAGE(kS8, kFull, 16, 64, 128, 1, 2, 2, 6)
MULTISTAGE(kS8, kFull, 128, 128, 64, 2, 2, 1, 3)
ONE_TILE(kS8, 2, 64, 16, 256, 1, 1, 1, 1, false)
ONE_TILE(kS8, 2, 128, 128, 128, 2, 1, 1, 1, false)
ONE_TILE(kS8, 2, 64, 32, 128, 1, 1, 6, 1, true)
RESIDENT_B(64)
RESIDENT_B(128)
"""


def copy_sources():
    """Brings the copy up to date; what has not changed keeps its time."""
    parts = ["cuda", "jax_qmm", "tests", "build_backend", "*.toml", "CMakeLists.txt"]
    command = ["git", "ls-files", "-co", "--exclude-standard", *parts]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():  # and not deleted
            own = KERNELS.encode() if name == "tests/emulator/kernels.txt" else None
            write(COPY / name, own or (ROOT / name).read_bytes())


def write(path, content):
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def run_tests(family):
    """What notices: the kinds of reports, or "values" or "crash" without one; empty if the tests pass."""
    command = [sys.executable, "-m", "pytest", "--emulator", "-q", "-p", "no:cacheprovider", *TESTS[family]]
    settings = {"EMU_SEED": "0", "EMU_CC": "80" if family == "multistage" else "90"}  # Hopper has other kernels
    done = subprocess.run(command, cwd=COPY, capture_output=True, text=True, env=os.environ | settings)
    kinds = sorted(set(re.findall(r"\[emu\] (\w+)", done.stdout)))
    if not kinds and done.returncode < 0:
        kinds = ["crash"]
    if not kinds and done.returncode == 1 and "AssertionError" in done.stdout:
        kinds = ["values"]
    if bool(kinds) != bool(done.returncode):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return kinds


def main(words):
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    folder = COPY / "build" / "emulator"
    copy_sources()
    build(COPY, folder)
    unexpected = 0
    for family in dict.fromkeys(mutant.family for mutant in chosen):
        kinds = run_tests(family)
        unexpected += bool(kinds)
        print(f"{family}: unchanged | {', '.join(kinds) or 'passes'}", flush=True)
        for mutant in chosen:
            if mutant.family != family:
                continue
            path = COPY / "cuda" / mutant.file
            text = path.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.file} has {text.count(mutant.old)} times, not once: {mutant.old!r}")
            path.write_text(text.replace(mutant.old, mutant.new))
            try:
                build(COPY, folder)
                kinds = run_tests(family)
            finally:
                path.write_text(text)
            unexpected += mutant.noticed != bool(kinds)
            print(f"{mutant.name} | {', '.join(kinds) or 'not noticed'}", flush=True)
        build(COPY, folder)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
