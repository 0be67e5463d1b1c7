import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def matrix(rng, shape, dtype):
    """Full-range int8; small whole numbers in float8, whose sums are exact in float32 in any order."""
    return rng.integers(*((-128, 128) if dtype == np.int8 else (-8, 9)), shape).astype(dtype)


def assert_same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead = draw(st.sampled_from([(), (), (2,), (2, 3)]))
    m, n, k = (draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 70)))
    dtype = draw(st.sampled_from([np.dtype(np.int8), np.dtype(E4M3)]))
    a, b = matrix(rng, (*lead, m, k), dtype), matrix(rng, (n, k), dtype)
    scale_dtypes = st.sampled_from([np.float32, BF16, np.float16])
    shape_a = draw(st.sampled_from([(), (*lead, m), (*lead, m, 1), (1,) * a.ndim]))
    shape_b = draw(st.sampled_from([(), (n,), (1, n), (1, 1)]))
    scale_a = rng.normal(size=shape_a).astype(draw(scale_dtypes))
    scale_b = rng.normal(size=shape_b).astype(draw(scale_dtypes))
    out_dtype = np.dtype(draw(st.sampled_from([np.float32, BF16, np.float16])))
    bias_dtype = draw(st.sampled_from([None, np.float32, out_dtype]))
    bias = None if bias_dtype is None else (100 * rng.normal(size=n)).astype(bias_dtype)
    zero_points = "none" if dtype != np.int8 else draw(st.sampled_from(["none", "tensor", "token"]))
    return rng, a, b, scale_a, scale_b, bias, out_dtype, zero_points


def per_row(x, a):
    return x.reshape(()) if x.shape in ((), (1,) * a.ndim) and x.shape != a.shape[:-1] else x.reshape(a.shape[:-1])


@hypothesis.settings(max_examples=40)
@hypothesis.given(problems())
def test_matches_the_oracle_bit_for_bit(oracle, problem):
    rng, a, b, scale_a, scale_b, bias, out_dtype, zero_points = problem
    rows, columns = per_row(scale_a, a), scale_b.reshape(()) if scale_b.size == 1 else scale_b.reshape(-1)
    adj, azp = b.astype(np.int32).sum(1), rng.integers(-128, 128, scale_a.shape, dtype=np.int32)
    f, extra, known = {
        "none": (jax_qmm.scaled_mm, (), {}),
        "tensor": (jax_qmm.scaled_mm_azp, (-7 * adj,), {"azp_adj": -7 * adj}),
        "token": (jax_qmm.scaled_mm_azp_per_token, (adj, azp), {"azp_adj": adj, "azp": per_row(azp, a)}),
    }[zero_points]
    got = jax.jit(lambda *args: f(*args, out_dtype=out_dtype))(a, b, scale_a, scale_b, *extra, bias)
    assert_same(got, oracle.scaled_mm(a, b, rows, columns, bias, out_dtype=out_dtype, **known))


@pytest.fixture(scope="module")
def ab():
    rng = np.random.default_rng(0)
    return matrix(rng, (8, 32), np.int8), matrix(rng, (6, 32), np.int8)


def test_a_sum_with_the_result_does_not_skip_its_rounding(ab, oracle):
    a, b = ab
    scales = np.float32(0.1), np.float32(0.3)
    f = jax.jit(lambda x, *operands: jax_qmm.scaled_mm(*operands, out_dtype=jnp.float32) - x)
    rest = f(oracle.scaled_mm(a, b, *scales), a, b, *scales)
    assert not np.any(rest)


def test_raw_sums_wrap_at_the_extremes():
    a = np.full((2, 131072), -128, np.int8)
    b = np.stack([np.full(131072, -128, np.int8), np.full(131072, 127, np.int8)])
    got = jax_qmm.scaled_mm(a, b, 1.0, np.float32(1), out_dtype=jnp.int32)
    want = np.array([[2**31, -128 * 127 * 131072]] * 2).astype(np.int32)  # 2**31 wraps to -2**31
    assert_same(got, want)
    b[0, 0] = 127
    want = np.array([[2**31 - 128 * 255, -128 * 127 * 131072]] * 2).astype(np.int32)
    assert_same(jax_qmm.scaled_mm(a, b, 1.0, np.ones((1, 1)), out_dtype="int32"), want)


