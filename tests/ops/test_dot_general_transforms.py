"""Products with QArrays under differentiation, transformations and sharding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import W8A8, QArray

SCHEMES = {"int8": W8A8(), "asymmetric": W8A8(symmetric=False), "fp8": W8A8(jnp.float8_e4m3fn)}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def stored(w, contracted, qtype=jnp.int8):
    return W8A8(qtype).quantize_weight(w, contracted)


# Differentiation


@pytest.mark.parametrize("name, weight", [("int8", "lhs"), ("int8", "rhs"), ("asymmetric", "rhs"), ("fp8", "rhs")])
def test_the_derivative_is_that_of_the_dequantized_product(name, weight):
    scheme = SCHEMES[name]
    x, w = normal(2, 5, 16), stored(normal(16, 4, 3, seed=1), (0,), qtype=scheme.dtype)
    bias = normal(4, 3, seed=2)
    dims = (((2,), (0,)), ((), ())) if weight == "rhs" else (((0,), (2,)), ((), ()))
    sides = lambda x, w: (x, w) if weight == "rhs" else (w, x)
    ours = lambda x: jax_qmm.dot_general(*sides(x, w), dims, scheme=scheme)
    theirs = lambda x: jax.lax.dot_general(*sides(x, w.dequantize()), dims)
    ct = normal(*theirs(x).shape, seed=3)
    np.testing.assert_array_equal(jax.vjp(ours, x)[1](ct)[0], jax.vjp(theirs, x)[1](ct)[0])
    dx = normal(*x.shape, seed=4)
    out, tangent = jax.jvp(ours, (x,), (dx,))
    np.testing.assert_array_equal(out, ours(x))
    np.testing.assert_array_equal(tangent, theirs(dx))
    if weight == "rhs":
        ours = lambda x, bias: jnp.vdot(jax_qmm.dot_general(x, w, dims, scheme=scheme, bias=bias), ct)
        grads = jax.jit(jax.grad(jax.checkpoint(ours), (0, 1)))(x, bias)
        theirs = jax.grad(lambda x, bias: jnp.vdot(jax.lax.dot_general(x, w.dequantize(), dims) + bias, ct), (0, 1))(
            x, bias
        )
        for got, want in zip(grads, theirs):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # compiled as one, XLA sums in another order


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("weight", ["lhs", "rhs"])
def test_static_scales_have_the_derivative_of_fake_quantize(dtype, weight):
    x, w = normal(5, 16), stored(normal(16, 4, seed=1), (0,), qtype=dtype)
    scheme = lambda scale: W8A8(dtype, activation_scale=scale)
    scale = jnp.float32(0.01 if dtype == jnp.int8 else 0.004)  # some values saturate
    if weight == "lhs":
        x, w = x.T, w.T
    sides = lambda x, w: (x, w) if weight == "rhs" else (w, x)
    ours = lambda x, scale: jax_qmm.matmul(*sides(x, w), scheme=scheme(scale))
    fake = lambda x: jax_qmm.fake_quantize(x, dtype, axis=None, scale=scale)
    theirs = lambda x, scale: jnp.matmul(
        *sides(jax_qmm.fake_quantize(x, dtype, axis=None, scale=scale), w.dequantize())
    )
    assert (jnp.abs(fake(x) - x) > 0.1).any()
    ct = normal(*theirs(x, scale).shape, seed=3)
    got, want = (jax.jit(jax.vjp(f, x, scale)[1])(ct) for f in (ours, theirs))
    for g, w_ in zip(got, want):
        assert g.any()
        np.testing.assert_allclose(g, w_, rtol=1e-5, atol=1e-5 * np.abs(w_).max())
    # The derivative by x alone, as where the scale is a constant.
    np.testing.assert_array_equal(jax.vjp(lambda x: ours(x, scale), x)[1](ct)[0], got[0])


def test_weights_are_constants():
    x, w = normal(5, 16), stored(normal(16, 4, seed=1), (0,))
    loss = lambda scale: jax_qmm.matmul(x, QArray(w.qvalue, scale).T).sum()
    assert not jax.grad(loss)(w.scale).any()
    both = lambda scale: jax_qmm.matmul(jax_qmm.quantize(x), QArray(w.qvalue, scale).T).sum()
    assert not jax.grad(both)(w.scale).any()


def test_the_backward_pass_waits_with_the_8_bit_weight():
    x, w = normal(5, 64), stored(normal(64, 32, seed=1), (0,))
    _, vjp = jax.vjp(lambda x: jax_qmm.matmul(x, w), x)
    kept = [leaf.dtype for leaf in jax.tree.leaves(vjp) if leaf.size >= w.size]
    assert set(kept) == {jnp.dtype(jnp.int8)}


def test_checkpoint_policies_can_save_the_result_by_its_name():
    x, w = normal(5, 16), stored(normal(16, 16, seed=1), (0,))
    f = lambda x: jnp.sin(jax_qmm.matmul(jnp.sin(jax_qmm.matmul(x, w)), w)).sum()
    policies = jax.checkpoint_policies

    def products_run(policy):
        table = jax_qmm.explain(jax.grad(jax.checkpoint(f, policy=policy)), x)
        return sum(row.count for row in table.rows if row.op.startswith("scaled_mm"))

    saved = policies.save_only_these_names("quantized_product")
    assert products_run(policies.dots_saveable) == 4  # twice each
    assert products_run(policies.save_from_both_policies(policies.dots_saveable, saved)) == 2
    np.testing.assert_allclose(jax.grad(jax.checkpoint(f, policy=saved))(x), jax.grad(f)(x), rtol=1e-6)


def test_the_derivative_composes_with_vmap_and_scan():
    x, stack = normal(3, 5, 16), stored(normal(3, 16, 16, seed=1), (1,))
    dense = stack.dequantize()
    loss = lambda x, w: jax_qmm.matmul(x, w).sum()
    got = jax.vmap(jax.grad(loss))(x, stack)
    np.testing.assert_allclose(got, jnp.broadcast_to(dense.sum(-1)[:, None], got.shape), rtol=1e-5)

    def chain(x):
        return jax.lax.scan(lambda x, w: (jax_qmm.matmul(x, w), None), x, stack)[0]

    straight = dense[0] @ dense[1] @ dense[2]
    got = jax.grad(lambda x: chain(x).sum())(x[0])
    np.testing.assert_allclose(got, jnp.broadcast_to(straight.sum(-1), got.shape), rtol=1e-4, atol=1e-4)


# Transformations


def test_vmap_over_any_operand():
    x, stack = normal(3, 5, 16), stored(normal(3, 16, 8, seed=1), (1,))
    one = lambda i: jax.tree.map(lambda leaf: leaf[i], stack)
    for scheme in (W8A8(), W8A8(symmetric=False)):
        call = functools.partial(jax_qmm.matmul, scheme=scheme)
        for dims in ((0, 0), (0, None), (None, 0)):
            args = x if dims[0] == 0 else x[0], stack if dims[1] == 0 else one(0)
            want = [call(x[i] if dims[0] == 0 else x[0], one(i if dims[1] == 0 else 0)) for i in range(3)]
            np.testing.assert_array_equal(jax.vmap(call, dims)(*args), np.stack(want))


def test_the_static_scale_of_a_scheme_can_be_traced_and_mapped():
    x, w = normal(3, 5, 16), stored(normal(16, 8, seed=1), (0,))
    call = lambda x, scale: jax_qmm.matmul(x, w, scheme=W8A8(activation_scale=scale))
    scales = jnp.array([0.01, 0.02, 0.03])
    want = np.stack([call(*args) for args in zip(x, scales)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(x, scales), want)


def test_exports_with_a_symbolic_dimension():
    w = stored(normal(16, 4, 2, seed=1), (0,))
    (m,) = jax.export.symbolic_shape("m")
    f = jax.jit(lambda x, w: jax_qmm.einsum("mk,khd->mhd", x, w, scheme=W8A8(symmetric=False)))
    exported = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=jax_qmm.export_disabled_checks())(
        jax.ShapeDtypeStruct((m, 16), jnp.float32), w
    )
    x = normal(5, 16)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x, w), f(x, w))


# Sharding


@pytest.mark.parametrize("kind, scheme", [(AxisType.Auto, W8A8(symmetric=False)), (AxisType.Explicit, W8A8())], ids=str)
@pytest.mark.parametrize(
    "equation, x_spec, w_spec, out_spec, expected",
    [
        ("btk,kn->btn", P("x"), P(), P("x"), []),
        ("btk,kn->btn", P(), P(None, "y"), P(None, None, "y"), []),
        ("btk,kn->btn", P("x"), P(None, "y"), P("x", None, "y"), []),
        ("btk,khd->bthd", P("x"), P(None, "y"), P("x", None, "y"), []),
        ("bthd,hdf->btf", P("x", None, "y"), P("y"), P("x"), ["all-reduce"] * 2),
        ("btk,kn->btn", P("x", None, "y"), P("y"), P("x"), ["all-reduce"] * 2),
    ],
)
def test_sharded_products_gather_nothing(kind, scheme, equation, x_spec, w_spec, out_spec, expected):
    shapes = {"b": 8, "t": 3, "k": 16, "n": 8, "h": 4, "d": 4, "f": 8}
    lhs, rhs = equation.split("->")[0].split(",")
    x, dense = (normal(*(shapes[c] for c in term), seed=i) for i, term in enumerate((lhs, rhs)))
    contracted = tuple(axis for axis, letter in enumerate(rhs) if letter in lhs)
    w = stored(dense, contracted).with_azp_adj(contracted)
    want = jax.jit(functools.partial(jax_qmm.einsum, equation, scheme=scheme))(x, w)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)

    def place(leaf):  # the leaves of w are stored in another order than w's
        spec = [dict(enumerate(w_spec)).get(axis) for axis in np.argsort(w.storage_axes())]
        return jax.device_put(leaf, NamedSharding(mesh, P(*(s if n > 1 else None for s, n in zip(spec, leaf.shape)))))

    explicit = kind is AxisType.Explicit
    with jax.set_mesh(mesh):
        args = jax.device_put(x, NamedSharding(mesh, x_spec)), jax.tree.map(place, w)
        f = jax.jit(
            lambda x, w: jax_qmm.einsum(
                equation, x, w, scheme=scheme, out_sharding=out_spec if explicit and expected else None
            )
        )
        compiled = f.lower(*args).compile()
        got = compiled(*args)
    found = re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert found == expected  # the maxima of the activations' rows and the sums
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out_spec), got.ndim)
    np.testing.assert_array_equal(got, want)


def test_a_sequence_parallel_mlp_gathers_activations_alone():
    """Rows over y outside, the weights' inner dimension over y inside: the float program gathers no weight either."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    batch, tokens, width, inner = 8, 4, 32, 64
    x, weights = normal(batch, tokens, width), (normal(width, inner, seed=1), normal(inner, width, seed=2))
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def compiled(matmul, up, down):
        def mlp(x, up, down):
            out = matmul(jax.nn.relu(matmul(x, up)), down)
            return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("x", "y")))

        text = jax.jit(mlp).lower(place(x, "x", "y"), up, down).compile().as_text()
        return re.findall(r"= (\w+)\[([\d,]+)\]\S* (all-gather|all-reduce)\(", text)

    up, down = (stored(w, (0,)) for w in weights)
    part, vector = f"{batch // 4},{tokens},{width}", f"{batch // 4},{tokens}"
    assert compiled(jnp.matmul, place(weights[0], None, "y"), place(weights[1], "y")) == [
        ("f32", part, "all-gather"),
        ("f32", part, "all-reduce"),
    ]
    up = QArray(place(up.qvalue, "y"), place(up.scale, "y")).T
    down = QArray(place(down.qvalue, None, "y"), place(down.scale)).T
    ours = compiled(jax_qmm.matmul, up, down)
    assert ("s8", part, "all-gather") in ours and ("s32", part, "all-reduce") in ours
    assert all(shape in (part, vector) for _, shape, kind in ours if kind == "all-gather")


