import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import QArray


def make(shape=(4, 6), seed=0, **options):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jax_qmm.quantize(x, **options)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


VARIANTS = {
    "int8": lambda: make(),
    "asymmetric": lambda: make(symmetric=False),
    "fp8": lambda: make(qtype=jnp.float8_e4m3fn),
    "view": lambda: make().T.with_azp_adj(0),
    "tiled": lambda: make(tile_size=3),
    "int4": lambda: make(qtype=jnp.int4, tile_size=4, symmetric=False),
    "packed": lambda: make(qtype=jnp.int4, tile_size=4, symmetric=False).pack().T,
    "packed int8": lambda: make(tile_size=2).pack(),
    "float zero points": lambda: QArray(jnp.ones((2, 3), jnp.int8), jnp.ones((2, 1)), jnp.full((2, 1), 0.5)),
}
variants = pytest.mark.parametrize("q", [pytest.param(make_one, id=name) for name, make_one in VARIANTS.items()])


def test_dequantize_is_the_affine_map_in_every_granularity():
    rng = np.random.default_rng(1)
    qvalue = rng.integers(-128, 128, (2, 6, 8), np.int8)
    for shape in ((1, 1, 1), (2, 6, 1), (1, 1, 8), (2, 3, 4), (1, 2, 8)):
        scale = rng.normal(size=shape).astype(np.float32)
        zero_point = rng.integers(-128, 128, shape, np.int32)
        spread = lambda leaf: np.kron(leaf, np.ones([a // b for a, b in zip(qvalue.shape, shape)], leaf.dtype))
        want = (qvalue.astype(np.float32) - spread(zero_point).astype(np.float32)) * spread(scale)
        q = QArray(jnp.asarray(qvalue), jnp.asarray(scale), jnp.asarray(zero_point))
        np.testing.assert_array_equal(q.dequantize(), want)
        np.testing.assert_array_equal(q.transpose(1, 2, 0).dequantize(), want.transpose(1, 2, 0))
        assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


def test_a_transpose_is_a_view():
    q = make((2, 3, 4, 5))
    dense = q.dequantize()
    for view, want in (
        (q.T, dense.T),
        (q.mT, dense.mT),
        (q.swapaxes(1, -1), dense.swapaxes(1, -1)),
        (q.transpose(0, 2, 3, 1), dense.transpose(0, 2, 3, 1)),
        (q.transpose((-1, 0, 1, 2)).mT.T, dense.transpose(-1, 0, 1, 2).mT.T),
    ):
        assert view.qvalue is q.qvalue and view.scale is q.scale
        assert view.shape == want.shape and view.ndim == 4 and view.size == 120
        np.testing.assert_array_equal(view.dequantize(), want)
    assert jax.tree.structure(q.T.T) == jax.tree.structure(q)
    with pytest.raises(ValueError, match="axes is .*, needs a permutation of the 4 axes"):
        q.transpose(0, 1, 2, 2)


def test_properties():
    q = make((4, 6), symmetric=False)
    assert q.dtype == jnp.float32 and q.qtype == jnp.int8 and q.nbytes == 24 + 16 + 16
    assert q[...] is q
    with pytest.raises(TypeError, match=r"indexed by \[...\], got 0"):
        q[0]


@variants
def test_flattens_with_the_names_of_its_leaves(q):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q())]
    assert paths[:2] == [".qvalue", ".scale"]
    assert set(paths[2:]) <= {".zero_point", ".azp_adj"}


@variants
def test_survives_tree_map_jit_and_repr(q):
    q = q()
    assert_equal(jax.tree.map(lambda x: x, q), q)
    assert_equal(jax.jit(lambda q: q)(q), q)
    assert repr(q).startswith(f"QArray({q.qtype}[{q.shape[0]},{q.shape[1]}], scale=float32[")
    assert "QArray(None" in repr(jax.tree.map(lambda x: None, q))
    assert repr(jax.eval_shape(lambda q: q, q)) == repr(q)


@pytest.mark.parametrize(
    "shape, axis, view, new",
    [
        ((6, 8), 1, (0, 1), (2, 3, 8)),
        ((6, 8), 1, (0, 1), (6, 2, -1)),
        ((6, 8), 1, (1, 0), (2, 4, 3, 2)),
        ((4, 6, 8), (1, 2), (0, 1, 2), (4, 48)),
        ((4, 6, 8), 2, (0, 1, 2), (24, 8)),
        ((4, 6, 8), 2, (2, 0, 1), (8, 24)),
        ((4, 6, 8), (0, 1, 2), (0, 1, 2), (192,)),
        ((6, 8), 1, (1, 0), (8, 1, 6, 1)),
        ((1, 6, 1, 8), 3, (0, 1, 2, 3), (6, 8)),
        ((0, 8), 1, (0, 1), (0, 2, 4)),
        ((6, 0), 1, (0, 1), (2, 3, 0)),
        ((0, 8), (0, 1), (0, 1), (8, 0, 3)),
        ((8, 0), (0, 1), (0, 1), (0,)),
        ((0,), 0, (0,), (0, 3)),
        ((0, 1), 1, (0, 1), (-1,)),
    ],
)
def test_reshape_keeps_the_values(shape, axis, view, new):
    q = make(shape, axis=axis, symmetric=False).transpose(view)
    got = q.reshape(*new)
    assert got.shape == q.dequantize().reshape(new).shape
    np.testing.assert_array_equal(got.dequantize(), q.dequantize().reshape(new))
    assert_equal(q.reshape(new), got)


@pytest.mark.parametrize(
    "q, shape",
    [
        (lambda: make((4, 6)), (24,)),  # rows have scales of their own
        (lambda: make((4, 6)).T, (24,)),
        (lambda: make((4, 6, 8), axis=(1, 2)).transpose(0, 2, 1), (4, 48)),
        (lambda: make((4, 12), tile_size=4).reshape(4, 2, 6), (4, 3, 4)),
        (lambda: make((4, 12), tile_size=4).reshape(4, 2, 6).transpose(0, 2, 1), (4, 12)),
        (lambda: make((4, 0)), (0,)),
        (lambda: make((0, 4)), (4, 0)),
    ],
)
def test_a_reshape_that_scales_do_not_follow_is_refused(q, shape):
    with pytest.raises(ValueError, match=r"QArray\(int8.* has no shape .* scales or memory divide the axes"):
        q().reshape(shape)
    with pytest.raises(TypeError, match="cannot reshape"):
        q().reshape(5)


def test_astype_changes_the_scale():
    q = make((4, 6), symmetric=False)
    half = q.astype(jnp.bfloat16)
    assert half.dtype == half.dequantize().dtype == jnp.bfloat16 and half.qvalue is q.qvalue
    with pytest.raises(TypeError, match="dtype is int8, needs float32, bfloat16, float16"):
        q.astype(jnp.int8)


def test_the_operator_is_matmul():
    x, q = np.ones((2, 6), np.float32), make((6, 4), axis=0)
    np.testing.assert_array_equal(x @ q, jax_qmm.matmul(x, q))
    np.testing.assert_array_equal(jnp.asarray(x) @ q, jax_qmm.matmul(x, q))
    np.testing.assert_array_equal(q.T @ x.T, jax_qmm.matmul(q.T, x.T))
    np.testing.assert_array_equal(jax.jit(lambda q: q.T @ q)(q), jax_qmm.matmul(q.T, q))


ARITHMETIC = operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, pow, divmod


@pytest.mark.parametrize("other", [2, np.float32(2), np.ones((6, 4)), jnp.ones((6, 4)), make((6, 4))], ids=type)
def test_other_arithmetic_is_refused_in_words(other):
    q = make((4, 6)).T
    for operation in ARITHMETIC:
        for pair in ((q, other), (other, q)):
            with pytest.raises(TypeError, match=r"QArray\(int8\[6,4\].* has no arithmetic but @ .*dequantize"):
                operation(*pair)
    for operation in (operator.neg, operator.pos, abs):
        with pytest.raises(TypeError, match="no arithmetic"):
            operation(q)


def test_a_parameter_refuses_arithmetic_in_words():
    nnx = pytest.importorskip("flax.nnx")
    with pytest.raises(TypeError, match="compute with its .dequantize"):
        nnx.Param(make()) * 2


def test_maps_over_a_leading_axis():
    stack = make((3, 4, 6), symmetric=False).mT.with_azp_adj(1)
    one = lambda i: jax.tree.map(lambda leaf: leaf[i], stack)
    np.testing.assert_array_equal(one(1).dequantize(), stack.dequantize()[1])
    _, scanned = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), None, stack)
    np.testing.assert_array_equal(scanned, stack.dequantize())
    np.testing.assert_array_equal(jax.vmap(lambda q: q.T.dequantize())(stack), stack.mT.dequantize())
    restacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one(0), one(1), one(2))
    assert_equal(restacked, stack)
    assert_equal(
        jax.vmap(lambda x: jax_qmm.quantize(x).T)(jnp.ones((3, 4, 6))), jax_qmm.quantize(jnp.ones((3, 4, 6))).mT
    )
    with pytest.raises(ValueError, match="took away a permuted axis"):
        jax.vmap(lambda q: q.dequantize())(make().T)


