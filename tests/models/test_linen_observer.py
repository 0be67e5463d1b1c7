"""What a linen model's layers do: told by their parameters or by an example, also where a cache holds the trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from random_arrays import data

from jax_qmm import linen as qlinen
from jax_qmm.models import layer_kinds, linen_observer
from jax_qmm.schemes import W8A8, Rule

STATIC = W8A8(activation="per_tensor")
ALL = [Rule(".*", W8A8())]


@pytest.mark.parametrize(
    "kernel, bias, siblings, want",
    [
        ((3, 4), None, (), ("Dense", (-2,), (3, 4))),
        ((3, 4), (4,), (), ("Dense", (-2,), (3, 4))),
        ((2, 3, 4), (2, 4), (), ("Dense", (-2,), (3, 4))),  # a stack
        ((3, 4, 5), (4, 5), (), ("DenseGeneral", (-3,), (3, 4, 5))),
        ((2, 3, 4, 5), (4, 5), (), ("DenseGeneral", (-4, -3), (2, 3, 4, 5))),
        ((2, 2, 5), (2, 5), (), None),  # a stack, or features (2, 5)
        ((3, 4, 5), (5,), (), None),  # a convolution, or two axes contracted
        ((3, 4, 5), None, (), None),
        ((3, 4), (3,), (), None),
        ((3, 4, 5), None, ("query", "key", "value", "out"), ("DenseGeneral", (-3,), (3, 4, 5))),
        ((3, 4), None, ("query", "key", "value", "out"), ("Dense", (-2,), (3, 4))),
    ],
)
def test_guess(kernel, bias, siblings, want):
    params = {"kernel": jnp.zeros(kernel)} | ({} if bias is None else {"bias": jnp.zeros(bias)})
    told = linen_observer.guess(("query",), params, siblings)
    assert want is None or linen_observer.guess(("Einsum_3",), params, ()).op in ("Einsum", "?")
    if want is None:
        assert "give an example" in told.reason
    else:
        assert (told.op, told.contracted, told.shape, told.reason) == (*want, None)


JittedDense = nn.jit(nn.Dense)  # one class, so one cache


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedDense(4, name="up")(x)


def test_layers_are_seen_after_the_float_model_ran():
    """nn.jit keeps the trace of the first run, which no interceptor was in."""
    x = data(3, 8)
    variables = Jitted().init(jax.random.key(0), x)
    Jitted().apply(variables, x)
    _, _, report = qlinen.quantize_model(Jitted(), variables, ALL, example=x)
    assert [row.path for row in report.quantized] == ["up"]
    for factor in (1, 2):  # the second calibration is not that of the first either
        _, qvariables, _ = qlinen.quantize_model(Jitted(), variables, [Rule("up", STATIC)], calibration=[factor * x])
        want = factor * jnp.abs(x).max() / 127
        np.testing.assert_allclose(qvariables["params"]["up"]["activation_scale"], want, rtol=1e-6)


def test_calibration_by_a_function_that_was_jitted_and_run():
    x = data(3, 8)
    dense = nn.Dense(4)
    variables = dense.init(jax.random.key(0), x)
    run = jax.jit(lambda variables, x: dense.apply(variables, x))
    run(variables, x)
    _, qvariables, _ = qlinen.quantize_model(
        dense, variables, [Rule("", STATIC)], calibration=[x], forward=lambda model, variables, x: run(variables, x)
    )
    np.testing.assert_allclose(qvariables["params"]["activation_scale"], jnp.abs(x).max() / 127, rtol=1e-6)


@pytest.mark.parametrize("axis, length, taken", [(0, 3, True), (1, 8, False)])
def test_layers_stacked_along_an_axis_that_may_be_another_are_skipped(axis, length, taken):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(8, name="dense")(x), None

    stack = nn.scan(Layer, variable_axes={"params": axis}, split_rngs={"params": True}, length=length)()
    x = data(2, 8)
    variables = stack.init(jax.random.key(0), x, None)
    for example in (None, (x, None)):
        model, qvariables, report = qlinen.quantize_model(stack, variables, ALL, example=example)
        assert len(report.quantized) == taken
        if not taken:
            np.testing.assert_array_equal(model.apply(qvariables, x, None)[0], stack.apply(variables, x, None)[0])
    if not taken:
        assert "stacked could be 0, 1 or 2" in report.skipped[0].reason


class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids, attend=True):
        embed = nn.Embed(10, 8, name="embed")
        x = nn.Dense(8, name="dense")(embed(ids))
        return embed.attend(x) if attend else x


def test_a_tied_head_is_called_one():
    ids = jnp.arange(4)
    variables = Tied().init(jax.random.key(0), ids)
    reasons = []
    for example in (None, (ids,), (ids, False)):
        _, _, report = qlinen.quantize_model(Tied(), variables, ALL, example=example)
        reasons.append(report.skipped[0].reason)
    assert reasons == [layer_kinds.TABLE_OR_HEAD, layer_kinds.TIED_HEAD, layer_kinds.TABLE]


def test_sensitivity_is_the_relative_error_of_each_layer_on_its_float_input(capsys):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.relu(nn.Dense(8, name="dense")(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, tail=False):
            x = nn.Dense(8, name="first")(x)
            x, _ = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="stack")(
                x, None
            )
            return nn.Dense(8, name="tail")(x) if tail else x

    batches = [data(4, 8), data(4, 8, seed=1)]
    variables = Model().init(jax.random.key(0), batches[0], tail=True)
    scheme = W8A8("float8_e4m3fn")
    rules = [Rule(".*", scheme)]
    model, qvariables, report = qlinen.quantize_model(Model(), variables, rules, sensitivity=batches)
    rows = {row.path: row for row in report.rows}
    x = jnp.concatenate(batches)
    dense, own = nn.Dense(8), variables["params"]["first"]
    got = qlinen.QuantDense(8, scheme=scheme).apply({"params": qvariables["params"]["first"]}, x)
    want = dense.apply({"params": own}, x)
    np.testing.assert_allclose(rows["first"].error, jnp.linalg.norm(got - want) / jnp.linalg.norm(want), rtol=1e-4)
    assert 0 < rows["stack/dense"].error < 2 / 16  # two operands, of 4 bits each
    assert rows["tail"].error is None
    assert "measuring sensitivity: 2batch" in capsys.readouterr().err
    assert f"{rows['first'].error:.5f}" in str(report)
