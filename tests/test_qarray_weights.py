"""QArrays for float activations: int4, short last blocks, float zero points, offsets, the packed order."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import QArray

INT4, INT8 = np.dtype(ml_dtypes.int4), np.dtype(np.int8)


def integers(shape, qtype, seed=0):
    bounds = ml_dtypes.iinfo(qtype)
    return np.random.default_rng(seed).integers(bounds.min, bounds.max + 1, shape).astype(np.int8)


def weight(shape, qtype=INT4, tile_size=None, zero_point="int", seed=0):
    """A QArray, and what it stands for."""
    rng = np.random.default_rng(seed)
    q, tile = integers(shape, qtype, seed), tile_size or shape[-1] or 1
    blocks = (*shape[:-1], -(-shape[-1] // tile))
    scale = rng.normal(size=blocks).astype(np.float32)
    z = {
        "int": lambda: integers(blocks, qtype, seed + 1).astype(np.int32),
        "float": lambda: rng.normal(size=blocks).astype(np.float32) * 30,
        None: lambda: None,
    }[zero_point]()
    along = lambda leaf: np.repeat(leaf, tile, -1)[..., : shape[-1]].astype(np.float32)
    dense = (q - (0 if z is None else along(z))).astype(np.float32) * along(scale)
    leaves = (jnp.asarray(q.astype(qtype)), jnp.asarray(scale), None if z is None else jnp.asarray(z))
    return QArray(*leaves, tile_size=tile_size), dense


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32))


kinds = st.tuples(st.sampled_from([INT4, INT8]), st.sampled_from(["int", "float", None]))


@hypothesis.given(
    kinds,
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.integers(0, 300),
    st.sampled_from([None, 16, 32, 100]),
)
def test_packing_keeps_all_but_the_order(kind, leading, k, tile_size):
    qtype, zero_point = kind
    q, dense = weight((*leading, k), qtype, tile_size, zero_point, seed=k)
    packed = q.pack()
    assert (packed.shape, packed.dtype, packed.qtype, packed.tile_size) == (q.shape, q.dtype, q.qtype, q.tile_size)
    assert packed.qvalue.dtype == np.uint8 and packed.is_packed and not q.is_packed
    np.testing.assert_array_equal(q.dequantize(), dense)
    np.testing.assert_array_equal(packed.dequantize(), dense)
    np.testing.assert_array_equal(
        packed.mT.dequantize() if len(leading) else packed.dequantize(), dense.swapaxes(-1, -2)
    )
    assert_same(packed.unpack(), q)
    assert packed.pack() is packed and q.unpack() is q
    assert packed.zero_point is None or packed.zero_point.dtype == (np.int8 if zero_point == "int" else np.float32)


def test_the_bytes_are_those_of_a_device():
    q, _ = weight((6, 256), INT4, 64, "int")
    assert q.nbytes == 6 * 128 + 6 * 4 * (4 + 4)
    assert q.pack().nbytes == 6 * 128 + 6 * 4 * (4 + 1)
    assert weight((6, 256), INT8, 64, None)[0].pack().nbytes == 6 * 256 + 6 * 4 * 4
    assert weight((3, 3), INT4, None, None)[0].nbytes == 5 + 3 * 4  # of 9 values, an odd number


@pytest.mark.parametrize(
    "columns, blocks, given, want, tagged",
    [
        (256, 2, None, 128, False),
        (256, 2, 128, 128, False),  # equal blocks: the tag would say nothing, and tell equal arrays apart
        (6, 2, 4, 4, True),  # two blocks of 3 as well, to see by the shapes
        (6, 2, None, 3, False),
        (300, 3, 128, 128, True),
        (100, 1, 128, 100, False),
        (0, 0, 128, 1, False),
    ],
)
def test_the_block_follows_from_the_shapes_or_is_given(columns, blocks, given, want, tagged):
    q = QArray(jnp.ones((2, columns), jnp.int4), jnp.ones((2, blocks)), tile_size=given)
    assert q.tile_size == want and ("tile_size" in repr(q)) == tagged
    assert jax.tree.map(lambda x: x, q).tile_size == want


def test_equal_arrays_have_equal_trees():
    q = QArray(jnp.ones((2, 8), jnp.int4), jnp.ones((2, 2)), tile_size=4)
    assert jax.tree.structure(q) == jax.tree.structure(jax_qmm.quantize(jnp.ones((2, 8)), jnp.int4, tile_size=4))


def test_maps_over_leading_axes_keep_the_tags():
    stack, dense = weight((3, 4, 300), INT4, 128)
    stack = stack.pack().mT
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(stack), dense.swapaxes(1, 2))
    _, scanned = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), None, stack)
    np.testing.assert_array_equal(scanned, dense.swapaxes(1, 2))
    np.testing.assert_array_equal(jax.vmap(lambda q: q.unpack().pack())(stack).dequantize(), dense.swapaxes(1, 2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tile_size", [None, 64, 100])
def test_exports_saves_and_restores(tmp_path, packed, tile_size):
    ocp = pytest.importorskip("orbax.checkpoint")
    serialization = pytest.importorskip("flax.serialization")
    q, dense = weight((4, 300), INT4, tile_size)
    q = (q.pack() if packed else q).T
    exported = jax.export.export(jax.jit(lambda q: (q.dequantize(), q)), platforms=["cpu"])(q)
    got, same = jax.export.deserialize(exported.serialize(vjp_order=0)).call(q)
    np.testing.assert_array_equal(got, dense.T)
    assert_same(same, q)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", {"kernel": q})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", jax.eval_shape(lambda: {"kernel": q}))
    assert_same(restored["kernel"], q)
    leaves = serialization.msgpack_restore(serialization.msgpack_serialize(jax.tree.leaves(q.pack())))
    assert_same(jax.tree.unflatten(jax.tree.structure(q.pack()), leaves), q.pack())


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("qtype", [INT4, INT8])
def test_offsets_of_any_size(qtype, scale_dtype):
    rng = np.random.default_rng(0)
    q = integers((5, 32), qtype)
    scale = rng.normal(size=(5, 2)).astype(scale_dtype)
    offset = rng.normal(size=(5, 2)).astype(np.float32) * np.float32([1e-3, 1, 10, 1e3, 1e6])[:, None]
    made = QArray.from_offset(jnp.asarray(q.astype(qtype)), jnp.asarray(scale), jnp.asarray(offset))
    assert made.dtype == scale_dtype and made.zero_point.dtype == np.float32
    exact = q * np.repeat(scale.astype(np.float64), 16, 1) + np.repeat(offset.astype(np.float64), 16, 1)
    # The zero point, its difference from q and the product are rounded once each, and |q| <= 128.
    bound = 3 * 2.0**-24 * np.repeat(np.abs(offset) + 128 * np.abs(scale.astype(np.float64)), 16, 1)
    assert (np.abs(np.float64(made.dequantize(jnp.float32)) - exact) <= bound).all()
    np.testing.assert_allclose(made.offset(), offset, rtol=2.0**-22)
    assert_same(made.pack().unpack(), made)


def test_constant_blocks_are_exact():
    q = integers((4, 8), INT4)
    scale = np.float32([[0, 1], [0, 0], [1e-38, 0.5], [0, 2]])
    offset = np.float32([[0.1, 0], [-3e38, 1e-30], [7e5, 0], [0, 0]])
    made = QArray.from_offset(jnp.asarray(q.astype(INT4)), scale, offset)
    constant = np.repeat((scale == 0) | (scale == np.float32(1e-38)), 4, 1)
    want = np.where(constant, np.repeat(offset, 4, 1), q * np.repeat(scale, 4, 1))
    np.testing.assert_array_equal(made.dequantize(), want)
    np.testing.assert_array_equal(made.offset()[:2], offset[:2])
    assert QArray(jnp.ones((1, 2), jnp.int4), jnp.ones((1, 1))).offset() is None


def test_constant_blocks_have_gradients():
    q, scale, offset = jnp.int8([[1, 2, 3, 4]]), jnp.float32([[0, 0.5]]), jnp.float32([[2, 3]])
    total = lambda scale, offset: QArray.from_offset(q, scale, offset).dequantize().sum()
    by_scale, by_offset = jax.grad(total, (0, 1))(scale, offset)
    assert by_scale.tolist() == [[0, 7]] and by_offset.tolist() == [[2, 2]]


def test_an_integer_zero_point_has_an_offset():
    q = QArray(jnp.ones((1, 2), jnp.int4), jnp.bfloat16([[0.5]]), jnp.int32([[3]]))
    assert q.offset().tolist() == [[-1.5]] and q.offset().dtype == jnp.float32
    np.testing.assert_array_equal(QArray.from_offset(q.qvalue, q.scale, q.offset()).dequantize(), q.dequantize())


def test_integers_of_numpy_become_int4():
    q = QArray(np.int8([[-8, 7]]), np.ones((1, 1), np.float32), qtype=jnp.int4)
    assert q.qtype == INT4 and q.dequantize().tolist() == [[-8.0, 7.0]]
    assert QArray(np.int64([[100]]), np.ones((1, 1), np.float32), qtype="int8").qtype == INT8
    assert QArray(jnp.int32([[3]]), jnp.ones((1, 1)), qtype=jnp.int4).qtype == INT4


ONE, Q4 = np.ones((1, 1), np.float32), np.ones((1, 6), ml_dtypes.int4)
MERGED8 = QArray(np.ones((1, 6), np.int8), np.ones((1, 3), np.float32)).reshape(1, 2, 3)
MERGED_ONE = QArray(np.ones((1, 6), np.int8), np.ones((1, 2), np.float32)).reshape(1, 2, 1, 3)
MERGED_ROWS = QArray(np.ones(6, np.int8), np.ones(2, np.float32)).reshape(2, 3)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: QArray(np.int8([[-9, 7]]), ONE, qtype=jnp.int4),
            ValueError,
            "qvalue has values from -9 to 7, needs -8 to 7",
        ),
        (
            lambda: QArray(np.uint8([[200]]), ONE, qtype="int8"),
            ValueError,
            "qvalue has values from 200 to 200, needs -128",
        ),
        (
            lambda: QArray(np.float32([[1]]), ONE, qtype=jnp.int4),
            TypeError,
            "qvalue is float32, needs an array of integers",
        ),
        (lambda: QArray([[1]], ONE, qtype=jnp.int4), TypeError, "qvalue is list, needs an array of integers"),
        (lambda: QArray(Q4, ONE, qtype=jnp.int16), TypeError, "qtype is .*, needs int4 or int8"),
        (lambda: QArray(Q4, ONE, tile_size=0), ValueError, "tile_size is 0, needs to be a positive int"),
        (lambda: QArray(Q4, ONE, tile_size=True), ValueError, "tile_size is True, needs to be a positive int"),
        (lambda: QArray(Q4, ONE, tile_size=2.0), ValueError, "tile_size is 2.0, needs to be a positive int"),
        (lambda: QArray(Q4, ONE, tile_size=4), ValueError, r"scale has shape \(1, 1\), .* the 2 blocks of tile_size 4"),
        (lambda: QArray(Q4, np.ones((1, 4), np.float32)), ValueError, r"scale has shape \(1, 4\), needs the rank"),
        (
            lambda: QArray(Q4, ONE, np.int32([[8]])),
            ValueError,
            "zero_point has values from 8 to 8, needs -8 to 7",
        ),
        (
            lambda: jax_qmm.matmul(ONE, QArray(np.ones((1, 1), np.int8), ONE).pack(), scheme=jax_qmm.W8A8()),
            ValueError,
            "is packed, W8A8.* needs it plain: take its .unpack",
        ),
        (lambda: QArray(Q4, ONE, np.int16([[8]])), TypeError, "zero_point has dtype int16, needs int32, float32"),
        (lambda: QArray.from_offset(Q4, ONE, None), TypeError, "offset is None, needs a float array"),
        (lambda: QArray.from_offset(Q4, ONE, np.int32([[1]])), TypeError, "offset is .*, needs a float array"),
        (
            lambda: QArray.from_offset(Q4, ONE, ONE[0]),
            ValueError,
            r"offset has shape \(1,\), needs that of scale \(1, 1\)",
        ),
        (
            lambda: QArray.from_offset(Q4.astype(ml_dtypes.float8_e4m3fn), ONE, ONE),
            TypeError,
            "qvalue has dtype float8_e4m3fn, needs int8 or int4 beside an offset",
        ),
        (
            lambda: jax_qmm.quantize(np.ones((2, 4), np.float32), "fp8").pack(),
            TypeError,
            "can't be packed: it needs int8 or int4",
        ),
        (lambda: QArray(Q4, ONE).pack().with_azp_adj(1), ValueError, "is packed, needs to be plain for sums"),
        (lambda: jax_qmm.quantize(np.ones((2, 6), np.float32)).pack().reshape(3, 4), ValueError, "has no shape"),
        (
            lambda: QArray(Q4, ONE).pack().reshape(1, 2, 3).with_azp_adj(1),
            ValueError,
            "has merged axes, needs to have one for sums",
        ),
        (
            lambda: jax_qmm.einsum("bhd,nhd->bn", np.ones((1, 2, 3), np.float32), MERGED8, scheme=jax_qmm.W8A8()),
            ValueError,
            "has merged axes, W8A8.* needs a weight of its own",
        ),
        (
            lambda: jax_qmm.einsum("bhed,nhed->bn", np.ones((1, 2, 5, 3), np.float32), MERGED_ONE),
            ValueError,
            "has merged axes, needs all of each contracted axis",
        ),
        (
            lambda: jax_qmm.block_scaled_mm(np.ones((2, 3), np.float32), MERGED_ROWS),
            ValueError,
            "w is .* apart in memory",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_axis_in_one_piece_may_be_packed_and_have_blocks():
    q, dense = weight((6, 300), INT4, 128)
    np.testing.assert_array_equal(q.pack().reshape(2, 3, 300).dequantize(), dense.reshape(2, 3, 300))
    np.testing.assert_array_equal(q.pack().T.reshape(300, 3, 2).dequantize(), dense.T.reshape(300, 3, 2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tile_size", [64, 75, None])
@pytest.mark.parametrize("zero_point", [None, "int"])
def test_axes_that_are_merged_in_memory(packed, tile_size, zero_point):
    """What has one axis of 300 for the kernels has axes of 4, 3 and 25 for its user."""
    q, dense = weight((6, 300), INT4, tile_size, zero_point)
    q, dense = q.pack() if packed else q, np.asarray(dense).reshape(6, 4, 3, 25)
    apart = q.reshape(6, 4, 3, 25)
    assert apart.shape == apart.stored_shape == (6, 4, 3, 25) and apart.size == 1800 and apart.nbytes == q.nbytes
    if packed or tile_size:
        assert apart.merged_axes == 3 and apart.values_shape == (6, 1, 1, 300) and apart.tile_size == q.tile_size
        assert "merged=3" in repr(apart)
    kernel = apart.transpose(1, 2, 3, 0)
    mixed = apart.transpose(3, 0, 2, 1)
    for view, order in ((apart, (0, 1, 2, 3)), (kernel, (1, 2, 3, 0)), (mixed, (3, 0, 2, 1))):
        for each in (view, view.unpack(), view.pack(), jax.tree.map(lambda leaf: leaf, view)):
            assert each.shape == dense.transpose(order).shape
            np.testing.assert_array_equal(each.dequantize(), dense.transpose(order))
    assert_same(apart.reshape(6, 300), q)
    assert_same(kernel.reshape(300, 6), q.T)
    np.testing.assert_array_equal(apart.reshape(2, 3, 4, 3, 25).dequantize(), dense.reshape(2, 3, 4, 3, 25))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), kernel)
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(stacked)[1], kernel.dequantize())
    exported = jax.export.export(jax.jit(lambda q: q), platforms=["cpu"])(kernel)
    assert_same(jax.export.deserialize(exported.serialize()).call(kernel), kernel)


@pytest.mark.parametrize("tile_size", [None, 100, 128])
def test_new_axes_of_one_leave_the_last_in_memory_last(tile_size):
    q, dense = weight((6, 300), INT4, tile_size)
    for each in (q, q.pack()):
        got = each.reshape(6, 300, 1, 1)
        assert got.shape == (6, 300, 1, 1) and got.is_packed == each.is_packed
        np.testing.assert_array_equal(got.dequantize(), dense[..., None, None])
        np.testing.assert_array_equal(got.T.reshape(300, 6).dequantize(), dense.T)


@pytest.mark.parametrize("qtype", [INT4, INT8])
@pytest.mark.parametrize("columns", [768, 516])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_sharded_off_the_packed_columns_is_gathered(kind, columns, qtype):
    """Four devices share 6 times 128 columns, or 516 of 640."""
    q, dense = weight((8, columns), qtype, None)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    sharding, x = NamedSharding(mesh, P("x", "y")), np.ones((3, columns), np.float32)
    with jax.set_mesh(mesh):
        put = lambda q: q._replace(qvalue=jax.device_put(q.qvalue, sharding))
        assert_same(jax.jit(lambda q: q.pack())(put(q)), q.pack())
        packed = put(q.pack())
        assert_same(jax.jit(lambda q: q.unpack())(packed), q)
        np.testing.assert_array_equal(jax.jit(lambda q: q.dequantize())(packed), dense)
        gradient = jax.jit(jax.grad(lambda x, w: jax_qmm.block_scaled_mm(x, w).sum()))(x, packed)
    error = np.abs(gradient - dense.sum(0))
    assert (error <= 8 * 2**-23 * np.abs(dense).sum(0)).all()  # sums of 8 rows in float32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x", None), P("x", "y")])
def test_packing_keeps_each_part_on_its_device(kind, spec):
    q, dense = weight((8, 1024), INT4, 64)
    packed = jax.jit(lambda q: q.pack())
    with jax.set_mesh(jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)):
        placed = jax.device_put(q, NamedSharding(jax.sharding.get_mesh(), spec))
        compiled = packed.lower(placed).compile()
        got = compiled(placed)
        assert got.qvalue.sharding.spec == spec and "all-" not in compiled.as_text()
        assert_same(got, q.pack())
        np.testing.assert_array_equal(jax.jit(lambda q: q.dequantize())(got), dense)
