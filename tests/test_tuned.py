"""The files of `jax_qmm/tuned`, and the kernels that are chosen by their costs and products."""

import json
import math

import pytest

from jax_qmm import tuning
from jax_qmm.tuning import Product

INT8 = Product(16, 6144, 4096, 1, "int8", "bfloat16", False)
FP8 = Product(1, 4096, 4096, 1, "float8_e4m3fn", "float16", True)
FULL = INT8._replace(full_epilogue=True)
NARROW = FULL._replace(out_dtype="int8")

PACKAGED = tuning.packaged_files()


@pytest.mark.parametrize("packaged", PACKAGED, ids=lambda file: file.stem)
def test_the_packages_files_are_of_kernels_that_there_are(extension, packaged):
    content = json.loads(packaged.read_text())
    gpu = extension.Gpu(content["device_kind"], content["sm_count"], content["gpu"]["arch"])
    assert tuning.packaged(gpu) == packaged
    assert len(tuning.load(packaged, extension, gpu)) == len(content["products"])


@pytest.mark.parametrize("packaged", PACKAGED, ids=lambda file: file.stem)
def test_the_packages_files_are_written_as_they_are_read(extension, packaged, tmp_path):
    """So that neither `tune` nor benchmarks/cost_model.py changes what it does not measure."""
    copy = tmp_path / packaged.name
    copy.write_bytes(packaged.read_bytes())
    content = json.loads(packaged.read_text())
    gpu = extension.Gpu(content["device_kind"], content["sm_count"], content["gpu"]["arch"])
    tuning.save(copy, gpu, tuning.load(packaged, extension, gpu))
    tuning.save_costs(copy, gpu, tuning.load_costs(packaged))
    assert copy.read_text() == packaged.read_text()


def test_every_kernel_of_the_table_has_a_cost_on_the_h200(extension, h200):
    costs = [(cost.dtype, cost.kernel) for cost in tuning.load_costs(tuning.packaged(h200))]
    words = {
        (dtype, extension.describe_scaled_mm((kernel, 1)).removesuffix(" swizzle 1"))
        for dtype in ("int8", "float8_e4m3fn")
        for out_dtype in ("bfloat16", "float32")
        for fast_accum in (False, True)
        for kernel, _ in extension.ScaledMmProblem(1, 4096, 4096, 1, dtype, out_dtype, fast_accum).choices(h200)
        if kernel >= 0
    }
    assert words == set(costs) and len(words) == len(costs)


# dtype, out_dtype, fast_accum and that the kernels have the full epilogue.
FULL_EPILOGUE = [
    (dtype, out_dtype, fast_accum, True)
    for dtype, fast_accum in (("int8", False), ("float8_e4m3fn", True), ("float8_e4m3fn", False))
    for out_dtype in ("bfloat16", "float32", "int8", "float8_e4m3fn")
]


@pytest.mark.parametrize("kind", FULL_EPILOGUE, ids=str)
def test_kernels_with_the_full_epilogue_have_the_costs_of_those_with_the_plain_one(extension, h200, kind):
    costs = {cost.kernel for cost in tuning.load_costs(tuning.packaged(h200)) if cost.dtype == kind[0]}
    problem = extension.ScaledMmProblem(1, 4096, 4096, 1, *kind)
    words = [extension.describe_scaled_mm((kernel, 1)) for kernel, _ in problem.choices(h200) if kernel >= 0]
    assert words and all(" full epilogue" in name for name in words)
    assert {name.replace(" full epilogue", "").removesuffix(" swizzle 1") for name in words} <= costs


def test_a_gpu_without_a_file_gets_the_costs_of_its_architecture(extension, h200):
    h100, fewer = extension.Gpu("NVIDIA H100 80GB HBM3", 132, 90), extension.Gpu("NVIDIA H100 NVL", 114, 90)
    assert [extension.scaled_mm_costs_of(gpu) for gpu in (h200, h100, fewer)] == [h200.name, h100.name, h100.name]
    assert fewer.copy_rate == pytest.approx(h100.copy_rate * 114 / 132)
    problem = extension.ScaledMmProblem(4096, 4096, 4096, 1, "int8", "bfloat16", False)
    kernel = "sm90 128x128x128 cluster 1x1 pingpong swizzle 1"
    (choice,) = (choice for choice in problem.choices(h200) if extension.describe_scaled_mm(choice) == kernel)
    assert problem.terms(choice, h200)[0] == 8  # rounds of 132, of 32 x 32 tiles
    assert problem.terms(choice, fewer)[0] == 9
    with pytest.raises(ValueError, match="no GPU of compute capability 70 is described"):
        extension.Gpu("Tesla V100", 80, 70)


@pytest.mark.parametrize(("n", "k", "batch"), [(4096, 4096, 1), (57344, 8192, 1), (128, 64, 3), (4096, 4096, 1024)])
@pytest.mark.parametrize(
    "kind",
    [
        ("int8", "bfloat16", False),
        ("int8", "int32", False),
        ("float8_e4m3fn", "float16", True),
        ("float8_e4m3fn", "float32", True),
        ("float8_e4m3fn", "bfloat16", False),
        ("float8_e4m3fn", "float32", False),
        *FULL_EPILOGUE,
    ],
    ids=str,
)
def test_aligned_products_get_a_kernel_made_for_hopper(extension, h200, kind, n, k, batch):
    """Not the one for any alignment, which is slower."""
    for m in (*range(1, 600), 4096, 100_000):
        choice = extension.ScaledMmProblem(m, n, k, batch, *kind).select(h200)
        assert extension.describe_scaled_mm(choice).startswith("sm90"), m


