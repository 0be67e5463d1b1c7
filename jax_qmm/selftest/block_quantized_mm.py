"""Products with scales for blocks on both sides."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm import _extension
from jax_qmm.reference import block_quantized_mm as blocks_reference
from jax_qmm.selftest.result import Checks, Result, by_each
from jax_qmm.selftest.scaled_mm import FP8_TOLERANCE

# Products with scales for blocks on both sides: dtype, block, whether a has zero points, rows of b that share scales.
# The last block is short.
BLOCK_KINDS = (
    *(("int8", block, zero_points, 1) for block in (32, 64, 128, 256) for zero_points in (False, True)),
    *(("float8_e4m3fn", 128, False, shared) for shared in (1, 128)),
)
BLOCK_N, BLOCK_K, BLOCK_ROWS = 264, 1168, (7, 133)


def checks(kernels, gpu) -> Checks:
    """A check for each kind of product, by name."""
    for kind in BLOCK_KINDS:
        check = functools.partial(check_block_quantized_mm, kernels, gpu, *kind)
        yield f"blocks on both sides {' '.join(map(str, kind))}", check


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
