"""Products of int8 rows with int4 weights that become int8."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_qmm import _extension
from jax_qmm.ops.expanded_mm import expanded_mm
from jax_qmm.selftest.block_scaled_mm import WEIGHT_N
from jax_qmm.selftest.result import Checks, Result, by_each, one_for_all

# Rows of x beside int4 weights that become int8: few, which all kernels of expanded_mm serve, and more than a tile's.
EXPANDED_ROWS = (7, 133)
EXPANDED_K = 1056  # the last block is short, as is the last turn of warps
EXPANDED_BLOCK = 64


def checks(kernels, gpu) -> Checks:
    """A check for each number of rows, by name."""
    for m in EXPANDED_ROWS:
        yield f"expanded_mm {m}", functools.partial(check_expanded_mm, kernels, gpu, m)


def check_expanded_mm(kernels, gpu, m: int) -> Iterator[Result]:
    """Runs every kernel that serves m rows, with zero points and without, bit for bit.

    Results are int32, and bfloat16 of the kernels that have no such ones.
    """
    choices = lambda n, *of: one_for_all(kernels.ExpandedMmProblem(m, n, EXPANDED_K, 1, *of).choices(gpu))
    of_int32 = choices(WEIGHT_N, "int32", EXPANDED_BLOCK)
    yield from _check_expanded(kernels, gpu, m, WEIGHT_N, "int32", EXPANDED_BLOCK, of_int32)
    n, done = WEIGHT_N // 8 * 8, of_int32
    for block in (EXPANDED_BLOCK, 2 * EXPANDED_BLOCK):  # of some kernels blocks are multiples of 128
        of_bfloat16 = [words for words in choices(n, "bfloat16", block) if words not in done]
        yield from _check_expanded(kernels, gpu, m, n, "bfloat16", block, of_bfloat16)
        done = done + of_bfloat16


def _check_expanded(kernels, gpu, m, n, out_dtype, block, choices) -> Iterator[Result]:
    k = EXPANDED_K
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
        for words, out in by_each(kernels.restrict_expanded_mm, choices, lambda: run(*of_int4)):
            kernel = _extension.as_compiled(kernels, words, gpu)
            yield Result(op, kernel, f"M {m}, N {n}, K {k}, blocks of {block}", int((out != want).sum()))
