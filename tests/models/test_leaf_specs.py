import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_qmm.models.leaf_specs import abstract_leaves, leaf_shardings, leaf_specs
from jax_qmm.ops.quantize import quantize
from jax_qmm.schemes import W8A8


def test_each_leaf_gets_the_axes_that_it_has():
    q = W8A8(symmetric=False).quantize_weight(jnp.ones((2, 4, 6, 8)), (-3,))  # stored (2, 6, 8, 4)
    specs = leaf_specs(q, P("layers", "in", ("out", "more")))
    assert specs.qvalue == P("layers", ("out", "more"), None, "in")
    assert specs.scale == specs.azp_adj == P("layers", ("out", "more"), None, None)
    assert specs.zero_point is None


def test_blocks_of_scales_are_replicated():
    specs = leaf_specs(quantize(jnp.ones((4, 8)), tile_size=4), P("x", "y"))
    assert (specs.qvalue, specs.scale) == (P("x", "y"), P("x", None))


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
