"""scaled_mm on the GPU: int8 bit for bit, float8 within the bound of the tensor cores' arithmetic."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import _extension
from jax_qmm.reference import scaled_mm as reference

pytestmark = pytest.mark.gpu

NO_ACTIVATION = dict(activation="none", low=np.float32(-np.inf), high=np.float32(np.inf))  # of the handler
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RAGGED = (
    [(m, 64, 128) for m in range(1, 34)]
    + [(m, n, k) for m in (1, 7, 33, 100, 129, 300) for n, k in ((65, 33), (127, 515), (264, 1041), (1, 96), (8, 7))]
    + [(129, 257, 1), (1, 1, 1), (64, 4096, 272), (300, 40, 4100)]
)


def int8(rng, *shape):
    return rng.integers(-128, 128, shape, dtype=np.int8)


def operands(m, n, k, seed=0):
    """a, b, scale_a, scale_b and bias."""
    rng = np.random.default_rng([seed, m, n, k])
    return (
        int8(rng, m, k),
        int8(rng, n, k),
        rng.random(m, np.float32) * 0.1,
        rng.random(n, np.float32) * 0.1,
        100 * rng.standard_normal(n, np.float32),
    )


def assert_same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def call(f=jax_qmm.scaled_mm, **kwargs):
    return jax.jit(lambda *args: f(*args, **kwargs))


@jax.jit
def raw_sums(a, b):
    return jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=jnp.int32)


def test_a_kernel_runs():
    assert _extension.fallback_reason(_extension.platform()) is None
    text = call().lower(*operands(16, 16, 16)).compile().as_text()
    assert 'custom_call_target="jax_qmm_scaled_mm"' in text


@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_int8_is_exact_for_every_shape(oracle, shape):
    a, b, scale_a, scale_b, bias = operands(*shape)
    assert_same(call()(a, b, scale_a, scale_b, bias), oracle.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=BF16))
    assert_same(raw_sums(a, b), oracle.sums(a, b))


@pytest.mark.parametrize("shape", [(33, 72, 144), (130, 257, 515)], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("bias_dtype", [None, "out", np.float32])
@pytest.mark.parametrize("zero_points", ["none", "tensor", "token"])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_every_epilogue(oracle, shape, out_dtype, bias_dtype, zero_points, per_tensor):
    a, b, scale_a, scale_b, bias = operands(*shape)
    if per_tensor:
        scale_a, scale_b = scale_a[0], scale_b[0]
    bias = None if bias_dtype is None else bias.astype(out_dtype if bias_dtype == "out" else bias_dtype)
    adj = b.astype(np.int32).sum(1)
    azp = np.random.default_rng(1).integers(-128, 128, shape[0]).astype(np.int32)
    f, extra, known = {
        "none": (jax_qmm.scaled_mm, (), {}),
        "tensor": (jax_qmm.scaled_mm_azp, (-77 * adj,), dict(azp_adj=-77 * adj)),
        "token": (jax_qmm.scaled_mm_azp_per_token, (adj, azp), dict(azp_adj=adj, azp=azp)),
    }[zero_points]
    got = call(f, out_dtype=out_dtype)(a, b, scale_a, scale_b, *extra, bias)
    assert_same(got, oracle.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=out_dtype, **known))


@pytest.mark.parametrize("dtype_a", [BF16, np.float16])
@pytest.mark.parametrize("dtype_b", [BF16, np.float16, np.float32])
def test_scale_dtypes(oracle, dtype_a, dtype_b):
    a, b, scale_a, scale_b, bias = operands(130, 72, 144)
    scale_a, scale_b = scale_a.astype(dtype_a), scale_b.astype(dtype_b)
    assert_same(call()(a, b, scale_a, scale_b, bias), oracle.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=BF16))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -3.0, 1e-40, 3e38])
def test_odd_scales(oracle, value):
    a, b, scale_a, scale_b, bias = operands(33, 72, 144)
    scale_a[3] = scale_b[5] = value
    for out_dtype in (np.float16, np.float32):
        want = oracle.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
        assert_same(call(out_dtype=out_dtype)(a, b, scale_a, scale_b, bias), want)


def test_a_negative_zero_survives_without_a_bias():
    a, b = np.zeros((5, 16), np.int8), np.zeros((8, 16), np.int8)
    assert np.signbit(np.asarray(call(out_dtype=jnp.float32)(a, b, np.float32(-1), np.float32(1)))).all()


@pytest.mark.parametrize("m", [1, 130])
def test_sums_wrap_at_the_extremes(oracle, m):
    a = np.full((m, 131072), -128, np.int8)
    b = np.stack([np.full(131072, v, np.int8) for v in (-128, 127, 0, -1, 1, 5, 6, 7)])
    assert_same(raw_sums(a, b), oracle.sums(a, b))
    b[0, 0] = 127
    assert_same(call()(a, b, np.float32(1), np.float32(1)), oracle.scaled_mm(a, b, np.float32(1), 1, out_dtype=BF16))


def test_zero_points_wrap(oracle):
    a, b, scale_a, scale_b, bias = operands(17, 72, 144)
    adj, azp = np.full(72, 2**30, np.int32), np.arange(17, dtype=np.int32)
    got = call(jax_qmm.scaled_mm_azp_per_token, out_dtype=jnp.float32)(a, b, scale_a, scale_b, adj, azp, bias)
    assert_same(got, oracle.scaled_mm(a, b, scale_a, scale_b, bias, azp=azp, azp_adj=adj))


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (8, 16, 0), (0, 0, 0), (1, 9, 0)], ids=str)
def test_empty_dimensions(oracle, shape):
    args = operands(*shape)
    assert_same(call()(*args), oracle.scaled_mm(*args, out_dtype=BF16))


@pytest.mark.parametrize("shape", [(130, 72, 144), (3, 9, 33)], ids=str)
@pytest.mark.parametrize("mapped", ["a", "b", "ab", "abs", "s", "t", "bc", "absctz", "az", "acz"])
def test_vmap_over_any_mix(oracle, shape, mapped):
    """a, b, s and t: the scales, c: bias, z: azp."""
    m, n, k = shape
    a, b, scale_a, scale_b, bias = (np.stack(x) for x in zip(*(operands(*shape, seed) for seed in range(3))))
    adj, azp = (b.astype(np.int32).sum(2), np.random.default_rng(1).integers(-128, 128, (3, m)).astype(np.int32))
    args = dict(a=a, b=b, s=scale_a, t=scale_b, j=adj, z=azp, c=bias)
    axes = [0 if name in mapped else None for name in args]
    args = [x if name in mapped else x[0] for name, x in args.items()]
    f = call(jax_qmm.scaled_mm_azp_per_token, out_dtype=jnp.float32)
    got = jax.jit(jax.vmap(f, axes))(*args)
    for i in range(3):
        a, b, s, t, adj, azp, bias = (x if axis is None else x[i] for x, axis in zip(args, axes))
        assert_same(got[i], oracle.scaled_mm(a, b, s, t, bias, azp=azp, azp_adj=adj))


def test_nested_vmap_and_leading_dimensions(oracle):
    rng = np.random.default_rng(0)
    a, b, s = int8(rng, 2, 3, 5, 7, 40), int8(rng, 3, 9, 40), rng.random((2, 5, 7), np.float32)
    f = lambda a, b, s: jax_qmm.scaled_mm(a, b, s, np.float32(0.5), out_dtype=jnp.float32)
    got = jax.jit(jax.vmap(jax.vmap(f, (0, 0, None)), (0, None, 0)))(a, b, s)
    for i, j in np.ndindex(2, 3):
        assert_same(got[i, j], oracle.scaled_mm(a[i, j], b[j], s[i], np.float32(0.5)))


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_slices_of_larger_arrays(oracle, offset):
    a, b, scale_a, scale_b, bias = operands(40, 72, 131)
    f = lambda *args: jax_qmm.scaled_mm(*(x[offset:] for x in args))
    assert_same(
        jax.jit(f)(a, b, scale_a, scale_b, bias),
        oracle.scaled_mm(a[offset:], b[offset:], scale_a[offset:], scale_b[offset:], bias[offset:], out_dtype=BF16),
    )


@pytest.mark.parametrize("shape", [(1, 256, 256), (33, 65, 33), (300, 264, 1041)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(shape):
    a, b, scale_a, scale_b, bias = operands(*shape)
    whole = np.asarray(call()(a, b, scale_a, scale_b, bias))
    for row in {0, shape[0] // 2, shape[0] - 1}:
        assert_same(call()(a[row : row + 1], b, scale_a[row : row + 1], scale_b, bias), whole[row : row + 1])


def test_the_reference_agrees_bit_for_bit():
    a, b, scale_a, scale_b, bias = operands(130, 257, 515)
    for out_dtype in (BF16, np.float16, np.float32):
        got = call(out_dtype=out_dtype)(a, b, scale_a, scale_b, bias)
        with jax.default_device(jax.devices("cpu")[0]):
            vectors = dict(scale_a=scale_a, scale_b=scale_b, bias=bias)
            want = jax.jit(lambda a, b, v: reference.scaled_mm(a, b, out_dtype=out_dtype, **v))(a, b, vectors)
        assert_same(got, np.asarray(want))


def test_scan_with_changing_buffers(oracle):
    rng = np.random.default_rng(0)
    n = 96
    x, weights, scales = int8(rng, 24, n), int8(rng, 12, n, n), rng.random((12, n), np.float32) * 1e-2

    def step(x, layer):
        y = jax_qmm.scaled_mm(x, layer[0], np.float32(0.05), layer[1], out_dtype=jnp.float32)
        return jnp.clip(jnp.rint(y), -128, 127).astype(jnp.int8), y

    run = jax.jit(lambda x, *layers: jax.lax.scan(step, x, layers))
    for _ in range(4):  # the first runs are not captured in a CUDA graph yet
        got, outputs = run(x, weights, scales)
        want = x
        for w, s, y in zip(weights, scales, outputs):
            exact = oracle.scaled_mm(want, w, np.float32(0.05), s)
            assert_same(y, exact)
            want = np.clip(np.rint(exact), -128, 127).astype(np.int8)
        assert_same(got, want)
        x = np.roll(want, 1, axis=1)


def test_grad_and_jit_of_several_calls(oracle):
    a, b, scale_a, scale_b, bias = operands(33, 72, 144)
    f = lambda s, t, c: jax_qmm.scaled_mm(a, b, s, t, c, out_dtype=jnp.float32).sum()
    got = jax.jit(jax.grad(f, (0, 1, 2)))(scale_a, scale_b, bias)
    acc = oracle.sums(a, b).astype(np.float64)
    want = (acc * scale_b).sum(1), (acc * scale_a[:, None]).sum(0), np.full(72, 33)
    for g, w in zip(got, want):
        # sums of 72 float32 products
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5 * np.abs(w).max())


def test_donated_and_reused_buffers(oracle):
    a, b, scale_a, scale_b, bias = operands(130, 72, 144)
    f = jax.jit(lambda a, *rest: jax_qmm.scaled_mm(a, *rest), donate_argnums=0)
    want = oracle.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=BF16)
    for _ in range(3):
        assert_same(f(jnp.array(a), b, scale_a, scale_b, bias), want)


def narrow_accumulator_bound(a, b, restart):
    """How far tensor cores can be off the exact sum of float8 products.

    Hopper sums 32 products at a time with what it has so far: it aligns all 33 terms to the largest and cuts
    them off below the 13th fractional bit (about 14 bits are kept), so a step is off by up to 33 times 2**-13
    of the largest term. A term is a product or a sum over a stretch of K, which is at most twice the largest
    of the sums from the start. Full accumulation restarts from zero every 128 products (`restart`) and adds
    those sums in float32.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    steps = [slice(i, i + 32) for i in range(0, a.shape[-1], 32)]
    partial = np.stack([a[:, s] @ b[:, s].T for s in steps])
    product = np.stack([np.abs(a[:, s]).max(1)[:, None] * np.abs(b[:, s]).max(1) for s in steps])
    bound, per_block = 0, restart // 32 if restart else len(steps)
    for i in range(0, len(steps), per_block):
        sums, products = np.cumsum(partial[i : i + per_block], 0), product[i : i + per_block]
        largest = np.maximum(2 * np.abs(sums).max(0), products.max(0))
        bound = bound + len(sums) * 33 * 2.0**-13 * largest
    totals = np.abs(np.cumsum(partial, 0)).max(0)
    # float32 sums of the blocks, and of the parts of a split K
    return bound + 2 * len(steps) * 2.0**-24 * totals


