import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm.models.leaf_specs import abstract_leaves, leaf_shardings, leaf_specs
from jax_qmm.ops.quantize import quantize
from jax_qmm.schemes import W8A8


def test_each_leaf_gets_the_axes_that_it_has():
    q = W8A8(symmetric=False).quantize_weight(jnp.ones((2, 4, 6, 8)), (-3,))  # stored (2, 6, 8, 4)
    specs = leaf_specs(q, P("layers", "in", ("out", "more")))
    assert specs.qvalue == P("layers", ("out", "more"), None, "in")
    assert specs.scale == specs.azp_adj == P("layers", ("out", "more"), None, None)
    assert specs.zero_point is None


def mesh(devices):
    return jax.make_mesh((devices,), ("k",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize(
    "devices, size, tile, packed, values, blocks",
    [
        (2, 384, 64, False, "k", "k"),
        (2, 384, 192, False, "k", "k"),
        (4, 384, 192, False, "k", None),  # two blocks
        (4, 384, None, False, "k", None),
        (2, 512, 64, True, "k", "k"),
        (4, 384, 64, True, None, None),  # six blocks, but three times 128 columns
        (3, 384, None, True, "k", None),
        (2, 384, None, True, None, None),
        (2, 384, 256, True, None, None),  # a short last block
    ],
)
def test_the_last_axis_is_sharded_at_boundaries_of_blocks_and_of_128_columns(
    devices, size, tile, packed, values, blocks
):
    q = quantize(jnp.ones((4, size)), jnp.int4, tile_size=tile)
    q = q.pack() if packed else q
    sharding = NamedSharding(mesh(devices), P(None, "k"))
    specs = jax.tree.map(lambda each: each.spec, leaf_shardings(q, sharding))
    assert (specs.qvalue, specs.scale) == (P(None, values), P(None, blocks))
    with jax.set_mesh(mesh(devices)):
        assert jax.tree.leaves(leaf_specs(q, P(None, "k"))) == jax.tree.leaves(specs)
    jax.device_put(q, leaf_shardings(q, sharding))


@pytest.mark.parametrize(
    "devices, heads, spec, want",
    [
        (4, 8, P("k"), "k"),  # two heads of 64 each
        (8, 8, P("k"), None),  # half of 128 columns
        (2, 3, P("k"), None),  # one and a half heads
        (4, 8, P(None, "k"), None),  # a part of each head
        (2, 8, P("k", "other"), None),
    ],
)
def test_axes_that_are_merged_are_sharded_as_the_first(devices, heads, spec, want):
    q = jax_qmm.W4A16(64).quantize_weight(jnp.ones((heads, 64 if heads == 8 else 256, 4)), (-3, -2))
    specs = jax.tree.map(lambda each: each.spec, leaf_shardings(q, NamedSharding(mesh_of(devices), spec)))
    assert (specs.qvalue, specs.scale) == (P(None, None, want),) * 2


def mesh_of(devices):
    return jax.make_mesh((devices, 1), ("k", "other"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_without_a_mesh_whole_blocks_are_sharded():
    q = jax_qmm.W4A16().quantize_weight(jnp.ones((384, 4)), (-2,))
    assert jax.tree.leaves(leaf_specs(q, P("k"))) == [P(None, "k")] * 2
    q = jax_qmm.W4A16().quantize_weight(jnp.ones((400, 4)), (-2,))
    assert jax.tree.leaves(leaf_specs(q, P("k"))) == [P(None, None)] * 2


@pytest.mark.parametrize("abstract", [False, True])
def test_shardings_and_shapes(abstract):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    make = lambda: W8A8().quantize_weight(jnp.ones((4, 8)), (-2,))
    q = jax.eval_shape(make) if abstract else make()
    sharding = NamedSharding(mesh, P(None, "x"))
    assert leaf_shardings(q, sharding).scale == NamedSharding(mesh, P("x", None))
    shapes = abstract_leaves(q, sharding)
    assert (shapes.qvalue.shape, shapes.qvalue.sharding) == ((8, 4), NamedSharding(mesh, P("x", None)))
    assert abstract_leaves(q, None).qvalue.sharding is None
