"""`bench --check`, on a stand-in for the extension whose kernels take the times that a test gives them."""

import re

import pytest

from jax_qmm import __main__ as command_line
from jax_qmm.bench import check, measure
from jax_qmm.tuning import Product

HEADER = "gpu,dtype,out_dtype,m,n,k,ours_us,ours_most_us\n"
# The stand-in's default takes 13 us.
SAME = "NVIDIA H200,int8,bfloat16,16,64,32,13.0,13.1\nNVIDIA H200,fp8,bfloat16,1,64,32,13.0,13.1\n"


@pytest.fixture
def bench(kernels, monkeypatch, tmp_path):
    """Runs the command with a file of these lines."""
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4e9)

    def bench(lines, *arguments, header=HEADER):
        file = tmp_path / "earlier.csv"
        file.write_text(header + lines)
        return command_line.main(["bench", "--check", str(file), *arguments])

    return bench


def test_what_is_as_fast_passes(bench, kernels, capsys):
    assert bench(SAME) == 0
    products = [(16, 64, 32, "int8", "bfloat16", False, False), (1, 64, 32, "float8_e4m3fn", "bfloat16", True, False)]
    assert [product for product, *_ in kernels.measured] == [p for p in products for _ in range(measure.TURNS)]
    assert "0 of 2 products are more than 5% slower" in capsys.readouterr().out


def test_what_became_slower_is_named_and_fails(bench, capsys):
    with pytest.raises(SystemExit) as exit:
        bench(SAME + "NVIDIA H200,int8,bfloat16,32,64,32,12.0,12.3\n")
    assert exit.value.code == 1
    out = capsys.readouterr().out
    assert re.search(r"int8 +32 +64 +32 +13.0 +12.0 +12.3 +1.08x +sm90 wide", out)
    assert "1 of 3 products are" in out


def test_the_slowest_turn_and_the_tolerance_bound_what_passes(bench):
    edge = 13.0 / (1 + check.TOLERANCE)
    assert bench(f"NVIDIA H200,int8,bfloat16,16,64,32,9.0,{edge + 0.01}\n") == 0
    with pytest.raises(SystemExit):
        bench(f"NVIDIA H200,int8,bfloat16,16,64,32,9.0,{edge - 0.01}\n")


def test_a_file_without_spread_serves_by_its_medians(bench):
    header = "dtype,out_dtype,m,n,k,ours_us\n"
    assert bench("int8,bfloat16,16,64,32,12.5\n", header=header) == 0
    with pytest.raises(SystemExit):
        bench("int8,bfloat16,16,64,32,12.0\n", header=header)


def test_a_product_that_fails_is_no_pass(bench, kernels, monkeypatch, capsys):
    def fail(*product):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(kernels, "measure_scaled_mm", fail)
    with pytest.raises(SystemExit) as exit:
        bench(SAME)
    assert exit.value.code == 1
    assert "out of memory" in capsys.readouterr().out


def test_some_products_of_the_file(bench, kernels):
    assert bench(SAME, "--dtype", "int8") == 0
    assert {product[3] for product, *_ in kernels.measured} == {"int8"}
    kernels.measured.clear()
    assert bench(SAME, "--m", "1") == 0
    assert {product[0] for product, *_ in kernels.measured} == {1}


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("", {}, "earlier.csv holds no products"),
        (SAME, {"header": "a,b\n"}, "earlier.csv can't be read as a CSV of bench: KeyError('m')"),
        (SAME.replace("H200", "H100 80GB HBM3"), {}, "measured on NVIDIA H100 80GB HBM3; this is NVIDIA H200"),
    ],
)
def test_a_file_that_does_not_serve_is_refused(bench, kernels, lines, options, message, capsys):
    with pytest.raises(SystemExit) as exit:
        bench(lines, **options)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert kernels.measured == []


def test_a_model_beside_the_file_is_refused(bench):
    with pytest.raises(SystemExit, match="leave --model and --shapes out"):
        bench(SAME, "--model", "llama-3-8b")


def test_the_published_figures_can_be_checked(stored):
    us = check.read(stored("scaled_mm.csv")).us
    assert len(us) == 176
    assert us[Product(1, 6144, 4096, 1, "int8", "bfloat16", False)][0] == 7.16
