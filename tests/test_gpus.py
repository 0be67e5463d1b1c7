"""GPUs that nothing was measured on: their descriptions, and the kernels that are chosen by them."""

import json

import pytest

from jax_qmm import tuning


def test_gpus_are_described_by_their_datasheets(extension):
    a100 = extension.Gpu("NVIDIA A100-SXM4-80GB", 108, 80)
    assert (a100.peak, a100.clock, a100.shared_memory) == (624e12, 1.41e9, 163 << 10)
    assert a100.copy_rate == pytest.approx(0.9 * 2039e9)
    part = extension.Gpu("GRID A100X-20C", 54, 80)  # as much of everything for each SM as the first of its architecture
    assert part.peak == pytest.approx(a100.peak / 2) and part.shared_memory == a100.shared_memory
    assert extension.scaled_mm_costs_of(a100) == ""
    h100 = extension.Gpu("NVIDIA H100 80GB HBM3", 132, 90)
    assert (
        h100.copy_rate < extension.Gpu("NVIDIA H200", 132, 90).copy_rate
        and extension.scaled_mm_costs_of(h100) == "NVIDIA H200"
    )


def test_datasheets_agree_with_each_other():
    """Operations, clock and SMs of a GPU make the operations of an SM in a cycle that its architecture has."""
    per_sm = {75: 2048, 80: 4096, 86: 2048, 89: 2048, 90: 8192}
    for gpu in json.loads(tuning.DATASHEETS.read_text())["gpus"]:
        assert gpu["peak"] == pytest.approx(per_sm[gpu["arch"]] * gpu["sm_count"] * gpu["clock"], rel=0.08), gpu
        assert gpu["source"]


@pytest.mark.parametrize(
    ("name", "sm_count", "arch"),
    [("NVIDIA A100-SXM4-80GB", 108, 80), ("NVIDIA A10", 72, 86), ("NVIDIA L4", 58, 89)],
)
@pytest.mark.parametrize(("dtype", "fast_accum"), [("int8", False), ("float8_e4m3fn", True), ("float8_e4m3fn", False)])
def test_gpus_that_nothing_was_measured_on_get_kernels_by_their_description(
    extension, name, sm_count, arch, dtype, fast_accum
):
    if "80" not in extension.architectures():
        pytest.skip("this build has no kernels for GPUs but Hopper's")
    gpu = extension.Gpu(name, sm_count, arch)
    chosen = {}
    for m in (1, 8, 9, 16, 64, 256, 1024, 4096):
        for k in (4096, 4104, 4100, 4097):
            problem = extension.ScaledMmProblem(m, 4096, k, 1, dtype, "bfloat16", fast_accum)
            words = [extension.describe_scaled_mm(choice) for choice in (problem.select(gpu), *problem.choices(gpu))]
            wide = extension.ScaledMmProblem(m, 8192, k, 1, dtype, "bfloat16", fast_accum)
            assert wide.select(gpu) in wide.choices(gpu)
            skinny = ("sm90 16x8",) if k % 16 == 0 else ()
            assert all(word.startswith(("sm80", "generic", *skinny)) for word in words)
            assert words[0].startswith("generic") == (k % 4 != 0)
            chosen[m, k] = words[0]
    rows, columns = (int(size) for size in chosen[4096, 4096].split()[1].split("x")[:2])
    assert chosen[1, 4096].startswith("sm90 16x8") and rows * columns >= 128 * 128  # what reads b, and what multiplies
