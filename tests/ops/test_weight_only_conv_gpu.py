"""The kernels for convolutions with weights of 4 and 8 bits, each tile in turn, against float64 in numpy.

The error that is allowed is that of `weights_oracle`, with K as taps and channels.
"""

import conv_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conv_oracle import case

import jax_qmm
from jax_qmm import W4A16, W8A16, QArray, _extension

pytestmark = pytest.mark.gpu

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # relative error of a rounding
SAME = ((1, 1), (1, 1))
TILES = (16, 32, 64)

# Windows of every kind, blocks that begin and end within taps, and tiles within images.
CASES = {
    "one axis": case((37,), (5,), (2,), ((3, 1),), channels=16, out=9, images=3),
    "two axes": case((7, 9), (3, 3), padding=SAME, channels=64, out=5, images=3),
    "three axes": case((4, 5, 6), (2, 3, 2), (1, 2, 1), ((1, 0), (0, 2), (1, 1)), (2, 1, 3), channels=32, out=8),
    "8 channels": case((5, 6), (3, 2), padding=SAME, channels=8, out=70, images=3),
    "144 channels": case((5, 6), (3, 2), padding=SAME, channels=144, out=70, images=3),
    "asymmetric padding": case((8, 6), (3, 3), (2, 1), ((0, 3), (4, 1)), channels=24, out=66),
    "negative padding": case((12, 11), (3, 2), (1, 2), ((-2, 1), (-1, -3)), channels=32, out=17),
    "padding wider than the window": case((3, 2), (2, 2), (1, 1), ((5, 4), (4, 6)), channels=16, out=4),
    "dilation": case((11, 12), (3, 2), (1, 2), ((2, 2), (0, 3)), (3, 4), channels=16, out=12),
    "stride without taps": case((9, 8), (1, 1), (2, 3), channels=48, out=33, images=3),
    "image smaller than the window": case((2, 3), (5, 7), padding=((3, 3), (4, 3)), channels=16, out=2),
    "many pixels": case((19, 15), (3, 3), padding=SAME, channels=16, out=129),
}


@pytest.fixture(autouse=True)
def has_kernels():
    if reason := _extension.fallback_reason(_extension.platform(), (), 80):
        pytest.skip(reason)


@pytest.fixture(params=TILES)
def tile(request, all_kernels):
    """Has every convolution take a kernel for so many pixels at once."""
    all_kernels.restrict_block_scaled_mm(f"windows sm80 {request.param}x")
    return request.param


