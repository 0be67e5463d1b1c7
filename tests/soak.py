"""Compares random calls of the products, convolutions and quantizers with the reference, for as long as asked.

    python tests/soak.py --minutes 10 --processes 6

Every call has a random op, shape, dtype, epilogue and layout of scales. int8 must agree bit for bit; fp8, gelu and silu
within their rounding. The sums are numpy's in float64, exact for int8; the rest is the reference's, on the CPU.
It prints how many calls of each kind there were, and ends with code 1 at the first wrong result, whose seed repeats it.
"""

import argparse
import collections
import concurrent.futures
import functools
import math
import multiprocessing
import os
import time

import conv_oracle
import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm.ops import block_quantized_mm, checks
from jax_qmm.reference import activation as activations, block_quantized_mm as blocks, scaled_mm as reference
from jax_qmm.reference.quantize import quantize_dynamic, quantize_static, sums as sums_of
from jax_qmm.selftest.scaled_mm import FP8_TOLERANCE

OUT_DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "int32")
ACTIVATIONS = (None, None, "relu", "relu6", (-3.0, 5.0), "gelu", "silu")
ZERO_POINTS = (None, None, "per tensor", "per token", "both sides")


def size(rng, most):
    """A random length: often small, often a multiple of 16, at times 0."""
    if rng.random() < 0.02:
        return 0
    length = int(math.exp(rng.uniform(0, math.log(most))))
    return length if rng.random() < 0.5 else 16 * math.ceil(length / 16)


def draw_product(rng):
    """The kind of a product, its options and operands."""
    dtype = str(rng.choice(["int8", "float8_e4m3fn"]))
    out = str(rng.choice(OUT_DTYPES[: 6 if dtype == "int8" else 5]))
    zero_points = ZERO_POINTS[rng.integers(len(ZERO_POINTS))] if dtype == "int8" and out != "int32" else None
    m, n, k, batch = size(rng, 1024), size(rng, 2048), size(rng, 6144), int(rng.choice([0, 0, 1, 3]))
    lead = (batch,) if batch else ()
    each_b = lead if rng.random() < 0.5 else ()
    if dtype == "int8":
        a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((*lead, m, k), (*each_b, n, k)))
    else:
        a, b = (
            rng.standard_normal((*s,), np.float32).astype(jnp.dtype(dtype)) for s in ((*lead, m, k), (*each_b, n, k))
        )
    operands = {"a": a, "b": b}
    options = {"out_dtype": out}
    if out == "int32":
        return f"{dtype} to int32", zero_points, options, operands
    scale_dtype = jnp.dtype(str(rng.choice(["float32", "bfloat16", "float16"])))
    unit = 1 / math.sqrt(max(k, 1)) / (5000 if dtype == "int8" else 1)
    rows, columns = rng.random() < 0.5, rng.random() < 0.5
    operands["scale_a"] = rng.uniform(-2, 2, (*lead, m) if rows else ()).astype(scale_dtype)
    operands["scale_b"] = np.asarray(rng.uniform(-2, 2, n if columns else ()) * unit * 100).astype("f") / 100
    if rng.random() < 0.5:
        operands["bias"] = rng.uniform(-2, 2, n).astype("f")
    options["activation"] = ACTIVATIONS[rng.integers(len(ACTIVATIONS))]
    if dtype != "int8" and rng.random() < 0.3:
        options["precision"] = "highest"
    if jnp.dtype(out).itemsize == 1:
        operands["out_scale"] = np.float32(rng.uniform(0.01, 0.1))
    if out == "int8":
        operands["out_zero_point"] = np.int32(rng.integers(-20, 20))
    if zero_points == "per tensor":
        operands["azp"] = np.int32(rng.integers(-128, 128))
    elif zero_points:
        operands["azp"] = rng.integers(-128, 128, (*lead, m), np.int32)
    if zero_points == "both sides":
        operands["azp_b"] = rng.integers(-128, 128, n, np.int32)
    words = [f"{dtype} to {out}", *([f"zero points {zero_points}"] if zero_points else [])]
    return ", ".join(words), zero_points, options, operands


