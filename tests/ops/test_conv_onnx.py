"""conv_general_dilated against onnxruntime's ConvInteger and QLinearConv, bit for bit.

Scales are powers of two, so that either side's float arithmetic is exact and both round the same number.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import case, int8

import jax_qmm
from jax_qmm import QArray

onnxruntime = pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")

GRID = {
    "3x3": case((9, 7), (3, 3), padding=((1, 1), (1, 1)), channels=8, out=5),
    "3x3, strides": case((9, 8), (3, 3), (2, 3), ((1, 0), (2, 1)), channels=4, out=3),
    "1x1": case((5, 6), (1, 1), channels=16, out=4),
    "7x7 of 3 channels": case((15, 15), (7, 7), (2, 2), ((3, 3), (3, 3)), channels=3, out=8),
    "dilated": case((11, 9), (3, 2), padding=((2, 2), (1, 1)), rhs_dilation=(2, 3), channels=5, out=4),
    "groups": case((6, 6), (3, 3), padding=((1, 1), (1, 1)), channels=4, out=3, groups=3),
    "depthwise": case((8, 8), (3, 3), padding=((1, 1), (1, 1)), channels=1, out=1, groups=12),
    "1-D": case((20,), (5,), (2,), ((2, 2),), channels=6, out=4),
}


def run(op, c, inputs, out_type, **names):
    """A model of one node; inputs by name, in order."""
    types = {np.dtype(np.int8): onnx.TensorProto.INT8, np.dtype(np.uint8): onnx.TensorProto.UINT8}
    types |= {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int32): onnx.TensorProto.INT32}
    begins, ends = zip(*c.padding)
    node = onnx.helper.make_node(
        *(op, list(inputs), ["y"]),
        strides=c.strides,
        pads=[*begins, *ends],
        dilations=c.rhs_dilation,
        group=c.groups,
        kernel_shape=c.taps,
    )
    values = [onnx.helper.make_tensor_value_info(n, types[x.dtype], x.shape) for n, x in inputs.items()]
    result = onnx.helper.make_tensor_value_info("y", out_type, None)
    graph = onnx.helper.make_graph([node], "graph", values, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def channels_last(x):
    return np.moveaxis(x, 1, -1)


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("zero_point", [0, -77, 127])
@pytest.mark.parametrize("of_weight", [0, -128, 31])
def test_conv_integer(name, zero_point, of_weight):
    c, rng = GRID[name], np.random.default_rng(0)
    lhs, rhs = int8(rng, *c.lhs_shape()), int8(rng, *c.rhs_shape())
    channels_first = lambda x: np.ascontiguousarray(np.moveaxis(x, -1, 1))
    # onnxruntime takes unsigned images: both, and their zero point, are 128 more.
    inputs = dict(
        x=(channels_first(lhs).astype(np.int16) + 128).astype(np.uint8),
        w=channels_first(rhs),
        x_zero_point=np.array(zero_point + 128, np.uint8),
        w_zero_point=np.array(of_weight, np.int8),
    )
    want = run("ConvInteger", c, inputs, onnx.TensorProto.INT32)
    ones = np.ones((1,) * lhs.ndim, np.float32)
    zeros = lambda zero_point: np.full(ones.shape, zero_point, np.int32)
    left, right = QArray(jnp.asarray(lhs), ones, zeros(zero_point)), QArray(jnp.asarray(rhs), ones, zeros(of_weight))
    got = jax_qmm.conv_general_dilated(left, right, **c.keywords(), out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, channels_last(want))


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("zero_points", [(0, 0), (-77, 20), (127, -128)], ids=str)
def test_qlinear_conv(name, zero_points):
    c, rng = GRID[name], np.random.default_rng(0)
    zero_x, zero_y = zero_points
    lhs, rhs = int8(rng, *c.lhs_shape()), int8(rng, *c.rhs_shape())
    channels = rhs.shape[0]
    scale_w = np.exp2(rng.integers(-9, -6, channels)).astype(np.float32)
    bias = rng.integers(-5000, 5000, channels).astype(np.int32)
    channels_first = lambda x: np.ascontiguousarray(np.moveaxis(x, -1, 1))
    inputs = dict(
        x=channels_first(lhs),
        x_scale=np.array(0.25, np.float32),
        x_zero_point=np.array(zero_x, np.int8),
        w=channels_first(rhs),
        w_scale=scale_w,
        w_zero_point=np.zeros(channels, np.int8),
        y_scale=np.array(0.5, np.float32),
        y_zero_point=np.array(zero_y, np.int8),
        bias=bias,
    )
    want = run("QLinearConv", c, inputs, onnx.TensorProto.INT8)
    ones = (1,) * (lhs.ndim - 1)
    got = jax_qmm.conv_general_dilated(
        QArray(jnp.asarray(lhs), np.full((1, *ones), 0.25, np.float32), np.full((1, *ones), zero_x, np.int32)),
        QArray(jnp.asarray(rhs), scale_w.reshape(-1, *ones)),
        **c.keywords(),
        bias=bias * (np.float32(0.25) * scale_w),
        out_dtype=jnp.int8,
        out_scale=0.5,
        out_zero_point=zero_y,
    )
    assert len(np.unique(want)) > 20  # it is not all saturated
    np.testing.assert_array_equal(got, channels_last(want))
