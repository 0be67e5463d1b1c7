"""Hopper's kernels of block_scaled_mm, each in turn, within the errors that `weights_oracle` allows."""

import jax.numpy as jnp
import numpy as np
import pytest
from weights_oracle import BF16, BITS, F8, F16, F32, UNIT, allowed, call, dequantized, operands, pack

from jax_qmm import _extension

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("has_wgmma", "all_kernels")]

of_x_and_w = pytest.mark.parametrize(
    "dtype, bits", [*((dtype, bits) for dtype in (BF16, F16) for bits in BITS), (F8, 4)]
)


def check_each(extension, x, q, scale, zero_point, *, bits, block, out_dtype=F32, bias=None, named="wgmma"):
    """Every kernel with wgmma, or so named, each way of splitting K."""
    m, n, k = x.shape[1], q.shape[1], x.shape[2]
    dtypes = [jnp.dtype(dtype).name for dtype in (x.dtype, out_dtype)]
    problem = (m, n, k, max(len(x), len(q)), *dtypes, bits, block, None if zero_point is None else "int8")
    y, error = allowed(x, q, scale, zero_point, block, out_dtype)
    size = np.abs(x.astype("d"))
    total = size @ np.abs(dequantized(q, scale, zero_point, block)).swapaxes(-1, -2)
    rounding = 1.016 * UNIT[BF16] * total + 2.0**-134 * size.sum(-1, keepdims=True)
    extension.restrict_block_scaled_mm(named)
    every = dict(extension.BlockScaledMmProblem(*problem).choices(_extension.gpu()))
    every = {words: workspace for words, workspace in every.items() if "wgmma" in words}
    for words, workspace in every.items():
        extension.restrict_block_scaled_mm(words)
        kwargs = dict(bits=bits, block=block, out_dtype=out_dtype, workspace=workspace)
        out = call(x, pack(q, bits), scale, zero_point, bias, **kwargs).astype("d")
        more = rounding if "weights scaled" in words else 0
        want, rounds = y, 0
        if bias is not None:
            want, rounds = y + bias[:, None].astype("d"), 2.0**-23 + UNIT[out_dtype]
        np.testing.assert_array_less(np.abs(out - want), error + more + rounds * np.abs(want), words)
    return list(every)


@of_x_and_w
@pytest.mark.parametrize(
    ("m", "n", "k", "block", "zero_point"),
    [
        (1, 129, 520, 256, "int8"),
        (16, 260, 1160, 128, "none"),
        (49, 37, 328, 128, "int8"),
        (64, 130, 64, 64, "none"),
        (128, 16, 8, 64, "int8"),
        (130, 140, 1416, 320, "none"),  # more than one band of tiles of 8 rows
        (65, 5, 456, 456, "int8"),
    ],
)
def test_shapes_and_blocks(m, n, k, block, zero_point, dtype, bits, extension):
    if dtype == F8:  # rows of 16 bytes
        k, block = k + k % 16, block + block % 16
    every = check_each(extension, *operands(m, m, n, k, dtype, bits, block, zero_point), bits=bits, block=block)
    assert every or (dtype == F16 and block % 128) or (dtype == F8 and block % 64)  # none scales weights


@of_x_and_w
def test_each_column_is_multiplied_by_its_own_scale(dtype, bits, extension):
    for k, block in ((336, 64), (656, 128)):
        q = np.ones((1, 4, k), int)
        scale = 2.0 ** (np.arange(4 * 6).reshape(1, 4, 6) % 23 - 11).astype(F32)
        if dtype == F16 and block == 64:  # none
            continue
        few = () if block == 64 or dtype == F8 else ("wgmma 8x", "wgmma 32x")
        for words in (*few, "wgmma 64x", "wgmma 128x", *(["wgmma 256x"] if dtype == BF16 else [])):
            extension.restrict_block_scaled_mm(words)
            out = call(np.eye(k).astype(dtype)[None], pack(q, bits), scale, bits=bits, block=block)
            np.testing.assert_array_equal(out[0].T, np.repeat(scale[0], block, -1)[:, :k])


@of_x_and_w
def test_huge_x_and_specials(dtype, bits, extension):
    x, q, scale, zero_point = operands(24, 70, 40, 336, dtype, bits, 128, "int8")
    x[0, 1, 7] = {F16: 65504, BF16: 3.0e38, F8: 448}[dtype]
    for every in check_each(extension, x, q, (scale * 0.1).astype(F32), zero_point, bits=bits, block=128):
        extension.restrict_block_scaled_mm(every)
        bad = x.copy()
        bad[0, 1, 7] = np.nan
        out = call(bad, pack(q, bits), scale, zero_point, bits=bits, block=128)
        assert np.isnan(out[0, 1]).all() and np.isfinite(np.delete(out, 1, 1)).all()


def test_every_weight_and_zero_point_in_float8(extension):
    """Each by all that float8 has, in every column of a word and of its part: exactly."""
    x = np.arange(256, dtype=np.uint8).view(F8)
    x = np.where(np.isfinite(x.astype(F32)), x, 0).astype(F8)
    q, zero = (each.reshape(-1) for each in np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)))
    extension.restrict_block_scaled_mm("by float8")
    for column in (0, 7, 37, 58, 91, 110, 127):
        one = np.zeros((1, 256, 128), F8)
        one[0, :, column] = x
        weights, scale = np.zeros((1, 256, 128), int), np.ones((1, 256, 1), F32)
        weights[0, :, column] = q
        out = call(one, pack(weights, 4), scale, zero.astype(np.int8)[None, :, None], bits=4, block=128)
        np.testing.assert_array_equal(out[0], np.outer(x.astype(F32), q - zero))


