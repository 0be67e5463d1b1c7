import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

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


def test_weights_get_a_scale_per_channel_and_are_stored_with_the_contracted_axes_last():
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 5)), jnp.float32)
    for scheme in (jax_qmm.W8A8(), jax_qmm.W8A8(symmetric=False)):
        q = scheme.quantize_weight(kernel, (-3, -2))  # a stack of two
        want = jax_qmm.quantize(kernel.reshape(2, 12, 5).mT)
        np.testing.assert_array_equal(q.qvalue.reshape(2, 5, 12), want.qvalue)
        np.testing.assert_array_equal(q.scale.reshape(2, 5, 1), want.scale)
        assert q.shape == kernel.shape and (q.azp_adj is None) == scheme.symmetric
    np.testing.assert_array_equal(q.azp_adj.reshape(2, 5), want.qvalue.sum(-1, dtype=jnp.int32))


@pytest.mark.parametrize("symmetric", [False, True])
def test_asymmetric_weights_get_a_zero_point_per_channel(symmetric):
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 5)) + 1, jnp.float32)
    q = jax_qmm.W8A8(symmetric=symmetric, weight_symmetric=False).quantize_weight(kernel, (-3, -2))
    want = jax_qmm.quantize(kernel.reshape(2, 12, 5).mT, symmetric=False)
    np.testing.assert_array_equal(q.qvalue.reshape(2, 5, 12), want.qvalue)
    np.testing.assert_array_equal(q.zero_point.reshape(2, 5, 1), want.zero_point)
    assert (q.azp_adj is None) == symmetric  # the sums that zero points of activations need
    np.testing.assert_allclose(q.dequantize(), kernel, atol=float(q.scale.max()))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("activation", ["per_token", "per_tensor"])
def test_activations_come_with_their_sums_on_request(activation, static):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    scheme = jax_qmm.W8A8(activation=activation, activation_scale=0.05 if static else None)
    q, plain = scheme.quantize_activation(x, 2, sums=True), scheme.quantize_activation(x, 2)
    np.testing.assert_array_equal(q.qvalue, plain.qvalue)
    np.testing.assert_array_equal(q.dequantize(), plain.dequantize())
    np.testing.assert_array_equal(q.azp_adj, q.qvalue.sum((1, 2), dtype=jnp.int32, keepdims=True))
    assert plain.azp_adj is None


