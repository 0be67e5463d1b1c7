"""dot_general, einsum and matmul of int4 weights, activations of int8 and float8: W4A8."""

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
    assert q.scale.dtype == jnp.int8
    values = (np.asarray(q.qvalue).astype(np.float64) - along(q.zero_point)) * along(q.scale)
    assert abs(values).max() <= 127
    axes = q.storage_axes()
    return values.transpose(axes), (values * np.asarray(q.scale_step, np.float64)).transpose(axes)


@pytest.mark.parametrize(
    "equation, shape, kernel, contracted, by_kernel",
    [
        ("bk,kn->bn", (3, 100), (100, 8), (0,), False),
        ("k,kn->n", (96,), (96, 8), (0,), True),
        ("abk,hdk->hbda", (2, 32, 96), (4, 8, 96), (2,), True),
        ("abk,hdk->hbda", (5, 13, 96), (4, 8, 96), (2,), True),
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
def test_is_the_product_of_two_qarrays_bit_for_bit(scheme, bias):
    """With a bias along columns or rows; where x is a QArray, XLA expands and scaled_mm multiplies."""
    x, w, bias = normal(65, 96), weight(scheme, 96, 16), normal(*bias, seed=2)
    dot = jax.jit(jax_qmm.matmul, static_argnames=("preferred_element_type", "scheme"))
    options = {"bias": bias, "preferred_element_type": jnp.bfloat16}
    want = dot(W8A8().quantize_activation(jnp.asarray(x), 1), w, **options)
    np.testing.assert_array_equal(dot(x, w, scheme=scheme, **options), want)


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
def test_sharded_as_w8a8(sharded_matmul, scheme, k, want, kind):
    x, w = normal(6, 256), weight(scheme, 256, 16)
    got, reduced = sharded_matmul(scheme, (2, 4), kind, k, x, w)
    # Over K, the bits of the largest value of each token, then the sums of the product
    assert reduced == want
    np.testing.assert_array_equal(got, jax_qmm.matmul(x, w, scheme=scheme))


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
    np.testing.assert_array_equal(x @ w.pack(), x @ int8.T)
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


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_same_weight_serves_float_activations(symmetric):
    x, w = normal(3, 96), weight(W4A8(32, symmetric), 96, 8)
    (row,) = jax_qmm.explain(jax_qmm.matmul, x, w).rows
    assert row.op.startswith("block_scaled_mm (blocks of 32")
    _, dense = expanded(w)
    for each in (w, w.pack(), w.pack().unpack(), w.astype(jnp.float32)):
        np.testing.assert_allclose(jax_qmm.matmul(x, each), x @ dense, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(each.dequantize(), dense, rtol=1e-6, atol=1e-6)
    assert w.dtype == jnp.float32 and w.astype(jnp.bfloat16).dtype == jnp.bfloat16
    dtypes = lambda q: [leaf.dtype for leaf in jax.tree.leaves(q)]
    assert dtypes(w.pack().unpack()) == dtypes(w)


def test_other_steps_and_scales():
    """Steps in bfloat16, multiples of any sign, and a step for each of two groups of channels."""
    values = np.random.default_rng(0).integers(-8, 8, (4, 8)).astype(np.int8)
    multiples = np.random.default_rng(1).integers(-15, 16, (4, 2))
    q = QArray(
        jnp.asarray(values, jnp.int4),
        jnp.asarray(multiples, jnp.int8),
        scale_step=jnp.bfloat16([[0.5], [0.5], [2.0], [2.0]]),
    )
    x = np.random.default_rng(2).integers(-127, 128, (3, 8)).astype(np.float32)
    x[:, 0] = 127  # so that a step of x is 1
    dense = (values * np.repeat(multiples, 4, 1)).astype(np.float64) * [[0.5], [0.5], [2.0], [2.0]]
    np.testing.assert_array_equal(jax_qmm.matmul(x, q.T, scheme=W4A8(4)), np.float32(x @ dense.T))


# Beside float8, in blocks that no kernel reads in 4 bits


def float8(*args, **options):
    return W4A8(*args, **options, activation_dtype="fp8")


of_float8 = pytest.mark.parametrize("scheme", [float8(8), float8(8, symmetric=False), float8(24)], ids=str)


def in_float8(q):
    """The same QArray with values of float8, less their zero points."""
    values = np.asarray(q.qvalue, np.float32)
    values -= 0 if q.zero_point is None else np.asarray(q.along_values(q.zero_point), np.float32)
    exact = values.astype("float8_e4m3fn")
    np.testing.assert_array_equal(exact.astype(np.float32), values)
    return q._replace(qvalue=jnp.asarray(exact), scale=q.float_scale(), zero_point=None, scale_step=None)


@pytest.mark.parametrize(
    "equation, shape, kernel, contracted",
    [
        ("bk,kn->bn", (5, 100), (100, 8), (0,)),
        ("abk,hdk->hbda", (2, 33, 96), (4, 8, 96), (2,)),
        ("gbk,gkn->gbn", (2, 5, 96), (2, 96, 8), (1,)),
    ],
)
@of_float8
def test_is_the_float8_product_in_blocks(scheme, equation, shape, kernel, contracted):
    x, w = normal(*shape), weight(scheme, *kernel, contracted=contracted)
    assert w.is_packed and w.qtype == jnp.int4 and w.scale_step is None
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    got, tokens = jax.jit(f)(x, w), W8A8("fp8").quantize_activation(jnp.asarray(x), len(contracted))
    dense, tokens = np.asarray(w.dequantize(), np.float64), np.asarray(tokens.dequantize(), np.float64)
    most = np.einsum(equation, abs(tokens), abs(dense))
    # Two factors that are rounded once each, their scales' product, and a sum of up to 128
    assert (abs(got - np.einsum(equation, tokens, dense)) <= (128 + 4) * 2.0**-24 * most).all()
    for each in (w, w.unpack()):
        rows = jax_qmm.explain(f, x, each).rows
        assert [row.op.split()[0] for row in rows] == ["expand", "quantize", "block_scaled_mm"]
        assert rows[0].inputs.startswith("int4") and rows[0].out.startswith("float8")
        assert "at each call" in rows[0].runs_on
        np.testing.assert_array_equal(jax.jit(f)(x, each), got)


def test_every_value_and_zero_point_is_exact():
    values, zero_points = np.meshgrid(np.arange(-8, 8), np.arange(-8, 8))
    w = QArray(jnp.asarray(values, jnp.int4), jnp.ones((16, 1)), jnp.asarray(zero_points[:1].T, jnp.int32))
    got = jax_qmm.quantize(jnp.tile(jnp.eye(16), (5, 1)), "fp8", axis=None, scale=1.0) @ w.T
    np.testing.assert_array_equal(got, np.tile((values - zero_points[:1].T).T, (5, 1)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@of_float8
def test_sharded_over_blocks_beside_float8(scheme, kind):
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("x", "y"), axis_types=(kind,) * 2)
    x, w = normal(68, 768), weight(scheme, 768, 16)  # halves are whole blocks, and whole groups of 128 columns
    f = lambda x, w, **options: jax_qmm.matmul(x, w, scheme=scheme, **options)
    place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: place(leaf, None, None if leaf.shape[1] == 1 else "y"), w)
        options = {"out_sharding": P("x", None)} if kind == AxisType.Explicit else {}
        args = place(x, "x", "y"), placed
        compiled = jax.jit(lambda x, w: f(x, w, **options)).lower(*args).compile()
        got = compiled(*args)
    # The bits of the largest value of each token, then float32 sums
    assert sorted(re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text())) == ["f32", "s32"]
    assert "all-gather" not in compiled.as_text()
    want = np.asarray(f(x, w))
    np.testing.assert_allclose(got, want, rtol=0, atol=768 * 2.0**-24 * float((abs(x) @ abs(w.dequantize())).max()))


@pytest.mark.parametrize("packed", [False, True])
def test_two_qarrays_beside_float8(packed):
    """Also a weight with a step, whose scales are as good, and one that is packed."""
    x = jax_qmm.quantize(normal(65, 96), "fp8")
    for w in (weight(W4A8(24), 96, 8), jax_qmm.quantize(normal(8, 96), jnp.int4, symmetric=False, tile_size=8).T):
        as_stored = w.pack() if packed else w
        np.testing.assert_array_equal(x @ as_stored, x @ in_float8(w))
        np.testing.assert_array_equal(as_stored.T @ x.T, in_float8(w).T @ x.T)


def test_blocks_on_both_sides_stay_float8_of_few_rows_too():
    x, w = jax_qmm.quantize(normal(3, 96), "fp8", tile_size=32), weight(float8(32), 96, 8)
    np.testing.assert_array_equal(x @ w, x @ in_float8(w.unpack()))


def test_activations_of_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="activation_dtype is 'int4', needs int8 or float8_e4m3fn"):
        W4A8(activation_dtype="int4")
    with pytest.raises(ValueError, match="has no scale_step, .* needs one"):
        jax_qmm.matmul(normal(3, 96), weight(float8(32), 96, 8).unpack(), scheme=W4A8(32))
