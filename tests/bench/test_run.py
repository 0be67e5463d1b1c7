"""`python -m jax_qmm bench`, on a stand-in for the extension and with peers whose times are given."""

import csv
import dataclasses
import itertools
import re
import sys

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from jax_qmm import __main__ as command_line, _extension
from jax_qmm.bench import cublaslt, figure, measure, run
from jax_qmm.tuning import Product

ARGUMENTS = ["bench", "--shapes", "64,32", "32,64", "--m", "1,32"]
# Microseconds of the peers; ours are 13, those of the stand-in's default.
US = {"cublaslt": 26.0, "cublaslt_tensorwise": 19.5, "cublas_bf16": 39.0, "jit": 20.0, "xla": 15.0, "xla_bf16": 40.0}


@pytest.fixture
def bench(kernels, monkeypatch):
    """Runs the command with the given arguments."""

    def times(*names):
        return {name: lambda name=name: US[name] for name in names}

    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4e9)
    monkeypatch.setattr(measure, "autotune_xla", lambda products: None)
    monkeypatch.setattr(measure, "in_jit", lambda product: times("jit", "xla", "xla_bf16"))
    monkeypatch.setattr(cublaslt, "missing", lambda: "")
    monkeypatch.setattr(cublaslt, "version", lambda: "2.11")
    monkeypatch.setattr(
        cublaslt,
        "calls",
        lambda product: times(
            "cublas_bf16",
            *["cublaslt"] * (product.m > 16 or product.dtype != "int8"),
            *["cublaslt_tensorwise"] * (product.dtype != "int8"),
        ),
    )
    return lambda *more: command_line.main([*ARGUMENTS, *more])


def test_the_table_reads_like_a_report(bench, capsys):
    assert bench() == 0
    out = capsys.readouterr().out
    gpu = "NVIDIA H200 (compute capability 9.0, code for 9.0)"
    assert re.match(rf"jax_qmm on {re.escape(gpu)}, jax [\d.]+, PyTorch 2.11\n", out)
    tables = out.split("\n\n")
    assert [table.splitlines()[0] for table in tables if ", N " in table.splitlines()[0]] == [
        "int8, N 64, K 32",
        "fp8, N 64, K 32",
        "int8, N 32, K 64",
        "fp8, N 32, K 64",
    ]
    (table,) = [table for table in tables if table.startswith("int8, N 64, K 32")]
    _, header, one, many = table.splitlines()
    assert header.split("  ")[-1] == "kernel" and "jax_qmm in jit" in header
    # 1 * 32 + 64 * 32 + 2 * 1 * 64 bytes take 0.55 us at 4 GB/s.
    assert (
        one.split()
        == ("1 13.0 4% 0.00 0 39.0 (3.00x) 20.0 15.0 (0.75x) 40.0 (2.00x) sm90 wide (by the cost model)").split()
    )
    assert "26.0 (2.00x)" in many
    assert "roofline: bytes at 0.00 TB/s" in out


def test_kernels_are_named_by_the_code_that_runs(bench, kernels, capsys):
    kernels.code = 80
    bench("--peers", "none")
    out = capsys.readouterr().out
    assert out.startswith("jax_qmm on NVIDIA H200 (compute capability 9.0, PTX for 8.0), jax ")
    assert "sm80 wide (by the cost model)" in out and "sm90" not in out


def test_the_roofline_is_the_gpus(bench, monkeypatch, capsys):
    monkeypatch.setattr(_extension.gpu(), "peak", 624e12)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 1e30)
    bench("--peers", "none", "--shapes", "60000,5200", "--m", "13", "--dtype", "int8")
    out = capsys.readouterr().out
    assert re.search(r"\n13 +13.0 +100%", out) and "or operations at 624 Tera-ops/s" in out


