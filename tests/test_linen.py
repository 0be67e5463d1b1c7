import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.core import freeze, meta
from random_arrays import RANDOM, data, init

from jax_qmm import linen as qlinen
from jax_qmm.models import layer_kinds
from jax_qmm.ops.dot_general import dot_general
from jax_qmm.ops.quantize import quantize
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W8A8, Rule

STATIC = W8A8(activation="per_tensor")
LAST = (((1,), (0,)), ((), ()))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.relu(nn.Dense(16, **RANDOM, name="up")(x)), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids, scale=1.0, use_head=False):
        x = nn.Embed(10, 16, embedding_init=init)(ids) * scale
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2, **RANDOM, name="attn")(x))
        x = x + nn.Dense(16, use_bias=False, kernel_init=init)(nn.relu(nn.Dense(32, **RANDOM)(x)))
        x = nn.Conv(16, (3,), **RANDOM)(x)
        scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scanned(name="blocks")(x, None)
        head = nn.Dense(16, **RANDOM, name="head")
        if use_head or self.is_initializing():
            x = head(x)
        x = nn.Einsum((2, 16, 8), "...ta,hab->...thb", **RANDOM, name="heads")(x)
        x = nn.DenseGeneral(16, axis=(-2, -1), **RANDOM, name="join")(x)
        return x @ self.param("own", init, (16, 4))

    def embed(self, ids):
        return self(ids, 2.0)


IDS = jnp.arange(10).reshape(2, 5)
ALWAYS = {"attn/query", "attn/key", "attn/value", "attn/out", "Conv_0", "Dense_0", "Dense_1", "blocks/up", "heads"}


@pytest.fixture(scope="module")
def model():
    return Model()


@pytest.fixture(scope="module")
def variables(model):
    return jax.jit(model.init)(jax.random.key(0), IDS)


def test_report_without_an_example(model, variables):
    rules = [Rule("Dense_[5-9]", W8A8()), Rule(".*", W8A8()), Rule("attn/.*", STATIC)]
    quantized, qvariables, report = qlinen.quantize_model(model, variables, rules)
    assert {row.path for row in report.quantized} == ALWAYS | {"head"}
    assert {row.path: row.reason for row in report.skipped} == {
        "Embed_0": layer_kinds.TABLE_OR_HEAD,
        "join": "no telling what it does with a kernel of shape (2, 8, 16) and a bias of shape (16,): give an example",
        "": layer_kinds.by_hand({"own": jnp.ones((16, 4))}),
    }
    assert [rule.path for rule in report.unused_rules] == ["Dense_[5-9]", "attn/.*"]
    row = next(row for row in report.rows if row.path == "Dense_1")
    # 16 x 32 bytes, 32 float32 scales and 32 float32 biases
    assert (row.op, row.scheme, row.bytes_before, row.bytes_after) == ("Dense", "int8, per_token", 2176, 768)
    assert row.runs_on == "reference: platform cpu has no kernels"
    params = qvariables["params"]
    is_quantized = lambda x: isinstance(x, QArray)
    assert jax.tree.structure(params, is_leaf=is_quantized) == jax.tree.structure(variables["params"])
    assert report.total_after == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert params["attn"]["query"]["kernel"].qvalue.shape == (2, 8, 16)  # the contracted axis last
    assert params["attn"]["out"]["kernel"].qvalue.shape == (16, 2, 8)
    assert params["blocks"]["up"]["kernel"].scale.shape == (3, 16, 1)
    assert params["Embed_0"]["embedding"] is variables["params"]["Embed_0"]["embedding"]  # not copied
    assert not any(map(is_quantized, jax.tree.leaves(variables, is_leaf=is_quantized)))


def test_example_tells_all_layers(model, variables):
    abstract = jax.ShapeDtypeStruct(IDS.shape, IDS.dtype)
    _, _, report = qlinen.quantize_model(
        model, variables, [Rule(".*", W8A8())], example={"ids": abstract, "use_head": False}
    )
    assert {row.path for row in report.quantized} == ALWAYS | {"join"}
    assert {row.path: (row.op, row.reason) for row in report.skipped} == {
        "Embed_0": ("Embed", "a table that is looked up"),
        "head": ("?", "the example did not call it"),
        "": ("Model", layer_kinds.by_hand({"own": jnp.ones((16, 4))})),
    }


