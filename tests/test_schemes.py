import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm


def test_the_dtype_can_be_named_in_any_way_and_schemes_compare_by_value():
    schemes = {jax_qmm.W8A8(dtype) for dtype in (jnp.int8, "int8", np.dtype(np.int8))}
    assert schemes == {jax_qmm.W8A8()}
    assert jax_qmm.W8A8("float8_e4m3fn").dtype == jnp.float8_e4m3fn


def test_a_static_scale_can_be_a_tracer():
    seen = []

    @jax.jit
    def f(scale, zero_point):
        scheme = jax_qmm.W8A8(symmetric=False, activation_scale=scale, activation_zero_point=zero_point)
        seen.append(repr(scheme))
        return dataclasses.replace(scheme, symmetric=True, activation_zero_point=None).activation_scale

    assert f(0.5, 3) == 0.5
    assert seen == ["W8A8(int8, per_tensor static, asymmetric)"]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"dtype": jnp.int4}, TypeError, "dtype is .*int4.*, needs int8 or float8_e4m3fn"),
        ({"dtype": "fp8"}, TypeError, "dtype is 'fp8'"),
        ({"activation": "token"}, ValueError, "activation is 'token', needs 'per_token' or 'per_tensor'"),
        ({"dtype": jnp.float8_e4m3fn, "symmetric": False}, ValueError, "symmetric=False .* needs int8"),
        ({"symmetric": "no"}, TypeError, "symmetric is 'no', needs True or False"),
        ({"activation_scale": 1}, TypeError, "activation_scale has dtype int32"),
        ({"activation_scale": [1.0]}, TypeError, r"activation_scale is \[1.0\], needs a number or an array"),
        ({"activation_scale": "a"}, TypeError, "activation_scale is 'a', needs a number or an array"),
        (
            {"activation_scale": np.ones(3, np.float32)},
            ValueError,
            r"activation_scale has shape \(3,\), needs \(\)",
        ),
        (
            {"activation_zero_point": 3},
            ValueError,
            "activation_zero_point was given without activation_scale",
        ),
        (
            {"activation_scale": 0.1, "activation_zero_point": 3},
            ValueError,
            "activation_zero_point is 3, needs None",
        ),
        (
            {"activation_scale": 0.1, "symmetric": False},
            ValueError,
            "activation_zero_point is None, needs a value",
        ),
        (
            {"activation_scale": 0.1, "symmetric": False, "activation_zero_point": 0.5},
            TypeError,
            "activation_zero_point has dtype float32",
        ),
    ],
)
def test_a_bad_scheme_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.W8A8(**options)


@pytest.mark.parametrize(
    "path, scheme, error, message",
    [
        ("(", jax_qmm.W8A8(), ValueError, r"path is '\(', needs a regular expression"),
        (3, jax_qmm.W8A8(), TypeError, "path is 3"),
        (".*", jnp.int8, TypeError, "scheme is .*, needs a W8A8"),
    ],
)
def test_a_bad_rule_is_refused(path, scheme, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.Rule(path, scheme)