@variants
def test_exports(q):
    q = q()
    exported = jax.export.export(jax.jit(lambda q: (q.dequantize(), q)), platforms=["cpu"])(q)
    restored = jax.export.deserialize(exported.serialize(vjp_order=0))
    dense, same = restored.call(q)
    np.testing.assert_array_equal(dense, q.dequantize())
    assert_equal(same, q)


@variants
def test_saves_and_loads_with_orbax(q, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params = {"layer": {"kernel": q(), "bias": jnp.ones(3)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", jax.eval_shape(lambda: params))
    assert_equal(restored, params)


def test_is_a_parameter_of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(make((8, 4)).T)

        def __call__(self, x):
            return jax_qmm.matmul(x, self.kernel[...])

    layer, x = Layer(), jnp.ones((2, 4))
    np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(layer, x), layer(x))
    graph, state = nnx.split(layer)
    assert_equal(nnx.merge(graph, state).kernel[...], layer.kernel[...])
    assert "QArray(int8[4,8]" in repr(layer)


def test_goes_to_devices_with_shardings():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    q = make((16, 8)).T
    placed = jax.device_put(q, NamedSharding(mesh, P("d", None)))
    assert placed.qvalue.sharding.spec == placed.scale.sharding.spec == P("d", None)
    assert_equal(placed, q)
    each = jax.tree.map(lambda leaf: NamedSharding(mesh, P(*("d" if n == 16 else None for n in leaf.shape))), q)
    assert_equal(jax.device_put(q, each), q)


def test_its_sharding_places_another_array_alike():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    q = make((16, 8)).T
    placed = jax.device_put(q, NamedSharding(mesh, P("d", None)))
    assert jax.device_put(q, placed.sharding).qvalue.sharding.spec == P("d", None)
    assert jax.eval_shape(lambda: q).sharding is not None
    assert jax.jit(lambda q: q if q.sharding else None)(q) is not None


def test_nnx_eval_shape_keeps_it_under_a_mesh():
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(make((8, 4)).T)

    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))):
        abstract = nnx.eval_shape(Layer)
    assert isinstance(abstract.kernel[...], QArray)
    assert jax.tree.structure(nnx.state(abstract)) == jax.tree.structure(nnx.state(Layer()))


