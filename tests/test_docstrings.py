"""Runs the examples of all docstrings, of the package as installed."""

import doctest
import importlib
import pkgutil

import pytest

import jax_qmm

_MODULES = sorted(
    m.name for m in pkgutil.walk_packages(jax_qmm.__path__, "jax_qmm.") if not m.name.endswith(("__main__", "_kernels"))
)


@pytest.mark.parametrize("name", ["jax_qmm", *_MODULES])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
