from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qmm.reference import scaled_mm as reference

F32 = np.float32


def assert_same_bits(got, want):
    """Equal but for the payload of NaNs."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def round_fraction(exact):
    """The float32 nearest to a fraction, ties to even."""
    guess = F32(float(exact))
    near = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    return min(near, key=lambda v: (abs(Fraction(float(v)) - exact), v.view(np.uint32) & 1))


fma = jax.jit(reference.fused_multiply_add)
mantissas = st.integers(2**23, 2**24 - 1)
floats = st.builds(lambda m, e, s: F32(s * m * 2.0**e), mantissas, st.integers(-60, 10), st.sampled_from([1, -1]))


@hypothesis.settings(max_examples=300)
@hypothesis.given(floats, floats, floats, st.sampled_from([0, 1, 2, 3]))
def test_fused_multiply_add_rounds_once(x, y, z, case):
    if case == 1:  # z far below the product: only a product near a tie shows it
        x, y, z = F32(1 + 2.0**-12), F32(1 + 2.0**-12), np.sign(z) * F32(2.0**-80)
    elif case == 2:  # cancellation
        z = -F32(x * y)
    elif case == 3:  # a tie of float32 that a sum in float64 can't tell from its neighbours
        x, y, z = F32(1), F32(1 + 2.0**-23), F32(2.0**-24 * np.sign(z)) * F32(1 + 2.0**-23)
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    want = round_fraction(exact)
    assert_same_bits(fma(x, y, z), want)


def test_fused_multiply_add_near_ties():
    # 1 + 2**-12 squared is 1 + 2**-11 + 2**-24: a float32 tie, which a much smaller third term decides.
    x = F32(1 + 2.0**-12)
    z = F32([2.0**-100, 0, -(2.0**-100)])
    want = [round_fraction(Fraction(float(x)) ** 2 + Fraction(float(v))) for v in z]
    assert want[0] != want[2]
    assert_same_bits(fma(x, x, z), np.array(want))


def test_fused_multiply_add_of_infinities_and_nan():
    x, y, z = (F32([np.inf, np.inf, np.nan, 0, 3e38]), F32([1, 1, 1, np.inf, 3e38]), F32([1, -np.inf, 1, 1, -np.inf]))
    assert_same_bits(fma(x, y, z), F32([np.inf, np.nan, np.nan, np.nan, -np.inf]))


@pytest.mark.parametrize(
    "shape_a, shape_b, num_batch",
    [
        ((3, 8), (5, 8), 0),
        ((2, 3, 8), (5, 8), 0),
        ((2, 3, 8), (2, 5, 8), 1),
        ((1, 3, 8), (2, 5, 8), 1),
        ((2, 3, 8), (1, 5, 8), 1),
        ((1, 3, 8), (1, 5, 8), 1),
        ((2, 1, 4, 3, 8), (1, 3, 5, 8), 2),
        ((0, 8), (5, 8), 0),
        ((3, 0), (5, 0), 0),
    ],
)
def test_sums_over_batches(shape_a, shape_b, num_batch):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, shape, dtype=np.int8) for shape in (shape_a, shape_b))
    rows = len(shape_a) - num_batch - 1
    wide_b = b.reshape(*shape_b[:num_batch], *(1,) * (rows - 1), *shape_b[num_batch:])
    want = a.astype(np.int32) @ wide_b.astype(np.int32).swapaxes(-1, -2)
    np.testing.assert_array_equal(reference.sums(a, b, num_batch), want)


def test_epilogue_keeps_the_order_of_constant_scales():
    # XLA (that of jax 0.10, for one) multiplies constants with each other first, which rounds differently.
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-128, 128, (64, 64), dtype=np.int8) for _ in range(2))
    acc = (a.astype(np.int32) @ b.T.astype(np.int32)).astype(F32)
    scales = lambda: dict(scale_a=jnp.full(1, 0.1, F32), scale_b=jnp.full(1, 0.3, F32))
    got = jax.jit(lambda a, b: reference.scaled_mm(a, b, out_dtype=jnp.float32, **scales()))(a, b)
    assert_same_bits(got, F32(0.1) * (F32(0.3) * acc))
