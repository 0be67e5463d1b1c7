"""dot_general, einsum and matmul of float8 and int4 weights, which stay in 4 bits.

The products of a float8 value and an int4 value less its zero point are exact in float32: 4 bits times 5. What is
rounded are the scale of a block times a value, a sum of K terms, the scale of a row and a bias: K + 3 roundings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_qmm
from jax_qmm import W4A8, W4A16, W8A8, QArray

SCHEMES = [W4A8(tile, symmetric, activation_dtype="fp8") for tile, symmetric in ((32, True), (32, False), (None, True))]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(0.5, 1, shape).astype(np.float32)


def weight(scheme, *shape, contracted=(0,)):
    return scheme.quantize_weight(normal(*shape, seed=1), contracted)


def exact(q):
    """What a QArray stands for, in float64 and in logical order."""
    q = q.unpack()
    along = lambda leaf: 0 if leaf is None else np.asarray(q.along_values(leaf)).astype(np.float64)
    values = (np.asarray(q.qvalue).astype(np.float64) - along(q.zero_point)) * along(q.float_scale())
    return values.reshape(q.stored_shape).transpose(q.storage_axes())


def assert_rounded(got, equation, x, w, k, bias=0.0, unit=2.0**-24):
    """`got` is the product of two arrays in float64, within the roundings of float32 and one to the result."""
    want, size = np.einsum(equation, x, w) + bias, np.einsum(equation, abs(x), abs(w)) + abs(bias)
    assert (abs(np.asarray(got, np.float64) - want) <= (k + 3) * 2.0**-24 * size + unit * abs(want)).all()


def ops(f, *args):
    return [row.op.split()[0] for row in jax_qmm.explain(f, *args).rows]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "equation, shape, kernel, contracted",
    [
        ("bk,kn->bn", (64, 100), (100, 8), (0,)),  # the last block is short
        ("bk,kn->bn", (300, 96), (96, 8), (0,)),
        ("k,kn->n", (96,), (96, 8), (0,)),
        ("abk,hdk->hbda", (2, 32, 96), (4, 8, 96), (2,)),
        ("gbk,gkn->gbn", (2, 3, 96), (2, 96, 8), (1,)),
        ("gbk,gkn->gbn", (1, 3, 96), (2, 96, 8), (1,)),
        ("bk,ekn->ebn", (3, 96), (2, 96, 8), (1,)),
        ("bk,kn->bn", (0, 96), (96, 8), (0,)),
        ("bk,kn->bn", (3, 0), (0, 8), (0,)),
        ("bhd,hdn->bn", (3, 2, 48), (2, 48, 8), (0, 1)),  # one block is of two heads
    ],
)
@schemes
def test_is_the_product_of_exact_values(scheme, equation, shape, kernel, contracted, packed):
    x, w = normal(*shape), weight(scheme, *kernel, contracted=contracted)
    assert w.is_packed and w.qtype == jnp.int4
    w = w if packed else w.unpack()
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    rows = jax_qmm.explain(f, x, w).rows
    assert [row.op.split()[0] for row in rows] == ["quantize", "block_scaled_mm"]
    assert rows[1].inputs.startswith("float8_e4m3fn") and " x int4[" in rows[1].inputs
    tokens = W8A8("fp8").quantize_activation(jnp.asarray(x), len(contracted))
    assert_rounded(jax.jit(f)(x, w), equation, exact(tokens), exact(w), 100)


def test_every_value_of_both_is_exact():
    """All of float8 but NaN, largest and subnormal ones too, by all of int4 and its zero points."""
    x = np.arange(256).astype(np.uint8).view(jnp.float8_e4m3fn)[:, None]
    x = x[np.isfinite(x.astype(np.float32))[:, 0]]
    values, zero_points = (each.reshape(-1, 1) for each in np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)))
    w = QArray(jnp.asarray(values, jnp.int4), jnp.ones((256, 1)), jnp.asarray(zero_points, jnp.int32)).pack()
    assert len(x) == 254
    q = QArray(jnp.asarray(x), jnp.ones((254, 1)))
    assert ops(jax_qmm.matmul, q, w.T) == ["block_scaled_mm"]
    np.testing.assert_array_equal(q @ w.T, x.astype(np.float32) @ np.float32(values - zero_points).T)


def test_nan_stays_in_its_row_and_large_sums_are_float32():
    x = jnp.full((2, 512), 448, jnp.float8_e4m3fn).at[0, 5].set(jnp.nan)
    w = QArray(jnp.full((4, 512), 7, jnp.int4), jnp.full((4, 1), 2.0))
    got = np.asarray(QArray(x, jnp.full((2, 1), 0.5)) @ w.T)
    assert np.isnan(got[0]).all() and (got[1] == 448 * 7 * 512).all()


def test_symbolic_rows():
    (m,) = jax.export.symbolic_shape("m")
    x, w = jax.ShapeDtypeStruct((m, 96), jnp.float32), weight(SCHEMES[0], 96, 8)
    f = jax.jit(lambda x, w: jax_qmm.matmul(x, w, scheme=SCHEMES[0]))
    assert ops(f, x, w) == ["quantize", "block_scaled_mm"]
    tokens = normal(5, 96)
    exported = jax.export.export(f, platforms=["cpu"])(x, w)
    np.testing.assert_array_equal(exported.call(tokens, w), f(tokens, w))


@pytest.mark.parametrize("axis", [-1, None])
def test_two_qarrays(axis):
    x = jax_qmm.quantize(normal(3, 96), "fp8", axis=axis)
    for w in (weight(W4A8(32), 96, 8), weight(W4A16(32, symmetric=False), 96, 8)):
        assert ops(jax_qmm.matmul, x, w) == ["block_scaled_mm"]
        assert_rounded(x @ w, "mk,kn->mn", exact(x), exact(w), 96)
        np.testing.assert_array_equal(w.T @ x.T, (x @ w).T)


@pytest.mark.parametrize("rows", [3, 65])
@pytest.mark.parametrize("kind", ["merged axes", "float zero points"])
def test_what_float8_has_not_is_block_scaled_of_any_rows(kind, rows):
    scheme = SCHEMES[0]
    if kind == "merged axes":
        x, w = normal(rows, 2, 48), weight(scheme, 2, 48, 8, contracted=(0, 1))
    else:
        q = jax_qmm.quantize(normal(8, 96), jnp.int4)
        x, w = normal(rows, 96), QArray(q.qvalue, q.scale, jnp.full((8, 1), 0.25)).T
    letters = "hk" if x.ndim == 3 else "k"
    f = lambda x, w: jax_qmm.einsum(f"m{letters},{letters}n->mn", x, w, scheme=scheme)
    assert ops(f, x, w) == ["quantize", "block_scaled_mm"]
    tokens = exact(W8A8("fp8").quantize_activation(jnp.asarray(x), len(letters)))
    assert_rounded(f(x, w), f"m{letters},{letters}n->mn", tokens, exact(w), 96 + 1)  # a zero point is subtracted


def test_blocks_that_the_kernel_has_not_are_the_product_of_float8():
    x, w = normal(3, 96), weight(W4A8(8, activation_dtype="fp8"), 96, 8)
    assert ops(lambda x, w: jax_qmm.matmul(x, w, scheme=SCHEMES[0]), x, w)[0] == "expand"


@pytest.mark.parametrize("bias", [(8,), (1, 8), (3, 1), ()], ids=str)
@schemes
def test_a_bias_and_one_rounding(scheme, bias):
    x, w, bias = normal(3, 96), weight(scheme, 96, 8), normal(*bias, seed=2)
    got = jax_qmm.matmul(x, w, bias=bias, scheme=scheme, preferred_element_type=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    tokens = exact(W8A8("fp8").quantize_activation(jnp.asarray(x), 1))
    assert_rounded(got, "mk,kn->mn", tokens, exact(w), 96, np.float64(bias), unit=2.0**-8)


@schemes
def test_the_derivative_by_x_is_that_of_the_dequantized_product(scheme):
    x, w, y = normal(3, 96), weight(scheme, 96, 8), normal(3, 8, seed=2)
    got = jax.jit(jax.grad(lambda x: jnp.sum(jax_qmm.matmul(x, w, scheme=scheme) * y)))(x)
    assert_rounded(got, "mn,kn->mk", np.float64(y), exact(w), 8)


@schemes
def test_vmap_scan_and_export(scheme):
    x, w = normal(4, 3, 96), weight(scheme, 4, 8, 96, contracted=(2,))
    f = lambda x, w: jax_qmm.einsum("bk,nk->bn", x, w, scheme=scheme)
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], w) for i in range(4)]
    want = np.stack([f(*xw) for xw in zip(x, each)])
    np.testing.assert_array_equal(jax.vmap(f)(x, w), want)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, xw: (c, f(*xw)), 0, (x, w))[1], want)
    exported = jax.export.export(jax.jit(jax.vmap(f)), platforms=["cpu"])(x, w)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x, w), want)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, each[0]), np.stack([f(one, each[0]) for one in x]))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("k, want", [(None, []), ("y", ["f32", "s32"])])
@schemes
def test_sharded_as_the_weight_is(sharded_matmul, scheme, k, want, kind):
    x, w = normal(8, 256), weight(scheme, 256, 16)
    got, reduced = sharded_matmul(scheme, (4, 2), kind, k, x, w)
    # Over K, the bits of the largest value of each token, then the sums of the product
    assert reduced == want
    tokens = W8A8("fp8").quantize_activation(jnp.asarray(x), 1)
    assert_rounded(got, "mk,kn->mn", exact(tokens), exact(w), 256)
