"""Arguments that are no arrays, dtypes or flags at all: every op names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm

A, X = np.ones((2, 8), np.int8), np.ones((2, 8), np.float32)
W = jax_qmm.quantize(np.ones((6, 8), np.float32)).T
STRUCT = jax.ShapeDtypeStruct((2, 8), jnp.float32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jax_qmm.quantize(None), TypeError, "x is a NoneType, needs an array"),
        (lambda: jax_qmm.quantize(STRUCT), TypeError, "x is a ShapeDtypeStruct, needs an array"),
        (lambda: jax_qmm.quantize([[1.0], [2.0, 3.0]]), TypeError, "x is a list, needs an array"),
        (lambda: jax_qmm.quantize(X, symmetric="no"), TypeError, "symmetric is 'no', needs True or False"),
        (lambda: jax_qmm.quantize(X, scale="1"), TypeError, "scale is a str, needs an array"),
        (lambda: jax_qmm.quantize(X, scale=True), TypeError, "scale has dtype bool"),
        (lambda: jax_qmm.quantize(X, scale=1.0, zero_point=True), TypeError, "zero_point has dtype bool"),
        (lambda: jax_qmm.quantize(X, scale=1.0, zero_point=2**80), ValueError, "zero_point is .* out of range"),
        (lambda: jax_qmm.quantize(X, scale=1.0, zero_point=2**31), ValueError, "zero_point is .* out of range"),
        (
            lambda: jax_qmm.quantize(X, scale=1.0, zero_point=np.int64(2**32 + 5)),
            ValueError,
            "is 4294967301",
        ),
        (
            lambda: jax_qmm.matmul(
                X, W, scheme=jax_qmm.W8A8(symmetric=False, activation_scale=0.1, activation_zero_point=np.uint32(2**31))
            ),
            ValueError,
            "activation_zero_point is 2147483648, which is out of range of int32",
        ),
        (lambda: jax_qmm.matmul(STRUCT, W), TypeError, "a is a ShapeDtypeStruct, needs an array"),
        (lambda: jax_qmm.matmul(X, W, bias="0"), TypeError, "bias is a str, needs an array"),
        (
            lambda: jax_qmm.matmul(X, W, preferred_element_type="bf16"),
            TypeError,
            "preferred_element_type is bf16, needs float32",
        ),
        (lambda: jax_qmm.matmul(X, W, precision="most"), ValueError, "most"),
        (lambda: jax_qmm.scaled_mm(A, A, 1.0, 1.0, precision="most"), ValueError, "most"),
        (lambda: jax_qmm.scaled_mm(A, A, 1.0, 1.0, out_dtype=None), TypeError, "out_dtype is None"),
        # Without a QArray too:
        (
            lambda: jax_qmm.matmul(X, X.T, bias=np.ones((7, 1, 1), np.float32)),
            ValueError,
            r"bias has shape \(7, 1, 1\), needs one that broadcasts to the result's \(2, 2\)",
        ),
    ],
)
def test_what_is_no_array_or_no_dtype_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("x64", [False, True])
def test_numpys_default_dtypes_are_taken_as_jaxs(x64):
    with jax.enable_x64(x64):
        q = jax_qmm.quantize(X.astype(np.float64), scale=np.float64(0.5), zero_point=np.int64(3))
        assert (q.scale.dtype, q.zero_point.dtype) == (jnp.float32, jnp.int32)
        ones = np.ones(2)
        out = jax_qmm.scaled_mm_azp_per_token(A, A, ones, ones, np.ones(2, int), np.ones(2, int), ones)
        assert out.tolist() == [[8.0, 8.0]] * 2
        scheme = jax_qmm.W8A8(activation_scale=jnp.asarray(0.05))  # float64 in x64
        got = jax_qmm.matmul(X.astype(np.float64), W, scheme=scheme, bias=np.ones(6))
        np.testing.assert_array_equal(got, jax_qmm.matmul(X, W, scheme=scheme, bias=np.ones(6, np.float32)))
        assert got.dtype == jnp.float32


@pytest.mark.parametrize(
    "x64, make",
    [
        *[(x64, make) for x64 in (False, True) for make in (list, np.asarray, lambda x: jnp.asarray(np.uint32(x)))],
        (True, jnp.asarray),
    ],
)
def test_no_zero_point_wraps_around(x64, make):
    with jax.enable_x64(x64):
        assert jax_qmm.quantize(X, scale=1.0, zero_point=make([5])).zero_point.tolist() == [[5], [5]]
        with pytest.raises(ValueError, match=r"zero_point is \[2147483648\], which is out of range of int32"):
            jax_qmm.quantize(X, scale=1.0, zero_point=make([2**31]))
        with pytest.raises(ValueError, match="out of range of int32"):  # a constant of a program too
            jax.jit(lambda x, z=make([2**31]): jax_qmm.quantize(x, scale=1.0, zero_point=z))(X)


def test_einsum_takes_optimize_as_in_jnp():
    want = jnp.einsum("ij,kj,kl", X, X, X, optimize="optimal")
    np.testing.assert_array_equal(jax_qmm.einsum("ij,kj,kl", X, X, X, optimize="optimal"), want)
    assert jax_qmm.einsum("ij,jk", X, W, optimize=True).shape == (2, 6)