def weights(c, bits, block, zero_point, seed=0):
    """A matrix (O, taps * C) in blocks as a QArray of the window's shape, and it in float64."""
    rng, (rows, *_) = np.random.default_rng(seed), c.rhs_shape()
    k = int(np.prod(c.rhs_shape()[1:]))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    q, groups = rng.integers(low, high, (rows, k)), (rows, -(-k // block))
    scale = (rng.uniform(0.001, 0.02, groups) * rng.choice([-1, 1], groups)).astype(F32)
    zero = {
        "none": None,
        "int32": rng.integers(low, high, groups).astype(np.int32),
        "float": rng.uniform(1.5 * low, 1.5 * high, groups).astype(F32),
    }[zero_point]
    dtype = jnp.dtype("int4" if bits == 4 else "int8")
    leaves = (jnp.asarray(q, dtype), jnp.asarray(scale), None if zero is None else jnp.asarray(zero))
    matrix = QArray(*leaves, tile_size=min(block, k)).pack()
    spread = lambda v: np.repeat(np.float64(v), block, -1)[:, :k]
    dense = (q - (0 if zero is None else spread(zero))) * spread(scale)
    return matrix.reshape(c.rhs_shape()), dense.reshape(c.rhs_shape()), spread(scale).reshape(c.rhs_shape())


def check(
    c,
    w,
    dense,
    scales,
    dtype,
    float_zero=False,
    bias=None,
    words="windows sm80",
    out_dtype=F32,
    rounds_weights=False,
):
    x = np.random.default_rng(1).standard_normal(c.lhs_shape()).astype(dtype)
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **c.keywords(), bias=bias, out_dtype=out_dtype)
    (row,) = jax_qmm.explain(f, x, w).rows
    assert words in row.runs_on, row.runs_on
    got = np.asarray(jax.jit(f)(x, w), np.float64)
    x = np.float64(x)
    y = conv_oracle.sums(c, x, dense) + (0 if bias is None else np.float64(bias))
    total = conv_oracle.sums(c, np.abs(x), np.abs(dense))
    error = (dense[0].size + 16) * 2.0**-23 * total + 1.016 * (float_zero or rounds_weights) * UNIT[dtype] * total
    if float_zero and dtype == F16:
        error += 2.0**-25 * conv_oracle.sums(c, np.abs(x), np.abs(scales))
    error += UNIT[out_dtype] * (np.abs(y) + error) + ml_dtypes.finfo(out_dtype).tiny
    assert got.shape == y.shape and np.all(np.abs(got - y) <= error)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_windows(tile, name, bits):
    c = CASES[name]
    check(c, *weights(c, bits, 32, "int32"), BF16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("zero_point", ["none", "int32", "float"])
@pytest.mark.parametrize("block", [32, 64, 128, 4096])
def test_blocks_and_zero_points(all_kernels, dtype, bits, zero_point, block):
    all_kernels.restrict_block_scaled_mm("windows")
    c = case((5, 6), (3, 3), padding=SAME, channels=48, out=33)
    check(c, *weights(c, bits, block, zero_point), dtype, float_zero=zero_point == "float")


WGMMA = ("64x128x128", "128x128x128", "256x128x128 cluster 2")
OF_TMA = {  # images that TMA loads, with parts of tiles, of several images, and blocks that begin and end within taps
    "windows around 65 pixels": case((13, 5), (3, 3), padding=SAME, channels=64, out=136),
    "several images": case((7, 9), (3, 3), padding=SAME, channels=128, out=72, images=5),
    "strides and dilation": case((11, 12), (3, 2), (1, 2), ((2, 2), (0, 3)), (3, 4), channels=64, out=8, images=3),
    "negative padding": case((12, 11), (3, 2), (1, 2), ((-2, 1), (-1, -3)), channels=128, out=24, images=2),
    "padding wider than the window": case((3, 2), (2, 2), (1, 1), ((5, 4), (4, 6)), channels=64, out=8, images=4),
    "stride without taps": case((9, 8), (1, 1), (2, 3), channels=320, out=40, images=9),
    "one axis": case((370,), (5,), (2,), ((3, 1),), channels=64, out=16, images=3),
    "steps of several taps, beyond the last": case((19, 15), (3, 3), padding=SAME, channels=192, out=264, images=2),
}


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("name", OF_TMA)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tile", WGMMA)
def test_windows_by_wgmma(all_kernels, tile, dtype, bits, name):
    """With blocks of 64 where weights are scaled, else of 128."""
    if dtype == F16 and tile != WGMMA[0]:
        pytest.skip("weights are not scaled in float16")
    c, block = OF_TMA[name], 128 if tile == WGMMA[0] else 64
    bias = jnp.linspace(-1, 1, c.rhs_shape()[0])
    for words in (f"windows sm90 wgmma {tile} persistent", f"windows sm90 wgmma {tile} stream-K"):
        all_kernels.restrict_block_scaled_mm(words)
        options = dict(bias=bias, words=words, out_dtype=dtype, rounds_weights=tile != WGMMA[0])
        check(c, *weights(c, bits, block, "int32"), dtype, **options)


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("tile", WGMMA)
def test_each_pixel_of_each_tap_is_multiplied(all_kernels, tile):
    """Exactly: of weights that have one value, in every tap and in channels of both halves of a step."""
    c = case((13, 5), (3, 3), padding=SAME, channels=64, out=9 * 8, images=2)
    q = np.zeros((9, 8, 9, 64), int)
    for tap in range(9):
        for i, channel in enumerate((0, 7, 18, 31, 32, 45, 56, 63)):
            q[tap, i, tap, channel] = 1
    w = QArray(jnp.asarray(q.reshape(72, -1), jnp.int4), jnp.ones((72, 1), F32)).pack().reshape(c.rhs_shape())
    x = np.random.default_rng(1).standard_normal(c.lhs_shape()).astype(BF16)
    all_kernels.restrict_block_scaled_mm(f"windows sm90 wgmma {tile}")
    got = jax.jit(lambda x, w: jax_qmm.conv_general_dilated(x, w, **c.keywords(), out_dtype=BF16))(x, w)
    np.testing.assert_array_equal(np.float64(got), conv_oracle.sums(c, np.float64(x), q.reshape(c.rhs_shape())))


def test_split_k(all_kernels):
    c = case((5, 6), (3, 3), padding=SAME, channels=256, out=33)
    all_kernels.restrict_block_scaled_mm("windows sm80 16x64x512 split-K 4")
    check(c, *weights(c, 4, 64, "int32"), BF16, bias=jnp.linspace(-1, 1, 33))


STORED = {  # as schemes and users store weights, of (3, 3, 128, 10)
    "merged": lambda kernel: W4A16(64, symmetric=False).quantize_weight(kernel, (0, 1, 2)),
    "a scale for each channel": lambda kernel: W8A16(None).quantize_weight(kernel, (0, 1, 2)),
    "shared by the taps": lambda kernel: QArray(
        jnp.round(kernel.transpose(3, 0, 1, 2)).astype(jnp.int8), jnp.full((10, 1, 1, 4), 0.5)
    ).transpose(1, 2, 3, 0),
    "of each tap, packed": lambda kernel: (
        QArray(jnp.round(kernel.transpose(3, 0, 1, 2)).astype(jnp.int4), jnp.full((10, 3, 3, 2), 0.25))
        .pack()
        .transpose(1, 2, 3, 0)
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_weights_as_they_are_stored(all_kernels, kind):
    c = case((5, 6), (3, 3), padding=SAME, channels=128, out=10)
    w = STORED[kind](jnp.asarray(2 * np.random.default_rng(3).standard_normal((3, 3, 128, 10)), F32))
    dense = np.asarray(w.dequantize(), np.float64)
    all_kernels.restrict_block_scaled_mm("windows")
    numbers = dict(dimension_numbers=("NXYC", "XYIO", "NXYC"))
    x = np.random.default_rng(1).standard_normal(c.lhs_shape()).astype(BF16)
    options = c.keywords() | numbers | dict(scheme=None if w.qtype == jnp.int4 else W8A16())
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **options, out_dtype=F32)
    row = jax_qmm.explain(f, x, w).rows[-1]
    assert "windows" in row.runs_on and ("packed at each call" in row.runs_on) == ("shared" in kind), row.runs_on
    got = np.float64(jax.jit(f)(x, w))
    dense = dense.transpose(3, 0, 1, 2)
    total = conv_oracle.sums(c, np.abs(np.float64(x)), np.abs(dense))
    # One rounding more: dequantize() gives float32.
    assert np.all(np.abs(got - conv_oracle.sums(c, np.float64(x), dense)) <= (dense[0].size + 17) * 2.0**-23 * total)


@pytest.mark.parametrize("where", ["jit", "vmap", "grad"])
def test_transforms(all_kernels, on_reference, where):
    c = case((5, 4), (3, 3), padding=SAME, channels=32, out=12)
    w, dense, _ = weights(c, 4, 32, "none")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, *c.lhs_shape())), BF16)
    f = lambda x: jax_qmm.conv_general_dilated(x, w, **c.keywords(), activation="relu", out_dtype=F32)
    if where == "grad":
        g = jax.grad(lambda x: jnp.sum(f(x) ** 2))
        run = lambda x: g(x[0])
    else:
        run = jax.vmap(f) if where == "vmap" else lambda x: f(x[0])
    all_kernels.restrict_block_scaled_mm("windows")
    got = np.float64(jax.jit(run)(x))
    want = np.float64(on_reference(run, x))
    assert got.shape == want.shape
    # The reference's weights are those of bfloat16; so are gradients.
    assert np.all(np.abs(got - want) <= 2.0**-6 * np.abs(want).max())


