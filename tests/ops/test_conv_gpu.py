"""The kernels for convolutions, each tile in turn: bit for bit as the reference, and as integers in numpy."""

import conv_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_calls import BF16, F8, F16, F32, SAME, check, id_of, of_gpu, operands, output_of, residual_of, shifted
from conv_oracle import case

import jax_qmm
from jax_qmm import QArray, _extension

pytestmark = pytest.mark.gpu

PORTABLE = tuple(f"sm80 implicit GEMM {tile} int8" for tile in ("64x64x64", "64x64x128", "128x64x64", "128x128x64"))
# Of Hopper: each swizzle, weights that two blocks share, and the widest tile; and those that split K over blocks.
HOPPER, IN_PARTS = (
    tuple(f"sm90 wgmma implicit GEMM {tile} int8" for tile in tiles)
    for tiles in (
        ("128x64x64", "128x64x128 cluster 2", "128x160x64 cluster 2", "128x256x128"),
        ("128x64x128 split-K 2", "128x64x128 split-K 4", "128x128x128 split-K 8"),
    )
)
RESIDENT = tuple(f"sm90 resident weights {tile} int8" for tile in ("64x64x64", "64x64x128"))

# Windows of every kind, with few values in a stage of K and more than one, and tiles that begin and end within images.
CASES = {
    "one axis": case((37,), (5,), (2,), ((3, 1),), channels=16, out=9, images=3),
    "two axes": case((7, 9), (3, 3), padding=SAME, channels=16, out=5, images=3),
    "three axes": case((4, 5, 6), (2, 3, 2), (1, 2, 1), ((1, 0), (0, 2), (1, 1)), (2, 1, 3), channels=32, out=8),
    "no axes": case((), (), channels=16, out=3, groups=2),
    "channels of several stages": case((5, 6), (3, 2), padding=SAME, channels=144, out=70, images=3),
    "asymmetric padding": case((8, 6), (3, 3), (2, 1), ((0, 3), (4, 1)), channels=16, out=66),
    "negative padding": case((12, 11), (3, 2), (1, 2), ((-2, 1), (-1, -3)), channels=32, out=17),
    "padding wider than the window": case((3, 2), (2, 2), (1, 1), ((5, 4), (4, 6)), channels=16, out=4),
    "dilation": case((11, 12), (3, 2), (1, 2), ((2, 2), (0, 3)), (3, 4), channels=16, out=12),
    "stride without taps": case((9, 8), (1, 1), (2, 3), channels=48, out=33, images=3),
    "image smaller than the window": case((2, 3), (5, 7), padding=((3, 3), (4, 3)), channels=16, out=2),
    "many pixels": case((19, 15), (3, 3), padding=SAME, channels=16, out=129, images=2),
    "copies of 8 bytes": case((6, 7), (3, 3), padding=SAME, channels=24, out=19),
    "copies of 4 bytes": case((6, 7), (3, 3), padding=SAME, channels=20, out=19),
    "3 channels": case((17, 15), (7, 7), (2, 2), ((3, 2), (2, 3)), channels=3, out=16),
    "6 channels": case((6, 7), (3, 3), padding=SAME, channels=6, out=7),
    "10 channels": case((6, 7), (3, 3), padding=SAME, channels=10, out=7),
    "groups": case((7, 6), (3, 3), padding=SAME, channels=16, out=72, groups=3),
    "groups of few channels": case((7, 6), (3, 3), padding=SAME, channels=4, out=3, groups=5),
    "groups of 3 channels": case((7, 6), (3, 3), padding=SAME, channels=3, out=5, groups=3, images=3),
    "groups of 9 channels": case((7, 6), (3, 2), padding=SAME, channels=9, out=2, groups=2),
    "6 channels, each a group": case((7, 6), (3, 2), (2, 1), padding=SAME, channels=1, out=1, groups=6),
    "two outputs of each channel": case((7, 6), (3, 2), (1, 2), padding=SAME, channels=1, out=2, groups=5),
}


@pytest.fixture(params=PORTABLE + HOPPER, ids=id_of)
def tile(request, extension):
    """Has every convolution take this kernel."""
    if "sm90" in request.param:
        request.getfixturevalue("has_wgmma")
    extension.restrict_conv(request.param)
    yield request.param
    extension.restrict_conv("")


def of_hopper(c):
    """Whether Hopper's kernels serve a case: up to two spatial axes, and channels in 16s."""
    return len(c.taps) <= 2 and c.channels % 16 == 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("zero_points", [(None, None), ("each", "each")], ids=["symmetric", "zero points"])