def test_the_summary_names_the_worst(bench, kernels, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "measure_scaled_mm", lambda m, n, k, *more: [52.0 if (m, n) == (32, 32) else 13.0])
    bench("--dtype", "int8")
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "speed over cuBLASLt" in line]
    assert line.split() == "int8 speed over cuBLASLt 1.00x of 2 0.50x M 32, N 32, K 64".split()
    (line,) = [line for line in out.splitlines() if "speed over XLA in jit" in line]
    assert "0.75x of 4" in line


def test_csv(bench, tmp_path):
    file = tmp_path / "figures.csv"
    assert bench("--csv", str(file)) == 0
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 8
    times = dict(ours="13.000", cublaslt="", cublaslt_tensorwise="", cublas_bf16="39.000")
    times |= dict(jit="20.000", xla="15.000", xla_bf16="40.000")
    assert rows[0] == {
        "gpu": "NVIDIA H200",
        "dtype": "int8",
        "out_dtype": "bfloat16",
        "m": "1",
        "n": "64",
        "k": "32",
        "kernel": "sm90 wide (by the cost model)",
        "copy_tb_per_s": "0.004",
        "roofline_us": "0.552",
        **{f"{name}{of}_us": us for name, us in times.items() for of in ("", "_least", "_most")},
    }
    assert [row["cublaslt_us"] for row in rows] == ["", "26.000", "26.000", "26.000"] * 2
    assert [row["cublaslt_tensorwise_us"] for row in rows] == ["", "", "19.500", "19.500"] * 2


def test_ours_is_the_kernel_that_would_run(bench, kernels):
    bench("--peers", "none", "--dtype", "int8")
    assert [choices for _, choices, *_ in kernels.measured] == [[(2, 1)]] * 4 * measure.TURNS
    kernels.measured.clear()
    kernels.tuned[1, 64, 32, 1, "int8", "bfloat16", False, False] = (0, 1)
    bench("--peers", "none", "--dtype", "int8")
    assert [choices for _, choices, *_ in kernels.measured][:: measure.TURNS] == [[(0, 1)]] + [[(2, 1)]] * 3


def test_every_turn_has_another_order_and_the_median_counts(bench, kernels, monkeypatch, tmp_path):
    asked = []

    def timed(name, times):
        times = iter(times)
        return lambda *_: asked.append(name) or next(times)

    ours = timed("ours", [[13.0], [99.0], [14.0]])
    monkeypatch.setattr(kernels, "measure_scaled_mm", ours)
    monkeypatch.setattr(cublaslt, "calls", lambda product: {"cublaslt": timed("cublaslt", [30.0, 28.0, 27.0])})
    monkeypatch.setattr(
        measure, "in_jit", lambda product: {"jit": timed("jit", [20.0, 22.0, 23.0]), "xla": timed("xla", [15, 17, 18])}
    )
    bench("--shapes", "64,32", "--m", "1", "--dtype", "int8", "--csv", str(tmp_path / "a.csv"))
    turns = [asked[i : i + 4] for i in range(0, 12, 4)]
    assert len(asked) == 12 and all(sorted(turn) == ["cublaslt", "jit", "ours", "xla"] for turn in turns)
    assert len(set(map(tuple, turns))) == 3
    (row,) = csv.DictReader((tmp_path / "a.csv").open())
    assert [row[f"ours{of}_us"] for of in ("", "_least", "_most")] == ["14.000", "13.000", "99.000"]
    assert [row[f"cublaslt{of}_us"] for of in ("", "_least", "_most")] == ["28.000", "27.000", "30.000"]
    assert row["jit_us"] == "22.000" and row["xla_us"] == "17.000"


@pytest.mark.parametrize(
    ("peers", "columns"),
    [
        ("xla", {"ours", "jit", "xla", "xla_bf16"}),
        ("cublaslt", {"ours", "cublaslt", "cublaslt_tensorwise", "cublas_bf16"}),
        ("xla,cublaslt", set(run.LABELS)),
        ("none", {"ours"}),
    ],
)
def test_peers_are_chosen(bench, tmp_path, peers, columns):
    file = tmp_path / "figures.csv"
    bench("--peers", peers, "--csv", str(file))
    rows = list(csv.DictReader(file.open()))
    assert {name for row in rows for name in run.LABELS if row[f"{name}_us"]} == columns