@pytest.mark.parametrize("scheme", [W8A8(symmetric=False), W8A8("float8_e4m3fn")], ids=str)
def test_model_runs_under_jit(model, variables, scheme):
    quantized, qvariables, _ = qlinen.quantize_model(model, variables, [Rule(".*", scheme)], example=IDS)
    want = model.apply(variables, IDS)
    got = jax.jit(quantized.apply)(qvariables, IDS)
    # Eleven layers in a row that each add an error of about 1/127 (int8) or 1/16 (fp8 has 4 bits) of their
    # output, in quadrature.
    step = 1 / 16 if scheme.dtype == jnp.float8_e4m3fn else 1 / 127
    error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
    assert 0 < error < np.sqrt(11) * step
    assert got.dtype == want.dtype


def test_as_submodule_and_by_method(model, variables):
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, ids):
            return nn.Dense(4, name="last")(self.inner(ids))

    quantized, qvariables, _ = qlinen.quantize_model(model, variables, [Rule(".*", W8A8())])
    last = {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}
    got = Outer(quantized).apply({"params": {"inner": qvariables["params"], "last": last}}, IDS)
    np.testing.assert_array_equal(got, quantized.apply(qvariables, IDS))
    got = quantized.apply(qvariables, IDS, method="embed")
    np.testing.assert_array_equal(got, quantized.apply(qvariables, IDS, 2.0))
    np.testing.assert_array_equal(got, quantized.apply(qvariables, IDS, method=Model.embed))


def test_frozen_and_boxed_variables():
    dense = nn.Dense(6, kernel_init=nn.with_partitioning(init, (None, "x")))
    variables = freeze(dense.init(jax.random.key(0), data(2, 8)))
    quantized, qvariables, report = qlinen.quantize_model(dense, variables, [Rule("", W8A8())])
    assert type(qvariables) is type(variables)
    assert isinstance(meta.unbox(qvariables)["params"]["kernel"], QArray) and report.total_before == 8 * 6 * 4 + 6 * 4
    layer, converted = qlinen.QuantDense.from_dense(dense, variables)
    x = data(3, 8)
    np.testing.assert_array_equal(quantized.apply(qvariables, x), layer.apply(converted, x))
    _, _, report = qlinen.quantize_model(dense, qvariables, [Rule("", W8A8())])
    assert report.skipped[0].reason == "quantized already"


@pytest.mark.parametrize(
    "scheme",
    [
        W8A8(),
        W8A8("float8_e4m3fn"),
        W8A8(activation_scale=0.02),
        W8A8(symmetric=False, activation_scale=0.02, activation_zero_point=jnp.int32(5)),
    ],
    ids=str,
)
def test_dense_is_the_fused_product(scheme):
    dense = nn.Dense(10, **RANDOM)
    variables = dense.init(jax.random.key(0), data(1, 24))
    layer, qvariables = qlinen.QuantDense.from_dense(dense, variables, scheme)
    x = data(7, 24)
    params = qvariables["params"]
    want = dot_general(x, params["kernel"], LAST, scheme=scheme, bias=params["bias"])
    np.testing.assert_array_equal(layer.apply(qvariables, x), want)
    kernel = quantize(variables["params"]["kernel"].T, scheme.dtype).T
    np.testing.assert_array_equal(params["kernel"].dequantize(), kernel.dequantize())
    model, mvariables, _ = qlinen.quantize_model(dense, variables, [Rule("", scheme)])
    jax.tree.map(np.testing.assert_array_equal, mvariables["params"], params)
    np.testing.assert_array_equal(model.apply(mvariables, x), want)


