import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import jax_qmm

E4M3 = ml_dtypes.float8_e4m3fn
F32 = functools.partial(jnp.asarray, dtype=jnp.float32)
M, N, K = 5, 6, 16
f32_mm = functools.partial(jax_qmm.scaled_mm, out_dtype=jnp.float32)
f32_azp = functools.partial(jax_qmm.scaled_mm_azp_per_token, out_dtype=jnp.float32)


def dequantized_mm(a, b, scale_a, scale_b, azp_adj=None, azp=None, bias=None):
    """The same in differentiable jax.numpy, up to rounding."""
    acc = a.astype(jnp.int32) @ b.astype(jnp.int32).T
    if azp is not None:
        acc = acc - jnp.reshape(azp, (-1, 1)) * azp_adj
    out = jnp.reshape(scale_a, (-1, 1)) * scale_b * acc
    return out if bias is None else out + bias


@pytest.fixture(scope="module")
def operands():
    """a, b, scale_a, scale_b, azp_adj, azp, bias, each with a batch of 3 in front."""
    rng = np.random.default_rng(0)
    b = rng.integers(-128, 128, (3, N, K), dtype=np.int8)
    return (
        rng.integers(-128, 128, (3, M, K), dtype=np.int8),
        b,
        rng.random((3, M), np.float32),
        rng.random((3, N), np.float32),
        b.sum(2, dtype=np.int32),
        rng.integers(-128, 128, (3, M), dtype=np.int32),
        rng.normal(size=(3, N)).astype(np.float32),
    )


def pick(operands, mapped):
    return [x if m else x[0] for x, m in zip(operands, mapped)]


def looped(f, args, mapped):
    return np.stack([f(*(x[i] if m else x for x, m in zip(args, mapped))) for i in range(3)])


MIXES = [mix for mix in itertools.product([False, True], repeat=7) if any(mix)]


@pytest.mark.parametrize(
    "mapped",
    MIXES[::9] + MIXES[-1:] + [tuple(i == j for j in range(7)) for i in range(7)],
    ids=lambda m: "".join("-x"[x] for x in m),
)
def test_vmap_over_any_mix_of_operands(operands, mapped):
    args = pick(operands, mapped)
    got = jax.vmap(f32_azp, [0 if m else None for m in mapped])(*args)
    np.testing.assert_array_equal(got, looped(jax.jit(f32_azp), args, mapped))


@pytest.mark.parametrize("mapped", [(True, False, False, False), (True, True, False, True), (False, True, True, False)])
def test_vmap_over_float8_other_axes_and_tensor_scales(operands, mapped):
    a, b = (np.clip(x, -8, 8).astype(E4M3) for x in operands[:2])
    args = pick((a, b, operands[2][:, 0], operands[3][:, 0]), mapped)
    moved = [np.moveaxis(x, 0, -1) if m else x for x, m in zip(args, mapped)]
    got = jax.vmap(f32_mm, [-1 if m else None for m in mapped], out_axes=1)(*moved)
    np.testing.assert_array_equal(np.moveaxis(got, 1, 0), looped(jax.jit(f32_mm), args, mapped))


@pytest.mark.parametrize("inner, outer", list(itertools.product(["a", "b", "s", "ab", "abs"], repeat=2)))
def test_nested_vmap(operands, inner, outer):
    rng = np.random.default_rng(1)
    names, unbatched = "abs", {"a": (M, K), "b": (N, K), "s": (M,)}
    sizes = {"a": [], "b": [], "s": []}
    for size, chosen in ((2, outer), (3, inner)):
        for name in chosen:
            sizes[name].append(size)
    args = [rng.integers(-9, 9, (*sizes[n], *unbatched[n])).astype(np.float32 if n == "s" else np.int8) for n in names]
    axes = lambda chosen: [0 if n in chosen else None for n in names]
    f = lambda a, b, s: f32_mm(a, b, s, 0.5)
    got = jax.vmap(jax.vmap(f, axes(inner)), axes(outer))(*args)

    def full(x, name):  # (2, 3, ...) of everything, in numpy
        shape = [size if name in chosen else 1 for size, chosen in ((2, outer), (3, inner))]
        return x.reshape(*shape, *unbatched[name]).astype(np.float64)

    a, b, s = (full(x, n) for x, n in zip(args, names))
    np.testing.assert_array_equal(got, np.broadcast_to(s[..., None] * 0.5 * (a @ b.swapaxes(-1, -2)), got.shape))


