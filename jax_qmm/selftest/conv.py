"""Convolutions of 8-bit operands."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qmm import _extension
from jax_qmm.ops import conv
from jax_qmm.ops.conv_form import Window
from jax_qmm.reference import activation as activations, conv as conv_reference
from jax_qmm.selftest.result import Checks, Result, bits, by_each
from jax_qmm.selftest.scaled_mm import OUT_ZERO_POINT
from jax_qmm.selftest.weight_only_conv import PADDING, WINDOW

# Convolutions: channels of a group, groups, output channels, and the window. Copies are of 16, 8 and 4 bytes; depthwise
# square windows have kernels of their own.
CONVOLUTIONS = (
    *(
        (*sizes, *WINDOW)
        for sizes in ((16, 1, 133), (16, 1, 80), (24, 1, 72), (20, 3, 15), (3, 1, 64), (1, 144, 144), (1, 20, 20))
    ),
    *((1, 20, 20, (t,) * 2, (stride,) * 2, (1, 1), PADDING) for t, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1))),
)
CONV_IMAGES, CONV_IMAGE = 3, (17, 19)
# Dtypes of the result, whether there are zero points, and the dtype of a residual.
CONV_KINDS = (
    *((dtype, True, None) for dtype in ("bfloat16", "float32", "int32", "int8")),
    *(("int8", False, residual) for residual in (None, "int8", "bfloat16")),
)


def checks(kernels, gpu) -> Checks:
    """A check for each size and window, by name."""
    for sizes in CONVOLUTIONS:
        yield f"conv {sizes}", functools.partial(check_conv, kernels, gpu, *sizes)


def check_conv(
    kernels, gpu, channels: int, groups: int, out: int, taps, strides, dilation, padding
) -> Iterator[Result]:
    """Runs every kernel that serves a convolution, with each dtype of the result, bit for bit as the reference."""
    rng = np.random.default_rng(channels)
    int8 = lambda *shape: jnp.asarray(rng.integers(-128, 128, shape, np.int8))
    lhs, rhs = int8(CONV_IMAGES, *CONV_IMAGE, channels * groups), int8(out, *taps, channels)
    vectors = {
        "zero_point_lhs": int8(CONV_IMAGES),
        "zero_point_rhs": int8(out).astype(jnp.int32),
        "scale_lhs": jnp.asarray(rng.uniform(0.5, 2, CONV_IMAGES).astype("f")),
        "scale_rhs": jnp.asarray(rng.uniform(0.5, 2, out).astype("f")),
    }
    window = Window(strides, padding, (1, 1), dilation, groups)
    pixels = window.out_shape(CONV_IMAGE, taps)
    for dtype, zero_points, residual in CONV_KINDS:
        if residual and groups == out:  # XLA adds those of depthwise convolutions
            continue
        output = (
            {"out_scale": jnp.float32(3000), "out_zero_point": jnp.int32(OUT_ZERO_POINT)} if dtype == "int8" else {}
        )
        of_sides = {name: x for name, x in vectors.items() if zero_points or "scale" in name}
        given = {name: x for name, x in (of_sides | output).items() if dtype != "int32" or "zero" in name}
        if residual:
            given["residual"] = int8(CONV_IMAGES, *pixels, out)
            if residual == "int8":
                given |= {"scale_residual": jnp.float32(900), "zero_point_residual": jnp.int32(OUT_ZERO_POINT)}
            else:
                given["residual"] = 900 * given["residual"].astype(residual)
        params: dict[str, Any] = dict(
            num_batch=0, window=window, activation=activations.NONE, out_dtype=jnp.dtype(dtype)
        )
        with jax.default_device(jax.devices("cpu")[0]):
            on_cpu = jax.device_put((lhs, rhs, given), jax.devices("cpu")[0])
            want = jax.jit(lambda lhs, rhs, given: conv_reference.conv(lhs, rhs, **given, **params))(*on_cpu)
        run = jax.jit(lambda lhs, rhs, given: conv.bind(lhs, rhs, given, **params))
        padded = conv.padded_channels(rhs.shape, window)
        axes = window.in_kernels(CONV_IMAGE, taps, pixels)
        problem = (1, CONV_IMAGES, padded, out, groups, *axes, dtype, zero_points, residual or "")
        choices = kernels.ConvProblem(*problem).choices(gpu)
        for words, got in by_each(kernels.restrict_conv, choices, lambda: run(lhs, rhs, given)):
            wrong = int((bits(got) != bits(np.asarray(want))).sum())
            shape = f"{channels} x {groups} channels to {out}, window {taps}"
            yield Result(
                f"conv, int8 to {dtype}"
                + ("" if zero_points else ", no zero points")
                + (f", {residual} residual" if residual else ""),
                _extension.as_compiled(kernels, words, gpu),
                shape,
                wrong,
            )
