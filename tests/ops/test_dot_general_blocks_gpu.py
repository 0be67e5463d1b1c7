"""Products of schemes with blocks on both sides by the kernels, against the same on the CPU by the reference.

The sums of fp8 are off by less than 2^-10 of the sum of |a| |b| |scales|: see test_block_quantized_mm_gpu.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import W8A8, _extension

pytestmark = pytest.mark.gpu

SCHEMES = {
    "int8": W8A8(tile_size=32),
    "asymmetric": W8A8(tile_size=64, symmetric=False, weight_symmetric=False),
    "fp8": W8A8("float8_e4m3fn", tile_size=128, weight_tile=(128, 128)),
}


@pytest.mark.parametrize("scheme", [pytest.param(scheme, id=name) for name, scheme in SCHEMES.items()])
@pytest.mark.parametrize(
    "equation, x_shape, w_shape, contracted",
    [
        ("btk,kn->btn", (2, 9, 304), (304, 72), (0,)),  # the last block is short
        ("btk,khd->bthd", (2, 5, 256), (256, 3, 5), (0,)),
        ("bthd,hdf->btf", (2, 5, 2, 128), (2, 128, 48), (0, 1)),
        ("ebk,ekn->ebn", (2, 17, 256), (2, 256, 24), (1,)),
    ],
)
def test_is_the_reference(on_reference, scheme, equation, x_shape, w_shape, contracted):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=x_shape), jnp.bfloat16)
    w = scheme.quantize_weight(jnp.asarray(rng.normal(0.2, 1, w_shape), jnp.float32), contracted)
    f = lambda x, w: jax_qmm.einsum(equation, x, w, scheme=scheme, preferred_element_type=jnp.bfloat16)
    rows = jax_qmm.explain(f, x, w).rows
    assert [row.op.split()[0] for row in rows] == ["quantize", "block_scaled_mm"]
    kernel = "scaled each 32" if scheme.tile_size == 32 else "scaled by block"
    assert kernel in rows[1].runs_on, rows[1].runs_on

    got = jax.jit(f)(*jax.device_put((x, w), jax.devices(_extension.platform())[0]))
    got, want = (np.asarray(y, np.float64) for y in (got, on_reference(f, x, w)))
    if scheme.dtype == jnp.int8:
        np.testing.assert_array_equal(got, want)
        return
    size = np.einsum(equation, np.abs(np.float64(x)), np.abs(np.float64(w.dequantize())))
    # A quantized x is off by a 16th of itself at most; two roundings to bfloat16 may be neighbours.
    assert (np.abs(got - want) <= 2.0**-10 * 17 / 16 * size + 2.0**-7 * np.abs(want)).all()
