"""Calls at the same time: by several threads, in branches of one CUDA graph, and on two GPUs."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

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


@pytest.fixture
def two_devices():
    devices = jax.devices(_extension.platform())[:2]
    if len(devices) < 2:
        pytest.skip("one GPU")
    if reason := _extension.fallback_reason(_extension.platform(), devices):
        pytest.skip(reason)
    return devices


def test_two_gpus_give_the_same_bits(two_devices, one_by_one):
    program = jax.jit(layer)
    runs = [[program(*jax.device_put(pair, device)) for pair in operands()] for device in two_devices]
    for got in runs:
        check_same(got, one_by_one)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("spec_a, spec_b", [(P("d"), P()), (P(), P("d")), (P(None, "d"), P(None, "d"))])
def test_a_product_split_over_two_gpus(two_devices, dtype, spec_a, spec_b):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 8, (rows, K)).astype(np.int8) for rows in (64, 128))  # sums that fp8 has exactly, too
    want = a.astype(np.float32) @ b.astype(np.float32).T
    mesh = Mesh(two_devices, "d")
    put = lambda x, spec: jax.device_put(jnp.asarray(x).astype(dtype), NamedSharding(mesh, spec))
    product = jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=jnp.float32))
    np.testing.assert_array_equal(product(put(a, spec_a), put(b, spec_b)), want)
