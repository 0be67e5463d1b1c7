"""`python -m jax_qmm tune`, on a stand-in for the extension."""

import json
import re
import warnings

import pytest

from jax_qmm import __main__ as command_line, _extension, tuning
from jax_qmm.bench import tune

ARGUMENTS = ["tune", "--shapes", "64,32", "--m", "1,8", "--dtype", "int8"]


def stored(file):
    products = json.loads(file.read_text())["products"]
    return [(entry["m"], entry["kernel"], entry["microseconds"]) for entry in products]


def test_the_fastest_is_stored_and_serves_later(kernels, capsys):
    assert command_line.main(ARGUMENTS) == 0
    file = tuning.default_path()
    assert stored(file) == [(1, "generic", 10.0), (8, "generic", 10.0)]
    out = capsys.readouterr().out
    assert "generic  1.30x sm90 wide" in out
    assert "2 of 2 products get another kernel than the cost model's: 1.300 times as fast" in out
    assert f"{file} holds 2 products on NVIDIA H200\n" in out
    assert kernels.tuned == {}
    _extension._load_tuning.cache_clear()  # a later process
    assert _extension.describe_scaled_mm(8, 64, 32, 1, "int8", "bfloat16", False) == "generic (tuned)"


def test_files_name_kernels_by_what_they_were_written_for_and_reports_by_what_runs(kernels, capsys):
    kernels.code = 80
    kernels.us["generic"] = 20.0
    command_line.main(ARGUMENTS)
    assert [kernel for _, kernel, _ in stored(tuning.default_path())] == ["sm90 narrow swizzle 1"] * 2
    assert "sm80 narrow swizzle 1  1.18x sm80 wide" in capsys.readouterr().out


def test_every_kernel_is_measured_and_the_best_ones_again(kernels):
    command_line.main(ARGUMENTS)
    (product, everything, once), *again = (call for call in kernels.measured if call[0][0] == 1)
    assert product == (1, 64, 32, "int8", "bfloat16", False, False)
    assert everything == [(-1, 1), (0, 1), (1, 1), (2, 1)] and once == 1
    assert all(repeated == product and rounds > once for repeated, _, rounds in again)
    # Each alone, and three times, in other orders.
    orders = [tuple(choice for _, [choice], _ in again[i : i + 4]) for i in range(0, 12, 4)]
    assert len(again) == 12 and len(set(orders)) == 3
    assert [sorted(order) for order in orders] == [everything] * 3


def test_large_products_take_turns_three_times_and_run_alone_like_others(kernels):
    command_line.main(["tune", "--shapes", "8192,8192", "--m", "4096", "--dtype", "int8"])
    assert [call[2] for call in kernels.measured] == [3] + 12 * [9]


def test_reading_much_does_not_lower_the_clock(kernels):
    command_line.main(["tune", "--shapes", "57344,8192", "--m", "16", "--dtype", "int8"])
    assert [call[2] for call in kernels.measured] == [1] + 12 * [9]


def test_one_turn_of_another_clock_does_not_count(kernels, monkeypatch):
    us = {(-1, 1): [9.0, 13.0, 13.0], (0, 1): [30.0, 11.0, 11.0], (1, 1): [12.0] * 3, (2, 1): [12.5] * 3}
    us = {choice: 2 * of for choice, of in us.items()}  # for two products
    monkeypatch.setattr(tune, "alone_us", lambda _, product, choice: us[choice].pop(0) * product.m)
    command_line.main(ARGUMENTS)
    assert stored(tuning.default_path()) == [(1, "sm90 narrow swizzle 1", 11.0), (8, "sm90 narrow swizzle 1", 88.0)]


def test_the_default_stays_where_the_gain_is_noise(kernels, capsys):
    kernels.us |= {"generic": 9.95, "sm90 wide": 10.0}
    command_line.main(ARGUMENTS)
    assert stored(tuning.default_path()) == [(1, "sm90 wide", 10.0), (8, "sm90 wide", 10.0)]
    assert "0 of 2 products" in capsys.readouterr().out


def test_earlier_tuning_does_not_count_as_the_default(kernels, capsys):
    command_line.main(ARGUMENTS)
    _extension._load_tuning.cache_clear()
    capsys.readouterr()
    command_line.main(ARGUMENTS)
    assert "2 of 2 products get another kernel" in capsys.readouterr().out


def test_what_the_file_has_of_other_products_stays(kernels, tmp_path, capsys):
    file = tmp_path / "mine.json"
    command_line.main([*ARGUMENTS, "--file", str(file)])
    out = capsys.readouterr().out
    assert f"{file} holds 2 products on NVIDIA H200; set JAX_QMM_TUNING={file} to load it" in out
    kernels.us["sm90 narrow swizzle 8"] = 5.0
    command_line.main(["tune", "--shapes", "64,32", "--m", "8,9", "--dtype", "int8", "--file", str(file)])
    assert stored(file) == [(1, "generic", 10.0), (8, "sm90 narrow swizzle 8", 5.0), (9, "sm90 narrow swizzle 8", 5.0)]


