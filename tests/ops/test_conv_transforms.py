"""conv_general_dilated under vmap, grad and export; test_conv_sharding.py has sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import operands
from random_arrays import data

import jax_qmm
from jax_qmm import W4A16, W8A8, QArray

NHWC = dict(window_strides=(2, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))


def conv(lhs, scale_l, zero_l, rhs, scale_r, zero_r, bias, **options):
    options = NHWC | dict(activation="relu") | options
    return jax_qmm.conv_general_dilated(
        QArray(lhs, scale_l, zero_l), QArray(rhs, scale_r, zero_r), bias=bias, **options
    )


MIXES = ["lhs", "lhs scale_l zero_l", "scale_l zero_l", "rhs", "bias", "lhs rhs", "lhs bias"]


@pytest.mark.parametrize("mapped", [*MIXES, "lhs scale_l zero_l rhs scale_r zero_r bias"])
@pytest.mark.parametrize("groups", [1, 2])
def test_vmap_over_any_mix(mapped, groups):
    stacked = {name: np.stack([operands(groups=groups, seed=seed)[name] for seed in range(3)]) for name in operands()}
    args = {name: jnp.asarray(x if name in mapped.split() else x[0]) for name, x in stacked.items()}
    # The mapped axis of lhs is the last one.
    axes = {name: (-1 if name == "lhs" else 0) if name in mapped.split() else None for name in args}
    one = lambda args: conv(**args, feature_group_count=groups)
    want = [
        one({name: jnp.asarray(x[i] if axes[name] is not None else x) for name, x in args.items()}) for i in range(3)
    ]
    placed = {name: jnp.moveaxis(x, 0, -1) if axes[name] == -1 else x for name, x in args.items()}
    got = jax.jit(jax.vmap(one, in_axes=(axes,)))(placed)
    np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("taps", [(3, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_vmap_of_weights_of_4_bits(dims, taps, groups):
    x = data(3, 2, 5, 4, 8)
    options = dict(window_strides=(1, 1), padding="VALID", dimension_numbers=NHWC["dimension_numbers"])
    weights = [W4A16(4).quantize_weight(data(6, *taps, 8 // groups, seed=seed), (1, 2, 3)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    f = lambda x, w: jax_qmm.conv_general_dilated(x, w, **options, precision="highest", feature_group_count=groups)
    args = x if dims[0] == 0 else x[0], stacked if dims[1] == 0 else weights[0]
    got = jax.vmap(f, dims)(*args)
    want = [f(x[i if dims[0] == 0 else 0], weights[i if dims[1] == 0 else 0]) for i in range(3)]
    # Sums of up to 48 values in another order
    np.testing.assert_allclose(got, np.stack(want), rtol=0, atol=48 * 2.0**-24 * 48)


@pytest.mark.parametrize("mapped", ["residual", "lhs residual", "rhs residual"])
@pytest.mark.parametrize("quantized", [False, True])
def test_vmap_with_a_residual(mapped, quantized):
    stacked = {name: np.stack([operands(seed=seed)[name] for seed in range(3)]) for name in operands()}
    stacked["residual"] = data(3, 4, 3, 4, 6)
    if quantized:
        stacked["residual"] = np.round(40 * stacked["residual"]).astype(np.int8)
    args = {name: jnp.asarray(x if name in mapped.split() else x[0]) for name, x in stacked.items()}
    axes = {name: 0 if name in mapped.split() else None for name in args}

    def one(args):
        args = dict(args)
        residual = args.pop("residual")
        scale = jnp.full((1,) * 4, 0.3)
        return conv(**args, residual=QArray(residual, scale, jnp.full((1,) * 4, 3)) if quantized else residual)

    got = jax.jit(jax.vmap(one, in_axes=(axes,)))(args)
    picked = lambda i: {name: x[i] if axes[name] == 0 else x for name, x in args.items()}
    np.testing.assert_array_equal(got, np.stack([one(picked(i)) for i in range(3)]))


def test_vmap_of_vmap():
    args = operands()
    f = lambda lhs, rhs: conv(**args | dict(lhs=lhs, rhs=rhs))
    lhs, rhs = (jnp.stack([args[name], np.flip(args[name], 0)]) for name in ("lhs", "rhs"))
    got = jax.vmap(jax.vmap(f, (0, None)), (None, 0))(lhs, rhs)
    want = [[f(x, w) for x in lhs] for w in rhs]
    np.testing.assert_array_equal(got, np.stack(want))


# Gradients

SCHEMES = {"dynamic": W8A8(), "static": W8A8(activation_scale=0.01), "weight-only": W4A16(4)}


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("options", [{}, dict(feature_group_count=2), dict(batch_group_count=2)], ids=str)
def test_derivatives_are_those_of_the_dequantized_convolution(kind, activation, options):
    scheme, groups = SCHEMES[kind], options.get("feature_group_count", 1)
    x, bias = data(4, 5, 4, 8), data(6)
    w = scheme.quantize_weight(data(6, 3, 2, 8 // groups, seed=1), (1, 2, 3))
    f = lambda x, bias: jax_qmm.conv_general_dilated(
        x, w, **NHWC, scheme=scheme, bias=bias, activation=activation, precision="highest", **options
    )

    def dense(x, bias):
        if kind != "weight-only":  # where f has its activation: at the quantized values
            quantized = scheme.quantize_activation(jax.lax.stop_gradient(x), 3).dequantize()
            inside = 1.0 if kind == "dynamic" else jnp.abs(jnp.rint(x / 0.01) + 0.5) < 128
            x = x * inside + jax.lax.stop_gradient(quantized - x * inside)
        y = jax.lax.conv_general_dilated(x, w.dequantize(), **NHWC, precision="highest", **options) + bias
        return {None: lambda y: y, "relu": jax.nn.relu, "silu": jax.nn.silu}[activation](y)

    dy = data(*f(x, bias).shape, seed=2)
    got, want = (jax.grad(lambda x, bias: jnp.sum(g(x, bias) * dy), (0, 1))(x, bias) for g in (f, dense))
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


def test_a_static_scale_has_a_derivative():
    x, w = data(2, 5, 4, 8), W8A8().quantize_weight(data(6, 3, 2, 8, seed=1), (1, 2, 3))
    f = lambda s: jnp.sum(jax_qmm.conv_general_dilated(x, w, **NHWC, scheme=W8A8(activation_scale=s)) ** 2)
    fake = lambda s: jax_qmm.fake_quantize(x, axis=None, scale=s)
    want = lambda s: jnp.sum(jax.lax.conv_general_dilated(fake(s), w.dequantize(), **NHWC) ** 2)
    np.testing.assert_allclose(jax.grad(f)(0.01), jax.grad(want)(0.01), rtol=1e-3)


def test_a_float_residual_has_a_derivative():
    args = {name: jnp.asarray(x) for name, x in operands().items()}
    residual = jnp.asarray(data(4, 3, 4, 6))
    f = lambda residual: conv(**args, residual=residual, out_dtype=jnp.float32)
    y, gradient = f(residual), jax.grad(lambda residual: f(residual).sum())(residual)
    np.testing.assert_array_equal(gradient, np.where(np.asarray(y) > 0, 1, 0).astype(np.float32))
    q = QArray(jnp.zeros(residual.shape, jnp.int8), jnp.ones((1,) * 4))
    of_bias = jax.grad(lambda bias: conv(**args | dict(bias=bias), residual=q, out_dtype=jnp.float32).sum())
    assert of_bias(args["bias"]).shape == args["bias"].shape


def test_results_of_integers_have_no_derivative():
    w = W8A8().quantize_weight(data(6, 3, 2, 8), (1, 2, 3))
    f = lambda x: jax_qmm.conv_general_dilated(x, w, **NHWC, out_dtype=jnp.int8, out_scale=0.1).astype(jnp.float32)
    with pytest.raises(TypeError, match="out_dtype int8 has no derivative, and lhs would need one"):
        jax.grad(lambda x: f(x).sum())(data(2, 5, 4, 8))
    assert jax.grad(lambda x: f(jax.lax.stop_gradient(x)).sum())(data(2, 5, 4, 8)).shape == (2, 5, 4, 8)


# Export


def chain(x, w):
    """int8 from the first convolution to the second."""
    static = W8A8(activation_scale=0.02)
    to_int8 = dict(scheme=static, activation="relu", out_dtype=jnp.int8, out_scale=0.5)
    y = QArray(jax_qmm.conv_general_dilated(x, w, **NHWC, **to_int8), jnp.full((1, 1, 1, 1), 0.5))
    again = W8A8().quantize_weight(data(6, 3, 2, 6, seed=1), (1, 2, 3))
    return jax_qmm.conv_general_dilated(y, again, **NHWC)


EXPORTED = {
    "int8": (W8A8(), lambda x, w: jax_qmm.conv_general_dilated(x, w, **NHWC, activation="relu")),
    "int8, a chain": (W8A8(), chain),
    "weight-only": (W4A16(4), lambda x, w: jax_qmm.conv_general_dilated(x, w, **NHWC, activation="relu")),
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_exports_with_a_symbolic_batch(kind):
    (n,) = jax.export.symbolic_shape("n")
    scheme, f = EXPORTED[kind]
    w, f = scheme.quantize_weight(data(6, 3, 2, 8), (1, 2, 3)), jax.jit(f)
    exported = jax.export.export(f, platforms=["cpu"])(jax.ShapeDtypeStruct((n, 5, 4, 8), jnp.float32), w)
    x = data(3, 5, 4, 8)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x, w), f(x, w))
