import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_qmm.reference import quantize as reference

E4M3 = ml_dtypes.float8_e4m3fn
TINY = np.float32(1.17549435e-38)
F32 = np.float32

quantize_dynamic = jax.jit(reference.quantize_dynamic, static_argnums=(1, 2, 3))


def oracle_scale(x, axes, qtype, symmetric):
    with np.errstate(all="ignore"):
        if symmetric:
            absmax = np.max(np.abs(x), axis=axes, keepdims=True, initial=0)
            return np.maximum(absmax / F32(127 if qtype == np.int8 else 448), TINY), None
        lo = np.min(x, axis=axes, keepdims=True, initial=0)
        hi = np.max(x, axis=axes, keepdims=True, initial=0)
        unit = np.where(np.isinf(hi - lo), F32(0.5), F32(1))
        scale = np.maximum((unit * hi - unit * lo) / (unit * F32(255)), TINY)
        zero_point = np.clip(np.rint(F32(-128) - lo / scale), -128, 127)
        return scale, np.where(np.isnan(zero_point), 0, zero_point).astype(np.int32)


def oracle_quantize(x, scale, zero_point, qtype):
    with np.errstate(all="ignore"):
        q = x / scale
        if qtype == E4M3:
            return np.clip(q, F32(-448), F32(448)).astype(E4M3)
        q = np.rint(q) + F32(0 if zero_point is None else 1) * F32(0 if zero_point is None else zero_point)
        return np.where(np.isnan(q), 0, np.clip(q, -128, 127)).astype(np.int8)


def assert_same_bits(got, want):
    """Equal but for the payload of NaNs."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.fixture(scope="module")
def rows():
    """Rows of many magnitudes and all the awkward ones, as float32."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((40, 257)) * np.exp(8 * rng.standard_normal((40, 1)))).astype(F32)
    x[0] = 0
    x[1] = -3
    x[2] = 5
    x[3, 7] = np.nan
    x[4, 8] = np.inf
    x[5, 9] = -np.inf
    x[6, ::2], x[6, 1::2] = 3e38, -3e38  # the range overflows
    x[7] = 1e-37 * np.sign(x[7])  # the scale would be subnormal; inputs are not, because XLA's CPU flushes those
    x[8] = np.arange(257) - 128  # ties of the asymmetric quantizer
    x[9, :4] = -0.0, -np.nan, 1, 2
    return x


@pytest.mark.parametrize("axes", [(1,), (0, 1), (0,)])
@pytest.mark.parametrize("qtype, symmetric", [(np.int8, True), (np.int8, False), (E4M3, True)])
def test_quantizers_match_ieee_arithmetic_bit_for_bit(rows, qtype, symmetric, axes):
    x = rows if axes == (1,) else rows[10:]  # one scale for all would be NaN otherwise
    q, scale, zero_point = quantize_dynamic(x, qtype, axes, symmetric)
    want_scale, want_zero_point = oracle_scale(x, axes, qtype, symmetric)
    assert_same_bits(scale, want_scale)
    assert (zero_point is None) == symmetric
    if not symmetric:
        assert_same_bits(zero_point, want_zero_point)
    assert_same_bits(q, oracle_quantize(x, want_scale, want_zero_point, qtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_quantizers_take_half_precision(rows, dtype):
    x = np.clip(rows[10:], -6e4, 6e4).astype(dtype)
    q, scale, _ = quantize_dynamic(x, np.int8, (1,), True)
    want_scale, _ = oracle_scale(x.astype(F32), (1,), np.int8, True)
    assert_same_bits(scale, want_scale)
    assert_same_bits(q, oracle_quantize(x.astype(F32), want_scale, None, np.int8))


@pytest.mark.parametrize("qtype", [np.int8, E4M3])
@pytest.mark.parametrize("scale", [F32(0.037), F32(0), F32(-2), F32(np.inf), F32(np.nan), np.full((40, 1), 0.3, F32)])
def test_static_scales_are_taken_as_they_are(rows, qtype, scale):
    assert_same_bits(
        jax.jit(reference.quantize_static, static_argnums=3)(rows, scale, None, qtype),
        oracle_quantize(rows, scale, None, qtype),
    )


def test_static_zero_point(rows):
    assert_same_bits(
        reference.quantize_static(rows, jnp.float32(0.037), jnp.int32(-100), np.int8),
        oracle_quantize(rows, F32(0.037), np.int32(-100), np.int8),
    )


@hypothesis.given(
    hnp.arrays(F32, (3, 5), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.sampled_from([(True, 127), (False, 255)]),
)
def test_a_quantized_value_is_off_by_half_a_step(x, scheme):
    symmetric, steps = scheme
    q, scale, zero_point = quantize_dynamic(x, np.int8, (1,), symmetric)
    back = reference.dequantize(q, scale, zero_point)
    # Half a step; the zero point is rounded too, which can push the end of the range out by half a step more.
    limit = np.asarray(scale, np.float64) * ((0.5 if symmetric else 1.0) + steps * 2.0**-23) + 2.0**-126
    assert np.all(np.abs(np.asarray(back, np.float64) - x) <= limit)


@pytest.mark.parametrize("symmetric", [True, False])
def test_constant_and_zero_rows_come_back(symmetric):
    x = np.array([[0, 0], [7, 7], [-7, -7]], F32)
    q, scale, zero_point = quantize_dynamic(x, np.int8, (1,), symmetric)
    np.testing.assert_allclose(reference.dequantize(q, scale, zero_point), x, rtol=2.0**-22)
    assert np.all(np.asarray(reference.dequantize(q, scale, zero_point))[0] == 0)


def test_nothing_to_quantize():
    q, scale, zero_point = quantize_dynamic(np.zeros((2, 0), F32), np.int8, (1,), False)
    assert q.shape == (2, 0)
    assert_same_bits(scale, np.full((2, 1), TINY))
    assert_same_bits(zero_point, np.full((2, 1), -128, np.int32))


def test_extrema_of_parts_combine_by_their_maximum(rows):
    parts = [reference.extrema(part, (1,), False) for part in np.split(rows[:, :256], 4, axis=1)]
    whole = reference.extrema(rows[:, :256], (1,), False)
    for combined, want in zip(zip(*parts), whole):
        np.testing.assert_array_equal(np.max(np.stack(combined), axis=0), want)


def test_a_range_that_overflows_has_a_finite_scale():
    x = F32([[3e38, -3e38, 0]])
    q, scale, zero_point = quantize_dynamic(x, np.int8, (1,), False)
    assert_same_bits(scale, F32([[F32(6e38 / 255)]]))
    error = np.abs(np.asarray(reference.dequantize(q, scale, zero_point), np.float64) - x)
    assert np.all(error <= np.asarray(scale))
