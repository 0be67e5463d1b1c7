"""Which kernels serve products of two QArrays in blocks on an H200, as the extension says without one."""

import pytest


@pytest.mark.parametrize(("k", "block"), [(4096, 32), (4104, 128)])
def test_what_wgmma_does_not_serve(extension, h200, k, block):
    """Short blocks, and rows that TMA can't load."""
    problem = extension.BlockQuantizedMmProblem(128, 4096, k, 1, "int8", "bfloat16", block, False)
    assert not any("wgmma" in words for words in problem.choices(h200))
