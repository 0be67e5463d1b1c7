"""quantize(..., sums=True): the sums of the quantized values over the axes that share a scale."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def summed(q, axes):
    return np.asarray(q.qvalue).sum(axis=axes, dtype=np.int32, keepdims=True)


def assert_sums(q, plain, axes):
    """`q` is the array quantized without sums, and has those over `axes`."""
    for got, want in zip((q.qvalue, q.scale, q.zero_point), (plain.qvalue, plain.scale, plain.zero_point)):
        assert (got is None) == (want is None)
        np.testing.assert_array_equal(got, want) if got is not None else None
    assert q.azp_adj.dtype == jnp.int32
    np.testing.assert_array_equal(q.azp_adj, summed(plain, axes))


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
)
def test_sums_over_what_shares_a_scale(shape, which, symmetric, static):
    axes = tuple(axis for axis in range(len(shape)) if which >> axis & 1) or (0,)
    x = normal(*shape)
    options = {"symmetric": symmetric, "axis": axes}
    if static:
        options |= {"scale": 0.02, "zero_point": None if symmetric else 5}
    q = jax.jit(lambda x: jax_qmm.quantize(x, sums=True, **options))(x)
    assert_sums(q, jax_qmm.quantize(x, **options), axes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k, tile, axis", [(24, 8, -1), (20, 8, -1), (5, 8, -1), (24, 8, 0)])
@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
def test_sums_of_blocks(k, tile, axis, symmetric, scale_dtype):
    """Without the zeros that fill up a short last block, whose zero point is not 0."""
    x = normal(*((4, k) if axis == -1 else (k, 4))) + 3
    options = {"axis": axis, "tile_size": tile, "symmetric": symmetric, "scale_dtype": scale_dtype}
    q = jax_qmm.quantize(x, sums=True, **options)
    starts = range(0, k, tile)
    want = np.add.reduceat(np.asarray(q.qvalue, np.int32), starts, axis)
    np.testing.assert_array_equal(q.azp_adj, want)
    np.testing.assert_array_equal(q.qvalue, jax_qmm.quantize(x, **options).qvalue)


def test_blocks_of_constants_zeros_and_nan():
    """Exact values, a zero point in the range of int8, and NaN in its own block alone."""
    x = np.repeat(np.float32([[0, 5, -3, 0.1, np.nan, -1e-38]]), 32, 1)
    q = jax_qmm.quantize(x, tile_size=32, symmetric=False, sums=True)
    dense = np.asarray(q.dequantize()).reshape(6, 32)
    np.testing.assert_allclose(dense[:4], x.reshape(6, 32)[:4], rtol=2.0**-23)
    assert (dense[0] == 0).all() and np.isnan(dense[4]).all() and np.isfinite(dense[5]).all()
    np.testing.assert_array_equal(q.azp_adj[0], np.asarray(q.qvalue, np.int32).reshape(6, 32).sum(1))


def test_long_rows_of_extremes():
    x = np.stack([np.full(70000, -1000.0), np.full(70000, 1000.0)]).astype(np.float32)
    q = jax_qmm.quantize(x, scale=1.0, sums=True)
    assert q.azp_adj.tolist() == [[-128 * 70000], [127 * 70000]]


@pytest.mark.parametrize("static", [False, True])
def test_vmap_sums_nothing_over_the_batch(static):
    x = normal(3, 4, 8)
    options = {"scale": 0.02} if static else {}
    for axis in (-1, None):
        q = jax.vmap(lambda x: jax_qmm.quantize(x, axis=axis, sums=True, **options))(x)
        for i in range(3):
            want = jax_qmm.quantize(x[i], axis=axis, sums=True, **options)
            np.testing.assert_array_equal(q.azp_adj[i], want.azp_adj)
            np.testing.assert_array_equal(q.qvalue[i], want.qvalue)
    scales = np.float32([0.01, 0.02, 0.03])
    q = jax.vmap(lambda s: jax_qmm.quantize(x[0], scale=s, sums=True))(scales)
    np.testing.assert_array_equal(q.azp_adj, np.asarray(q.qvalue).sum(-1, dtype=np.int32, keepdims=True))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "spec, options, expected",
    [
        (P("x"), {}, 0),
        (P(None, "x"), {}, 2),  # the extrema and the sums
        (P(None, "x"), {"scale": 0.02}, 1),
        (P("x"), {"scale": 0.02}, 0),
        (P("x"), {"axis": None, "symmetric": False}, 2),
    ],
    ids=str,
)
def test_sharded(kind, spec, options, expected):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    x = normal(8, 16)
    f = jax.jit(lambda x: jax_qmm.quantize(x, sums=True, **options))
    want = f(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = f.lower(placed).compile()
        got = compiled(placed)
    assert (
        re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text())
        == ["all-reduce"] * expected
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got.azp_adj.sharding.is_equivalent_to(got.scale.sharding, 2) or "scale" in options


def test_sums_go_with_the_view_and_the_export():
    q = jax_qmm.quantize(normal(6, 8), sums=True).T
    assert repr(q) == "QArray(int8[8,6], scale=float32[1,6], azp_adj=int32[1,6], stored=[6,8])"
    f = jax.jit(lambda x: jax_qmm.quantize(x, symmetric=False, sums=True).azp_adj)
    shape = jax.ShapeDtypeStruct((*export.symbolic_shape("m"), 8), jnp.float32)
    call = export.deserialize(export.export(f, platforms=["cpu"])(shape).serialize()).call
    np.testing.assert_array_equal(call(normal(5, 8)), f(normal(5, 8)))


def test_explain_says_so():
    table = jax_qmm.explain(lambda x: jax_qmm.quantize(x, sums=True), normal(6, 8))
    assert [row.op for row in table.rows] == ["quantize (dynamic, per row, sums)"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sums": 1}, TypeError, "sums is 1, needs True or False"),
        ({"qtype": "fp8"}, ValueError, "sums=True was given with qtype float8_e4m3fn, needs int8"),
    ],
)
def test_bad_input(options, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.quantize(normal(6, 8), **({"sums": True} | options))
