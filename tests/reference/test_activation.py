import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qmm.reference.activation import NAMED, NONE, Activation, activate, ended, fuses, tangent

LARGE = 10.0 ** np.arange(-37, 38.5, 0.25)
Y = np.concatenate([np.linspace(-120, 120, 400001), LARGE, -LARGE]).astype(np.float32)


def exact(y, name):
    with np.errstate(over="ignore"):
        return y / (1 + np.exp(-y if name == "silu" else -2 * np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_smooth_activations_are_within_the_bound(name):
    got = np.asarray(jax.jit(activate, static_argnums=1)(Y, NAMED[name]), np.float64)
    y = Y.astype(np.float64)
    assert np.all(np.abs(got - exact(y, name)) <= 2.0**-20 * np.abs(y))


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_derivatives(name):
    got = np.asarray(jax.jit(tangent, static_argnums=2)(Y, np.ones_like(Y), NAMED[name]), np.float64)
    step = 1e-6
    near = np.abs(Y) < 100
    y = Y[near].astype(np.float64)
    want = (exact(y + step, name) - exact(y - step, name)) / (2 * step)
    # A few float32 roundings of factors below 4; the differences are off by 1e-12 and by what 2**-53 y / step is.
    np.testing.assert_allclose(got[near], want, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(got[~near], Y[~near] > 0)


BF16, BIAS = jnp.bfloat16, jnp.bfloat16([0.5, -2, 3])


def test_what_xla_fuses_is_all_bfloat16_with_relu_at_most():
    assert fuses(BF16, BIAS, NAMED["relu"], BF16) and fuses(BF16, None, NAMED["relu"], BF16)
    assert fuses(BF16, BIAS, NONE, BF16)
    assert not fuses(BF16, BIAS, NAMED["relu6"], BF16) and not fuses(BF16, BIAS, NAMED["gelu"], BF16)
    assert not fuses(BF16, BIAS, NONE, jnp.float32) and not fuses(jnp.float16, None, NAMED["relu"], jnp.float16)
    assert not fuses(BF16, BIAS.astype(jnp.float32), NONE, BF16)


@pytest.mark.parametrize("activation", [NONE, NAMED["relu"]])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_fused_is_what_it_is_in_float32(activation, bias):
    y = jnp.bfloat16([[1, -1, 0], [-0.25, 1e30, -3], [jnp.nan, jnp.inf, -jnp.inf]])
    want = activate(y.astype(jnp.float32) + (0 if bias is None else bias.astype(jnp.float32)), activation)
    with jax.numpy_rank_promotion("raise"):
        got = ended(y, bias, activation, BF16)
    np.testing.assert_array_equal(np.float32(got), np.float32(want.astype(BF16)))


def test_clamps_are_exact_and_keep_nan():
    y = np.float32([-np.inf, -3, -0.0, 0, 5, 7, np.inf, np.nan])
    relu6 = np.asarray(activate(y, NAMED["relu6"]))
    np.testing.assert_array_equal(relu6, np.float32([0, 0, 0, 0, 5, 6, 6, np.nan]))
    assert not np.signbit(relu6[:4]).any()
    assert np.signbit(activate(y, Activation("clamp", -6.0, 0.0))).tolist() == [True, True, True, *[False] * 5]
    np.testing.assert_array_equal(activate(y, Activation("clamp", 5.0, 5.0))[:-1], np.full(7, 5, np.float32))
    np.testing.assert_array_equal(activate(y, Activation()), y)


def test_relu_has_derivative_0_at_0():
    assert tangent(jnp.float32([-1, -0.0, 0, 1]), 1.0, NAMED["relu"]).tolist() == [0, 0, 0, 1]
    assert tangent(jnp.float32([0, 3, 6]), 1.0, NAMED["relu6"]).tolist() == [0, 1, 0]
