"""What scaled_mm computes, once more in numpy: exact sums, then each float32 step rounded once."""

import types

import numpy as np
import pytest


@pytest.fixture(scope="session")
def oracle():
    """The functions of this file."""
    return types.SimpleNamespace(scaled_mm=scaled_mm, sums=sums, epilogue=epilogue)


def scaled_mm(a, b, *args, **kwargs):
    return epilogue(sums(a, b), *args, **kwargs)


def sums(a, b):
    """`a @ b.T`: int32 with wrap-around for int8, float64 for float8."""
    acc = a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)  # exact below 2**53
    return acc.astype(np.int64).astype(np.int32) if a.dtype == np.int8 else acc


def epilogue(acc, scale_a, scale_b, bias=None, *, azp=1, azp_adj=0, out_dtype=np.float32):
    """Takes scale_a and azp as `()` or `(..., M)`, scale_b, bias and azp_adj as `()` or `(N,)`."""
    column = lambda v: np.asarray(v)[..., None]
    with np.errstate(all="ignore"):
        if acc.dtype == np.int32:
            correction = column(azp).astype(np.int64) * np.asarray(azp_adj)
            acc = (acc - correction).astype(np.int32)
        out = np.asarray(scale_b, np.float32) * acc.astype(np.float32)
        scale_a = column(scale_a).astype(np.float32)
        return (scale_a * out if bias is None else fma(scale_a, out, bias)).astype(out_dtype)


def fma(x, y, z):
    """`x * y + z` of float32, rounded once: the float64 sum is rounded to odd before it goes to float32."""
    x, y, z = (np.asarray(v, np.float32).astype(np.float64) for v in (x, y, z))
    with np.errstate(all="ignore"):
        product = x * y
        total = product + z
        part = total - product
        rest = (product - (total - part)) + (z - part)
        toward = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
        even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
        return np.where((rest != 0) & np.isfinite(rest) & even, toward, total).astype(np.float32)
