import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm

E4M3 = ml_dtypes.float8_e4m3fn
ONE = np.float32(1)
f32_zero_points = functools.partial(jax_qmm.scaled_mm_zero_points, out_dtype=jnp.float32)


def int8(rng, *shape):
    return rng.integers(-128, 128, shape, dtype=np.int8)


def assert_same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.fixture(scope="module")
def ab():
    rng = np.random.default_rng(0)
    return int8(rng, 8, 32), int8(rng, 6, 32)


def centered(a, b, zero_point_a, zero_point_b):
    """`sum_k (a - zero_point_a) * (b - zero_point_b)` modulo 2^32, as it is written."""
    a, b = (
        a.astype(np.int64) - np.asarray(zero_point_a)[..., None],
        b.astype(np.int64) - np.reshape(zero_point_b, (-1, 1)),
    )
    return (a @ b.swapaxes(-1, -2)).astype(np.int32)


# One zero point


def test_zero_points_undo_a_shift(ab):
    a, b = ab
    shift = np.arange(8, dtype=np.int32) - 4
    shifted = (a // 2 + shift[:, None]).astype(np.int8)
    want = jax_qmm.scaled_mm(a // 2, b, 0.5, 0.25)
    adj = jax_qmm.azp_adjustment(b)
    assert_same(jax_qmm.scaled_mm_azp_per_token(shifted, b, 0.5, 0.25, adj, shift), np.asarray(want))
    assert_same(jax_qmm.scaled_mm_azp(a // 2 + np.int8(5), b, 0.5, 0.25, 5 * adj), np.asarray(want))


def test_azp_adjustment_sums_rows():
    b = np.full((3, 70000), -128, np.int8)
    np.testing.assert_array_equal(jax_qmm.azp_adjustment(b), np.full(3, -128 * 70000, np.int32))


def test_zero_points_wrap_in_int32():
    a, b = np.full((1, 4), -128, np.int8), np.ones((1, 4), np.int8)
    got = jax_qmm.scaled_mm_azp(a, b, 1.0, 1.0, np.int32([2**31 - 1]), out_dtype=jnp.float32)
    assert got == np.float32(-512 - (2**31 - 1) + 2**32)


# Zero points of both sides


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead = draw(st.sampled_from([(), (2,), (2, 3)]))
    m, n, k = (draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 70)))
    bound = draw(st.sampled_from([128, 2**31]))  # a zero point needs not fit int8
    points = lambda shape: rng.integers(-bound, bound, shape).astype(np.int32)
    rows = draw(st.sampled_from([(), (*lead, m), (*lead, m, 1)]))
    columns = draw(st.sampled_from([(), (n,), (1, n), (1, 1)]))
    bias = draw(st.sampled_from([None, rng.normal(size=n).astype(np.float32)]))
    return int8(rng, *lead, m, k), int8(rng, n, k), points(rows), points(columns), bias, draw(st.booleans()), rng


@hypothesis.settings(max_examples=40)
@hypothesis.given(problems())
def test_all_four_terms_modulo_2_to_the_32(oracle, problem):
    a, b, zero_point_a, zero_point_b, bias, given, rng = problem
    scale_a, scale_b = rng.random(a.shape[:-1], np.float32), rng.random(b.shape[0], np.float32)
    sums = {"sums_a": a.sum(-1, dtype=np.int32), "sums_b": b.sum(1, dtype=np.int32)} if given else {}
    got = jax.jit(lambda *args: f32_zero_points(*args, **sums))(
        a, b, scale_a, scale_b, zero_point_a, zero_point_b, bias
    )
    of_rows = zero_point_a.reshape(a.shape[:-1]) if zero_point_a.shape else zero_point_a
    acc = centered(a, b, of_rows, zero_point_b if zero_point_b.size == 1 else zero_point_b.reshape(-1))
    assert_same(got, oracle.epilogue(acc.reshape(*a.shape[:-1], b.shape[0]), scale_a, scale_b, bias))


def test_sums_that_wrap():
    """Products of -255 * -255 over 40000 K are beyond 2^31, as is K times both zero points."""
    a, b = np.full((2, 40000), -128, np.int8), np.full((3, 40000), -128, np.int8)
    got = f32_zero_points(a, b, 1.0, 1.0, 127, np.full(3, 127, np.int32))
    assert_same(got, np.full((2, 3), np.int64(255 * 255 * 40000).astype(np.int32), np.float32))


def test_given_sums_are_taken_as_they_are_and_read_nothing_twice(ab):
    a, b = ab
    sums_a, sums_b = a.sum(-1, dtype=np.int32), b.sum(-1, dtype=np.int32)
    reductions = lambda **sums: str(
        jax.make_jaxpr(lambda a, b: f32_zero_points(a, b, 1.0, 1.0, 3, 5, **sums))(a, b)
    ).count("reduce_sum")
    assert [reductions(), reductions(sums_a=sums_a), reductions(sums_a=sums_a[:, None], sums_b=sums_b)] == [2, 1, 0]
    off = f32_zero_points(a, b, 1.0, 1.0, 3, 5, sums_a=sums_a + 1, sums_b=sums_b + 10)
    assert_same(off, (centered(a, b, 3, 5) - 5 - 30).astype(np.float32))


@pytest.mark.parametrize("mapped", ["a", "b", "ab", "z", "w", "zs", "azs", "abzwst"])
def test_vmap(mapped, oracle):
    """z and w: the zero points, s and t: the sums."""
    rng = np.random.default_rng(0)
    a, b = int8(rng, 3, 5, 16), int8(rng, 3, 6, 16)
    args = dict(
        a=a, b=b, z=rng.integers(-99, 99, (3, 5)), w=rng.integers(-99, 99, (3, 6)), s=rng.integers(-99, 99, (3, 5))
    )
    args["t"] = rng.integers(-99, 99, (3, 6))
    args = {name: x if name in "ab" else x.astype(np.int32) for name, x in args.items()}
    args = {name: x if name in mapped else x[0] for name, x in args.items()}
    f = lambda a, b, z, w, s, t: f32_zero_points(a, b, 0.5, 0.25, z, w, sums_a=s, sums_b=t)
    got = jax.vmap(f, [0 if name in mapped else None for name in args])(*args.values())
    for i in range(3):
        a, b, z, w, s, t = (x[i] if name in mapped else x for name, x in args.items())
        terms = dict(azp=z, azp_adj=t, sums_a=s - 16 * z, azp_b=w)
        assert_same(got[i], oracle.scaled_mm(a, b, np.float32(0.5), np.float32(0.25), **terms))


def test_gradients_are_those_of_the_dequantized_product(ab):
    a, b = ab
    rng = np.random.default_rng(1)
    args = rng.random(8, np.float32), rng.random(6, np.float32), rng.normal(size=6).astype(np.float32)
    z, w = rng.integers(-9, 9, 8).astype(np.int32), rng.integers(-9, 9, 6).astype(np.int32)
    acc, weight = centered(a, b, z, w).astype(np.float32), rng.normal(size=(8, 6)).astype(np.float32)
    loss = lambda s, t, c: (weight * f32_zero_points(a, b, s, t, z, w, c)).sum()
    plain = lambda s, t, c: (weight * (s[:, None] * t * acc + c)).sum()
    for g, x in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(*args), jax.grad(plain, (0, 1, 2))(*args)):
        np.testing.assert_allclose(g, x, rtol=1e-5, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (P("x"), P(), []),
        (P(), P("x"), []),
        (P(None, "x"), P(None, "x"), ["all-reduce"]),
    ],
    ids=["M", "N", "K"],
)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_sharded(ab, a, b, expected, activation):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    a_own, b_own = int8(rng, 8, 32), int8(rng, 12, 32)
    z, w = rng.integers(-9, 9, 8).astype(np.int32), rng.integers(-9, 9, 12).astype(np.int32)
    args = a_own, b_own, z, w, a_own.sum(1, dtype=np.int32), b_own.sum(1, dtype=np.int32)
    along_a, along_b = P(a[0] if a else None), P(b[0] if b else None)
    specs = a, b, along_a, along_b, along_a, along_b
    f = lambda a, b, z, w, s, t: jax_qmm.scaled_mm_zero_points(
        a, b, 0.01, 0.02, z, w, sums_a=s, sums_b=t, activation=activation, out_scale=0.5, out_dtype=jnp.int8
    )
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs)]
    compiled = jax.jit(f).lower(*placed).compile()
    found = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())
    assert found == expected
    assert_same(compiled(*placed), np.asarray(f(*args)))
    without = jax.jit(lambda a, b, z, w: f32_zero_points(a, b, 0.01, 0.02, z, w))
    assert_same(without(*placed[:4]), np.asarray(without(*args[:4])))


