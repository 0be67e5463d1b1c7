"""Tuning files in a process that lowers nothing."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_qmm
from jax_qmm import _extension, tuning

pytestmark = pytest.mark.gpu

PRODUCT = tuning.Product(16, 16, 32, 1, "int8", "bfloat16", False)

RUN = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jax_qmm._kernels", sys.argv[1])
kernels = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
import jax, jax.numpy as jnp, jax_qmm
with open(sys.argv[2], "rb") as file:
    program = jax.export.deserialize(file.read())
a = jnp.ones((16, 32), jnp.int8)
print(program.call(a, a)[0, 0])
print(kernels.describe_scaled_mm(kernels.ScaledMmProblem(*{tuple(PRODUCT)}).select(kernels.Gpu.of_device(0))))
"""


@pytest.fixture
def run_exported(extension, tmp_path):
    """Exports a product, imports and calls it in a process with this tuning file; gives what that prints."""

    def run(file):
        product = jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0))
        spec = jax.ShapeDtypeStruct((16, 32), jnp.int8)
        exported = jax.export.export(
            product, platforms=[_extension.platform()], disabled_checks=jax_qmm.export_disabled_checks()
        )(spec, spec)
        program = tmp_path / "program"
        program.write_bytes(exported.serialize())
        own = os.environ | {"JAX_QMM_TUNING": str(file), "JAX_PLATFORM_NAME": _extension.platform()}
        command = [sys.executable, "-c", RUN, extension.__file__, program]
        done = subprocess.run(command, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr

    return run


def test_a_program_that_is_only_imported_reads_its_file(run_exported, tmp_path):
    (result, _), said = run_exported(tmp_path / "none.json")
    assert result == "32"
    assert "none.json is refused" in said


def test_a_program_that_is_only_imported_runs_the_kernel_of_its_file(run_exported, extension, gpu, tmp_path):
    gpu.prepare()
    chosen = extension.ScaledMmProblem(*PRODUCT).select(gpu)
    other = next(words for words, choice in tuning.choices(extension, PRODUCT, gpu).items() if choice != chosen)
    file = tmp_path / "tuning.json"
    tuning.save(file, gpu, [tuning.Entry(PRODUCT, other, 1.0)])
    printed, said = run_exported(file)
    assert printed == ["32", other] and "refused" not in said
