"""The packed order, against the sentence that defines it, a column at a time."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_qmm.reference import packing

QTYPES = {"int4": (ml_dtypes.int4, 2), "int8": (np.int8, 1)}


def values(shape, qtype, seed=0):
    bounds = ml_dtypes.iinfo(QTYPES[qtype][0])
    return np.random.default_rng(seed).integers(bounds.min, bounds.max + 1, shape).astype(np.int8)


def place(column, qtype):
    """The byte of a column, and the bit at which the column starts there."""
    if qtype == "int4":
        block, column = divmod(column, 128)
        t, p = column % 8 // 2, column // 8 % 4 + 4 * (column % 2)
        return 64 * block + 16 * t + 4 * (column // 32) + p // 2, 4 * (p % 2)
    block, column = divmod(column, 64)
    return 64 * block + 16 * (column % 8 // 2) + 4 * (column // 16) + 2 * (column // 8 % 2) + column % 2, 0


@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("k", [1, 127, 128, 300])
def test_each_column_has_its_place(qtype, k):
    dtype, per_byte = QTYPES[qtype]
    q = values((3, k), qtype)
    packed = np.asarray(packing.pack(jnp.asarray(q.astype(dtype))))
    columns = -(-k // 128) * 128
    assert packed.shape == (3, columns // per_byte) and packed.dtype == np.uint8
    bits = 8 // per_byte
    filled = np.pad(q, ((0, 0), (0, columns - k))).astype(np.int64) + 2 ** (bits - 1)
    for column in range(columns):
        byte, shift = place(column, qtype)
        np.testing.assert_array_equal(packed[:, byte] >> shift & (2**bits - 1), filled[:, column])


@hypothesis.given(
    st.sampled_from(sorted(QTYPES)), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 400), st.integers(0, 99)
)
def test_unpacking_gives_the_values_back(qtype, leading, k, seed):
    q = values((*leading, k), qtype, seed)
    packed = packing.pack(jnp.asarray(q.astype(QTYPES[qtype][0])))
    unpacked = packing.unpack(packed, QTYPES[qtype][0], k)
    assert unpacked.dtype == QTYPES[qtype][0]
    np.testing.assert_array_equal(np.asarray(unpacked).astype(np.int8), q)
