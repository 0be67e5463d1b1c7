"""Which mesh axes the factors of an op get."""

import pytest

from jax_qmm.ops.sharding import _assign

A, B, SCALE, OUT = ["m", "k"], ["n", "k"], ["m"], ["m", "n"]
X, Y, NO = ("x",), ("y",), ()


@pytest.mark.parametrize(
    "a, b, scale, out, want",
    [
        ((X, NO), (Y, NO), X, (X, Y), {"m": X, "n": Y}),
        ((X, Y), (NO, Y), X, (X, NO), {"m": X, "k": Y}),
        # One axis for two factors: what the result has comes first, what is reduced last.
        ((X, NO), (X, NO), X, (NO, X), {"n": X}),
        ((X, NO), (NO, X), X, (X, NO), {"m": X}),
        # The axis that a has on K is taken by N, that of b is not: a alone is gathered.
        ((NO, X), (X, Y), NO, (NO, X), {"n": X, "k": Y}),
        # A scale does not take from the matrices, though the result wants it to.
        ((NO, Y), (NO, Y), Y, (Y, NO), {"k": Y}),
        ((NO, NO), (NO, NO), Y, (Y, NO), {"m": Y}),
        # Of two axes the first is kept where the second is taken.
        ((("x", "y"), NO), (Y, NO), ("x", "y"), (X, Y), {"n": Y, "m": X}),
        ((("y", "x"), NO), (Y, NO), ("y", "x"), (X, Y), {"n": Y}),
    ],
)
def test_factors_share_the_axes(a, b, scale, out, want):
    assert _assign([A, B, SCALE], [a, b, [scale]], [OUT], [out], ("k",)) == want
