"""`python -m jax_qmm selftest`: on a stand-in for the extension whose kernels are the reference, and on the GPU."""

import contextlib
import os
import types

import jax
import jax.numpy as jnp
import pytest

import jax_qmm
from jax_qmm import __main__ as command_line, _extension, selftest
from jax_qmm.ops import conv as conv_op
from jax_qmm.selftest.result import Result

GPU = types.SimpleNamespace(name="NVIDIA H200", arch=90, sm_count=1, prepare=lambda: None)
KERNELS = ["generic", "wide", "narrow"]


class Extension:
    """Three kernels, of which one alone serves rows that are not aligned."""

    def __init__(self):
        self.forced = {}  # kernel by (M, N, K, dtype)

        def problem(m, n, k, batch, dtype, out_dtype, fast_accum, full_epilogue):
            choices = [(i, 1) for i in range(len(KERNELS) if k % 16 == 0 else 1)]
            tune = lambda choice, gpu: self.forced.update({(m, n, k, dtype): self.describe_scaled_mm(choice)})
            return types.SimpleNamespace(choices=lambda gpu: choices, tune=tune)

        self.ScaledMmProblem = problem
        kernels_of_weights = types.SimpleNamespace(choices=lambda gpu: [("narrow", 0), ("wide", 64)])
        self.BlockScaledMmProblem = self.ExpandedMmProblem = lambda *product: kernels_of_weights
        two = types.SimpleNamespace(choices=lambda gpu: ["narrow", "wide"])
        self.ConvProblem = self.BlockQuantizedMmProblem = lambda *problem: two
        self.only = ""  # of these

    def restrict_block_scaled_mm(self, words):
        self.only = words

    restrict_conv = restrict_expanded_mm = restrict_block_quantized_mm = restrict_block_scaled_mm

    def compiled_for(self, capability):
        return capability

    def describe_scaled_mm(self, choice):
        return KERNELS[choice[0]]

    def clear_scaled_mm_tuning(self):
        pass


@pytest.fixture
def extension(monkeypatch):
    """The stand-in, and a few small inputs."""
    monkeypatch.setattr(selftest.block_scaled_mm, "WEIGHT_BLOCKS", (64,))
    monkeypatch.setattr(selftest.block_scaled_mm, "WEIGHT_K", 200)
    monkeypatch.setattr(selftest.block_scaled_mm, "WEIGHT_ROWS", (3,))
    monkeypatch.setattr(selftest.conv, "CONVOLUTIONS", ((4, 1, 3, *selftest.weight_only_conv.WINDOW),))
    monkeypatch.setattr(selftest.conv, "CONV_KINDS", (("int32", True, None), ("int8", False, "int8")))
    monkeypatch.setattr(
        selftest.block_quantized_mm, "BLOCK_KINDS", (("int8", 64, True, 1), ("float8_e4m3fn", 128, False, 128))
    )
    monkeypatch.setattr(selftest.block_quantized_mm, "BLOCK_K", 272)
    monkeypatch.setattr(selftest.block_quantized_mm, "BLOCK_ROWS", (3,))
    monkeypatch.setattr(selftest.scaled_mm, "PRODUCTS", ((17, 48), (3, 75)))
    monkeypatch.setattr(selftest.quantize, "ARRAYS", ((2, 40),))
    for name in ("block_scaled_mm", "weight_only_conv", "quantize"):
        monkeypatch.setattr(getattr(selftest, name), "FLOATS", ("float32",))
    return Extension()


@pytest.fixture
def main(extension, monkeypatch):
    """Runs the command where the stand-in's kernels fit the GPU."""
    monkeypatch.setattr(_extension, "_load", lambda: (extension, None))
    monkeypatch.setattr(_extension, "_gpus", lambda: [GPU])
    monkeypatch.setattr(_extension, "fallback_reason", lambda platform, devices=(), oldest=0: None)
    monkeypatch.setattr(_extension, "gpu", lambda: GPU)
    monkeypatch.setattr(jax, "default_device", lambda device: contextlib.nullcontext())
    monkeypatch.setenv("JAX_QMM_STRICT", "0")  # the command sets it
    return lambda: command_line.main(["selftest"])


