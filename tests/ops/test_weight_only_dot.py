"""dot_general, einsum and matmul with a weight for float activations."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import QArray
from jax_qmm.models.leaf_specs import leaf_shardings

BF16 = ml_dtypes.bfloat16


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantized(*shape, qtype=jnp.int4, seed=1, **options):
    return jax_qmm.quantize(normal(*shape, seed=seed), qtype, **options)


def assert_close(got, want, rtol=1e-5):
    """Sums of float32 in another order."""
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * np.abs(want).max(initial=0))


def op(f, *args):
    """The one product of a function."""
    (row,) = (row for row in jax_qmm.explain(f, *args).rows if row.op != "transpose")
    return row.op


CASES = {
    "packed kernel": ("bk,kn->bn", (3, 96), lambda: quantized(5, 96, tile_size=32).pack().T),
    "plain kernel": ("bk,kn->bn", (3, 96), lambda: quantized(5, 96, tile_size=32, symmetric=False).T),
    "stored (K, N)": ("bk,kn->bn", (3, 96), lambda: quantized(96, 5, axis=0, tile_size=32)),
    "a short last block": ("bk,nk->bn", (3, 100), lambda: quantized(5, 100, tile_size=32).pack()),
    "per channel": ("bk,nk->bn", (3, 100), lambda: quantized(5, 100, symmetric=False).pack()),
    "int8 with blocks": ("bk,nk->bn", (3, 96), lambda: quantized(5, 96, qtype=jnp.int8, tile_size=32)),
    "int8 packed": ("bk,nk->bn", (3, 96), lambda: quantized(5, 96, qtype=jnp.int8).pack()),
    "float zero points": (
        "bk,nk->bn",
        (3, 96),
        lambda: QArray(quantized(5, 96, qtype=jnp.int8).qvalue, jnp.ones((5, 1)), jnp.full((5, 1), 0.25)),
    ),
    "a vector": ("k,kn->n", (96,), lambda: quantized(5, 96, tile_size=32).pack().T),
    "weight on the left": ("nk,kb->nb", (96, 3), lambda: quantized(5, 96, tile_size=32).pack()),
    "rows and columns mixed": ("abk,hdk->hbda", (2, 3, 96), lambda: quantized(4, 5, 96, tile_size=32).pack()),
    "batched": ("gbk,gnk->gbn", (2, 3, 96), lambda: quantized(2, 5, 96, tile_size=32).pack()),
    "batched in the middle": ("bgk,gkn->bng", (3, 2, 96), lambda: quantized(2, 5, 96, tile_size=32).pack().mT),
    "two contracted axes": ("bhd,nhd->bn", (3, 2, 128), lambda: quantized(5, 2, 128, tile_size=64).pack()),
    "two, one scale": ("bhd,nhd->bn", (3, 2, 128), lambda: quantized(5, 2, 128, axis=(1, 2)).pack()),
    "two, a scale for each of one": ("bhd,nhd->bn", (3, 4, 32), lambda: quantized(5, 4, 32)),
    "two, blocks of one for all of the other": (
        "bhd,nhd->bn",
        (3, 2, 128),
        lambda: QArray(quantized(5, 2, 128).qvalue, jnp.asarray(normal(5, 1, 2))).pack(),
    ),
    "merged axes": ("bhd,nhd->bn", (3, 4, 25), lambda: quantized(5, 100, tile_size=32).pack().reshape(5, 4, 25)),
    "merged axes, one scale": ("bhd,nhd->bn", (3, 4, 25), lambda: quantized(5, 100).pack().reshape(5, 4, 25)),
    "merged axes, plain": (
        "bdh,nhd->bn",
        (3, 24, 4),
        lambda: quantized(5, 96, tile_size=32, symmetric=False).reshape(5, 4, 24),
    ),
    "a kernel with merged axes": (
        "bthd,hdf->tbf",
        (2, 3, 4, 24),
        lambda: quantized(5, 96, tile_size=32).pack().reshape(5, 4, 24).transpose(1, 2, 0),
    ),
    "batched, with merged axes on the left": (
        "gnhd,gbhd->gnb",
        (2, 3, 4, 24),
        lambda: quantized(2, 5, 96, tile_size=32).pack().reshape(2, 5, 4, 24),
    ),
    "merged axes and another one": (
        "behd,nehd->bn",
        (3, 2, 4, 32),
        lambda: quantized(5, 2, 128, tile_size=64).pack().reshape(5, 2, 4, 32),
    ),
    "two of which one is 1": ("bhd,nhd->bn", (3, 1, 100), lambda: quantized(5, 1, 100, tile_size=32).pack()),
    "a repeated contracted axis": ("bk,nk->bn", (3, 8), lambda: quantized(5, 1).pack()),
    "nothing to sum": ("bk,nk->bn", (3, 0), lambda: quantized(5, 0)),
    "no rows": ("bk,nk->bn", (0, 96), lambda: quantized(5, 96, tile_size=32).pack()),
}


@pytest.mark.parametrize("case", CASES)
def test_is_the_product_with_the_dequantized_weight(case):
    equation, shape, make = CASES[case]
    x, w = normal(*shape), make()
    left = "on the left" in case
    operands = lambda x, w: (w, x) if left else (x, w)
    f = lambda x: jax_qmm.einsum(equation, *operands(x, w))
    dense = np.asarray(w.dequantize())
    dense = np.broadcast_to(dense, (5, 8)) if case == "a repeated contracted axis" else dense
    want = lambda x: jnp.einsum(equation, *operands(x, dense), precision="highest")
    got = f(x)
    assert got.shape == want(x).shape and got.dtype == jnp.float32
    assert got.size == 0 or op(f, x).startswith("block_scaled_mm")
    if got.size:
        assert_close(got, want(x))
        by_x, of_dense = (jax.grad(lambda x, g=g: jnp.sum(jnp.sin(g(x))))(x) for g in (f, want))
        assert_close(by_x, of_dense, rtol=1e-4)


def test_matmul_and_the_operator():
    x, w = normal(2, 3, 96), quantized(5, 96, tile_size=32).pack().T
    want = jnp.matmul(x, w.dequantize(), precision="highest")
    assert_close(jax_qmm.matmul(x, w), want)
    assert_close(x @ w, want)
    assert_close((w.T @ x.mT if hasattr(x, "mT") else w.T @ x.swapaxes(1, 2)).swapaxes(1, 2), want)


def test_a_channel_scaled_int8_weight_still_has_its_activations_quantized():
    x, w = normal(3, 96), quantized(5, 96, qtype=jnp.int8)
    ops = lambda w: [row.op for row in jax_qmm.explain(jax_qmm.matmul, x, w.T).rows]
    assert ops(w) == ["quantize (dynamic, per row)", "scaled_mm (scale_a, scale_b)"]
    assert ops(w.pack()) == ["block_scaled_mm (per channel, packed)"]


@pytest.mark.parametrize("bias, late", [((5,), False), ((3, 1), True), ((1, 1), False)])
def test_bias_and_dtypes(bias, late):
    x, w, bias = normal(3, 96).astype(BF16), quantized(5, 96, tile_size=32).pack().T, normal(*bias)
    f = lambda **options: jax_qmm.dot_general(x, w, (((1,), (0,)), ((), ())), bias=bias, **options)
    want = jnp.dot(x.astype(jnp.float32), w.dequantize(), precision="highest") + bias
    assert f().dtype == jnp.float32  # that of bfloat16 and the float32 scales
    assert_close(f(), want)
    assert f(preferred_element_type=BF16).dtype == BF16
    assert_close(np.float32(f(preferred_element_type=BF16)), want, rtol=2.0**-8)
    assert ("bias" in op(lambda: f())) != late
    gradient = jax.grad(lambda b: jnp.sum(jax_qmm.matmul(x, w, bias=b) * want))(bias)
    summed = tuple(axis for axis in (0, 1) if (1, *bias.shape)[-2:][axis] == 1)
    assert_close(gradient.reshape(-1), np.asarray(want).sum(summed).reshape(-1), rtol=1e-4)


def test_vmap_and_scan_over_stacked_weights():
    x, w = normal(4, 3, 96), quantized(4, 5, 96, tile_size=32).pack()
    want = jnp.einsum("gbk,gnk->gbn", x, w.dequantize(), precision="highest")
    assert_close(jax.vmap(lambda x, w: jax_qmm.einsum("bk,nk->bn", x, w))(x, w), want)
    _, scanned = jax.lax.scan(lambda c, xw: (c, jax_qmm.einsum("bk,nk->bn", *xw)), 0, (x, w))
    assert_close(scanned, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_columns_and_rows_stay_where_they_are(kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x, w = normal(4, 6, 256), quantized(8, 256, tile_size=32).pack()
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("x", None, None)))
        columns = jax.device_put(w, NamedSharding(mesh, P("y", None))).T
        compiled = jax.jit(jax_qmm.matmul).lower(placed, columns).compile()
        got = compiled(placed, columns)
    assert "all-" not in compiled.as_text()
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, "y")), 3)
    assert_close(got, x @ np.asarray(w.T.dequantize()))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_heads_that_are_merged_in_memory_are_sharded(kind):
    """An attention's output: each device has some heads, and the sums are reduced once."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x, w = normal(4, 6, 8, 64), quantized(12, 512, tile_size=64).pack().reshape(12, 8, 64).transpose(1, 2, 0)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("x", None, "y", None)))
        heads = jax.device_put(w, leaf_shardings(w, NamedSharding(mesh, P("y", None, None))))
        assert heads.qvalue.sharding.spec == heads.scale.sharding.spec == P(None, None, "y")
        spec = P("x", None, None) if kind == AxisType.Explicit else None
        f = jax.jit(lambda x, w: jax_qmm.einsum("bthd,hdf->btf", x, w, out_sharding=spec))
        compiled = f.lower(placed, heads).compile()
        got = compiled(placed, heads)
    assert re.findall(r" (all-\w+)\(", compiled.as_text()) == ["all-reduce"]
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, None)), 3)
    assert_close(got, np.einsum("bthd,hdf->btf", x, w.dequantize()))


