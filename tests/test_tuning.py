"""The tuning file: what it keeps, when it is refused, and what a process does with it."""

import json
import math
import types
import warnings
from typing import NamedTuple

import pytest

from jax_qmm import _extension, tuning
from jax_qmm.tuning import Entry, Product

DEVICE = types.SimpleNamespace(device_kind="NVIDIA H200", core_count=132, compute_capability="9.0", local_hardware_id=0)
GPU = types.SimpleNamespace(name="NVIDIA H200", sm_count=132, arch=90)
INT8 = Product(16, 6144, 4096, 1, "int8", "bfloat16", False)
FP8 = Product(1, 4096, 4096, 1, "float8_e4m3fn", "float16", True)
FULL = INT8._replace(full_epilogue=True)
NARROW = FULL._replace(out_dtype="int8")
ENTRIES = [Entry(FP8, "narrow", 9.5), Entry(INT8, "wide", 10.25)]


class Extension:
    """Has the same kernels for any product that is aligned, and fixes what it is told to."""

    Gpu = types.SimpleNamespace(of_device=lambda device: GPU)

    def __init__(self, *kernels):
        self.kernels, self.tuned = kernels, {}

    def driver_version(self):
        return 13000

    def why_unfit(self, name, capability, driver):
        return "" if capability == 90 else f"{name} is unfit"

    def compiled_for(self, capability):
        return capability

    def describe_scaled_mm(self, choice):
        return self.kernels[choice[0]]

    def scaled_mm_costs_of(self, gpu):
        return gpu.name

    def ScaledMmProblem(self, *product):  # noqa: N802, a class of the extension
        return Problem(self, Product(*product))


class Problem(NamedTuple):
    extension: Extension
    product: Product

    def choices(self, gpu):
        if self.product.dtype not in ("int8", "float8_e4m3fn"):
            raise ValueError(f"no kernel has operands of dtype {self.product.dtype}")
        one = self.product.k % 16 or self.product.full_epilogue
        return [(i, 1) for i in range(1 if one else len(self.extension.kernels))]

    def select(self, gpu):
        return self.extension.tuned.get(self.product, (0, 1))

    def tune(self, choice, gpu):
        self.extension.tuned[self.product] = choice

    def tuned(self, gpu):
        return self.product.m if self.product in self.extension.tuned else None


