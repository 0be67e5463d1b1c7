"""The handler of scaled_mm: what it reads from XLA's buffers, and which kernel it takes."""

import pytest


@pytest.fixture(scope="module")
def scaled_mm(build_cases):
    return build_cases("scaled_mm")


def test_scaled_mm(scaled_mm, case):
    scaled_mm(case)
