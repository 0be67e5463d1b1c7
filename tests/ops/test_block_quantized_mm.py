"""block_scaled_mm of two QArrays: forward against numpy, bad input, explain.

Of int8 the result is the oracle's, bit for bit: exact sums of a block, then each step of float32 rounded once. The
oracle itself is within the bound that follows: of a block the product with scale_b and the sum are rounded, 2^-24 each.
"""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import QArray

F32, BF16, F16, F8 = np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn


def side(rows, k, block, zero_point=None, dtype=np.int8, scale_dtype=F32, seed=0):
    """Values, scale and zero point of a quantized operand, and what it stands for in float64."""
    rng = np.random.default_rng(seed)
    groups = (*rows, -(-k // block))
    q = rng.integers(-128, 128, (*rows, k)).astype(np.int8)
    q = q if dtype == np.int8 else rng.normal(0, 50, q.shape).astype(dtype)
    scale = (rng.uniform(0.5, 2, groups) * rng.choice([-1, 1], groups)).astype(scale_dtype)
    z = None
    if zero_point == "int":
        z = rng.integers(-128, 128, groups).astype(np.int32)
    elif zero_point is not None:
        z = (100 * rng.normal(size=groups)).astype(zero_point)
    return q, scale, z


def qarray(q, scale, z, block):
    return QArray(jnp.asarray(q), jnp.asarray(scale), None if z is None else jnp.asarray(z), tile_size=block)


def expected(a, b, block, oracle):
    """What the definition gives, in numpy; then the same in float64 and its distance from the definition."""
    (qa, scale_a, za), (qb, scale_b, zb) = a, b
    k, count = qa.shape[-1], scale_a.shape[-1]
    shape = (*qa.shape[:-1], len(qb))
    total, exact, size = np.zeros(shape, F32), np.zeros(shape), np.zeros(shape)
    for g in range(count):
        at = slice(g * block, min(k, (g + 1) * block))
        pa, pb = qa[..., at].astype(np.float64), qb[..., at].astype(np.float64)
        row, column = (lambda v: v[..., g, None].astype(F32)), (lambda v: v[:, g].astype(F32))
        t = (pa @ pb.T).astype(F32)
        zero_a = 0 if za is None else za[..., g, None].astype(np.float64)
        zero_b = 0 if zb is None else zb[:, g].astype(np.float64)
        if za is not None:
            t = oracle.fma(-row(za), pb.sum(-1).astype(F32), t)
        if zb is not None:
            t = oracle.fma(-column(zb), (pa - zero_a).sum(-1, keepdims=True).astype(F32), t)
        total = oracle.fma(row(scale_a), column(scale_b) * t, total)
        scales = scale_a[..., g, None].astype(np.float64) * scale_b[:, g].astype(np.float64)
        of_block = (pa - zero_a) @ (pb - np.asarray(zero_b)[..., None]).T
        exact, size = exact + scales * of_block, size + np.abs(scales * of_block)
    return total, exact, (count + 2) * 2.0**-24 * size


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 300)),
    st.sampled_from([16, 32, 64, 100, 128, 256]),
    st.sampled_from([None, "int"]),
    st.sampled_from([None, "int", F32]),
    st.sampled_from([F32, BF16, F16]),
)
def test_is_the_definition_bit_for_bit(oracle, shape, block, zero_a, zero_b, scale_dtype):
    m, n, k = shape
    a, b = side((m,), k, block, zero_a, scale_dtype=scale_dtype), side((n,), k, block, zero_b, seed=1)
    total, exact, bound = expected(a, b, block, oracle)
    got = jax_qmm.block_scaled_mm(qarray(*a, block), qarray(*b, block), out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, total)
    if zero_b != F32:  # the differences of which are rounded
        assert (np.abs(total - exact) <= bound).all()