def test_quant_dense_from_the_start():
    scheme = W8A8(symmetric=False, activation_scale=0.5, activation_zero_point=3)
    layer = qlinen.QuantDense(6, scheme=scheme, dtype=jnp.bfloat16, use_bias=False, kernel_init=init)
    x = data(3, 8)
    variables = layer.init(jax.random.key(0), x)
    params = variables["params"]
    assert sorted(params) == ["activation_scale", "activation_zero_point", "kernel"]
    assert params["kernel"].shape == (8, 6) and params["kernel"].qvalue.shape == (6, 8)
    out = layer.apply(variables, x)
    assert out.dtype == jnp.bfloat16
    moved = {"params": params | {"activation_scale": jnp.float32(0.25)}}
    assert not np.array_equal(layer.apply(moved, x), out)  # the parameter counts, not the scheme's number
    with pytest.raises(ValueError, match="dot_general"):
        qlinen.QuantDense(6, dot_general=functools.partial(jax.lax.dot_general)).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="quantized already"):
        qlinen.QuantDense.from_dense(layer, variables)


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, {"param_dtype": jnp.bfloat16}, {"dtype": jnp.float16}], ids=str)
def test_output_dtype_is_that_of_the_float_layer(x_dtype, options):
    for use_bias in (True, False):
        dense = nn.Dense(6, use_bias=use_bias, kernel_init=init, **options)
        x = data(3, 8).astype(x_dtype)
        variables = dense.init(jax.random.key(0), x)
        layer, qvariables = qlinen.QuantDense.from_dense(dense, variables)
        want, got = jax.eval_shape(dense.apply, variables, x), jax.eval_shape(layer.apply, qvariables, x)
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        model, mvariables, _ = qlinen.quantize_model(dense, variables, [Rule("", W8A8())])
        assert jax.eval_shape(model.apply, mvariables, x).dtype == want.dtype


class Doubled(nn.Dense):
    @nn.compact
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


