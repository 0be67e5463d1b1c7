"""Products of float activations with weights that are scaled in blocks."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm import _extension
from jax_qmm.selftest.quantize import FLOATS
from jax_qmm.selftest.result import Checks, Result, by_each, one_for_all

# Products with weights that are scaled in blocks: N and K ragged, M below and above what tiles have.
WEIGHT_N, WEIGHT_K, WEIGHT_ROWS = 133, 1416, (1, 17, 131)
WEIGHT_BLOCKS = (16, 32, 64, 384)
WEIGHT_ZERO_POINTS = (None, "int32", "float32")


def checks(kernels, gpu) -> Checks:
    """A check for each dtype with weights of each kind, by name."""
    for kind in itertools.product(FLOATS, (4, 8), WEIGHT_ZERO_POINTS, WEIGHT_BLOCKS):
        check = functools.partial(check_block_scaled_mm, kernels, gpu, *kind)
        yield f"block_scaled_mm {' '.join(map(str, kind))}", check


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
        for words, out in by_each(kernels.restrict_block_scaled_mm, one_for_all(choices), lambda: run(x, w)):
            rounds = zero_dtype == "float32" or dtype == "float32" or "weights scaled" in words
            tolerance = (1.01 * unit * rounds + (WEIGHT_K + 16) * 2.0**-23) * size
            of_result = 2.0**-8 if out_dtype == "bfloat16" else 2.0**-23
            tolerance += of_result * (np.abs(want) + tolerance)
            wrong = int((~(np.abs(out.astype("d") - want) <= tolerance)).sum())
            shape = f"M {m}, N {n}, K {WEIGHT_K}, blocks of {block}"
            yield Result(name, _extension.as_compiled(kernels, words, gpu), shape, wrong)
