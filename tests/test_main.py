"""The command line itself; its commands have tests of their own."""

import signal
import subprocess
import sys

import jax
import pytest

import jax_qmm
from jax_qmm import __main__ as command_line, demo


def test_no_command_prints_the_help(capsys):
    assert command_line.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_the_versions(capsys):
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"jax_qmm {jax_qmm.__version__} with jax {jax.__version__}: ")


def test_an_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def interrupt(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "main", interrupt)
    assert command_line.main(["demo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_no_import_of_a_command_can_swallow_an_interrupt(monkeypatch):
    handlers = []
    monkeypatch.setattr(command_line.importlib, "import_module", lambda name: handlers.append(signal.getsignal(2)))
    before = signal.getsignal(signal.SIGINT)
    command_line.load("demo", "jax_qmm.demo")
    assert handlers == [signal.SIG_DFL] and signal.getsignal(signal.SIGINT) is before


def test_a_closed_pipe_ends_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_qmm", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()  # before anything is printed, as by `| true`
    assert process.stderr.read() == ""
    assert process.wait() == 141


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_an_absent_flax_is_named_with_the_way_to_install_it(name):
    code = f"import sys; sys.modules['flax'] = None; import jax_qmm.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last == f'ModuleNotFoundError: jax_qmm.{name} needs flax: pip install "jax_qmm[flax]"'
