"""Devices and drivers that the kernels do not run on."""

import pytest


@pytest.fixture(scope="module")
def device(build_cases):
    return build_cases("device", "ffi/device.cc", archs='"80", "89", "90a", "100"', ptx=100)


def test_device(device, case):
    device(case)
