import types

import pytest

from jax_qmm.bench import measure


@pytest.fixture
def run_main(load_script, monkeypatch, tmp_path):
    """Runs a script whose calls take 1, 2, 3... us; gives the functions timed, in their order, and the CSV's lines."""

    def run(script, *arguments, **changes):
        module, timed = load_script(script), []
        monkeypatch.setattr(measure, "open_gpu", lambda command: (None, types.SimpleNamespace(name="a GPU")))
        monkeypatch.setattr(measure, "jit_us", lambda function, sets: timed.append(function) or float(len(timed)))
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr("sys.argv", [script, "--out", str(tmp_path / "out.csv"), *arguments])
        module.main()
        return timed, (tmp_path / "out.csv").read_text().splitlines()

    return run