def by_kernels(zero_points, options, a, b, scale_a=1.0, scale_b=1.0, bias=None, azp=None, azp_b=None, **output):
    options = options | output

    def product(a, b, scale_a, azp):
        if zero_points == "both sides":
            return jax_qmm.scaled_mm_zero_points(a, b, scale_a, scale_b, azp, azp_b, bias, **options)
        if zero_points == "per token":
            adj = jax_qmm.azp_adjustment(b)
            return jax_qmm.scaled_mm_azp_per_token(a, b, scale_a, scale_b, adj, azp, bias, **options)
        if zero_points:
            adj = azp * jax_qmm.azp_adjustment(b)
            return jax_qmm.scaled_mm_azp(a, b, scale_a, scale_b, adj, bias, **options)
        return jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias, **options)

    if a.ndim == 2:
        return product(a, b, scale_a, azp)
    axes = 0, 0 if b.ndim == 3 else None, 0 if jnp.ndim(scale_a) else None, 0 if azp is not None and azp.ndim else None
    return jax.vmap(product, axes)(a, b, scale_a, azp)


def expected(options, a, b, scale_a=1.0, scale_b=1.0, bias=None, azp=None, azp_b=None, **output):
    """The result; by how much a kernel's may differ from it, or None where it may not."""
    exact = a.dtype == jnp.int8
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if azp is not None:
        wide_a = wide_a - np.asarray(azp, np.float64)[..., None]
    if azp_b is not None:
        wide_b = wide_b - azp_b[:, None]
    sums = wide_a @ np.swapaxes(wide_b, -1, -2)
    out_dtype = jnp.dtype(options["out_dtype"])
    if out_dtype == jnp.int32:
        return sums.astype(np.int64).astype(np.int32), None
    activation = checks.activation(options["activation"])
    sums = jnp.asarray(sums.astype(np.int64).astype(np.int32) if exact else sums.astype(np.float32))
    vectors = {"scale_a": jnp.asarray(scale_a).reshape(np.shape(scale_a) or (1,) * (a.ndim - 1))}
    vectors["scale_b"] = jnp.asarray(scale_b).reshape(np.shape(scale_b) or (1,))
    if bias is not None:
        vectors["bias"] = bias
    if a.ndim == 3:  # of the whole batch
        vectors = {name: x if name == "scale_a" else x[None] for name, x in vectors.items()}
        output = {name: jnp.asarray(x)[None] for name, x in output.items()}
    num_batch = a.ndim - 2
    smooth = activation.name in ("gelu", "silu")
    if exact and not smooth:
        given = vectors | {name: jnp.asarray(x) for name, x in output.items()}
        return reference.epilogue(sums, num_batch=num_batch, out_dtype=out_dtype, activation=activation, **given), None
    before = reference.epilogue(sums, num_batch=num_batch, out_dtype=jnp.float32, **vectors)
    want = np.asarray(activations.activate(before, activation), np.float64)
    off = 2.0**-19 * np.abs(before) + 2.0**-119 if smooth else np.zeros_like(want)
    if not exact:
        # an activation's slope is below 1.13
        total = np.abs(a.astype("f")) @ np.swapaxes(np.abs(b.astype("f")), -1, -2)
        scale = np.abs(np.asarray(scale_a, "f")[..., None] * np.asarray(scale_b, "f"))
        off = off + 1.13 * FP8_TOLERANCE * scale * total + 2.0**-20
    if out_dtype.itemsize == 1:
        step, zero_point = float(np.ravel(output["out_scale"])[0]), np.ravel(output.get("out_zero_point", 0))[0]
        want, off = want / step + zero_point, off / step
        low, high = (-128, 127) if out_dtype == jnp.int8 else (-448, 448)
        want = np.clip(want, low, high)
        rounding = 0.5 if out_dtype == jnp.int8 else np.maximum(2.0**-4 * (np.abs(want) + off), 2.0**-10)
        return want, off + rounding * 1.0001
    return want, off + float(jnp.finfo(out_dtype).eps) * np.abs(want) + float(jnp.finfo(out_dtype).tiny)


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def check_product(rng, cpu):
    """Compares one product; gives its kind in words, and what is wrong or ""."""
    kind, zero_points, options, operands = draw_product(rng)
    got = jax.jit(lambda given: by_kernels(zero_points, options, **given))(operands)
    with jax.default_device(cpu):
        want, off = expected(options, **operands)
    got, want = np.asarray(got), np.asarray(want)
    if off is None:
        wrong = bits(got) != bits(want)
    else:
        wrong = ~(np.abs(got.astype(np.float64) - want) <= off) & ~(np.isinf(got.astype("f")) & (np.abs(want) > 6e4))
    shapes = {name: jnp.shape(x) for name, x in operands.items()}
    return kind, f"{kind}, {options}, {shapes}: {wrong.sum()} of {wrong.size} wrong" if wrong.any() else ""


