import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_qmm

E4M3 = ml_dtypes.float8_e4m3fn
M, N, K = 16, 24, 32


def make_mesh(shape, names, kind):
    return Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), names, axis_types=(kind,) * len(names))


@pytest.fixture(scope="module")
def operands():
    """a, b, scale_a, scale_b, azp_adj, azp, bias."""
    rng = np.random.default_rng(0)
    b = rng.integers(-128, 128, (N, K), dtype=np.int8)
    return [
        rng.integers(-128, 128, (M, K), dtype=np.int8),
        b,
        rng.random(M, np.float32),
        rng.random(N, np.float32),
        b.sum(1, dtype=np.int32),
        rng.integers(-128, 128, M, dtype=np.int32),
        rng.normal(size=N).astype(np.float32),
    ]


def f32_azp(*args, **kwargs):
    return jax_qmm.scaled_mm_azp_per_token(*args, out_dtype=jnp.float32, **kwargs)


def collectives(compiled):
    return sorted(
        re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())
    )


def put(mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]


def specs(m=None, n=None, k_a=None, k_b=None):
    """The shardings of all the operands, given the mesh axes of each dimension."""
    return [P(m, k_a), P(n, k_b), P(m), P(n), P(n), P(m), P(n)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "sharding, want_spec, want",
    [
        (specs(m="x"), P("x", None), []),
        (specs(n="x"), P(None, "x"), []),
        (specs(m="x", n="y"), P("x", "y"), []),
        (specs(m=("x", "y")), P(("x", "y"), None), []),
        (specs(k_a="y", k_b="y"), P(None, None), ["all-reduce"]),
        (specs(m="x", k_a="y", k_b="y"), P("x", None), ["all-reduce"]),
        (specs(n="x", k_a="y", k_b="y"), P(None, "x"), ["all-reduce"]),
        (specs(k_a="y"), P(None, None), ["all-reduce"]),  # b is sliced
        (specs(k_b="y"), P(None, None), ["all-reduce"]),  # a is sliced
        (specs(m="x", k_b="x"), P("x", None), ["all-gather"]),  # of b: M keeps the axis
        (specs(n="x", k_a="x"), P(None, "x"), ["all-gather"]),  # of a: N keeps the axis
    ],
)
def test_partitions_without_needless_communication(operands, kind, sharding, want_spec, want):
    mesh = make_mesh((2, 4), ("x", "y"), kind)
    both_k = sharding[0][1] is not None and sharding[1][1] is not None
    out_sharding = want_spec if both_k and kind == AxisType.Explicit else None
    with jax.set_mesh(mesh):
        args = put(mesh, operands, sharding)
        f = lambda *args: f32_azp(*args, out_sharding=out_sharding)
        compiled = jax.jit(f).lower(*args).compile()
        got = compiled(*args)
        (row,) = jax_qmm.explain(f, *args).rows
    assert collectives(compiled) == want
    exchanged = {"gathers": "all-gather", "all-reduce": "all-reduce"}
    assert [exchanged[words.split()[0]] for words in row.exchanged.split("; ") if words] == want
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, want_spec), 2)
    np.testing.assert_array_equal(got, f32_azp(*operands))


def test_what_has_one_axis_twice_moves_as_in_lax(operands):
    """a has the axis on K that b has on N: a alone moves, as much as lax moves, and the sums are reduced."""
    mesh = make_mesh((2, 4), ("x", "y"), AxisType.Auto)
    args = put(mesh, operands[:2], [P(None, "x"), P("x", "y")])
    sums = lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=jnp.int32)
    dot = lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    ours, lax = (jax.jit(f).lower(*args).compile() for f in (sums, dot))
    moved = lambda compiled: re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:all-|collective-)", compiled.as_text())
    assert ("s32", f"{M},{N // 2}") in moved(ours) and ("s32", f"{M},{N // 2}") in moved(lax)
    elements = lambda found: sum(math.prod(map(int, dims.split(","))) for kind, dims in found if kind == "s8")
    assert 0 < elements(moved(ours)) <= elements(moved(lax))
    np.testing.assert_array_equal(ours(*args), dot(*operands[:2]))