def only(monkeypatch, *tables):
    """Leaves of what is checked these tables alone."""
    for family, name in (
        (selftest.scaled_mm, "KINDS"),
        (selftest.block_scaled_mm, "WEIGHT_ZERO_POINTS"),
        (selftest.weight_only_conv, "WEIGHT_ZERO_POINTS"),
        (selftest.block_quantized_mm, "BLOCK_KINDS"),
        (selftest.expanded_mm, "EXPANDED_ROWS"),
        (selftest.conv, "CONVOLUTIONS"),
        (selftest.quantize, "ARRAYS"),
    ):
        if name not in tables:
            monkeypatch.setattr(family, name, ())


def spoil(monkeypatch, extension, kernel, by):
    """Adds `by` to one element of what this kernel gives; changes one of 8 bits."""
    for name in ("scaled_mm", "scaled_mm_azp_per_token", "scaled_mm_zero_points"):
        op = getattr(jax_qmm, name)

        def spoiled(a, b, *args, op=op, **kwargs):
            out = op(a, b, *args, **kwargs)
            forced = extension.forced[a.shape[0], b.shape[0], a.shape[1], a.dtype.name]
            if forced != kernel:
                return out
            last = out[-1, -1]
            return out.at[-1, -1].set(last + by if out.itemsize > 1 else jnp.where(last == 1, 2, 1).astype(out.dtype))

        monkeypatch.setattr(jax_qmm, name, spoiled)


def test_every_kernel_runs_in_every_way(extension):
    results, failures = selftest.run(extension, GPU)
    assert failures == [] and not any(result.wrong for result in results)
    products = [result for result in results if result.op.startswith("scaled_mm")]
    assert len(products) == len(selftest.scaled_mm.KINDS) * (3 + 1)
    assert {result.kernel for result in products} == {*KERNELS}
    weights = [result for result in results if result.op.startswith("block_scaled_mm")]
    assert [result.kernel for result in weights] == ["wide", "narrow"] * (2 * 3)  # bits, zero points
    convolutions = [result for result in results if result.op.startswith("conv")]
    assert [result.kernel for result in convolutions] == ["narrow", "wide"] * 2
    expanded = [result for result in results if result.op.startswith("expanded_mm")]
    assert [result.kernel for result in expanded] == ["wide", "narrow"] * 2 * len(selftest.expanded_mm.EXPANDED_ROWS)
    blocks = [result for result in results if result.op.startswith("blocks on both sides")]
    assert [result.kernel for result in blocks] == ["narrow", "wide"] * 2
    others = products, weights, convolutions, expanded, blocks
    assert len(results) - sum(map(len, others)) == 3 * 3  # qtypes and scales


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_kernel_is_found(extension, monkeypatch, kernel):
    only(monkeypatch, "KINDS")
    spoil(monkeypatch, extension, kernel, by=2**20)  # far more than what fp8 sums of 48 terms may be off
    results, _ = selftest.run(extension, GPU)
    wrong = [result for result in results if result.wrong]
    assert {result.kernel for result in wrong} == {kernel} and {result.wrong for result in wrong} == {1}
    assert {result.op for result in wrong} == {result.op for result in results if result.op.startswith("scaled_mm")}


def test_fp8_may_differ_as_tensor_cores_do_and_int8_not_at_all(extension, monkeypatch):
    only(monkeypatch, "KINDS")
    monkeypatch.setattr(
        selftest.scaled_mm, "KINDS", (("int8", "float32", False, False), ("float8_e4m3fn", "float32", True, False))
    )
    spoil(monkeypatch, extension, "generic", by=2.0**-8)
    results, _ = selftest.run(extension, GPU)
    assert {result.op for result in results if result.wrong} == {"scaled_mm, int8 to float32"}


