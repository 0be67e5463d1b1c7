"""Convolutions of QArrays, compared bit for bit with the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from conv_oracle import int8

import jax_qmm
from jax_qmm import QArray

F32, BF16, F16, F8 = np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
SAME = ((1, 1), (1, 1))


def id_of(words):
    return words.replace("sm80 ", "").replace("sm90 ", "").replace("implicit GEMM ", "").replace(" int8", "")


def of_gpu(c, gpu):
    """A case whose images are as many as the GPU has SMs, or one for so many of them, if it says so."""
    return c if c.images > 0 else dataclasses.replace(c, images=max(2, gpu.sm_count // -c.images))


def along_first(vector, ndim):
    return jnp.asarray(vector).reshape(-1, *(1,) * (ndim - 1))


def operands(c, zero_l=None, zero_r=None, of_image=True, of_channel=True, seed=0):
    """QArrays; of zero points "each" means any, and a number the same for all."""
    rng = np.random.default_rng(seed)

    def qarray(shape, zero, many):
        count = shape[0] if many else 1
        scale = (rng.uniform(0.001, 0.02, count) * rng.choice([-1, 1], count)).astype(F32)
        zero = rng.integers(-128, 128, count) if zero == "each" else None if zero is None else np.full(count, zero)
        leaves = (None if x is None else along_first(x, len(shape)) for x in (scale, zero))
        scale, zero = leaves
        return QArray(jnp.asarray(int8(rng, *shape)), scale, None if zero is None else zero.astype(jnp.int32))

    return qarray(c.lhs_shape(), zero_l, of_image), qarray(c.rhs_shape(), zero_r, of_channel)


def check(on_reference, c, lhs, rhs, bias=None, tile=None, kernel="implicit GEMM", **options):
    f = lambda lhs, rhs, bias: jax_qmm.conv_general_dilated(lhs, rhs, **c.keywords(), bias=bias, **options)
    (row,) = jax_qmm.explain(f, lhs, rhs, bias).rows
    words = f" {tile.partition(' ')[2]} " if tile else kernel  # without the architecture, which is shown as compiled
    assert words in row.runs_on, row.runs_on
    got, want = jax.device_get(jax.jit(f)(lhs, rhs, bias)), jax.device_get(on_reference(f, lhs, rhs, bias))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
    return got


def output_of(dtype):
    """Options for results of a dtype, which quantize those of 8 bits."""
    zero_point = dict(out_zero_point=-7) if dtype == np.int8 else {}
    return dict(out_dtype=dtype) | (dict(out_scale=0.05) if dtype in (np.int8, F8) else {}) | zero_point


def residual_of(c, kind, seed=9):
    """What is added to a case's results, of a dtype; None for none."""
    floats = (jax.ShapeDtypeStruct(shape, F32) for shape in (c.lhs_shape(), c.rhs_shape()))
    f = lambda lhs, rhs: jax.lax.conv_general_dilated(lhs, rhs, **c.keywords())
    shape, rng = jax.eval_shape(f, *floats).shape, np.random.default_rng(seed)
    if kind is None or "int8" not in kind:
        return kind and jnp.asarray(rng.normal(0, 3, shape), kind)
    of_all = lambda x: jnp.full((1,) * len(shape), x)
    return QArray(jnp.asarray(int8(rng, *shape)), of_all(0.03), of_all(-7) if "zero point" in kind else None)


def shifted(q):
    zero = 0 if q.zero_point is None else np.asarray(q.zero_point, np.int64)
    return np.asarray(q.qvalue, np.int64) - zero