@pytest.mark.parametrize("shape", RAGGED[::5] + RAGGED[33:], ids=str)
@pytest.mark.parametrize("precision, restart", [(None, None), ("highest", 128)])
def test_float8_stays_within_the_bound(shape, precision, restart):
    m, n, k = shape
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(s).astype(E4M3) for s in ((m, k), (n, k)))
    got = call(precision=precision, out_dtype=jnp.float32)(a, b, np.float32(1), np.float32(1))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.all(np.abs(got - want) <= narrow_accumulator_bound(a, b, restart))


def test_full_accumulation_is_closer_than_fast(extension, gpu, emulated):
    rng = np.random.default_rng(0)
    a, b = (
        rng.random((16 if emulated else 128, 8192)).astype(E4M3) for _ in range(2)
    )  # of one sign: the sum loses bits
    want = a.astype(np.float64) @ b.astype(np.float64).T
    off = [
        np.abs(call(precision=p, out_dtype=jnp.float32)(a, b, np.float32(1), np.float32(1)) - want).max()
        for p in (None, jax.lax.Precision.HIGHEST)
    ]
    assert off[1] < 2.0**-10 * want.max()
    # Others have no narrow accumulator, or mma.sync's, which the emulator and Hopper have in full.
    if gpu.arch == 90 and "90a" in extension.architectures():
        assert off[1] < off[0] / 4