def test_empty_dimensions(ab):
    a, b = ab
    bias = np.arange(6, dtype=np.float32)
    assert jax_qmm.scaled_mm(a[:0], b, np.zeros(0, np.float32), 1.0).shape == (0, 6)
    assert jax_qmm.scaled_mm(a, b[:0], 1.0, np.zeros(0, np.float32)).shape == (8, 0)
    assert jax_qmm.scaled_mm(np.zeros((0, 3, 32), np.int8), b, 1.0, 1.0).shape == (0, 3, 6)
    got = jax_qmm.scaled_mm(a[:, :0], b[:, :0], 1.0, 1.0, bias, out_dtype=jnp.float32)
    assert_same(got, np.broadcast_to(bias, (8, 6)))
    assert_same(jax_qmm.scaled_mm(a[:, :0], b[:, :0], 1.0, 1.0, out_dtype=jnp.int32), np.zeros((8, 6), np.int32))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 0.0, -2.0])
def test_odd_scales_are_computed_as_they_stand(ab, scale, oracle):
    a, b = ab
    assert_same(jax_qmm.scaled_mm(a, b, scale, 0.5), oracle.scaled_mm(a, b, np.float32(scale), 0.5, out_dtype=BF16))
    assert_same(jax_qmm.scaled_mm(a, b, 0.5, scale), oracle.scaled_mm(a, b, np.float32(0.5), scale, out_dtype=BF16))


def test_float16_overflows_to_infinity(ab, oracle):
    a, b = ab
    got = np.asarray(jax_qmm.scaled_mm(a, b, 100.0, 100.0, out_dtype=jnp.float16))
    acc = oracle.sums(a, b)
    np.testing.assert_array_equal(np.isinf(got), np.abs(1e4 * acc) >= 65520)
    assert np.isinf(got).any() and np.all(np.sign(got) == np.sign(acc))


def test_a_negative_zero_survives_without_a_bias():
    got = jax_qmm.scaled_mm(np.zeros((1, 1), np.int8), np.zeros((1, 1), np.int8), -1.0, 1.0, out_dtype=jnp.float32)
    assert np.signbit(np.asarray(got)).all()


def test_float8_stays_within_the_bound_of_float32_sums(oracle):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(16, 500)).astype(E4M3) for _ in range(2))
    for precision in (None, "highest", jax.lax.Precision.HIGHEST):
        got = jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=jnp.float32, precision=precision)
        magnitude = np.abs(a.astype(np.float64)) @ np.abs(b.T.astype(np.float64))
        # 499 additions in any order, each off by half an ulp of at most the sum of magnitudes.
        assert np.all(np.abs(got - oracle.sums(a, b)) <= 500 * 2.0**-24 * magnitude)


def test_float8_nan_shows(ab):
    a, b = (x.astype(np.float32).astype(E4M3) for x in ab)
    a[2, 3] = np.nan
    got = np.asarray(jax_qmm.scaled_mm(a, b, 1.0, 1.0))
    np.testing.assert_array_equal(np.isnan(got).any(1), np.arange(8) == 2)


def test_non_contiguous_inputs(ab, oracle):
    a, b = ab
    assert_same(
        jax_qmm.scaled_mm(np.asfortranarray(a)[::2], jnp.asarray(b.T).T, 1.0, 1.0, out_dtype=jnp.int32),
        oracle.sums(a[::2], b),
    )


def test_reads_jax_like_containers(ab, oracle):
    a, b = ab

    class Parameter:
        def __jax_array__(self):
            return jnp.asarray(b)

    assert_same(jax_qmm.scaled_mm(a, Parameter(), 1.0, 1.0, out_dtype=jnp.int32), oracle.sums(a, b))


