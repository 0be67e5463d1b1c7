import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from random_arrays import RANDOM, data, init

from jax_qmm import nnx as qnnx
from jax_qmm.models import layer_kinds
from jax_qmm.ops.dot_general import dot_general
from jax_qmm.ops.quantize import quantize
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W8A8, Rule

STATIC = W8A8(activation="per_tensor")
LAST = (((1,), (0,)), ((), ()))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 16, embedding_init=init, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs, **RANDOM)
        up = nnx.Linear(16, 32, rngs=rngs, **RANDOM)
        self.mlp = nnx.List([up, nnx.Linear(32, 16, use_bias=False, kernel_init=init, rngs=rngs)])
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs, **RANDOM)
        self.heads = nnx.Einsum("...ta,hab->...thb", (2, 16, 8), (2, 8), rngs=rngs, **RANDOM)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.own = nnx.Param(data(16, 16) / 4)
        self.unused = nnx.Linear(16, 4, rngs=rngs, **RANDOM)

    def __call__(self, ids, scale=1.0):
        x = self.embed(ids) * scale
        x = self.norm(x + self.attn(x))
        x = x + self.mlp[1](nnx.relu(self.mlp[0](x)))
        return self.heads(self.conv(x) @ self.own[...])


IDS = jnp.arange(10).reshape(2, 5)
QUANTIZED = ["attn.key", "attn.out", "attn.query", "attn.value", "conv", "heads", "mlp.0", "mlp.1", "unused"]


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


def test_report_and_state(model):
    rules = [Rule("mlp.[5-9]", W8A8()), Rule(".*", W8A8()), Rule("attn.*", STATIC)]
    quantized, report = qnnx.quantize_model(model, iter(rules))
    assert [row.path for row in report.quantized] == QUANTIZED
    assert {row.path: (row.op, row.reason) for row in report.skipped} == {
        "embed": ("Embed", layer_kinds.TABLE_OR_HEAD),
        "": ("Model", layer_kinds.by_hand({"own": model.own})),
    }
    assert [rule.path for rule in report.unused_rules] == ["mlp.[5-9]", "attn.*"]
    row = next(row for row in report.rows if row.path == "mlp.0")
    # 16 x 32 bytes, 32 float32 scales and 32 float32 biases
    assert (row.op, row.scheme, row.bytes_before, row.bytes_after) == ("Linear", "int8, per_token", 2176, 768)
    assert row.runs_on == "reference: platform cpu has no kernels"

    floats = {
        str(path): leaf
        for path, leaf in jax.tree.leaves_with_path(nnx.state(quantized, nnx.Param))
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 1 and 1 not in leaf.shape
    }
    assert sum(leaf.nbytes for leaf in floats.values()) == sum(
        x[...].nbytes
        for x in (
            model.embed.embedding,
            model.own,
            model.attn.query.bias,
            model.attn.key.bias,
            model.attn.value.bias,
            model.heads.bias,
        )
    )
    assert report.total_after == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(quantized)))
    assert quantized.attn.query.kernel[...].qvalue.shape == (2, 8, 16)  # the contracted axis last
    assert quantized.attn.out.kernel[...].qvalue.shape == (16, 2, 8)


def test_model_given_stays_as_it_is(model):
    before = jax.tree.leaves_with_path(nnx.state(model))
    graph = nnx.split(model)[0]
    quantized, _ = qnnx.quantize_model(model, [Rule(".*", W8A8())])
    after = jax.tree.leaves_with_path(nnx.state(model))
    assert [path for path, _ in before] == [path for path, _ in after]
    assert all(old is new for (_, old), (_, new) in zip(before, after))
    assert nnx.split(model)[0] == graph
    assert quantized.embed.embedding[...] is model.embed.embedding[...]  # not copied


