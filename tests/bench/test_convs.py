"""`python -m jax_qmm bench --scheme conv` on a stand-in for the extension, with times that are given."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_qmm import __main__ as command_line
from jax_qmm.bench import convs, measure
from jax_qmm.bench.convs import Layer

LAYERS = (Layer(6, 64, 32, 3, 2), Layer(5, 8, 8, groups=8))


@pytest.fixture
def bench(kernels, monkeypatch):
    """Runs the command, whose convolutions take 10 us, XLA's int8 20 and its bfloat16 30."""
    times = {convs.xla_int8_conv: 20.0, convs.xla_bf16_conv: 30.0}

    def jit_us(function, sets):
        assert len({id(operands[1]) for operands in sets}) > 1
        jax.block_until_ready(function(*sets[0]))
        return times.get(function.func, 10.0)

    monkeypatch.setattr(convs, "NETWORKS", {"tiny": LAYERS})
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(measure, "jit_us", jit_us)
    return lambda *more: command_line.main(["bench", "--scheme", *more])


def test_the_report(bench, capsys, tmp_path):
    assert bench("conv", "--m", "1,4", "--csv", str(tmp_path / "figures.csv")) == 0
    out = capsys.readouterr().out
    _, header, one, four = next(part for part in out.split("\n\n") if "6x6x64, 3x3, stride 2" in part).splitlines()
    # Images, weights, scale and bias of 32 channels, results, at 1 GB/s
    us = (6 * 6 * 64 + 32 * 9 * 64 + 8 * 32 + 9 * 32) / 1e3
    assert one.split()[:3] == ["9", "10.0", f"{us / 10:.0%}"] and "(2.00x)" in one and "(3.00x)" in one
    assert four.split()[0] == "36" and "reference: " in one
    assert "2.00x of 4" in out and "M 9, N 32, K 576 (6x6x64, 3x3, stride 2)" in out
    rows = list(csv.DictReader((tmp_path / "figures.csv").open()))
    assert [(row["layer"], row["images"]) for row in rows] == [(str(layer), n) for layer in LAYERS for n in "14"]
    assert rows[0]["roofline_us"] == f"{us:.3f}" and rows[0]["network"] == "tiny" and rows[0]["k"] == "576"
    assert rows[2]["k"] == "9" and rows[2]["xla_us"] == "20.000"


def test_weights_alone(bench, capsys):
    assert bench("conv-w4a16", "--m", "1") == 0
    out = capsys.readouterr().out
    assert (
        "5x5x8" not in out
        and "reference: platform cpu has no kernels" in out
        and "(3.00x)" in out
        and "int8 XLA" not in out
    )


def test_xla_may_fail_on_all_layers_together(bench, monkeypatch, capsys):
    def fail(scheme, layers, images):
        raise RuntimeError("out of memory\nand much more")

    monkeypatch.setattr(convs, "autotune_xla", fail)
    assert bench("conv", "--m", "1") == 0
    out = capsys.readouterr().out
    assert "XLA failed on all layers of 1 together: out of memory\n" in out and "2.00x of 2" in out


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_contestants_compute_the_same(layer):
    functions = convs.contestants("conv", layer, 2)
    operands = functions["ours"][1](0)
    got, want = (functions[name][0](*operands) for name in ("ours", "xla"))
    assert got.shape == (2, layer.out_size, layer.out_size, layer.out) and got.dtype == jnp.int8
    # Sums below 2^24 are exact in float32; a half may round to either side, as factors are multiplied in another order.
    assert abs(np.int32(got) - np.int32(want)).max() <= 1 and len(np.unique(got)) > 3
    float_functions = convs.contestants("conv-w4a16", layer._replace(groups=1), 2)
    assert float_functions["xla_bf16"][0](*float_functions["xla_bf16"][1](0)).dtype == jnp.bfloat16
    assert float_functions["ours"][1](0)[1].is_packed


def test_layers_are_those_of_the_networks():
    resnet = convs.NETWORKS["resnet-50"]
    assert len(set(resnet)) == len(resnet) == 23
    chained = {(layer.out_size, layer.out) for layer in resnet} | {(224, 3), (56, 64)}  # pooled after the first
    assert all((layer.size, layer.channels) in chained for layer in resnet)
    assert all(layer.channels % 64 == 0 for _, layer in convs.layers_of("conv-w4a16"))


def test_what_does_not_belong_is_refused():
    for more, words in (
        (["--model", "llama-3-8b"], "leave --model and --shapes out"),
        (["--dtype", "int8"], "--dtype"),
    ):
        with pytest.raises(SystemExit, match=words):
            command_line.main(["bench", "--scheme", "conv", *more])