def check_quantize(rng, cpu):
    """Compares one quantizer, bit for bit."""
    rows, columns = size(rng, 1024), size(rng, 32768)
    dtype, qtype = str(rng.choice(["float32", "bfloat16", "float16"])), str(rng.choice(["int8", "float8_e4m3fn"]))
    symmetric, per_row, static = (bool(rng.random() < 0.5) for _ in range(3))
    symmetric |= qtype != "int8"
    spread = 10.0 ** rng.uniform(-3, 3)
    x = (rng.standard_normal((rows, columns), np.float32) * spread + spread * rng.uniform(-1, 1)).astype(
        jnp.dtype(dtype)
    )
    if x.size and rng.random() < 0.1:
        x[rng.integers(rows), rng.integers(columns)] = rng.choice([np.nan, np.inf, -np.inf, 0])
    axes = (1,) if per_row else (0, 1)
    given = {"qtype": jnp.dtype(qtype), "axis": axes, "symmetric": symmetric}
    parameters = []
    if static:
        shape = (rows, 1) if per_row else (1, 1)
        parameters.append(rng.uniform(0.5, 2, shape).astype("f") * np.float32(spread / 40))
        if not symmetric:
            parameters.append(rng.integers(-128, 128, shape, np.int32))
    want_sums = qtype == "int8" and bool(rng.random() < 0.3)

    def quantized(x, *parameters):
        named = dict(zip(("scale", "zero_point"), parameters))
        q = jax_qmm.quantize(x, sums=want_sums, **given, **named)
        return [leaf for leaf in (q.qvalue, q.scale, q.zero_point, q.azp_adj) if leaf is not None]

    def by_reference(x, *parameters):
        if static:
            scale, zero_point = (*parameters, None)[:2]
            leaves = [quantize_static(x, scale, zero_point, given["qtype"]), scale, zero_point]
        else:
            leaves = [*quantize_dynamic(x, given["qtype"], axes, symmetric)]
        return [leaf for leaf in (*leaves, sums_of(leaves[0], axes) if want_sums else None) if leaf is not None]

    got = jax.jit(quantized)(x, *parameters)
    with jax.default_device(cpu):
        want = jax.jit(by_reference)(x, *parameters)
    kind = f"quantize {dtype} to {qtype}, {'static' if static else 'dynamic'}"
    for leaf, (mine, other) in enumerate(zip(map(np.asarray, got), map(np.asarray, want), strict=True)):
        same = (bits(mine) == bits(other)) | (np.isnan(mine.astype("f")) & np.isnan(other.astype("f")))
        if not same.all():
            return kind, f"{kind}, {given}, {x.shape}: leaf {leaf}, {(~same).sum()} of {same.size} wrong"
    return kind, ""