@pytest.mark.parametrize("scheme", [W8A8(symmetric=False), W8A8("float8_e4m3fn")], ids=str)
def test_model_runs_under_jit(model, scheme):
    quantized, _ = qnnx.quantize_model(model, [Rule(".*", scheme)])
    want = model(IDS)
    got = nnx.jit(lambda model, ids: model(ids))(quantized, IDS)
    # Seven layers in a row that each add an error of about 1/127 (int8) or 1/16 (fp8 has 4 bits) of their
    # output, in quadrature.
    step = 1 / 16 if scheme.dtype == jnp.float8_e4m3fn else 1 / 127
    error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
    assert 0 < error < np.sqrt(7) * step
    assert got.dtype == want.dtype


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.float16},
        {"param_dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        {"preferred_element_type": jnp.bfloat16},
    ],
    ids=str,
)
def test_output_dtype_is_that_of_the_float_layer(x_dtype, options):
    x = data(3, 8).astype(x_dtype)
    for make, use_bias in itertools.product((nnx.Linear, nnx.LinearGeneral), (True, False)):
        layer = make(8, 6, rngs=nnx.Rngs(0), use_bias=use_bias, **options)
        quantized, _ = qnnx.quantize_model(layer, [Rule("", W8A8())])
        want, got = (jax.eval_shape(lambda x, f=f: f(x), x) for f in (layer, quantized))
        assert (want.shape, want.dtype) == (got.shape, got.dtype)


