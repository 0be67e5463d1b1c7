"""Activations and 8-bit results of scaled_mm."""

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

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
CLAMPS = ["relu", "relu6", (-3.5, 9), (2.0, 2.0), (-np.inf, 0.1)]
f32_mm = functools.partial(jax_qmm.scaled_mm, out_dtype=jnp.float32)


def assert_same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def operands(m=8, n=6, k=32, seed=0):
    """a, b, scale_a, scale_b and bias; the results are about 10."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((m, k), (n, k)))
    scales = rng.random(m, np.float32), rng.random(n, np.float32) * np.float32(2e-3)
    return a, b, *scales, rng.normal(size=n).astype(np.float32)


@st.composite
def outputs(draw):
    dtype = np.dtype(draw(st.sampled_from([np.float32, BF16, np.float16, np.int8, E4M3])))
    activation = draw(st.sampled_from([None, *CLAMPS]))
    if dtype.itemsize > 1:
        return {"out_dtype": dtype, "activation": activation}
    scale = draw(st.floats(2.0**-20, 2.0**10, width=32)) * draw(st.sampled_from([1, 1, -1]))
    zero_point = draw(st.sampled_from([None, 0, -128, 127, 3])) if dtype == np.int8 else None
    return {"out_dtype": dtype, "activation": activation, "out_scale": scale, "out_zero_point": zero_point}


@hypothesis.settings(max_examples=60)
@hypothesis.given(outputs(), st.sampled_from([np.int8, E4M3]), st.booleans(), st.integers(0, 99))
def test_matches_the_oracle_bit_for_bit(oracle, output, dtype, has_bias, seed):
    a, b, scale_a, scale_b, bias = operands(seed=seed)
    if dtype == E4M3:
        a, b = (x.clip(-8, 8).astype(E4M3) for x in (a, b))
    bias = bias if has_bias else None
    got = jax.jit(lambda *args: jax_qmm.scaled_mm(*args, **output))(a, b, scale_a, scale_b, bias)
    known = {name: value for name, value in output.items() if value is not None}
    assert_same(got, oracle.scaled_mm(a, b, scale_a, scale_b, bias, **known))


@pytest.mark.parametrize("zero_points", ["tensor", "token"])
def test_zero_points_with_an_int8_result(oracle, zero_points):
    a, b, scale_a, scale_b, bias = operands()
    adj, azp = b.sum(1, dtype=np.int32), np.arange(-4, 4, dtype=np.int32)
    output = dict(activation="relu", out_scale=0.1, out_zero_point=-128, out_dtype=np.int8)
    if zero_points == "tensor":
        got = jax_qmm.scaled_mm_azp(a, b, scale_a, scale_b, 7 * adj, bias, **output)
        known = {"azp_adj": 7 * adj}
    else:
        got = jax_qmm.scaled_mm_azp_per_token(a, b, scale_a, scale_b, adj, azp, bias, **output)
        known = {"azp_adj": adj, "azp": azp}
    assert_same(got, oracle.scaled_mm(a, b, scale_a, scale_b, bias, **known, **output))


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_smooth_activations_stay_within_the_bound(oracle, activation):
    a, b, scale_a, scale_b, bias = operands(64, 96, 64)
    for factor in (1, 10, 1e4):
        args = a, b, scale_a, scale_b * np.float32(factor), bias
        got = np.asarray(jax.jit(functools.partial(f32_mm, activation=activation))(*args), np.float64)
        y = oracle.scaled_mm(*args).astype(np.float64)
        exact = oracle.activated(y, activation)
        # The documented bound, and the one rounding of the oracle.
        assert np.all(np.abs(got - exact) <= (2.0**-20 + 2.0**-24) * np.abs(y))
        assert np.abs(got - y).max() > 0.1


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_int8_of_smooth_activations_is_off_by_a_step_at_most_where_they_are_near_a_tie(oracle, activation):
    args = operands(64, 96, 64)
    output = dict(activation=activation, out_scale=0.125, out_zero_point=-40, out_dtype=np.int8)
    got = np.asarray(jax.jit(lambda *args: jax_qmm.scaled_mm(*args, **output))(*args))
    want = oracle.scaled_mm(*args, **output)
    steps = oracle.activated(oracle.scaled_mm(*args), activation).astype(np.float64) / 0.125
    near = np.abs(steps - np.floor(steps) - 0.5) <= 2.0**-19 * np.abs(oracle.scaled_mm(*args)) / 0.125
    assert near.mean() < 0.01
    np.testing.assert_array_equal(got[~near], want[~near])
    assert np.abs(got.astype(int) - want).max() <= 1


def test_int8_clamps_as_quantizing_the_clamped_float():
    args = operands()
    for activation in CLAMPS:
        output = dict(out_scale=0.05, out_zero_point=11, out_dtype=jnp.int8)
        y = f32_mm(*args, activation=activation)
        want = jax_qmm.quantize(y, scale=0.05, zero_point=11, axis=None).qvalue
        assert_same(jax_qmm.scaled_mm(*args, activation=activation, **output), np.asarray(want))
    want = jax_qmm.quantize(f32_mm(*args), jnp.float8_e4m3fn, scale=0.05, axis=None).qvalue
    assert_same(jax_qmm.scaled_mm(*args, out_scale=0.05, out_dtype=E4M3), np.asarray(want))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 3e38])
def test_nan_and_infinity(scale):
    """inf saturates, NaN is 0 in int8 and NaN in float8; a clamp keeps it NaN."""
    a, b, _, _, bias = operands()
    y = np.asarray(f32_mm(a, b, scale, 1.0, bias))
    out = {
        np.dtype(t): np.asarray(jax_qmm.scaled_mm(a, b, scale, 1.0, bias, out_scale=0.5, out_dtype=t))
        for t in (np.int8, E4M3)
    }
    wanted = np.where(np.isnan(y), 0, np.where(y > 0, 127, -128))
    np.testing.assert_array_equal(out[np.dtype(np.int8)], wanted)
    np.testing.assert_array_equal(np.isnan(out[np.dtype(E4M3)].astype(np.float32)), np.isnan(y))
    clamped = np.asarray(f32_mm(a, b, scale, 1.0, bias, activation=(-1, 2)))
    np.testing.assert_array_equal(clamped, np.where(np.isnan(y), np.nan, np.clip(y, -1, 2)))


def test_ties_saturation_and_zero_points_at_the_ends():
    a, b = np.arange(-9, 10, dtype=np.int8)[:, None], np.ones((1, 1), np.int8)
    f = lambda scale, zero_point: jax_qmm.scaled_mm(
        a, b, 1.0, 1.0, out_scale=scale, out_zero_point=zero_point, out_dtype=jnp.int8
    )[:, 0]
    assert f(2.0, None).tolist() == [-4, -4, -4, -3, -2, -2, -2, -1, 0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 4]
    assert f(2.0, 125).tolist()[-8:] == [126, 127, 127, 127, 127, 127, 127, 127]
    assert f(1.0, -125).tolist()[:7] == [-128] * 7
    assert f(-1.0, 0).tolist() == list(range(9, -10, -1))


def test_empty_dimensions():
    a, b, scale_a, scale_b, bias = operands()
    output = dict(out_scale=0.5, out_dtype=jnp.int8, activation="relu")
    assert jax_qmm.scaled_mm(a[:0], b, scale_a[:0], scale_b, **output).shape == (0, 6)
    assert jax_qmm.scaled_mm(a, b[:0], scale_a, scale_b[:0], **output).shape == (8, 0)
    got = jax_qmm.scaled_mm(a[:, :0], b[:, :0], 1.0, 1.0, bias, **output)
    assert_same(got, np.broadcast_to(np.rint(np.maximum(bias, 0) / np.float32(0.5)), (8, 6)).astype(np.int8))


def test_a_chain_of_int8_products_has_no_float_tensor():
    a, b, scale_a, scale_b, bias = operands(8, 32, 32)
    last = operands(4, 24, 32, seed=1)[1]

    def chain(a):
        hidden = jax_qmm.scaled_mm(
            a, b, 0.02, scale_b, bias, activation="relu6", out_scale=6 / 255, out_zero_point=-128, out_dtype=jnp.int8
        )
        return jax_qmm.scaled_mm_azp(
            hidden, last, 6 / 255, 0.1, -128 * jax_qmm.azp_adjustment(last), out_dtype=jnp.float32
        )

    rows = jax_qmm.explain(chain, a).rows
    assert [(row.op.split()[0], row.out.partition("[")[0]) for row in rows] == [
        ("scaled_mm", "int8"),
        ("scaled_mm", "float32"),
    ]
    hidden = np.asarray(f32_mm(a, b, 0.02, scale_b, bias, activation="relu6"), np.float64)
    exact = hidden @ (0.1 * last.T.astype(np.float64))
    # A hidden value is off by half a step at most.
    bound = 0.5 * 6 / 255 * 0.1 * np.abs(last.astype(np.float64)).sum(1) * (1 + 1e-5)
    assert np.all(np.abs(np.asarray(chain(a)) - exact) <= bound)


# Transformations


@pytest.mark.parametrize("mapped", ["a", "b", "s", "o", "z", "oz", "aboz", "abscoz"])
def test_vmap(oracle, mapped):
    """s: scale_a, c: bias, o: out_scale, z: out_zero_point."""
    a, b, s, t, c = (np.stack(x) for x in zip(*(operands(seed=seed) for seed in range(3))))
    args = dict(a=a, b=b, s=s, c=c, o=np.float32([0.1, 0.2, 0.3]), z=np.int32([-7, 0, 9]))
    args = {name: x if name in mapped else x[0] for name, x in args.items()}
    f = lambda a, b, s, c, o, z: jax_qmm.scaled_mm(
        a, b, s, t[0], c, activation="relu6", out_scale=o, out_zero_point=z, out_dtype=jnp.int8
    )
    got = jax.jit(jax.vmap(f, [0 if name in mapped else None for name in args]))(*args.values())
    for i in range(3):
        a, b, s, c, o, z = (x[i] if name in mapped else x for name, x in args.items())
        output = dict(activation="relu6", out_scale=o, out_zero_point=z, out_dtype=np.int8)
        assert_same(got[i], oracle.scaled_mm(a, b, s, t[0], c, **output))
    twice = jax.vmap(jax.vmap(f, [0 if name in mapped else None for name in args]), [None] * 5 + [0])
    if "z" not in mapped:
        points = np.int32([1, 2])
        twice = twice(*[*args.values()][:5], points)
        assert_same(
            twice[1],
            np.asarray(jax.vmap(f, [0 if name in mapped else None for name in args])(*[*args.values()][:5], points[1])),
        )


PLAIN = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    (-3.5, 9.0): lambda y: jnp.clip(y, -3.5, 9.0),
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


@pytest.mark.parametrize("activation", PLAIN, ids=str)
@pytest.mark.parametrize("moving", [(0, 1, 2), (2,)], ids=["all", "bias"])
def test_gradients_pass_through_the_activation(activation, moving):
    a, b, *args = operands(16, 24)
    acc, weight = a.astype(np.float32) @ b.T.astype(np.float32), np.random.default_rng(2).normal(size=(16, 24))
    loss = lambda f: lambda s, t, c: jnp.sum(weight.astype(np.float32) * f(s, t, c))
    ours = loss(lambda s, t, c: f32_mm(a, b, s, t, c, activation=activation))
    plain = loss(lambda s, t, c: PLAIN[activation](s[:, None] * (t * acc) + c))
    got, want = (jax.jit(jax.grad(f, moving))(*args) for f in (ours, plain))
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5 * np.abs(w).max())
    got, want = (jax.jvp(f, args, args) for f in (ours, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    n = 2.0**-8
    if activation in ("gelu", "silu") and len(moving) == 1:  # and against differences; the clamps have corners
        near = [
            np.asarray(f32_mm(a, b, *args[:2], args[2] + d * n, activation=activation), np.float64) for d in (-1, 1)
        ]
        along = jax.jvp(
            lambda c: f32_mm(a, b, *args[:2], c, activation=activation), (args[2],), (np.ones_like(args[2]),)
        )[1]
        # The third derivatives are below 1.5; 2^-20 of a result below 2^6 is what a value may be off.
        assert np.abs((near[1] - near[0]) / (2 * n) - along).max() <= 1.5 / 6 * n**2 + 2.0**-14 / n
        hessians = [jax.jit(jax.hessian(f, 2))(*args) for f in (ours, plain)]
        np.testing.assert_allclose(*hessians, rtol=1e-3, atol=1e-3)


def test_the_gradient_of_relu_at_0_is_that_of_jax():
    a, b = np.zeros((2, 4), np.int8), np.ones((3, 4), np.int8)
    f = lambda bias: f32_mm(a, b, 1.0, 1.0, bias, activation="relu").sum()
    assert jax.grad(f)(np.zeros(3, np.float32)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("activation", ["relu", "relu6", (-1, 1)])
def test_an_infinite_tangent_ends_at_a_clamp(activation):
    a, b = np.ones((1, 4), np.int8), np.ones((2, 4), np.int8)
    f = lambda bias: f32_mm(a, b, 0.125, 1.0, bias, activation=activation)
    bias = np.float32([-9, 0])  # the first result is clamped, the second one is 0.5
    _, moved = jax.jvp(f, (bias,), (np.full(2, np.inf, np.float32),))
    assert moved.tolist() == [[0, np.inf]]
    _, transposed = jax.vjp(f, bias)
    assert transposed(np.full((1, 2), np.inf, np.float32))[0].tolist() == [0, np.inf]


@pytest.mark.parametrize("out_dtype", [np.int8, E4M3])
def test_8_bit_results_have_no_derivative_and_say_so(out_dtype):
    a, b, scale_a, scale_b, bias = operands()
    f = lambda bias, scale: jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias, out_scale=scale, out_dtype=out_dtype)
    loss = lambda *args: f(*args).astype(jnp.float32).sum()
    for argument, name in enumerate(("bias", "out_scale")):
        with pytest.raises(
            TypeError, match=rf"out_dtype {np.dtype(out_dtype)} has no derivative, and {name} .*stop_gradient"
        ):
            jax.grad(loss, argument)(bias, np.float32(0.1))
    stopped = lambda scale_b: f32_mm(
        f(*map(jax.lax.stop_gradient, (bias, np.float32(0.1)))), f(bias, 0.1), 1.0, scale_b
    ).sum()
    assert np.isfinite(jax.grad(stopped)(np.float32(1)))  # a chain of which only the last product is differentiated


@pytest.mark.parametrize("sharding, expected", [("M", []), ("N", []), ("K", ["all-reduce"])])
@pytest.mark.parametrize("out_dtype", [np.int8, E4M3])
@pytest.mark.parametrize("activation", ["relu6", "silu"])
def test_sharded(sharding, expected, out_dtype, activation):
    a, b, scale_a, scale_b, bias = operands(8, 12, 32)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    m, n, k = ("x" if sharding == dimension else None for dimension in "MNK")
    specs = P(m, k), P(n, k), P(m), P(n), P(n), P()
    args = a, b, scale_a, scale_b, bias, np.float32(0.1)
    f = jax.jit(
        lambda *args: jax_qmm.scaled_mm(*args[:5], activation=activation, out_scale=args[5], out_dtype=out_dtype)
    )
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs)]
    compiled = f.lower(*placed).compile()
    found = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())
    assert found == expected
    assert_same(compiled(*placed), np.asarray(f(*args)))


def test_sharded_over_a_batch_with_an_out_scale_each():
    mesh = jax.make_mesh((3,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:3])
    a, b, *_ = (np.stack(x) for x in zip(*(operands(seed=seed) for seed in range(3))))
    f = jax.jit(jax.vmap(lambda a, b, o: jax_qmm.scaled_mm(a, b, 0.1, 0.1, out_scale=o, out_dtype=jnp.int8)))
    args = a, b, np.float32([1, 2, 3])
    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in args]
    compiled = f.lower(*placed).compile()
    assert "all-" not in compiled.as_text()
    assert_same(compiled(*placed), np.asarray(f(*args)))


def test_export():
    a, b, *rest = operands()
    f = jax.jit(
        lambda a, o: jax_qmm.scaled_mm(a, b, 0.1, *rest[1:], activation="gelu", out_scale=o, out_dtype=jnp.int8)
    )
    shapes = jax.ShapeDtypeStruct((*export.symbolic_shape("m"), 32), jnp.int8), jax.ShapeDtypeStruct((), jnp.float32)
    call = export.deserialize(export.export(f, platforms=["cpu"])(*shapes).serialize()).call
    np.testing.assert_array_equal(jax.jit(call)(a, np.float32(0.1)), f(a, np.float32(0.1)))


# Bad input

INT8 = {"out_dtype": jnp.int8, "out_scale": 0.5}
BAD = {
    "name": (
        dict(activation="swish"),
        ValueError,
        r"activation is 'swish'; it needs to be None, 'relu', .* \(lo, hi\)",
    ),
    "function": (dict(activation=jax.nn.relu), TypeError, "activation is .*; it needs to be None, 'relu'"),
    "one bound": (dict(activation=(1.0,)), TypeError, r"activation is \(1.0,\)"),
    "no number": (dict(activation=(None, 6)), TypeError, r"activation is \(None, 6\)"),
    "lo > hi": (dict(activation=(2, 1)), ValueError, r"activation is \(2, 1\); of \(lo, hi\) it needs lo <= hi"),
    "NaN": (dict(activation=(np.nan, 1)), ValueError, "lo <= hi"),
    "no scale": (dict(out_dtype=jnp.int8), ValueError, "out_dtype is int8; it needs out_scale"),
    "no scale, fp8": (dict(out_dtype=E4M3), ValueError, "out_dtype is float8_e4m3fn; it needs out_scale"),
    "no 8 bits": (
        dict(out_scale=0.5),
        ValueError,
        "out_scale was given with out_dtype bfloat16; .* int8 or float8_e4m3fn",
    ),
    "no int8": (
        dict(out_zero_point=3),
        ValueError,
        r"out_zero_point was given with out_dtype bfloat16; it needs out_dtype int8\b(?! or)",
    ),
    "fp8 point": (
        INT8 | dict(out_dtype=E4M3, out_zero_point=3),
        ValueError,
        "out_zero_point was given with out_dtype float8",
    ),
    "zero": (INT8 | dict(out_scale=0.0), ValueError, "out_scale is 0.0; it needs to be finite and not 0"),
    "zero array": (INT8 | dict(out_scale=jnp.zeros(())), ValueError, "out_scale is 0.0"),
    "zero in float32": (INT8 | dict(out_scale=1e-60), ValueError, "out_scale is 1e-60; .* not 0 in float32"),
    "nan": (INT8 | dict(out_scale=np.float16(np.nan)), ValueError, "out_scale is nan; it needs to be finite"),
    "inf": (INT8 | dict(out_scale=np.inf), ValueError, "out_scale is inf; it needs to be finite"),
    "shape": (INT8 | dict(out_scale=np.ones(6, np.float32)), ValueError, r"out_scale has shape \(6,\); it needs \(\)"),
    "dtype": (INT8 | dict(out_scale=np.int32(1)), TypeError, "out_scale has dtype int32"),
    "text": (INT8 | dict(out_scale="1"), TypeError, "out_scale is a str"),
    "point shape": (INT8 | dict(out_zero_point=np.ones(6, np.int32)), ValueError, r"out_zero_point has shape \(6,\)"),
    "float point": (INT8 | dict(out_zero_point=1.5), TypeError, "out_zero_point has dtype float32, needs an integer"),
    "sums, scale": (dict(out_dtype=jnp.int32, out_scale=0.5), ValueError, "unscaled sums: out_scale needs to be None"),
    "sums, activation": (dict(out_dtype=jnp.int32, activation="relu"), ValueError, "sums: activation needs to be None"),
    "bias": (INT8 | dict(bias=np.ones(6, np.int8)), TypeError, "bias has dtype int8; .*float32 or bfloat16 or float16"),
}


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD)
@pytest.mark.parametrize("traced", [False, True])
def test_bad_arguments_are_named(change, error, message, traced):
    a, b, *_ = operands()
    f = lambda a: jax_qmm.scaled_mm(**(dict(a=a, b=b, scale_a=1.0, scale_b=1.0) | change))
    with pytest.raises(error, match=message):
        (jax.jit(f) if traced else f)(a)


def test_a_traced_out_scale_is_computed_with_as_it_stands():
    a, b, *_ = operands()
    f = jax.jit(lambda scale: jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_scale=scale, out_dtype=jnp.int8))
    assert_same(f(np.float32(np.nan)), np.zeros((8, 6), np.int8))
    assert set(np.unique(f(np.float32(0)))) <= {-128, 0, 127}


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_bias_dtypes_of_8_bit_results(oracle, dtype):
    a, b, scale_a, scale_b, bias = operands()
    got = jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias.astype(dtype), **INT8)
    assert_same(got, oracle.scaled_mm(a, b, scale_a, scale_b, bias.astype(dtype), out_scale=0.5, out_dtype=np.int8))
