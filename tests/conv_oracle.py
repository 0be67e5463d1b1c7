"""Convolutions in numpy, in integers or float64, one tap after the other; and random cases."""

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass
class Case:
    """A convolution in the order (N, *S, C) x (O, *K, C / groups) -> (N, *P, O)."""

    spatial: tuple
    taps: tuple
    strides: tuple
    padding: tuple
    lhs_dilation: tuple
    rhs_dilation: tuple
    images: int = 2
    channels: int = 3  # of a group
    out: int = 2  # of a group
    groups: int = 1

    def lhs_shape(self):
        return self.images, *self.spatial, self.channels * self.groups

    def rhs_shape(self):
        return self.out * self.groups, *self.taps, self.channels

    def numbers(self):
        """The axes of lhs, rhs and the result, as letters."""
        spatial = "XYZW"[: len(self.taps)]
        return f"N{spatial}C", f"O{spatial}I", f"N{spatial}C"

    def keywords(self):
        return dict(
            window_strides=self.strides,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            dimension_numbers=self.numbers(),
            feature_group_count=self.groups,
        )


def case(spatial, taps, strides=None, padding=None, rhs_dilation=None, lhs_dilation=None, **sizes):
    ones = (1,) * len(taps)
    padding = padding or ((0, 0),) * len(taps)
    return Case(spatial, taps, strides or ones, padding, lhs_dilation or ones, rhs_dilation or ones, **sizes)


def sums(case, lhs, rhs):
    """In the dtype of the operands, int64 or float64."""
    batch = (slice(None),)
    stretched = [size and (size - 1) * by + 1 for size, by in zip(case.spatial, case.lhs_dilation)]
    whole = np.zeros((lhs.shape[0], *stretched, lhs.shape[-1]), lhs.dtype)
    whole[batch + tuple(slice(None, None, by) for by in case.lhs_dilation)] = lhs
    whole = np.pad(whole, [(0, 0), *((max(lo, 0), max(hi, 0)) for lo, hi in case.padding), (0, 0)])
    cut = tuple(slice(max(-lo, 0), size - max(-hi, 0)) for (lo, hi), size in zip(case.padding, whole.shape[1:]))
    whole = whole[batch + cut]
    reach = [(size - 1) * by + 1 for size, by in zip(case.taps, case.rhs_dilation)]
    places = [max(0, (size - r) // s + 1) for size, r, s in zip(whole.shape[1:], reach, case.strides)]
    out = np.zeros((lhs.shape[0], *places, rhs.shape[0]), lhs.dtype)
    for tap in itertools.product(*map(range, case.taps)):
        at = tuple(
            slice(t * by, t * by + (n - 1) * s + 1, s) if n else slice(0)
            for t, by, n, s in zip(tap, case.rhs_dilation, places, case.strides)
        )
        for g in range(case.groups):
            taken = whole[batch + at][..., g * case.channels : (g + 1) * case.channels]
            own = slice(g * case.out, (g + 1) * case.out)
            out[..., own] += taken @ rhs[(own, *tap)].T
    return out


def int8(rng, *shape):
    return rng.integers(-128, 128, shape, dtype=np.int8)


def operands(images=4, channels=8, out=6, groups=1, seed=0):
    """Values, scales and zero points of both sides, and a bias."""
    rng = np.random.default_rng(seed)
    zero_points = lambda n: rng.integers(-100, 100, (n, 1, 1, 1)).astype(np.int32)
    return dict(
        lhs=int8(rng, images, 5, 4, channels),
        scale_l=rng.random((images, 1, 1, 1), np.float32),
        zero_l=zero_points(images),
        rhs=int8(rng, out, 3, 2, channels // groups),
        scale_r=rng.random((out, 1, 1, 1), np.float32),
        zero_r=zero_points(out),
        bias=rng.normal(size=out).astype(np.float32),
    )


def transposed(x, order, wanted):
    """`x` with axes called `order` in the order `wanted`."""
    return np.transpose(x, [order.index(letter) for letter in wanted])