LAYERS = {
    "Linear without bias": (functools.partial(nnx.Linear, 8, 6, use_bias=False), (3, 2, 8)),
    "LinearGeneral": (functools.partial(nnx.LinearGeneral, (2, 8), (5, 3), axis=(1, -1)), (4, 2, 8)),
    "LinearGeneral batched": (functools.partial(nnx.LinearGeneral, 8, (5, 3), batch_axis={0: 4}), (4, 2, 8)),
    "Einsum": (functools.partial(nnx.Einsum, "nta,hab->nthb", (4, 8, 3), (4, 3)), (2, 5, 8)),
    "Einsum out of order": (functools.partial(nnx.Einsum, "n...a,hba->bn...h", (4, 3, 8), (3, 4)), (2, 5, 8)),
    "Einsum of experts": (functools.partial(nnx.Einsum, "eta,eab->etb", (4, 8, 3)), (4, 5, 8)),
    "LoRALinear": (functools.partial(nnx.LoRALinear, 8, 6, lora_rank=2, b_initializer=init), (3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_their_dequantized_selves(name):
    make, shape = LAYERS[name]
    layer = make(rngs=nnx.Rngs(0), **RANDOM)
    quantized, report = qnnx.quantize_model(layer, [Rule("", W8A8())])
    assert [row.path for row in report.quantized] == [""]
    # Integers below 128 with a 127 in each row: quantized exactly, with a scale of 1.
    x = jnp.round(data(*shape) * 30).at[..., 0].set(127)
    dequantized = nnx.clone(layer)
    dequantized.kernel = nnx.Param(quantized.kernel[...].dequantize())
    # Sums of 16 products of float32, each with a few roundings.
    np.testing.assert_allclose(quantized(x), dequantized(x), rtol=32 * 2**-24, atol=32 * 2**-24 * 127 * 16)


@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration(model, symmetric):
    scheme = W8A8(activation="per_tensor", symmetric=symmetric)
    batches = [(IDS, 1.0), {"ids": IDS, "scale": 3.0}]
    rules = [Rule("heads", W8A8()), Rule("mlp.0|unused", scheme)]
    quantized, report = qnnx.quantize_model(model, rules, calibration=batches)
    seen, probe = [], nnx.clone(model)
    probe.mlp[0].promote_dtype = lambda args, dtype: seen.append(args[0]) or args
    probe(IDS), probe(IDS, scale=3.0)
    want = quantize(jnp.stack(seen), axis=None, symmetric=symmetric)
    product = quantized.mlp[0].dot_general
    np.testing.assert_array_equal(product.scale[...], want.scale.reshape(()))
    assert (product.zero_point is None) == symmetric
    if not symmetric:
        np.testing.assert_array_equal(product.zero_point[...], want.zero_point.reshape(()))
    static = dataclasses.replace(
        scheme,
        activation_scale=product.scale[...],
        activation_zero_point=None if symmetric else product.zero_point[...],
    )
    x = data(3, 16)
    kernel, bias = quantized.mlp[0].kernel[...], quantized.mlp[0].bias[...]
    np.testing.assert_array_equal(quantized.mlp[0](x), dot_general(x, kernel, LAST, scheme=static, bias=bias))
    # Arguments of a jitted function, not constants in it.
    state = nnx.state(quantized, qnnx.ActivationScale)
    assert len(jax.tree.leaves(state)) == (1 if symmetric else 2)
    rows = {row.path: row for row in report.rows}
    assert rows["mlp.0"].scheme == "int8, per_tensor static" + ("" if symmetric else ", asymmetric")
    assert "no calibration batch reached it" in rows["unused"].reason
    assert rows["heads"].scheme == "int8, per_token"


def test_calibration_shows_progress_and_takes_a_forward(model, capsys):
    calls = []
    rules = [Rule("attn.*", STATIC)]

    def forward(model, batch):
        calls.append(batch)
        return model(batch["tokens"])

    qnnx.quantize_model(model, rules, calibration=({"tokens": IDS} for _ in range(2)), forward=forward)
    assert len(calls) == 2
    assert "calibrating: 2batch" in capsys.readouterr().err


def test_calibration_errors(model):
    with pytest.raises(ValueError, match="none of the layers"):
        qnnx.quantize_model(model, [Rule(".*", W8A8())], calibration=[IDS])
    with pytest.raises(ValueError, match="no batch"):
        qnnx.quantize_model(model, [Rule(".*", STATIC)], calibration=[])
    with pytest.raises(ValueError, match="inputs of attn.key that are not finite"):
        qnnx.quantize_model(model, [Rule("attn.key", STATIC)], calibration=[(IDS, jnp.nan)])


class Wrapped(nnx.Module):
    def __init__(self, wrap):
        self.layer, self.wrap = nnx.Linear(8, 6, rngs=nnx.Rngs(0), **RANDOM), wrap

    def __call__(self, x):
        return self.wrap(lambda layer, x: layer(x))(self.layer, x)


@pytest.mark.parametrize("wrap", [nnx.remat, nnx.jit])
def test_layers_are_watched_under_the_transformations_of_nnx(wrap):
    batches = {"calibration": [data(3, 8)], "sensitivity": [data(3, 8)]}
    _, report = qnnx.quantize_model(Wrapped(wrap), [Rule("layer", STATIC)], **batches)
    assert report.rows[0].scheme == "int8, per_tensor static" and 0 < report.rows[0].error < 0.05


class Stack(nnx.Module):
    def __init__(self, rngs):
        @nnx.vmap
        def make(key):
            return nnx.Linear(8, 8, rngs=nnx.Rngs(key), **RANDOM)

        self.layers = make(jax.random.split(rngs(), 3))

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.layers)


@pytest.mark.parametrize("calibrated", [False, True])
def test_stacked_layers(calibrated):
    stack = Stack(nnx.Rngs(0))
    x = data(4, 8)
    quantized, report = qnnx.quantize_model(
        stack, [Rule("layers", STATIC if calibrated else W8A8())], calibration=[x] if calibrated else None
    )
    assert [row.path for row in report.quantized] == ["layers"]
    assert quantized.layers.kernel[...].scale.shape == (3, 8, 1)  # as stored
    if calibrated:
        scales = quantized.layers.dot_general.scale[...]
        assert scales.shape == (3,) and len(set(scales.tolist())) == 3
    want = x
    for i in range(3):
        linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0), **RANDOM)
        linear.kernel, linear.bias = (nnx.Param(v[...][i]) for v in (stack.layers.kernel, stack.layers.bias))
        scheme = W8A8(activation_scale=scales[i]) if calibrated else W8A8()
        want = nnx.relu(qnnx.QuantLinear.from_linear(linear, scheme)(want))
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model(x))(quantized, x), want)


