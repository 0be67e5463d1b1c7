"""Models with weights of 4 and 8 bits and float activations: in nnx and linen, mixed, reported, sharded, saved."""

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
from jax_qmm import W4A16, W8A8, W8A16, Rule, linen as qlinen, nnx as qnnx

SCHEMES = [W4A16(64, symmetric=False), W4A16(), W8A16(64), W8A16(None, symmetric=False)]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
X = (8, 256)
# The relative error of a layer's output, of normally distributed weights: the largest of 128 is 2.8 sigma, which is 7
# or 127 steps, and rounding errs by a step / sqrt(12). Norms of 64 outputs vary by a tenth of that.
ERROR = {jnp.dtype("int4"): 2.8 / 7 / 12**0.5, jnp.dtype("int8"): 2.8 / 127 / 12**0.5}


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 384, kernel_init=init, rngs=rngs)
        self.mix = nnx.Einsum("bf,hfd->bhd", (2, 384, 4), (2, 4), kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.mix(self.up(x))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(384, kernel_init=nn.with_partitioning(init, ("model", None)), name="up")(x)
        return nn.DenseGeneral((2, 4), kernel_init=init, name="mix")(x)


def quantized(kind, rules):
    """A function of the input by the quantized model, the kernels, the report, and the float result."""
    if kind == "nnx":
        model = Nnx(nnx.Rngs(0))
        after, report = qnnx.quantize_model(model, rules, sensitivity=[data(*X)])
        return after, (after.up.kernel[...], after.mix.kernel[...]), report, model(data(*X))
    model, variables = Linen(), Linen().init(jax.random.key(0), data(*X))
    after, qvariables, report = qlinen.quantize_model(model, variables, rules, sensitivity=[data(*X)])
    kernels = tuple(nn.unbox(qvariables["params"][name]["kernel"]) for name in ("up", "mix"))
    return functools.partial(after.apply, qvariables), kernels, report, model.apply(variables, data(*X))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@schemes
def test_a_model_with_float_activations(kind, scheme):
    f, kernels, report, want = quantized(kind, [Rule(".*", scheme)])
    x = data(*X)
    expected = ERROR[scheme.dtype]
    error = np.linalg.norm(f(x) - want) / np.linalg.norm(want)
    assert 0.7 * expected < error / 2**0.5 < 1.4 * expected  # of two layers
    assert [str(scheme)] * 2 == [row.scheme for row in report.quantized]
    assert all(0.7 * expected < row.error < 1.4 * expected for row in report.quantized)
    rows = jax_qmm.explain(f, x).rows
    assert [row.op.startswith("block_scaled_mm") and ", packed" in row.op for row in rows] == [True, True]
    for kernel, row in zip(kernels, sorted(report.quantized, key=lambda row: row.path, reverse=True)):
        assert kernel.is_packed and row.bytes_after == kernel.nbytes + 4 * (384 if row.path == "up" else 8)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_rules_mix_schemes(kind):
    f, kernels, report, want = quantized(kind, [Rule("up", W8A8()), Rule(".*", W8A16())])
    assert [kernel.is_packed for kernel in kernels] == [False, True]
    ops = [row.op.split()[0] for row in jax_qmm.explain(f, data(*X)).rows]
    assert ops == ["quantize", "scaled_mm", "block_scaled_mm"]
    assert np.linalg.norm(f(data(*X)) - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@schemes
def test_layers_that_are_quantized_from_the_start(scheme, dtype):
    x = data(*X).astype(dtype)
    options = {"kernel_init": init, "param_dtype": dtype}
    linear = qnnx.QuantLinear(256, 8, scheme=scheme, rngs=nnx.Rngs(0), **options)
    dense = qlinen.QuantDense(8, scheme=scheme, **options)
    variables = dense.init(jax.random.key(0), x)
    want = jax_qmm.matmul(x, linear.kernel[...], scheme=scheme, preferred_element_type=dtype)
    assert linear.kernel[...].is_packed
    for got in (linear(x), dense.apply(variables, x)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)


def test_gradients_reach_the_input_and_the_bias():
    layer = qnnx.QuantLinear(256, 8, scheme=W4A16(), kernel_init=init, rngs=nnx.Rngs(0))
    x, w = data(*X), layer.kernel[...].dequantize()
    gradients = nnx.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, x)
    assert list(nnx.to_pure_dict(gradients[0])) == ["bias"]
    # K = 8 ones times the weights, in float32
    np.testing.assert_allclose(gradients[1], jnp.ones((8, 8)) @ w.T, rtol=0, atol=8 * 2**-23 * abs(w).sum(1).max())


def test_stacked_layers_run_in_a_scan():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return nnx.Linear(256, 256, rngs=rngs)

    layers = stack(nnx.Rngs(0))
    after, report = qnnx.quantize_model(layers, [Rule("", W4A16())])
    assert after.kernel[...].shape == (3, 256, 256) and len(report.quantized) == 1

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    want = data(*X)
    for kernel, bias in zip(after.kernel[...].dequantize(), layers.bias[...]):
        want = want @ kernel + bias
    np.testing.assert_allclose(run(data(*X), after), want, rtol=0, atol=1e-4 * abs(want).max())


def test_layers_that_gain_nothing_are_left_with_the_reason():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(1000, 256, rngs=rngs)
            self.few = nnx.Linear(16, 256, rngs=rngs)
            self.enough = nnx.Linear(32, 256, rngs=rngs)

    _, report = qnnx.quantize_model(Model(nnx.Rngs(0)), [Rule(".*", W4A16())])
    reasons = {row.path: row.reason for row in report.skipped}
    assert "looked up" in reasons["table"]
    assert reasons["few"] == f"too small to gain: its kernel of {16 * 256 * 4} bytes would take {256 * (64 + 4)}"
    assert [row.path for row in report.quantized] == ["enough"]
    _, _, report = qlinen.quantize_model(
        nn.Dense(256), nn.Dense(256).init(jax.random.key(0), data(2, 16)), [Rule("", W4A16())]
    )
    assert "too small to gain" in report.skipped[0].reason


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
    np.testing.assert_array_equal(jax.jit(model.apply)(restored, data(*X)), want)
    exported = jax.export.export(jax.jit(model.apply), platforms=["cpu"])(plain, data(*X))
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(plain, data(*X)), want)

    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = nn.unbox(jax.device_put(variables, nn.get_sharding(variables, mesh)))
    kernel = sharded["params"]["up"]["kernel"]
    blocks = None if scheme.tile_size is None else "model"
    assert (kernel.qvalue.sharding.spec, kernel.scale.sharding.spec) == (P(None, "model"), P(None, blocks))
    program = jax.jit(model.apply).lower(sharded, data(*X)).compile().as_text()
    assert "all-reduce" in program and "all-gather" not in program
    # Sums of K = 256 in another order
    np.testing.assert_allclose(jax.jit(model.apply)(sharded, data(*X)), want, rtol=0, atol=2**-15 * abs(want).max())


