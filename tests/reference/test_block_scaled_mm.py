"""The product of weights that are dequantized once, against float64. What kernels compute is in tests/ops."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_qmm.reference import block_scaled_mm as reference
from jax_qmm.reference.activation import NAMED, NONE

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


def test_a_bias_and_relu_in_bfloat16_are_as_xla_fuses_them():
    rng = np.random.default_rng(1)
    x, q = rng.standard_normal((5, 70)).astype(BF16), rng.integers(-8, 8, (9, 70)).astype(np.int8)
    scale, bias = rng.uniform(0.5, 2, (9, 3)).astype(F32) / 64, rng.standard_normal(9).astype(BF16)

    def product(*operands):
        options = dict(num_batch=0, qtype=jnp.int4, packed=False, block=32, out_dtype=jnp.dtype(BF16))
        return reference.dequantized_once(*operands, activation=NAMED["relu"], **options)

    operands = x, q, scale, None, bias
    made = {(str(v.aval.dtype), v.aval.shape) for e in jax.make_jaxpr(product)(*operands).eqns for v in e.outvars}
    assert ("bfloat16", (5, 9)) in made and ("float32", (5, 9)) not in made
    w = np.float64(q) * np.repeat(np.float64(scale), 32, -1)[:, :70]
    sums, total = np.float64(x) @ w.T, np.abs(np.float64(x)) @ np.abs(w).T
    want = np.maximum(sums + np.float64(bias), 0)
    # Of the weights, the sums and the result, each rounded to bfloat16, and of sums in float32.
    error = (UNIT[BF16] + 80 * 2.0**-23) * total + UNIT[BF16] * np.abs(sums) * 1.01
    got = np.float64(product(*map(lambda v: None if v is None else jnp.asarray(v), operands)))
    assert np.all(np.abs(got - want) <= error + UNIT[BF16] * (np.abs(want) + error))


def test_rows_of_zeros_and_infinities_stay_what_they_are():
    scale = jnp.float32([[[0.0], [jnp.inf], [1.0]]])
    out = reference.dequantized_once(
        *(jnp.ones((1, 2, 4), jnp.float16), jnp.ones((1, 3, 4), jnp.int8), scale),
        **dict(num_batch=1, qtype=jnp.int8, packed=False, block=4, activation=NONE, out_dtype=jnp.float32),
    )
    assert out.tolist() == [[[0.0, float("inf"), 4.0]] * 2]
