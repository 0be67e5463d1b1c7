"""A GPU whose SMs are too few for the larger clusters: an emulated one, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.emulator

RUN = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("jax_qmm._kernels", sys.argv[1])
sys.modules[spec.name] = kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
import jax, jax.numpy as jnp, jax_qmm
from jax_qmm import _extension, tuning

product = tuning.Product(16, 128, 1024, 1, "int8", "bfloat16", False)
gpu, problem = _extension.gpu(), kernels.ScaledMmProblem(*product)
before = tuning.choices(kernels, product, gpu)
largest = before[sys.argv[2]]
problem.tune(largest, gpu)
assert problem.select(gpu) == largest
gpu.prepare()
after = tuning.choices(kernels, product, gpu)
try:
    refused = problem.tune(largest, gpu)
except ValueError as error:
    refused = str(error)
a, b = jnp.ones((16, 1024), jnp.int8), jnp.ones((128, 1024), jnp.int8)
out = jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0))(a, b)
right = bool((out == 1024).all())
print(json.dumps([*map(list, (before, after)), problem.tuned(gpu), problem.terms(largest, gpu), refused, right]))
"""
LARGEST = "sm90 64x112x256 cluster 4x2 one tile swapped"


@pytest.mark.parametrize("sms, gone", [(8, set()), (4, {"cluster 4x2", "split-K 6"}), (1, {"cluster", "split-K"})])
def test_a_kernel_whose_clusters_fit_nowhere_is_no_choice(extension, sms, gone):
    own = os.environ | {"EMU_CC": "90", "EMU_SMS": str(sms), "JAX_PLATFORM_NAME": "cpu"}
    command = [sys.executable, "-c", RUN, extension.__file__, LARGEST]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, tuned, terms, refused, right = json.loads(done.stdout)
    assert right
    fit = [words for words in before if not any(part in words.replace("cluster 1x1 ", "") for part in gone)]
    assert after == fit and after
    if gone:  # that it was tuned before is no reason to launch it
        assert tuned is None and terms is None and refused == f"{LARGEST} does not serve this product"
    else:
        assert tuned == 16 and refused is None
