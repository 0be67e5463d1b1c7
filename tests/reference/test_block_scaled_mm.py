"""The product of weights that are dequantized once, against float64. What kernels compute is in tests/ops."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_qmm.reference import block_scaled_mm as reference
from jax_qmm.reference.activation import NONE

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-23}  # of the rounding of weights


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("of_zeros", [None, np.int8, F32])
@pytest.mark.parametrize("scales", [1.0, 1e30, 1e-30])
def test_weights_are_rounded_once_in_the_range_of_float32(dtype, of_zeros, scales):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 3, 4, 70)) / 64).astype(dtype)
    q = rng.integers(-8, 8, (1, 9, 70)).astype(np.int8)
    scale = (scales * rng.uniform(0.5, 2, (1, 9, 3)) * [1, -1, 1e-3]).astype(F32)
    zeros = None if of_zeros is None else (8 * rng.standard_normal(scale.shape)).astype(of_zeros)
    bias = rng.standard_normal((2, 9)).astype(F32)
    out = reference.dequantized_once(
        *(jnp.asarray(x), jnp.asarray(q), jnp.asarray(scale)),
        zero_point=None if zeros is None else jnp.asarray(zeros),
        bias=jnp.asarray(bias),
        **dict(num_batch=1, qtype=jnp.int4, packed=False, block=32, activation=NONE, out_dtype=jnp.float32),
    )
    spread = lambda leaf: np.repeat(leaf.astype(np.float64), 32, -1)[..., :70]
    w = (q - (0 if zeros is None else spread(zeros))) * spread(scale)
    y = np.einsum("lrsk,lnk->lrsn", x.astype(np.float64), np.repeat(w, 2, 0)) + bias[:, None, None]
    # Of a weight in float16 at least 2^-39 of the largest of its row is kept: the rows are scaled to 2^14 or more.
    error = UNIT[dtype] * np.abs(w) + 2.0**-39 * np.abs(w).max(-1, keepdims=True) * (dtype == F16)
    total = np.einsum(
        "lrsk,lnk->lrsn", np.abs(x.astype(np.float64)), np.repeat(np.abs(w) * 80 * 2.0**-23 + error, 2, 0)
    )
    assert np.all(np.abs(np.asarray(out) - y) <= total + 2.0**-23 * np.abs(y))


def test_rows_of_zeros_and_infinities_stay_what_they_are():
    scale = jnp.float32([[[0.0], [jnp.inf], [1.0]]])
    out = reference.dequantized_once(
        *(jnp.ones((1, 2, 4), jnp.float16), jnp.ones((1, 3, 4), jnp.int8), scale),
        **dict(num_batch=1, qtype=jnp.int8, packed=False, block=4, activation=NONE, out_dtype=jnp.float32),
    )
    assert out.tolist() == [[[0.0, float("inf"), 4.0]] * 2]