def test_vmap_of_rows_keeps_one_product(operands):
    a, b, scale_a, scale_b, *_ = operands
    jaxpr = jax.make_jaxpr(jax.vmap(f32_mm, (0, None, 0, None)))(a, b[0], scale_a, scale_b[0])
    (call,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scaled_mm")
    assert call.params["num_batch"] == 0 and call.invars[0].aval.shape == (3, M, K)


def close(got, want):
    # Float32 on both sides: a handful of roundings, in the hessian of sums of 30 terms of either sign.
    same = lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5 * np.abs(w).max())
    jax.tree.map(same, got, want)


def test_gradients_by_scales_and_bias(operands):
    a, b, scale_a, scale_b, adj, azp, bias = pick(operands, [False] * 7)
    weight = np.random.default_rng(2).normal(size=(M, N)).astype(np.float32)

    def loss(f):
        return lambda scale_a, scale_b, bias: jnp.sum(weight * f(a, b, scale_a, scale_b, adj, azp, bias))

    for s_a, s_b in ((scale_a, scale_b), (scale_a[0], scale_b[0]), (scale_a[:, None], scale_b[None])):
        both = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(s_a, s_b, bias) for f in (f32_azp, dequantized_mm))
        close(*both)


def test_gradients_in_lower_precision_have_the_operands_dtypes(operands):
    a, b, scale_a, scale_b, _, _, bias = pick(operands, [False] * 7)
    args = scale_a.astype(jnp.bfloat16), scale_b.astype(np.float16), bias.astype(jnp.bfloat16)
    f = lambda *args: jax_qmm.scaled_mm(a, b, *args).astype(jnp.float32).sum()
    want = jax.grad(lambda s, t, c: dequantized_mm(a, b, s, t, bias=c).sum(), (0, 1, 2))(*map(F32, args))
    for g, x, w in zip(jax.jit(jax.grad(f, (0, 1, 2)))(*args), args, want):
        assert g.dtype == x.dtype
        # Each output is rounded to 8 bits on the way, and so is the sum of up to 6 cotangents.
        np.testing.assert_allclose(g.astype(np.float32), w, rtol=2.0**-6, atol=2.0**-8 * np.abs(w).max())


def test_gradient_of_the_bias_alone_needs_no_second_product(operands):
    a, b, scale_a, scale_b, _, _, bias = pick(operands, [False] * 7)
    f = lambda bias: f32_mm(a, b, scale_a, scale_b, bias).sum()
    assert str(jax.make_jaxpr(jax.jvp, static_argnums=0)(f, (bias,), (bias,))).count(" scaled_mm[") == 1
    np.testing.assert_array_equal(jax.grad(f)(bias), np.full(N, M))


def test_products_are_constants_to_differentiation(operands):
    a, b, scale_a, *_ = pick(operands, [False] * 7)
    a, b = np.clip(a, -8, 8).astype(E4M3), np.clip(b, -8, 8).astype(E4M3)
    g = jax.grad(lambda a, s: f32_mm(a, b, s, 1.0).sum(), (0, 1))(jnp.asarray(a), scale_a)
    assert not np.any(g[0].astype(jnp.float32)) and np.any(g[1])
    out, tangent = jax.jvp(lambda b: f32_mm(a, b, 1.0, 1.0), (jnp.asarray(b),), (jnp.asarray(b),))
    assert not np.any(tangent)
    int_tangent = jax.jvp(
        lambda x: jax_qmm.scaled_mm(x, x, 1.0, 1.0, out_dtype=jnp.int32),
        (operands[0][0],),
        (np.zeros((M, K), jax.dtypes.float0),),
    )[1]
    assert int_tangent.dtype == jax.dtypes.float0