def test_the_file_is_that_of_the_environment(kernels, tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.json"
    monkeypatch.setenv("JAX_QMM_TUNING", str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the file is not there yet, which is no fault
        command_line.main(ARGUMENTS)
    assert f"{file} holds 2 products on NVIDIA H200\n" in capsys.readouterr().out
    assert len(stored(file)) == 2


def test_dtypes(kernels):
    command_line.main([*ARGUMENTS, "fp8", "--out-dtype", "float16", "float32"])
    assert {product[3:] for product, *_ in kernels.measured} == {
        ("int8", "float16", False, False),
        ("int8", "float32", False, False),
        ("float8_e4m3fn", "float16", True, False),
        ("float8_e4m3fn", "float32", True, False),
    }


def test_products_with_the_full_epilogue_are_others(kernels, capsys):
    command_line.main([*ARGUMENTS, "--out-dtype", "bfloat16", "int8"])
    kernels.us["generic"] = 20.0
    command_line.main([*ARGUMENTS, "--full-epilogue"])
    assert {product[3:] for product, *_ in kernels.measured} == {
        ("int8", "bfloat16", False, False),
        ("int8", "bfloat16", False, True),
        ("int8", "int8", False, True),  # results of 8 bits have no other
    }
    assert re.search(r"\n *int8 +bfloat16 +full +8 .* sm90 narrow swizzle 1", capsys.readouterr().out)
    _extension._load_tuning.cache_clear()  # a later process
    kind = 1, "int8", "bfloat16", False
    assert _extension.describe_scaled_mm(8, 64, 32, *kind) == "generic (tuned)"
    assert _extension.describe_scaled_mm(8, 64, 32, *kind, True) == "sm90 narrow swizzle 1 (tuned)"


def test_an_interrupt_keeps_what_is_measured(kernels, capsys):
    kernels.interrupt_after = 15  # in the second product
    assert command_line.main(ARGUMENTS) == 130
    assert stored(tuning.default_path()) == [(1, "generic", 10.0)]
    captured = capsys.readouterr()
    assert "1 of 1 products get another kernel" in captured.out
    assert "interrupted" in captured.err


def test_a_product_that_fails_is_left_out(kernels, monkeypatch, capsys):
    def measure(m, *arguments):
        if m == 1:
            raise RuntimeError("measuring: out of memory")
        return type(kernels).measure_scaled_mm(kernels, m, *arguments)

    monkeypatch.setattr(kernels, "measure_scaled_mm", measure)
    assert command_line.main(ARGUMENTS) == 0
    assert stored(tuning.default_path()) == [(8, "generic", 10.0)]
    assert "left out: int8 to bfloat16, M 1, N 64, K 32 (measuring: out of memory)" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "keep me", '{"format": "jax_qmm tuning 1", "device_kind": "NVIDIA H100"}'])
def test_no_other_file_is_overwritten(kernels, tmp_path, capsys, content):
    file = tmp_path / "notes.json"
    file.write_text(content)
    with pytest.raises(SystemExit) as exit:
        command_line.main([*ARGUMENTS, "--file", str(file)])
    assert exit.value.code == 2
    assert f"{file} would be overwritten" in capsys.readouterr().err
    assert file.read_text() == content and kernels.measured == []


def test_a_file_that_cannot_be_written_is_named_before_measuring(kernels, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit:
        command_line.main([*ARGUMENTS, "--file", str(tmp_path / "file" / "tuning.json")])
    assert exit.value.code == 2
    assert "tuning.json can't be written: " in capsys.readouterr().err
    assert kernels.measured == []


def test_a_folder_is_no_file(kernels, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        command_line.main([*ARGUMENTS, "--file", str(tmp_path)])
    assert exit.value.code == 2
    assert f"{tmp_path} is a folder; name a file with --file" in capsys.readouterr().err
    assert kernels.measured == []


def test_a_file_that_can_no_longer_be_written_ends_with_what_it_holds(kernels, monkeypatch, capsys):
    save = tuning.save

    def full(file, gpu, entries):
        if len(entries) == 2:
            raise OSError(28, "No space left on device")
        save(file, gpu, entries)

    monkeypatch.setattr(tuning, "save", full)
    with pytest.raises(SystemExit) as exit:
        command_line.main(ARGUMENTS)
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert "tuning.json holds 1 products" in captured.out
    assert "tuning.json can't be written: No space left on device" in captured.err


def test_the_home_folder_may_be_written_as_a_tilde(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    command_line.main([*ARGUMENTS, "--file=~/mine.json"])
    assert len(stored(tmp_path / "mine.json")) == 2
