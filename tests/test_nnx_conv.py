"""nnx.Conv with quantized kernels: as conv_general_dilated computes them, in the dtypes that Flax has."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from random_arrays import RANDOM, data

import jax_qmm
from jax_qmm import W4A8, W4A16, W8A8, W8A16, Rule, nnx as qnnx

SCHEMES = [
    W8A8(),
    W8A8(activation="per_tensor", symmetric=False, weight_symmetric=False),
    W8A8(activation_scale=0.02),
    W8A16(8),
    W4A16(8, symmetric=False),
]


def quantized(layer, scheme, **options):
    model, report = qnnx.quantize_model(layer, [Rule(".*", scheme)], **options)
    return model, report.rows[0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("options", [{}, dict(strides=2, feature_group_count=2), dict(kernel_dilation=(1, 2))], ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_is_the_convolution_of_its_qarray(scheme, options, use_bias):
    layer = nnx.Conv(16, 8, (3, 2), rngs=nnx.Rngs(0), use_bias=use_bias, **RANDOM, **options)
    model, row = quantized(layer, scheme)
    assert row.op == "Conv" and row.scheme == str(scheme)
    x = data(2, 7, 6, 16)
    want = jax_qmm.conv_general_dilated(
        x,
        scheme.quantize_weight(layer.kernel[...], (0, 1, 2)),
        *((options.get("strides", 1),) * 2, "SAME", None, options.get("kernel_dilation")),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=options.get("feature_group_count", 1),
        scheme=scheme,
        bias=layer.bias[...] if use_bias else None,
    )
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model(x))(model, x), jax.jit(lambda: want)())


@pytest.mark.parametrize("padding", ["SAME", "VALID", "CIRCULAR", "REFLECT", "CAUSAL", ((2, 1),)])
@pytest.mark.parametrize("shape", [(3, 9, 8), (9, 8), (2, 3, 9, 8)])
def test_paddings_and_batches_are_those_of_the_layer(padding, shape):
    layer = nnx.Conv(8, 6, 3, padding=padding, rngs=nnx.Rngs(0), **RANDOM)
    model, _ = quantized(layer, W8A8())
    x = data(*shape)
    got, want = model(x), layer(x)
    assert got.shape == want.shape
    # An error of up to half a step of either operand, 1/127 of their largest value.
    assert jnp.linalg.norm(got - want) < jnp.linalg.norm(want) * 2 / 127


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_those_of_the_float_layer(x_dtype):
    kinds = [{}, dict(param_dtype=jnp.bfloat16), dict(dtype=jnp.float16), dict(preferred_element_type=jnp.float32)]
    for options, use_bias, scheme in itertools.product(kinds, (True, False), (W8A8(), W8A16(8))):
        layer = nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0), use_bias=use_bias, **options)
        x = data(2, 5, 8).astype(x_dtype)
        assert quantized(layer, scheme)[0](x).dtype == layer(x).dtype


def test_calibration_and_sensitivity():
    layer = nnx.Conv(8, 4, (3, 3), rngs=nnx.Rngs(0), **RANDOM)
    x = data(2, 6, 5, 8)
    model, row = quantized(layer, W8A8(activation="per_tensor"), calibration=[x], sensitivity=[x])
    scale = np.abs(x).max() / np.float32(127)
    np.testing.assert_allclose(model.conv_general_dilated.scale[...], scale, rtol=1e-6)
    fixed, _ = quantized(layer, W8A8(activation_scale=float(scale)))
    np.testing.assert_allclose(model(x), fixed(x), rtol=1e-5, atol=1e-5)
    assert row.error == pytest.approx(float(jnp.linalg.norm(model(x) - layer(x)) / jnp.linalg.norm(layer(x))), rel=1e-2)


def test_gradients_reach_input_and_bias_alone():
    layer = nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0), **RANDOM)
    model, _ = quantized(layer, W8A8())
    x, dy = data(2, 5, 8), data(2, 5, 4)
    of_model, of_x = nnx.grad(lambda model, x: jnp.sum(model(x) * dy), argnums=(0, 1))(model, x)
    assert list(of_model) == ["bias"]
    np.testing.assert_allclose(of_model["bias"][...], dy.sum((0, 1)), rtol=1e-5, atol=1e-5)
    dense = lambda x: jax.lax.conv_general_dilated(
        x, model.kernel[...].dequantize(), (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    np.testing.assert_allclose(of_x, jax.vjp(dense, x)[1](dy)[0], rtol=1e-4, atol=1e-4)


def test_a_stack_of_layers():
    make = nnx.vmap(lambda rngs: nnx.Conv(8, 8, (3,), rngs=rngs), in_axes=0)
    stack = make(nnx.Rngs(0).fork(split=3))
    model, _ = quantized(stack, W8A8())
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    x = data(2, 6, 8)
    got, want = run(model, x), run(stack, x)
    assert got.shape == (3, 2, 6, 8)
    assert jnp.linalg.norm(got - want) < jnp.linalg.norm(want) * 2 / 127


@pytest.mark.parametrize(
    ("options", "scheme", "reason"),
    [
        (dict(mask=jnp.ones((3, 8, 4))), W8A8(), "it brings its own mask"),
        (dict(conv_general_dilated=lambda *args, **kwargs: None), W8A8(), "it brings its own conv_general_dilated"),
        ({}, W8A8("float8_e4m3fn"), "a Conv has no product of float8_e4m3fn: take int8"),
        ({}, W8A8(tile_size=32), "a Conv takes a W8A8 without tile_size, W4A16 and W8A16"),
        ({}, W4A8(32), "a Conv takes a W8A8 without tile_size, W4A16 and W8A16"),
        ({}, W4A16(1), "too small to gain: its kernel of 384 bytes would take 640"),
    ],
    ids=["mask", "own", "float8", "blocks", "W4A8", "small"],
)
def test_why_a_layer_stays_in_float(options, scheme, reason):
    layer = nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0), **options)
    assert quantized(layer, scheme)[1].reason == reason


@pytest.mark.parametrize("scheme", [W8A8(), W4A16(64)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", [2, 3])
def test_a_sharded_kernel(axis, kind, scheme):
    """By input or output channel: of the convolution itself nothing is gathered, and the sums are added up once."""
    mesh = jax.make_mesh((4,), ("m",), axis_types=(kind,))
    spec = P(*("m" if i == axis else None for i in range(4)))
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
    with jax.set_mesh(mesh):
        float_layer = nnx.Conv(512, 8, (3, 2), kernel_init=init, rngs=nnx.Rngs(0))
        layer, _ = qnnx.quantize_model(float_layer, [Rule(".*", scheme)])
        x = data(2, 4, 3, 512)
        sharded = jax.device_put(x, NamedSharding(mesh, P(None, None, None, "m" if axis == 2 else None)))
        graph, state = nnx.split(layer)
        compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, sharded).compile()
        got = compiled(state, sharded)
    found = re.findall(r"= (\w+)\[.* (all-\w+|collective-permute|reduce-scatter)\(", compiled.as_text())
    of_scheme = {"int8": ["s32", "s32"], "int4": ["f32"]}[str(scheme)[:4]]  # of int8 the bits of a maximum too
    assert sorted(found) == [(dtype, "all-reduce") for dtype in of_scheme if axis == 2]
    want = quantized(nnx.Conv(512, 8, (3, 2), rngs=nnx.Rngs(0)), scheme)[0](x)
    np.testing.assert_allclose(got, want, rtol=0, atol=3072 * 2.0**-24 * 2 * float(jnp.abs(want).max() + 8))


def test_out_sharding_is_refused():
    model, _ = quantized(nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0)), W8A8())
    with pytest.raises(ValueError, match="a quantized convolution needs None"):
        model(data(2, 5, 8), out_sharding=jax.sharding.PartitionSpec())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quant_conv_is_the_converted_conv(scheme):
    options = dict(strides=2, feature_group_count=2, rngs=nnx.Rngs(0), **RANDOM)
    layer = qnnx.QuantConv(16, 8, (3, 2), scheme=scheme, **options)
    converted, _ = quantized(nnx.Conv(16, 8, (3, 2), **options | dict(rngs=nnx.Rngs(0))), scheme)
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(each)) for each in (layer, converted)))
    x = data(2, 7, 6, 16)
    np.testing.assert_array_equal(layer(x), converted(x))
    assert isinstance(layer, nnx.Conv) and layer.kernel.shape == (3, 2, 8, 8)
    assert nnx.state(layer, nnx.Param).keys() == {"bias"}


def test_bad_arguments_of_quant_conv_are_named():
    for name in ("conv_general_dilated", "mask", "promote_dtype"):
        with pytest.raises(TypeError, match=f"QuantConv brings its own {name}"):
            qnnx.QuantConv(8, 4, 3, rngs=nnx.Rngs(0), **{name: None})
    for scheme, reason in ((W8A8("float8_e4m3fn"), "has no product of float8_e4m3fn"), (W4A8(32), "takes a W8A8")):
        with pytest.raises(ValueError, match=f"a QuantConv {reason}"):
            qnnx.QuantConv(8, 4, 3, scheme=scheme, rngs=nnx.Rngs(0))