@pytest.fixture
def kernels():
    return Extension("generic", "narrow", "wide")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A valid file, which JAX_QMM_TUNING names."""
    file = tmp_path / "tuning.json"
    tuning.save(file, GPU, ENTRIES)
    monkeypatch.setenv("JAX_QMM_TUNING", str(file))
    return file


def test_round_trip(kernels, tmp_path):
    file = tmp_path / "missing" / "folders" / "tuning.json"
    tuning.save(file, GPU, reversed(ENTRIES))
    assert tuning.load(file, kernels, GPU) == ENTRIES
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]
    tuning.save(file, GPU, [])
    assert tuning.load(file, kernels, GPU) == []


def test_the_full_epilogue_is_a_field_where_a_product_has_it(kernels, tmp_path):
    file = tmp_path / "tuning.json"
    both = [Entry(INT8, "wide", 10.25), Entry(FULL, "generic", 11.0)]
    tuning.save(file, GPU, both)
    plain, full = json.loads(file.read_text())["products"]
    assert "full_epilogue" not in plain and full["full_epilogue"] is True
    assert tuning.load(file, kernels, GPU) == both


def test_a_save_that_fails_keeps_the_file(kernels, file, monkeypatch):
    def fail(self, target):
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        tuning.save(file, GPU, [])
    assert tuning.load(file, kernels, GPU) == ENTRIES
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_kernels_are_found_by_their_words(file):
    other_build = Extension("generic", "wide", "new", "narrow")
    tuning.apply(other_build, [GPU])
    assert other_build.tuned == {INT8: (1, 1), FP8: (3, 1)}


def _edited(**fields):
    return lambda content: content | fields


def _edited_product(**fields):
    return lambda content: content | {"products": [content["products"][1], content["products"][0] | fields]}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_edited(format="jax_qmm tuning 2"), 'does not have the format "jax_qmm tuning 1"'),
        (lambda content: [content], "does not have the format"),
        (_edited(device_kind="NVIDIA H100"), "on NVIDIA H100 with 132 SMs; this is NVIDIA H200 with 132 SMs"),
        (_edited(sm_count=114), "measured on NVIDIA H200 with 114 SMs"),
        (_edited(products=None), "malformed"),
        (_edited(products=[1]), "malformed"),
        (_edited(products=[{"op": "scaled_mm", "m": 1}]), "malformed.*'n'"),
        (_edited_product(op="conv"), "malformed.*op is 'conv'"),
        (_edited_product(m="1"), "malformed.*m is '1'"),
        (_edited_product(microseconds=None), "malformed.*microseconds is None"),
        (_edited_product(full_epilogue=1), "malformed.*full_epilogue is 1"),
        (_edited_product(full_epilogue=True, kernel="gone"), 'no kernel "gone" .* K 4096, full epilogue'),
        (_edited_product(dtype="int4"), "no product int4 to float16, M 1, N 4096, K 4096"),
        (_edited_product(kernel="gone"), 'no kernel "gone" for float8_e4m3fn to float16, M 1, N 4096, K 4096'),
        (_edited_product(k=4097), 'no kernel "narrow" for .*K 4097'),
    ],
)
def test_foreign_files_are_refused(kernels, file, edit, reason):
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    _is_refused(kernels, file, reason)


@pytest.mark.parametrize("content", [b"", b'{"format": "jax_qmm', b"\xff\xfe", b"[" * 100_000])
def test_corrupt_files_are_refused(kernels, file, content):
    file.write_bytes(content)
    _is_refused(kernels, file, "it is no JSON")


def test_a_file_that_is_named_and_missing_is_refused(kernels, file):
    file.unlink()
    _is_refused(kernels, file, "No such file")
    file.mkdir()
    _is_refused(kernels, file, "Is a directory")


def _is_refused(kernels, file, reason):
    with pytest.warns(UserWarning, match=reason) as caught:
        tuning.apply(kernels, [GPU])
    assert f"the tuning file {file} is refused" in str(caught[0].message)
    assert kernels.tuned == {}  # not even the entries that are good


@pytest.mark.parametrize("value", ["", "0"])
def test_none_is_loaded_where_the_environment_says_so(kernels, monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.save(tuning.default_path(), GPU, ENTRIES)
    monkeypatch.setenv("JAX_QMM_TUNING", value)
    assert tuning.path() is None
    tuning.apply(kernels, [GPU])
    assert kernels.tuned == {}


def test_default_path(kernels, monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_QMM_TUNING", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.path() == tmp_path / ".cache" / "jax_qmm" / "tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuning.path() == tmp_path / "cache" / "jax_qmm" / "tuning.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.apply(kernels, [GPU])  # no file, no warning
        (tmp_path / "cache").write_text("")  # a folder that can't be entered
        tuning.apply(kernels, [GPU])
    assert kernels.tuned == {}
    (tmp_path / "cache").unlink()
    tuning.save(tuning.path(), GPU, ENTRIES)
    tuning.apply(kernels, [GPU])
    assert kernels.tuned == {INT8: (2, 1), FP8: (1, 1)}


def test_the_users_file_goes_before_the_packages(kernels, file, monkeypatch, tmp_path):
    packaged = tmp_path / "packaged.json"
    other = INT8._replace(m=32)
    tuning.save(packaged, GPU, [Entry(INT8, "narrow", 10.0), Entry(other, "narrow", 11.0)])
    monkeypatch.setattr(tuning, "packaged", lambda gpu: packaged)
    tuning.apply(kernels, [GPU])
    assert kernels.tuned == {INT8: (2, 1), FP8: (1, 1), other: (1, 1)}
    kernels.tuned.clear()
    packaged.write_text("of another version")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.apply(kernels, [GPU])
    assert kernels.tuned == {INT8: (2, 1), FP8: (1, 1)}
    kernels.tuned.clear()
    monkeypatch.setenv("JAX_QMM_TUNING", "0")
    tuning.apply(kernels, [GPU])
    assert kernels.tuned == {}


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


@pytest.fixture
def process(kernels, monkeypatch):
    """A process on a GPU with the extension."""
    monkeypatch.setattr(_extension, "_load", lambda: (kernels, None))
    monkeypatch.setattr(_extension, "_gpus", lambda: [DEVICE])
    _extension._load_tuning.cache_clear()
    yield kernels
    _extension._load_tuning.cache_clear()


def test_a_lowering_for_the_gpu_loads_the_file_once(process, file, monkeypatch):
    assert _extension.fallback_reason("cuda") is None
    assert process.tuned == {FP8: (1, 1), INT8: (2, 1)}
    process.tuned.clear()
    assert _extension.fallback_reason("cuda") is None
    assert process.tuned == {}


def test_no_file_is_read_for_another_gpu(process, file, monkeypatch):
    older = types.SimpleNamespace(compute_capability="8.0", device_kind="A100", local_hardware_id=0)
    monkeypatch.setattr(_extension, "_gpus", lambda: [older])
    assert "A100" in _extension.fallback_reason("cuda")
    assert process.tuned == {}


def test_a_kernel_is_described_with_why_it_was_chosen(process, file, monkeypatch):
    assert _extension.describe_scaled_mm(*INT8) == "wide (tuned)"
    assert _extension.describe_scaled_mm(17, *INT8[1:]) == "generic (by the cost model)"
    assert _extension.describe_scaled_mm(16, 6144, 4097, *INT8[3:]) == "generic (the only one for this alignment)"
    assert _extension.describe_scaled_mm(*FULL) == "generic (the only one for this product)"
    monkeypatch.setattr(Problem, "tuned", lambda problem, gpu: 16)
    assert _extension.describe_scaled_mm(13, *INT8[1:]) == "generic (tuned at M 16)"


def test_costs_of_another_gpu_are_said(process, file, monkeypatch):
    monkeypatch.setattr(process, "scaled_mm_costs_of", lambda gpu: "NVIDIA H100", raising=False)
    assert _extension.describe_scaled_mm(17, *INT8[1:]) == "generic (by the cost model of NVIDIA H100)"
    monkeypatch.setattr(process, "scaled_mm_costs_of", lambda gpu: "", raising=False)
    said = "generic (by the cost model, not measured on this GPU; run tune)"
    assert _extension.describe_scaled_mm(17, *INT8[1:]) == said
