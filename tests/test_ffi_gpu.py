"""Programs of so many calls that XLA makes CUDA graphs of them: recorded kernels wait for each other's results.

A program's first run is no graph, the second makes it, later ones change the arguments of its kernels. Steps jitted one by
one are too short for graphs; they give the same bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import _compat, _ffi

pytestmark = pytest.mark.gpu

RUNS, STEPS = 4, 3


@pytest.fixture
def kernels():
    kernels, why = _ffi._load()
    assert kernels is not None, why
    yield kernels
    kernels.clear_scaled_mm_tuning()


def check_chain(step, inputs, *constants, message=""):
    """STEPS of `step` in one program, on each of the inputs, against the same one by one."""
    def chain(x, *constants):
        for _ in range(STEPS):
            x = step(x, *constants)
        return x

    program, one = jax.jit(chain), jax.jit(step)
    for x in inputs:
        want = x
        for _ in range(STEPS):
            want = one(want, *constants)
        got = np.asarray(program(x, *constants))
        np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), np.asarray(want).view(f"u{got.itemsize}"), message)


def random_bits(dtype, *shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32) * (50 if dtype == jnp.int8 else 1)
    return jnp.asarray(x).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("m", [7, 150])
def test_every_kernel_is_recorded(kernels, dtype, m):
    k = 1040
    b, *inputs = (random_bits(dtype, rows, k) for rows in (k, *[m] * RUNS))
    scale = jnp.full(m, 0.03 if dtype == jnp.float8_e4m3fn else 6e-4)

    def step(a, b, scale):
        return jax_qmm.scaled_mm(a, b, scale, 1.0).astype(dtype)

    key = (m, k, k, 1, str(jnp.dtype(dtype)), "bfloat16", dtype != jnp.int8)
    for choice in kernels.scaled_mm_choices(*key):
        kernels.tune_scaled_mm(*key, choice)
        check_chain(lambda *x: step(*x), inputs, b, scale, message=kernels.describe_scaled_mm(choice))


@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("axis", [-1, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantizers_are_recorded(scale, axis, symmetric):
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.standard_normal((64, 2049), np.float32)) for _ in range(RUNS)]
    given = {} if scale is None else {"scale": scale} | ({} if symmetric else {"zero_point": 3})

    def step(x):
        return 1.01 * jnp.roll(jax_qmm.quantize(x, axis=axis, symmetric=symmetric, **given).dequantize(), 1, 0)

    check_chain(step, inputs)


def test_empty_products_are_nothing_to_record():
    b, *inputs = (random_bits(jnp.int8, rows, 32) for rows in (32, 0, 0, 0))
    check_chain(lambda a, b: sum(jax_qmm.scaled_mm(a + i, b, 1.0, 1.0) for i in range(5)).astype(jnp.int8), inputs, b)


@pytest.mark.skipif(not _compat.records_kernels(), reason="this jaxlib captures kernels")
def test_a_recorded_kernel_is_not_replaced(kernels):
    m, k = 16, 512
    key = (m, k, k, 1, "int8", "bfloat16", False)
    b, *inputs = (random_bits(jnp.int8, rows, k) for rows in (k, *[m] * RUNS))
    program = jax.jit(lambda a, b: [jax_qmm.scaled_mm(a + i, b, 1.0, 1.0) for i in range(8)])
    first, second, *_ = kernels.scaled_mm_choices(*key)
    kernels.tune_scaled_mm(*key, first)
    for x in inputs[:3]:
        jax.block_until_ready(program(x, b))
    kernels.tune_scaled_mm(*key, second)
    with pytest.raises(Exception, match="compile it again"):
        jax.block_until_ready(program(inputs[3], b))
