"""expanded_mm's kernel against numpy, bit for bit, and the products that it serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W4A8, _extension
from jax_qmm.ops.expanded_mm import expanded_mm

pytestmark = pytest.mark.gpu


def operands(batch, m, n, k, block, zero_points, seed=0):
    """Random ones; multiples and zero points, of either sign, as large as int8 allows."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-128, 128, (batch, m, k)).astype(np.int8)
    w = rng.integers(-8, 8, (batch, n, k)).astype(np.int8)
    zero_point = rng.integers(-8, 8, (batch, n, -(-k // block))).astype(np.int8) if zero_points else None
    reach = 8 if zero_point is None else np.maximum(7 - zero_point, zero_point + 8)
    multiple = rng.integers(-(127 // reach), 127 // reach + 1, (batch, n, -(-k // block))).astype(np.int8)
    return x, w, multiple, zero_point


def expected(x, w, multiple, zero_point, block):
    along = lambda leaf: 0 if leaf is None else np.repeat(leaf.astype(np.int64), block, -1)[..., : w.shape[-1]]
    values = (w - along(zero_point)) * along(multiple)
    assert abs(values).max(initial=0) <= 127
    return x.astype(np.int64) @ values.swapaxes(-1, -2)


def run(x, w, multiple, zero_point, block, num_batch=1):
    f = jax.jit(lambda *leaves: expanded_mm(*leaves, num_batch=num_batch, block=block))
    leaves = jnp.asarray(x), jnp.asarray(w, jnp.int4), jnp.asarray(multiple)
    return np.asarray(f(*leaves, None if zero_point is None else jnp.asarray(zero_point)))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    "batch, m, n, k, block",
    [
        (1, 1, 1, 32, 32),
        (1, 5, 17, 96, 32),  # a warp has three of its four threads' columns
        (1, 8, 16, 1024, 128),  # a turn of all warps
        (1, 9, 33, 1056, 64),  # and a short one
        (2, 16, 31, 320, 256),  # the last block is short
        (1, 17, 40, 224, 96),
        (3, 33, 16, 128, 128),  # two tiles of x
    ],
)
def test_shapes(batch, m, n, k, block, zero_points):
    values = operands(batch, m, n, k, block, zero_points)
    np.testing.assert_array_equal(run(*values, block), expected(*values, block))


def test_every_value_of_every_block():
    """All that (w - zero_point) * multiple can be, in neighbours of either extreme: no byte borrows from another."""
    zero_point, multiple = (leaf.ravel() for leaf in np.mgrid[-8:8, -15:16])
    fits = np.maximum(7 - zero_point, zero_point + 8) * abs(multiple) <= 127
    zero_point, multiple = (leaf[fits].astype(np.int8)[None, :, None] for leaf in (zero_point, multiple))
    w = np.random.default_rng(0).permuted(np.resize(np.arange(-8, 8), (1, fits.sum(), 64)), axis=-1).astype(np.int8)
    x = np.eye(64, dtype=np.int8)[None]
    np.testing.assert_array_equal(run(x, w, multiple, zero_point, 64), expected(x, w, multiple, zero_point, 64))


def test_one_weight_of_several_batches():
    x, *_ = operands(3, 4, 16, 64, 32, True)
    _, *of_w = operands(1, 4, 16, 64, 32, True)
    np.testing.assert_array_equal(run(x, *of_w, 32), expected(x, *of_w, 32))


@pytest.mark.parametrize("scheme", [W4A8(32), W4A8(64, symmetric=False)], ids=str)
@pytest.mark.parametrize(
    "equation, shape, kernel, contracted",
    [
        ("bk,kn->bn", (3, 96), (96, 24), (0,)),
        ("abk,hdk->hbda", (2, 3, 96), (4, 8, 96), (2,)),
        ("gbk,gkn->gbn", (2, 3, 96), (2, 96, 8), (1,)),
        ("bhd,hdn->bn", (3, 2, 64), (2, 64, 8), (0, 1)),
        ("bk,kn->bn", (40, 96), (96, 24), (0,)),
        ("bk,kn->bn", (65, 96), (96, 24), (0,)),
        ("bk,kn->bn", (3, 100), (100, 24), (0,)),
    ],
)
def test_products_are_those_of_the_expanded_weight(on_reference, scheme, equation, shape, kernel, contracted):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    w = scheme.quantize_weight(jnp.asarray(rng.normal(0.5, 1, kernel), jnp.float32), contracted)
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    got = jax.jit(f)(*jax.device_put((x, w), jax.devices(_extension.platform())[0]))
    np.testing.assert_array_equal(jax.device_get(got), jax.device_get(on_reference(f, x, w)))