def test_nnx_restores_on_a_mesh(tmp_path):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def make():
        linear = nnx.Linear(256, 64, kernel_init=nnx.with_partitioning(init, ("model", None)), rngs=nnx.Rngs(0))
        return qnnx.QuantLinear.from_linear(linear, W4A16(symmetric=False))

    with jax.set_mesh(mesh):
        layer = make()
    state = nnx.state(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
        checkpointer.wait_until_finished()
        graph, target = nnx.get_abstract_model(make, mesh)
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "model", target))
    kernel = restored.kernel[...]
    for leaf in jax.tree.leaves(kernel):
        assert leaf.sharding == NamedSharding(mesh, P(None, "model"))
    np.testing.assert_array_equal(kernel.dequantize(), layer.kernel[...].dequantize())
    want = layer(data(*X))
    np.testing.assert_allclose(restored(data(*X)), want, rtol=0, atol=2**-15 * abs(want).max())


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_an_attention_with_heads_of_any_size(kind, tmp_path):
    """The output contracts heads and features, 4 times 48: blocks and packed columns are of all 192."""
    x, rules = data(2, 5, 192), [Rule(".*", W4A16(64, symmetric=False))]
    options = {"num_heads": 4, "kernel_init": init}
    if kind == "nnx":
        model = nnx.MultiHeadAttention(in_features=192, decode=False, rngs=nnx.Rngs(0), **options)
        after, report = qnnx.quantize_model(model, rules)
        graph, state = nnx.split(after)
        kernels = {name: getattr(after, name).kernel[...] for name in ("query", "key", "value", "out")}
        for name, kernel in kernels.items():
            getattr(model, name).kernel = nnx.Param(kernel.dequantize())
        run, dense = lambda state, x: nnx.merge(graph, state)(x), model(x)
    else:
        model = nn.MultiHeadDotProductAttention(**options)
        variables = model.init(jax.random.key(0), x)
        after, state, report = qlinen.quantize_model(model, variables, rules)
        kernels = {name: layer["kernel"] for name, layer in state["params"].items()}
        floats = jax.tree.map(lambda q: q.dequantize(), kernels, is_leaf=lambda q: isinstance(q, jax_qmm.QArray))
        for name, kernel in floats.items():
            variables["params"][name]["kernel"] = kernel
        run, dense = after.apply, model.apply(variables, x)
    assert [row.runs_on for row in report.quantized] == ["reference: platform cpu has no kernels"] * 4
    assert kernels["out"].shape == (4, 48, 192) and kernels["out"].scale.shape == (192, 1, 3)
    rows = jax_qmm.explain(run, state, x).rows
    assert [(row.op, row.count) for row in rows] == [("block_scaled_mm (blocks of 64, packed, zero_point, bias)", 4)]
    want = jax.jit(run)(state, x)
    np.testing.assert_allclose(want, dense, rtol=0, atol=2**-14 * abs(dense).max())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", jax.eval_shape(lambda: state))
    np.testing.assert_array_equal(jax.jit(run)(restored, x), want)
    gradient = jax.grad(lambda x: run(state, x).sum())(x)
    assert gradient.shape == x.shape and np.isfinite(gradient).all()
