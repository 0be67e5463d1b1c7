"""vmap, derivatives, export and sharding of block_scaled_mm."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import QArray
from jax_qmm.ops import block_scaled_mm as module, checks

M, N, K, TILE = 16, 24, 1024, 64


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def weight(shape=(N, K), qtype=jnp.int4, tile_size=TILE, seed=1):
    return jax_qmm.quantize(normal(shape, seed), qtype, tile_size=tile_size, symmetric=False)


def assert_close(got, want, rtol=1e-5):
    """Sums of float32 in another order."""
    want = np.asarray(want, np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=rtol, atol=rtol * max(np.abs(want).max(), 1e-30))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0), (1, 0, None)])
def test_vmap(axes, packed):
    x = normal((5, 4, 96))
    x = x if axes[0] is not None else x[0]
    w = weight((5, 6, 96), tile_size=32) if axes[1] is not None else weight((6, 96), tile_size=32)
    w = w.pack() if packed else w
    bias = normal((5, 6)) if axes[2] is not None else normal(6)
    f = lambda x, w, bias: jax_qmm.block_scaled_mm(x, w, bias, activation="relu")
    size = x.shape[1] if axes[0] == 1 else 5
    w, bias = jax.tree.map(lambda leaf: leaf[:size] if size != 5 and leaf.shape[0] == 5 else leaf, (w, bias))
    got = jax.vmap(f, axes)(x, w, bias)
    pick = lambda tree, axis, i: tree if axis is None else jax.tree.map(lambda leaf: jnp.take(leaf, i, axis), tree)
    for i in range(size):
        assert_close(got[i], f(*(pick(arg, axis, i) for arg, axis in zip((x, w, bias), axes))))


def test_vmap_over_rows_makes_one_product():
    f = jax.vmap(lambda x: jax_qmm.block_scaled_mm(x, weight().pack()))
    (row,) = (row for row in jax_qmm.explain(f, normal((3, 4, K))).rows if "block_scaled_mm" in row.op)
    assert row.inputs == "float32[3,4,1024] x int4[24,1024]"


def test_strict_promotion():
    x, w = normal((4, 96), dtype=ml_dtypes.bfloat16), weight((6, 96), tile_size=32)
    with jax.numpy_dtype_promotion("strict"):
        for each in (w, w.pack()):
            f = lambda x, each=each: jax_qmm.block_scaled_mm(x, each, activation="relu")
            assert f(x).dtype == jax.grad(lambda x, f=f: f(x).sum())(x).dtype == x.dtype
            np.testing.assert_array_equal(each.offset(), -w.scale * w.zero_point.astype(np.float32))


def loss(x, scale, zero_point, bias, w, activation, dtype):
    w = QArray(w.qvalue, scale, zero_point, tile_size=w.tile_size)
    y = jax_qmm.block_scaled_mm(x, w, bias, activation=activation, out_dtype=dtype)
    return jnp.sum(jnp.cos(y.astype(jnp.float32)))


def dense_loss(x, scale, zero_point, bias, w, activation, dtype):
    spread = lambda leaf: jnp.repeat(leaf, w.tile_size, 1)[:, : w.shape[1]]
    dense = (w.qvalue.astype(jnp.float32) - spread(zero_point)) * spread(scale)
    y = jnp.dot(x.astype(jnp.float32), dense.T, precision="highest") + bias
    act = {None: lambda y: y, "silu": jax.nn.silu, "relu": jax.nn.relu}[activation]
    return jnp.sum(jnp.cos(act(y).astype(dtype).astype(jnp.float32)))


@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_derivatives_are_those_of_the_dequantized_product(activation, dtype):
    w, x, bias = weight((6, 100), tile_size=32), normal((3, 100), dtype=dtype) / dtype(5), normal(6)
    args = (x, w.scale, w.zero_point.astype(jnp.float32), bias)
    got = jax.jit(jax.grad(lambda *args: loss(*args, w, activation, dtype), (0, 1, 2, 3)))(*args)
    want = jax.grad(lambda *args: dense_loss(*args, w, activation, dtype), (0, 1, 2, 3))(*args)
    for g, v in zip(got, want):
        assert g.dtype == v.dtype
        assert_close(g, v, rtol=1e-4 if dtype == np.float32 else 2.0**-7)
    tangents = tuple(normal(a.shape, 3).astype(a.dtype) for a in args)
    _, tangent = jax.jvp(lambda *args: loss(*args, w, activation, dtype), args, tangents)
    total = sum(np.vdot(np.float64(g), np.float64(t)) for g, t in zip(want, tangents))
    assert_close(tangent, total, rtol=1e-3 if dtype == np.float32 else 0.1)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_derivative_with_an_activation_takes_one_product(quantized):
    w, x = jax_qmm.quantize(normal((6, 64)), tile_size=32), normal((3, 64), seed=2)
    x = jax_qmm.quantize(x, tile_size=32) if quantized else x
    f = lambda bias: jax_qmm.block_scaled_mm(x, w, bias, activation="gelu", out_dtype=jnp.float32)
    value, gradient = lambda bias: jax.vjp(f, bias)[0], jax.grad(lambda bias: f(bias).sum())
    for each in (value, gradient):
        (row,) = jax_qmm.explain(each, normal(6)).rows
        assert row.op.startswith("block_scaled_mm") and row.count == 1
    assert_close(value(normal(6)), f(normal(6)))


def test_a_packed_weight_is_a_constant_and_its_dequantized_copy_is_not_kept():
    w, x = weight((6, 256)).pack(), normal((3, 256))
    f = lambda x: jnp.sum(jax_qmm.block_scaled_mm(x, w) ** 2)
    dense = np.asarray(w.dequantize())
    assert_close(jax.grad(f)(x), 2 * (x @ dense.T) @ dense)
    _, pullback = jax.vjp(lambda x, w: jax_qmm.block_scaled_mm(x, w), x, w)
    assert dense.shape not in [leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")]
    by_w = jax.grad(lambda w: jnp.sum(jax_qmm.block_scaled_mm(x, w)), allow_int=True)(w)
    assert by_w.scale.shape == w.scale.shape and by_w.qvalue.dtype == jax.dtypes.float0
    second = jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x))))(x)
    assert np.isfinite(second).all()


@pytest.mark.parametrize("packed", [False, True])
def test_exports_with_symbolic_rows(packed):
    (m,) = jax.export.symbolic_shape("m")
    w = weight((6, 100), tile_size=32)
    w = w.pack() if packed else w
    f = jax.jit(lambda x, w: jax_qmm.block_scaled_mm(x, w, activation="gelu"))
    exported = jax.export.export(f, platforms=["cpu"])(jax.ShapeDtypeStruct((m, 100), jnp.float32), w)
    x = normal((3, 100))
    assert_close(jax.export.deserialize(exported.serialize()).call(x, w), f(x, w))


# Sharding


def make_mesh(shape, names, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), names, axis_types=(kind,) * len(names))


def collectives(compiled):
    return sorted(
        re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", compiled.as_text())
    )


def put(mesh, x, w, bias, m=None, n=None, k_x=None, k_w=None, k_scale="as w"):
    """x, w and bias on the mesh, given the axes of each dimension."""
    place = lambda leaf, spec: None if leaf is None else jax.device_put(leaf, NamedSharding(mesh, spec))
    k_scale = k_w if k_scale == "as w" else k_scale
    leaves = place(w.qvalue, P(n, k_w)), *(place(leaf, P(n, k_scale)) for leaf in (w.scale, w.zero_point)), None
    return place(x, P(m, k_x)), jax.tree.unflatten(jax.tree.structure(w), leaves[:3]), place(bias, P(n))


KINDS = {
    "plain": lambda: weight(),
    "packed": lambda: weight().pack(),
    "packed int8": lambda: weight(qtype=jnp.int8, tile_size=256).pack(),
    "per channel": lambda: weight(tile_size=None).pack(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "axes, want_spec, want",
    [
        ({"m": "x"}, P("x", None), []),
        ({"n": "x"}, P(None, "x"), []),
        ({"m": "x", "n": "y"}, P("x", "y"), []),
        ({"k_x": "y", "k_w": "y"}, P(None, None), ["all-reduce"]),
        ({"m": "x", "k_x": "y", "k_w": "y"}, P("x", None), ["all-reduce"]),
        ({"k_w": "y"}, P(None, None), ["all-reduce"]),  # x is sliced
        ({"k_x": "y"}, P(None, None), ["all-reduce"]),  # w is sliced, its scales too
        ({"k_x": "y", "k_w": "y", "k_scale": None}, P(None, None), ["all-reduce"]),
    ],
)
def test_partitions_without_needless_communication(kind, mesh_kind, axes, want_spec, want):
    w, x, bias = KINDS[kind](), normal((M, K)), normal(N)
    axes = {"k_scale": None, **axes} if kind == "per channel" else axes
    mesh = make_mesh((2, 4), ("x", "y"), mesh_kind)
    both = axes.get("k_x") and axes.get("k_w") and mesh_kind == AxisType.Explicit
    f = lambda x, w, bias: jax_qmm.block_scaled_mm(
        x, w, bias, activation="silu", out_sharding=want_spec if both else None
    )
    with jax.set_mesh(mesh):
        args = put(mesh, x, w, bias, **axes)
        compiled = jax.jit(f).lower(*args).compile()
        got = compiled(*args)
        (row,) = jax_qmm.explain(f, *args).rows
    assert collectives(compiled) == want
    assert row.exchanged == ("all-reduce over y" if want else "")
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, want_spec), 2)
    assert_close(got, jax_qmm.block_scaled_mm(x, w, bias, activation="silu"))


def test_the_all_reduce_is_of_float32_before_the_bias():
    mesh = make_mesh((8,), ("x",))
    x, w, bias = normal((M, K), dtype=ml_dtypes.bfloat16), weight().pack(), normal(N)
    args = put(mesh, x, w, bias, k_x="x", k_w="x")
    compiled = jax.jit(lambda *args: jax_qmm.block_scaled_mm(*args, activation="relu")).lower(*args).compile()
    assert re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text()) == ["f32"]
    assert_close(compiled(*args), jax_qmm.block_scaled_mm(x, w, bias, activation="relu"), rtol=2.0**-8)


@pytest.mark.parametrize(
    "w, devices, parts",
    [
        (lambda: weight((N, 512), tile_size=256), 4, 2),  # a device would have half a block
        (lambda: weight((N, 512), tile_size=64).pack(), 8, 4),  # or half of 128 columns
        (lambda: weight((N, 1000), tile_size=128), 8, 1),  # the last block is short
        (lambda: weight((N, 1000), tile_size=25).pack(), 8, 1),  # columns fill up the last 128
    ],
)
def test_what_no_boundary_divides_is_gathered(w, devices, parts):
    w, bias = w(), normal(N)
    x = normal((M, w.shape[1]))
    args = put(make_mesh((devices,), ("x",)), x, w, bias, k_x="x", k_w="x", k_scale=None)
    compiled = jax.jit(jax_qmm.block_scaled_mm).lower(*args).compile()
    assert set(collectives(compiled)) == {"all-gather"}
    (row,) = jax_qmm.explain(jax_qmm.block_scaled_mm, *args).rows
    assert row.exchanged == f"gathers x, w along K over x (whole parts: {parts}, devices: {devices})"
    assert_close(compiled(*args), jax_qmm.block_scaled_mm(x, w, bias))


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [{"m": "x", "n": "y"}, {"m": "x", "k_x": "y", "k_w": "y"}, {"k_w": "y"}])
def test_gradient_of_sharded_operands(kind, mesh_kind, axes):
    mesh = make_mesh((2, 4), ("x", "y"), mesh_kind)
    x, w, bias = normal((M, K)) / 30, KINDS[kind](), normal(N)

    def gradient(x, w, bias, spec=None):
        f = lambda x: jax_qmm.block_scaled_mm(x, w, bias, activation="silu", out_sharding=spec)
        return jax.grad(lambda x: jnp.sum(jnp.cos(f(x))))(x)

    spec = P("x", None) if mesh_kind == AxisType.Explicit and "k_x" in axes else None
    with jax.set_mesh(mesh):
        args = put(mesh, x, w, bias, **axes)
        got = jax.jit(lambda *args: gradient(*args, spec))(*args)
        dense = jax.jit(lambda w: w.dequantize())(args[1])
    assert_close(got, gradient(x, w, bias), rtol=1e-4)
    np.testing.assert_array_equal(dense, w.dequantize())


def test_shard_map_over_k_with_the_users_sum():
    """The parts of a packed weight are packed weights."""
    mesh = make_mesh((4,), ("x",))
    x, w = normal((M, K)), weight().pack()
    mapped = lambda x, w: jax.lax.psum(jax_qmm.block_scaled_mm(x, w), "x")
    with jax.set_mesh(mesh):
        f = jax.jit(jax.shard_map(mapped, in_specs=(P(None, "x"), P(None, "x")), out_specs=P()))
        assert_close(f(x, w), jax_qmm.block_scaled_mm(x, w))


def test_the_kernel_gets_what_its_handler_reads(monkeypatch):
    """Operands and attributes of the custom call; what it computes, tests marked gpu say."""
    calls = []

    def ffi_call(target, results):
        def call(*operands, **attributes):
            calls.append((target, [(x.dtype.name, x.shape) for x in operands], attributes))
            assert [(x.shape, x.dtype) for x in results[1:]] == [((1000,), jnp.uint8)] * packed
            return [jnp.zeros(result.shape, result.dtype) for result in results]

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    w = weight((6, 300), tile_size=128)
    params = {"num_batch": 0, "qtype": w.qtype, "activation": checks.activation((0, 6))}
    params |= {"block": 128, "names": ("scale", "zero_point", "bias"), "out_dtype": jnp.dtype(jnp.bfloat16)}
    x, bias = jnp.ones((2, 3, 300), jnp.bfloat16), jnp.ones(6)
    for packed in (True, False):
        q = w.pack() if packed else w
        out = module._kernel(x, q.qvalue, q.scale, q.zero_point, bias, packed=packed, workspace=1000 * packed, **params)
        assert out.shape == (2, 3, 6) and out.dtype == jnp.bfloat16
        target, operands, attributes = calls.pop()
        assert target == "jax_qmm_block_scaled_mm"
        zero_point = "int8" if packed else "float32"
        want = [("bfloat16", (1, 6, 300)), ("uint8", (1, 6, 192)), ("float32", (1, 6, 3)), (zero_point, (1, 6, 3))]
        assert operands == [*want, ("float32", (1, 6))]
        assert attributes == {
            **{"bits": 4, "block": 128, "names": "zero_point bias"},
            **{"activation": "clamp", "low": 0.0, "high": 6.0},
        }
        assert {name: type(attributes[name]) for name in ("bits", "block", "low")} == {
            **{"bits": np.int32, "block": np.int32, "low": np.float32}
        }