@pytest.mark.parametrize("activation", ["per_token", "per_tensor"])
def test_activations_are_quantized_as_the_scheme_says(activation):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    scheme = jax_qmm.W8A8(symmetric=False, activation=activation)
    q = scheme.quantize_activation(x, 2)
    assert q.scale.shape == ((2, 1, 1) if activation == "per_token" else (1, 1, 1))
    # A calibration that saw just these values gives what is computed from the data.
    static = scheme.with_static(*scheme.static_range(x.min(), x.max()))
    assert scheme.takes_calibration == (activation == "per_tensor") and not static.takes_calibration
    assert str(static) == "int8, per_tensor static, asymmetric" and static.with_static(None) == scheme
    if activation == "per_tensor":
        np.testing.assert_array_equal(static.quantize_activation(x, 2).qvalue, q.qvalue)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"dtype": jnp.int4}, TypeError, "dtype is .*int4.*, needs int8 or float8_e4m3fn"),
        ({"dtype": "fp4"}, TypeError, "dtype is 'fp4'"),
        ({"activation": "token"}, ValueError, "activation is 'token', needs 'per_token' or 'per_tensor'"),
        ({"dtype": jnp.float8_e4m3fn, "symmetric": False}, ValueError, "symmetric=False .* needs int8"),
        ({"symmetric": "no"}, TypeError, "symmetric is 'no', needs True or False"),
        ({"weight_symmetric": 0}, TypeError, "weight_symmetric is 0, needs True or False"),
        ({"dtype": "fp8", "weight_symmetric": False}, ValueError, "weight_symmetric=False .* needs int8"),
        ({"activation_scale": 1}, TypeError, "activation_scale has dtype int32"),
        ({"activation_scale": [1.0]}, TypeError, r"activation_scale is \[1.0\], needs a number or an array"),
        ({"activation_scale": "0.1"}, TypeError, "activation_scale is '0.1', needs a number or an array"),
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
        ({"tile_size": 0}, ValueError, "tile_size is 0, needs a positive int, or None"),
        ({"tile_size": 64.0}, ValueError, "tile_size is 64.0, needs a positive int"),
        ({"tile_size": 64, "activation": "per_tensor"}, ValueError, "activation='per_tensor' was given with tile_size"),
        ({"tile_size": 64, "activation_scale": 0.5}, ValueError, "activation_scale was given with tile_size=64"),
        ({"tile_size": 64, "weight_tile": (1, 64)}, ValueError, "weight_tile.* with dtype int8, needs float8_e4m3fn"),
        ({"dtype": "fp8", "weight_tile": (8, 64)}, ValueError, "needs a positive int and tile_size, which is None"),
        ({"dtype": "fp8", "tile_size": 64, "weight_tile": (8, 32)}, ValueError, "and tile_size, which is 64"),
        ({"dtype": "fp8", "tile_size": 64, "weight_tile": (0, 64)}, ValueError, r"weight_tile is \(0, 64\), needs a"),
        ({"dtype": "fp8", "tile_size": 64, "weight_tile": 64}, ValueError, "weight_tile is 64, needs a positive int"),
    ],
)
def test_a_bad_scheme_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.W8A8(**options)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scheme", [jax_qmm.W4A16, jax_qmm.W8A16])
def test_weights_for_float_activations_get_blocks_and_are_packed(scheme, symmetric):
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(2, 300, 5)), jnp.float32)  # a stack of two
    q = scheme(64, symmetric).quantize_weight(kernel, (-2,))
    want = jax_qmm.quantize(kernel.mT, scheme.dtype, tile_size=64, symmetric=symmetric)
    assert q.is_packed and q.shape == kernel.shape and q.scale.shape == (2, 5, 5)
    np.testing.assert_array_equal(q.dequantize(), want.dequantize().mT)
    per_column = 1 if scheme.dtype == jnp.int8 else 1 / 2
    blocks = 2 * 5 * 5 * (4 if symmetric else 5)  # a scale in float32 and a zero point in int8
    assert q.nbytes == 2 * 5 * 384 * per_column + blocks  # columns in units of 128, and nothing else
    assert scheme(300).quantize_weight(kernel, (-2,)).scale.shape == (2, 5, 1)
    assert scheme(None).quantize_weight(kernel, (-2,)).scale.shape == (2, 5, 1)


@pytest.mark.parametrize(
    "shape, tile, blocks",
    [
        ((4, 128, 3), 128, 4),
        ((4, 128, 3), 32, 16),
        ((4, 64, 3), 128, 2),
        ((4, 96, 3), 64, 6),
        ((4, 72, 3), 128, 3),  # the last block is short
        ((4, 128, 3), 512, 1),
        ((4, 32, 3), None, 1),
    ],
)
def test_several_contracted_axes_are_one_in_memory(shape, tile, blocks):
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    q = jax_qmm.W8A16(tile).quantize_weight(kernel, (-3, -2))
    flat = jax_qmm.W8A16(tile).quantize_weight(kernel.reshape(-1, 3), (-2,))
    assert (q.scale.shape, q.is_packed, q.shape, q.nbytes) == ((3, 1, blocks), True, shape, flat.nbytes)
    np.testing.assert_array_equal(q.dequantize(), flat.dequantize().reshape(shape))
    np.testing.assert_allclose(q.dequantize(), kernel, atol=float(q.scale.max()) * 0.51)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, *shape[:2])), jnp.float32)
    (row,) = jax_qmm.explain(lambda x, q: jax_qmm.einsum("bhd,hdf->bf", x, q, scheme=jax_qmm.W8A16(tile)), x, q).rows
    assert row.op.startswith("block_scaled_mm") and ", packed" in row.op


@pytest.mark.parametrize("tile", [64, 100, 128, 256, None])
@pytest.mark.parametrize("shape, contracted", [((768, 16), (0,)), ((8, 96, 16), (0, 1))])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_kernel_that_devices_share_off_the_boundaries_is_quantized(kind, shape, contracted, tile):
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        got = jax_qmm.W4A16(tile).quantize_weight(jax.device_put(kernel, NamedSharding(mesh, P("y"))), contracted)
    want = jax_qmm.W4A16(tile).quantize_weight(kernel, contracted)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_array_equal(got.qvalue, want.qvalue)
    np.testing.assert_allclose(got.scale, want.scale, rtol=2**-23)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_clip_search_makes_the_squared_error_smaller(symmetric):
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(256, 8)), jnp.float32)
    plain, clipped = (
        float(jnp.sum((jax_qmm.W4A16(64, symmetric, clip).quantize_weight(kernel, (0,)).dequantize() - kernel) ** 2))
        for clip in (False, True)
    )
    assert clipped < 0.97 * plain
    assert str(jax_qmm.W4A16(64, clip_search=True)) == "int4 weights, blocks of 64, clipped"