@pytest.mark.parametrize(
    "equation, shape, w, why",
    [
        ("bk,kn->bn", (3, 6), lambda: quantized(6, 96, tile_size=32), "several scales within one axis"),
        ("bk,kn->bn", (3, 6), lambda: quantized(6, 96).pack(), "packed along an axis that is not contracted"),
        ("bhd,nhd->bn", (3, 2, 64), lambda: quantized(5, 2, 64, axis=(1, 2)).pack(), "padding between"),
        ("bhd,nhd->bn", (3, 2, 50), lambda: quantized(5, 2, 50, tile_size=32), "several scales within one axis"),
        ("b,n->bn", (3,), lambda: quantized(5), "no axis is contracted"),
        ("bd,nhd->bnh", (3, 24), lambda: quantized(5, 96).pack().reshape(5, 4, 24), "merged in memory"),
    ],
)
def test_what_is_dequantized_instead(equation, shape, w, why):
    x, w = normal(*shape), w()
    (row,) = jax_qmm.explain(lambda x: jax_qmm.einsum(equation, x, w), x).rows
    assert row.op == "dequantized dot" and why in row.runs_on
    got = jax_qmm.einsum(equation, x, w)
    assert_close(got, jnp.einsum(equation, x, w.dequantize(), precision="highest"))


def test_a_scheme_for_8_bits_is_refused_with_int4():
    with pytest.raises(ValueError, match="scheme has dtype int8, needs that of the QArray, int4"):
        jax_qmm.matmul(normal(3, 96), quantized(96, 5), scheme=jax_qmm.W8A8())
