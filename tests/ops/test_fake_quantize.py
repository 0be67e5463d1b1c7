import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_qmm
from jax_qmm import _compat

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
OPTIONS = [
    {},
    {"axis": 0, "symmetric": False},
    {"qtype": E4M3, "axis": None},
    {"tile_size": 4},
    {"qtype": "int4", "tile_size": 3, "symmetric": False},
    {"scale": 0.01},
    {"scale": np.full((6, 1), 0.02, np.float32), "zero_point": -20, "symmetric": False},
    {"qtype": E4M3, "scale": np.full(8, 0.004, np.float32), "axis": 0},
    {"scale": np.full((6, 2), 0.01, np.float32), "tile_size": 4},
    {"qtype": "int4", "scale": 0.2, "zero_point": 3, "symmetric": False},
]


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_value_is_that_of_the_quantized_array(options, dtype):
    x = normal(6, 8, dtype=dtype)
    got, want = jax_qmm.fake_quantize(x, **options), jax_qmm.quantize(x, **options).dequantize(dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    taken = jax.vjp(lambda x: jax_qmm.fake_quantize(x, **options), x)[0]
    np.testing.assert_array_equal(taken.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_with_scales_from_the_data_it_is_the_identity_to_differentiation(options):
    x, ct = normal(6, 8), normal(6, 8, seed=1)
    f = lambda x: jax_qmm.fake_quantize(x, **options)
    np.testing.assert_array_equal(jax.jit(lambda x: jax.vjp(f, x)[1](ct)[0])(x), ct)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (ct,))[1], ct)


@pytest.mark.parametrize("options", OPTIONS[5:], ids=str)
def test_given_scales_have_the_gradient_of_lsq(options):
    """Of scale * (clip(round(v) + zero_point) - zero_point) with v = x / scale, where round counts as the identity."""
    x, ct = normal(6, 8), normal(6, 8, seed=1)
    rest = {name: value for name, value in options.items() if name != "scale"}
    scale = jnp.asarray(options["scale"], jnp.float32)
    by_x, by_scale = jax.vjp(lambda x, scale: jax_qmm.fake_quantize(x, scale=scale, **rest), x, scale)[1](ct)

    spread = lambda scale: jnp.broadcast_to(jnp.repeat(scale, 4, 1) if "tile_size" in rest else scale, x.shape)
    each, sum_to = jax.vjp(spread, scale)
    v = np.asarray(x, np.float64) / each
    if options.get("qtype") == E4M3:
        low, high = -448.0, 448.0
        inside = np.abs(v) <= high
        rounded = np.clip(v, low, high).astype(np.float32).astype(E4M3).astype(np.float64)
    else:
        zero_point, bounds = options.get("zero_point", 0), jnp.iinfo(options.get("qtype", "int8"))
        low, high, rounded = bounds.min - zero_point, bounds.max - zero_point, np.rint(v)
        inside = (low <= rounded) & (rounded <= high)
    assert 0 < inside.mean() < 1
    np.testing.assert_array_equal(by_x, ct * inside)
    (want,) = sum_to(jnp.float32(ct * np.where(inside, rounded - v, np.clip(rounded, low, high))))
    np.testing.assert_allclose(by_scale, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_trains_a_weight_to_fit_its_scale():
    """Gradient descent on a scale alone finds one with less error than the one it starts from."""
    w = normal(64, 64)
    loss = lambda scale: ((jax_qmm.fake_quantize(w, axis=None, scale=scale) - w) ** 2).sum()
    scale = jnp.float32(0.005)
    first = loss(scale)
    for _ in range(20):
        scale -= 1e-6 * jax.grad(loss)(scale)
    assert loss(scale) < 0.5 * first


def test_under_transformations():
    x = normal(3, 6, 8)
    scales = jnp.array([0.01, 0.02, 0.03])
    f = lambda x, scale: jax_qmm.fake_quantize(x, scale=scale)
    want = np.stack([f(*pair) for pair in zip(x, scales)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x, scales), want)
    by_scale = jax.grad(lambda x, scale: f(x, scale).sum(), 1)
    got = jax.vmap(by_scale)(x, scales)
    np.testing.assert_allclose(got, [by_scale(*pair) for pair in zip(x, scales)], rtol=1e-5, atol=1e-4)
    kept = jax.checkpoint(lambda x: jax.lax.scan(lambda c, s: (f(c, s), None), x, scales)[0].sum())
    assert jax.grad(kept)(x[0]).shape == (6, 8)


def test_its_arguments_are_those_of_quantize():
    with pytest.raises(TypeError, match="x has dtype int32"):
        jax_qmm.fake_quantize(jnp.ones((2, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"scale has shape \(3,\)"):
        jax_qmm.fake_quantize(normal(6, 8), scale=jnp.ones(3))
    with pytest.raises(ValueError, match="zero_point was given without scale"):
        jax_qmm.fake_quantize(normal(6, 8), zero_point=3)


def test_a_flax_parameter_is_differentiated():
    nnx = pytest.importorskip("flax.nnx")
    kernel, scale = nnx.Param(jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)), nnx.Param(jnp.float32(0.01))
    by_kernel, by_scale = jax.grad(lambda w, s: jax_qmm.fake_quantize(w, scale=s).sum(), (0, 1))(kernel, scale)
    want = jax.grad(lambda w, s: jax_qmm.fake_quantize(w, scale=s).sum(), (0, 1))(kernel[...], scale[...])
    np.testing.assert_array_equal(by_kernel[...], want[0])
    np.testing.assert_array_equal(by_scale[...], want[1])


def test_a_scale_of_64_bits_serves():
    with _compat.enable_x64(True):
        x = jnp.ones((2, 4), jnp.float32)
        got = jax_qmm.fake_quantize(x, scale=jnp.asarray(0.05))
    np.testing.assert_array_equal(got, jax_qmm.fake_quantize(np.ones((2, 4), np.float32), scale=0.05))
