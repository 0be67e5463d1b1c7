"""dot_general, einsum and matmul of int4 weights, int8 activations: W4A8."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import W4A8, W8A8, QArray

schemes = pytest.mark.parametrize("scheme", [W4A8(32), W4A8(32, symmetric=False)], ids=str)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(0.5, 1, shape).astype(np.float32)


def weight(scheme, *shape, contracted=(0,)):
    return scheme.quantize_weight(normal(*shape, seed=1), contracted)


def expanded(q):
    """In numpy what is multiplied: int8 values, in logical order, and what they stand for in float64."""
    along = lambda leaf: 0 if leaf is None else np.asarray(q.along_values(leaf), np.float64)
    multiples = np.rint(along(q.scale) / np.asarray(q.scale_step, np.float64))
    np.testing.assert_allclose(multiples * np.asarray(q.scale_step), along(q.scale), rtol=2.0**-22)
    values = (np.asarray(q.qvalue).astype(np.float64) - along(q.zero_point)) * multiples
    assert abs(values).max() <= 127
    axes = q.storage_axes()
    return values.transpose(axes), (values * np.asarray(q.scale_step, np.float64)).transpose(axes)


@pytest.mark.parametrize(
    "equation, shape, kernel, contracted, by_kernel",
    [
        ("bk,kn->bn", (3, 100), (100, 8), (0,), False),
        ("k,kn->n", (96,), (96, 8), (0,), True),
        ("abk,hdk->hbda", (2, 32, 96), (4, 8, 96), (2,), True),
        ("abk,hdk->hbda", (5, 13, 96), (4, 8, 96), (2,), False),
        ("gbk,gkn->gbn", (2, 3, 96), (2, 96, 8), (1,), True),
        ("bhd,hdn->bn", (3, 2, 64), (2, 64, 8), (0, 1), True),
        ("bhd,hdn->bn", (3, 5, 16), (5, 16, 8), (0, 1), False),
    ],
)
@schemes
def test_is_the_int8_product_with_one_scale_per_channel(scheme, equation, shape, kernel, contracted, by_kernel):
    x, w = normal(*shape), weight(scheme, *kernel, contracted=contracted)
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    _, dense = expanded(w)
    tokens = W8A8().quantize_activation(jnp.asarray(x), len(contracted))
    want = np.einsum(equation, np.asarray(tokens.qvalue, np.float64) * np.asarray(tokens.scale, np.float64), dense)
    # The sums are exact; two scales are multiplied in float32.
    np.testing.assert_allclose(np.asarray(jax.jit(f)(x, w), np.float64), want, rtol=4 * 2.0**-24, atol=0)
    rows = jax_qmm.explain(f, x, w).rows
    if by_kernel:
        assert [row.op.split()[0] for row in rows] == ["quantize", "expanded_mm"]
        return
    assert [row.op.split()[0] for row in rows] == ["expand", "quantize", "scaled_mm"]
    assert rows[0].inputs.startswith("int4") and rows[0].out.startswith("int8") and "at each call" in rows[0].runs_on


@schemes
@pytest.mark.parametrize("bias", [(16,), (1, 16), (65, 1), ()], ids=str)
def test_few_rows_get_the_same_results_as_many(scheme, bias):
    """Bit for bit, with a bias along columns or rows, though one kernel has the epilogue and XLA that of the other."""
    x, w, bias = normal(65, 96), weight(scheme, 96, 16), normal(*bias, seed=2)
    options = {"scheme": scheme, "preferred_element_type": jnp.bfloat16}
    dot = jax.jit(lambda x, w, bias: jax_qmm.matmul(x, w, bias=bias, **options))
    few = dot(x[:7], w, bias[:7] if bias.shape[:1] == (65,) else bias)
    np.testing.assert_array_equal(few, dot(x, w, bias)[:7])


@schemes
def test_the_derivative_by_x_is_that_of_the_dequantized_product(scheme):
    x, w, y = normal(3, 100), weight(scheme, 100, 8), normal(3, 8, seed=2)
    got = jax.jit(jax.grad(lambda x: jnp.sum(jax_qmm.matmul(x, w, scheme=scheme) * y)))(x)
    _, dense = expanded(w)
    assert (abs(got - y @ dense.T) <= 12 * 2.0**-24 * (abs(y) @ abs(dense.T))).all()


@schemes
def test_vmap_scan_and_export(scheme):
    x, w = normal(4, 3, 96), weight(scheme, 4, 8, 96, contracted=(2,))
    f = lambda x, w: jax_qmm.einsum("bk,nk->bn", x, w, scheme=scheme)
    want = np.stack([f(x[i], jax.tree.map(lambda leaf, i=i: leaf[i], w)) for i in range(4)])
    np.testing.assert_array_equal(jax.vmap(f)(x, w), want)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, xw: (c, f(*xw)), 0, (x, w))[1], want)
    exported = jax.export.export(jax.jit(jax.vmap(f)), platforms=["cpu"])(x, w)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x, w), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("k, want", [(None, []), ("y", ["s32", "s32"])])
@schemes
def test_sharded_as_w8a8(scheme, k, want, kind):
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("x", "y"), axis_types=(kind,) * 2)
    n = None if k else "y"
    x, w = normal(6, 256), weight(scheme, 256, 16)
    f = lambda x, w, **options: jax_qmm.matmul(x, w, scheme=scheme, **options)
    place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: place(leaf, n, None if leaf.shape[1] == 1 else k), w)
        options = {"out_sharding": P("x", n)} if kind == AxisType.Explicit and k else {}
        args = place(x, "x", k), placed
        compiled = jax.jit(lambda x, w: f(x, w, **options)).lower(*args).compile()
        got = compiled(*args)
    # Over K, the bits of the largest value of each token, then the sums of the product
    assert sorted(re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text())) == want
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(got, f(x, w))


def test_what_does_not_fit_is_refused():
    x, w = normal(3, 96), weight(W4A8(32), 96, 8)
    with pytest.raises(ValueError, match="has no scale_step, .* needs one"):
        jax_qmm.matmul(x, jax_qmm.quantize(normal(8, 96), jnp.int4, tile_size=32).T, scheme=W4A8(32))
    with pytest.raises(ValueError, match="is packed, .* needs it plain"):
        jax_qmm.matmul(x, w.pack(), scheme=W4A8(32))
    with pytest.raises(ValueError, match="scheme has dtype int4, needs that of the QArray, int8"):
        jax_qmm.matmul(x, jax_qmm.quantize(normal(8, 96)).T, scheme=W4A8(32))
    image, kernel = jnp.ones((1, 4, 4, 8)), W4A8().quantize_weight(jnp.ones((4, 1, 1, 8)), (1, 2, 3))
    numbers = ("NHWC", "OHWI", "NHWC")
    with pytest.raises(ValueError, match="convolutions take a W8A8 without tile_size, W4A16 and W8A16"):
        jax_qmm.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers, scheme=W4A8())


@schemes
@pytest.mark.parametrize("granularity", [{}, {"tile_size": 24}], ids=str)
def test_two_qarrays(scheme, granularity):
    x, w = jax_qmm.quantize(normal(3, 96), symmetric=False, **granularity), weight(scheme, 96, 8)
    values, _ = expanded(w)
    int8 = QArray(jnp.asarray(values.T, jnp.int8), w.scale_step)
    np.testing.assert_array_equal(x @ w, x @ int8.T)
    np.testing.assert_array_equal(w.T @ x.T, int8 @ x.T)
    ops = [row.op.split()[0] for row in jax_qmm.explain(jax_qmm.matmul, x, w).rows]
    assert ops == ["expand", "block_scaled_mm" if granularity else "scaled_mm"]


def test_views_have_their_step():
    x, w = normal(3, 4, 32), weight(W4A8(32), 4, 32, 8, contracted=(0, 1))
    split, scheme = w.reshape(4, 32, 2, 4), W4A8(32)
    assert split.scale_step.shape == (2, 4, 1, 1)
    want = jax_qmm.einsum("bhd,hdn->bn", x, w, scheme=scheme)
    got = jax_qmm.einsum("bhd,hdmn->bmn", x, split, scheme=scheme)
    np.testing.assert_array_equal(got.reshape(3, 8), want)
    np.testing.assert_array_equal(jax_qmm.einsum("nhd,bhd->bn", w.transpose(2, 0, 1), x, scheme=scheme), want)


def test_the_same_weight_serves_float_activations():
    x, w = normal(3, 96), weight(W4A8(32), 96, 8)
    (row,) = jax_qmm.explain(jax_qmm.matmul, x, w).rows
    assert row.op.startswith("block_scaled_mm (blocks of 32")
    _, dense = expanded(w)
    np.testing.assert_allclose(jax_qmm.matmul(x, w), x @ dense, rtol=1e-5, atol=1e-5)


def test_other_steps_and_scales():
    """Scales in bfloat16 and of any sign, and a step for each of two groups of channels."""
    values = np.random.default_rng(0).integers(-8, 8, (4, 8)).astype(np.int8)
    multiples = np.random.default_rng(1).integers(-15, 16, (4, 2))
    q = QArray(
        jnp.asarray(values, jnp.int4),
        jnp.asarray(multiples * [[0.5], [0.5], [2.0], [2.0]], jnp.bfloat16),
        scale_step=jnp.bfloat16([[0.5], [0.5], [2.0], [2.0]]),
    )
    x = np.random.default_rng(2).integers(-127, 128, (3, 8)).astype(np.float32)
    x[:, 0] = 127  # so that a step of x is 1
    dense = (values * np.repeat(multiples, 4, 1)).astype(np.float64) * [[0.5], [0.5], [2.0], [2.0]]
    np.testing.assert_array_equal(jax_qmm.matmul(x, q.T, scheme=W4A8(4)), np.float32(x @ dense.T))
