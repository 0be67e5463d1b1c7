"""The emulator's own programs: right kernels give no report, each broken variant gives the one that is meant."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulator

PROGRAMS = Path(__file__).parents[2] / "build" / "emulator" / "tests" / "emulator"

# The variants of the programs that are right, and by the report that they must give those that are not.
RIGHT = {"broken": (0, 20, 21, 22, 23), "broken90": (0, 10, 13, *range(20, 28), 40, 41, 42), "im2col": (1, 2, 3)}
BROKEN = {
    ("broken", "memory"): (1, 4),
    ("broken", "race"): (2,),
    ("broken", "async"): (3, 5, 8),
    ("broken", "deadlock"): (6,),
    ("broken", "uninitialized"): (7,),
    ("broken", "warp"): (30,),
    ("broken", "grace"): range(31, 38),
    ("broken90", "async"): (1, 2, 3),
    ("broken90", "race"): (4, 5),
    ("broken90", "deadlock"): (6, 7),
    ("broken90", "fence"): (8, 9, 11, 12, 14, *range(30, 38), 39, 50, 51, 52),
    ("broken90", "grace"): (38,),
    ("im2col", "memory"): (4, 5),
}


def run(program, *arguments):
    """Its exit code, and the kinds of its reports."""
    settings = {"EMU_CHECK": "all", "EMU_CC": "80" if program == "broken" else "90", "EMU_SEED": "0"}
    command = [PROGRAMS / f"emulator_{program}", *arguments]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=60)
    return done.returncode, set(re.findall(r"^\[emu\] (\w+)", done.stderr, re.MULTILINE)), done.stdout + done.stderr


def test_the_language():
    code, _, text = run("language")
    assert code == 0, text


@pytest.mark.parametrize("program, variant", [(p, v) for p, variants in RIGHT.items() for v in variants])
def test_right_kernels_are_not_reported(program, variant):
    code, kinds, text = run(program, str(variant))
    assert code == 0 and not kinds, text


@pytest.mark.parametrize("program, kind, variant", [(*key, v) for key, variants in BROKEN.items() for v in variants])
def test_broken_kernels_are_reported(program, kind, variant):
    code, kinds, text = run(program, str(variant))
    assert code != 0 and kind in kinds, text
