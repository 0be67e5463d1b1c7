"""Recording kernels into XLA's CUDA graphs: the ABI that it stands on, and what it does with stand-ins for XLA."""

import os
from importlib import metadata
from pathlib import Path

import jax
import pytest

from jax_qmm import _compat


def jaxlib_headers(version):
    """The include directory of a release: the installed one, or one in JAX_QMM_JAXLIBS, a folder with one each."""
    if metadata.version("jaxlib") == version:
        return Path(jax.ffi.include_dir())
    folder = Path(os.environ.get("JAX_QMM_JAXLIBS", "/nonexistent"), version, "jaxlib", "include")
    if not folder.exists():
        pytest.skip(f"jaxlib {version} is neither installed nor unpacked in $JAX_QMM_JAXLIBS/{version}")
    return folder


@pytest.mark.parametrize("version", _compat.RECORDING_RELEASES)
def test_releases_have_the_abi_that_recording_stands_on(compile_cc, version):
    compile_cc("-fsyntax-only", "-isystem", jaxlib_headers(version), Path(__file__).with_name("record_abi.cc"))


@pytest.fixture(scope="module")
def record(build_cases):
    return build_cases("record", "ffi/record.cc", "ffi/register.cc", "core/launch.cc")


def test_record(record, case):
    record(case)


@pytest.mark.parametrize("case", ["kernels_follow_each_other", "launches_have_attributes"])
def test_launches_overlap_unless_it_is_switched_off(record, case):
    record(case, JAX_QMM_PDL="0")