def test_sums(on_reference, tile, name, zero_points):
    c = CASES[name]
    if tile in HOPPER and not of_hopper(c):
        pytest.skip("TMA's im2col mode has no such windows")
    lhs, rhs = operands(c, *zero_points)
    got = check(on_reference, c, lhs, rhs, tile=tile, out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32))


@pytest.mark.parametrize("tile", IN_PARTS, indirect=True, ids=id_of)
@pytest.mark.parametrize("name", ["groups", "channels of several stages"])
def test_parts_of_k(on_reference, tile, name):
    """Blocks that have parts of K add up rows of each other's sums: as many as there are, more or fewer than parts."""
    c = CASES[name]
    lhs, rhs = operands(c, "each", "each")
    got = check(on_reference, c, lhs, rhs, tile=tile, out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32))


@pytest.mark.parametrize("tile", RESIDENT, indirect=True, ids=id_of)
@pytest.mark.parametrize(("out_dtype", "kind"), [(np.int8, None), (F8, None), (np.int8, "int8 with a zero point")])
@pytest.mark.parametrize(
    "c",
    [
        case((20, 26), (3, 3), padding=SAME, channels=16, out=272, images=-4),
        case((37,), (5,), (2,), ((3, 1),), channels=16, out=16, images=3),
        case((5, 6), (3, 2), padding=SAME, channels=144, out=80, images=3),
        case((8, 6), (3, 3), (2, 1), ((0, 3), (4, 1)), channels=16, out=64),
        case((11, 12), (3, 2), (1, 2), ((2, 2), (0, 3)), (3, 4), channels=80, out=16),
    ],
    ids=["several turns", "one axis", "channels of several steps", "asymmetric padding", "dilation"],
)
def test_resident_weights(on_reference, gpu, tile, c, out_dtype, kind):
    c = of_gpu(c, gpu)  # warpgroups take several tiles, and stages are loaded again
    lhs, rhs = operands(c)
    bias = jnp.asarray(np.linspace(-1, 1, c.out, dtype=F32))
    options = output_of(out_dtype) | dict(residual=residual_of(c, kind))
    check(on_reference, c, lhs, rhs, bias, tile=tile, activation="relu", **options)


def test_groups_of_few_channels_become_one(on_reference, tile):
    """16 at a time, which Hopper's kernels serve too, as they do not serve 4 channels."""
    c = case((7, 6), (3, 3), padding=SAME, channels=4, out=4, groups=32)
    lhs, rhs = operands(c, "each")
    got = check(on_reference, c, lhs, rhs, tile=tile, out_dtype=jnp.int32)
    np.testing.assert_array_equal(got, conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32))


@pytest.mark.parametrize("zero_l", [None, -128, 127, "each"])
@pytest.mark.parametrize("zero_r", [None, -128, 127, "each"])
@pytest.mark.parametrize("many", [False, True])
def test_scales_and_zero_points(on_reference, oracle, zero_l, zero_r, many):
    c = case((5, 6), (3, 2), (2, 1), ((1, 2), (1, 1)), channels=20, out=9, groups=2, images=3)
    lhs, rhs = operands(c, zero_l, zero_r, many, many)
    bias = jnp.asarray(np.linspace(-1, 1, 18, dtype=F32))
    got = check(on_reference, c, lhs, rhs, bias, out_dtype=F32)
    sums = conv_oracle.sums(c, shifted(lhs), shifted(rhs)).astype(np.int32)
    of_image = np.broadcast_to(np.asarray(lhs.scale)[..., 0], sums.shape[:-1])
    np.testing.assert_array_equal(got, oracle.epilogue(sums, of_image, np.asarray(rhs.scale).reshape(-1), bias))


@pytest.mark.parametrize("zero_point", [-128, 127])
@pytest.mark.parametrize("value", [-128, 127])
def test_extremes(on_reference, tile, value, zero_point):
    """The largest sums, of both signs; where the window reaches out of the image they are smaller."""
    c = case((6, 5), (3, 3), padding=SAME, channels=64, out=8)
    zero = jnp.full((1, 1, 1, 1), zero_point, jnp.int32)
    one = jnp.ones((1, 1, 1, 1))
    lhs, rhs = (QArray(jnp.full(shape, value, jnp.int8), one, zero) for shape in (c.lhs_shape(), c.rhs_shape()))
    got = check(on_reference, c, lhs, rhs, tile=tile, out_dtype=jnp.int32)
    of_tap = 64 * (value - zero_point) ** 2
    assert (got[:, 0, 0] == 4 * of_tap).all() and (got[:, 2, 2] == 9 * of_tap).all()


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16, np.int8, F8])
@pytest.mark.parametrize("out, activation", [(16, None), (19, None), (16, (-0.5, 0.25)), (19, "relu")])
def test_outputs(on_reference, tile, out, activation, out_dtype):
    """With rows of the output that begin at whole stores and others."""
    c = case((6, 5), (3, 3), padding=SAME, channels=32, out=out)
    lhs, rhs = operands(c, "each")
    bias = jnp.asarray(np.linspace(-1, 1, out, dtype=F32).astype(BF16))
    check(on_reference, c, lhs, rhs, bias, tile=tile, activation=activation, **output_of(out_dtype))


