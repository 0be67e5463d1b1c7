"""Models with 8 bits in blocks on both sides: in nnx and linen, reported, explained, sharded, saved and exported."""

import collections
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from random_arrays import data, init

import jax_qmm
from jax_qmm import W4A8, W8A8, Rule, linen as qlinen, nnx as qnnx

SCHEMES = [
    W8A8(tile_size=64),
    W8A8(tile_size=64, symmetric=False, weight_symmetric=False),
    W8A8("fp8", tile_size=128, weight_tile=(128, 128)),
]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
X = (8, 256)
# The relative error of one normally distributed side: of int8 the largest of 64 is 2.4 sigma, which is 127 steps, and
# rounding errs by a step / sqrt(12); e4m3 errs by 2**-4 / sqrt(3) of the power of two below, 3/4 of a value on average.
ERROR = {jnp.dtype("int8"): 2.4 / 127 / 12**0.5, jnp.dtype("float8_e4m3fn"): 2.0**-4 / 3**0.5 * 0.75}


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 384, kernel_init=init, rngs=rngs)
        self.heads = nnx.LinearGeneral(384, (4, 64), kernel_init=init, rngs=rngs)
        self.out = nnx.LinearGeneral((4, 64), 16, axis=(-2, -1), kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.out(self.heads(self.up(x)))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(384, kernel_init=nn.with_partitioning(init, ("model", None)), name="up")(x)
        x = nn.DenseGeneral((4, 64), kernel_init=init, name="heads")(x)
        return nn.DenseGeneral(16, axis=(-2, -1), kernel_init=init, name="out")(x)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@schemes
def test_a_model_with_blocks_on_both_sides(kind, scheme):
    rules = [Rule(".*", scheme)]
    if kind == "nnx":
        model = Nnx(nnx.Rngs(0))
        f, report = qnnx.quantize_model(model, rules, sensitivity=[data(*X)])
        want = model(data(*X))
    else:
        model, variables = Linen(), Linen().init(jax.random.key(0), data(*X))
        after, qvariables, report = qlinen.quantize_model(model, variables, rules, sensitivity=[data(*X)])
        f, want = functools.partial(after.apply, qvariables), model.apply(variables, data(*X))
    error = np.linalg.norm(f(data(*X)) - want) / np.linalg.norm(want)
    expected = ERROR[scheme.dtype] * 2**0.5  # of two sides
    assert 0.6 * expected < error / 3**0.5 < 1.5 * expected  # of three layers
    assert [row.scheme for row in report.quantized] == [str(scheme)] * 3 and not report.skipped
    assert all(0.6 * expected < row.error < 1.5 * expected for row in report.quantized)
    products = [row.op for row in jax_qmm.explain(f, data(*X)).rows if not row.op.startswith("quantize")]
    # The last contracts heads of 64 features, within which its blocks lie.
    tiles = [scheme.tile_size, scheme.tile_size, 64]
    assert [op.split(",")[0].rstrip(")") for op in products] == [f"block_scaled_mm (blocks of {tile}" for tile in tiles]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@schemes
def test_layers_that_are_quantized_from_the_start(scheme, dtype):
    x = data(*X).astype(dtype)
    options = {"kernel_init": init, "param_dtype": dtype}
    linear = qnnx.QuantLinear(256, 8, scheme=scheme, rngs=nnx.Rngs(0), **options)
    dense = qlinen.QuantDense(8, scheme=scheme, **options)
    variables = dense.init(jax.random.key(0), x)
    want = jax_qmm.matmul(x, linear.kernel[...], scheme=scheme, preferred_element_type=dtype)
    for got in (linear(x), dense.apply(variables, x)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)


@schemes
def test_gradients_reach_the_input_and_the_bias(scheme):
    layer = qnnx.QuantLinear(256, 8, scheme=scheme, kernel_init=init, rngs=nnx.Rngs(0))
    w = layer.kernel[...].dequantize()
    gradients = nnx.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, data(*X))
    assert list(nnx.to_pure_dict(gradients[0])) == ["bias"]
    # K = 8 ones times the weights, in float32
    np.testing.assert_allclose(gradients[1], jnp.ones((8, 8)) @ w.T, rtol=0, atol=8 * 2**-23 * abs(w).sum(1).max())


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_4_bit_weights_and_8_bit_activations(kind, dtype):
    scheme, x = W4A8(64, symmetric=False, activation_dtype=dtype), data(*X)
    if kind == "nnx":
        model = Nnx(nnx.Rngs(0))
        f, report = qnnx.quantize_model(model, [Rule(".*", scheme)], sensitivity=[x])
        want, kernel = model(x), f.up.kernel[...]
    else:
        model, variables = Linen(), Linen().init(jax.random.key(0), x)
        after, qvariables, report = qlinen.quantize_model(model, variables, [Rule(".*", scheme)], sensitivity=[x])
        plain = nn.unbox(qvariables)
        f, want, kernel = (
            functools.partial(after.apply, plain),
            model.apply(variables, x),
            plain["params"]["up"]["kernel"],
        )
        exported = jax.export.export(jax.jit(after.apply), platforms=["cpu"])(plain, x)
        got = jax.jit(after.apply)(plain, x)
        np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(plain, x), got)
    assert [row.scheme for row in report.quantized] == [str(scheme)] * 3
    # Of 64 values the range is 4.7 sigma, which is 15 steps; the activations add little to that.
    expected = 4.7 / 15 / 12**0.5
    assert all(0.8 * expected < row.error < 1.3 * expected for row in report.quantized)
    assert np.linalg.norm(f(x) - want) / np.linalg.norm(want) < 1.3 * expected * 3**0.5
    calls = collections.Counter()
    for row in jax_qmm.explain(f, x).rows:
        calls[row.op.split()[0]] += row.count
    by = {"expanded_mm": 3} if dtype == "int8" else {"block_scaled_mm": 3}
    assert calls == {"quantize": 3, **by}
    # Zero points are int8; beside int8 scales are too, with a step for each channel.
    scales = 384 * (4 * (1 + 1) + 4) if dtype == "int8" else 384 * 4 * (4 + 1)
    assert kernel.qtype == jnp.int4 and kernel.nbytes == 256 * 384 // 2 + scales


