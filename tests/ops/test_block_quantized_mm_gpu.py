"""The kernels of block_scaled_mm for two QArrays: int8 bit for bit as the reference, each tile in turn; fp8 within the
rounding of its sums.

Tensor cores keep at least 13 bits below the largest of the up to 32 products that they add at once, and of a block they
do so at most 8 times: with S the sum of |a| |b| |scales| over K, the sums of fp8 are off by less than 2^-10 S.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_qmm
from jax_qmm import QArray, _extension

pytestmark = pytest.mark.gpu

F32, BF16, F16, F8 = np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
TILES = ("multistage 16x64x", "multistage 64x64x", "multistage 128x128x")
WGMMA = ("16x64x128", "32x64x128", "64x64x128", "128x128x128 persistent")
FEW_ROWS = ("8x16x512", "8x16x1024", "8x32x1024", "8x32x2048", "16x32x1024")


def qarray(rows, k, block, zero_point=None, dtype=np.int8, seed=0):
    rng = np.random.default_rng(seed)
    shape, groups = (*rows, k), (*rows, -(-k // block))
    q = rng.integers(-128, 128, shape).astype(np.int8) if dtype == np.int8 else rng.normal(0, 50, shape).astype(dtype)
    scale = (rng.uniform(0.001, 0.02, groups) * rng.choice([-1, 1], groups)).astype(F32)
    z = None
    if zero_point == "int":
        z = jnp.asarray(rng.integers(-128, 128, groups).astype(np.int32))
    elif zero_point is not None:
        z = jnp.asarray((100 * rng.normal(size=groups)).astype(zero_point))
    return QArray(jnp.asarray(q), jnp.asarray(scale), z, tile_size=block)


@pytest.fixture(params=TILES)
def tile(request, only):
    """Has every product take a kernel of this tile."""
    return only(request.param)


@pytest.fixture(params=[f"wgmma {tile}" for tile in WGMMA] + [f"few rows {tile}" for tile in FEW_ROWS])
def aligned(request, gpu):
    """The words of a kernel for rows of whole 16 bytes and blocks of 64 columns and more."""
    if request.param.startswith("wgmma"):
        request.getfixturevalue("has_wgmma")
    if request.param == "few rows 8x32x2048" and gpu.shared_memory < 107 << 10:
        pytest.skip("with zero points it needs more shared memory than the GPU has")
    return request.param


def whole(words, n):
    """So many rows of b, or a few more, so that TMA can write the results."""
    return n + -n % 8 if "persistent" in words else n


@pytest.fixture
def only(extension):
    """Has every product take a kernel whose words have what this is called with."""
    yield lambda words: extension.restrict_block_quantized_mm(words) or words
    extension.restrict_block_quantized_mm("")


def check(on_reference, words, x, w, bias=None, **options):
    f = functools.partial(jax_qmm.block_scaled_mm, **options)
    (row,) = jax_qmm.explain(f, x, w, bias).rows
    assert words in row.runs_on, row.runs_on
    got, want = jax.jit(f)(x, w, bias), on_reference(f, x, w, bias)
    np.testing.assert_array_equal(jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("zero_a, zero_b", [(None, None), ("int", None), (None, "int"), ("int", F32)])
def test_blocks_and_zero_points(on_reference, tile, block, zero_a, zero_b):
    """Of the last blocks only a part is there, in the middle of a stage or of its first half."""
    for k in (block * 2 + 16, 304):
        check(on_reference, tile, qarray((19,), k, block, zero_a), qarray((70,), k, block, zero_b, seed=1))


# K is a multiple of 16 and ends within a stage. There are four blocks whose terms wgmma kernels load at once, and
# others; more stages than there is room for; and more blocks than kernels for few rows scale at once.


@pytest.mark.parametrize(
    "m, n, k, block", [(1, 8, 128, 128), (19, 70, 304, 64), (60, 65, 640, 256), (35, 9, 1424, 128), (5, 33, 4176, 64)]
)
def test_rows_of_whole_sixteens(on_reference, only, aligned, m, n, k, block):
    n = whole(aligned, n)
    check(on_reference, only(f"{aligned} int8"), qarray((m,), k, block), qarray((n,), k, block, seed=1))


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("wgmma", WGMMA)
def test_several_tiles_of_wgmma(on_reference, only, wgmma):
    check(on_reference, only(f"wgmma {wgmma} int8"), qarray((195,), 1168, 64), qarray((260,), 1168, 64, seed=1))


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("zero_a, zero_b", [(None, None), ("int", None), ("int", "int")])
@pytest.mark.parametrize("k, block", [(208, 64), (1040, 128), (1808, 256)])
def test_blocks_that_stay(on_reference, only, k, block, zero_a, zero_b):
    """A GPU of few SMs has several tiles for each, with odd and even numbers of blocks, and slots that end early."""
    x, w = qarray((2, 260), k, block, zero_a), qarray((2, 520), k, block, zero_b, seed=1)
    bias = jnp.linspace(-1, 1, 520)
    for out_dtype, activation in ((BF16, None), (F16, "relu"), (F32, (-0.5, 0.25))):
        f = functools.partial(jax_qmm.block_scaled_mm, bias=bias, activation=activation, out_dtype=out_dtype)
        only("128x128x128 persistent int8")
        f = jax.vmap(lambda x, w, f=f: f(x, w))
        np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x, w)), jax.device_get(on_reference(f, x, w)))


@pytest.mark.usefixtures("has_wgmma")
def test_more_tiles_than_sms(on_reference, only, gpu):
    """On any GPU blocks have several tiles, which are more than one band of them."""
    n = 128 * max(gpu.sm_count, 16) + 264
    check(on_reference, only("persistent int8"), qarray((130,), 272, 64, "int"), qarray((n,), 272, 64, seed=1))
    x = qarray((300,), 272, 128, dtype=F8)
    check_float8(only("persistent float8_e4m3fn scaled"), x, qarray((n,), 272, 128, dtype=F8, seed=1))
    w = sharing(n // 128 * 128, 272, 128, F8)
    check_float8(only("cluster 2 persistent float8_e4m3fn of 128 rows"), x, w)


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("zero_a, zero_b", [("int", None), (None, "int"), ("int", F32)])
def test_zero_points_of_whole_sixteens(on_reference, only, aligned, block, zero_a, zero_b):
    for k in (4 * block - 16, 304):
        check(
            on_reference,
            only(f"{aligned} int8"),
            qarray((19,), k, block, zero_a),
            qarray((whole(aligned, 70),), k, block, zero_b, seed=1),
        )


def test_batches_bias_and_activation_of_whole_sixteens(on_reference, only, aligned):
    bias = jnp.linspace(-1, 1, 40)
    for x, w, out_dtype in (((3, 5), (40,), BF16), ((5,), (3, 40), F32), ((3, 5), (3, 40), F16)):
        x, w = qarray(x, 272, 128), qarray(w, 272, 128, seed=1)
        product = functools.partial(jax_qmm.block_scaled_mm, bias=bias, activation="relu", out_dtype=out_dtype)
        f = jax.vmap(lambda x, w, product=product: product(x, w), [0 if len(q.shape) == 3 else None for q in (x, w)])
        only(f"{aligned} int8")
        np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x, w)), jax.device_get(on_reference(f, x, w)))


@pytest.mark.parametrize("block", [64, 128, 256])
def test_float8_of_whole_sixteens(only, aligned, block):
    n = whole(aligned, 70)
    check_float8(
        only(f"{aligned} float8"), qarray((19,), 784, block, dtype=F8), qarray((n,), 784, block, dtype=F8, seed=1)
    )


@pytest.mark.parametrize("zero_a, zero_b", [(None, None), ("int", F32)])
@pytest.mark.parametrize("m, n, k", [(1, 8, 32), (9, 70, 304), (5, 33, 1168)])
def test_few_rows_in_blocks_of_32(on_reference, only, m, n, k, zero_a, zero_b):
    x, w = qarray((m,), k, 32, zero_a), qarray((n,), k, 32, zero_b, seed=1)
    check(on_reference, only("few rows 8x32x1024 int8 scaled each 32"), x, w)
    if zero_a is None:
        x, w = qarray((m,), k, 32, dtype=F8), qarray((n,), k, 32, dtype=F8, seed=1)
        check_float8(only("few rows 8x32x1024 float8_e4m3fn scaled each 32"), x, w)


def sharing(n, k, block, dtype, seed=1):
    """With a scale for 128 rows."""
    few = qarray((n // 128,), k, block, dtype=dtype, seed=seed + 1)
    return QArray(qarray((n,), k, block, dtype=dtype, seed=seed).qvalue, few.scale, tile_size=block)


@pytest.mark.parametrize("block", [32, 128])
def test_rows_of_w_that_share_scales(on_reference, tile, block):
    check(on_reference, tile, qarray((19,), 304, block), sharing(256, 304, block, np.int8))


def test_rows_of_w_that_share_scales_of_whole_sixteens(on_reference, only, aligned):
    check(on_reference, only(f"{aligned} int8"), qarray((19,), 304, 64), sharing(256, 304, 64, np.int8))


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("words", ["persistent float8_e4m3fn", "cluster 2 persistent float8_e4m3fn"])
@pytest.mark.parametrize("m, n, k", [(129, 128, 128), (200, 128, 1424), (300, 256, 656), (700, 384, 272)])
def test_wgmma_with_one_scale_of_b(only, words, m, n, k):
    """There are four blocks whose terms are loaded at once, and others; more stages than there is room for; and tiles
    that a cluster has no second one for."""
    check_float8(only(f"128x128x128 {words} of 128 rows"), qarray((m,), k, 128, dtype=F8), sharing(n, k, 128, F8))


@pytest.mark.usefixtures("has_wgmma")
def test_wgmma_with_one_scale_of_b_in_batches(only):
    only("of 128 rows")
    x, w = qarray((3, 5), 272, 128, dtype=F8), sharing(384, 272, 128, F8)
    each = QArray(w.qvalue.reshape(3, 128, 272), w.scale.reshape(3, 1, 3), tile_size=128)
    one = QArray(each.qvalue[0], each.scale[0], tile_size=128)
    check_float8("of 128 rows", x, each, jax.vmap(lambda x, w: jax_qmm.block_scaled_mm(x, w)))
    check_float8("of 128 rows", x, one)


@pytest.mark.usefixtures("has_wgmma")
def test_bias_activation_and_dtypes_with_one_scale_of_b(only):
    """As of the other kernel, whose sums are the same where they are exact."""
    small = lambda q: jnp.round(q.qvalue.astype(F32) / 64).astype(F8)  # integers
    x = QArray(small(qarray((70,), 128, 128, dtype=F8)), jnp.full((70, 1), 0.5))
    w = QArray(small(qarray((256,), 128, 128, dtype=F8, seed=1)), jnp.full((2, 1), 0.25))
    bias = jnp.linspace(-1, 1, 256)
    for out_dtype in (F32, BF16, F16):
        f = functools.partial(jax_qmm.block_scaled_mm, bias=bias, activation=(-7, 9), out_dtype=out_dtype)
        found = []
        for words in ("128x128x128 persistent float8_e4m3fn of 128 rows", "64x64x128 float8"):
            only(words)
            found.append(jax.device_get(jax.jit(lambda x, w, f=f: f(x, w))(x, w)))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 4), (16, 64, 64), (17, 65, 68), (130, 131, 260), (64, 63, 1000), (3, 129, 33), (5, 8, 2)]
)
def test_ragged_shapes(on_reference, tile, m, n, k):
    """K of any size, with rows that are aligned to 16, 8 and 4 bytes, and padded ones."""
    for block in (32, 128):
        check(on_reference, tile, qarray((m,), k, block, "int"), qarray((n,), k, block, "int", seed=1))


@pytest.mark.parametrize("block", [32, 256])
def test_extremes(tile, block):
    check_extremes(tile, block)


def test_extremes_of_whole_sixteens(only, aligned):
    check_extremes(only(f"{aligned} int8"), 256)


def check_extremes(words, block):
    """The largest sums of a block, of both signs, with the largest zero points."""
    for low_a, low_b in ((-128, -128), (-128, 127)):
        a = QArray(jnp.full((2, 2 * block), low_a, jnp.int8), jnp.ones((2, 2)), jnp.full((2, 2), -1 - low_a))
        b = QArray(jnp.full((4, 2 * block), low_b, jnp.int8), jnp.ones((4, 2)), jnp.full((4, 2), -1 - low_b))
        want = 2 * block * (2 * low_a + 1) * (2 * low_b + 1)
        (row,) = jax_qmm.explain(jax_qmm.block_scaled_mm, a, b).rows
        assert words in row.runs_on, row.runs_on
        assert (jax.jit(jax_qmm.block_scaled_mm)(a, b) == want).all()
        plain = [QArray(q.qvalue, q.scale) for q in (a, b)]
        assert (jax.jit(jax_qmm.block_scaled_mm)(*plain) == 2 * block * low_a * low_b).all()


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("activation", [None, "relu", (-0.5, 0.25)])
def test_bias_activation_and_dtypes(on_reference, tile, activation, out_dtype):
    bias = jnp.asarray(np.linspace(-1, 1, 72, dtype=F32).astype(out_dtype))
    x, w = qarray((2, 9), 192, 64, "int"), qarray((72,), 192, 64, seed=1)
    check(on_reference, tile, x, w, bias, activation=activation, out_dtype=out_dtype)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_batches(on_reference, axes):
    x = qarray((3, 5) if axes[0] == 0 else (5,), 136, 64, "int")
    w = qarray((3, 40) if axes[1] == 0 else (40,), 136, 64, "int", seed=1)
    f = jax.vmap(jax_qmm.block_scaled_mm, axes)
    np.testing.assert_array_equal(jax.device_get(jax.jit(f)(x, w)), jax.device_get(on_reference(f, x, w)))


@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize(
    "words", [*TILES, "few rows 8x32x1024", "few rows 16x32x1024", "wgmma 32x64x128", "wgmma 128x128x128 persistent"]
)
def test_specials_stay_in_their_row(only, words, special, request):
    if words.startswith("wgmma"):
        request.getfixturevalue("has_wgmma")
    only(words)
    x, w = qarray((20,), 160, 64), qarray((40,), 160, 64, seed=1)
    broken = QArray(x.qvalue, x.scale.at[4, 1].set(special), tile_size=64)
    got, clean = (np.asarray(jax.jit(jax_qmm.block_scaled_mm)(q, w)) for q in (broken, x))
    assert not np.isfinite(got[4]).any()
    np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("m, n, k", [(19, 70, 304), (5, 9, 100)])
def test_float8(tile, m, n, k, block):
    check_float8(tile, qarray((m,), k, block, dtype=F8), qarray((n,), k, block, dtype=F8, seed=1))


def check_float8(words, x, w, product=jax_qmm.block_scaled_mm):
    (row,) = jax_qmm.explain(product, x, w).rows
    assert words in row.runs_on, row.runs_on
    a, b = np.asarray(x.dequantize(), np.float64), np.asarray(w.dequantize(), np.float64).swapaxes(-1, -2)
    error = np.abs(np.asarray(jax.jit(product)(x, w)) - a @ b)
    assert (error <= 2.0**-10 * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("tile", WGMMA[:3])
@pytest.mark.parametrize("block, k", [(64, 1040), (128, 2064), (128, 3088), (256, 4112)])
def test_parts_of_k_of_float8(only, tile, block, k):
    """As many rows as the parts share, fewer, and more than a tile; the last part has fewer blocks, or more than others
    do."""
    words = only(f"wgmma {tile} split-K 2 float8")
    for m in (1, 17, 70):
        check_float8(words, qarray((m,), k, block, dtype=F8), qarray((72,), k, block, dtype=F8, seed=1))


@pytest.mark.usefixtures("has_wgmma")
def test_parts_of_k_of_float8_are_added_once(only):
    """Exactly: of integers, with batches, a bias, an activation and results of each width."""
    small = lambda *given, **more: jnp.round(qarray(*given, dtype=F8, **more).qvalue.astype(F32) / 64).astype(F8)
    x = QArray(small((3, 21), 2112, 128), jnp.full((3, 21, 17), 0.5), tile_size=128)
    w = QArray(small((200,), 2112, 128, seed=1), jnp.full((200, 17), 0.25), tile_size=128)
    bias = jnp.linspace(-1, 1, 200)
    y = 0.125 * np.asarray(x.qvalue, np.float64) @ np.asarray(w.qvalue, np.float64).T + np.asarray(bias, np.float64)
    for out_dtype in (F32, BF16):
        only("wgmma 16x64x128 split-K 2 float8")
        f = functools.partial(jax_qmm.block_scaled_mm, bias=bias, activation=(-30, 40), out_dtype=out_dtype)
        got = jax.jit(jax.vmap(lambda x: f(x, w)))(x)  # noqa: B023
        np.testing.assert_array_equal(got, np.clip(F32(y), -30, 40).astype(out_dtype))


@pytest.mark.usefixtures("has_wgmma")
@pytest.mark.parametrize("shared", [1, 128])
@pytest.mark.parametrize(
    "parts, batch, m, n, k",
    [
        (2, (), 150, 128, 2064),
        (2, (2,), 40, 128, 1040),
        (3, (), 65, 256, 2560),
        (4, (), 150, 128, 2064),
        (4, (), 128, 128, 1680),
    ],
)
def test_persistent_blocks_that_share_k(only, parts, shared, batch, m, n, k):
    """Exactly: parts have as many slots of four blocks, or one more, and the last slot may end early."""
    only(f"128x128x128 persistent split-K {parts} float8_e4m3fn {'of 128 rows' if shared > 1 else 'scaled'}")
    n -= 56 if shared == 1 else 0
    groups, rng = -(-k // 128), np.random.default_rng(0)
    powers = lambda *shape: jnp.asarray(2.0 ** rng.integers(-3, 3, shape), F32)
    values = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), F8)
    x = QArray(values(*batch, m, k), powers(*batch, m, groups), tile_size=128)
    w = QArray(values(*batch, n, k), powers(*batch, n // shared, groups), tile_size=128)
    bias = jnp.arange(n) % 7 - 3.0
    y = np.asarray(x.dequantize(), np.float64) @ np.asarray(w.dequantize(), np.float64).swapaxes(-1, -2)
    for out_dtype in (F32, BF16):
        f = functools.partial(jax_qmm.block_scaled_mm, bias=bias, activation=(-900, 800), out_dtype=out_dtype)
        got = jax.jit(jax.vmap(f) if batch else f)(x, w)
        np.testing.assert_array_equal(got, np.clip(F32(y + np.asarray(bias)), -900, 800).astype(out_dtype))


def test_each_block_of_float8_has_its_own_scale(tile):
    """One column at a time, and exact."""
    k, block = 300, 64
    scale = 2.0 ** (np.arange(4 * 5).reshape(4, 5) % 23 - 11).astype(F32)
    x = QArray(jnp.eye(k, dtype=jnp.float8_e4m3fn), jnp.ones((k, 5)), tile_size=block)
    w = QArray(jnp.ones((4, k), jnp.float8_e4m3fn), jnp.asarray(scale), tile_size=block)
    got = np.asarray(jax.jit(jax_qmm.block_scaled_mm)(x, w))
    np.testing.assert_array_equal(got.T, np.repeat(scale, block, -1)[:, :k])


def test_empty(on_reference):
    for m, n, k in ((0, 5, 64), (3, 0, 64), (3, 5, 0)):
        x, w = (QArray(jnp.zeros((r, k), jnp.int8), jnp.ones((r, -(-k // 32)))) for r in (m, n))
        got = jax.jit(lambda x, w: jax_qmm.block_scaled_mm(x, w, jnp.ones(n)))(x, w)
        np.testing.assert_array_equal(got, np.ones((m, n)) if k == 0 else np.zeros((m, n)))


def test_what_the_kernels_do_not_serve():
    x = QArray(jnp.zeros((2, 96), jnp.int8), jnp.ones((2, 4)), tile_size=24)
    (row,) = jax_qmm.explain(jax_qmm.block_scaled_mm, x, x).rows
    assert "blocks have 24 columns; kernels serve 32, 64, 128, 256" in row.runs_on
    x = QArray(jnp.zeros((2, 66), jnp.int8), jnp.ones((2, 3)), tile_size=32)
    (row,) = jax_qmm.explain(jax_qmm.block_scaled_mm, x, x).rows
    assert row.runs_on.endswith("K padded to 80 at each call")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(block=np.int32(48)), "block is 48; it needs to be 32, 64, 128 or 256"),
        (dict(block=np.int32(32)), "scale_a has shape"),
        (dict(names="scale_a scale_b bias zero_point_b"), "names has more names than there are vectors"),
        (dict(names="scale_a"), "scale_b is missing"),
        (dict(names="scale_b"), "scale_a is missing"),
        (dict(activation="tanh"), "activation is"),
    ],
)
def test_bad_operands(wrong, message):
    _extension._load()
    a, scale = jnp.zeros((1, 3, 128), jnp.int8), jnp.ones((1, 3, 2))
    attributes = dict(block=np.int32(64), names="scale_a scale_b", activation="none") | wrong
    attributes |= dict(low=F32(0), high=F32(0))
    vectors = [scale] * attributes["names"].count("scale") + [jnp.ones((1, 3))] * ("bias" in attributes["names"])
    call = jax.ffi.ffi_call("jax_qmm_block_quantized_mm", jax.ShapeDtypeStruct((1, 3, 3), jnp.float32))
    with pytest.raises(Exception, match=message):
        np.asarray(call(a, a, *vectors, **attributes))