@pytest.mark.parametrize("out_dtype", [BF16, np.int8])
def test_groups_end_within_whole_stores(on_reference, tile, out_dtype):
    """Rows of the output are aligned to whole stores, and groups in them are not."""
    c = case((4, 5), (3, 3), padding=SAME, channels=16, out=12, groups=4)
    output = dict(out_scale=0.05) if out_dtype == np.int8 else {}
    check(on_reference, c, *operands(c), tile=tile, out_dtype=out_dtype, **output)


@pytest.mark.parametrize(
    ("kind", "out", "out_dtype"),
    [
        ("int8", 16, np.int8),
        ("int8 with a zero point", 19, np.int8),
        ("int8 with a zero point", 20, BF16),
        ("float32", 16, F32),
        ("bfloat16", 19, BF16),
        ("float16", 24, np.int8),
    ],
)
@pytest.mark.parametrize("taps", [1, 3])
def test_residuals(on_reference, tile, taps, kind, out, out_dtype):
    """Whose rows begin at whole loads and others; a window of one value is no product then."""
    c = case((6, 5), (taps, taps), padding=((taps // 2,) * 2,) * 2, channels=32, out=out)
    bias = jnp.asarray(np.linspace(-1, 1, out, dtype=F32))
    options = output_of(out_dtype) | dict(activation="relu", residual=residual_of(c, kind))
    check(on_reference, c, *operands(c, "each"), bias, tile=tile, **options)


def test_residuals_of_groups(on_reference, tile):
    """Rows of residual and output are aligned to whole loads and stores, and groups in them are not."""
    c = case((4, 5), (3, 3), padding=SAME, channels=16, out=12, groups=4)
    check(on_reference, c, *operands(c), tile=tile, out_dtype=BF16, residual=residual_of(c, "int8"))


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations_with_exponentials(oracle, activation):
    """Off by at most 2^-20 of the value, of which the kernel's exponential is less (scaled_mm/output.cuh)."""
    c = case((6, 5), (3, 3), padding=SAME, channels=16, out=8)
    lhs, rhs = operands(c)
    f = lambda **options: jax.jit(
        lambda lhs, rhs: jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords(), out_dtype=F32, **options)
    )(lhs, rhs)
    y = np.asarray(f())
    assert (np.abs(f(activation=activation) - oracle.activated(y, activation)) <= 2.0**-20 * np.abs(y)).all()


@pytest.mark.parametrize("numbers", [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("HWNC", "IHOW", "NHCW")])
def test_orders_of_axes(on_reference, numbers):
    c = case((6, 5), (3, 3), padding=SAME, channels=16, out=8)
    lhs, rhs = operands(c, "each", "each")
    in_order = lambda q, own, wanted: q.transpose([own.index(letter) for letter in wanted])
    lhs, rhs = in_order(lhs, "NHWC", numbers[0]), in_order(rhs, "OHWI", numbers[1])
    f = lambda lhs, rhs: jax_qmm.conv_general_dilated(lhs, rhs, (1, 2), "SAME", dimension_numbers=numbers)
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(lhs, rhs)), jax.device_get(on_reference(f, lhs, rhs)))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(
    "sizes", [dict(channels=16, out=7), dict(channels=16, out=7, groups=2), dict(channels=1, out=1, groups=16)], ids=str
)
def test_batches(on_reference, mapped, sizes):
    c = case((6, 5), (3, 3), padding=SAME, **sizes)
    several = [operands(c, "each", "each", seed=seed) for seed in range(3)]
    stack = lambda qs: jax.tree.map(lambda *leaves: jnp.stack(leaves), *qs)
    args = [stack(qs) if dim == 0 else qs[0] for qs, dim in zip(zip(*several), mapped)]
    f = jax.vmap(lambda lhs, rhs: jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords()), mapped)
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(*args)), jax.device_get(on_reference(f, *args)))


