"""Convolutions of float activations with weights that are scaled in blocks."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops.conv_form import Window
from jax_qmm.selftest.block_scaled_mm import WEIGHT_ZERO_POINTS
from jax_qmm.selftest.quantize import FLOATS
from jax_qmm.selftest.result import Checks, Result, by_each, one_for_all

# Windows of convolutions; and where weights have blocks, which end within taps: the sizes of images, and outputs and
# columns of a block for each number of channels. TMA brings images whose channels are multiples of 64.
TAPS, STRIDES, DILATION, PADDING = WINDOW = (3, 2), (2, 1), (1, 2), ((1, 2), (0, 1))
IMAGES, OF_CHANNELS = (3, 9, 7), {24: (133, 32), 192: (136, 128)}


def checks(kernels, gpu) -> Checks:
    """A check for each dtype of 16 bits with weights of each kind, by name."""
    for kind in itertools.product(FLOATS[1:], (4, 8), WEIGHT_ZERO_POINTS, OF_CHANNELS):
        check = functools.partial(check_weight_only_conv, kernels, gpu, *kind)
        yield f"conv {' '.join(map(str, kind))}", check


def check_weight_only_conv(
    kernels, gpu, dtype: str, bits: int, zero_dtype: str | None, channels: int
) -> Iterator[Result]:
    """Runs every kernel that serves such a convolution; the tolerance is that of `check_block_scaled_mm`."""
    rng = np.random.default_rng(bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    images, (outputs, block) = (*IMAGES, channels), OF_CHANNELS[channels]
    out_dtype = jnp.dtype(dtype if channels % 64 == 0 else "float32")
    k = math.prod(TAPS) * channels
    q = jnp.asarray(rng.integers(low, high, (outputs, k), np.int8))
    blocks = (outputs, -(-k // block))
    zeros = jnp.asarray(rng.uniform(low, high, blocks).astype(zero_dtype)) if zero_dtype else None
    scale = jnp.asarray(rng.uniform(0.5, 2, blocks).astype("f"))
    rows = jax_qmm.QArray(q, scale, zeros, qtype=f"int{bits}", tile_size=block).pack()
    w = rows.reshape(outputs, *TAPS, channels)
    x = jnp.asarray(rng.standard_normal(images, np.float32), dtype)
    spread = lambda leaf: np.repeat(np.float64(leaf), block, 1)[:, :k]
    dense = ((np.float64(q) - (spread(zeros) if zero_dtype else 0)) * spread(scale)).reshape(w.shape)
    want, size = (_convolved(f(np.float64(x)), f(dense)) for f in (lambda x: x, np.abs))
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    window: Any = (STRIDES, PADDING, None, DILATION, ("NHWC", "OHWI", "NHWC"))
    run = jax.jit(lambda x, w: jax_qmm.conv_general_dilated(x, w, *window, out_dtype=out_dtype))
    kind = dtype, out_dtype.name, bits, block, "int8" if zero_dtype == "int32" else zero_dtype
    axes = Window(STRIDES, PADDING, (1, 1), DILATION, 1).in_kernels(images[1:3], TAPS, want.shape[1:3])
    windows = images[0], channels, *axes
    choices = kernels.BlockScaledMmProblem(want[..., 0].size, outputs, k, 1, *kind, windows).choices(gpu)
    for words, out in by_each(kernels.restrict_block_scaled_mm, one_for_all(choices), lambda: run(x, w)):
        rounds = zero_dtype == "float32" or "weights scaled" in words
        tolerance = (1.01 * unit * rounds + (k + 16) * 2.0**-23) * size
        tolerance += (2.0**-23 if out_dtype == jnp.float32 else unit) * (np.abs(want) + tolerance)
        name = f"conv, {dtype}, int{bits} weights" + (f", {zero_dtype} zero points" if zero_dtype else "")
        wrong = int((~(np.abs(out.astype("d") - want) <= tolerance)).sum())
        yield Result(name, _extension.as_compiled(kernels, words, gpu), f"{channels} to {outputs}", wrong)


def _convolved(x, w):
    """The window on x (N, H, W, C) with w (O, Kh, Kw, C)."""
    x = np.pad(x, [(0, 0), *PADDING, (0, 0)])
    last = [size - (t - 1) * d for size, t, d in zip(x.shape[1:], TAPS, DILATION)]
    places = ([slice(i * d, i * d + n, s) for i in range(t)] for t, s, d, n in zip(TAPS, STRIDES, DILATION, last))
    terms = (x[:, i, j] @ w[:, *tap].T for (i, j), tap in zip(itertools.product(*places), np.ndindex(*TAPS)))
    return functools.reduce(np.add, terms)
