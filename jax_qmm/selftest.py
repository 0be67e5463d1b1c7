"""`python -m jax_qmm selftest`: every kernel of the build on this machine's GPU, against the reference."""

import functools
import itertools
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops import block_quantized_mm, conv
from jax_qmm.ops.conv_form import Window
from jax_qmm.ops.expanded_mm import expanded_mm
from jax_qmm.reference import (
    activation as activations,
    block_quantized_mm as blocks_reference,
    conv as conv_reference,
    scaled_mm as reference,
)
from jax_qmm.reference.quantize import quantize_dynamic, quantize_static
from jax_qmm.text_table import first_line, format_table
from jax_qmm.tuning import Product

# M and K of products, ragged in whatever a kernel tiles; rows of 75 bytes are aligned for the general kernel alone.
PRODUCTS = ((1, 16), (7, 4624), (17, 1040), (130, 272), (333, 2064), (33, 75))
# Each kernel gets an N of its own, with rows of so many bytes more than the one before, so that one program runs all.
FIRST_N, ALIGNED = 128, 16
# dtype of the operands, dtype of the result, whether fp8 is summed in the tensor cores' narrow accumulator, and whether
# the kernels are those with the full epilogue, which then has zero points of both sides, a clamp and 8-bit results.
KINDS = (
    ("int8", "bfloat16", False, False),
    ("int8", "float32", False, False),
    ("int8", "int32", False, False),
    ("float8_e4m3fn", "bfloat16", True, False),
    ("float8_e4m3fn", "float32", True, False),
    ("float8_e4m3fn", "bfloat16", False, False),
    ("int8", "bfloat16", False, True),
    ("int8", "float32", False, True),
    ("int8", "int8", False, True),
    ("float8_e4m3fn", "bfloat16", True, True),
    ("float8_e4m3fn", "float32", True, True),
    ("float8_e4m3fn", "float8_e4m3fn", True, True),
    ("float8_e4m3fn", "bfloat16", False, True),
    ("float8_e4m3fn", "float8_e4m3fn", False, True),
)
# What the full epilogue does besides.
CLAMP, OUT_SCALE, OUT_ZERO_POINT = (-40.0, 30.0), 0.37, -9
# Of the sum of absolute products: tensor cores cut each of the 33 terms of a step at 2**-13 of the largest.
FP8_TOLERANCE = 2.0**-9

# Products with weights that are scaled in blocks: N and K ragged, M below and above what tiles have.
WEIGHT_N, WEIGHT_K, WEIGHT_ROWS = 133, 1416, (1, 17, 131)
WEIGHT_BLOCKS = (16, 32, 64, 384)
WEIGHT_ZERO_POINTS = (None, "int32", "float32")

# Products with scales for blocks on both sides: dtype, block, whether a has zero points, rows of b that share scales.
# The last block is short.
BLOCK_KINDS = (
    *(("int8", block, zero_points, 1) for block in (32, 64, 128, 256) for zero_points in (False, True)),
    *(("float8_e4m3fn", 128, False, shared) for shared in (1, 128)),
)
BLOCK_N, BLOCK_K, BLOCK_ROWS = 264, 1168, (7, 133)
# Where few rows of a are float still: dtype, block, whether they are quantized symmetrically.
FLOAT_KINDS = (("int8", 32, True), ("int8", 64, True), ("int8", 128, False), ("float8_e4m3fn", 128, True))
FLOAT_ROWS = 11

# Windows of convolutions; and where weights have blocks, which end within taps: the sizes of images, and outputs and
# columns of a block for each number of channels. TMA brings images whose channels are multiples of 64.
TAPS, STRIDES, DILATION, PADDING = WINDOW = (3, 2), (2, 1), (1, 2), ((1, 2), (0, 1))
IMAGES, OF_CHANNELS = (3, 9, 7), {24: (133, 32), 192: (136, 128)}

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

# Rows of x beside int4 weights that become int8: few, which all kernels of expanded_mm serve, and more than a tile's.
EXPANDED_ROWS = (7, 133)
EXPANDED_K = 1056  # the last block is short, as is the last turn of warps

