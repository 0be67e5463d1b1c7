"""Weights that a kernel dequantizes once for XLA's product: their values, the results, and when that is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weights_oracle import BF16, BITS, F16, F32, UNIT, allowed, dequantized, operands, pack, quantized

import jax_qmm
from jax_qmm import _extension

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def has_kernels():
    if reason := _extension.fallback_reason(_extension.platform(), (), 80):
        pytest.skip(reason)


@pytest.mark.parametrize("n, k, block", [(1, 1, 16), (5, 72, 16), (9, 135, 64), (6, 2184, 128), (3, 4104, 4104)])
@pytest.mark.parametrize("zero_dtype", [None, np.int8, BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("bits", BITS)
def test_dequantized_weights_are_rounded_once(bits, dtype, zero_dtype, n, k, block):
    rng = np.random.default_rng(n)
    limit = 1 << (bits - 1)
    q = rng.integers(-limit, limit, (2, n, k))
    scale = np.ldexp(rng.standard_normal((2, n, -(-k // block))), 8).astype(BF16)  # float16 overflows at times
    zero_point = None
    if zero_dtype == np.int8:
        zero_point = rng.integers(-limit, limit, scale.shape).astype(np.int8)
    elif zero_dtype is not None:
        zero_point = (limit * rng.standard_normal(scale.shape)).astype(zero_dtype)
    spread = lambda v: np.repeat(v.astype(F32), block, -1)[..., :k]
    difference = q.astype(F32) - (F32(0) if zero_point is None else spread(zero_point))
    with np.errstate(over="ignore"):
        want = (difference * spread(scale)).astype(dtype)
    leaves = [leaf for leaf in (pack(q, bits), scale, zero_point) if leaf is not None]
    run = jax.ffi.ffi_call("jax_qmm_dequantize_weights", jax.ShapeDtypeStruct((2, n, k), dtype))
    out = run(*map(jnp.asarray, leaves), bits=np.int32(bits), block=np.int32(block))
    np.testing.assert_array_equal(np.asarray(out), want)
    leaves[0] = pack(q[:1], bits)  # which has two matrices' scales
    out = run(*map(jnp.asarray, leaves), bits=np.int32(bits), block=np.int32(block))
    np.testing.assert_array_equal(np.asarray(out)[0], want[0])


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("bits", BITS)
def test_weights_are_dequantized_once_where_that_is_faster(bits, dtype, monkeypatch):
    monkeypatch.setenv("JAX_QMM_STRICT", "1")  # it is a choice, and no fallback
    if dtype != F32:
        monkeypatch.setattr(_extension, "dequantizes_once", lambda devices, product: True)
    x, q, scale, zero_point = operands(22, 17, 21, 200, dtype, bits, 32, "int8")
    w = quantized(q, scale, zero_point, 32, bits)
    y, error = allowed(x, q, scale, zero_point, 32)
    total = np.abs(x.astype(np.float64)) @ np.abs(dequantized(q, scale, zero_point, 32)).swapaxes(-1, -2)
    for weight in (w, w.pack()):
        f = jax.jit(lambda x: jax_qmm.block_scaled_mm(x, weight, out_dtype=jnp.float32))
        (row,) = jax_qmm.explain(f, x).rows
        assert row.runs_on.startswith("XLA: dequantized once, then a product of ")
        text = f.lower(x).as_text()
        assert "jax_qmm_block_scaled_mm" not in text and ("jax_qmm_dequantize_weights" in text) == weight.is_packed
        assert np.all(np.abs(np.asarray(f(x)) - y) <= error + UNIT[dtype] * total)


def test_what_follows_a_product_of_xla(emulated, monkeypatch):
    monkeypatch.setattr(_extension, "dequantizes_once", lambda devices, product: True)
    m, n, k = (17, 40, 64) if emulated else (4096, 512, 256)
    x, q, scale, _ = operands(3, m, n, k, BF16, 4, 32)
    w, bias = quantized(q, scale, None, 32, 4).pack(), jnp.asarray(np.linspace(-3, 3, n), BF16)
    (x,), (q,), (scale,) = x, q, scale
    f = jax.jit(lambda x: jax_qmm.block_scaled_mm(x, w, bias, activation="relu"))
    y, error = allowed(x, q, scale, None, 32)
    total = np.abs(np.float64(x)) @ np.abs(dequantized(q, scale, None, 32)).T
    error += UNIT[BF16] * (total + np.abs(y))  # of weights, and of sums in case that it does not
    y = np.maximum(y + np.float64(bias), 0)
    assert np.all(np.abs(np.float64(f(x)) - y) <= error + UNIT[BF16] * (y + error))


def test_when_weights_are_dequantized_once(gpu, extension):
    def once(m, dtype="bfloat16", bits=4):
        devices = jax.devices(_extension.platform())
        return _extension.dequantizes_once(devices, (m, 28672, 8192, 1, dtype, "bfloat16", bits, 128, None))

    assert not any(once(m) for m in (1, 8, 16, 64))
    assert not once(16, "float32") and all(once(4096, "float16", bits) for bits in BITS)
    if gpu.arch == 90 and "90a" in extension.architectures():
        assert not once(4096, "bfloat16", 4)  # wgmma kernels dequantize as fast
    else:
        assert all(once(4096, "bfloat16", bits) for bits in BITS)