def test_layers_that_bring_their_own_arithmetic_are_skipped():
    model = nnx.List(
        [
            nnx.Linear(8, 8, dot_general=functools.partial(jax.lax.dot_general), rngs=nnx.Rngs(0)),
            nnx.LinearGeneral(8, 8, dot_general_cls=lambda: jax.lax.dot_general, rngs=nnx.Rngs(0)),
            nnx.Einsum("ab,cd->abcd", (8, 8), rngs=nnx.Rngs(0)),
            nnx.Einsum("ab,bc->a", (8, 8), rngs=nnx.Rngs(0)),
            nnx.Linear(8, 8, promote_dtype=lambda args, dtype: args, rngs=nnx.Rngs(0), **RANDOM),
            qnnx.QuantLinear(8, 8, rngs=nnx.Rngs(0), **RANDOM),
            nnx.Linear(8, 6, rngs=nnx.Rngs(0), **RANDOM),
            nnx.Linear(8, 8, rngs=nnx.Rngs(0), **RANDOM),
        ]
    )
    model[6].kernel = nnx.Param(jnp.ones((8, 3, 6)))  # stacked along another axis
    _, report = qnnx.quantize_model(model, [Rule("[0-6]", W8A8())])
    assert [row.reason for row in report.rows] == [
        "it brings its own dot_general",
        "it brings its own dot_general_cls",
        "'ab,cd->abcd' contracts nothing",
        "'c' is summed over one operand alone in 'ab,bc->a'",
        "it brings its own promote_dtype",
        "quantized already",
        "its kernel has shape (8, 3, 6), which does not end in (8, 6)",
        "no rule matches",
    ]
    assert report.unused_rules == ()


@pytest.mark.parametrize("rules", [[".*"], Rule(".*", W8A8()), [(".*", W8A8())], None])
def test_rules_of_a_wrong_type(model, rules):
    with pytest.raises(TypeError, match="sequence of jax_qmm.Rule"):
        qnnx.quantize_model(model, rules)


def test_arguments_of_a_wrong_type(model):
    for wrong in (None, nnx.state(model), nnx.Linear, jnp.ones):
        with pytest.raises(TypeError, match="model is a .*, needs an nnx.Module"):
            qnnx.quantize_model(wrong, [])
    with pytest.raises(TypeError, match="linear is a LinearGeneral, needs an nnx.Linear"):
        qnnx.QuantLinear.from_linear(nnx.LinearGeneral(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="scheme is 'int8', needs a W8A8"):
        qnnx.QuantLinear(4, 3, scheme="int8", rngs=nnx.Rngs(0))


def test_orbax_round_trip(model, tmp_path):
    scheme = dataclasses.replace(STATIC, symmetric=False)
    quantized, _ = qnnx.quantize_model(model, [Rule("heads", W8A8()), Rule(".*", scheme)], calibration=[IDS])
    graph, state = nnx.split(quantized)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
    static = dataclasses.replace(scheme, activation_scale=1.0, activation_zero_point=0)
    rules = [Rule("heads", W8A8()), Rule("unused", scheme), Rule(".*", static)]
    abstract = nnx.eval_shape(lambda: qnnx.quantize_model(Model(nnx.Rngs(0)), rules)[0])
    graph, target = nnx.split(abstract)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "model", target))
    np.testing.assert_array_equal(restored(IDS), quantized(IDS))


def test_export_with_quantized_arguments(model):
    quantized, _ = qnnx.quantize_model(model, [Rule(".*", W8A8(symmetric=False))])
    graph, state = nnx.split(quantized)
    params, tree = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, QArray))
    run = lambda params, ids: nnx.merge(graph, jax.tree.unflatten(tree, params))(ids)
    exported = jax.export.export(jax.jit(run))(params, IDS)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(params, IDS), jax.jit(run)(params, IDS))
    halved = jax.tree.map(lambda x: x / 2 if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    assert not np.array_equal(loaded.call(halved, IDS), loaded.call(params, IDS))  # the weights are arguments


def test_lowered_for_cuda_the_model_is_kernels(model):
    quantized, _ = qnnx.quantize_model(model.attn, [Rule(".*", W8A8(symmetric=False))])
    graph, state = nnx.split(quantized)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    text = run.trace(state, data(2, 5, 16)).lower(lowering_platforms=("cuda",)).as_text()
    # One function for query, key and value, which JAX lowers once, and one for the output.
    assert text.count("@jax_qmm_scaled_mm") == text.count("@jax_qmm_quantize_dynamic") == 2
    assert [text.count(f"call @{name}(") for name in re.findall(r"func private @(_product\w*)", text)] == [3, 1]
    assert not [line for line in text.splitlines() if "transpose" in line and "i8>" in line]  # of weights