def test_out_sharding_of_the_second_of_two_columns():
    x, w = normal(8, 16), stored(normal(16, 4, 2, seed=1), (0,))
    f = jax.jit(lambda x, w, spec: jax_qmm.einsum("mk,khd->mhd", x, w, out_sharding=spec), static_argnums=2)
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)):
        got = f(jax.device_put(x, P("x")), w, P("x", None, "y"))
        assert got.sharding.spec == P("x", None, "y")
    np.testing.assert_array_equal(got, f(x, w, None))


def test_the_derivative_of_a_sharded_product():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x, w = normal(8, 16), stored(normal(16, 8, seed=1), (0,))
    grad = jax.grad(lambda x, w: (jax_qmm.matmul(x, w) ** 2).sum())
    with jax.set_mesh(mesh):
        sharded = (jax.device_put(x, NamedSharding(mesh, P("x"))), jax.device_put(w, NamedSharding(mesh, P("y"))))
        np.testing.assert_allclose(jax.jit(grad)(*sharded), grad(x, w), rtol=1e-5, atol=1e-5)
        manual = jax.shard_map(grad, in_specs=(P("x"), P()), out_specs=P("x"))
        np.testing.assert_allclose(jax.jit(manual)(x, w), grad(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_replicated_bias_in_shard_map(quantized):
    x, w, bias = normal(8, 16), stored(normal(16, 4, seed=1), (0,)), normal(4, seed=2)
    x = jax_qmm.quantize(x) if quantized else x
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    loss = lambda x, bias: (jax_qmm.matmul(x, w, bias=bias) ** 2).sum()
    specs = (jax.tree.map(lambda leaf: P("x"), x), P())
    mapped = jax.shard_map(lambda *args: jax.lax.psum(loss(*args), "x"), mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(jax.grad(mapped, 1))(x, bias)
    np.testing.assert_allclose(got, jax.grad(loss, 1)(x, bias), rtol=1e-5, atol=1e-4)


def test_a_replicated_input_and_a_sharded_weight_in_shard_map():
    x, w = normal(8, 16), stored(normal(16, 8, seed=1), (0,))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = jax.tree.map(lambda leaf: P("x"), w)
    loss = lambda x, w: jax.lax.psum((jax_qmm.matmul(x, w) ** 2).sum(), "x")
    got = jax.jit(jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=(P(), specs), out_specs=P())))(x, w)
    want = jax.grad(lambda x, w: (jax_qmm.matmul(x, w) ** 2).sum())(x, w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="out_specs"):  # the product differs from device to device
        jax.jit(jax.shard_map(jax_qmm.matmul, mesh=mesh, in_specs=(P(), specs), out_specs=P()))(x, w)
