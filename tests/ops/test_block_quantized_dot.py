"""dot_general, einsum and matmul with scales for blocks of what is contracted, on both sides."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import W8A8, QArray

FP8 = jnp.dtype("float8_e4m3fn")
SCHEMES = [
    W8A8(tile_size=32),
    W8A8(tile_size=32, symmetric=False),
    W8A8(tile_size=32, weight_symmetric=False),
    W8A8(tile_size=32, symmetric=False, weight_symmetric=False),
    W8A8(FP8, tile_size=32),
    W8A8(FP8, tile_size=32, weight_tile=(4, 32)),
]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def normal(*shape, seed=0, mean=0.5):
    return np.random.default_rng(seed).normal(mean, 1, shape).astype(np.float32)


def exact(q):
    """What a QArray stands for in float64, in logical order."""
    along = (0.0 if v is None else np.asarray(q.along_values(v), np.float64) for v in (q.zero_point, q.scale))
    zero_point, scale = along
    return ((np.asarray(q.qvalue).astype(np.float64) - zero_point) * scale).transpose(q.storage_axes())


def quantized_rows(x, contracted, scheme, tile):
    """What x stands for once its last axes are quantized in blocks of `tile`, over all of them."""
    first = x.ndim - contracted
    flat = x.reshape(*x.shape[:first], math.prod(x.shape[first:]))
    granularity = {"axis": -1} if tile is None else {"tile_size": tile}
    return exact(jax_qmm.quantize(flat, scheme.dtype, symmetric=scheme.symmetric, **granularity)).reshape(x.shape)


def assert_close_to_exact(got, equation, x, w, scheme, blocks):
    """Each block's sum is exact of int8 and scaled with two roundings; that of fp8 has those of 32 values."""
    want, size = np.einsum(equation, x, w), np.einsum(equation, abs(x), abs(w))
    bound = (blocks + 2 + (32 if scheme.dtype == FP8 else 0)) * 2.0**-24 * size
    # Zero points cancel: sums of int8 less their zero points are exact, so that `size` is of what is left.
    assert got.shape == want.shape and (np.abs(np.asarray(got, np.float64) - want) <= bound + 1e-30).all()


def one_product(f, *args):
    (row,) = (row for row in jax_qmm.explain(f, *args).rows if row.op.startswith(("block_scaled_mm", "dequantized")))
    return row.op


def weight(scheme, *shape, contracted=(-1,), seed=1):
    return scheme.quantize_weight(normal(*shape, seed=seed), contracted)


CASES = {
    "a kernel": ("bk,kn->bn", (3, 96), (96, 8), (-2,), 3),
    "a short last block": ("bk,kn->bn", (3, 100), (100, 8), (-2,), 4),
    "a vector": ("k,kn->n", (96,), (96, 8), (-2,), 3),
    "rows and columns mixed": ("abk,hdk->hbda", (2, 3, 96), (4, 8, 96), (-1,), 3),
    "batched": ("gbk,gkn->gbn", (2, 3, 96), (2, 96, 8), (-2,), 3),
    "two contracted axes": ("bhd,hdn->bn", (3, 2, 64), (2, 64, 8), (-3, -2), 4),
    "two, with smaller blocks": ("bhd,hdn->bn", (3, 5, 16), (5, 16, 8), (-3, -2), 5),
    "no rows": ("bk,kn->bn", (0, 96), (96, 8), (-2,), 3),
}


@schemes
@pytest.mark.parametrize("case", CASES)
def test_is_the_product_of_what_both_sides_quantize_to(case, scheme):
    equation, shape, kernel, contracted, blocks = CASES[case]
    x, w = normal(*shape), weight(scheme, *kernel, contracted=contracted)
    tile = w.tile_along(w.ndim - 1)
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    got = jax.jit(f)(x, w)
    quantized = quantized_rows(x, len(contracted), scheme, tile)
    assert_close_to_exact(got, equation, quantized, exact(w), scheme, blocks)
    assert one_product(f, x, w).startswith(f"block_scaled_mm (blocks of {tile}")
    flipped = jax_qmm.einsum(
        ",".join(equation.split("->")[0].split(",")[::-1]) + "->" + equation.split("->")[1], w, x, scheme=scheme
    )
    np.testing.assert_array_equal(flipped, got)