# Shapes to quantize, with columns around the lengths at which the kernels change.
ARRAYS = ((3, 1), (5, 31), (3, 1000), (2, 28672), (1, 131075))
FLOATS = ("float32", "bfloat16", "float16")
QTYPES = (("int8", True), ("int8", False), ("float8_e4m3fn", True))  # qtype, symmetric
SCALES = (("dynamic per row", (1,)), ("dynamic per tensor", (0, 1)), ("static", None))  # name, axes that share one
STATIC_SCALE, STATIC_ZERO_POINT = 0.013, 5


class Result(NamedTuple):
    """One kernel on one input.

    Attributes:
      op: what was computed, in words.
      kernel: in words.
      shape: of the input, in words.
      wrong: how many elements of the result differ from the reference's by more than they may.
    """

    op: str
    kernel: str
    shape: str
    wrong: int


def check_scaled_mm(kernels, gpu, kind: tuple[str, str, bool, bool], m: int, k: int) -> Iterator[Result]:
    """Runs every kernel that serves products of this kind, M and K.

    int8 must agree bit for bit, and with the full epilogue fp8 too, whose sums are exact there; else fp8 within
    FP8_TOLERANCE of the sum of absolute products and one rounding.
    """
    dtype, out_dtype, fast_accum, full_epilogue = kind
    step = ALIGNED // jnp.dtype(out_dtype).itemsize
    choices = kernels.ScaledMmProblem(m, FIRST_N + step, k, 1, *kind).choices(gpu)
    products = [Product(m, FIRST_N + step * (i + 1), k, 1, *kind) for i in range(len(choices))]
    for product, choice in zip(products, choices):
        kernels.ScaledMmProblem(*product).tune(choice, gpu)
    operands = _operands(m, products[-1].n, k, kind)
    inputs = [
        {name: x[: product.n] if reference.LABELS[name].startswith("n") else x for name, x in operands.items()}
        for product in products
    ]
    outputs = jax.jit(lambda inputs: [_by_kernels(kind, **x) for x in inputs])(inputs)
    want, tolerance = _expected(operands, kind)
    more = ["full epilogue"] * full_epilogue + ["highest"] * (dtype != "int8" and not fast_accum)
    name = ", ".join([f"scaled_mm, {dtype} to {out_dtype}", *more])
    for product, choice, out in zip(products, choices, outputs):
        of_product = np.s_[:, : product.n]
        if tolerance is None:
            right = _bits(np.asarray(out)) == _bits(want[of_product])
        else:
            right = np.abs(np.asarray(out, np.float64) - want[of_product]) <= tolerance[of_product]
        shape = f"M {m}, N {product.n}, K {k}"
        words = _extension.as_compiled(kernels, kernels.describe_scaled_mm(choice), gpu)
        yield Result(name, words, shape, int((~right).sum()))


def _operands(m, n, k, kind) -> dict[str, Any]:
    """a, b and the vectors, by the names that they have in the reference."""
    dtype, out_dtype, _, full_epilogue = kind
    rng = np.random.default_rng(m)
    if dtype == "int8":
        a, b = (rng.integers(-128, 128, (rows, k), np.int8) for rows in (m, n))
    elif full_epilogue:
        a, b = (rng.choice([-1.0, 0.0, 1.0], (rows, k)).astype(jnp.dtype(dtype)) for rows in (m, n))
    else:
        a, b = (rng.standard_normal((rows, k), np.float32).astype(jnp.dtype(dtype)) for rows in (m, n))
    if out_dtype == "int32":  # the sums alone
        return {"a": a, "b": b}
    vectors = {"scale_a": m, "scale_b": n, "bias": n}
    operands = {"a": a, "b": b} | {name: rng.uniform(-2, 2, size).astype("f") for name, size in vectors.items()}
    if dtype == "int8":
        operands["azp"] = rng.integers(-128, 128, m, np.int32)
        operands["azp_adj"] = b.sum(axis=1, dtype=np.int32)
    if full_epilogue:  # most results between the bounds of the clamp
        operands["scale_a"] *= np.float32(20 / np.sqrt(k) / (1e4 if dtype == "int8" else 1))
        if dtype == "int8":
            operands["azp_b"] = rng.integers(-128, 128, n, np.int32)
            operands["sums_a"] = a.sum(axis=1, dtype=np.int32) - k * operands["azp"]
    return operands