def test_sums_are_of_the_stored_values():
    q = make((4, 6))
    np.testing.assert_array_equal(q.T.with_azp_adj(0).azp_adj, np.asarray(q.qvalue, np.int32).sum(1, keepdims=True))
    assert q.with_azp_adj((0, 1)).azp_adj.shape == (1, 1)


@pytest.mark.parametrize(
    "leaves, error, message",
    [
        ((np.zeros((2, 3), np.int32), np.ones((2, 1), np.float32)), TypeError, "qvalue has dtype int32, needs"),
        ((np.zeros((2, 3), np.int8), np.ones((2, 1), np.int32)), TypeError, "scale has dtype int32, needs"),
        ((np.zeros((2, 3), np.int8), np.ones(2, np.float32)), ValueError, r"scale has shape \(2,\), needs the rank"),
        ((np.zeros((2, 3), np.int8), np.ones((2, 2), np.float32)), ValueError, r"scale has shape \(2, 2\), needs"),
        (
            (np.zeros((2, 3), np.int8), np.ones((2, 1), np.float32), np.ones((2, 1), np.int8)),
            TypeError,
            "zero_point has dtype int8, needs int32",
        ),
        (
            (np.zeros((2, 3), np.int8), np.ones((2, 1), np.float32), np.ones((1, 1), np.int32)),
            ValueError,
            r"zero_point has shape \(1, 1\), needs that of scale \(2, 1\)",
        ),
        (
            (np.zeros((2, 3), jnp.float8_e4m3fn), np.ones((2, 1), np.float32), np.ones((2, 1), np.int32)),
            TypeError,
            "zero_point was given with qvalue of dtype float8_e4m3fn",
        ),
        (([[1]], 1.0), TypeError, "qvalue is a list, needs an array of int8, float8_e4m3fn"),
        ((np.zeros((2, 3), np.int8), 1.0), TypeError, "scale is a float, needs an array of float32"),
        (
            (np.zeros((2, 3), np.int8), np.ones((2, 1), np.float32), None, np.ones((2, 1), np.float32)),
            TypeError,
            "azp_adj has dtype float32, needs int32",
        ),
        (
            (np.zeros((2, 3), np.int8), np.ones((2, 1), np.float32), None, np.ones((3, 1), np.int32)),
            ValueError,
            r"azp_adj has shape \(3, 1\), needs that of qvalue \(2, 3\)",
        ),
        (
            (np.zeros((2, 6), jnp.int4), np.ones((2, 3), np.int8), None, None, np.ones((2, 2), np.float32)),
            ValueError,
            r"scale_step has shape \(2, 2\), needs that of scale \(2, 3\) with 1 for what shares a step",
        ),
        (
            (np.zeros((2, 6), jnp.int4), np.ones((2, 3), np.int8), None, None, np.ones((2, 1), np.int32)),
            TypeError,
            "scale_step has dtype int32, needs float32, bfloat16, float16",
        ),
        (
            (np.zeros((2, 6), jnp.int4), np.ones((2, 3), np.float32), None, None, np.ones((2, 1), np.float32)),
            TypeError,
            "scale has dtype float32, needs int8",
        ),
        (
            (np.zeros((2, 6), jnp.int4), *np.ones((2, 2, 3), np.int32), None, np.ones((2, 1), np.float32)),
            TypeError,
            "scale has dtype int32, needs int8",
        ),
        (
            (np.zeros((2, 6), np.int8), np.ones((2, 3), np.int8), None, None, np.ones((2, 1), np.float32)),
            TypeError,
            "scale_step was given with qvalue of dtype int8, needs int4",
        ),
    ],
)
def test_leaves_that_do_not_fit_are_refused(leaves, error, message):
    with pytest.raises(error, match=message):
        QArray(*leaves)


@pytest.mark.parametrize(
    "call",
    [
        lambda q: q.transpose(2, 3),
        lambda q: q.transpose(0, 0),
        lambda q: q.transpose(0),
        lambda q: q.swapaxes(0, 2),
        lambda q: q.with_azp_adj(2),
        lambda q: q.with_azp_adj((0, -2)),
    ],
)
def test_axes_that_do_not_fit_are_refused(call):
    with pytest.raises(ValueError, match="ax[ei]s"):
        call(make())
