"""The tuning file: what it keeps, when it is refused, and what a process does with it."""

import json
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
