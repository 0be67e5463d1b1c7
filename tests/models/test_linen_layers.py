"""Running quantized linen layers: as parts of other models, under transformations, and where they can't run."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from random_arrays import data

from jax_qmm import linen as qlinen
from jax_qmm.models import layer_kinds
from jax_qmm.schemes import W8A8, Rule

ALL = [Rule(".*", W8A8())]


class Thrice:
    def thrice(self, x):
        return self.twice(self(x))


class Inner(Thrice, nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(8)(x)))

    def twice(self, x):
        return self(self(x))


class Named(nn.Module):
    """A model with a submodule that has the name of a field of other wrappers."""

    model: nn.Module
    layers: tuple = ()

    def setup(self):
        self.head = nn.Dense(4)

    def __call__(self, x):
        return self.head(self.model(x))


X = data(3, 8)


@pytest.mark.parametrize(
    "own", [{"dot_general": functools.partial(jax.lax.dot_general)}, {"promote_dtype": lambda *args, dtype: args}]
)
def test_a_layer_with_its_own_arithmetic_is_never_replaced(own):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="up", **own)(x)

    variables = Model().init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(Model(), variables, ALL)
    with pytest.raises(TypeError, match=f"kernel of up was quantized, but it brings its own {[*own][0]}: .* example"):
        model.apply(qvariables, X)
    model, qvariables, report = qlinen.quantize_model(Model(), variables, ALL, example=X)
    assert report.skipped[0].reason == f"it brings its own {[*own][0]}"
    np.testing.assert_array_equal(model.apply(qvariables, X), Model().apply(variables, X))


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_a_layer_whose_weights_are_normalized_is_not_quantized(wrapper):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            extra = {"update_stats": False} if wrapper is nn.SpectralNorm else {}
            return nn.Dense(4, name="tail")(wrapper(nn.Dense(8, name="up"))(x, **extra))

    variables = Model().init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(Model(), variables, ALL)
    with pytest.raises(TypeError, match="kernel of up was quantized, but its parent normalizes its weights"):
        model.apply(qvariables, X)
    model, qvariables, report = qlinen.quantize_model(Model(), variables, ALL, example=X)
    assert {row.path: row.reason for row in report.rows if row.path in ("up", "tail")} == {
        "up": layer_kinds.NORMALIZED,
        "tail": "",
    }
    assert model.apply(qvariables, X).shape == (3, 4)


def test_a_subclass_that_multiplies_by_itself_is_not_quantized():
    class Squared(nn.Dense):
        @nn.compact
        def __call__(self, inputs):
            return inputs @ self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features)) ** 2

    variables = Squared(4).init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(Squared(4), variables, ALL)
    with pytest.raises(TypeError, match="the __call__ of Squared never calls that of Dense"):
        model.apply(qvariables, X)
    _, _, report = qlinen.quantize_model(Squared(4), variables, ALL, example=X)
    assert report.skipped[0].reason == "the __call__ of Squared never calls that of Dense"


@pytest.fixture(scope="module")
def named():
    float_model = Named(Inner())
    variables = float_model.init(jax.random.key(0), X)
    model, qvariables, report = qlinen.quantize_model(float_model, variables, ALL)
    assert len(report.quantized) == 3
    return model, qvariables


def test_a_submodule_may_be_called_model(named):
    model, qvariables = named
    want = model.apply(qvariables, X)
    np.testing.assert_array_equal(model.bind(qvariables)(X), want)
    assert jax.tree.structure(model.init(jax.random.key(0), X)) == jax.tree.structure(
        Named(Inner()).init(jax.random.key(0), X)
    )
    assert "Inner" in model.tabulate(jax.random.key(0), X)
    assert isinstance(model, Named) and isinstance(model, qlinen.QuantizedModel)


@pytest.mark.parametrize("transform", [nn.remat, nn.jit, lambda f: f])
def test_a_quantized_model_as_a_submodule_under_transformations(named, transform):
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="last")(transform(lambda module, x: module(x))(self.inner, x))

    model, qvariables = named
    last = {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}
    want = model.apply(qvariables, X)
    for outer in (Outer(model), transform(Outer)(model)):
        got = outer.apply({"params": {"inner": qvariables["params"], "last": last}}, X)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)  # fused differently


def test_a_quantized_model_in_a_shared_scope():
    class Sharing(nn.Module):
        inner: nn.Module

        def setup(self):
            nn.share_scope(self, self.inner)

        def __call__(self, x):
            return self.inner(x)

    variables = Inner().init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(Inner(), variables, ALL)
    np.testing.assert_array_equal(Sharing(model).apply(qvariables, X), model.apply(qvariables, X))


def test_methods_of_a_bound_model_run_quantized():
    variables = Inner().init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(Inner(), variables, ALL)

    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner.thrice(x)

    want = model.apply(qvariables, X, method="thrice")
    np.testing.assert_array_equal(Outer(model).apply({"params": {"inner": qvariables["params"]}}, X), want)


def test_a_quantized_model_is_hashable_as_the_model_is(named):
    model, qvariables = named
    again, _, _ = qlinen.quantize_model(model, qvariables, ALL)
    other, _, _ = qlinen.quantize_model(Named(Inner()), {"params": {}}, ALL)
    assert hash(model) == hash(again) == hash(other) and model == again == other
    run = jax.jit(lambda model, variables, x: model.apply(variables, x), static_argnums=0)
    np.testing.assert_allclose(run(model, qvariables, X), model.apply(qvariables, X), rtol=1e-6, atol=1e-6)


def test_a_quantized_model_can_be_pickled():
    model, qvariables, _ = qlinen.quantize_model(PICKLED, PICKLED.init(jax.random.key(0), X), ALL)
    derived = type("Derived", (type(model),), {})(model.features, kernel_init=model.kernel_init)
    for given in (model, derived):
        again = pickle.loads(pickle.dumps(given))
        assert again == model
        np.testing.assert_array_equal(again.apply(qvariables, X), model.apply(qvariables, X))


PICKLED = nn.Dense(4, kernel_init=jax.nn.initializers.ones)  # the default one has no name to be pickled by


def test_install_is_the_door_for_kernels_from_elsewhere():
    variables = nn.Dense(4).init(jax.random.key(0), X)
    scheme = W8A8(activation_scale=0.05)
    abstract = jax.eval_shape(lambda: variables["params"])
    qarray = scheme.quantize_weight(variables["params"]["kernel"], (-2,))
    params = qlinen.install(abstract, qarray, scheme) | {"bias": variables["params"]["bias"]}
    layer, want = qlinen.QuantDense.from_dense(nn.Dense(4), variables, scheme)
    np.testing.assert_array_equal(layer.apply({"params": params}, X), layer.apply(want, X))
    with pytest.raises(ValueError, match=r"qarray is QArray.*, needs the kernel's shape \(8, 4\)"):
        qlinen.install(abstract, qarray.T, scheme)
    with pytest.raises(ValueError, match="scheme has dtype float8_e4m3fn, needs that of the QArray, int8"):
        qlinen.install(abstract, qarray, W8A8("float8_e4m3fn"))
    with pytest.raises(ValueError, match="is packed, W8A8.* needs it plain"):
        qlinen.install(abstract, qarray.T.pack().T, scheme)
    with pytest.raises(TypeError, match="params has a quantized kernel already"):
        qlinen.install(params, qarray, scheme)