ONE = np.float32(1)
BAD = {  # changes to a good call: the error and what it must say
    "a list": (dict(a=[[1]]), TypeError, "a is a list; it needs an array of int8 or float8_e4m3fn"),
    "b None": (dict(b=None), TypeError, "b is a NoneType"),
    "dtypes mixed": (dict(b=np.zeros((6, 32), E4M3)), TypeError, "a has dtype int8 and b float8_e4m3fn"),
    "dtype": (dict(a=np.zeros((8, 32), np.uint8)), TypeError, "a has dtype uint8; it needs .* int8 or float8_e4m3fn"),
    "e5m2": (dict(a=np.zeros((8, 32), ml_dtypes.float8_e5m2)), TypeError, "a has dtype float8_e5m2"),
    "K": (dict(b=np.zeros((6, 31), np.int8)), ValueError, r"a has shape \(8, 32\) and b \(6, 31\).* K"),
    "a rank 1": (dict(a=np.zeros(32, np.int8)), ValueError, r"a has shape \(32,\); .*\(\.\.\., M, K\)"),
    "a rank 0": (dict(a=np.int8(1)), ValueError, r"a has shape \(\)"),
    "b rank 1": (dict(b=np.zeros(32, np.int8)), ValueError, r"b has shape \(32,\); .*\(N, K\)"),
    "b rank 3": (dict(b=np.zeros((1, 6, 32), np.int8)), ValueError, r"b has shape \(1, 6, 32\); .*\(N, K\)"),
    "scale_a": (dict(scale_a=np.ones(6, np.float32)), ValueError, r"scale_a has shape \(6,\).*\(8,\), \(8, 1\)"),
    "scale_a (1,)": (dict(scale_a=np.ones(1, np.float32)), ValueError, r"scale_a has shape \(1,\).*\(1, 1\)"),
    "scale_a s16": (dict(scale_a=np.ones(8, np.int16)), TypeError, "scale_a has dtype int16.*float32 or bfloat16"),
    "scale_a str": (dict(scale_a="1"), TypeError, "scale_a is a str"),
    "scale_a bool": (dict(scale_a=True), TypeError, "scale_a is a bool"),
    "scale_b": (dict(scale_b=np.ones((6, 1), np.float32)), ValueError, r"scale_b has shape \(6, 1\).*\(6,\), \(1, 6\)"),
    "scale_b int": (dict(scale_b=np.ones(6, np.int32)), TypeError, "scale_b has dtype int32"),
    "bias shape": (dict(bias=np.ones((1, 6), np.float32)), ValueError, r"bias has shape \(1, 6\).* needs \(6,\)"),
    "bias dtype": (dict(bias=np.ones(6, np.float16)), TypeError, "bias has dtype float16.*float32 or bfloat16"),
    "out_dtype": (dict(out_dtype=np.float64), TypeError, "out_dtype is float64; .*bfloat16"),
    "out_dtype text": (dict(out_dtype="big"), TypeError, "out_dtype is 'big'"),
    "sums, float8": (
        dict(a=np.zeros((8, 32), E4M3), b=np.zeros((6, 32), E4M3), out_dtype=jnp.int32),
        ValueError,
        "int32 .*a has dtype float8_e4m3fn",
    ),
    "sums, scale": (dict(scale_b=2.0, out_dtype=jnp.int32), ValueError, r"scale_b needs to be the constant 1\.0"),
    "sums, array": (dict(scale_a=jnp.ones(()), out_dtype=jnp.int32), ValueError, "scale_a needs to be the constant"),
    "sums, bias": (dict(bias=np.ones(6, np.float32), out_dtype=jnp.int32), ValueError, "bias needs to be None"),
    "precision": (dict(a=np.zeros((8, 32), E4M3), b=np.zeros((6, 32), E4M3), precision="most"), ValueError, "most"),
}


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD)
def test_bad_arguments_are_named(ab, change, error, message):
    arguments = dict(a=ab[0], b=ab[1], scale_a=ONE, scale_b=ONE) | change
    with pytest.raises(error, match=message):
        jax_qmm.scaled_mm(**arguments)


def test_errors_come_at_trace_time():
    spec = jax.ShapeDtypeStruct((8, 32), jnp.int8)
    with pytest.raises(ValueError, match="K, need to be equal"):
        jax.eval_shape(lambda a, b: jax_qmm.scaled_mm(a, b.T, 1.0, 1.0), spec, spec)


def test_strict_mode_refuses_the_reference(ab, monkeypatch):
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    with pytest.raises(RuntimeError, match="scaled_mm.*platform cpu has no kernels"):
        jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 3.0))(*ab)
