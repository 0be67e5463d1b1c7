"""Products with scales for blocks on both sides, also where rows are quantized on the way."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops import block_quantized_mm
from jax_qmm.reference import activation as activations, block_quantized_mm as blocks_reference
from jax_qmm.selftest.quantize import FLOATS
from jax_qmm.selftest.result import Checks, Result, by_each
from jax_qmm.selftest.scaled_mm import FP8_TOLERANCE

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


def checks(kernels, gpu) -> Checks:
    """A check for each kind of product of quantized operands, then for each where a is float still, by name."""
    for kind in BLOCK_KINDS:
        check = functools.partial(check_block_quantized_mm, kernels, gpu, *kind)
        yield f"blocks on both sides {' '.join(map(str, kind))}", check
    for dtype, kind in itertools.product(FLOATS, FLOAT_KINDS):
        check = functools.partial(check_quantizing_mm, kernels, gpu, dtype, kind)
        yield f"blocks on both sides, {dtype} quantized to {' '.join(map(str, kind))}", check


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
        for words, out in by_each(kernels.restrict_block_quantized_mm, choices, lambda x=x: run(x, w)):
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
    for words, out in by_each(kernels.restrict_block_quantized_mm, choices, lambda: run(a, w)):
        op = f"blocks on both sides, {a_dtype} quantized to {dtype}" + ("" if symmetric else ", zero points")
        wrong = int((~(np.abs(out - want) <= tolerance)).sum())
        yield Result(op, _extension.as_compiled(kernels, words, gpu), f"M {m}, N {n}, K {k}, blocks of {block}", wrong)