@pytest.mark.parametrize("block", [32, 64, 128, 256])
def test_extremes_are_exact(block, oracle):
    """The largest sums of a block, of both signs, with the largest zero points."""
    for low_a, low_b in ((-128, -128), (-128, 127), (127, 127)):
        a = np.full((2, 2 * block), low_a, np.int8), np.ones((2, 2), F32), np.full((2, 2), -1 - low_a, np.int32)
        b = np.full((3, 2 * block), low_b, np.int8), np.ones((3, 2), F32), np.full((3, 2), -1 - low_b, np.int32)
        want = 2 * block * (2 * low_a + 1) * (2 * low_b + 1)
        got = jax_qmm.block_scaled_mm(qarray(*a, block), qarray(*b, block))
        assert got.dtype == jnp.float32 and (np.asarray(got) == want).all()


@pytest.mark.parametrize("block", [64, 128])
def test_float8_is_within_the_rounding_of_its_sums(block, oracle):
    a, b = side((5,), 300, block, dtype=F8), side((7,), 300, block, dtype=F8, seed=1)
    _, exact, _ = expected(a, b, block, oracle)
    wide = lambda s: np.abs(s[0].astype(np.float64)) * np.abs(np.repeat(s[1].astype(np.float64), block, 1)[:, :300])
    got = jax_qmm.block_scaled_mm(qarray(*a, block), qarray(*b, block))
    # Products are exact; a sum of each, and two roundings of each block.
    assert (np.abs(np.asarray(got) - exact) <= (300 + 10) * 2.0**-24 * (wide(a) @ wide(b).T)).all()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", (-1, 2.5)])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
