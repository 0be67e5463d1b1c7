"""Which kernels serve a convolution on an H200, as the extension says without one."""

import pytest

CASE = dict(
    batch=1,
    images=8,
    channels=64,
    n=64,
    groups=1,
    image=(1, 56, 56),
    taps=(1, 3, 3),
    pixels=(1, 56, 56),
    strides=(1, 1, 1),
    before=(0, 1, 1),
    dilation=(1, 1, 1),
    out_dtype="int8",
    zero_points=False,
)


@pytest.fixture
def served_by(extension, h200):
    """Words of all kernels that serve CASE with these changes, and those of the chosen one."""

    def choices(**changes):
        problem = extension.ConvProblem(**CASE | changes)
        return problem.choices(h200), problem.select(h200)

    return choices


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        (dict(), True),
        (dict(channels=20), False),
        (dict(strides=(1, 8, 8), pixels=(1, 7, 7)), True),
        (dict(strides=(1, 9, 9), pixels=(1, 6, 6)), False),
        (dict(image=(3, 56, 56), pixels=(3, 56, 56)), False),
        (dict(taps=(1, 1, 256), pixels=(1, 56, 256), image=(1, 56, 256), before=(0, 0, 127)), True),
        (dict(taps=(1, 1, 257), pixels=(1, 56, 255), image=(1, 56, 256), before=(0, 0, 127)), False),
        (dict(before=(0, 128, 1), pixels=(1, 56, 56)), True),
        (dict(before=(0, 129, 1), pixels=(1, 56, 56)), False),
        (dict(before=(0, -127, 1), image=(1, 300, 56), pixels=(1, 120, 56)), True),
        (dict(before=(0, 1, 1), image=(1, 56, 56), pixels=(1, 185, 56)), False),
    ],
    ids=str,
)
def test_what_im2col_serves(served_by, changes, fits):
    """Windows within 128 pixels of the image's borders, strides up to 8, taps up to 255 apart, whole 16 bytes."""
    words, _ = served_by(**changes)
    assert any("sm90 wgmma" in each for each in words) == fits
    assert any("sm80 implicit GEMM" in each for each in words)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        (dict(), True),
        (dict(zero_points=True), False),
        (dict(out_dtype="bfloat16"), False),
        (dict(n=72), False),
        (dict(groups=2), False),
        (dict(batch=2), False),
        (dict(channels=256), True),
        (dict(channels=512), False),
        (dict(residual="int8"), True),
        (dict(residual="bfloat16"), False),
    ],
    ids=str,
)
def test_which_weights_are_resident(served_by, changes, fits):
    """Those that leave shared memory for some stages; with 8-bit results and residuals, and without zero points."""
    words, _ = served_by(**changes)
    assert any("resident" in each for each in words) == fits


FIRST_LAYER = dict(channels=4, image=(1, 224, 224), taps=(1, 7, 7), strides=(1, 2, 2), before=(0, 3, 3))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        (dict(), [224]),
        (dict(zero_points=True, out_dtype="bfloat16", batch=2, n=63), [224]),
        (dict(taps=(1, 3, 3)), [64, 128, 224]),
        (dict(taps=(1, 3, 3), channels=24, strides=(1, 1, 1)), [224]),
        (dict(taps=(1, 3, 3), channels=28), []),
        (dict(taps=(1, 3, 3), channels=4, groups=2), []),
        (dict(taps=(1, 3, 3), strides=(1, 5, 5)), []),
        (dict(taps=(2, 3, 3)), []),
        (dict(residual="int8"), []),
    ],
    ids=str,
)
def test_which_windows_are_short(served_by, changes, sizes):
    """Those of so many bytes at most, whose tiles have parts of images that fit into shared memory."""
    words, chosen = served_by(**FIRST_LAYER | dict(pixels=(1, 112, 112)) | changes)
    assert [each for each in words if "windows of" in each] == [f"sm80 windows of {size} bytes int8" for size in sizes]
    assert (chosen == f"sm80 windows of {min(sizes, default=0)} bytes int8") == bool(sizes)


def test_k_is_split_over_no_more_parts_than_it_has_steps(served_by):
    words, _ = served_by(taps=(1, 1, 3), pixels=(1, 58, 56), image=(1, 56, 56), before=(0, 1, 1))
    assert any("split-K 2" in each for each in words) and not any("split-K 4" in each for each in words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(), "depthwise 3x3"),
        (dict(dilation=(1, 2, 2)), "depthwise 16 channels"),
        (dict(dilation=(1, 2, 2), n=20, groups=20), "depthwise 4 channels"),
    ],
    ids=str,
)
def test_depthwise(served_by, changes, words):
    _, chosen = served_by(**dict(channels=1, n=64, groups=64) | changes)
    assert chosen == f"sm80 {words} int8"