def _output(kind) -> dict[str, Any]:
    """What the full epilogue takes besides vectors along the result."""
    _, out_dtype, _, full_epilogue = kind
    options: dict[str, Any] = {"activation": CLAMP} if full_epilogue else {}
    if jnp.dtype(out_dtype).itemsize == 1:
        options["out_scale"] = jnp.float32(OUT_SCALE)
    if out_dtype == "int8":
        options["out_zero_point"] = jnp.int32(OUT_ZERO_POINT)
    return options


def _by_kernels(kind, a, b, scale_a=1.0, scale_b=1.0, bias=None, **terms: Any):
    dtype, out_dtype, fast_accum, _ = kind
    options = {"out_dtype": out_dtype} | _output(kind)
    if "azp_b" in terms:
        azp, azp_b = terms["azp"], terms["azp_b"]
        sums = {"sums_a": terms["sums_a"] + a.shape[1] * azp, "sums_b": terms["azp_adj"]}
        return jax_qmm.scaled_mm_zero_points(a, b, scale_a, scale_b, azp, azp_b, bias, **sums, **options)
    if "azp" in terms:
        azp, azp_adj = terms["azp"], terms["azp_adj"]
        return jax_qmm.scaled_mm_azp_per_token(a, b, scale_a, scale_b, azp_adj, azp, bias, **options)
    if dtype != "int8" and not fast_accum:
        options["precision"] = "highest"
    return jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias, **options)


def _expected(operands, kind):
    """The reference's result and by how much a kernel's may differ from it; None where it may not."""
    dtype, out_dtype, _, full_epilogue = kind
    exact = dtype == "int8" or full_epilogue
    with jax.default_device(jax.devices("cpu")[0]):
        if out_dtype == "int32":
            return np.asarray(reference.sums(operands["a"], operands["b"])), None
        options = _output(kind)
        if full_epilogue:
            options["activation"] = activations.Activation("clamp", *CLAMP)
        want = np.asarray(
            reference.scaled_mm(**operands, **options, out_dtype=jnp.dtype(out_dtype) if exact else jnp.float32)
        )
    if exact:
        return want, None
    a, b, scale_a, scale_b = (np.abs(operands[name].astype("f")) for name in ("a", "b", "scale_a", "scale_b"))
    size = scale_a[:, None] * scale_b * (a @ b.T)
    return want, FP8_TOLERANCE * size + float(jnp.finfo(out_dtype).eps) * np.abs(want) + 2.0**-20