def check_weights(rng, cpu):
    """Compares a product with weights in blocks; the tolerance is that of tests/weights_oracle.py."""
    dtype, out = (str(rng.choice(["float32", "bfloat16", "float16"])) for _ in range(2))
    width = int(rng.choice([4, 8]))
    m, n, k, batch = size(rng, 512), size(rng, 1024), size(rng, 4096), int(rng.choice([0, 0, 1, 3]))
    block = min(16 * int(rng.choice([1, 2, 3, 4, 8, 16, 20, 1000])), max(k, 1))
    low, high = -(2 ** (width - 1)), 2 ** (width - 1)
    groups = (n, -(-k // block))
    q = rng.integers(low, high, (n, k), np.int8)
    scale = rng.uniform(-2, 2, groups).astype(jnp.dtype(str(rng.choice(["float32", "bfloat16", "float16"]))))
    zero_dtype = [None, "int32", "float32", "bfloat16"][rng.integers(4)]
    zero_point = rng.uniform(low, high, groups).astype(jnp.dtype(zero_dtype)) if zero_dtype else None
    x = (rng.standard_normal((batch, m, k) if batch else (m, k), np.float32) / max(k, 1)).astype(jnp.dtype(dtype))
    vectors = [rng.uniform(-2, 2, n).astype("f")] if rng.random() < 0.5 else []
    activation = (None, "relu", (-3.0, 5.0))[rng.integers(3)]
    packed, options = bool(rng.random() < 0.8), {"activation": activation, "out_dtype": jnp.dtype(out)}

    def product(x, q, scale, zero_point, *vectors):
        w = jax_qmm.QArray(q, scale, zero_point, qtype=f"int{width}", tile_size=block)
        return jax_qmm.block_scaled_mm(x, w.pack() if packed else w, *vectors, **options)

    got = np.asarray(jax.jit(product)(x, q, scale, zero_point, *vectors)).astype("d")
    spread = lambda leaf: np.repeat(leaf.astype("d"), block, 1)[:, :k]
    scales, wide = spread(scale), x.astype("d")
    w = (q - (spread(zero_point) if zero_dtype else 0)) * scales
    want = wide @ w.T + (vectors[0] if vectors else 0)
    total = np.abs(wide) @ np.abs(w.T)
    # XLA multiplies weights that are rounded to x's dtype, which may be beyond float16's least.
    rounded = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-22}[dtype]
    off = (rounded + (k + 16) * 2.0**-23) * total + 2.0**-23 * np.abs(want) + float(jnp.finfo(out).tiny)
    if dtype == "float16":
        off += 2.0**-24 * (np.abs(wide) @ np.abs(scales.T))
    low, high = {None: (-np.inf, np.inf), "relu": (0, np.inf)}.get(activation, activation)
    want = np.clip(want, low, high)
    off += float(jnp.finfo(out).eps) * (np.abs(want) + off)
    kind = f"{dtype} by int{width} weights to {out}"
    wrong = ~(np.abs(got - want) <= off)
    given = f"x {x.shape}, w {q.shape}, blocks of {block}, {zero_dtype} zero points, packed: {packed}, {options}"
    return kind, f"{kind}, {given}: {wrong.sum()} of {wrong.size} wrong" if wrong.any() else ""


def check_convolution(rng, cpu):
    """Compares one convolution, bit for bit."""
    rank = int(rng.integers(1, 4))
    each = lambda low, high: tuple(int(v) for v in rng.integers(low, high, rank))
    taps, strides, dilation = each(1, 6), each(1, 4), each(1, 3)
    spatial, padding = each(8, (600, 40, 14)[rank - 1]), tuple(zip(each(-1, 4), each(-1, 4)))
    # No image is smaller than the window.
    spatial = tuple(max(size, (n - 1) * by + 3) for size, n, by in zip(spatial, taps, dilation))
    groups = int(rng.choice([1, 1, 3, 48]))
    channels, out = 1 if groups == 48 else int(rng.choice([4, 16, 20, 64])), int(rng.integers(1, 150 // groups + 1))
    if groups == 1 and rng.random() < 0.3:
        channels = int(rng.integers(1, 40))
    case = conv_oracle.case(
        *(spatial, taps, strides, padding, dilation),
        images=int(rng.integers(1, 4)),
        channels=channels,
        out=1 if groups == 48 else out,
        groups=groups,
    )
    lhs, rhs = (conv_oracle.int8(rng, *shape) for shape in (case.lhs_shape(), case.rhs_shape()))
    zero_l, zero_r = (int(rng.integers(-128, 128)) if rng.random() < 0.4 else None for _ in range(2))
    out_dtype = str(rng.choice(["bfloat16", "float16", "float32", "int8", "int32"]))
    ones = lambda x: (1,) * x.ndim
    scale_l = np.full(ones(lhs), rng.uniform(0.5, 2), "f")
    scale_r = (rng.uniform(-2, 2, len(rhs)) / math.sqrt(math.prod(rhs.shape[1:])) / 5000).astype("f")
    options: dict = {"out_dtype": jnp.dtype(out_dtype)}
    given, vectors = {}, {}
    if out_dtype != "int32":
        vectors = {"scale_a": scale_l.reshape(1), "scale_b": scale_r}
        options["activation"] = (None, "relu", "relu6", (-0.5, 1.25))[rng.integers(4)]
        if rng.random() < 0.5:
            given["bias"] = vectors["bias"] = rng.uniform(-2, 2, len(rhs)).astype("f")
    if out_dtype == "int8":
        given |= {"out_scale": np.float32(rng.uniform(0.01, 0.1)), "out_zero_point": np.int32(rng.integers(-20, 20))}
    wide = (x.astype(np.int64) - (zero or 0) for x, zero in ((lhs, zero_l), (rhs, zero_r)))
    want = conv_oracle.sums(case, *wide).astype(np.int32)
    residual, scale_residual, zero_residual = None, np.float32(rng.uniform(-0.05, 0.05)), int(rng.integers(-9, 9))
    if out_dtype != "int32" and rng.random() < 0.4:
        residual = conv_oracle.int8(rng, *want.shape)
        if rng.random() < 0.5:
            residual = jnp.asarray(residual / 40, str(rng.choice(["bfloat16", "float16", "float32"])))

    def convolution(lhs, rhs, given, residual):
        def qarray(x, scale, zero):
            scale = jnp.asarray(scale).reshape(-1, *ones(x)[1:])
            return jax_qmm.QArray(x, scale, None if zero is None else jnp.full(scale.shape, zero, jnp.int32))

        lhs, rhs = qarray(lhs, scale_l, zero_l), qarray(rhs, scale_r, zero_r)
        if residual is not None and residual.dtype == jnp.int8:
            residual = qarray(residual, scale_residual, zero_residual)
        return jax_qmm.conv_general_dilated(lhs, rhs, **case.keywords(), **given, residual=residual, **options)

    got = np.asarray(jax.jit(convolution)(lhs, rhs, given, residual))
    if residual is not None:
        values = jnp.asarray(residual, "f").reshape(-1, len(rhs))
        is_int8 = residual.dtype == jnp.int8
        vectors["residual"] = (scale_residual, values - zero_residual) if is_int8 else (None, values)
    if out_dtype != "int32":
        activation = checks.activation(options.pop("activation"))
        with jax.default_device(cpu):
            output = {name: jnp.asarray(x).reshape(1) for name, x in given.items() if name != "bias"}
            rows = jnp.asarray(want.reshape(-1, len(rhs)))
            want = reference.epilogue(rows, num_batch=0, activation=activation, **vectors, **output, **options)
        want = np.asarray(want).reshape(got.shape)
    wrong = bits(got) != bits(want)
    kind = f"{'depthwise ' if groups == 48 else ''}convolution to {out_dtype}"
    kind += "" if residual is None else " with a residual"
    return kind, f"{kind}, {case}, {zero_l}, {zero_r}: {wrong.sum()} of {wrong.size} wrong" if wrong.any() else ""


def check_blocks(rng, cpu):
    """Compares a product of two QArrays in blocks: int8 bit for bit, fp8 within the rounding of its sums."""
    m, n, k, block = size(rng, 512), size(rng, 1024), size(rng, 4096), int(rng.choice([32, 64, 128, 256]))
    dtype, out = str(rng.choice(["int8", "float8_e4m3fn"])), str(rng.choice(["bfloat16", "float16", "float32"]))
    operands, widths = {}, {"a": m, "b": n}
    for side, rows in widths.items():
        groups = (rows, -(-k // block))
        q = rng.integers(-128, 128, (rows, k), np.int8) if dtype == "int8" else rng.normal(0, 50, (rows, k))
        operands[side] = q.astype(jnp.dtype(dtype))
        operands[f"scale_{side}"] = (rng.uniform(-2, 2, groups) / math.sqrt(max(k, 1)) / 5000).astype("f")
        if dtype == "int8" and rng.random() < 0.5:
            operands[f"zero_point_{side}"] = rng.integers(-128, 128, groups, np.int32)
    if rng.random() < 0.5:
        operands["bias"] = rng.uniform(-2, 2, n).astype("f")

    def product(given):
        sides = (
            jax_qmm.QArray(given[s], given[f"scale_{s}"], given.get(f"zero_point_{s}"), tile_size=block) for s in "ab"
        )
        return jax_qmm.block_scaled_mm(*sides, given.get("bias"), out_dtype=jnp.dtype(out))

    got = np.asarray(jax.jit(product)(operands))
    kind = f"{dtype} blocks to {out}"
    if dtype == "int8":
        with jax.default_device(cpu):
            by_reference = jax.jit(
                lambda given: blocks.block_quantized_mm(**given, block=block, out_dtype=jnp.dtype(out))
            )
            # By value: XLA leaves away that sums begin with 0, which only the sign of a zero tells.
            wrong = got.astype("f") != np.asarray(by_reference(operands), "f")
    else:
        dense = [operands[s].astype("d") * np.repeat(operands[f"scale_{s}"].astype("d"), block, 1)[:, :k] for s in "ab"]
        want = dense[0] @ dense[1].T + operands.get("bias", 0)
        off = 2.0**-10 * (np.abs(dense[0]) @ np.abs(dense[1]).T) + 2.0**-23 * np.abs(want)
        off += float(jnp.finfo(out).eps) * (np.abs(want) + off) + float(jnp.finfo(out).tiny)
        wrong = ~(np.abs(got.astype("d") - want) <= off)
    shapes = {name: x.shape for name, x in operands.items()}
    return kind, f"{kind}, {shapes}, blocks of {block}: {wrong.sum()} of {wrong.size} wrong" if wrong.any() else ""


def check_blocks_of_floats(rng, cpu):
    """Compares a product of few rows that are float still; as `check_blocks` otherwise."""
    block = int(rng.choice([32, 64, 128, 256]))
    m, n, k = 1 + size(rng, 15), size(rng, 1024), block + 1 + size(rng, 4096)
    dtype, out = str(rng.choice(["int8", "float8_e4m3fn"])), str(rng.choice(["bfloat16", "float16", "float32"]))
    x = (rng.normal(0.3, 1, (m, k)) * 10 ** rng.uniform(-3, 3)).astype(jnp.dtype(str(rng.choice(OUT_DTYPES[:3]))))
    q = rng.integers(-128, 128, (n, k), np.int8) if dtype == "int8" else rng.normal(0, 50, (n, k))
    groups = (n, -(-k // block))
    leaves = {"scale_b": (rng.uniform(-2, 2, groups) / math.sqrt(k) / 5000).astype("f")}
    if dtype == "int8" and rng.random() < 0.5:
        leaves["zero_point_b"] = rng.integers(-128, 128, groups, np.int32)
    w = jax_qmm.QArray(q.astype(jnp.dtype(dtype)), leaves["scale_b"], leaves.get("zero_point_b"), tile_size=block)
    scheme = jax_qmm.W8A8(dtype, tile_size=block, symmetric=dtype != "int8" or bool(rng.random() < 0.5))
    product = jax.jit(lambda x, w: jax_qmm.matmul(x, w.T, scheme=scheme, preferred_element_type=jnp.dtype(out)))
    got, kind = np.asarray(product(x, w)), f"{x.dtype} quantized to {dtype} blocks, to {out}"
    with jax.default_device(cpu):
        by_reference = functools.partial(
            block_quantized_mm.OP.reference,
            **{"names": tuple(leaves), "num_batch": 0, "block": block, "shared_b": 1, "symmetric": scheme.symmetric},
            **{"activation": activations.NONE, "out_dtype": jnp.dtype(out)},
        )
        want = np.asarray(jax.jit(by_reference)(x, w.qvalue, *leaves.values()), "f")
    off = 0.0
    if dtype != "int8":
        spread = np.repeat(np.abs(leaves["scale_b"].astype("d")), block, 1)[:, :k]
        # A quantized x is off by a 16th of itself at most.
        off = 2.0**-10 * 17 / 16 * (np.abs(x.astype("d")) @ (np.abs(w.qvalue.astype("d")) * spread).T)
        off += float(jnp.finfo(out).eps) * (np.abs(want) + off) + float(jnp.finfo(out).tiny)
    wrong = ~(np.abs(got.astype("d") - want) <= off)
    case = f"{x.shape} x {q.shape}, blocks of {block}, {scheme}, {[*leaves]}"
    return kind, f"{kind}, {case}: {wrong.sum()} of {wrong.size} wrong" if wrong.any() else ""


CHECKS = (
    *(check_product, check_product, check_weights, check_quantize, check_convolution, check_blocks),
    check_blocks_of_floats,
)


def soak(seed, seconds):
    """Calls until the time is over: the counts by kind, and what was wrong or ""."""
    os.environ["JAX_QMM_STRICT"] = "1"  # a call on the reference would compare it with itself
    cpu, counts, until, wrong, number = jax.devices("cpu")[0], collections.Counter(), time.monotonic() + seconds, "", 0
    while time.monotonic() < until and not wrong:
        rng = np.random.default_rng((seed, number))
        kind, wrong = CHECKS[rng.integers(len(CHECKS))](rng, cpu)
        wrong = wrong and f"seed {seed}, call {number}: {wrong}"
        counts[kind] += 1
        number += 1
        if number % 200 == 0:
            jax.clear_caches()  # of programs that will not come again
            print(f"process {seed}: {number} calls", flush=True)
    return counts, wrong


def main():
    parser = argparse.ArgumentParser(description="Compares random calls with the reference.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the first process; the others have the next ones")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    seeds = range(args.seed, args.seed + args.processes)
    with concurrent.futures.ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(soak, seeds, [60 * args.minutes] * args.processes))
    counts = sum((of for of, _ in found), collections.Counter())
    for kind, count in sorted(counts.items()):
        print(f"{count:7} {kind}")
    failures = [wrong for _, wrong in found if wrong]
    print(f"{counts.total()} calls, {len(failures)} wrong", *failures, sep="\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