def test_xla_chooses_for_all_products_of_one_m_together(bench, monkeypatch):
    together = []
    monkeypatch.setattr(measure, "autotune_xla", together.append)
    bench()
    assert [[(function, a.shape[0], a.dtype, b.shape[0]) for function, (a, b, *_) in calls] for calls in together] == [
        [(measure.xla_scaled_mm, m, dtype, n) for n in (64, 32) for dtype in ("int8", "float8_e4m3fn")]
        + [(measure.xla_bf16, m, "bfloat16", n) for n in (64, 32)]
        for m in (1, 32)
    ]
    together.clear()
    bench("--peers", "cublaslt")
    assert together == []


def test_torch_may_be_absent(bench, monkeypatch, capsys):
    monkeypatch.setattr(cublaslt, "missing", lambda: "PyTorch does not load here")
    assert bench() == 0
    out = capsys.readouterr().out
    assert "\ncuBLASLt is left out: PyTorch does not load here.\n" in out and "PyTorch 2.11" not in out
    assert "speed over XLA" in out and "speed over cuBLASLt" not in out


def test_xla_may_fail_on_all_products_together(bench, monkeypatch, capsys, tmp_path):
    def fail(products):
        raise RuntimeError("out of memory\nand much more")

    monkeypatch.setattr(measure, "autotune_xla", fail)
    assert bench("--csv", str(tmp_path / "a.csv")) == 0
    assert "XLA failed on all products of M 32 together: out of memory\n" in capsys.readouterr().out
    assert [row["xla_us"] for row in csv.DictReader((tmp_path / "a.csv").open())] == ["15.000"] * 8


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_reports_what_there_is(bench, kernels, tmp_path, capsys):
    kernels.interrupt_after = 2 * measure.TURNS + 1
    assert bench("--csv", str(tmp_path / "a.csv"), "--png", str(tmp_path / "a.png")) == 130
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 3
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert "fp8, N 64, K 32" in captured.out and "N 32, K 64" not in captured.out
    assert "interrupted: 3 of 8 products were measured" in captured.out
    assert captured.err.endswith("\ninterrupted\n")


def test_any_other_end_reports_what_there_is(bench, tmp_path, monkeypatch, capsys):
    def fail():
        raise ValueError("unforeseen")

    monkeypatch.setattr(measure, "in_jit", lambda product: {"jit": fail})
    with pytest.raises(ValueError, match="unforeseen"):
        bench("--csv", str(tmp_path / "a.csv"))
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 1
    assert "stopped by ValueError: 1 of 8 products were measured" in capsys.readouterr().out


def test_an_interrupt_in_a_peer_keeps_the_rest_of_its_row(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "in_jit", lambda product: {"jit": interrupt})
    assert bench("--csv", str(tmp_path / "a.csv")) == 130
    (row,) = csv.DictReader((tmp_path / "a.csv").open())
    assert row["ours_us"] == "13.000" and row["cublas_bf16_us"] == "39.000" and row["jit_us"] == ""


def test_an_interrupt_before_the_first_product_writes_nothing(bench, kernels, tmp_path, capsys):
    kernels.interrupt_after = 0
    assert bench("--csv", str(tmp_path / "a.csv"), "--png", str(tmp_path / "a.png")) == 130
    assert list(tmp_path.iterdir()) == []
    assert "0 of 8 products" in capsys.readouterr().out


def test_a_failure_without_a_message_has_its_kind_named(bench, monkeypatch, capsys):
    def fail():
        raise RuntimeError

    monkeypatch.setattr(cublaslt, "calls", lambda product: {"cublaslt": fail})
    assert bench() == 0
    assert "cuBLASLt failed on int8 to bfloat16, M 1, N 64, K 32: RuntimeError\n" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--csv", "--png"])