def test_export_with_symbolic_rows_and_depth(ab):
    a, b = ab
    m, k = export.symbolic_shape("m, k")
    f = jax.jit(lambda a, b, z: f32_zero_points(a, b, 0.5, 0.5, z, -3, activation="relu"))
    shapes = ((m, k), jnp.int8), ((6, k), jnp.int8), ((m,), jnp.int32)
    exported = export.export(f, platforms=["cpu"])(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    z = np.arange(8, dtype=np.int32)
    for m, k in ((8, 32), (3, 5)):
        args = a[:m, :k], b[:, :k], z[:m]
        np.testing.assert_array_equal(jax.jit(export.deserialize(exported.serialize()).call)(*args), f(*args))


def test_explain_names_the_terms(ab):
    a, b = ab
    f = lambda a, b: jax_qmm.scaled_mm_zero_points(a, b, 1.0, 1.0, 3, 5, activation="relu6")
    (row,) = jax_qmm.explain(f, a, b).rows
    assert row.op == "scaled_mm (azp, azp_adj, sums_a, azp_b, scale_a, scale_b, clamp 0..6)"


# Bad input


F8 = dict(a=np.zeros((8, 32), E4M3), b=np.zeros((6, 32), E4M3))
BAD_AZP = {
    "float8": (F8, TypeError, "a has dtype float8_e4m3fn; it needs an array of int8"),
    "adj shape": (
        dict(adj=np.ones((1, 6), np.int32)),
        ValueError,
        r"(azp_adj|azp_with_adj) has shape \(1, 6\).*\(6,\)",
    ),
    "adj dtype": (dict(adj=np.ones(6, np.int16)), TypeError, "(azp_adj|azp_with_adj) has dtype int16; .*int32"),
    "adj range": (dict(adj=np.full(6, 2**31)), ValueError, "(azp_adj|azp_with_adj) is .* out of range of int32"),
    "adj number": (dict(adj=3), TypeError, "(azp_adj|azp_with_adj) is a int; .*int32"),
    "sums": (dict(out_dtype=jnp.int32), ValueError, "out_dtype is int32, which only scaled_mm has"),
}


@pytest.mark.parametrize("change, error, message", BAD_AZP.values(), ids=BAD_AZP)
@pytest.mark.parametrize("per_token", [False, True])
def test_bad_zero_points_are_named(ab, per_token, change, error, message):
    arguments = dict(a=ab[0], b=ab[1], scale_a=ONE, scale_b=ONE, adj=np.ones(6, np.int32)) | change
    adj = arguments.pop("adj")
    with pytest.raises(error, match=message):
        if per_token:
            jax_qmm.scaled_mm_azp_per_token(**arguments, azp_adj=adj, azp=np.int32(1))
        else:
            jax_qmm.scaled_mm_azp(**arguments, azp_with_adj=adj)


@pytest.mark.parametrize(
    "azp, error, message",
    [
        (np.ones(6, np.int32), ValueError, r"azp has shape \(6,\).*\(8,\), \(8, 1\)"),
        (np.ones(8, np.int8), TypeError, "azp has dtype int8; .*int32"),
    ],
)
def test_bad_azp_is_named(ab, azp, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.scaled_mm_azp_per_token(*ab, 1.0, 1.0, np.ones(6, np.int32), azp)


@pytest.mark.parametrize("b, error", [(np.ones((2, 2)), TypeError), (np.ones(3, np.int8), ValueError)])
def test_azp_adjustment_checks_its_argument(b, error):
    with pytest.raises(error, match="b has"):
        jax_qmm.azp_adjustment(b)


BAD_BOTH = {
    "float8": (F8, TypeError, "a has dtype float8_e4m3fn; it needs an array of int8"),
    "zero_point_a": (dict(zero_point_a=np.ones(6, np.int32)), ValueError, r"zero_point_a has shape \(6,\).*\(8,\)"),
    "zero_point_b": (dict(zero_point_b=np.ones(8, np.int32)), ValueError, r"zero_point_b has shape \(8,\).*\(6,\)"),
    "float point": (dict(zero_point_a=0.5), TypeError, "zero_point_a has dtype float32, needs an integer"),
    "wide point": (dict(zero_point_b=2**31), ValueError, "zero_point_b is 2147483648, which is out of range"),
    "sums_a": (dict(sums_a=np.ones((), np.int32)), ValueError, r"sums_a has shape \(\).* needs \(8,\) or \(8, 1\)"),
    "sums_a int8": (dict(sums_a=np.ones(8, np.int8)), TypeError, "sums_a has dtype int8; .*int32"),
    "sums_b": (dict(sums_b=np.ones(8, np.int32)), ValueError, r"sums_b has shape \(8,\).*\(6,\)"),
    "sums": (dict(out_dtype=jnp.int32), ValueError, "out_dtype is int32, which only scaled_mm has"),
}


@pytest.mark.parametrize("change, error, message", BAD_BOTH.values(), ids=BAD_BOTH)
def test_bad_zero_points_of_both_sides_are_named(ab, change, error, message):
    arguments = dict(a=ab[0], b=ab[1], scale_a=ONE, scale_b=ONE, zero_point_a=1, zero_point_b=1) | change
    with pytest.raises(error, match=message):
        jax_qmm.scaled_mm_zero_points(**arguments)
