"""Products with weights in blocks, called by their FFI target with weights packed here, and float64 in numpy.

The error that is allowed follows from the arithmetic. Let S be the sum of |x| |q - zero_point| |scale| over K.

- x and integer weights less integer zero points are exact in 16 bits, and so are their products in float32. A sum of K
  of them is added up in K + 16 steps at most (in tensor cores, of a block's sums, of warps' parts), each of which keeps
  at least 23 bits: an error of (K + 16) 2^-23 S.
- A float zero point's difference is rounded to x's dtype once, as a dequantized weight would be: u S more, with u of
  2^-8 in bfloat16 and 2^-11 in float16, whose subnormals are off by 2^-25 of the scale.
- Kernels that scale weights, in two parts, round them to bfloat16 once: u (1 + 2^-6) S more, and 2^-134 of what they
  multiply, for subnormal ones.
- Tensor cores keep at least 13 bits below the largest of the up to 32 products of fp8 that they add at once, four times
  between two scalings at most: 2^-10 S more.
- With float32 x a dequantized weight has two roundings, for which two of the K + 16 do.
- The scale, the bias and the result in float32 are a few roundings more, and the result in 16 bits has its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_qmm
from jax_qmm import _extension

BF16, F16, F32, F8 = ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # relative error of a rounding
BITS = (4, 8)


def pack(q, bits):
    """q (..., N, K) in the order of the kernels, by the place of each column."""
    k = np.arange(q.shape[-1])
    padded = -(-q.shape[-1] // 128) * 128
    part = k % 8 // 2
    if bits == 4:
        word, nibble = k % 128 // 32, k % 32 // 8 + 4 * (k % 2)
        byte, shift = k // 128 * 64 + 16 * part + 4 * word + nibble // 2, 4 * (nibble % 2)
    else:
        word, shift = k % 64 // 16, 0 * k
        byte = k // 64 * 64 + 16 * part + 4 * word + k % 16 // 8 * 2 + k % 2
    zeros = {4: 0x88, 8: 0x80}[bits]  # q = 0
    packed = np.full((*q.shape[:-1], padded * bits // 8), zeros, np.uint8)
    offset = 1 << (bits - 1)
    for i in range(len(k)):  # the bits of a zero become those of the column
        value = (q[..., i] + offset).astype(np.uint8) ^ np.uint8(offset)
        packed[..., byte[i]] ^= value << np.uint8(shift[i])
    return packed


def call(
    x,
    w,
    scale,
    zero_point=None,
    bias=None,
    *,
    bits,
    block,
    activation="none",
    low=0.0,
    high=0.0,
    out_dtype=F32,
    workspace=0,
):
    """Calls the FFI target, with so many bytes of workspace."""
    _extension._load()
    optional = {"zero_point": zero_point, "bias": bias}
    optional = {name: value for name, value in optional.items() if value is not None}
    batch = max(x.shape[0], w.shape[0])
    results = [jax.ShapeDtypeStruct((batch, x.shape[1], w.shape[1]), out_dtype)]
    if workspace:
        results.append(jax.ShapeDtypeStruct((workspace,), np.uint8))
    run = jax.ffi.ffi_call("jax_qmm_block_scaled_mm", results)
    return np.asarray(
        run(
            *map(jnp.asarray, (x, w, scale, *optional.values())),
            bits=np.int32(bits),
            block=np.int32(block),
            names=" ".join(optional),
            activation=activation,
            low=np.float32(low),
            high=np.float32(high),
        )[0]
    )


def dequantized(q, scale, zero_point, block):
    """In float64."""
    spread = lambda v: np.repeat(v.astype(np.float64), block, -1)[..., : q.shape[-1]]
    return (q - (0 if zero_point is None else spread(zero_point))) * spread(scale)


def allowed(x, q, scale, zero_point, block, out_dtype=F32):
    """The result in float64, and its largest error."""
    x64, w64 = x.astype(np.float64), dequantized(q, scale, zero_point, block)
    transposed = lambda w: np.swapaxes(w, -1, -2)
    with np.errstate(over="ignore"):
        y, total = x64 @ transposed(w64), np.abs(x64) @ transposed(np.abs(w64))
        error = (x.shape[-1] + 16) * 2.0**-23 * total
        dtype = x.dtype.type
        if dtype == F8:
            error += 2.0**-10 * total
        if zero_point is not None and zero_point.dtype != np.int8 and dtype != F32:
            error += UNIT[dtype] * total
            if dtype == F16:
                scales = np.abs(dequantized(np.ones_like(q), scale, None, block))
                error += 2.0**-25 * (np.abs(x64) @ transposed(scales))
        error += UNIT[out_dtype] * np.abs(y) + np.finfo(np.float32).tiny
        if out_dtype == F16:
            error += 2.0**-25
    return y, error


def operands(seed, m, n, k, dtype, bits, block, zero_point: Any = "none", scale_dtype=F32, batch=(1, 1)) -> Any:
    """x, q, scale and zero point, of which the extremes of q and zero_point are some."""
    rng = np.random.default_rng(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    x = rng.standard_normal((batch[0], m, k)).astype(dtype)
    q = rng.integers(low, high, (batch[1], n, k))
    groups = (batch[1], n, -(-k // block))
    scale = (rng.uniform(0.001, 0.02, groups) * rng.choice([-1, 1], groups)).astype(scale_dtype)
    if zero_point == "none":
        return x, q, scale, None
    if zero_point == "int8":
        return x, q, scale, rng.integers(low, high, groups).astype(np.int8)
    return x, q, scale, rng.uniform(1.5 * low, 1.5 * high, groups).astype(zero_point)


def quantized(q, scale, zero_point, block, bits):
    """The QArray of the first entry of a batch."""
    values = jnp.asarray(q[0].astype(np.int8)).astype({4: jnp.int4, 8: jnp.int8}[bits])
    if zero_point is not None:
        zero_point = jnp.asarray(zero_point[0].astype(np.int32 if zero_point.dtype == np.int8 else zero_point.dtype))
    return jax_qmm.QArray(values, jnp.asarray(scale[0]), zero_point, tile_size=block)