def test_bias_activation_and_dtypes(activation, out_dtype, oracle):
    (qa, sa, za), b = side((2, 3), 200, 64, "int"), side((12,), 200, 64, "int", seed=1)
    a, bias = (qa, (sa / 2**16).astype(F32), za), np.random.default_rng(2).normal(size=12).astype(out_dtype)
    total, _, _ = expected(a, b, 64, oracle)
    y = oracle.activated(total + bias.astype(F32), activation)
    got = jax_qmm.block_scaled_mm(qarray(*a, 64), qarray(*b, 64), bias, activation=activation, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    if activation in ("gelu", "silu"):
        unit = {F32: 2.0**-23, BF16: 2.0**-8, F16: 2.0**-11}[out_dtype]
        error = np.abs(np.asarray(got, np.float64) - y.astype(np.float64))
        assert (error <= (2.0**-19 + unit) * np.abs(total + bias.astype(F32)) + 2.0**-24).all()
    else:
        np.testing.assert_array_equal(got, y.astype(out_dtype))


def test_any_storage_and_granularity(oracle):
    a, b = side((6,), 128, 32, "int"), side((8,), 128, 32, "int", seed=1)
    x, w = qarray(*a, 32), qarray(*b, 32)
    want = jax_qmm.block_scaled_mm(x, w)
    turned = lambda q: QArray(q.qvalue.T, q.scale.T, q.zero_point.T).T  # (K, rows) in memory
    assert turned(x).storage_axes() == (1, 0)
    np.testing.assert_array_equal(jax_qmm.block_scaled_mm(turned(x), turned(w)), want)
    squares = QArray(w.qvalue, w.scale[::4], w.zero_point[::4])  # 4 rows of 32 columns share a scale
    spread = QArray(w.qvalue, jnp.repeat(w.scale[::4], 4, 0), jnp.repeat(w.zero_point[::4], 4, 0))
    np.testing.assert_array_equal(jax_qmm.block_scaled_mm(x, squares), jax_qmm.block_scaled_mm(x, spread))
    token = QArray(x.qvalue, x.scale[:, :1], x.zero_point[:, :1])  # one scale for all columns of a row
    whole = QArray(x.qvalue, *(jnp.repeat(leaf[:, :1], 4, 1) for leaf in (x.scale, x.zero_point)))
    np.testing.assert_array_equal(jax_qmm.block_scaled_mm(token, w), jax_qmm.block_scaled_mm(whole, w))
    np.testing.assert_array_equal(jax_qmm.block_scaled_mm(w, token), jax_qmm.block_scaled_mm(w, whole))


@pytest.mark.parametrize("symmetric", [True, False])
def test_kept_sums_are_those_of_the_values(symmetric):
    x, w = np.random.default_rng(0).normal(1, 1, (2, 6, 300)).astype(F32)
    options = dict(tile_size=128, symmetric=symmetric)
    with_sums = [jax_qmm.quantize(v, sums=True, **options) for v in (x, w)]
    without = [jax_qmm.quantize(v, **options) for v in (x, w)]
    np.testing.assert_array_equal(jax_qmm.block_scaled_mm(*with_sums), jax_qmm.block_scaled_mm(*without))
    error = np.abs(np.asarray(jax_qmm.block_scaled_mm(*with_sums)) - x.astype(np.float64) @ w.T)
    # Each value is off by half a step at most, a whole one where its zero point is rounded too.
    half = 0.5 if symmetric else 1.0
    step_x, step_w = (half * 1.001 * np.repeat(np.asarray(q.scale, np.float64), 128, 1)[:, :300] for q in without)
    assert (error <= np.abs(x) @ step_w.T + step_x @ np.abs(w).T + step_x @ step_w.T).all()


def test_sums_of_rows_that_share_a_scale_are_not_taken_for_those_of_a_row():
    x, w = np.random.default_rng(0).normal(1, 1, (2, 6, 64)).astype(F32)
    x = jax_qmm.quantize(x, symmetric=False)
    with_sums, without = (jax_qmm.quantize(w, axis=(0, 1), sums=sums) for sums in (True, False))
    np.testing.assert_array_equal(jax_qmm.block_scaled_mm(x, with_sums), jax_qmm.block_scaled_mm(x, without))


def test_nan_and_infinity_stay_in_their_row(oracle):
    a, b = side((4,), 96, 32), side((5,), 96, 32, seed=1)
    a[1][1, 2], a[1][2, 0] = np.nan, np.inf
    got = np.asarray(jax_qmm.block_scaled_mm(qarray(*a, 32), qarray(*b, 32)))
    assert np.isnan(got[1]).all() and not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(got[[0, 3]], expected(a, b, 32, oracle)[0][[0, 3]])


def test_explain_names_the_blocks_and_the_zero_points():
    x, w = qarray(*side((3,), 200, 64, "int"), 64), qarray(*side((12,), 200, 64, "int"), 64)
    f = lambda x, w: jax_qmm.block_scaled_mm(x, w, np.ones(12, F32), activation="silu")
    (row,) = jax_qmm.explain(f, x, w).rows
    assert row.op == "block_scaled_mm (blocks of 64, zero_point_a, zero_point_b, bias, silu)"
    assert row.inputs == "int8[3,200] x int8[12,200]" and row.out == "float32[3,12]"


X = QArray(np.ones((2, 8), np.int8), np.ones((2, 2), F32))
W = QArray(np.ones((3, 8), np.int8), np.ones((3, 2), F32))


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((X, W.qvalue), {}, TypeError, "w is a .*; it needs to be a QArray"),
        ((QArray(X.qvalue, X.scale, qtype="int4"), W), {}, TypeError, "x has values of int4; beside a QArray it needs"),
        ((X, jax_qmm.quantize(np.ones((3, 8), F32), "fp8")), {}, TypeError, "x has values of int8 and w of float8"),
        ((X.pack(), W), {}, ValueError, "x is QArray.*packed.*; it needs to be plain"),
        ((X, W.pack()), {}, ValueError, "w is QArray.*packed.*; it needs to be plain"),
        ((QArray(X.qvalue, X.scale, X.scale), W), {}, TypeError, "x has zero points of float32; it needs int32"),
        ((X, QArray(W.qvalue, np.ones((3, 4), F32))), {}, ValueError, "blocks of 4 columns and w of 2; they need the"),
        ((X, QArray(W.qvalue[:, :6], W.scale)), {}, ValueError, r"x has shape \(2, 8\) and w \(3, 6\)"),
        ((X, W, np.ones(4, F32)), {}, ValueError, r"bias has shape \(4,\)"),
        ((X, W), {"out_dtype": jnp.int8}, TypeError, "out_dtype is int8; it needs to be bfloat16, float16 or float32"),
    ],
)
def test_bad_input_is_refused(args, options, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.block_scaled_mm(*args, **options)
