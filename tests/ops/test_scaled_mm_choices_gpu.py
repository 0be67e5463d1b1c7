"""Every kernel that can be chosen, each forced in turn, on shapes that are ragged in all it tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm

pytestmark = pytest.mark.gpu

# M, N, K on a GPU, and on the emulator.
SHAPES = {
    (1, 136, 16): (1, 136, 16),
    (7, 200, 4624): (7, 200, 2064),
    (17, 200, 1040): (17, 200, 1040),
    (130, 1544, 272): (130, 1544, 272),  # several tiles for each persistent block
    (66, 267, 1048): (66, 267, 280),  # K a multiple of 8, and rows of the result that start anywhere
    (35, 130, 1044): (35, 130, 396),  # K a multiple of 4
    (333, 392, 2064): (150, 264, 1040),
}
FLOAT16 = pytest.param(jnp.float16, marks=pytest.mark.gpu(not_emulated="bfloat16 has the same kernels"))
# Of the sum of absolute products: tensor cores cut each of the 33 terms of a step at 2**-13 of the largest.
FP8_TOLERANCE = 2.0**-9


@pytest.fixture(params=SHAPES, ids=str)
def shape(request, emulated):
    return SHAPES[request.param] if emulated else request.param


def _operands(m, n, k, dtype):
    rng = np.random.default_rng(m)
    if dtype == jnp.int8:
        a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((m, k), (n, k)))
    else:
        a, b = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in ((m, k), (n, k)))
    scale_a, scale_b, bias = (rng.uniform(-2, 2, size).astype(np.float32) for size in (m, n, n))
    return a, b, scale_a, scale_b, bias


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, FLOAT16, jnp.float32])
def test_every_choice_gives_the_same_int8_result(extension, gpu, oracle, shape, out_dtype):
    m, n, k = shape
    a, b, scale_a, scale_b, bias = _operands(m, n, k, jnp.int8)
    azp = np.arange(m, dtype=np.int32) % 256 - 128
    adj = b.astype(np.int32).sum(axis=1)
    want = oracle.scaled_mm(a, b, scale_a, scale_b, bias, azp=azp, azp_adj=adj, out_dtype=out_dtype)
    key = (m, n, k, 1, "int8", jnp.dtype(out_dtype).name, False)
    for choice in extension.ScaledMmProblem(*key).choices(gpu):
        extension.ScaledMmProblem(*key).tune(choice, gpu)
        call = jax.jit(lambda *x: jax_qmm.scaled_mm_azp_per_token(*x, out_dtype=out_dtype))
        got = np.asarray(call(a, b, scale_a, scale_b, adj, azp, bias))
        np.testing.assert_array_equal(
            got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"), extension.describe_scaled_mm(choice)
        )


def test_every_choice_gives_the_same_sums(extension, gpu, oracle, shape):
    m, n, k = shape
    a, b, *_ = _operands(m, n, k, jnp.int8)
    key = (m, n, k, 1, "int8", "int32", False)
    for choice in extension.ScaledMmProblem(*key).choices(gpu):
        extension.ScaledMmProblem(*key).tune(choice, gpu)
        got = jax.jit(lambda *x: jax_qmm.scaled_mm(*x, 1.0, 1.0, out_dtype=jnp.int32))(a, b)
        np.testing.assert_array_equal(got, oracle.sums(a, b), extension.describe_scaled_mm(choice))


@pytest.mark.parametrize("m", [5, 13, 150])
@pytest.mark.parametrize("shared", [None, "a", "b"])
def test_every_choice_serves_a_batch(extension, gpu, oracle, m, shared):
    n, k, batch = 200, 1040, 3
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (batch, rows, k), np.int8) for rows in (m, n))
    scale_a, scale_b, bias = (rng.uniform(-2, 2, (batch, size)).astype(np.float32) for size in (m, n, n))
    args = dict(a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    axes = [None if name == shared else 0 for name in args]
    args = [x[0] if name == shared else x for name, x in args.items()]
    each = ([x if axis is None else x[i] for x, axis in zip(args, axes)] for i in range(batch))
    want = np.stack([oracle.scaled_mm(*one, out_dtype=jnp.bfloat16) for one in each])
    key = (m, n, k, batch, "int8", "bfloat16", False)
    for choice in extension.ScaledMmProblem(*key).choices(gpu):
        extension.ScaledMmProblem(*key).tune(choice, gpu)
        got = np.asarray(jax.jit(jax.vmap(jax_qmm.scaled_mm, axes))(*args))
        np.testing.assert_array_equal(got.view("u2"), want.view("u2"), extension.describe_scaled_mm(choice))


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("precision", [None, "highest"])
def test_every_choice_gives_the_fp8_result(extension, gpu, oracle, shape, out_dtype, precision):
    m, n, k = shape
    a, b, scale_a, scale_b, bias = _operands(m, n, k, jnp.float8_e4m3fn)
    want = oracle.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=np.float64)
    magnitude = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
    size = np.abs(scale_a)[:, None] * np.abs(scale_b) * magnitude
    bound = FP8_TOLERANCE * size + float(jnp.finfo(out_dtype).eps) * np.abs(want) + 2.0**-20
    key = (m, n, k, 1, "float8_e4m3fn", jnp.dtype(out_dtype).name, precision is None)
    for choice in extension.ScaledMmProblem(*key).choices(gpu):
        extension.ScaledMmProblem(*key).tune(choice, gpu)
        call = jax.jit(lambda *x: jax_qmm.scaled_mm(*x, out_dtype=out_dtype, precision=precision))
        got = np.asarray(call(a, b, scale_a, scale_b, bias)).astype(np.float64)
        assert (np.abs(got - want) <= bound).all(), extension.describe_scaled_mm(choice)
        again = np.asarray(call(a, b, scale_a, scale_b, bias)).astype(np.float64)
        np.testing.assert_array_equal(got, again)
