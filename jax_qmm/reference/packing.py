"""The order in which packed weights lie in memory: one for all kernels and all GPUs.

Along the last axis, columns are padded to a multiple of `COLUMNS` with the value 0. Every 64 bytes (128 columns of
int4, 64 of int8) are 4 parts, t = 0..3, of 16 bytes, which are 4 little-endian words of 32 bits, w = 0..3:

- int4: nibble p of word w (bits 4p to 4p + 3) holds column 8 (4w + p % 4) + 2t + p // 4, as q + 8.
- int8: byte p of word w holds column 16w + 8 (p // 2) + 2t + p % 2, as q + 128.

So one load of 16 bytes gives lane t of four the columns 2t and 2t + 1 of every 8, which matrix instructions want there.
"""

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import INT4
from jax_qmm.explicit_axes import gathered_unless_divided

COLUMNS = 128


def columns_a_byte(qtype):
    """How many values of int4 or int8 one byte of the packed order holds."""
    return 2 if qtype == INT4 else 1


def pack(q):
    """int4 or int8 `(..., K)` as uint8 `(..., bytes)`.

    >>> pack(jnp.zeros((3, 130), jnp.int4)).shape, pack(jnp.zeros((3, 130), jnp.int8)).shape
    ((3, 128), (3, 256))
    >>> pack(jnp.arange(-4, 4).astype(jnp.int4))[:2].tolist()  # columns 0 and 8, and 16 and 24
    [132, 136]
    """
    is_int4 = q.dtype == INT4
    *leading, k = q.shape
    q = gathered_unless_divided(q, -1, 1 if k % COLUMNS else k // COLUMNS)
    q = jax.lax.bitcast_convert_type(q.astype(jnp.int8), jnp.uint8) + jnp.uint8(8 if is_int4 else 128)
    q = jnp.pad(q, [(0, 0)] * len(leading) + [(0, -k % COLUMNS)], constant_values=8 if is_int4 else 128)
    blocks = (*leading, -(-k // COLUMNS) * (1 if is_int4 else 2))
    if not is_int4:
        q = q.reshape(*blocks, 4, 2, 4, 2)  # w, p // 2, t, p % 2
        return jnp.moveaxis(q, -2, -4).reshape(*leading, blocks[-1] * 64)
    q = q.reshape(*blocks, 4, 2, 2, 4, 2)  # w, p % 4 // 2, p % 2, t, p // 4
    q = jnp.moveaxis(q, (-2, -5, -1, -4, -3), (-5, -4, -3, -2, -1))
    return (q[..., 0] | q[..., 1] << 4).reshape(*leading, blocks[-1] * 64)


def unpack(packed, qtype, k):
    """The `k` columns of `qtype` of which `pack` made `packed`.

    >>> q = jnp.arange(-8, 7).astype(jnp.int4)
    >>> bool((unpack(pack(q), jnp.int4, 15) == q).all())
    True
    """
    *leading, size = packed.shape
    columns = size * columns_a_byte(qtype)
    packed = gathered_unless_divided(packed, -1, 1 if k != columns else k // COLUMNS)
    blocks = (*leading, size // 64)
    if qtype == INT4:
        octets = packed.reshape(*blocks, 4, 4, 2, 2)  # t, w, p // 4, p % 4 // 2
        octets = jnp.moveaxis(octets, (-3, -1, -4, -2), (-4, -3, -2, -1))[..., None, :, :]
        # Four shifts: XLA computes 4 * second once for all weights of a program and fuses what uses it, so that all
        # weights are dequantized, and take memory, at the same time.
        second = jax.lax.broadcasted_iota(jnp.uint8, (2, 1, 1), 0)  # of p % 2, which comes before t
        q = (octets >> second >> second >> second >> second & 15) - jnp.uint8(8)
    else:
        q = jnp.moveaxis(packed.reshape(*blocks, 4, 4, 2, 2), -4, -2) - jnp.uint8(128)
    q = q.reshape(*leading, columns)[..., :k]
    return jax.lax.bitcast_convert_type(q, jnp.int8).astype(qtype)