def check_block_scaled_mm(kernels, gpu, dtype: str, bits: int, zero_dtype: str | None, block: int) -> Iterator[Result]:
    """Runs every kernel that serves products of these operands, over M and with K split in each way.

    Sums are of exact products, K of them and a float32 error for each, and a few roundings more. A weight less a float
    zero point, and any weight that float32 multiplies, is rounded to x's dtype.
    """
    kind = kernels, gpu, dtype, bits, zero_dtype, block
    yield from _check_weights(*kind, WEIGHT_N, "float32")
    if dtype != "float32" and zero_dtype != "float32":  # persistent blocks, with results of 16 bits
        for n in (WEIGHT_N // 8 * 8, 128 * gpu.sm_count + 264):  # each has a part of a tile, or several
            yield from _check_weights(*kind, n, "bfloat16")


def _check_weights(kernels, gpu, dtype, bits, zero_dtype, block, n, out_dtype) -> Iterator[Result]:
    """By every kernel with results in float32, and by persistent blocks with others."""
    kind = dtype, out_dtype, bits, block, "int8" if zero_dtype == "int32" else zero_dtype
    choices_of = {m: kernels.BlockScaledMmProblem(m, n, WEIGHT_K, 1, *kind).choices(gpu) for m in WEIGHT_ROWS}
    if out_dtype != "float32":
        wanted = lambda choice: "persistent" in choice[0] or "stream-K" in choice[0]
        choices_of = {m: [*filter(wanted, choices)] for m, choices in choices_of.items()}
    if not any(choices_of.values()):
        return
    rng = np.random.default_rng(block)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    groups = (n, -(-WEIGHT_K // block))
    q = rng.integers(low, high, (n, WEIGHT_K), np.int8)
    scale = rng.uniform(0.5, 2, groups).astype("f")
    zero_point = rng.uniform(low, high, groups).astype(zero_dtype) if zero_dtype else None
    zeros = None if zero_point is None else jnp.asarray(zero_point)
    w = jax_qmm.QArray(jnp.asarray(q), jnp.asarray(scale), zeros, qtype=f"int{bits}", tile_size=block).pack()
    spread = lambda leaf: np.repeat(np.float64(leaf), block, 1)[:, :WEIGHT_K]
    dequantized = (q - (spread(zero_point) if zero_dtype else 0)) * spread(scale)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}[dtype]  # of rounding a weight
    name = f"block_scaled_mm, {dtype}, int{bits} weights" + (f", {zero_dtype} zero points" if zero_dtype else "")
    for m, choices in choices_of.items():
        x = rng.standard_normal((m, WEIGHT_K), np.float32).astype(jnp.dtype(dtype))
        want, size = x.astype("d") @ dequantized.T, np.abs(x.astype("d")) @ np.abs(dequantized).T
        run = jax.jit(functools.partial(jax_qmm.block_scaled_mm, out_dtype=jnp.dtype(out_dtype)))
        for words, out in _by_each(*_of_weights(kernels, choices), lambda: run(x, w)):
            rounds = zero_dtype == "float32" or dtype == "float32" or "weights scaled" in words
            tolerance = (1.01 * unit * rounds + (WEIGHT_K + 16) * 2.0**-23) * size
            of_result = 2.0**-8 if out_dtype == "bfloat16" else 2.0**-23
            tolerance += of_result * (np.abs(want) + tolerance)
            wrong = int((~(np.abs(out.astype("d") - want) <= tolerance)).sum())
            shape = f"M {m}, N {n}, K {WEIGHT_K}, blocks of {block}"
            yield Result(name, _extension.as_compiled(kernels, words, gpu), shape, wrong)


def _by_each(restrict, words, run) -> Iterator[tuple[str, np.ndarray]]:
    """What `run` gives by each of these kernels in words, with its words; `restrict` leaves only one to choose from."""
    for each in words:
        restrict(each)
        try:
            out = np.asarray(run())
        finally:
            restrict("")
        yield each, out


def _of_weights(kernels, choices):
    """What `_by_each` takes for the choices of a BlockScaledMmProblem."""
    # The one with the largest workspace comes first: its program serves all.
    return kernels.restrict_block_scaled_mm, [words for words, _ in sorted(choices, key=lambda choice: -choice[1])]


def check_block_quantized_mm(kernels, gpu, dtype: str, block: int, zero_points: bool, shared: int) -> Iterator[Result]:
    """Runs every kernel that serves such products; int8 must agree bit for bit.

    fp8 may differ by FP8_TOLERANCE of the sum of absolute products and the roundings of the blocks' sums in float32.
    """
    n, k, rng = BLOCK_N // shared * shared, BLOCK_K, np.random.default_rng(block)
    of_k = -(-k // block)
    values = lambda rows: (
        rng.integers(-128, 128, (rows, k), np.int8)
        if dtype == "int8"
        else rng.standard_normal((rows, k), np.float32).astype(jnp.dtype(dtype))
    )
    scales = lambda rows: rng.uniform(-2, 2, (rows, of_k)).astype("f")
    w = jax_qmm.QArray(jnp.asarray(values(n)), jnp.asarray(scales(n // shared)), tile_size=block)
    spread_b = np.repeat(w.scale, shared, 0)
    run = jax.jit(functools.partial(jax_qmm.block_scaled_mm, out_dtype=jnp.float32))
    for m in BLOCK_ROWS:
        zeros = jnp.asarray(rng.integers(-128, 128, (m, of_k), np.int32)) if zero_points else None
        x = jax_qmm.QArray(jnp.asarray(values(m)), jnp.asarray(scales(m)), zeros, tile_size=block)
        of_product = {"a": x.qvalue, "b": w.qvalue, "scale_a": x.scale, "scale_b": spread_b, "zero_point_a": zeros}
        given: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in of_product.items() if leaf is not None}
        with jax.default_device(jax.devices("cpu")[0]):
            want = np.asarray(blocks_reference.block_quantized_mm(**given, block=block, out_dtype=jnp.float32))
        tolerance = 0.0
        if dtype != "int8":
            along = lambda scale: np.repeat(np.abs(scale), block, 1)[:, :k]
            a, b = np.abs(given["a"].astype("f")) * along(x.scale), np.abs(given["b"].astype("f")) * along(spread_b)
            tolerance = (FP8_TOLERANCE + (of_k + 2) * 2.0**-24) * (a @ b.T)
        of_sides = "a" if zero_points else ""
        problem = kernels.BlockQuantizedMmProblem(m, n, k, 1, dtype, "float32", block, of_sides, shared == 128)
        choices = problem.choices(gpu)
        for words, out in _by_each(kernels.restrict_block_quantized_mm, choices, lambda x=x: run(x, w)):
            wrong = int((~(np.abs(out - want) <= tolerance)).sum())
            op = f"blocks on both sides, {dtype}" + (", zero points" if zero_points else "")
            shape = f"M {m}, N {n}, K {k}, blocks of {block}" + (f" x {shared}" if shared > 1 else "")
            yield Result(op, _extension.as_compiled(kernels, words, gpu), shape, wrong)


def check_quantizing_mm(kernels, gpu, a_dtype: str, kind: tuple[str, int, bool]) -> Iterator[Result]:
    """Runs every kernel that quantizes rows on the way; the tolerance is that of `check_block_quantized_mm`."""
    (dtype, block, symmetric), m, n, k = kind, FLOAT_ROWS, BLOCK_N, BLOCK_K
    rng, of_k = np.random.default_rng(block), -(-BLOCK_K // block)
    a = rng.standard_normal((m, k), np.float32).astype(jnp.dtype(a_dtype))
    b = (30 * rng.standard_normal((n, k), np.float32)).astype(jnp.dtype(dtype))
    scale = rng.uniform(-2, 2, (n, of_k)).astype("f")
    w = jax_qmm.QArray(jnp.asarray(b), jnp.asarray(scale), tile_size=block)
    scheme = jax_qmm.W8A8(dtype, tile_size=block, symmetric=symmetric)
    with jax.default_device(jax.devices("cpu")[0]):
        static: Any = {"names": ("scale_b",), "num_batch": 0, "block": block, "shared_b": 1, "symmetric": symmetric}
        static |= {"activation": activations.NONE, "out_dtype": jnp.float32}
        want = np.asarray(jax.jit(functools.partial(block_quantized_mm.OP.reference, **static))(a, b, scale))
    tolerance = 0.0
    if dtype != "int8":  # a quantized value is off by a 16th of itself at most
        size = 17 / 16 * np.abs(a.astype("f")) @ (np.abs(b.astype("f")) * np.repeat(np.abs(scale), block, 1)[:, :k]).T
        tolerance = (FP8_TOLERANCE + (of_k + 2) * 2.0**-24) * size
    problem = (m, n, k, 1, dtype, "float32", block, "", False, a_dtype, symmetric)
    choices = kernels.BlockQuantizedMmProblem(*problem).choices(gpu)
    run = jax.jit(lambda a, w: jax_qmm.matmul(a, w.T, scheme=scheme, preferred_element_type=jnp.float32))
    for words, out in _by_each(kernels.restrict_block_quantized_mm, choices, lambda: run(a, w)):
        op = f"blocks on both sides, {a_dtype} quantized to {dtype}" + ("" if symmetric else ", zero points")
        wrong = int((~(np.abs(out - want) <= tolerance)).sum())
        yield Result(op, _extension.as_compiled(kernels, words, gpu), f"M {m}, N {n}, K {k}, blocks of {block}", wrong)


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
    for words, out in _by_each(*_of_weights(kernels, choices), lambda: run(x, w)):
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


def check_expanded_mm(kernels, gpu, m: int) -> Iterator[Result]:
    """Runs every kernel that serves m rows, with zero points and without, bit for bit.

    Results are int32, and bfloat16 of the kernels that have no such ones.
    """
    of_int32 = kernels.ExpandedMmProblem(m, WEIGHT_N, EXPANDED_K, 1, "int32").choices(gpu)
    yield from _check_expanded(kernels, gpu, m, WEIGHT_N, "int32", of_int32)
    n = WEIGHT_N // 8 * 8
    of_bfloat16 = kernels.ExpandedMmProblem(m, n, EXPANDED_K, 1, "bfloat16").choices(gpu)
    yield from _check_expanded(kernels, gpu, m, n, "bfloat16", [each for each in of_bfloat16 if each not in of_int32])


def _check_expanded(kernels, gpu, m, n, out_dtype, choices) -> Iterator[Result]:
    k, block = EXPANDED_K, 64
    rng = np.random.default_rng(m)
    x, w = rng.integers(-128, 128, (m, k), np.int8), rng.integers(-8, 8, (n, k), np.int8)
    multiple, zero_point = (rng.integers(-8, 8, (n, -(-k // block)), np.int8) for _ in range(2))
    for zeros in (None, zero_point):
        run = jax.jit(functools.partial(expanded_mm, block=block, out_dtype=out_dtype))
        spread = lambda leaf: np.repeat(leaf.astype("i"), block, 1)[:, :k]
        want = x.astype("i") @ ((w - (0 if zeros is None else spread(zeros))) * spread(multiple)).T
        want = want.astype("f").astype(jnp.dtype(out_dtype))  # float32 has all of these sums
        op = "expanded_mm, int8 and int4" + ("" if zeros is None else ", zero points")
        of_int4 = x, jnp.asarray(w, "int4"), multiple, zeros
        for words, out in _by_each(kernels.restrict_expanded_mm, choices, lambda: run(*of_int4)):
            kernel = _extension.as_compiled(kernels, words, gpu)
            yield Result(op, kernel, f"M {m}, N {n}, K {k}, blocks of {block}", int((out != want).sum()))


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
        for words, got in _by_each(kernels.restrict_conv, choices, lambda: run(lhs, rhs, given)):
            wrong = int((_bits(got) != _bits(np.asarray(want))).sum())
            shape = f"{channels} x {groups} channels to {out}, window {taps}"
            yield Result(
                f"conv, int8 to {dtype}"
                + ("" if zero_points else ", no zero points")
                + (f", {residual} residual" if residual else ""),
                _extension.as_compiled(kernels, words, gpu),
                shape,
                wrong,
            )


def check_quantize(rows: int, columns: int) -> Iterator[Result]:
    """Quantizes an array in every way that has a kernel; all must agree with the reference bit for bit."""
    x = np.random.default_rng(columns).standard_normal((rows, columns), np.float32)
    ways: list[tuple[Any, ...]] = [(dtype, *qtype, *scale) for dtype in FLOATS for qtype in QTYPES for scale in SCALES]

    def by_kernels(x, dtype, qtype, symmetric, name, axes):
        options: dict[str, Any] = {"axis": axes} if axes else {"scale": STATIC_SCALE}
        if not (axes or symmetric):
            options["zero_point"] = STATIC_ZERO_POINT
        q = jax_qmm.quantize(x.astype(dtype), jnp.dtype(qtype), symmetric=symmetric, **options)
        return (q.qvalue, q.scale, q.zero_point) if axes else q.qvalue

    def by_reference(x, dtype, qtype, symmetric, name, axes):
        x, qtype = x.astype(dtype), jnp.dtype(qtype)
        if axes:
            return quantize_dynamic(x, qtype, axes, symmetric)
        zero_point = None if symmetric else jnp.int32(STATIC_ZERO_POINT)
        return quantize_static(x, jnp.float32(STATIC_SCALE), zero_point, qtype)

    outputs = jax.jit(lambda x: [by_kernels(x, *way) for way in ways])(x)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.jit(lambda x: [by_reference(x, *way) for way in ways])(x)
    for (dtype, qtype, symmetric, name, _), got, want in zip(ways, outputs, wanted):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want))
        wrong = sum(int((_bits(np.asarray(g)) != _bits(np.asarray(w))).sum()) for g, w in pairs)
        op = f"quantize, {dtype} to {qtype}" + ("" if symmetric else ", zero points")
        yield Result(op, name, f"({rows}, {columns})", wrong)


def _bits(x):
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def run(kernels, gpu) -> tuple[list[Result], list[str]]:
    """Runs every kernel and shows a progress bar; returns the results, and in words what could not run."""
    programs = {}
    for kind in KINDS:
        for m, k in PRODUCTS:
            check = functools.partial(check_scaled_mm, kernels, gpu, kind, m, k)
            programs[f"scaled_mm {' '.join(map(str, kind))}, M {m}, K {k}"] = check
    for kind in itertools.product(FLOATS, (4, 8), WEIGHT_ZERO_POINTS, WEIGHT_BLOCKS):
        check = functools.partial(check_block_scaled_mm, kernels, gpu, *kind)
        programs[f"block_scaled_mm {' '.join(map(str, kind))}"] = check
    for kind in itertools.product(FLOATS[1:], (4, 8), WEIGHT_ZERO_POINTS, OF_CHANNELS):
        check = functools.partial(check_weight_only_conv, kernels, gpu, *kind)
        programs[f"conv {' '.join(map(str, kind))}"] = check
    for kind in BLOCK_KINDS:
        check = functools.partial(check_block_quantized_mm, kernels, gpu, *kind)
        programs[f"blocks on both sides {' '.join(map(str, kind))}"] = check
    for dtype, kind in itertools.product(FLOATS, FLOAT_KINDS):
        check = functools.partial(check_quantizing_mm, kernels, gpu, dtype, kind)
        programs[f"blocks on both sides, {dtype} quantized to {' '.join(map(str, kind))}"] = check
    for m in EXPANDED_ROWS:
        programs[f"expanded_mm {m}"] = functools.partial(check_expanded_mm, kernels, gpu, m)
    for sizes in CONVOLUTIONS:
        programs[f"conv {sizes}"] = functools.partial(check_conv, kernels, gpu, *sizes)
    for shape in ARRAYS:
        programs[f"quantize {shape}"] = functools.partial(check_quantize, *shape)
    results, failures = [], []
    with tqdm(programs.items(), desc="selftest", unit="program") as bar:
        for name, check in bar:
            bar.set_postfix_str(name)
            try:
                results += check()
            except RuntimeError as error:  # of CUDA or XLA
                failures.append(f"{name} failed: {first_line(error)}")
    kernels.clear_scaled_mm_tuning()
    return results, failures


def table(results: list[Result]) -> str:
    """A line for each op.

    >>> print(table([Result("quantize", "static", "(2, 4)", 0), Result("quantize", "static", "(2, 8)", 3)]))
    op        kernels  runs  wrong
    quantize  1        2     1
    """
    by_op = defaultdict(list)
    for result in results:
        by_op[result.op].append(result)
    lines = [
        (op, str(len({r.kernel for r in of_op})), str(len(of_op)), str(sum(r.wrong > 0 for r in of_op)))
        for op, of_op in by_op.items()
    ]
    return format_table(("op", "kernels", "runs", "wrong"), lines)


def main() -> None:
    """Runs and prints the results; ends the process with code 1 where one is wrong, with 2 where no kernel can run."""
    if missing := _extension.why_none_runs():
        words = "selftest runs each of the build's kernels on the GPU and compares its results with the reference's"
        print(f"{words}. It can't here: {missing}. No kernel was tested.", file=sys.stderr)
        raise SystemExit(2)
    platform = _extension.platform()
    gpu = next(gpu for gpu in _extension._gpus() if not _extension.fallback_reason(platform, [gpu]))
    os.environ["JAX_QMM_STRICT"] = "1"  # what ran on the reference was not tested
    with jax.default_device(gpu):
        print(f"jax_qmm {jax_qmm.__version__} on {_extension.described_gpu()}, jax {jax.__version__}", flush=True)
        gpu = _extension.gpu()
        gpu.prepare()
        results, failures = run(_extension._load()[0], gpu)
    wrong = [result for result in results if result.wrong]
    print(f"\n{table(results)}")
    for op, kernel, shape, count in wrong:
        failures.append(f"{op}, {shape}: {count} elements of the result are wrong: {kernel}")
    print(*failures, sep="\n", end="\n" if failures else "")
    if failures or not results:
        raise SystemExit(1)
    print("Every kernel agrees with the reference: int8 bit for bit, others within their rounding.")
