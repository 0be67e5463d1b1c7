"""Products with QArrays by the kernels, against the same on the CPU by the reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W8A8, _extension

pytestmark = pytest.mark.gpu

SCHEMES = {
    "int8": W8A8(),
    "asymmetric": W8A8(symmetric=False),
    "per_tensor": W8A8(activation="per_tensor", symmetric=False),
    "static": W8A8(symmetric=False, activation_scale=0.03, activation_zero_point=-20),
    "weights": W8A8(weight_symmetric=False),
    "both": W8A8(symmetric=False, weight_symmetric=False),
    "both_static": W8A8(symmetric=False, weight_symmetric=False, activation_scale=0.03, activation_zero_point=-20),
    "fp8": W8A8(jnp.float8_e4m3fn),
}
schemes = pytest.mark.parametrize("scheme", [pytest.param(scheme, id=name) for name, scheme in SCHEMES.items()])


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.fixture
def both(on_reference):
    """f's results by the kernels and by the reference."""

    def run(f, *args):
        got = jax.jit(f)(*jax.device_put(args, jax.devices(_extension.platform())[0]))
        return [np.asarray(x, np.float64) for x in (got, on_reference(f, *args))]

    return run


def assert_same(got, want, scheme, bound):
    if scheme.dtype == jnp.int8:
        np.testing.assert_array_equal(got, want)
    else:  # tensor cores cut each of the 33 terms of a step at 2**-13 of the largest; bfloat16 rounds once
        assert (np.abs(got - want) <= bound).all()


def quantized_on_cpu(*shape, contracted, scheme):
    kernel = normal(*shape, seed=1) + np.float32(0 if scheme.weight_symmetric else 0.5)
    with jax.default_device(jax.devices("cpu")[0]):
        return scheme.quantize_weight(kernel, contracted).with_azp_adj(contracted)


@schemes
@pytest.mark.parametrize(
    "equation, x_shape, w_shape, contracted",
    [
        ("btk,kn->btn", (2, 37, 256), (256, 96), (0,)),
        ("btk,khd->bthd", (2, 5, 77), (77, 3, 5), (0,)),
        ("bthd,hdf->btf", (2, 5, 4, 32), (4, 32, 48), (0, 1)),
        ("ebk,ekn->ebn", (3, 9, 128), (3, 128, 64), (1,)),
        ("kn,bk->nb", (7, 64), (64, 32), (0,)),
    ],
)
def test_is_the_reference(both, scheme, equation, x_shape, w_shape, contracted):
    x = normal(*x_shape, dtype=jnp.bfloat16)
    w = quantized_on_cpu(*w_shape, contracted=contracted, scheme=scheme)
    flip = equation.startswith("kn,")
    call = functools.partial(jax_qmm.einsum, equation, preferred_element_type=jnp.bfloat16, scheme=scheme)
    f = lambda x, w: call(w, x) if flip else call(x, w)
    got, want = both(f, x, w)
    size = np.abs(np.asarray(w.dequantize(), np.float64))
    operands = (size, np.abs(np.float64(x))) if flip else (np.abs(np.float64(x)), size)
    assert_same(got, want, scheme, 2.0**-8 * np.abs(want) + 2.0**-9 * np.einsum(equation, *operands))


@schemes
def test_in_a_scan_over_stacked_weights(both, scheme):
    x = normal(16, 128, dtype=jnp.bfloat16)
    stack = quantized_on_cpu(4, 128, 128, contracted=(1,), scheme=scheme)

    def chain(x, stack):
        layer = lambda x, w: (jax_qmm.matmul(x, w, scheme=scheme, preferred_element_type=x.dtype) * 0.1, None)
        return jax.lax.scan(layer, x, stack)[0]

    got, want = both(chain, x, stack)
    # A flipped rounding goes through three more quantizers.
    assert_same(got, want, scheme, 0.1 * np.abs(want).max())


def test_the_gradient_is_that_of_the_dequantized_product(both):
    x, w = normal(8, 64), quantized_on_cpu(64, 32, contracted=(0,), scheme=W8A8())
    got, want = both(jax.grad(lambda x, w: jax_qmm.matmul(x, w, precision="highest").sum()), x, w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@schemes
def test_the_compiled_module_calls_both_kernels(scheme):
    w = quantized_on_cpu(64, 32, contracted=(0,), scheme=scheme)
    w = jax.device_put(w, jax.devices(_extension.platform())[0])
    f = jax.jit(lambda x: jax_qmm.matmul(x, w, scheme=scheme))
    text = f.lower(jnp.ones((8, 64), jnp.bfloat16)).compile().as_text()
    kind = "dynamic" if scheme.activation_scale is None else "static"
    assert re.findall(r'custom_call_target="(jax_qmm\w+)"', text) == [
        f"jax_qmm_quantize_{kind}",
        "jax_qmm_scaled_mm",
    ]