@pytest.mark.parametrize("out_dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [4, 130])
def test_float8_epilogues_on_exact_sums(oracle, m, out_dtype, precision, bias):
    rng = np.random.default_rng(0)
    # 0 and powers of two with sums below 2**10: exact even in 13 bits.
    a, b = (rng.choice([-1, 0, 0, 1, 2], s).astype(E4M3) for s in ((m, 200), (72, 200)))
    args = (
        a,
        b,
        rng.random(m, np.float32),
        rng.random(72, np.float32),
        *([rng.standard_normal(72, np.float32)] if bias else []),
    )
    assert_same(call(precision=precision, out_dtype=out_dtype)(*args), oracle.scaled_mm(*args, out_dtype=out_dtype))


def test_float8_nan_and_saturation():
    a, b = np.ones((40, 64), E4M3), np.ones((72, 64), E4M3)
    a[3, 5] = np.nan
    got = np.asarray(call()(a, b, np.float32(1), np.float32(1)))
    np.testing.assert_array_equal(np.isnan(got).all(1), np.arange(40) == 3)
    a[:], b[:] = 448, 448
    assert np.isinf(np.asarray(call(out_dtype=jnp.float16)(a, b, np.float32(1), np.float32(1)))).all()


@pytest.mark.parametrize("dtype", [np.int8, E4M3])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (64, 1000, 8200), (300, 264, 1041)], ids=str)
def test_results_repeat(dtype, shape, emulated):
    m, n, k = shape
    if emulated:
        n, k = min(n, 264), min(k, 1041)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-100, 100, s).astype(dtype) for s in ((m, k), (n, k)))
    f = call()
    first = np.asarray(f(a, b, np.float32(0.1), np.float32(0.1)))
    for _ in range(1 if emulated else 5):
        assert_same(f(a, b, np.float32(0.1), np.float32(0.1)), first)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(a=((1, 8, 33), np.int8)), "b"),
        (dict(b=((1, 8, 32), np.uint8)), "b"),
        (dict(scale_a=((1, 5), np.float32)), "scale_a"),
        (dict(scale_b=((2, 8), np.float32)), "scale_b"),
        (dict(bias=((1, 8), np.int32)), "bias"),
        (dict(azp=((1, 7), np.int32)), "azp"),
        (dict(azp_adj=((1, 8), np.float32)), "azp_adj"),
        (dict(scale=((1, 8), np.float32)), "vectors"),
        (dict(names="scale_a scale_b bias"), "names"),
        (dict(out=((1, 8, 8), np.int8)), "out"),
        (dict(out=((1, 8, 8), np.uint8)), "out"),
    ],
)
def test_the_handler_names_a_wrong_buffer(change, message):
    buffers = (
        dict(
            a=((1, 8, 32), np.int8),
            b=((1, 8, 32), np.int8),
            scale_a=((1, 8), np.float32),
            scale_b=((1, 8), np.float32),
            out=((1, 8, 8), np.float32),
        )
        | change
    )
    out_shape, out_dtype = buffers.pop("out")
    names = buffers.pop("names", " ".join([*buffers][2:]))
    f = jax.ffi.ffi_call("jax_qmm_scaled_mm", jax.ShapeDtypeStruct(out_shape, out_dtype))
    inputs = [np.zeros(*x) for x in buffers.values()]
    with pytest.raises(Exception, match=rf"\b{message} has"):
        jax.block_until_ready(f(*inputs, names=names, fast_accum=True, **NO_ACTIVATION))


def test_the_handler_refuses_what_whole_tiles_would_make_too_long():
    a = jnp.zeros((1, 1, 2**31 - 100), jnp.int8)
    f = jax.ffi.ffi_call("jax_qmm_scaled_mm", jax.ShapeDtypeStruct((1, 1, 1), jnp.float32))
    with pytest.raises(Exception, match=r"no dimension may exceed 2147479551"):
        jax.block_until_ready(f(a, a, names="", fast_accum=True, **NO_ACTIVATION))
