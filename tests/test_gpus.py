"""GPUs that nothing was measured on: their descriptions, and the kernels that are chosen by them."""

import json
import re

import pytest

from jax_qmm import _extension, tuning


def test_gpus_are_described_by_their_datasheets(extension):
    a100 = extension.Gpu("NVIDIA A100-SXM4-80GB", 108, 80)
    assert (a100.peak, a100.clock, a100.shared_memory) == (624e12, 1.41e9, 163 << 10)
    assert a100.copy_rate == pytest.approx(0.9 * 2039e9)
    part = extension.Gpu("GRID A100X-20C", 54, 80)  # as much of everything for each SM as the first of its architecture
    assert part.peak == pytest.approx(a100.peak / 2) and part.shared_memory == a100.shared_memory
    assert extension.scaled_mm_costs_of(a100) == ""
    pcie = extension.Gpu("NVIDIA H100 PCIe", 114, 90)
    assert pcie.copy_rate == pytest.approx(0.9 * 2e12)
    assert extension.scaled_mm_costs_of(pcie) == "NVIDIA H100 80GB HBM3"


def test_datasheets_agree_with_each_other():
    """Operations, clock and SMs of a GPU make the operations of an SM in a cycle that its architecture has."""
    per_sm = {75: 2048, 80: 4096, 86: 2048, 89: 2048, 90: 8192}
    for gpu in json.loads(tuning.DATASHEETS.read_text())["gpus"]:
        assert gpu["peak"] == pytest.approx(per_sm[gpu["arch"]] * gpu["sm_count"] * gpu["clock"], rel=0.08), gpu
        assert gpu["source"]


@pytest.mark.parametrize(
    ("name", "sm_count", "arch"),
    [("NVIDIA A100-SXM4-80GB", 108, 80), ("NVIDIA A10", 72, 86), ("NVIDIA L4", 58, 89), ("Tesla T4", 40, 75)],
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
            for rows, columns, k_tile, stages in re.findall(r"sm80 (\d+)x(\d+)x(\d+) (\d+) stages", "\n".join(words)):
                assert (int(rows) + int(columns)) * int(k_tile) * int(stages) <= gpu.shared_memory
            chosen[m, k] = words[0]
    rows, columns = (int(size) for size in chosen[4096, 4096].split()[1].split("x")[:2])
    assert chosen[1, 4096].startswith("sm90 16x8") and rows * columns >= 128 * 128  # what reads b, and what multiplies


def test_kernels_are_named_by_the_architecture_whose_code_runs(extension, monkeypatch):
    if "80" not in extension.architectures():
        pytest.skip("this build has no kernels for GPUs but Hopper's")
    monkeypatch.setattr(_extension, "_load", lambda: (extension, None))
    monkeypatch.setattr(_extension, "gpu", lambda: extension.Gpu("NVIDIA A100-SXM4-80GB", 108, 80))
    assert _extension.described_gpu() == "NVIDIA A100-SXM4-80GB (compute capability 8.0, code for 8.0)"
    said = _extension.describe_scaled_mm(1, 4096, 4096, 1, "int8", "bfloat16", False)
    assert said.startswith("sm80 16x8x") and " skinny " in said
    assert said.endswith("(by the cost model, not measured on this GPU; run tune)")


def test_few_tiles_of_much_k_are_split_where_the_partial_sums_are_small(extension):
    if "80" not in extension.architectures():
        pytest.skip("this build has no kernels for GPUs but Hopper's")
    a100 = extension.Gpu("NVIDIA A100-SXM4-80GB", 108, 80)

    def problem(m, n, k):
        return extension.ScaledMmProblem(m, n, k, 1, "int8", "bfloat16", False)

    narrow = problem(64, 1024, 16384)
    assert "split-K" in extension.describe_scaled_mm(narrow.select(a100))
    assert narrow.workspace(a100) in [4 * 64 * 1024 * parts for parts in (2, 4, 8)]
    assert problem(4096, 4096, 4096).workspace(a100) == 0
    for m, n, k in ((8192, 28672, 4096), (64, 1024, 64)):  # more partial sums than L2 holds, and one K tile
        words = map(extension.describe_scaled_mm, problem(m, n, k).choices(a100))
        assert not any("split-K" in word for word in words)


def test_split_kernels_are_kept_by_their_words(extension, tmp_path):
    if "80" not in extension.architectures():
        pytest.skip("this build has no kernels for GPUs but Hopper's")
    a100 = extension.Gpu("NVIDIA A100-SXM4-80GB", 108, 80)
    product = tuning.Product(64, 1024, 16384, 1, "int8", "bfloat16", False)
    words = "sm80 64x64x128 4 stages split-K 4"
    tuning.save(tmp_path / "tuning.json", a100, [tuning.Entry(product, words, 9.5)])
    assert tuning.load(tmp_path / "tuning.json", extension, a100)[0].kernel == words
    choices = tuning.choices(extension, product, a100)
    extension.ScaledMmProblem(*product).tune(choices[words], a100)
    assert extension.ScaledMmProblem(*product).select(a100) == choices[words]
    assert extension.ScaledMmProblem(*product).workspace(a100) == 4 * 4 * 64 * 1024