def test_a_file_that_cannot_be_written_is_named_before_measuring(bench, kernels, option, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit) as exit:
        bench(option, str(tmp_path / "a.out"))
    assert exit.value.code == 2
    assert "a.out can't be written" in capsys.readouterr().err
    assert kernels.measured == []


def test_failures_are_named_and_the_rest_goes_on(bench, kernels, monkeypatch, capsys, tmp_path):
    def fail():
        raise RuntimeError("out of memory\nand much more")

    def measured(m, n, *more):
        return fail() if (m, n) == (1, 64) else [13.0]

    monkeypatch.setattr(kernels, "measure_scaled_mm", measured)
    monkeypatch.setattr(cublaslt, "calls", lambda product: {"cublaslt": fail})
    assert bench("--dtype", "int8", "--csv", str(tmp_path / "a.csv")) == 0
    out = capsys.readouterr().out
    assert "jax_qmm failed on int8 to bfloat16, M 1, N 64, K 32: out of memory\n" in out
    assert out.count("cuBLASLt failed on") == 3
    assert [row["xla_us"] for row in csv.DictReader((tmp_path / "a.csv").open())] == ["15.000"] * 3


def rows(weights):
    """Rows of which all was measured."""
    times = lambda i: {name: [us] for name, us in ({"ours": 12.5 + i} | US).items()}
    return [
        dataclasses.replace(run.row_of(Product(m, n, k, 1, dtype, "bfloat16", False), "wide", 10.0), times=times(i))
        for n, k in weights
        for dtype in run.KINDS
        for i, m in enumerate((1, 16, 17, 512, 4096, 8192))
    ]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_figure_is_readable(count):
    drawing = figure.draw(rows([(1024 * (i + 1), 28672) for i in range(count)]), "jax_qmm\nroofline")
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    panels = [axes for axes in drawing.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"N {1024 * (i + 1)}, K 28672" for i in range(count)]
    (legend,) = drawing.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(
        [
            "jax_qmm, int8",
            "jax_qmm, fp8",
            "cuBLASLt, int8",
            "cuBLASLt, fp8",
            "cuBLASLt tensorwise, int8",
            "cuBLASLt tensorwise, fp8",
            "XLA in jit, int8",
            "XLA in jit, fp8",
            "bf16 cuBLAS",
            "bf16 XLA in jit",
        ]
    )
    width, height = canvas.get_width_height()
    boxes = [
        text.get_window_extent()
        for text in drawing.findobj(Text)
        if text.get_text() and text.get_visible() and (text.axes is None or not hides(text))
    ]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def hides(text):
    axes = text.axes
    ticks = axes.get_yticklabels()
    return not axes.get_visible() or text in ticks and not axes.get_subplotspec().is_first_col()


def test_the_figure_has_the_measured_shares():
    (axes,) = figure.draw(rows([(64, 32)]), "").axes
    lines = [list(line.get_ydata()) for line in axes.get_lines()]
    ours = [10 / (12.5 + i) for i in range(6)]
    assert ours in lines and [10 / 26] * 6 in lines and [10 / 15] * 6 in lines and [10 / 39] * 6 in lines
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "16", "17", "512", "4096", "8192"]


def test_a_missing_package_is_named_before_measuring(bench, kernels, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "jax_qmm.bench.figure")
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="the plot needs the package 'matplotlib'.*pip install matplotlib"):
        bench("--png", str(tmp_path / "a.png"))
    assert kernels.measured == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm"], "vllm is none of xla, cublaslt and none"),
        (["--csv", "/no/such/folder/x.csv"], "there is no folder /no/such/folder"),
        (["--png", "/"], "/ is a folder"),
    ],
)
def test_bad_arguments_are_refused(bench, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        bench(*arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