@pytest.mark.parametrize("weight_symmetric", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_of_w8a8_get_blocks_and_their_sums(symmetric, weight_symmetric):
    kernel = jnp.asarray(np.random.default_rng(0).normal(1, 1, size=(2, 300, 5)), jnp.float32)  # a stack of two
    scheme = jax_qmm.W8A8(symmetric=symmetric, weight_symmetric=weight_symmetric, tile_size=64)
    q = scheme.quantize_weight(kernel, (-2,))
    want = jax_qmm.quantize(kernel.mT, tile_size=64, symmetric=weight_symmetric, sums=True)
    assert q.shape == kernel.shape and q.tile_size == 64 and not q.is_packed
    np.testing.assert_array_equal(q.dequantize(), want.dequantize().mT)
    assert (q.azp_adj is None) == symmetric  # the sums that zero points of activations need
    if not symmetric:
        np.testing.assert_array_equal(q.azp_adj, want.azp_adj)
    x = scheme.quantize_activation(kernel.mT, 1, sums=True)
    assert x.scale.shape == x.azp_adj.shape == (2, 5, 5) and (x.zero_point is None) == symmetric
    assert scheme.quantize_activation(kernel.mT, 1, tile_size=32).scale.shape == (2, 5, 10)
    per_channel = dataclasses.replace(scheme, tile_size=300).quantize_weight(kernel, (-2,))
    assert per_channel.scale.shape == (2, 5, 1) and scheme.why_not(kernel, (-2,)) is None


@pytest.mark.parametrize("n, count", [(8, 2), (10, 10), (3, 1), (0, 0)])  # a scale for each where tiles do not divide
def test_tiles_of_several_channels_share_a_scale(n, count):
    kernel = np.random.default_rng(0).normal(size=(2, 40, n)).astype(np.float32)
    kernel[0, :16, :4] = 0  # a tile of zeros, or part of one
    scheme = jax_qmm.W8A8("fp8", tile_size=16, weight_tile=(4, 16))
    q = scheme.quantize_weight(jnp.asarray(kernel), (-2,))
    assert q.shape == kernel.shape and q.scale.shape == (2, count, 3) and q.tile_size == 16
    got = np.asarray(q.dequantize())
    for stack in range(2):
        for k in range(0, 40, 16):
            for first in range(0, n, 4):
                tile = kernel[stack, k : k + 16, first : first + 4]
                largest = abs(tile).max()
                # Three bits of mantissa; below 2**-6 steps of 2**-9, where 448 stands for the largest
                error = np.maximum(abs(tile) * 2.0**-4, largest / 448 * 2.0**-10) * (1 + 1e-6)
                assert (abs(got[stack, k : k + 16, first : first + 4] - tile) <= error).all()
                if largest:
                    scale = np.asarray(q.along_values(q.scale))[stack, first, k]
                    assert scale == np.float32(largest) / np.float32(448)


def test_w8a8_with_blocks_compares_by_value_and_says_so():
    assert jax_qmm.W8A8(tile_size=np.int64(64)) == jax_qmm.W8A8(tile_size=64) != jax_qmm.W8A8()
    scheme = jax_qmm.W8A8("fp8", tile_size=128, weight_tile=[128, 128])  # as JSON has it
    assert scheme == jax_qmm.W8A8("fp8", tile_size=128, weight_tile=(128, 128)) == scheme.with_static(None)
    assert str(scheme) == "float8_e4m3fn, blocks of 128, weights in tiles of 128 x 128"
    assert not scheme.takes_calibration and len({scheme, jax_qmm.W8A8("fp8", tile_size=128)}) == 2
    words = str(jax_qmm.W8A8(tile_size=32, symmetric=False, weight_symmetric=False))
    assert words == "int8, blocks of 32, asymmetric, weights asymmetric"


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("tile", [32, 64, None])
def test_weights_of_w4a8_are_int8_once_multiplied(tile, symmetric, clip):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(2, 200, 6)).astype(np.float32)
    kernel *= np.exp(rng.normal(size=(2, 200, 1)))  # blocks of many sizes
    kernel[:, :, 0] = 0
    kernel[:, :, 1] = abs(kernel[:, :, 1])  # zero points at the end of their range
    q = jax_qmm.W4A8(tile, symmetric, clip).quantize_weight(jnp.asarray(kernel), (1,))
    assert (q.shape, q.qtype, q.is_packed, q.scale_step.shape) == (kernel.shape, jnp.int4, False, (2, 6, 1))
    assert q.scale.dtype == jnp.int8 and q.scale.min() >= 1
    zero_points = 0 if symmetric else np.asarray(q.along_values(q.zero_point))
    products = (np.asarray(q.qvalue).astype(int) - zero_points) * np.asarray(q.along_values(q.scale))
    assert 90 < abs(products).max() <= 127
    assert (np.asarray(q.dequantize())[:, :, 0] == 0).all()
    plain = jax_qmm.W4A16(tile, symmetric, clip).quantize_weight(jnp.asarray(kernel), (1,))
    error, least = (np.linalg.norm(v.dequantize() - kernel) for v in (q, plain))
    # Multiples of 8 and 15 at most are off by 1/16 and 1/30 in the largest blocks, and by more in small ones.
    assert error < 1.15 * least