def test_xla_fuses_what_follows_its_convolution(emulated, monkeypatch):
    monkeypatch.setattr(_extension, "dequantizes_once", lambda devices, problem: True)
    size, channels = (5, 16) if emulated else (64, 64)
    c = case((size, size), (3, 3), padding=SAME, channels=channels, out=channels)
    w, dense, _ = weights(c, 4, 32, "none")
    x = np.random.default_rng(1).standard_normal(c.lhs_shape()).astype(BF16)
    bias = np.linspace(-3, 3, channels).astype(BF16)
    epilogue = dict(bias=bias, activation="relu", out_dtype=BF16)
    f = jax.jit(lambda x: jax_qmm.conv_general_dilated(x, w, **c.keywords(), **epilogue))
    sums, total = (conv_oracle.sums(c, absolute(np.float64(x)), absolute(dense)) for absolute in (np.array, np.abs))
    # Of weights, and of sums in case that it does not.
    error = ((dense[0].size + 16) * 2.0**-23 + 1.016 * UNIT[BF16]) * total + 1.016 * UNIT[BF16] * np.abs(sums)
    y = np.maximum(sums + np.float64(bias), 0)
    assert np.all(np.abs(np.float64(f(x)) - y) <= error + UNIT[BF16] * (y + error))
    assert emulated or " fusion(" not in f.lower(x).compile().as_text()


