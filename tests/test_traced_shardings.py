"""What explain says of the devices of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_qmm

ONES = np.ones((8, 512), np.int8)


def mesh(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def exchanged(f, *args):
    """Of each quantized op."""
    return [row.exchanged for row in jax_qmm.explain(f, *args).rows]


def product(a, b):
    return jax_qmm.scaled_mm(a, b, 1.0, 1.0)


def over(c, a, b):
    return jax.lax.cond(c, product, product, a, b)


@pytest.mark.parametrize("f", [product, jax.jit(product), jax.checkpoint(product)])
def test_auto_axes_are_known_of_arguments_and_constants(f):
    auto = mesh(AxisType.Auto)
    a, b = put(auto, ONES, None, "y"), put(auto, ONES, None, "y")
    assert exchanged(f, a, b) == exchanged(lambda a: f(a, b), a) == ["all-reduce over y"]
    assert exchanged(lambda a, b: over(True, a, b), a, b) == ["all-reduce over y"]
    assert exchanged(f, ONES, put(auto, ONES, "x", None)) == [""]
    described = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
    assert exchanged(f, described, described) == ["all-reduce over y"]
    assert exchanged(f, ONES, jnp.asarray(ONES)) == [""]


def test_of_what_is_computed_on_auto_axes_the_compiler_decides():
    auto = mesh(AxisType.Auto)
    a, b = put(auto, ONES, None, "y"), put(auto, ONES, "x", None)
    assert exchanged(lambda a, b: product(-a, b), a, b) == ["the compiler decides"]
    assert exchanged(lambda a: product(-a, ONES), ONES) == [""]
    constraint = lambda a: product(jax.lax.with_sharding_constraint(-a, a_sharding), ONES)
    a_sharding = a.sharding
    assert exchanged(constraint, ONES) == exchanged(jax.jit(constraint), ONES) == ["the compiler decides"]
    assert exchanged(lambda a: product(jax.jit(jnp.negative, out_shardings=a_sharding)(a), ONES), ONES) == [
        "the compiler decides"
    ]
    looped = lambda a, b: jax.lax.scan(lambda a, _: (-a, product(a, b)), a, None, length=2)[1]
    assert exchanged(looped, a, b) == ["the compiler decides"]
    assert exchanged(looped, ONES, ONES) == [""]
    eight = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = put(eight, np.ones((4, 512), np.float32), None, "x")
    w = jax_qmm.quantize(x, jnp.int4, tile_size=128).pack()
    w = w._replace(qvalue=put(eight, w.qvalue, None, "x"))
    known = "gathers w along K over x (whole parts: 4, devices: 8)"
    computed = lambda x, w: jax_qmm.block_scaled_mm(-x, w)
    assert exchanged(computed, x, w) == [f"{known}; the compiler decides the rest"]


def test_types_tell_explicit_axes_of_computed_values_too():
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        a, b = put(explicit, ONES, None, "y"), put(explicit, ONES, "x", None)
        assert exchanged(lambda a, b: product(-a, -b), a, b) == ["all-reduce over y"]
        x = put(explicit, np.ones((8, 512), np.float32), "x", "y")
        assert exchanged(jax_qmm.quantize, x) == ["all-reduce over y"]
        per_row = put(explicit, ONES, "x", None)
        both = lambda a, b: jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_sharding=P("x", None))
        assert exchanged(both, per_row, b) == ["gathers b along N over x (another dimension has this axis)"]


def test_one_axis_for_two_dimensions_is_gathered_somewhere():
    auto = mesh(AxisType.Auto)
    rows = put(auto, ONES, "x", None)
    assert exchanged(product, rows, rows) == ["gathers an operand along N over x (another dimension has this axis)"]
    assert "all-gather" in jax.jit(product).lower(rows, rows).compile().as_text()


def test_devices_inside_a_shard_map_exchange_nothing():
    auto = mesh(AxisType.Auto)
    mapped = jax.shard_map(product, mesh=auto, in_specs=(P("x"), P()), out_specs=P("x"))
    assert exchanged(mapped, put(auto, ONES, "x", None), ONES) == [""]
    partly = jax.shard_map(product, mesh=auto, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    assert exchanged(jax.jit(partly), put(auto, ONES, "x", None), ONES) == ["the compiler decides"]


def test_the_table_has_it_where_there_is_something():
    auto = mesh(AxisType.Auto)
    sharded = put(auto, ONES, None, "y")
    assert "devices exchange" not in str(jax_qmm.explain(product, ONES, ONES))
    header, line = str(jax_qmm.explain(product, sharded, sharded)).splitlines()[:2]
    assert header.endswith("devices exchange") and line.endswith("all-reduce over y")