@pytest.mark.parametrize("mapped", [(0, None, None), (0, None, 0), (None, 0, 0)], ids=str)
def test_batches_with_residuals(on_reference, mapped):
    """Of which each entry has one, or all have the same."""
    c = case((6, 5), (3, 3), padding=SAME, channels=16, out=7)
    several = [(*operands(c, "each", seed=seed), residual_of(c, "int8", seed)) for seed in range(3)]
    stack = lambda qs: jax.tree.map(lambda *leaves: jnp.stack(leaves), *qs)
    args = [stack(qs) if dim == 0 else qs[0] for qs, dim in zip(zip(*several), mapped)]
    one = lambda lhs, rhs, residual: jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords(), residual=residual)
    f = jax.vmap(one, mapped)
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(*args)), jax.device_get(on_reference(f, *args)))


def test_groups_of_the_batch(on_reference):
    c = case((6, 5), (3, 3), padding=SAME, channels=16, out=8, images=4)
    f = lambda lhs, rhs: jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords(), batch_group_count=2)
    args = operands(c, "each", "each")
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(*args)), jax.device_get(on_reference(f, *args)))


def test_a_float_image_is_quantized_for_the_kernel(on_reference):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 6, 32)), BF16)
    scheme = jax_qmm.W8A8(symmetric=False)
    w = scheme.quantize_weight(jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 32, 12)), F32), (0, 1, 2))
    numbers = ("NHWC", "HWIO", "NHWC")
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=numbers, scheme=scheme)
    rows = jax_qmm.explain(f, x, w).rows
    assert "implicit GEMM" in rows[-1].runs_on
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x, w)), jax.device_get(on_reference(f, x, w)))


def test_empty(on_reference):
    for sizes in (dict(images=0), dict(out=0), dict(spatial=(0, 0)), dict(spatial=(1, 1), padding=((0, 0), (0, 0)))):
        c = case(**dict(spatial=(4, 4), taps=(2, 2), padding=SAME, channels=64) | sizes)
        check(on_reference, c, *operands(c, "each", "each", False, False), out_dtype=F32)


@pytest.mark.parametrize(
    ("c", "words"),
    [
        (case((5, 5), (3, 3), channels=3), "channels padded to 4 at each call"),
        (case((224, 224), (7, 7), (2, 2), ((3, 3), (3, 3)), channels=3, out=64), "windows of 224 bytes"),
        (case((5, 5), (3, 3), channels=18), "channels padded to 32 at each call"),
        (case((5, 5), (3, 3), channels=4, out=4, groups=32), "16 groups in one with zeros between them"),
        (case((5, 5), (3, 3), channels=1, out=1, groups=6), "6 groups in one with zeros between them"),
        (case((5, 5), (3, 3), channels=1, out=1, groups=6), "channels padded to 8 at each call"),
        (case((20, 20), (16, 17), channels=1, out=1, groups=8), "8 groups in one with zeros between them"),
        (case((5, 5), (3, 3), channels=9, out=40, groups=2), "channels padded to 16 at each call"),
        (case((5, 5), (3, 3), channels=16, lhs_dilation=(2, 1)), "reference: lhs is dilated"),
        (case((5,) * 4, (2,) * 4, channels=16), "reference: there are 4 spatial axes"),
        (case((5, 5), (3, 3), channels=0), "reference: the window has no values"),
    ],
)
def test_explain_says_what_is_padded_and_unserved(c, words):
    f = lambda lhs, rhs: jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords())
    (row,) = jax_qmm.explain(f, *operands(c)).rows
    assert words in row.runs_on


I32 = np.int32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(strides=np.array([1, 0, 1], I32)), "strides needs 3 values of at least 1"),
        (dict(dilation=np.array([1, 1], I32)), "dilation needs 3 values of at least 1"),
        (dict(groups=I32(3)), "groups is 3; it needs to divide"),
        (dict(groups=I32(2)), "lhs has shape"),
        (dict(names="bias zero_point_lhs"), "names has more names than there are vectors"),
        (dict(names="zero_point_lhs"), "zero_point_lhs has XLA's dtype"),
        (dict(activation="tanh"), "activation is"),
        (dict(names="residual"), "residual has"),
    ],
)
def test_bad_operands(wrong, message):
    _extension._load()
    lhs, rhs = jnp.zeros((1, 2, 1, 5, 5, 16), jnp.int8), jnp.zeros((1, 8, 1, 3, 3, 16), jnp.int8)
    ones = np.ones(3, I32)
    attributes = dict(strides=ones, before=0 * ones, dilation=ones, groups=I32(1), names="bias") | wrong
    attributes = dict(activation="none", low=F32(0), high=F32(0)) | attributes
    call = jax.ffi.ffi_call("jax_qmm_conv", jax.ShapeDtypeStruct((1, 2, 1, 3, 3, 8), jnp.float32))
    with pytest.raises(Exception, match=message):
        np.asarray(call(lhs, rhs, jnp.ones((1, 8)), **attributes))