def test_one_axis_on_m_and_n_follows_the_result(operands):
    mesh = make_mesh((8,), ("x",), AxisType.Auto)
    args = put(mesh, operands, specs(m="x", n="x"))
    for spec in (P("x", None), P(None, "x")):
        compiled = jax.jit(f32_azp, out_shardings=NamedSharding(mesh, spec)).lower(*args).compile()
        assert set(collectives(compiled)) == {"all-gather"}
        np.testing.assert_array_equal(compiled(*args), f32_azp(*operands))


def test_float8_sums_partial_products_in_float32(operands):
    mesh = make_mesh((8,), ("x",), AxisType.Auto)
    a, b = (np.clip(x, -8, 8).astype(E4M3) for x in operands[:2])  # whole numbers: exact sums
    args = put(mesh, (a, b, operands[6]), (P(None, "x"), P(None, "x"), P()))
    f = lambda a, b, bias: jax_qmm.scaled_mm(a, b, 0.1, 0.3, bias)
    compiled = jax.jit(f).lower(*args).compile()
    assert re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text()) == ["f32"]
    np.testing.assert_array_equal(compiled(*args), f(a, b, operands[6]))


def test_raw_sums_and_leading_dimensions(operands):
    mesh = make_mesh((2, 2, 2), ("x", "y", "z"), AxisType.Auto)
    a = operands[0].reshape(2, 8, K)
    args = put(mesh, (a, operands[1]), (P("x", "y", "z"), P(None, "z")))
    f = lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=jnp.int32)
    compiled = jax.jit(f).lower(*args).compile()
    assert re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text()) == ["s32"]
    assert compiled(*args).sharding.spec[:2] == ("x", "y")
    np.testing.assert_array_equal(compiled(*args), f(a, operands[1]))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("b_batched", [False, True])
def test_vmap_over_a_sharded_batch(operands, kind, b_batched):
    a = np.stack([operands[0], operands[0][::-1]] * 2)
    b = np.stack([operands[1], operands[1][::-1]] * 2) if b_batched else operands[1]
    f = jax.vmap(lambda a, b, s: jax_qmm.scaled_mm(a, b, s, 0.5), (0, 0 if b_batched else None, None))
    mesh = make_mesh((4, 2), ("x", "y"), kind)
    with jax.set_mesh(mesh):
        args = put(mesh, (a, b, operands[2]), (P("x", "y"), P("x") if b_batched else P(), P("y")))
        compiled = jax.jit(f).lower(*args).compile()
        got = compiled(*args)
    assert collectives(compiled) == []
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y", None)), 3)
    np.testing.assert_array_equal(got, f(a, b, operands[2]))


