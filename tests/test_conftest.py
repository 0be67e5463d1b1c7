"""How the tests skip and refuse to, in pytest processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_qmm import _extension

GPU_TESTS = Path(__file__).with_name("test_extension_gpu.py")


@pytest.fixture
def run():
    if _extension._gpus():
        pytest.skip("a GPU, with which nothing is skipped")

    def run(**environment):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", GPU_TESTS]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)

    return run


def test_skipped_tests_are_counted_by_reason(run):
    done = run()
    lines = [line for line in done.stdout.splitlines() if "skipped: " in line]
    assert done.returncode == 0 and len(lines) == 1 and "no GPU" in lines[0]


def test_a_required_gpu_that_is_absent_ends_the_run(run):
    done = run(JAX_QMM_REQUIRE_GPU="1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the tests marked gpu can't run: no GPU" in done.stderr
