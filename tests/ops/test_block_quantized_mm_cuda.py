"""Which kernels serve products of two QArrays in blocks on an H200, as the extension says without one."""

import pytest


@pytest.mark.parametrize(("k", "block"), [(4096, 32), (4104, 128)])
def test_what_wgmma_does_not_serve(extension, h200, k, block):
    """Short blocks, and rows that TMA can't load."""
    problem = extension.BlockQuantizedMmProblem(128, 4096, k, 1, "int8", "bfloat16", block, "")
    assert not any("wgmma" in words for words in problem.choices(h200))


def persistent(extension, h200, n, out_dtype, zero_points=""):
    problem = extension.BlockQuantizedMmProblem(300, n, 4096, 1, "int8", out_dtype, 128, zero_points)
    return [words for words in problem.choices(h200) if "persistent" in words]


@pytest.mark.parametrize(
    ("n", "out_dtype", "whole"),
    [(72, "bfloat16", True), (68, "float32", True), (68, "bfloat16", False), (70, "float32", False)],
)
def test_persistent_kernels_are_for_results_that_tma_can_write(extension, h200, n, out_dtype, whole):
    assert bool(persistent(extension, h200, n, out_dtype)) == whole


def test_zero_points_of_one_side_have_a_kernel_of_their_own(extension, h200):
    of_a, of_both = (persistent(extension, h200, 512, "bfloat16", sides) for sides in ("a", "ab"))
    assert [words.partition("block ")[2] for words in of_a] == ["zero points of a", "zero points of both"]
    assert of_both == of_a[1:]