def test_vmap_with_an_out_sharding(operands):
    a = np.stack([operands[0], operands[0][::-1]])
    f = lambda spec: jax.vmap(lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 0.5, out_sharding=spec), (0, None))
    mesh = make_mesh((2, 4), ("x", "y"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, (a, operands[1]), (P("x", None, "y"), P(None, "y")))
        got = jax.jit(f(P(None, None)))(*args)
        assert jax.typeof(got).sharding.spec == P("x", None, None)
    np.testing.assert_array_equal(got, f(None)(a, operands[1]))


def test_out_sharding_over_the_axis_of_k(operands):
    mesh = make_mesh((8,), ("x",), AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, operands, specs(k_a="x", k_b="x"))
        lowered = jax.jit(lambda *args: -f32_azp(*args, out_sharding=P("x", None))).lower(*args)
        got = lowered.compile()(*args)
    assert lowered.as_text().count("sdy.sharding_constraint") == 2  # of the product and of its negation
    assert got.sharding.spec == P("x", None)
    np.testing.assert_array_equal(got, -f32_azp(*operands))


@pytest.mark.parametrize(
    "sharding, message",
    [
        (specs(k_a="x", k_b="x"), "K is sharded in a .* pass out_sharding"),
        (specs(m="x", n="x"), "sharded twice over one mesh axis"),
    ],
)
def test_ambiguous_explicit_shardings_are_refused(operands, sharding, message):
    mesh = make_mesh((8,), ("x",), AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = put(mesh, operands, sharding)
        with pytest.raises(Exception, match=message) as caught:
            jax.jit(f32_azp)(*args)
    # That of jax's own dot; it has no public name.
    assert type(caught.value).__name__ == "ShardingTypeError"


def loss(scale_a, scale_b, bias, a, b, adj, azp, mm=f32_azp):
    return jnp.sum(jnp.cos(mm(a, b, scale_a, scale_b, adj, azp, bias) * 1e-4))


def gradients(operands):
    a, b, scale_a, scale_b, adj, azp, bias = operands
    return jax.jit(jax.grad(loss, (0, 1, 2)))(scale_a, scale_b, bias, a, b, adj, azp)


@pytest.mark.parametrize(
    "kind, sharding",
    [
        (AxisType.Auto, specs(m="x", n="y")),
        (AxisType.Auto, specs(m="x", k_a="y", k_b="y")),
        (AxisType.Explicit, specs(m="x", n="y")),
    ],
)
def test_gradients_of_sharded_operands(operands, kind, sharding):
    mesh = make_mesh((2, 4), ("x", "y"), kind)
    with jax.set_mesh(mesh):
        got = gradients(put(mesh, operands, sharding))
    for g, w in zip(got, gradients(operands)):  # float32 sums in another order
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * np.abs(w).max())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}])
@pytest.mark.parametrize("sharding", [specs(m="x"), specs(n="x")])
def test_shard_map_with_replicated_operands(operands, kind, manual, sharding):
    """What is the same everywhere, a or b and a scale of the whole tensor, has a gradient summed over x."""
    mesh = make_mesh((4, 2), ("x", "y"), kind)
    a, b, scale_a, scale_b, adj, azp, bias = operands
    in_specs = (P(), sharding[3], sharding[6], sharding[0], sharding[1], sharding[4], sharding[5])

    def mapped(*args):
        f = lambda *args: jax.lax.psum(loss(*args), "x")
        return jax.shard_map(f, in_specs=in_specs, out_specs=P(), axis_names=manual)(*args)

    args = scale_a[0], scale_b, bias, a, b, adj, azp
    with jax.set_mesh(mesh):
        value, got = jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))(*put(mesh, args, in_specs))
    want_value, want = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * np.abs(w).max())


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}])
def test_shard_map_over_k_with_the_users_sum(operands, manual):
    mesh = make_mesh((4, 2), ("x", "y"), AxisType.Auto)

    def mapped(a, b):
        return jax.lax.psum(jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=jnp.int32), "x")

    with jax.set_mesh(mesh):
        f = jax.jit(jax.shard_map(mapped, in_specs=(P(None, "x"), P(None, "x")), out_specs=P(), axis_names=manual))
        got = f(*operands[:2])
    np.testing.assert_array_equal(got, operands[0].astype(np.int32) @ operands[1].T.astype(np.int32))


def test_eager_calls_on_sharded_arrays(operands):
    mesh = make_mesh((8,), ("x",), AxisType.Auto)
    got = f32_azp(*put(mesh, operands, specs(m="x")))
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None)), 2)
    np.testing.assert_array_equal(got, f32_azp(*operands))


def test_without_a_mesh_context_and_with_one_device(operands):
    for devices in (1, 4):
        mesh = make_mesh((devices,), ("x",), AxisType.Explicit)
        with jax.set_mesh(mesh):
            args = put(mesh, operands, specs(m="x"))
            got = jax.jit(f32_azp)(*args)
        np.testing.assert_array_equal(got, f32_azp(*operands))
    mesh = make_mesh((4,), ("x",), AxisType.Auto)
    got = jax.jit(f32_azp)(*put(mesh, operands, specs(k_a="x", k_b="x")))
    np.testing.assert_array_equal(got, f32_azp(*operands))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_set_mesh_around_unsharded_arguments(kind, operands):
    with jax.set_mesh(make_mesh((4, 2), ("x", "y"), kind)):
        got = jax.jit(f32_azp)(*operands)
    np.testing.assert_array_equal(got, f32_azp(*operands))


@pytest.mark.parametrize("sharding", [specs(m="x"), specs(n="x"), specs(k_a="x", k_b="x"), specs(k_b="x")])
def test_dimensions_that_the_mesh_does_not_divide(operands, sharding):
    """Slices of operands that it does divide: XLA pads the parts with junk, which no sum over K may see."""
    m, n, k = M - 3, N - 3, K - 3
    cut = lambda a, b, s, t, adj, azp, c: f32_azp(a[:m, :k], b[:n, :k], s[:m], t[:n], adj[:n], azp[:m], c[:n])
    mesh = make_mesh((8,), ("x",), AxisType.Auto)
    np.testing.assert_array_equal(jax.jit(cut)(*put(mesh, operands, sharding)), cut(*operands))
