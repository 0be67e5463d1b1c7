"""Calls at the same time: by several threads, and in branches of one CUDA graph."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import _extension

pytestmark = pytest.mark.gpu

K = 256
SHAPES = [(m, n) for m in (1, 16, 65, 150) for n in (16, 144)]  # different kernels


def layer(x, w):
    """A quantizer and a product, and the bits of both."""
    q = jax_qmm.quantize(x)
    y = jax_qmm.scaled_mm(q.qvalue, w, q.scale, 0.01)
    return q.qvalue, jax.lax.bitcast_convert_type(y, jnp.uint16)


def operands():
    rng = np.random.default_rng(0)
    for m, n in SHAPES:
        x = rng.standard_normal((m, K), np.float32)
        yield x, rng.integers(-128, 128, (n, K), np.int8)


def check_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def one_by_one():
    """What `layer` gives for each of the operands."""
    device = jax.devices(_extension.platform())[0]
    return [jax.device_get(jax.jit(layer)(*jax.device_put(pair, device))) for pair in operands()]


def test_threads_call_at_once(one_by_one):
    device = jax.devices(_extension.platform())[0]
    jax.clear_caches()  # so that each thread lowers and compiles as well
    with concurrent.futures.ThreadPoolExecutor(len(SHAPES)) as pool:
        pending = [pool.submit(jax.jit(layer), *jax.device_put(pair, device)) for pair in operands()]
        check_same([future.result() for future in pending], one_by_one)


def test_independent_calls_of_one_program(one_by_one):
    program = jax.jit(lambda pairs: [layer(*pair) for pair in pairs])
    for _ in range(3):  # the first run makes no graph, the second does, the third changes it
        check_same(program([tuple(map(jnp.asarray, pair)) for pair in operands()]), one_by_one)
