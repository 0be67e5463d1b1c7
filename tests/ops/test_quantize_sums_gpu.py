"""quantize(..., sums=True) on the GPU: in every layout that a kernel has, as the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm

pytestmark = pytest.mark.gpu

X = np.random.default_rng(0).normal(size=(3, 5, 264)).astype(np.float32)
ROWS = np.linspace(0.01, 0.05, 5, dtype=np.float32)[:, None]
LAYOUTS = {
    "rows": {},
    "rows and columns": {"axis": (1, 2)},
    "blocks": {"tile_size": 88},
    "blocks, the last one short": {"tile_size": 128},
    "tensor": {"axis": None},
    "static": {"scale": 0.02},
    "static, a tensor": {"axis": None, "scale": 0.02},
    "static, rows alike in each matrix": {"axis": (0, 2), "scale": ROWS},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_the_reference(on_reference, layout, symmetric, dtype):
    options = LAYOUTS[layout] | {"symmetric": symmetric, "sums": True}
    if "scale" in options and not symmetric:
        options["zero_point"] = -7
    f = functools.partial(jax_qmm.quantize, **options)
    x = X.astype(dtype)
    got, want = jax.jit(f)(x), on_reference(f, x)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))
    assert got.azp_adj.shape == got.scale.shape


@pytest.mark.parametrize("layout", ["rows", "tensor", "static", "static, a tensor"])
def test_vmap(on_reference, layout):
    f = jax.vmap(functools.partial(jax_qmm.quantize, **LAYOUTS[layout], sums=True))
    got, want = jax.jit(f)(X), on_reference(f, X)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))
