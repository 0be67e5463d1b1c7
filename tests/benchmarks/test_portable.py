"""The benchmark of the portable kernels writes what it measures, of the kernels that the cost model takes for fast."""

import csv
import gzip
import math

import pytest

from jax_qmm.bench import measure, shapes


@pytest.fixture
def run(extension, load_script, monkeypatch, tmp_path):
    def run(*arguments):
        module = load_script("benchmarks/sm80/portable.py")
        h200 = extension.Gpu("NVIDIA H200", 132, 90)
        rate = tmp_path / "mma_rate"
        rate.write_text("#!/bin/sh\necho 500.0\n")
        rate.chmod(0o755)
        monkeypatch.setitem(shapes.MODELS, "llama-3-70b", ())
        monkeypatch.setitem(shapes.MODELS, "llama-3-8b", ((4096, 1024),))
        monkeypatch.setattr(measure, "open_gpu", lambda command: (extension, h200))
        monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4e12)
        monkeypatch.setattr(measure, "kernel_us", lambda *of: [9.0 - i / 10 for i in range(len(of[2]))])
        monkeypatch.setattr(measure, "jit_us", lambda function, sets: 20.0)
        monkeypatch.setattr(measure, "operands", lambda product, dtype: [()])
        monkeypatch.setattr(measure, "autotune_xla", lambda calls: None)
        out, kernels = tmp_path / "out.csv", tmp_path / "kernels.csv.gz"
        monkeypatch.setattr("sys.argv", ["portable.py", str(rate), str(out), "--kernels", str(kernels), *arguments])
        module.main()
        with gzip.open(kernels, "rt") as file:
            return [*csv.DictReader(out.read_text().splitlines())], [*csv.DictReader(file)]

    return run


def test_bounds_predictions_and_the_fastest_are_beside_the_chosen_kernel(run, capsys):
    rows, times = run("--m", "16,4096", "--xla")
    assert [row["m"] for row in rows] == ["16", "4096"]
    for row in rows:
        of_it = [time for time in times if time["m"] == row["m"]]
        assert row["kernel"] == of_it[0]["kernel"] and row["fastest"] == of_it[-1]["kernel"]
        assert float(row["us"]) == 9 and float(row["fastest_us"]) == pytest.approx(9 - (len(of_it) - 1) / 10)
        assert 0 < float(row["predicted_us"]) < math.inf
    last = rows[-1]
    assert float(last["mma_us"]) == pytest.approx(2e-6 * 4096 * 4096 * 1024 / 500, abs=1e-3)
    assert float(last["copy_us"]) == pytest.approx((4096 * 1024 * 2 + 4096 * 4096 * 2) / 4e6, abs=1e-3)
    assert last["jit_us"] == last["xla_us"] == "20.0"
    assert "predicted / measured" in capsys.readouterr().out
