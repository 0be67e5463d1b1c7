"""dot_general, einsum and matmul where the weight has zero points, and where both sides have."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import W8A8

SCHEMES = {
    "weights": W8A8(weight_symmetric=False),
    "both": W8A8(symmetric=False, weight_symmetric=False),
    "per_tensor": W8A8(activation="per_tensor", symmetric=False, weight_symmetric=False),
    "static": W8A8(weight_symmetric=False, activation_scale=0.03),
    "both_static": W8A8(symmetric=False, weight_symmetric=False, activation_scale=0.03, activation_zero_point=-20),
}
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def shifted(*shape, seed=0):
    """Far from centered, as the weights that asymmetric schemes are for."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) + 3 * rng.random(shape[-1:]), jnp.float32)


def exact(q):
    """The values that a QArray stands for, in float64."""
    zero_point = 0 if q.zero_point is None else np.asarray(q.zero_point, np.float64)
    return ((np.asarray(q.qvalue, np.float64) - zero_point) * np.asarray(q.scale)).transpose(q.storage_axes())


def assert_close_to_exact(got, want):
    """Exact sums, and three roundings in float32."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=4 * 2.0**-24, atol=1e-30)


@schemes
def test_is_the_exact_product_of_what_the_operands_quantize_to(scheme):
    for equation, contracted, x, w in (
        ("mk,kn->mn", (0,), (7, 32), (32, 24)),
        ("btf,fhd->bthd", (0,), (2, 3, 16), (16, 4, 2)),
        ("bthd,hdf->btf", (0, 1), (2, 3, 4, 8), (4, 8, 6)),
        ("bqhd,bkhd->bhqk", (3,), (2, 3, 4, 8), (2, 5, 4, 8)),
    ):
        x, w = shifted(*x), scheme.quantize_weight(shifted(*w, seed=1), contracted)
        got = jax.jit(functools.partial(jax_qmm.einsum, equation, scheme=scheme))(x, w)
        # As they lie in the product: what is contracted goes last.
        axes = [axis for axis, letter in enumerate(equation.split(",")[0]) if letter not in equation.split("->")[1]]
        per_row = scheme.activation == "per_token" and scheme.activation_scale is None
        q = jax_qmm.quantize(
            x,
            axis=axes if per_row else None,
            symmetric=scheme.symmetric,
            scale=scheme.activation_scale,
            zero_point=scheme.activation_zero_point,
        )
        assert_close_to_exact(got, np.einsum(equation, exact(q), exact(w)))
        rows = jax_qmm.explain(functools.partial(jax_qmm.einsum, equation, scheme=scheme), x, w).rows
        assert [row.op.split()[0] for row in rows if row.op != "transpose"] == ["quantize", "scaled_mm"]


@pytest.mark.parametrize("equation", ["mk,nk->mn", "mk,nk->nm", "bmk,bnk->bmn", "mk,bnk->bmn"])
@pytest.mark.parametrize("sums", [False, True])
def test_two_asymmetric_arrays(equation, sums):
    sizes = {"b": 2, "m": 5, "n": 6, "k": 16}
    q = [
        jax_qmm.quantize(shifted(*(sizes[letter] for letter in term), seed=i), symmetric=False, sums=sums)
        for i, term in enumerate(equation.split("->")[0].split(","))
    ]
    call = functools.partial(jax_qmm.einsum, equation)
    assert_close_to_exact(jax.jit(call)(*q), np.einsum(equation, *map(exact, q)))
    (row,) = jax_qmm.explain(call, *q).rows
    assert row.op == "scaled_mm (scale_a, scale_b, azp, azp_adj, sums_a, azp_b)"
    assert str(jax.make_jaxpr(call)(*q)).count("reduce_sum") == (0 if sums else 2)


def test_is_scaled_mm_zero_points_bit_for_bit():
    scheme = SCHEMES["both"]
    x, w, bias = shifted(7, 64), scheme.quantize_weight(shifted(64, 24, seed=1), (0,)), shifted(24, seed=2)
    got = jax_qmm.matmul(x, w, scheme=scheme, bias=bias)
    q = jax_qmm.quantize(x, symmetric=False, sums=True)
    want = jax_qmm.scaled_mm_zero_points(
        q.qvalue, w.qvalue, q.scale, w.scale[:, 0], q.zero_point, w.zero_point[:, 0], bias,
        sums_a=q.azp_adj, sums_b=w.azp_adj[:, 0], out_dtype=jnp.float32,
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)


@schemes
def test_the_sums_of_activations_come_with_their_quantizer(scheme):
    w = scheme.quantize_weight(shifted(64, 24, seed=1), (0,))
    call = functools.partial(jax_qmm.matmul, scheme=scheme)
    jaxpr = str(jax.make_jaxpr(call)(shifted(7, 64), w))
    # One scale of all, computed from the data, has only the sum of all with it.
    assert jaxpr.count("reduce_sum") == (1 if scheme.takes_calibration else 0)
    assert ("sums=True" in jaxpr) == (not scheme.takes_calibration)


@schemes
def test_gradient_is_straight_through(scheme):
    x, w = shifted(7, 64), scheme.quantize_weight(shifted(64, 24, seed=1), (0,))
    weight = shifted(7, 24, seed=2)
    got = jax.jit(jax.grad(lambda x: (weight * jax_qmm.matmul(x, w, scheme=scheme)).sum()))(x)
    q = scheme.quantize_activation(x, 1)
    inside = abs(np.asarray(q.qvalue) + 0.5) < 127  # neither end, where a static scale saturates
    want = np.asarray(weight, np.float64) @ exact(w).T
    inside = inside if scheme.activation_scale is not None else np.full(inside.shape, True)
    np.testing.assert_allclose(np.asarray(got)[inside], want[inside], rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_weights_far_from_centered_keep_more_with_zero_points():
    kernel = shifted(256, 64) + 4
    plain, asymmetric = (
        np.abs(exact(scheme.quantize_weight(kernel, (0,))) - kernel).max() for scheme in (W8A8(), SCHEMES["weights"])
    )
    assert asymmetric < 0.6 * plain


@schemes
@pytest.mark.parametrize("over", ["rows", "columns", "contracted"])
def test_sharded(scheme, over):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x, w = shifted(8, 32), scheme.quantize_weight(shifted(32, 12, seed=1), (0,))
    f = jax.jit(functools.partial(jax_qmm.matmul, scheme=scheme))
    m, n, k = ("x" if over == name else None for name in ("rows", "columns", "contracted"))
    specs = jax.tree.map(lambda leaf: P(n if leaf.shape[0] == 12 else None, k if leaf.shape[1] == 32 else None), w)
    placed = (
        jax.device_put(x, NamedSharding(mesh, P(m, k))),
        jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), w, specs),
    )
    compiled = f.lower(*placed).compile()
    found = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert set(found) <= {"all-reduce"}
    if over != "contracted" and not scheme.takes_calibration:
        assert not found
    np.testing.assert_array_equal(compiled(*placed), f(x, w))


@schemes
def test_vmap_over_stacked_weights(scheme):
    x, w = shifted(3, 5, 32), scheme.quantize_weight(shifted(3, 32, 6, seed=1), (-2,))
    f = functools.partial(jax_qmm.matmul, scheme=scheme)
    got = jax.jit(jax.vmap(f))(x, w)
    for i in range(3):
        np.testing.assert_array_equal(got[i], jax.jit(f)(x[i], jax.tree.map(lambda leaf: leaf[i], w)))