def test_stacked_layers_run_in_a_scan():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return nnx.Linear(256, 256, kernel_init=init, rngs=rngs)

    scheme = W8A8("fp8", tile_size=128, weight_tile=(128, 128))
    after, report = qnnx.quantize_model(stack(nnx.Rngs(0)), [Rule("", scheme)])
    assert after.kernel[...].scale.shape == (3, 2, 2) and len(report.quantized) == 1

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    want = data(*X)
    for i in range(3):
        kernel = jax.tree.map(lambda leaf, i=i: leaf[i], after.kernel[...])
        want = jax_qmm.matmul(want, kernel, scheme=scheme, bias=after.bias[...][i])
    # Fused otherwise, float32 may differ in its last bits, which moves some values of the next layers by a step.
    assert np.linalg.norm(run(data(*X), after) - want) <= ERROR[scheme.dtype] * np.linalg.norm(want)


@schemes
def test_linen_saves_restores_exports_and_shards(scheme, tmp_path):
    model, variables = Linen(), Linen().init(jax.random.key(0), data(*X))
    model, variables, _ = qlinen.quantize_model(model, variables, [Rule(".*", scheme)])
    plain = nn.unbox(variables)
    want = jax.jit(model.apply)(plain, data(*X))
    restored = flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, plain), flax.serialization.to_bytes(plain))
    np.testing.assert_array_equal(jax.jit(model.apply)(restored, data(*X)), want)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", plain)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", jax.eval_shape(lambda: plain))
    assert jax.tree.structure(restored) == jax.tree.structure(plain)
    exported = jax.export.export(jax.jit(model.apply), platforms=["cpu"])(plain, data(*X))
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(plain, data(*X)), want)

    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = nn.unbox(jax.device_put(variables, nn.get_sharding(variables, mesh)))
    kernel = sharded["params"]["up"]["kernel"]
    assert kernel.qvalue.sharding.spec == kernel.scale.sharding.spec == P(None, "model")
    program = jax.jit(model.apply).lower(sharded, data(*X)).compile().as_text()
    assert program.count(" all-reduce(") == 1 and "all-gather" not in program
    # Sums of K = 256 in another order move some values of the next layers by a step.
    got = jax.jit(model.apply)(sharded, data(*X))
    assert np.linalg.norm(got - want) <= ERROR[scheme.dtype] * np.linalg.norm(want)


def test_nnx_restores_on_a_mesh(tmp_path):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def make():
        linear = nnx.Linear(256, 64, kernel_init=nnx.with_partitioning(init, ("model", None)), rngs=nnx.Rngs(0))
        return qnnx.QuantLinear.from_linear(linear, W8A8(tile_size=64, symmetric=False))

    with jax.set_mesh(mesh):
        layer = make()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(layer))
        checkpointer.wait_until_finished()
        graph, target = nnx.get_abstract_model(make, mesh)
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "model", target))
    kernel = restored.kernel[...]
    assert kernel.azp_adj.shape == kernel.scale.shape  # the sums of the blocks go with them
    for leaf in jax.tree.leaves(kernel):
        assert leaf.sharding == NamedSharding(mesh, P(None, "model"))
    want = layer(data(*X))
    np.testing.assert_allclose(restored(data(*X)), want, rtol=0, atol=2**-15 * abs(want).max())