@pytest.mark.parametrize(("error", "found"), [(2.0**-7, True), (2.0**-16, False)])
def test_a_wrong_kernel_with_weights_in_blocks_is_found(extension, monkeypatch, error, found):
    only(monkeypatch, "WEIGHT_ZERO_POINTS")
    op = jax_qmm.block_scaled_mm
    spoiled = lambda x, w, **options: op(x, w, **options).at[0, 3].mul(1 + (extension.only == "narrow") * error)
    monkeypatch.setattr(jax_qmm, "block_scaled_mm", spoiled)
    monkeypatch.setattr(jax, "jit", lambda function: function)  # each kernel is a program here
    results, _ = selftest.run(extension, GPU)
    assert {result.kernel for result in results if result.wrong} == ({"narrow"} if found else set())
    assert extension.only == ""


def test_a_wrong_kernel_of_blocks_on_both_sides_is_found(extension, monkeypatch):
    """int8 has no tolerance, fp8 that of its sums."""
    only(monkeypatch, "BLOCK_KINDS")
    op = jax_qmm.block_scaled_mm
    spoiled = lambda x, w, **options: op(x, w, **options).at[0, 3].mul(1 + (extension.only == "narrow") * 2.0**-16)
    monkeypatch.setattr(jax_qmm, "block_scaled_mm", spoiled)
    monkeypatch.setattr(jax, "jit", lambda function: function)  # each kernel is a program here
    results, _ = selftest.run(extension, GPU)
    wrong = [result for result in results if result.wrong]
    assert [(result.op, result.kernel, result.wrong) for result in wrong] == [
        ("blocks on both sides, int8, zero points", "narrow", 1)
    ]


def test_a_wrong_convolution_is_found(extension, monkeypatch):
    only(monkeypatch, "CONVOLUTIONS")
    bind = conv_op.bind
    spoiled = lambda *args, **params: bind(*args, **params).at[0, 1, 2, 0].add(extension.only == "wide")
    monkeypatch.setattr(conv_op, "bind", spoiled)
    monkeypatch.setattr(jax, "jit", lambda function: function)  # each kernel is a program here
    results, _ = selftest.run(extension, GPU)
    assert {result.kernel for result in results if result.wrong} == {"wide"}
    assert {result.wrong for result in results if result.wrong} == {1} and extension.only == ""


def test_a_wrong_quantizer_is_found(extension, monkeypatch):
    only(monkeypatch, "ARRAYS")
    quantize = jax_qmm.quantize

    def spoiled(x, qtype, **options):
        q = quantize(x, qtype, **options)
        if qtype == jnp.int8 and options.get("axis") == (1,):
            q = types.SimpleNamespace(qvalue=q.qvalue.at[1, 7].add(1), scale=q.scale, zero_point=q.zero_point)
        return q

    monkeypatch.setattr(jax_qmm, "quantize", spoiled)
    results, _ = selftest.run(extension, GPU)
    wrong = [result for result in results if result.wrong]
    assert {result.kernel for result in wrong} == {"dynamic per row"} and len(wrong) == 2
    assert all(result.shape == "(2, 40)" and "to int8" in result.op for result in wrong)


def test_what_cannot_run_is_named_and_the_rest_goes_on(extension, monkeypatch):
    only(monkeypatch, "KINDS", "ARRAYS")

    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error\nand much more")

    monkeypatch.setattr(jax_qmm, "scaled_mm", fail)  # int8 with zero points goes another way
    results, failures = selftest.run(extension, GPU)
    assert len(failures) == 9 * 2 and failures[0] == "scaled_mm int8 int32 False False, M 17, K 48 failed: CUDA error"
    assert {"scaled_mm, int8 to bfloat16", "quantize, float32 to int8"} <= {result.op for result in results}


def test_the_command_passes_where_all_is_right(main, monkeypatch, capsys):
    def run(kernels, gpu):
        assert os.environ["JAX_QMM_STRICT"] == "1"  # nothing shall pass by the reference
        return [Result("scaled_mm, int8 to bfloat16", "wide", "M 1", 0)], []

    monkeypatch.setattr(selftest, "run", run)
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith(f"jax_qmm {jax_qmm.__version__} on NVIDIA H200 (compute capability 9.0, code for 9.0), jax ")
    assert "scaled_mm, int8 to bfloat16" in out and "Every kernel agrees with the reference" in out


