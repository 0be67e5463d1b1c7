"""Tuning files in a process that lowers nothing."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_qmm
from jax_qmm import _extension

pytestmark = pytest.mark.gpu

RUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jax_qmm._kernels", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
import jax, jax.numpy as jnp, jax_qmm
with open(sys.argv[2], "rb") as file:
    program = jax.export.deserialize(file.read())
a = jnp.ones((16, 32), jnp.int8)
print(program.call(a, a)[0, 0])
"""


def test_a_program_that_is_only_imported_reads_its_file(extension, tmp_path):
    product = jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0))
    spec = jax.ShapeDtypeStruct((16, 32), jnp.int8)
    exported = jax.export.export(
        product, platforms=[_extension.platform()], disabled_checks=jax_qmm.export_disabled_checks()
    )(spec, spec)
    program = tmp_path / "program"
    program.write_bytes(exported.serialize())
    own = os.environ | {"JAX_QMM_TUNING": str(tmp_path / "none.json"), "JAX_PLATFORM_NAME": _extension.platform()}
    command = [sys.executable, "-c", RUN, extension.__file__, program]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.stdout.strip() == "32", done.stderr
    assert "none.json is refused" in done.stderr
