"""Kernels for few rows that quantize them on the way: int8 bit for bit as the reference; fp8 as a quantizer and another
kernel for few rows, which adds in the same order.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W8A8

pytestmark = pytest.mark.gpu

F32, BF16, F16, F8 = np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
SCHEME = W8A8(tile_size=64)
TILES = ("8x16x1024", "8x32x1024", "8x32x2048", "16x32x1024")


@pytest.fixture
def only(extension):
    """Has every product take a kernel whose words have what this is called with."""
    yield lambda words: extension.restrict_block_quantized_mm(words) or words
    extension.restrict_block_quantized_mm("")


def normal(*shape, dtype=F32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0.3, 1, shape), dtype)


def product(scheme, w, out_dtype, **options):
    return lambda x: jax_qmm.matmul(x, w, scheme=scheme, preferred_element_type=out_dtype, **options)


def check(on_reference, words, x, scheme, n, out_dtype=F32, **options):
    """The product is that of the reference, NaN and infinities too."""
    w = scheme.quantize_weight(normal(x.shape[-1], n, seed=1), (0,))
    f = product(scheme, w, out_dtype, **options)
    (row,) = jax_qmm.explain(f, x).rows
    assert words in row.runs_on, row.runs_on
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x)), jax.device_get(on_reference(f, x)))


# Blocks beside the last that are quantized and scaled at once, a part of them, and of the last one a part.


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "m, n, k, block", [(1, 8, 256, 128), (3, 70, 304, 64), (16, 33, 4368, 128), (9, 70, 5136, 256)]
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_is_the_reference(on_reference, only, tile, m, n, k, block, dtype):
    words = only(f"few rows {tile} int8 of floats")
    check(on_reference, words, normal(m, k, dtype=dtype), W8A8(tile_size=block), n)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("symmetric, weight_symmetric", [(False, True), (True, False), (False, False)])
def test_zero_points(on_reference, only, tile, block, symmetric, weight_symmetric):
    scheme = W8A8(tile_size=block, symmetric=symmetric, weight_symmetric=weight_symmetric)
    words = only(f"few rows {tile} int8 of floats")
    for k in (4 * block - 16, 1040):
        check(on_reference, words, normal(11, k, dtype=BF16), scheme, 70)


@pytest.mark.parametrize("scheme", [W8A8(tile_size=32), W8A8(tile_size=32, symmetric=False, weight_symmetric=False)])
@pytest.mark.parametrize("m, n, k", [(1, 8, 64), (9, 70, 304), (5, 33, 4128)])
def test_blocks_of_32(on_reference, only, scheme, m, n, k):
    check(on_reference, only("few rows 8x32x1024 int8 of floats scaled each 32"), normal(m, k), scheme, n)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_float8(only, tile, block, dtype):
    if block == 32 and tile != "8x32x1024":
        pytest.skip("blocks of 32 have one tile")
    scheme = W8A8(F8, tile_size=block)
    x, found = normal(13, 1328, dtype=dtype), []
    w = scheme.quantize_weight(normal(1328, 70, seed=1), (0,))
    for words in (f"few rows {tile} float8_e4m3fn of floats", "few rows 8x32x1024 float8_e4m3fn scaled"):
        f = product(scheme, w, F32)
        (row,) = jax_qmm.explain(f, x).rows if only(words) else ()
        assert words in row.runs_on, row.runs_on
        assert ("a quantized by a kernel of its own" in row.runs_on) != ("of floats" in words)
        found.append(np.asarray(jax.jit(f)(x)))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("scheme", [SCHEME, W8A8(tile_size=64, symmetric=False)], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_blocks_out_of_the_ordinary(on_reference, only, tile, scheme):
    """Zeros, minute and huge values, whose scales no quick division is for, halves between integers, infinity, NaN."""
    x = np.array(normal(10, 256))
    x[0], x[1, 64:128] = 0, 0
    x[2] *= 1e-40
    x[3, :64] *= 1e38
    x[4] = np.resize([-127, *np.arange(-4, 4, 0.5)], 256)
    x[5, 70], x[6, 3], x[7, 200] = np.inf, -np.inf, np.nan
    x[8], x[9, ::2] = 3e38, -3e38
    check(on_reference, only(f"few rows {tile} int8 of floats"), jnp.asarray(x), scheme, 40)


@pytest.mark.parametrize("tile", TILES)
def test_bias_and_batches(on_reference, only, tile):
    words, bias = only(f"few rows {tile} int8 of floats"), jnp.linspace(-1, 1, 40)
    scheme = W8A8(tile_size=128, symmetric=False)
    for dtype, out_dtype in ((BF16, BF16), (F32, F16)):
        check(on_reference, words, normal(2, 3, 400, dtype=dtype), scheme, 40, out_dtype, bias=bias)
    x, w = normal(3, 5, 272, dtype=BF16), scheme.quantize_weight(normal(3, 272, 40, seed=1), (1,))
    f = functools.partial(jax_qmm.einsum, "bmk,bkn->bmn", scheme=scheme)
    (row,) = jax_qmm.explain(f, x, w).rows
    assert words in row.runs_on, row.runs_on
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x, w)), jax.device_get(on_reference(f, x, w)))


def test_a_quantizer_where_that_is_faster(on_reference):
    """Rows that vmap adds, and rows that no kernel has whole loads for."""
    for shape, k in (((40, 6), 192), ((3,), 200)):
        w = SCHEME.quantize_weight(normal(k, 24, seed=1), (0,))
        x, f = normal(*shape, k), product(SCHEME, w, F32)
        f = jax.vmap(f) if len(shape) > 1 else f
        (row,) = jax_qmm.explain(f, x).rows
        assert "a quantized by a kernel of its own" in row.runs_on, row.runs_on
        np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x)), jax.device_get(on_reference(f, x)))


def test_padded_columns(on_reference, only):
    only("of floats")
    check(on_reference, "of floats scaled by block (by a formula, not measured), K padded", normal(3, 202), SCHEME, 24)


def test_bad_operands(extension):
    a, b, scale = jnp.zeros((1, 3, 128)), jnp.zeros((1, 3, 128), jnp.int8), jnp.ones((1, 3, 2))
    attributes = dict(block=np.int32(64), symmetric=True, activation="none", low=F32(0), high=F32(0))
    call = jax.ffi.ffi_call("jax_qmm_block_quantized_mm", jax.ShapeDtypeStruct((1, 3, 3), jnp.float32))
    with pytest.raises(Exception, match="a is of floats; it has no scales, zero points or sums yet"):
        np.asarray(call(a, b, scale, scale, names="scale_a scale_b", **attributes))
    with pytest.raises(Exception, match="scale_b is missing"):
        np.asarray(call(a, b, names="", **attributes))
    with pytest.raises(Exception, match="scale_a is missing"):
        np.asarray(call(b, b, scale, names="scale_b", **attributes))