def test_explain_says_what_kernels_do_not_take():
    def runs_on(c, dtype=BF16):
        f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **c.keywords())
        return jax_qmm.explain(f, np.ones(c.lhs_shape(), dtype), weights(c, 4, 32, "none")[0]).rows[-1].runs_on

    assert "channels in multiples of 8" in runs_on(case((5, 5), (3, 3), channels=12, out=4))
    assert "float32, which kernels do not take" in runs_on(case((5, 5), (3, 3), channels=16, out=4), F32)
    assert "predicted to be faster" in runs_on(case((99, 99), (3, 3), channels=64, out=256, images=8))
    assert "XLA: weights dequantized" in runs_on(case((5, 5), (3, 3), lhs_dilation=(2, 2), channels=16, out=4))


I32 = np.int32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(taps=np.array([1, 0, 1], I32)), "taps needs 3 values of at least 1"),
        (dict(taps=np.array([1, 3, 2], I32)), "w has shape"),
        (dict(strides=np.array([1, 0, 1], I32)), "strides needs 3 values of at least 1"),
        (dict(bits=I32(3)), "bits is 3; it needs to be 4 or 8"),
        (dict(lhs=(2, 1, 5, 5, 12)), "it needs a multiple of 8 channels"),
        (dict(names="bias zero_point"), "names has more names than there are vectors"),
    ],
)
def test_bad_operands(wrong, message):
    _extension._load()
    lhs = jnp.zeros(wrong.pop("lhs", (2, 1, 5, 5, 16)), jnp.bfloat16)
    ones = np.ones(3, I32)
    attributes = dict(taps=np.array([1, 3, 3], I32), strides=ones, before=0 * ones, dilation=ones, bits=I32(8))
    attributes |= dict(block=I32(144), names="bias", activation="none", low=F32(0), high=F32(0)) | wrong
    call = jax.ffi.ffi_call("jax_qmm_weight_only_conv", jax.ShapeDtypeStruct((2, 1, 3, 3, 8), jnp.float32))
    with pytest.raises(Exception, match=message):
        np.asarray(call(lhs, jnp.zeros((1, 8, 256), jnp.uint8), jnp.ones((1, 8, 1)), jnp.ones((1, 8)), **attributes))
