"""vmap, derivatives, export and sharding of block_scaled_mm of two QArrays."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import QArray
from jax_qmm.ops import block_quantized_mm as module, checks

M, N, K, TILE = 16, 24, 512, 64


def quantized(shape, seed=0, tile=TILE, **options):
    x = np.random.default_rng(seed).normal(0.5, 1, shape).astype(np.float32)
    return jax_qmm.quantize(x, tile_size=tile, **{"symmetric": False, **options})


def assert_close(got, want, rtol=1e-5):
    """Sums of float32 in another order."""
    want = np.asarray(want, np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=rtol, atol=rtol * max(np.abs(want).max(), 1e-30))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0), (1, 0, None)])
def test_vmap_is_exact(axes):
    x = quantized((5, 4, 96) if axes[0] is not None else (4, 96), tile=32)
    w = quantized((5, 6, 96) if axes[1] is not None else (6, 96), 1, tile=32)
    bias = np.random.default_rng(2).normal(size=(5, 6) if axes[2] is not None else 6).astype(np.float32)
    f = lambda x, w, bias: jax_qmm.block_scaled_mm(x, w, bias, activation="relu")
    size = 4 if axes[0] == 1 else 5
    w, bias = jax.tree.map(lambda leaf: leaf[:size] if leaf.shape[0] == 5 else leaf, (w, bias))
    got = jax.vmap(f, axes)(x, w, bias)
    pick = lambda tree, axis, i: tree if axis is None else jax.tree.map(lambda leaf: jnp.take(leaf, i, axis), tree)
    for i in range(size):
        np.testing.assert_array_equal(got[i], f(*(pick(arg, axis, i) for arg, axis in zip((x, w, bias), axes))))


def test_vmap_over_rows_makes_one_product_also_of_a_shared_scale():
    x, w = quantized((3, 4, K)), quantized((N, K), 1)

    def f(values):
        return jax_qmm.block_scaled_mm(QArray(values, x.scale[0], x.zero_point[0]), w)

    (row,) = (row for row in jax_qmm.explain(jax.vmap(f), x.qvalue).rows if "block_scaled_mm" in row.op)
    assert row.inputs == f"int8[3,4,{K}] x int8[{N},{K}]"
    for i, got in enumerate(jax.vmap(f)(x.qvalue)):
        np.testing.assert_array_equal(got, f(x.qvalue[i]))


@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("tile", [32, 100])
def test_derivatives_are_those_of_the_dequantized_product(activation, tile):
    x, w = quantized((3, 100), tile=tile), quantized((6, 100), 1, tile=tile)
    bias = np.random.default_rng(2).normal(size=6).astype(np.float32)
    act = {None: lambda y: y, "silu": jax.nn.silu, "relu": jax.nn.relu}[activation]
    args = (x.scale / 10, w.scale, w.zero_point.astype(jnp.float32), bias)
    build = lambda q, scale, zero_point: QArray(q.qvalue, scale, zero_point, tile_size=tile)

    def loss(scale_x, scale_w, zero_w, bias):
        operands = build(x, scale_x, x.zero_point), build(w, scale_w, zero_w)
        return jnp.sum(jnp.cos(jax_qmm.block_scaled_mm(*operands, bias, activation=activation)))

    def dense_loss(scale_x, scale_w, zero_w, bias):
        dense = build(x, scale_x, x.zero_point).dequantize(), build(w, scale_w, zero_w).dequantize()
        return jnp.sum(jnp.cos(act(jnp.dot(dense[0], dense[1].T, precision="highest") + bias)))

    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args)
    for g, v in zip(got, jax.grad(dense_loss, (0, 1, 2, 3))(*args)):
        assert g.dtype == v.dtype
        assert_close(g, v, rtol=1e-4)


def test_integers_are_constants():
    x, w = quantized((3, 96), tile=32), quantized((6, 96), 1, tile=32)
    by = jax.grad(lambda w: jnp.sum(jax_qmm.block_scaled_mm(x, w)), allow_int=True)(w)
    assert by.scale.shape == w.scale.shape and by.qvalue.dtype == by.zero_point.dtype == jax.dtypes.float0


def test_exports_with_symbolic_rows():
    (m,) = jax.export.symbolic_shape("m")
    x, w = quantized((3, 100), tile=32), quantized((6, 100), 1, tile=32)
    f = jax.jit(lambda x, w: jax_qmm.block_scaled_mm(x, w, activation="gelu"))
    symbolic = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((m, *leaf.shape[1:]), leaf.dtype), x)
    exported = jax.export.export(f, platforms=["cpu"])(symbolic, w)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(x, w), f(x, w))


# Sharding


def make_mesh(shape, names, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), names, axis_types=(kind,) * len(names))


def collectives(compiled):
    return sorted(
        re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())
    )


def put(mesh, q, *spec):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(*spec))), q)


@pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize(
    "m, n, k_x, k_w, want",
    [
        ("x", None, None, None, []),
        (None, "x", None, None, []),
        ("x", "y", None, None, []),
        (None, None, "y", "y", ["all-reduce"]),
        ("x", None, "y", "y", ["all-reduce"]),
        (None, None, None, "y", ["all-reduce"]),
    ],
)
def test_partitions_without_needless_communication(m, n, k_x, k_w, want, sums, mesh_kind):
    mesh, spec = make_mesh((2, 4), ("x", "y"), mesh_kind), P(m, n)
    x, w, bias = quantized((M, K), sums=sums), quantized((N, K), 1, sums=sums), np.linspace(-1, 1, N, dtype=np.float32)
    both = k_x and k_w and mesh_kind == AxisType.Explicit
    f = lambda x, w, bias: jax_qmm.block_scaled_mm(x, w, bias, activation="silu", out_sharding=spec if both else None)
    with jax.set_mesh(mesh):
        args = put(mesh, x, m, k_x), put(mesh, w, n, k_w), put(mesh, bias, n)
        compiled = jax.jit(f).lower(*args).compile()
        got = compiled(*args)
    assert collectives(compiled) == want
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    whole = f(x, w, bias) if not both else jax_qmm.block_scaled_mm(x, w, bias, activation="silu")
    assert_close(got, whole) if want else np.testing.assert_array_equal(got, whole)


def test_the_all_reduce_is_of_float32_before_the_bias():
    mesh = make_mesh((8,), ("x",))
    x, w, bias = quantized((M, K)), quantized((N, K), 1), np.linspace(-1, 1, N, dtype=np.float32)
    f = lambda x, w: jax_qmm.block_scaled_mm(x, w, bias, activation="relu", out_dtype=jnp.bfloat16)
    args = put(mesh, x, None, "x"), put(mesh, w, None, "x")
    compiled = jax.jit(f).lower(*args).compile()
    assert re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text()) == ["f32"]
    assert_close(compiled(*args), f(x, w), rtol=2.0**-7)


@pytest.mark.parametrize("k, tile", [(512, 256), (1000, 128)])  # a device would have half a block, or parts of some
def test_what_no_boundary_divides_is_gathered(k, tile):
    mesh = make_mesh((4,), ("x",))
    x, w = quantized((M, k), tile=tile), quantized((N, k), 1, tile=tile)
    place = lambda q: QArray(put(mesh, q.qvalue, None, "x"), *put(mesh, (q.scale, q.zero_point)), tile_size=tile)
    args = place(x), place(w)
    compiled = jax.jit(jax_qmm.block_scaled_mm).lower(*args).compile()
    got = compiled(*args)
    assert "all-gather" in collectives(compiled)
    np.testing.assert_array_equal(got, jax_qmm.block_scaled_mm(x, w))


def test_shard_map_over_k_with_the_users_sum():
    mesh = make_mesh((4,), ("x",))
    x, w = quantized((M, K)), quantized((N, K), 1)
    mapped = lambda x, w: jax.lax.psum(jax_qmm.block_scaled_mm(x, w), "x")
    with jax.set_mesh(mesh):
        f = jax.jit(jax.shard_map(mapped, in_specs=(P(None, "x"), P(None, "x")), out_specs=P()))
        assert_close(f(x, w), jax_qmm.block_scaled_mm(x, w))


def test_the_kernel_gets_what_its_handler_reads(monkeypatch):
    """Operands and attributes of the custom call; what it computes, tests marked gpu say."""
    calls = []

    def ffi_call(target, result):
        def call(*operands, **attributes):
            calls.append((target, [(x.dtype.name, x.shape) for x in operands], attributes))
            return jnp.zeros(result.shape, result.dtype)

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    names = ("scale_a", "scale_b", "zero_point_a", "bias")
    params = {"num_batch": 0, "activation": checks.activation((0, 6)), "out_dtype": jnp.dtype(jnp.bfloat16)}
    params |= {"shared_b": 1}
    for k, padded, block, sent in ((300, 300, 128, 128), (130, 144, 64, 64), (100, 100, 100, 128)):
        count = -(-k // block)
        a, b = jnp.ones((2, 3, k), jnp.int8), jnp.ones((6, k), jnp.int8)
        scale, zero_point = jnp.ones((2, 3, count), jnp.bfloat16), jnp.ones((2, 3, count), jnp.int32)
        operands = (a, b, scale, jnp.ones((6, count)), zero_point, jnp.ones(6))
        out = module._kernel(*operands, names=names, block=block, **params)
        assert out.shape == (2, 3, 6) and out.dtype == jnp.bfloat16
        target, got, attributes = calls.pop()
        assert target == "jax_qmm_block_quantized_mm"
        of_a, of_b = ("float32", (1, 6, count)), ("float32", (1, 6, count))
        assert got == [
            *(("int8", (1, 6, padded)), ("int8", (1, 6, padded)), of_a, of_b, of_a, of_b),
            ("float32", (1, 6)),
        ]
        assert attributes == {
            **{"block": sent, "names": "scale_a scale_b zero_point_a sums_b bias"},
            **{"activation": "clamp", "low": 0.0, "high": 6.0},
        }
        assert type(attributes["block"]) is np.int32 and type(attributes["low"]) is np.float32


def test_kernels_get_one_scale_where_rows_of_w_share_it(monkeypatch):
    """As far as 128 rows do, of those that a device has, from the first on."""
    sizes = []

    def ffi_call(target, result):
        def call(a, b, scale_a, scale_b, *others, **attributes):
            sizes.append(scale_b.shape[1])
            return jnp.zeros(result.shape, result.dtype)

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    params = {"num_batch": 0, "activation": checks.activation(None), "out_dtype": jnp.dtype(jnp.float32), "block": 32}
    for n, scales, shared, sent in (
        (256, 2, 128, 2),
        (512, 2, 256, 4),
        (256, 1, 256, 2),
        (192, 3, 64, 192),
        (64, 1, 64, 64),
    ):
        w = QArray(jnp.ones((n, 64), jnp.int8), jnp.ones((scales, 2)), tile_size=32)
        side = module.in_blocks(w)
        assert side.shared == shared and side.scale.shape == (n, 2)
        a = jnp.ones((3, 64), jnp.int8), side.values, jnp.ones((3, 2)), side.scale
        module._kernel(*a, names=("scale_a", "scale_b"), shared_b=shared, **params)
        assert sizes.pop() == sent
        module._kernel(*a, names=("scale_a", "scale_b"), shared_b=1, **params)
        assert sizes.pop() == n