def test_w4a8_compares_by_value_and_quantizes_activations_per_token():
    assert jax_qmm.W4A8(64) == jax_qmm.W4A8(np.int64(64)) != jax_qmm.W4A16(64)
    assert repr(jax_qmm.W4A8(32)) == "W4A8(int4 weights, blocks of 32, int8 activations)"
    x, scheme = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32), jax_qmm.W4A8()
    np.testing.assert_array_equal(scheme.quantize_activation(x, 1).qvalue, jax_qmm.quantize(x).qvalue)
    assert not scheme.takes_calibration and scheme.with_static(None) == scheme
    assert (
        "too small to gain" in scheme.why_not(jnp.ones((1, 64)), (0,))
        and scheme.why_not(jnp.ones((64, 2)), (0,)) is None
    )


def test_weight_only_schemes_leave_activations_as_they_are():
    x = jnp.ones((2, 3))
    for scheme in (jax_qmm.W4A16(), jax_qmm.W8A16()):
        assert scheme.quantize_activation(x, 1) is x and not scheme.takes_calibration
        assert scheme.with_static(None) == scheme and scheme.activation_scale is None


def test_weight_only_schemes_compare_by_kind_and_value():
    assert jax_qmm.W4A16(np.int64(64), np.True_) == jax_qmm.W4A16(64) != jax_qmm.W4A16()
    assert len({jax_qmm.W4A16(), jax_qmm.W8A16(), jax_qmm.W4A16(128)}) == 2
    words = [str(jax_qmm.W4A16(symmetric=False)), repr(jax_qmm.W8A16(None))]
    assert words == ["int4 weights, blocks of 128, asymmetric", "W8A16(int8 weights, per channel)"]


@pytest.mark.parametrize("scheme", [jax_qmm.W4A8, jax_qmm.W4A16, jax_qmm.W8A16])
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"tile_size": 0}, ValueError, "tile_size is 0, needs a positive int, or None"),
        ({"tile_size": 64.0}, ValueError, "tile_size is 64.0"),
        ({"tile_size": True}, ValueError, "tile_size is True"),
        ({"symmetric": 1}, TypeError, "symmetric is 1, needs True or False"),
        ({"clip_search": None}, TypeError, "clip_search is None, needs True or False"),
    ],
)
def test_a_bad_weight_only_scheme_is_refused(scheme, options, error, message):
    with pytest.raises(error, match=message):
        scheme(**options)


@pytest.mark.parametrize(
    "path, scheme, error, message",
    [
        ("(", jax_qmm.W8A8(), ValueError, r"path is '\(', needs a regular expression"),
        (3, jax_qmm.W8A8(), TypeError, "path is 3"),
        (".*", jnp.int8, TypeError, "scheme is .*, needs a W8A8, W4A8, W4A16 or W8A16"),
    ],
)
def test_a_bad_rule_is_refused(path, scheme, error, message):
    with pytest.raises(error, match=message):
        jax_qmm.Rule(path, scheme)
