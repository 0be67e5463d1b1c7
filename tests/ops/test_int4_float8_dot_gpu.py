"""Products of float8 and int4 weights by the kernel, against float64 in numpy.

Products are exact and sums are as in `weights_oracle`: an error of (K + 16) 2^-23 of the sum of |x| |w|, of
float8 another 2^-10, and the roundings of the row's scale and of the result.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W4A8, W8A8, _extension

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def has_kernels(extension):
    if reason := _extension.fallback_reason(_extension.platform(), (), 80):
        pytest.skip(reason)
    yield
    extension.restrict_block_scaled_mm("")


def exact(q):
    q = q.unpack()
    along = lambda leaf: 0 if leaf is None else np.asarray(q.along_values(leaf)).astype(np.float64)
    values = (np.asarray(q.qvalue).astype(np.float64) - along(q.zero_point)) * along(q.scale)
    return values.reshape(q.stored_shape).transpose(q.storage_axes())


@pytest.mark.parametrize("x_dtype", ["float8", "float16"])
@pytest.mark.parametrize("tile, symmetric", [(64, False), (128, True), (None, True)])
@pytest.mark.parametrize(
    "equation, x_shape, w_shape, contracted",
    [
        ("mk,kn->mn", (1, 304), (304, 72), (0,)),  # the last block is short
        ("btk,kn->btn", (2, 9, 304), (304, 72), (0,)),
        ("bthd,hdf->btf", (2, 5, 2, 96), (2, 96, 48), (0, 1)),
        ("ebk,ekn->ebn", (2, 33, 256), (2, 256, 24), (1,)),
    ],
)
def test_is_the_product_of_exact_values(
    equation, x_shape, w_shape, contracted, tile, symmetric, x_dtype, extension, request
):
    in_float8 = x_dtype == "float8"
    if in_float8:
        request.getfixturevalue("has_wgmma")
        if tile == 128 and len(contracted) == 2:
            pytest.skip("blocks of 96")
    extension.restrict_block_scaled_mm("by float8" if in_float8 else "weights, sums")
    rng, scheme = np.random.default_rng(0), W4A8(tile, symmetric, activation_dtype="fp8")
    x = jnp.asarray(rng.normal(size=x_shape), jnp.float32)
    w = scheme.quantize_weight(jnp.asarray(rng.normal(0.2, 1, w_shape), jnp.float32), contracted)
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme)
    rows = jax_qmm.explain(f, x, w).rows
    assert [row.op.split()[0] for row in rows] == ["quantize", "block_scaled_mm"]
    assert ("int4 weights by float8" if in_float8 else "x widened to float16") in rows[-1].runs_on, rows[-1].runs_on
    got = np.asarray(jax.jit(f)(x, w), np.float64)
    x = exact(W8A8("fp8").quantize_activation(x, len(contracted)))
    want, size = (np.einsum(equation, each(x), each(exact(w))) for each in (np.asarray, np.abs))
    k = int(np.prod([w_shape[axis] for axis in contracted]))
    unit = (k + 16) * 2.0**-23 + (2.0**-10 if in_float8 else 0)
    assert (abs(got - want) <= unit * size + 2 * 2.0**-24 * abs(want)).all()