@schemes
def test_gradients_pass_straight_through_the_quantizer(scheme):
    x, w, bias = normal(3, 100), weight(scheme, 100, 8, contracted=(0,)), normal(8, seed=2)
    weights = normal(3, 8, seed=3)
    f = lambda x, bias: jnp.sum(jax_qmm.matmul(x, w, scheme=scheme, bias=bias) * weights)
    by_x, by_bias = jax.jit(jax.grad(f, (0, 1)))(x, bias)
    want = weights.astype(np.float64) @ exact(w).T
    size = abs(weights.astype(np.float64)) @ abs(exact(w)).T
    assert (abs(by_x - want) <= 12 * 2.0**-24 * size).all()  # sums of 8 products with a dequantized weight
    np.testing.assert_allclose(by_bias, weights.sum(0), rtol=1e-6)


def test_two_qarrays_with_blocks():
    x, w = normal(4, 3, 96), normal(8, 96, seed=1)
    for symmetric in (True, False):
        options = {"tile_size": 32, "symmetric": symmetric}
        a, b = jax_qmm.quantize(x, **options), jax_qmm.quantize(w, **options)
        got = jax_qmm.matmul(a, b.T)
        np.testing.assert_array_equal(got, jax_qmm.block_scaled_mm(a, b))
        turned = jax_qmm.einsum("nk,abk->nab", b, a)  # scaled in another order
        assert_close_to_exact(turned, "nk,abk->nab", exact(b), exact(a), W8A8(), 3)
        token = jax_qmm.quantize(x, symmetric=symmetric)
        np.testing.assert_array_equal(token @ b.T, jax_qmm.block_scaled_mm(token, b))
        offset = QArray(b.qvalue, b.scale, jnp.full(b.scale.shape, 0.25))  # float zero points are those of a weight
        np.testing.assert_array_equal(a @ offset.T, jax_qmm.block_scaled_mm(a, offset))
        np.testing.assert_array_equal(jax_qmm.einsum("nk,abk->abn", offset, a), jax_qmm.block_scaled_mm(a, offset))


def test_two_qarrays_with_blocks_of_several_axes():
    x, w = (jax_qmm.quantize(normal(n, 4, 32, seed=n), tile_size=16, symmetric=False) for n in (3, 8))
    f = lambda x, w: jax_qmm.einsum("bhd,nhd->bn", x, w)
    assert one_product(f, x, w) == "block_scaled_mm (blocks of 16, zero_point_a, zero_point_b)"
    assert_close_to_exact(f(x, w), "bhd,nhd->bn", exact(x), exact(w), W8A8(), 8)
    of_heads = jax_qmm.quantize(normal(8, 4, 32), axis=-1)  # a scale for each of one axis is a block of the other
    assert one_product(f, jax_qmm.quantize(normal(3, 4, 32)), of_heads) == "block_scaled_mm (blocks of 32)"


def test_activations_have_the_blocks_of_the_weight():
    x, scheme = normal(3, 96), W8A8(tile_size=48)
    for tile, blocks in ((16, 6), (None, 2)):  # which has blocks of its own, or none
        w = W8A8(tile_size=tile).quantize_weight(normal(96, 8, seed=1), (0,))
        quantized = quantized_rows(x, 1, scheme, tile or 48)
        assert_close_to_exact(jax_qmm.matmul(x, w, scheme=scheme), "bk,kn->bn", quantized, exact(w), scheme, blocks)
    w, per_token = scheme.quantize_weight(normal(96, 8, seed=1), (0,)), W8A8(symmetric=False)
    quantized = quantized_rows(x, 1, per_token, None)
    assert_close_to_exact(jax_qmm.matmul(x, w, scheme=per_token), "bk,kn->bn", quantized, exact(w), scheme, 2)


