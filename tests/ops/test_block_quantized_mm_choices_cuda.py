"""Which kernel is chosen for products of two QArrays in blocks on an H200, as the extension says without one."""

import pytest


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [
        (1, 4096, 14336, ["16x64"]),
        (16, 8192, 8192, ["16x64", "32x64"]),
        (64, 4096, 14336, ["32x64"]),
        (64, 28672, 8192, ["64x64"]),
        (128, 4096, 14336, ["64x64"]),
        (128, 28672, 8192, ["128x128"]),
        (1024, 6144, 4096, ["128x128"]),
        (4096, 4096, 14336, ["128x128"]),
    ],
)
def test_the_fastest_on_an_h200(extension, h200, m, n, k, tiles, dtype):
    """As measured there, of blocks of 128."""
    chosen = extension.BlockQuantizedMmProblem(m, n, k, 1, dtype, "bfloat16", 128, False).select(h200)
    assert any(chosen.startswith(f"sm90 wgmma {tile}x128") for tile in tiles), chosen


@pytest.mark.parametrize(("k", "block"), [(4096, 32), (4104, 128)])
def test_what_wgmma_does_not_serve(extension, h200, k, block):
    """Short blocks, and rows that TMA can't load."""
    problem = extension.BlockQuantizedMmProblem(128, 4096, k, 1, "int8", "bfloat16", block, False)
    assert not any("wgmma" in words for words in problem.choices(h200))
