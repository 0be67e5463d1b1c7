"""quantize with scales of 16 bits, and with those of the least error."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm

F32, BF16, F16 = np.float32, ml_dtypes.bfloat16, np.float16


@pytest.mark.parametrize("scale_dtype", (BF16, F16))
@pytest.mark.parametrize("kind", [(np.int8, True), (jnp.int4, False), (jnp.float8_e4m3fn, True)])
def test_the_stored_scale_is_the_one_that_quantizes(kind, scale_dtype):
    qtype, symmetric = kind
    x = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32) * np.float32([[1], [1e-2], [7], [0], [1e-6]])
    options = {"tile_size": 32, "symmetric": symmetric}
    q = jax_qmm.quantize(x, qtype, scale_dtype=scale_dtype, **options)
    assert q.scale.dtype == scale_dtype and (np.float32(q.scale) > 0).all()
    exact = jax_qmm.quantize(x, qtype, **options)
    rounding = 2.0**-8 if scale_dtype == BF16 else 2.0**-11
    np.testing.assert_allclose(np.float32(q.scale), exact.scale, rtol=rounding, atol=2.0**-24)
    scale = np.asarray(q.scale).astype(np.float32)
    given = jax_qmm.quantize(x, qtype, scale=scale, zero_point=q.zero_point, **options)
    np.testing.assert_array_equal(q.dequantize(np.float32), given.dequantize())
    assert not np.asarray(q.dequantize(np.float32))[3].any()
    static = jax_qmm.quantize(x, qtype, scale=q.scale, zero_point=q.zero_point, scale_dtype=scale_dtype, **options)
    for got, want in zip(jax.tree.leaves(static), jax.tree.leaves(q), strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", (F32, BF16, F16))
def test_the_search_finds_the_least_squared_error(symmetric, scale_dtype):
    x = np.random.default_rng(0).normal(size=(6, 70)).astype(np.float32)
    x[1, 3], x[2], x[3, 0] = 50, 0, np.nan
    options = {"tile_size": 32, "symmetric": symmetric, "scale_dtype": scale_dtype}
    q = jax_qmm.quantize(x, jnp.int4, clip_search=True, **options)
    wide = jax_qmm.quantize(x, jnp.int4, tile_size=32, symmetric=symmetric)
    error = lambda q: np.add.reduceat((np.asarray(q.dequantize(np.float32), np.float64) - x) ** 2, [0, 32, 64], axis=1)
    tried = []
    for i in range(16):
        clip = {"scale": wide.scale * np.float32(1 - i / 32), "zero_point": wide.zero_point}
        tried.append(error(jax_qmm.quantize(x, jnp.int4, **clip, **options)))
    rows = [0, 1, 2, 4, 5]
    np.testing.assert_allclose(error(q)[rows], np.min(tried, axis=0)[rows], rtol=1e-5)
    assert (error(q)[[0, 4, 5]] < tried[0][[0, 4, 5]]).any() and np.isnan(np.float32(q.scale[3, 0]))
    np.testing.assert_array_equal(q.dequantize(np.float32)[2], 0)
