"""QuantLinear, the nnx layer that is quantized from the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from random_arrays import RANDOM, data

from jax_qmm import nnx as qnnx
from jax_qmm.explanation import explain
from jax_qmm.ops.dot_general import dot_general
from jax_qmm.ops.quantize import quantize
from jax_qmm.schemes import W8A8, Rule

SCHEMES = [
    W8A8(),
    W8A8(symmetric=False),
    W8A8(symmetric=False, weight_symmetric=False),
    W8A8(activation="per_tensor"),
    W8A8("float8_e4m3fn"),
    W8A8(activation_scale=0.02),
    W8A8(symmetric=False, activation_scale=0.02, activation_zero_point=jnp.int32(5)),
]
LAST = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_linear_is_the_fused_product(scheme):
    linear = nnx.Linear(24, 10, rngs=nnx.Rngs(0), **RANDOM)
    layer = qnnx.QuantLinear.from_linear(linear, scheme)
    x = data(7, 24)
    got = layer(x)
    kernel = layer.kernel[...]
    np.testing.assert_array_equal(got, dot_general(x, kernel, LAST, scheme=scheme, bias=linear.bias[...]))
    axis = -1 if scheme.activation == "per_token" and scheme.activation_scale is None else None
    q = quantize(
        x,
        scheme.dtype,
        axis=axis,
        symmetric=scheme.symmetric,
        scale=scheme.activation_scale,
        zero_point=scheme.activation_zero_point,
    )
    x, w, bias = np.float64(q.dequantize()), np.float64(kernel.dequantize()), np.float64(linear.bias[...])
    # float32: two dequantizations, K sums for fp8, two roundings of the epilogue
    size = np.abs(x) @ np.abs(w) + np.abs(bias)
    assert (np.abs(np.float64(got) - (x @ w + bias)) <= (4 + 24) * 2**-24 * size).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_linear_error_is_half_a_step(symmetric):
    linear = nnx.Linear(64, 10, use_bias=False, rngs=nnx.Rngs(0), **RANDOM)
    layer = qnnx.QuantLinear.from_linear(linear, W8A8(symmetric=symmetric))
    x, w = np.float64(data(7, 64)), np.float64(linear.kernel[...])
    # x and w move by up to half a step; an asymmetric zero point is rounded too and can clip another half.
    dx = quantize(data(7, 64), symmetric=symmetric).scale * (0.5 if symmetric else 1.0) * np.ones_like(x)
    dw = layer.kernel[...].scale.T / 2 * np.ones_like(w)
    bound = dx @ np.abs(w) + np.abs(x) @ dw + dx @ dw
    error = np.abs(np.float64(layer(data(7, 64))) - x @ w)
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > bound.max() / 100


def test_from_linear_equals_quantize_model():
    linear = nnx.Linear(8, 6, use_bias=False, rngs=nnx.Rngs(0), **RANDOM)
    layer = qnnx.QuantLinear.from_linear(linear, W8A8(symmetric=False))
    other, _ = qnnx.quantize_model(linear, [Rule("", W8A8(symmetric=False))])
    assert type(other) is nnx.Linear and isinstance(layer, nnx.Linear) and layer.bias is None
    states = (nnx.to_pure_dict(nnx.state(x)) for x in (layer, other))
    jax.tree.map(np.testing.assert_array_equal, *states)
    x = data(3, 8)
    np.testing.assert_array_equal(layer(x), other(x))
    with pytest.raises(ValueError, match="quantized already"):
        qnnx.QuantLinear.from_linear(layer)


def test_quant_linear_from_the_start():
    layer = qnnx.QuantLinear(8, 6, scheme=W8A8("float8_e4m3fn"), rngs=nnx.Rngs(0), **RANDOM)
    linear = nnx.Linear(8, 6, rngs=nnx.Rngs(0), **RANDOM)
    converted = qnnx.QuantLinear.from_linear(linear, W8A8("float8_e4m3fn"))
    np.testing.assert_array_equal(layer.kernel[...].dequantize(), converted.kernel[...].dequantize())
    assert layer.kernel.shape == (8, 6) and layer.kernel[...].qtype == jnp.float8_e4m3fn
    with pytest.raises(TypeError, match="promote_dtype"):
        qnnx.QuantLinear(8, 6, promote_dtype=None, rngs=nnx.Rngs(0), **RANDOM)
    static = qnnx.QuantLinear(8, 6, scheme=W8A8(activation_scale=0.5), rngs=nnx.Rngs(0), **RANDOM)
    assert [
        v[...].tolist()
        for v in jax.tree.leaves(nnx.state(static, qnnx.ActivationScale), is_leaf=lambda v: isinstance(v, nnx.Variable))
    ] == [0.5]


def test_gradients_pass_straight_through():
    layer = qnnx.QuantLinear(8, 6, rngs=nnx.Rngs(0), **RANDOM)
    x, weight = data(3, 8), data(3, 6, seed=1)
    by_x = jax.grad(lambda x: (layer(x) * weight).sum())(x)
    # 6 float32 products of numbers below 4
    np.testing.assert_allclose(by_x, weight @ layer.kernel[...].dequantize().T, rtol=0, atol=6 * 16 * 2**-24)
    grads = nnx.grad(lambda layer: (layer(x) * weight).sum())(layer)
    np.testing.assert_allclose(jax.tree.leaves(grads)[0], weight.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
def test_on_the_gpu_a_layer_is_kernels_and_equals_the_reference(symmetric, monkeypatch, on_reference):
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    layer = qnnx.QuantLinear(200, 72, scheme=W8A8(symmetric=symmetric), rngs=nnx.Rngs(0), **RANDOM)
    x = data(33, 200)
    run = jax.jit(lambda layer, x: layer(x))
    assert not [row for row in explain(layer, x).rows if row.runs_on.startswith("reference")]
    got = run(layer, x)
    monkeypatch.delenv("JAX_QMM_STRICT")
    np.testing.assert_array_equal(got, on_reference(run, layer, x))


def test_arrays_stay_where_they_are():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0), **RANDOM)
    linear.kernel.set_value(jax.device_put(linear.kernel[...], sharding))
    layer = qnnx.QuantLinear.from_linear(linear)
    want = NamedSharding(mesh, PartitionSpec("x", None))
    assert layer.kernel[...].qvalue.sharding.is_equivalent_to(want, 2)
