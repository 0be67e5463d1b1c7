"""nn.Conv of linen with quantized kernels: as conv_general_dilated computes them, told by names or an example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from random_arrays import RANDOM, data

import jax_qmm
from jax_qmm import W4A16, W8A8, W8A16, Rule, linen as qlinen

SCHEMES = [
    W8A8(),
    W8A8(activation="per_tensor", symmetric=False, weight_symmetric=False),
    W8A8(activation_scale=0.02),
    W8A16(8),
    W4A16(8, symmetric=False),
]


def quantized(layer, scheme, x, **options):
    variables = layer.init(jax.random.key(0), x)
    model, qvariables, report = qlinen.quantize_model(layer, variables, [Rule(".*", scheme)], **options)
    return lambda x: layer.apply(variables, x), lambda x: model.apply(qvariables, x), variables["params"], report


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("options", [{}, dict(strides=2, feature_group_count=2), dict(kernel_dilation=(1, 2))], ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_is_the_convolution_of_its_qarray(scheme, options, use_bias):
    x = data(2, 7, 6, 16)
    layer = nn.Conv(8, (3, 2), use_bias=use_bias, **RANDOM, **options)
    _, run, params, report = quantized(layer, scheme, x, example=x)
    assert (report.rows[0].op, report.rows[0].scheme) == ("Conv", str(scheme))
    w = scheme.quantize_weight(params["kernel"], (0, 1, 2))
    want = lambda x: jax_qmm.conv_general_dilated(
        x,
        w,
        *((options.get("strides", 1),) * 2, "SAME", None, options.get("kernel_dilation")),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=options.get("feature_group_count", 1),
        scheme=scheme,
        bias=params["bias"] if use_bias else None,
    )
    np.testing.assert_array_equal(jax.jit(run)(x), jax.jit(want)(x))


@pytest.mark.parametrize("padding", ["SAME", "VALID", "CIRCULAR", "REFLECT", "CAUSAL", ((2, 1),)])
@pytest.mark.parametrize("shape", [(3, 9, 8), (9, 8), (2, 3, 9, 8)])
def test_paddings_and_batches_are_those_of_the_layer(padding, shape):
    x = data(*shape)
    plain, run, *_ = quantized(nn.Conv(6, 3, padding=padding, **RANDOM), W8A8(), x, example=x)
    got, want = run(x), plain(x)
    assert got.shape == want.shape
    # An error of up to half a step of either operand, 1/127 of their largest value.
    assert jnp.linalg.norm(got - want) < jnp.linalg.norm(want) * 2 / 127


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, dict(param_dtype=jnp.bfloat16), dict(dtype=jnp.float16)], ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
def test_dtypes_are_those_of_the_float_layer(x_dtype, options, use_bias):
    x = data(2, 5, 8).astype(x_dtype)
    plain, run, *_ = quantized(nn.Conv(4, (3,), use_bias=use_bias, **options), W8A8(), x, example=x)
    assert run(x).dtype == plain(x).dtype


def test_calibration_and_sensitivity():
    x = data(2, 6, 5, 8)
    layer = nn.Conv(4, (3, 3), **RANDOM)
    plain, run, _, report = quantized(layer, W8A8(activation="per_tensor"), x, calibration=[x], sensitivity=[x])
    _, fixed, *_ = quantized(layer, W8A8(activation_scale=float(np.abs(x).max()) / 127), x, example=x)
    np.testing.assert_allclose(run(x), fixed(x), rtol=1e-5, atol=1e-5)
    error = float(jnp.linalg.norm(run(x) - plain(x)) / jnp.linalg.norm(plain(x)))
    assert report.rows[0].error == pytest.approx(error, rel=1e-2)


class Named(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3,), **RANDOM)(x)
        x = nn.Conv(8, (3,), use_bias=False)(x)
        x = nn.ConvTranspose(8, (3,))(x)
        x = nn.ConvLocal(8, (3,))(x)
        return nn.Conv(8, (3,), name="stem", **RANDOM)(x)


@pytest.mark.parametrize("with_example", [True, False])
def test_which_layers_are_told(with_example):
    x = data(2, 6, 8)
    plain, run, _, report = quantized(Named(), W8A8(), x, example=x if with_example else None)
    reasons = {row.path: row.reason for row in report.skipped}
    assert reasons["ConvTranspose_0"] == reasons["ConvLocal_0"] == "a convolution"
    assert [row.path for row in report.quantized] == ["Conv_0", "Conv_1"] + ["stem"] * with_example
    error = jnp.linalg.norm(run(x) - plain(x)) / jnp.linalg.norm(plain(x))
    assert 0 < error < 0.05


class Twice(nn.Conv):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


def test_a_subclass_that_calls_the_original_does_so_once():
    x = data(2, 6, 8)
    plain, run, *_ = quantized(Twice(4, (3,), **RANDOM), W8A8(), x, example=x)
    assert jnp.linalg.norm(run(x) - plain(x)) < jnp.linalg.norm(plain(x)) * 2 / 127


def normalized(base):
    class Normalized(base):
        def param(self, name, *args, **kwargs):
            value = super().param(name, *args, **kwargs)
            return value - jnp.mean(value) if name == "kernel" else value

    return Normalized


@pytest.mark.parametrize("layer", [normalized(nn.Conv)(4, (3,)), normalized(nn.Dense)(4)], ids=["Conv", "Dense"])
def test_a_subclass_that_makes_another_kernel_of_its_parameter_stays_in_float(layer):
    x = data(2, 6, 8)
    plain, run, _, report = quantized(layer, W8A8(), x, example=x)
    assert report.rows[0].reason == "it brings its own param"
    np.testing.assert_array_equal(run(x), plain(x))


def test_such_a_subclass_is_found_at_the_latest_when_it_runs():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return normalized(nn.Conv)(4, (3,), name="Conv_0")(x)

    x = data(2, 6, 8)
    _, run, *_ = quantized(Model(), W8A8(), x)
    with pytest.raises(TypeError, match="the kernel of Conv_0 was quantized, but it brings its own param"):
        run(x)


def test_a_stack_of_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return nn.Conv(8, (3,), **RANDOM)(x), None

    stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
    for example in (None, data(2, 6, 8)):
        plain, run, _, report = quantized(stack(), W8A8(), data(2, 6, 8), example=example)
        assert [row.path for row in report.quantized] == ["Conv_0"]
        got, want = run(data(2, 6, 8))[0], plain(data(2, 6, 8))[0]
        assert jnp.linalg.norm(got - want) < jnp.linalg.norm(want) * 4 / 127


@pytest.mark.parametrize("scheme", [W8A8(), W4A16(8)], ids=str)
@pytest.mark.parametrize("names", [(None, None, "model"), (None, "model", None)])
def test_a_kernel_keeps_its_sharding(scheme, names):
    """By output channels, and by input channels where those are not packed beside taps."""
    mesh, x = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2), data(2, 6, 16)
    layer = nn.Conv(8, (3,), kernel_init=nn.with_partitioning(RANDOM["kernel_init"], names))
    variables = layer.init(jax.random.key(0), x)
    model, variables, _ = qlinen.quantize_model(layer, variables, [Rule(".*", scheme)], example=x)
    placed = jax.device_put(nn.unbox(variables), nn.unbox(nn.get_sharding(variables, mesh)))
    spec = placed["params"]["kernel"].qvalue.sharding.spec  # stored as (outputs, taps, channels)
    packed = names[1] is not None and isinstance(scheme, W4A16)
    assert spec == (P(None, None, None) if packed else P(names[2], None, names[1]))
    got = jax.jit(model.apply)(placed, jax.device_put(x, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(got, model.apply(nn.unbox(variables), x), rtol=1e-5, atol=1e-5)


def test_a_masked_kernel_stays_in_float():
    x = data(2, 6, 8)
    layer = nn.Conv(4, (3,), mask=jnp.ones((3, 8, 4)))
    *_, report = quantized(layer, W8A8(), x, example=x)
    assert report.rows[0].reason == "it brings its own mask"
    *_, report = quantized(nn.Conv(4, (3,)), W8A8("float8_e4m3fn"), x, example=x)
    assert report.rows[0].reason == "a Conv has no product of float8_e4m3fn: take int8"
    *_, report = quantized(nn.Conv(4, (3,)), W8A8(tile_size=32), x, example=x)
    assert report.rows[0].reason == "a Conv takes a W8A8 without tile_size, W4A16 and W8A16"


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quant_conv_is_the_converted_conv(scheme):
    x = data(2, 7, 6, 16)
    options = dict(strides=2, feature_group_count=2, **RANDOM)
    layer = qlinen.QuantConv(8, (3, 2), scheme=scheme, **options)
    _, run, params, _ = quantized(nn.Conv(8, (3, 2), **options), scheme, x, example=x)
    variables = layer.init(jax.random.key(0), x)
    assert variables["params"]["kernel"].shape == params["kernel"].shape
    np.testing.assert_array_equal(layer.apply(variables, x), run(x))
    grown = layer.apply(jax.tree.map(lambda leaf: leaf, variables), jnp.stack([x, x]))  # two axes of images
    np.testing.assert_array_equal(grown[1], run(jnp.concatenate([x, x]))[2:])


def test_bad_fields_of_quant_conv_are_named():
    x = data(2, 5, 8)
    with pytest.raises(ValueError, match="QuantConv can't be run: it brings its own mask"):
        qlinen.QuantConv(4, 3, mask=jnp.ones((3, 8, 4))).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="a QuantConv has no product of float8_e4m3fn: take int8"):
        qlinen.QuantConv(4, 3, scheme=W8A8("float8_e4m3fn")).init(jax.random.key(0), x)
