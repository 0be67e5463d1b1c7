"""Models whose weights have zero points: in nnx and linen, calibrated, reported, sharded, saved."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import PartitionSpec as P
from random_arrays import data

import jax_qmm
from jax_qmm import W8A8, Rule, linen as qlinen, nnx as qnnx

SCHEMES = [
    W8A8(weight_symmetric=False),
    W8A8(symmetric=False, weight_symmetric=False),
    W8A8(activation="per_tensor", weight_symmetric=False),
    W8A8(activation="per_tensor", symmetric=False, weight_symmetric=False),
]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def init(key, shape, dtype):
    """Far from centered."""
    return data(*shape, seed=len(shape)) / 4 + 0.5


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 24, kernel_init=init, rngs=rngs)
        self.mix = nnx.Einsum("bf,hfd->bhd", (2, 24, 4), (2, 4), kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.mix(nnx.relu(self.up(x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(24, kernel_init=nn.with_partitioning(init, (None, "model")), name="up")(x))
        return nn.DenseGeneral((2, 4), kernel_init=init, name="mix")(x)


def quantized(kind, scheme):
    """A function of the input by the quantized model, the kernel of `up`, the report, and the float result."""
    options = {"calibration": [data(8, 16)]} if scheme.takes_calibration else {}
    options["sensitivity"] = [data(8, 16)]
    if kind == "nnx":
        model = Nnx(nnx.Rngs(0))
        after, report = qnnx.quantize_model(model, [Rule(".*", scheme)], **options)
        return after, after.up.kernel[...], report, model(data(8, 16))
    model, variables = Linen(), Linen().init(jax.random.key(0), data(8, 16))
    after, qvariables, report = qlinen.quantize_model(model, variables, [Rule(".*", scheme)], **options)
    kernel = nn.unbox(qvariables["params"]["up"]["kernel"])
    return functools.partial(after.apply, qvariables), kernel, report, model.apply(variables, data(8, 16))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@schemes
def test_a_model_with_zero_points_in_its_weights(kind, scheme):
    f, kernel, report, want = quantized(kind, scheme)
    assert kernel.zero_point.shape == kernel.scale.shape == (24, 1) and kernel.shape == (16, 24)
    assert (kernel.azp_adj is None) == scheme.symmetric
    assert len(report.quantized) == 2 and all("weights asymmetric" in str(row) for row in report.quantized)
    assert "weights asymmetric" in str(report)
    error = np.linalg.norm(f(data(8, 16)) - want) / np.linalg.norm(want)
    assert 0 < error < 0.02
    assert max(row.error for row in report.quantized) < 0.02
    rows = [row for row in jax_qmm.explain(f, data(8, 16)).rows if row.op.startswith("scaled_mm")]
    assert len(rows) == 2
    assert all(("sums_a, azp_b" in row.op) == (not scheme.symmetric) for row in rows)


@schemes
def test_linen_saves_restores_and_shards_the_zero_points(scheme):
    model, variables = Linen(), Linen().init(jax.random.key(0), data(8, 16))
    model, variables, _ = qlinen.quantize_model(model, variables, [Rule("up", scheme)])
    state = flax.serialization.to_bytes(nn.unbox(variables))
    target = jax.tree.map(jnp.zeros_like, nn.unbox(variables))
    restored = flax.serialization.from_bytes(target, state)
    np.testing.assert_array_equal(model.apply(restored, data(8, 16)), model.apply(variables, data(8, 16)))
    spec = nn.unbox(nn.get_partition_spec(variables))["params"]["up"]["kernel"]
    assert spec.zero_point == spec.scale == P("model", None) and spec.qvalue == P("model", None)


@schemes
def test_nnx_keeps_the_zero_points_in_its_state_and_its_shards(scheme):
    model, _ = qnnx.quantize_model(Nnx(nnx.Rngs(0)), [Rule("up", scheme)])
    graph, state = nnx.split(model)
    again = nnx.merge(graph, jax.tree.map(jnp.array, state))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(again, data(8, 16)), model(data(8, 16)))
    with jax.set_mesh(jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        linear = nnx.Linear(16, 24, kernel_init=nnx.with_partitioning(init, (None, "model")), rngs=nnx.Rngs(0))
        layer = qnnx.QuantLinear.from_linear(linear, scheme)
    assert tuple(layer.kernel[...].zero_point.sharding.spec)[:1] == ("model",)
    specs = jax.tree.leaves(nnx.get_partition_spec(nnx.state(layer))["kernel"], is_leaf=lambda x: isinstance(x, P))
    assert specs == [P("model", None)] * (3 + (not scheme.symmetric))


@schemes
def test_export_of_a_function_of_linen_variables(scheme):
    model, variables = Linen(), Linen().init(jax.random.key(0), data(8, 16))
    model, variables, _ = qlinen.quantize_model(model, nn.unbox(variables), [Rule(".*", scheme)])
    exported = jax.export.export(jax.jit(model.apply), platforms=["cpu"])(variables, data(8, 16))
    call = jax.export.deserialize(exported.serialize()).call
    np.testing.assert_array_equal(call(variables, data(8, 16)), jax.jit(model.apply)(variables, data(8, 16)))
