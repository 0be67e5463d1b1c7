"""benchmarks/conv/kernels.py, on a stand-in for the extension, with times that are given."""

import types

import pytest

from jax_qmm import _extension
from jax_qmm.bench import convs, measure


@pytest.fixture
def lines(load_script, monkeypatch, tmp_path):
    """Those of the CSV, and what kernel each call was restricted to."""
    only = [""]
    problem = types.SimpleNamespace(choices=lambda gpu: ["narrow", "wide"])
    kernels = types.SimpleNamespace(
        ConvProblem=lambda *sizes: problem, restrict_conv=lambda words: only.__setitem__(0, words)
    )
    ran = []
    monkeypatch.setattr(_extension, "_load", lambda: (kernels, None))
    monkeypatch.setattr(measure, "open_gpu", lambda command: (None, types.SimpleNamespace(name="a GPU", peak=1e15)))
    monkeypatch.setattr(measure, "jit_us", lambda function, sets: ran.append(only[0]) or float(len(ran)))
    layers = convs.Layer(6, 16, 16), convs.Layer(6, 16, 16, 1), convs.Layer(6, 16, 16, 1, 2)
    monkeypatch.setattr(convs, "NETWORKS", {"small": layers})
    monkeypatch.setattr("sys.argv", ["kernels.py", "--images", "2", "--csv", str(tmp_path / "out.csv")])
    load_script("benchmarks/conv/kernels.py").main()
    return (tmp_path / "out.csv").read_text().splitlines(), ran


def test_each_kernel_of_each_layer_that_is_no_product(lines):
    rows, ran = lines
    assert ran == ["narrow", "wide", ""] * 2
    assert rows[:4] == [
        "gpu,images,layer,kernel,us",
        'a GPU,2,"6x6x16, 3x3",narrow,1.0',
        'a GPU,2,"6x6x16, 3x3",wide,2.0',
        'a GPU,2,"6x6x16, 3x3",XLA bfloat16,3.0',
    ]
    assert len(rows) == 7 and all("stride 2" in row for row in rows[4:])