def test_one_block_is_a_product_per_token():
    x, scheme = normal(3, 96), W8A8(tile_size=96)
    w = scheme.quantize_weight(normal(96, 8, seed=1), (0,))
    ops = [row.op for row in jax_qmm.explain(lambda x: jax_qmm.matmul(x, w, scheme=scheme), x).rows]
    assert ops == ["quantize (dynamic, per row)", "scaled_mm (scale_a, scale_b)"]


def test_the_sums_come_from_the_quantizer():
    x, scheme = normal(17, 96), W8A8(tile_size=32, symmetric=False, weight_symmetric=False)
    w = scheme.quantize_weight(normal(96, 8, seed=1), (0,))
    assert w.azp_adj.shape == w.scale.shape
    f = lambda x, w: jax_qmm.matmul(x, w, scheme=scheme)
    quantizer, _ = jax_qmm.explain(f, x, w).rows
    assert quantizer.op == "quantize (dynamic, per row, sums)"
    assert "reduce_sum" not in str(jax.make_jaxpr(f)(x, w))


@pytest.mark.parametrize("bias, late", [((8,), False), ((3, 1), True)])
def test_bias_and_dtypes(bias, late):
    scheme = W8A8(tile_size=32)
    x, w, bias = normal(3, 96).astype(jnp.bfloat16), weight(scheme, 96, 8, contracted=(0,)), normal(*bias)
    f = lambda **options: jax_qmm.matmul(x, w, scheme=scheme, bias=bias, **options)
    want = np.asarray(jax_qmm.matmul(x, w, scheme=scheme)) + bias
    np.testing.assert_allclose(f(), want, rtol=0, atol=2.0**-22 * abs(want).max())
    rounded = f(preferred_element_type=jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(rounded), want, rtol=2.0**-8)
    assert ("bias" in one_product(lambda: f())) != late


def test_a_static_scale_meets_blocks_of_the_weight():
    x, scheme = normal(3, 96), W8A8(activation_scale=0.05)
    w = weight(W8A8(tile_size=32), 96, 8, contracted=(0,))
    quantized = exact(jax_qmm.quantize(x, axis=None, scale=0.05))
    assert_close_to_exact(jax_qmm.matmul(x, w, scheme=scheme), "bk,kn->bn", quantized, exact(w), scheme, 3)
    by_x = jax.grad(lambda x: jax_qmm.matmul(x, w, scheme=scheme).sum())(100 * x)
    assert (by_x == 0).any() and (by_x != 0).any()  # nothing where it saturates


@pytest.mark.parametrize(
    "equation, shape, w",
    [
        ("bk,nk->bn", (3, 8), lambda: QArray(jnp.ones((6, 8), jnp.int8), jnp.ones((2, 1)))),
        ("bhd,nhd->bn", (3, 4, 8), lambda: QArray(jnp.ones((6, 4, 8), jnp.int8), jnp.ones((6, 2, 1)))),
        ("bhd,nhd->bn", (3, 2, 5), lambda: QArray(jnp.ones((6, 2, 5), jnp.int8), jnp.ones((6, 2, 3)), tile_size=2)),
        ("bk,nk->bn", None, lambda: jax_qmm.quantize(normal(6, 8), tile_size=2)),
    ],
)
def test_what_is_dequantized_instead(equation, shape, w):
    x, w = jax_qmm.quantize(normal(3, 8), tile_size=4) if shape is None else normal(*shape), w()
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=None if shape is None else W8A8())
    (row,) = (row for row in jax_qmm.explain(f, x, w).rows if row.op == "dequantized dot")
    assert "several scales within one axis, or two have different blocks" in row.runs_on
    want = np.einsum(equation, exact(x) if shape is None else x, exact(w))
    np.testing.assert_allclose(f(x, w), want, rtol=1e-5, atol=1e-5)


# Transformations