@pytest.mark.parametrize(
    ("results", "failures", "said"),
    [
        ([Result("scaled_mm", "wide", "M 1", 3)], [], "scaled_mm, M 1: 3 elements of the result are wrong: wide"),
        ([Result("scaled_mm", "wide", "M 1", 0)], ["quantize failed: CUDA error"], "quantize failed: CUDA error"),
        ([], [], ""),
    ],
)
def test_the_command_fails_where_something_is_wrong_or_nothing_ran(main, monkeypatch, results, failures, said, capsys):
    monkeypatch.setattr(selftest, "run", lambda kernels, gpu: (results, failures))
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 1
    out = capsys.readouterr().out
    assert said in out and "Every kernel agrees" not in out


def test_without_a_gpu_the_command_says_what_it_would_do(monkeypatch, capsys):
    monkeypatch.setattr(_extension, "_gpus", lambda: [])
    with pytest.raises(SystemExit) as exit:
        command_line.main(["selftest"])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert "runs each of the build's kernels on the GPU" in err and "JAX sees no NVIDIA GPU here" in err


@pytest.mark.gpu
@pytest.mark.parametrize("kind", selftest.scaled_mm.KINDS, ids=str)
def test_the_kernels_pass_scaled_mm(kind):
    kernels, _ = _extension._load()
    results = [*selftest.scaled_mm.check_scaled_mm(kernels, _extension.gpu(), kind, 7, 272)]
    kernels.clear_scaled_mm_tuning()
    assert len(results) > 1 and [result for result in results if result.wrong] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bits", "block"), [("bfloat16", 4, 64), ("float16", 8, 320), ("float16", 4, 384), ("float32", 4, 16)]
)
def test_the_kernels_pass_block_scaled_mm(dtype, bits, block, monkeypatch):
    monkeypatch.setattr(selftest.block_scaled_mm, "WEIGHT_ROWS", (2, 67))
    kernels, _ = _extension._load()
    results = [*selftest.block_scaled_mm.check_block_scaled_mm(kernels, _extension.gpu(), dtype, bits, "int32", block)]
    assert results or kernels.compiled_for(_extension.gpu().arch) < 80
    assert [result for result in results if result.wrong] == []


@pytest.mark.gpu
@pytest.mark.parametrize("m", selftest.expanded_mm.EXPANDED_ROWS)
def test_the_kernels_pass_expanded_mm(m):
    kernels, _ = _extension._load()
    results = [*selftest.expanded_mm.check_expanded_mm(kernels, _extension.gpu(), m)]
    assert results and [result for result in results if result.wrong] == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", selftest.block_quantized_mm.BLOCK_KINDS, ids=str)
def test_the_kernels_pass_block_quantized_mm(kind, monkeypatch):
    monkeypatch.setattr(selftest.block_quantized_mm, "BLOCK_K", 272)
    kernels, _ = _extension._load()
    results = [*selftest.block_quantized_mm.check_block_quantized_mm(kernels, _extension.gpu(), *kind)]
    assert results or kernels.compiled_for(_extension.gpu().arch) < 80
    assert [result for result in results if result.wrong] == []


@pytest.mark.gpu
def test_the_kernels_pass_quantize():
    assert [result for result in selftest.quantize.check_quantize(3, 1000) if result.wrong] == []


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", selftest.conv.CONVOLUTIONS, ids=str)
def test_the_kernels_pass_conv(sizes, monkeypatch):
    monkeypatch.setattr(selftest.conv, "CONV_IMAGE", (7, 6))
    kernels, _ = _extension._load()
    results = [*selftest.conv.check_conv(kernels, _extension.gpu(), *sizes)]
    assert results or kernels.compiled_for(_extension.gpu().arch) < 80
    assert [result for result in results if result.wrong] == []