LAYERS = {
    "DenseGeneral": (nn.DenseGeneral((5, 3), axis=(1, -1), **RANDOM), (4, 2, 8)),
    "DenseGeneral batched": (nn.DenseGeneral((5, 3), batch_dims=(0,), **RANDOM), (4, 2, 8)),
    "Einsum": (nn.Einsum((4, 8, 3), "nta,hab->nthb", **RANDOM), (2, 5, 8)),
    "Einsum of experts": (nn.Einsum((4, 8, 3), "eta,eab->etb", use_bias=False, kernel_init=init), (4, 5, 8)),
    "subclass": (Doubled(6, **RANDOM), (3, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_their_dequantized_selves(name):
    layer, shape = LAYERS[name]
    # Integers below 128 with a 127 in each row: quantized exactly, with a scale of 1.
    x = jnp.round(data(*shape) * 30).at[..., 0].set(127)
    variables = layer.init(jax.random.key(0), x)
    model, qvariables, report = qlinen.quantize_model(layer, variables, [Rule("", W8A8())], example=x)
    assert [row.path for row in report.quantized] == [""]
    params = qvariables["params"]
    dequantized = {"params": params | {"kernel": params["kernel"].dequantize()}}
    # Sums of 16 products of float32, each with a few roundings.
    np.testing.assert_allclose(
        model.apply(qvariables, x), layer.apply(dequantized, x), rtol=32 * 2**-24, atol=32 * 2**-24 * 127 * 16
    )


def test_gradients_pass_straight_through():
    layer = qlinen.QuantDense(6, kernel_init=init)
    x, weight = data(3, 8), data(3, 6, seed=1)
    variables = layer.init(jax.random.key(0), x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    apply = lambda x, bias: (layer.apply({"params": {"kernel": kernel, "bias": bias}}, x) * weight).sum()
    by_x, by_bias = jax.jit(jax.grad(apply, (0, 1)))(x, bias)
    # 6 float32 products of numbers below 4
    np.testing.assert_allclose(by_x, weight @ kernel.dequantize().T, rtol=0, atol=6 * 16 * 2**-24)
    np.testing.assert_allclose(by_bias, weight.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration(model, variables, symmetric):
    scheme = dataclasses.replace(STATIC, symmetric=symmetric)
    rules = [Rule("Dense_0", W8A8()), Rule("Dense_1|blocks/up|head", scheme)]
    seen = {"Dense_1": [], "up": []}

    def watch(next_function, args, kwargs, context):
        if context.module.name in seen and context.method_name == "__call__":
            seen[context.module.name].append(args[0])
        return next_function(*args, **kwargs)

    batches = [(IDS, 1.0), {"ids": IDS, "scale": 3.0}]
    with nn.intercept_methods(watch):
        model.apply(variables, IDS), model.apply(variables, IDS, scale=3.0)
    quantized, qvariables, report = qlinen.quantize_model(model, variables, rules, calibration=batches)
    want = quantize(jnp.stack(seen["Dense_1"]), axis=None, symmetric=symmetric)
    got = qvariables["params"]["Dense_1"]
    np.testing.assert_array_equal(got["activation_scale"], want.scale.reshape(()))
    assert ("activation_zero_point" in got) != symmetric
    if not symmetric:
        np.testing.assert_array_equal(got["activation_zero_point"], want.zero_point.reshape(()))
    assert qvariables["params"]["blocks"]["up"]["activation_scale"].shape == (3,)  # for a stack of 3
    rows = {row.path: row for row in report.rows}
    assert rows["Dense_1"].scheme == "int8, per_tensor static" + ("" if symmetric else ", asymmetric")
    assert rows["Dense_0"].scheme == "int8, per_token"
    assert rows["head"].reason == "the example did not call it"
    assert jax.jit(quantized.apply)(qvariables, IDS).shape == (2, 5, 4)


def test_calibration_inside_scan_and_jit(capsys):
    scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    x = data(4, 16)
    variables = jax.jit(scanned.init)(jax.random.key(0), x)
    inputs = [x]
    for i in range(3):
        params = jax.tree.map(lambda leaf: leaf[i], variables["params"])
        inputs.append(Block().apply({"params": params}, inputs[-1])[0])
    low, high = (float(f(jnp.stack(inputs[:3]))) for f in (jnp.min, jnp.max))
    for forward in (None, lambda model, variables, x: jax.jit(lambda v, x: model.apply(v, x))(variables, x)):
        _, qvariables, _ = qlinen.quantize_model(
            scanned, variables, [Rule("up", STATIC)], calibration=(b for b in [x]), forward=forward
        )
        np.testing.assert_allclose(
            qvariables["params"]["up"]["activation_scale"], [max(-low, high) / 127] * 3, rtol=1e-6
        )
    assert "calibrating: 1batch" in capsys.readouterr().err


def test_arguments_of_a_wrong_type(model, variables):
    with pytest.raises(TypeError, match="model is a NoneType, needs a linen.Module"):
        qlinen.quantize_model(None, variables, [])
    for wrong in (None, variables["params"]):
        with pytest.raises(TypeError, match='variables is .*, needs a mapping with "params"'):
            qlinen.quantize_model(model, wrong, [])
    with pytest.raises(TypeError, match="scheme is 'int8', needs a W8A8"):
        qlinen.QuantDense(4, scheme="int8").init(jax.random.key(0), data(2, 8))


def test_calibration_errors():
    dense = nn.Dense(4, **RANDOM)
    variables = dense.init(jax.random.key(0), data(2, 8))
    with pytest.raises(ValueError, match="none of the layers"):
        qlinen.quantize_model(dense, variables, [Rule("", W8A8())], calibration=[data(2, 8)])
    with pytest.raises(ValueError, match="no batch"):
        qlinen.quantize_model(dense, variables, [Rule("", STATIC)], calibration=[])
    with pytest.raises(ValueError, match="not finite"):
        batches = [data(2, 8), jnp.full((2, 8), jnp.nan)]
        qlinen.quantize_model(dense, variables, [Rule("", STATIC)], calibration=batches)


def test_kernel_of_a_layer_that_cannot_use_it():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", init, (8, 6))

    x = data(3, 8)
    variables = Own().init(jax.random.key(0), x)
    model, qvariables, _ = qlinen.quantize_model(Own(), variables, [Rule("", W8A8())])
    with pytest.raises(TypeError, match="Own can't use it: .* give that an example"):
        model.apply(qvariables, x)
    _, _, report = qlinen.quantize_model(Own(), variables, [Rule("", W8A8())], example=x)
    assert report.skipped[0].reason == "not a Dense, DenseGeneral, Einsum or Conv"


def test_orbax_and_export(model, variables, tmp_path):
    quantized, qvariables, _ = qlinen.quantize_model(model, variables, [Rule(".*", STATIC)], calibration=[IDS])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", qvariables)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), qvariables)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "model", target)
    want = jax.jit(quantized.apply)(qvariables, IDS)
    exported = jax.export.export(jax.jit(quantized.apply))(qvariables, IDS)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(restored, IDS), want)


def test_strict_makes_a_fallback_an_error(monkeypatch):
    layer = qlinen.QuantDense(7, kernel_init=init)
    variables = layer.init(jax.random.key(0), data(1, 12))
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    with pytest.raises(RuntimeError, match="platform cpu has no kernels"):
        layer.apply(variables, data(11, 12))