def test_dtypes_of_scales_and_extremes(extension):
    for scale_dtype, factor in ((BF16, 1), (F16, 1), (F32, 2.0**-125), (F32, 2.0**100)):
        for dtype in (BF16, F8):
            x, q, scale, zero_point = operands(27, 5, 40, 336, dtype, 4, 128, "int8", scale_dtype)
            check_each(extension, x, q, (scale * scale_dtype(factor)), zero_point, bits=4, block=128)


@of_x_and_w
@pytest.mark.parametrize(
    ("m", "n", "k", "block", "batch", "out_dtype"),
    [
        (300, 136, 1416, 64, (1, 1), BF16),  # many blocks share a tile
        (257, 264, 392, 128, (2, 1), F16),
        (64, 520, 1288, 320, (1, 3), BF16),
        (48, 72, 4232, 384, (1, 1), BF16),  # more than two blocks share a tile
        (40, 8, 8, 64, (1, 1), BF16),  # one step
        (19, 136, 1416, 32, (2, 1), F16),  # several terms for a step
        (50, 264, 392, 96, (1, 1), BF16),
        (130, None, 264, 128, (1, 1), BF16),  # each block has several tiles
    ],
)
def test_blocks_stay_and_share_tiles(m, n, k, block, batch, out_dtype, bits, dtype, extension):
    n = n or 128 * _extension.gpu().sm_count + 264
    k += k % 16 if dtype == F8 else 0  # rows of 16 bytes
    x, q, scale, zero_point = operands(m, m, n, k, dtype, bits, block, "int8", batch=batch)
    bias = np.linspace(-1, 1, n, dtype=F32)[None]
    kwargs = dict(bits=bits, block=block, out_dtype=out_dtype, bias=bias)
    for named in ("persistent", "stream-K"):
        every = check_each(extension, x, q, scale, zero_point, named=named, **kwargs)
        assert every or (bits == 8 and block % (128 if dtype == F16 else 64))  # none scales weights


def restrict_to_each_that_stays(extension, *problem):
    choices = extension.BlockScaledMmProblem(*problem).choices(_extension.gpu())
    staying = [choice for choice in choices if "persistent" in choice[0] or "stream-K" in choice[0]]
    assert staying
    for words, workspace in staying:
        extension.restrict_block_scaled_mm(words)
        yield workspace


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_curves_of_persistent_blocks(activation, extension, oracle):
    x, q, scale, zero_point = operands(30, 140, 40, 904, BF16, 4, 64, "int8")
    kwargs = dict(bits=4, block=64, out_dtype=BF16)
    for workspace in restrict_to_each_that_stays(extension, 140, 40, 904, 1, "bfloat16", "bfloat16", 4, 64, "int8"):
        plain, out = (
            call(x, pack(q, 4), scale, zero_point, **kwargs, activation=name, workspace=workspace)
            for name in ("none", activation)
        )
        y = plain.astype(F32)
        expected = oracle.activated(y.astype("d"), activation).astype("d")
        # The activation has what was not rounded yet; its slope is at most 1.13.
        bound = (1.13 * UNIT[BF16] + 2.0**-20) * np.abs(y) + UNIT[BF16] * np.abs(expected)
        assert np.all(np.abs(out.astype("d") - expected) <= bound)


@pytest.mark.parametrize("dtype, out_dtype", [(BF16, BF16), (BF16, F16), (F16, F16), (F8, BF16)])
def test_bounds_of_persistent_blocks(dtype, out_dtype, extension):
    x, q, scale, zero_point = operands(30, 140, 40, 912, dtype, 4, 128, "int8")
    x[0, 3], x[0, 4, 60] = 0, np.nan
    kwargs = dict(bits=4, block=128, out_dtype=out_dtype)
    names = [jnp.dtype(each).name for each in (dtype, out_dtype)]
    for workspace in restrict_to_each_that_stays(extension, 140, 40, 912, 1, *names, 4, 128, "int8"):
        both = dict(kwargs, workspace=workspace)
        plain = call(x, pack(q, 4), scale, zero_point, **both).astype(F32)
        assert np.isnan(plain[0, 4]).all()
        for low, high in ((0, np.inf), (0, 6), (-0.3, 0.7), (-np.inf, -1e-3)):
            out = call(x, pack(q, 4), scale, zero_point, **both, activation="clamp", low=low, high=high)
            # Rounding keeps order, so that it makes no difference whether it comes first.
            bounds = np.array([low, high]).astype(out_dtype).astype(F32)
            np.testing.assert_array_equal(out.astype(F32), np.clip(plain, *bounds))


@pytest.mark.parametrize("batch", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("dtype, out_dtype", [(BF16, BF16), (BF16, F16), (F8, BF16)])
def test_batches_and_dtypes_of_the_result(dtype, out_dtype, batch, extension):
    x, q, scale, zero_point = operands(25, 66, 36, 144, dtype, 4, 128, "int8", batch=batch)
    bias = np.linspace(-1, 1, 36, dtype=F32)[None]
    check_each(extension, x, q, scale, zero_point, bits=4, block=128, out_dtype=out_dtype, bias=bias)


def test_results_do_not_change_from_run_to_run(extension):
    x, q, scale, zero_point = operands(26, 13, 135, 1416, BF16, 4, 128, "int8")
    for words, out_dtype in (("wgmma 8x128x128 split-K 4", F32), ("stream-K", BF16)):
        extension.restrict_block_scaled_mm(words)
        n = 135 if out_dtype == F32 else 128
        kwargs = dict(bits=4, block=128, out_dtype=out_dtype, workspace=1 << 24)
        of_n = [each[:, :n] for each in (pack(q, 4), scale, zero_point)]
        first, second = (call(x, *of_n, **kwargs) for _ in range(2))
        assert first.tobytes() == second.tobytes()