def test_jvp_hessian_remat_and_vmap_of_grad(operands):
    a, b, scale_a, scale_b, _, _, bias = pick(operands, [False] * 7)
    f = lambda s, t, c: f32_mm(a, b, s, t, c)
    g = lambda s, t, c: dequantized_mm(a, b, s, t, bias=c)
    primals, tangents = (scale_a, scale_b, bias), (scale_b[:M], scale_a.repeat(2)[:N], scale_b)
    loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x) * 1e-4))

    def transformed(f, mm):
        per_a = jax.vmap(jax.grad(lambda a, s: jnp.sum(mm(a, b, s, scale_b)), 1), (0, None))
        per_b = jax.vmap(jax.grad(lambda b, s: jnp.sum(mm(a, b, s, scale_b)), 1))
        return (
            jax.jvp(f, primals, tangents),
            jax.jacfwd(f, 1)(*primals),
            jax.grad(jax.remat(loss(f)), (0, 1, 2))(*primals),
            jax.hessian(loss(f))(*primals),
            per_a(operands[0], scale_a),
            per_b(operands[1], operands[2]),
        )

    close(jax.jit(lambda: transformed(f, f32_mm))(), jax.jit(lambda: transformed(g, dequantized_mm))())


def test_gradient_does_not_change_the_result(operands):
    a, b, scale_a, scale_b, _, _, bias = pick(operands, [False] * 7)
    f = lambda *scales: jax_qmm.scaled_mm(a, b, *scales)
    got, _ = jax.vjp(f, scale_a, scale_b, bias)
    np.testing.assert_array_equal(got, f(scale_a, scale_b, bias))


def test_scan_over_stacked_weights(operands):
    a, b, scale_a, scale_b, *_ = operands

    @jax.jit
    def run(a, b, scale_b):
        step = lambda total, w: (total + f32_mm(a, w[0], scale_a[0], w[1]), None)
        return jax.lax.scan(step, jnp.zeros((M, N)), (b, scale_b))[0]

    want = functools.reduce(np.add, [np.asarray(f32_mm(a[0], b[i], scale_a[0], scale_b[i])) for i in range(3)])
    np.testing.assert_array_equal(run(a[0], b, scale_b), want)


def test_eval_shape():
    spec = jax.ShapeDtypeStruct
    out = jax.eval_shape(
        jax_qmm.scaled_mm,
        spec((4, M, K), jnp.int8),
        spec((N, K), jnp.int8),
        spec((4, M, 1), jnp.bfloat16),
        spec((), jnp.float16),
    )
    assert (out.shape, out.dtype) == ((4, M, N), jnp.bfloat16)


@pytest.mark.parametrize("lead", ["", "batch, "])
def test_symbolic_rows_export_and_run(operands, lead):
    a, b, scale_a, scale_b, adj, azp, bias = pick(operands, [False] * 7)
    rows = export.symbolic_shape(f"{lead}m")
    spec = jax.ShapeDtypeStruct
    f = jax.jit(lambda a, scale_a, azp: f32_azp(a, b, scale_a, scale_b, adj, azp, bias))
    exported = export.export(f, platforms=["cpu"])(
        spec((*rows, K), jnp.int8), spec((*rows, 1), jnp.float32), spec(rows, jnp.int32)
    )
    call = jax.jit(export.deserialize(exported.serialize()).call)
    for m in (1, 5):
        args = a[:m], scale_a[:m, None], azp[:m]
        want = f(*args)
        got = call(*(np.stack([x, x]) for x in args) if lead else args)
        np.testing.assert_array_equal(got, np.stack([want, want]) if lead else want)
