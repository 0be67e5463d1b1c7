"""The kernels for depthwise convolutions: bit for bit as the reference, and as integers in numpy."""

import conv_oracle
import jax.numpy as jnp
import numpy as np
import pytest
from conv_calls import BF16, F8, F16, F32, SAME, check, of_gpu, operands, output_of, residual_of, shifted
from conv_oracle import case

pytestmark = pytest.mark.gpu

# Each channel by itself, 4 or 16 at a time, in part of a block's threads, in all, and in those of two blocks.
DEPTHWISE = {
    "4 channels": case((9, 7), (3, 3), padding=SAME, channels=1, out=1, groups=4, images=3),
    "20 channels": case((9, 7), (3, 3), (2, 1), ((0, 1), (2, -1)), channels=1, out=1, groups=20, images=3),
    "48 channels": case((19, 13), (3, 3), padding=SAME, channels=1, out=1, groups=48),
    "144 channels": case((6, 5), (5, 3), padding=((2, 2), (4, 0)), rhs_dilation=(1, 2), channels=1, out=1, groups=144),
    "148 channels": case((6, 5), (1, 2), channels=1, out=1, groups=148),
    "one axis": case((30,), (4,), padding=((3, 0),), channels=1, out=1, groups=16),
    "three axes": case((4, 5, 6), (2, 3, 2), (1, 2, 1), ((1, 0), (0, 2), (1, 1)), channels=1, out=1, groups=16),
    "cut": case((8, 9), (3, 3), padding=((-1, 0), (-2, -1)), channels=1, out=1, groups=4),
    "dilation": case((8, 9), (3, 3), padding=SAME, rhs_dilation=(2, 2), channels=1, out=1, groups=16),
    "256 taps": case((9, 9), (16, 16), padding=((8, 8), (9, 9)), channels=1, out=1, groups=4),
}


def square(image, taps, stride, padding=None, **sizes):
    padding = padding or ((taps // 2, taps // 2),) * 2
    return case(image, (taps, taps), (stride, stride), padding, channels=1, out=1, **sizes)


# Each channel by itself, by the windows that have kernels of their own, whose tiles of 4 by 1 or 2 outputs end within
# the image or beyond it; channels as above.
SQUARES = {
    "3x3": square((9, 7), 3, 1, groups=4, images=3),
    "3x3, 144 channels": square((6, 8), 3, 1, groups=144),
    "3x3, 148 channels": square((3, 2), 3, 1, groups=148),
    "3x3, cut": square((9, 10), 3, 1, ((-1, 0), (-2, -1)), groups=4),
    "3x3, wide padding": square((2, 3), 3, 1, ((5, 4), (4, 6)), groups=20),
    "3x3, several tiles of a thread": square((70, 66), 3, 1, groups=48, images=-8),
    "3x3 stride 2": square((9, 12), 3, 2, groups=20, images=3),
    "3x3 stride 2, uneven": square((8, 7), 3, 2, ((0, 1), (2, -1)), groups=48),
    "5x5": square((9, 7), 5, 1, groups=20, images=3),
    "5x5 stride 2": square((9, 12), 5, 2, groups=20, images=3),
    "7x7": square((9, 7), 7, 1, groups=20, images=3),
    "7x7, small image": square((2, 3), 7, 1, groups=4),
}


@pytest.fixture
def general(extension):
    """Has no depthwise convolution take a kernel of square windows."""
    extension.restrict_conv("channels int8")
    yield "depthwise"
    extension.restrict_conv("")


@pytest.mark.parametrize("name", DEPTHWISE)
@pytest.mark.parametrize("zero_points", [(None, None), ("each", "each"), (127, None), (None, -128)], ids=str)
def test_sums_of_each_channel(on_reference, general, name, zero_points):
    c = DEPTHWISE[name]
    lhs, rhs = operands(c, *zero_points)
    words = f"{general} {16 if c.groups % 16 == 0 else 4} channels"
    got = check(on_reference, c, lhs, rhs, kernel=words, out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32))


@pytest.mark.parametrize("name", SQUARES)
@pytest.mark.parametrize("zero_points", [(None, None), ("each", "each"), (127, None), (None, -128)], ids=str)
def test_sums_of_squares(on_reference, gpu, name, zero_points):
    c = of_gpu(SQUARES[name], gpu)
    lhs, rhs = operands(c, *zero_points)
    got = check(on_reference, c, lhs, rhs, kernel=f"depthwise {name.partition(',')[0]} int8", out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32))


@pytest.mark.parametrize("name", ["3x3", "3x3 stride 2", "7x7"])
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16, np.int8, F8])
def test_outputs_of_squares(on_reference, name, out_dtype):
    c = SQUARES[name]
    activation = (-1, 3) if out_dtype == np.int8 else None
    bias = jnp.asarray(np.linspace(-1, 1, c.groups, dtype=F32))
    check(on_reference, c, *operands(c, "each"), bias, None, "depthwise", activation=activation, **output_of(out_dtype))


@pytest.mark.parametrize("groups", [4, 20])
def test_residuals_of_each_channel_are_added_by_xla(on_reference, groups):
    c = case((6, 5), (3, 3), padding=SAME, channels=1, out=1, groups=groups)
    bias = jnp.asarray(np.linspace(-1, 1, groups, dtype=F32))
    options = output_of(np.int8) | dict(activation="relu", residual=residual_of(c, "int8"))
    check(on_reference, c, *operands(c, "each"), bias, kernel="what follows the sums by XLA", **options)


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16, np.int8, F8])
@pytest.mark.parametrize("groups", [20, 32])
def test_outputs_of_each_channel(on_reference, general, groups, out_dtype):
    c = case((6, 5), (3, 3), padding=SAME, channels=1, out=1, groups=groups, images=3)
    bias = jnp.asarray(np.linspace(-1, 1, groups, dtype=F32))
    check(on_reference, c, *operands(c, "each"), bias, None, general, **output_of(out_dtype))