@pytest.mark.parametrize(
    ("n", "k", "out_dtype", "kind"),
    [
        *((4096, k, "bfloat16", kind) for k, kind in ((4096, "sm90"), (4100, "sm80"), (4097, "generic"))),
        *((n, 144, "int8", kind) for n, kind in ((32, "sm90"), (24, "sm80"))),
        *((4100, 4096, out_dtype, kind) for out_dtype, kind in (("float32", "sm90"), ("float16", "sm80"))),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_that_tma_does_not_take_get_multistage_kernels_on_hopper(extension, h200, n, k, out_dtype, kind, dtype):
    """With rows of a and b that begin at multiples of 4 bytes; any other ones get the generic kernel."""
    for m in (9, 128, 12544):
        problem = extension.ScaledMmProblem(m, n, k, 1, dtype, out_dtype, dtype != "int8")
        assert extension.describe_scaled_mm(problem.select(h200)).startswith(kind)
        kinds = {extension.describe_scaled_mm(choice).split()[0] for choice in problem.choices(h200)}
        assert kinds == {"generic", kind}


@pytest.mark.parametrize(
    ("m", "n", "k", "kind"),
    [
        (16, 128, 16384, "split-K"),  # few tiles: only parts of K make enough blocks
        (64, 128256, 4096, "one tile"),  # many waves, but of tiles that have all of M
        (8192, 8192, 28672, "pingpong"),  # many waves of several rows of tiles
    ],
)
@pytest.mark.parametrize(("dtype", "fast_accum"), [("int8", False), ("float8_e4m3fn", True)])
def test_the_cost_model_chooses_by_how_tiles_fill_the_gpu(extension, h200, dtype, fast_accum, m, n, k, kind):
    choice = extension.ScaledMmProblem(m, n, k, 1, dtype, "bfloat16", fast_accum).select(h200)
    assert kind in extension.describe_scaled_mm(choice)


@pytest.mark.parametrize("product", [INT8, FP8, FULL, NARROW], ids=str)
def test_the_cost_model_chooses_what_it_predicts_to_be_the_fastest(extension, h200, product):
    problem = extension.ScaledMmProblem(*product)
    predicted = {choice: problem.predict(choice, h200) for choice in problem.choices(h200)}
    assert problem.select(h200) == min(predicted, key=predicted.__getitem__)
    assert predicted[-1, 1] == problem.predict((10**6, 1), h200) == math.inf  # of no kernel that it may choose


@pytest.mark.parametrize(
    ("tuned", "fields", "found"),
    [
        (INT8, {}, True),
        (INT8, {"m": 13}, True),
        (INT8, {"m": 12}, False),
        (INT8, {"m": 17}, False),
        (INT8, {"out_dtype": "float16"}, True),
        (INT8, {"out_dtype": "float32"}, False),
        (INT8, {"n": 64}, False),
        (INT8, {"k": 64}, False),
        (INT8, {"batch": 2}, False),
        (INT8, {"dtype": "float8_e4m3fn"}, False),
        (FP8, {}, True),
        (FP8, {"fast_accum": False}, False),
        (INT8, {"full_epilogue": True}, False),
        (FULL, {}, True),
        (FULL, {"full_epilogue": False}, False),
        (FULL, {"out_dtype": "int8"}, False),
        (NARROW, {"full_epilogue": False}, True),  # results of 8 bits have it either way
        (NARROW, {"out_dtype": "float8_e4m3fn"}, True),
    ],
)
def test_what_was_tuned_serves_products_like_it(extension, h200, tuned, fields, found):
    problem = extension.ScaledMmProblem(*tuned._replace(**fields))
    fixed = extension.ScaledMmProblem(*tuned)
    default = problem.select(h200)
    other = next(choice for choice in fixed.choices(h200) if choice != default)
    fixed.tune(other, h200)
    assert problem.tuned(h200) == (tuned.m if found else None)
    assert problem.select(h200) == (other if found else default)


def test_what_was_tuned_does_not_serve_fewer_rows_that_it_cannot_join(extension, h200):
    """A kernel for rows of 24 bytes takes two of them for one."""
    product = lambda m: extension.ScaledMmProblem(m, 144, 24, 1, "int8", "int8", False, True)
    choice, *_ = (c for c in product(3136).choices(h200) if "resident" in extension.describe_scaled_mm(c))
    product(3136).tune(choice, h200)
    assert product(3088).select(h200) == choice
    assert product(3087).select(h200) in product(3087).choices(h200)


def test_what_was_tuned_serves_gpus_of_the_same_model(extension, h200):
    problem, slice_of_it = extension.ScaledMmProblem(*INT8), extension.Gpu("NVIDIA H200 MIG 1g.18gb", 16, 90)
    problem.tune((-1, 1), h200)
    assert problem.tuned(h200) == INT8.m and problem.tuned(slice_of_it) is None


def test_kernels_that_do_not_serve_a_product_are_refused(extension, h200):
    problem = extension.ScaledMmProblem(*INT8)
    for choice, message in ((10**6, 1), "no such kernel"), ((0, 3), "does not serve"), ((-2, 1), "does not serve"):
        with pytest.raises(ValueError, match=message):
            problem.tune(choice, h200)
        with pytest.raises(ValueError, match=message):
            problem.measure(choices=[choice], gpu=h200, pattern=b"\0", rounds=1)
    for pattern, rounds in (b"", 1), (b"\0", 0):
        with pytest.raises(ValueError, match="a pattern and a round"):
            problem.measure(choices=[(-1, 1)], gpu=h200, pattern=pattern, rounds=rounds)
