"""`python -m jax_qmm bench --scheme w4a16` and others, on a stand-in for the extension, with times that are given."""

import csv
import re

import jax
import numpy as np
import pytest

import jax_qmm
from jax_qmm import __main__ as command_line
from jax_qmm.bench import measure, schemes
from jax_qmm.schemes import W8A16

ARGUMENTS = ["--shapes", "8,256", "16,128", "--m", "1,32"]


@pytest.fixture
def bench(kernels, monkeypatch):
    """Runs the command, whose products take 13 us and XLA's 26."""

    def jit_us(function, sets):
        assert len({id(operands[1]) for operands in sets}) > 1
        jax.block_until_ready(function(*sets[0]))
        return 26.0 if function is schemes.xla_bf16 else 13.0

    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(measure, "jit_us", jit_us)
    return lambda scheme, *more: command_line.main(["bench", "--scheme", scheme, *ARGUMENTS, *more])


@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8)])
def test_the_report(bench, scheme, bits, capsys, tmp_path):
    assert bench(scheme, "--csv", str(tmp_path / "figures.csv")) == 0
    out = capsys.readouterr().out
    assert f"int{bits} weights, blocks of 128" in out
    _, header, one, many = next(part for part in out.split("\n\n") if "N 8, K 256" in part).splitlines()[-4:]
    # Values, two blocks of scales for each of 8 columns, x and y take so many us at 1 GB/s
    us = (8 * 256 * bits // 8 + 4 * 8 * 2 + 2 * 256 + 2 * 8) / 1e3
    assert one.split()[:7] == ["1", "13.0", f"{us / 13:.0%}", "0.00", "0", "26.0", "(2.00x)"]
    assert "reference: " in one and "2.00x of 4" in out and "989.5 Tera-ops/s" in out
    rows = list(csv.DictReader((tmp_path / "figures.csv").open()))
    assert len(rows) == 4 and rows[0]["roofline_us"] == f"{us:.3f}" and rows[0]["scheme"] == scheme
    assert (rows[3]["m"], rows[3]["n"], rows[3]["k"], rows[3]["xla_bf16_most_us"]) == ("32", "16", "128", "26.000")


@pytest.mark.parametrize(
    "scheme, words, runs, nbytes",
    [
        ("w8a8-block", "int8, blocks of 128", "block_scaled_mm", 8 * 256 + 4 * 8 * 2),
        ("fp8-block", "weights in tiles of 128 x 128", "block_scaled_mm", 8 * 256 + 4 * 2),
        ("w4a8", "int4 weights, blocks of 128, int8 activations", "expanded_mm", 8 * 256 // 2 + 8 * 2 + 4 * 8),
        ("w4a8-fp8", "blocks of 128, float8_e4m3fn activations", "block_scaled_mm", 8 * 256 // 2 + 4 * 8 * 2),
    ],
)
def test_quantized_activations(bench, scheme, words, runs, nbytes, capsys):
    assert bench(scheme) == 0
    out = capsys.readouterr().out
    assert words in out and re.search(r"\b1979(\.0)? Tera-ops/s", out)  # the peak of 8 bits
    *_, one, _ = next(part for part in out.split("\n\n") if "N 8, K 256" in part).splitlines()
    us = (nbytes + 2 * 256 + 2 * 8) / 1e3
    assert one.split()[:3] == ["1", "13.0", f"{us / 13:.0%}"]
    operands = (
        jax.ShapeDtypeStruct((4, 256), "bfloat16"),
        schemes.SCHEMES[scheme].quantize_weight(np.ones((8, 256), np.float32), (1,)),
    )
    *_, op = jax_qmm.explain(schemes.product(schemes.SCHEMES[scheme]), *operands).rows
    assert op.op.startswith(runs)


def test_xla_may_fail_on_all_products_together(bench, monkeypatch, capsys):
    def fail(calls):
        assert [(x.shape, w.shape) for _, (x, w) in calls] == [
            ((m, k), (n, k)) for n, k in ((8, 256), (16, 128)) for m in (1, 32)
        ]
        raise RuntimeError("out of memory\nand much more")

    monkeypatch.setattr(measure, "autotune_xla", fail)
    assert bench("w4a16") == 0
    out = capsys.readouterr().out
    assert "XLA failed on all products together: out of memory\n" in out and "2.00x of 4" in out


def test_operations_bound_large_products(bench):
    rows = []
    [*schemes.measure_all("w4a16", [(32, 8, 256)], 1e30, 1e9, rows, [])]
    assert rows[0].roofline_us == pytest.approx(2 * 32 * 8 * 256 / 1e3)


def test_what_is_measured_is_the_packed_product():
    timed = {}
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(measure, "jit_us", lambda function, sets: timed.setdefault(function.__name__, sets) and 1.0)
        for call in schemes.calls(W8A16(), (2, 8, 256), 100.0).values():
            call()
    (x, w), (_, other) = timed["ours"][:2]
    assert w.is_packed and w.shape == (8, 256) and x.dtype == "bfloat16" and (w.qvalue != other.qvalue).any()
    assert np.unique(w.qvalue).size > 100  # random ones: the clock depends on the operands
    assert timed["xla_bf16"][0][1].dtype == "bfloat16"


def test_an_interrupt_reports_what_there_is(bench, monkeypatch, capsys):
    left = iter([26.0] * 9)
    monkeypatch.setattr(measure, "jit_us", lambda *call: next(left, None) or (_ for _ in ()).throw(KeyboardInterrupt))
    assert bench("w4a16") == 130
    out = capsys.readouterr().out
    assert "2 of 4 products were measured" in out and "N 8, K 256" in out and "N 16" not in out


def test_the_csv_grows_row_by_row(bench, monkeypatch, tmp_path):
    lines, file = [], tmp_path / "figures.csv"

    def jit_us(function, sets):
        lines.append(len(file.read_text().splitlines()) if file.exists() else 0)
        return 13.0

    monkeypatch.setattr(measure, "jit_us", jit_us)
    assert bench("w4a16", "--csv", str(file)) == 0
    assert lines == [before for before in (0, 2, 3, 4) for _ in range(6)]


def test_a_failure_of_one_leaves_the_rest(bench, monkeypatch, capsys):
    def jit_us(function, sets):
        if function is schemes.xla_bf16 and sets[0][0].shape[0] == 32:
            raise RuntimeError("out of memory\nmore")
        return 13.0

    monkeypatch.setattr(measure, "jit_us", jit_us)
    bench("w4a16")
    out = capsys.readouterr().out
    assert "bf16 XLA in jit failed on M 32, N 8, K 256: out of memory\n" in out and "more" not in out
    assert "1.00x of 2" in out


def test_without_a_gpu_it_says_what_it_needs(capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["bench", "--scheme", "w4a16"])
    assert stopped.value.code == 2
    assert re.search("bench measures the kernels on a GPU, and can't: ", capsys.readouterr().err)


@pytest.mark.parametrize("more", [["--peers", "xla"], ["--png", "figure.png"]])
def test_options_of_other_schemes_are_refused(more):
    with pytest.raises(SystemExit, match="leave --check, --peers and --png out"):
        command_line.main(["bench", "--scheme", "w8a16", *more])


def test_dtypes_of_8_bit_operands_are_refused():
    with pytest.raises(SystemExit, match="--scheme w4a16 has dtypes of its own: leave --dtype out"):
        command_line.main(["bench", "--scheme", "w4a16", "--dtype", "fp8"])
