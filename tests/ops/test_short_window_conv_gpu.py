"""The kernels for windows of few bytes, as of first layers: bit for bit as the reference, and as integers in numpy."""

import math

import conv_oracle
import jax.numpy as jnp
import numpy as np
import pytest
from conv_calls import BF16, F8, F16, F32, SAME, check, id_of, of_gpu, operands, output_of, shifted
from conv_oracle import case

pytestmark = pytest.mark.gpu

SHORT_WINDOWS = tuple(f"sm80 windows of {size} bytes int8" for size in (64, 128, 224))

# Windows of few bytes, with lines of images that are copied in pieces of 16 bytes, of which the first begins in the
# image's padding or not, and others; and tiles of 4, 8 and 16 lines, of which blocks take one or several.
SHORT = {
    "7x7 stride 2": case((37, 40), (7, 7), (2, 2), ((3, 2), (3, 3)), channels=3, out=40, images=3),
    "pieces of 4 bytes": case((17, 15), (3, 3), padding=SAME, channels=4, out=35),
    "asymmetric padding": case((8, 12), (3, 3), (2, 1), ((0, 3), (6, 1)), channels=4, out=64),
    "cut": case((12, 36), (3, 2), (1, 2), ((-2, 1), (-1, -3)), channels=8, out=17),
    "wide padding": case((3, 4), (2, 2), (1, 1), ((5, 4), (4, 6)), channels=16, out=8),
    "dilation": case((11, 24), (3, 2), (1, 2), ((2, 2), (0, 3)), (3, 4), channels=8, out=12),
    "one axis": case((150,), (5,), (2,), ((3, 1),), channels=12, out=9, images=3),
    "several turns": case((35, 34), (3, 3), padding=SAME, channels=4, out=64, images=-4),
    "many turns": case((34, 33), (2, 2), channels=4, out=33, images=-1),
}


@pytest.fixture(params=SHORT_WINDOWS, ids=id_of)
def tile(request, extension):
    """Has every convolution take this kernel."""
    extension.restrict_conv(request.param)
    yield request.param
    extension.restrict_conv("")


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("zero_points", [(None, None), ("each", "each"), (127, None)], ids=str)
def test_sums_of_short_windows(on_reference, gpu, tile, name, zero_points):
    c = of_gpu(SHORT[name], gpu)
    if math.prod(c.taps) * (-(-c.channels // 4) * 4) > int(tile.split()[3]):
        pytest.skip("the window has more bytes")
    lhs, rhs = operands(c, *zero_points)
    got = check(on_reference, c, lhs, rhs, tile=tile, out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32))


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16, np.int8, F8])
@pytest.mark.parametrize("out, activation", [(40, None), (35, "relu"), (36, (-0.5, 0.25))])
def test_outputs_of_short_windows(on_reference, tile, out, activation, out_dtype):
    """With rows of the output that begin at whole stores and others."""
    c = case((9, 20), (3, 3), padding=SAME, channels=4, out=out, images=3)
    bias = jnp.asarray(np.linspace(-1, 1, out, dtype=F32).astype(BF16))
    check(on_reference, c, *operands(c, "each"), bias, tile=tile, activation=activation, **output_of(out_dtype))