@schemes
def test_vmap_and_scan_over_stacked_weights(scheme):
    x, w = normal(4, 3, 96), weight(scheme, 4, 8, 96)
    f = lambda x, w: jax_qmm.einsum("bk,nk->bn", x, w, scheme=scheme)
    want = np.stack([f(x[i], jax.tree.map(lambda leaf, i=i: leaf[i], w)) for i in range(4)])
    np.testing.assert_array_equal(jax.vmap(f)(x, w), want)
    _, scanned = jax.lax.scan(lambda c, xw: (c, f(*xw)), 0, (x, w))
    np.testing.assert_array_equal(scanned, want)
    shared = jax.tree.map(lambda leaf: leaf[0], w)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, shared), f(x.reshape(12, 96), shared).reshape(4, 3, 8))


def test_exports_with_symbolic_rows():
    scheme = W8A8(FP8, tile_size=32, weight_tile=(4, 32))
    (m,) = jax.export.symbolic_shape("m")
    x, w = normal(3, 96), weight(scheme, 96, 8, contracted=(0,))
    f = jax.jit(lambda x, w: jax_qmm.matmul(x, w, scheme=scheme))
    exported = jax.export.export(f, platforms=["cpu"])(jax.ShapeDtypeStruct((m, 96), jnp.float32), w)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x, w), f(x, w))


def collectives(compiled):
    return re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("m, n, k, want", [("x", "y", None, []), ("x", None, "y", ["all-reduce"])])
@schemes
def test_sharded_over_blocks_of_k_one_all_reduce(scheme, m, n, k, want, kind):
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x, w = normal(6, 256), weight(scheme, 256, 16, contracted=(0,))
    out = P(m, n)
    f = lambda x, w, **options: jax_qmm.matmul(x, w, scheme=scheme, preferred_element_type=jnp.bfloat16, **options)
    with jax.set_mesh(mesh):
        x_placed = jax.device_put(x, NamedSharding(mesh, P(m, k)))
        w_placed = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(n, k))), w)
        options = {"out_sharding": out} if kind == AxisType.Explicit and k else {}
        compiled = jax.jit(lambda x, w: f(x, w, **options)).lower(x_placed, w_placed).compile()
        got = compiled(x_placed, w_placed)
    assert collectives(compiled) == want
    assert re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text()) == ["f32"] * len(want)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    whole = np.float32(f(x, w))
    np.testing.assert_allclose(np.float32(got), whole, rtol=2.0**-7, atol=1e-5 * abs(whole).max())


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_sharded_within_blocks(shape):
    """Six blocks over four or eight devices: what is within them is gathered."""
    mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
    scheme, x = W8A8(tile_size=32, symmetric=False), normal(6, 192)
    w = weight(scheme, 192, 16, contracted=(0,))
    f = jax.jit(lambda x: jax_qmm.matmul(x, w, scheme=scheme))
    got = f(jax.device_put(x, NamedSharding(mesh, P(None, mesh.axis_names))))
    np.testing.assert_allclose(got, f(x), rtol=1e-5, atol=1e-5)


def test_schemes_that_do_not_fit_are_refused():
    x, w = normal(3, 96), jax_qmm.quantize(normal(8, 96), tile_size=32)
    with pytest.raises(ValueError, match="is packed, .* needs it plain"):
        jax_qmm.matmul(x, w.pack().T, scheme=W8A8(tile_size=32))
    with pytest.raises(ValueError, match="scheme has dtype float8_e4m3fn, needs that of the QArray, int8"):
        jax_qmm.matmul(x, w.T, scheme=W8A8(FP8, tile_size=32))
    with pytest.raises(ValueError, match="both operands are QArrays already"):
        jax_qmm.matmul(w, w.T, scheme=W8A8(tile_size=32))
    image, kernel = jnp.ones((1, 4, 4, 8)), jax_qmm.quantize(jnp.ones((4, 1, 1, 8)), axis=(1, 2, 3))
    numbers = ("NHWC", "OHWI", "NHWC")
    with pytest.raises(ValueError, match="convolutions take a W8A8 without tile_size"):
        jax_qmm.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers, scheme=W8A8(tile_size=4))
