"""nnx layers with quantized kernels: on meshes, beside an optimizer, tied, and where quantizing would be wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from random_arrays import data

from jax_qmm import nnx as qnnx
from jax_qmm.models import layer_kinds
from jax_qmm.schemes import W8A8, Rule

ALL = [Rule(".*", W8A8())]


X = data(3, 8)


class Sharded(nnx.Module):
    def __init__(self, rngs):
        out = lambda *names: {"out_sharding": names}
        self.up = nnx.Linear(8, 16, rngs=rngs, kernel_metadata=out(None, "model"), bias_metadata=out("model"))
        self.down = nnx.Linear(16, 8, rngs=rngs, kernel_metadata=out("model", None))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_an_abstract_model_on_a_mesh_keeps_its_quantized_kernels(mesh):
    make = lambda: qnnx.quantize_model(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), ALL)[0]
    want = jax.tree.structure(nnx.state(nnx.eval_shape(make)))
    with jax.set_mesh(mesh):
        assert jax.tree.structure(nnx.state(nnx.eval_shape(make))) == want


def test_a_model_is_restored_on_a_mesh(mesh, tmp_path):
    rules = [Rule("up", W8A8(symmetric=False)), Rule("down", W8A8(activation_scale=0.1))]
    with jax.set_mesh(mesh):
        make = lambda: qnnx.quantize_model(Sharded(nnx.Rngs(0)), rules)[0]
        model = make()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "model", nnx.state(model))
        kernel = nnx.eval_shape(make).up.kernel[...]
        shards = P("model", None)
        assert kernel.qvalue.sharding.spec == kernel.scale.sharding.spec == kernel.azp_adj.sharding.spec == shards
        graph, target = nnx.get_abstract_model(make, mesh)  # as eval_shape, on the mesh's devices
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(tmp_path / "model", target)
        restored = nnx.merge(graph, state)
        assert restored.up.kernel[...].qvalue.sharding.is_equivalent_to(NamedSharding(mesh, shards), 2)
        np.testing.assert_array_equal(restored(X), model(X))


def test_specs_and_constraints_shard_the_arrays_of_a_quantized_kernel(mesh):
    with jax.set_mesh(mesh):
        model, _ = qnnx.quantize_model(Sharded(nnx.Rngs(0)), ALL)
    state = nnx.state(model)
    specs = nnx.get_partition_spec(state)
    up, down = specs["up"]["kernel"].get_value(), specs["down"]["kernel"].get_value()
    assert (up.qvalue, up.scale) == (P("model", None), P("model", None))  # (out, in)
    assert (down.qvalue, down.scale) == (P(None, "model"), P(None, None))
    want = model(X)
    with jax.set_mesh(mesh):
        constrained = jax.jit(lambda state: jax.lax.with_sharding_constraint(state, specs))(state)
        assert (
            constrained["down"]["kernel"]
            .get_value()
            .qvalue.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
        )
        placed = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        assert placed["up"]["kernel"].get_value().scale.sharding == NamedSharding(mesh, P("model", None))
        nnx.update(model, placed)
        np.testing.assert_allclose(nnx.jit(lambda model: model(X))(model), want, rtol=1e-6, atol=1e-6)


def test_a_stack_keeps_its_metadata():
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key):
        metadata = {"out_sharding": (None, "model"), "eager_sharding": False}
        return nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(key), kernel_metadata=metadata)

    model, _ = qnnx.quantize_model(make(jax.random.split(jax.random.key(0), 3)), ALL)
    specs = nnx.get_partition_spec(nnx.state(model))["kernel"].get_value()
    assert (specs.qvalue, specs.scale) == (P("layers", "model", None), P("layers", "model", None))
    assert model.kernel.out_sharding == ("layers", None, "model")


def test_from_linear_keeps_metadata():
    metadata = {"out_sharding": (None, "model"), "eager_sharding": False}
    linear = nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=metadata)
    assert qnnx.QuantLinear.from_linear(linear).kernel.out_sharding == (None, "model")


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.LoRA(8, 2, 8, base_module=nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.base(x)))


def test_training_leaves_quantized_kernels_alone():
    model, report = qnnx.quantize_model(Adapted(nnx.Rngs(0)), ALL)
    assert {row.path: row.reason for row in report.rows} == {
        "base": layer_kinds.ADAPTER,
        "base.base_module": "",
        "head": "",
        "head.lora": layer_kinds.ADAPTER,
    }
    kernels = nnx.state(model, qnnx.QuantizedParam)
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(kernels))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(X) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0]
    after = nnx.to_pure_dict(nnx.state(model, qnnx.QuantizedParam))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("axis, count, taken", [(0, 3, True), (1, 8, False)])
def test_layers_stacked_along_an_axis_that_may_be_another_are_skipped(axis, count, taken):
    make = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)), out_axes=axis)
    model, report = qnnx.quantize_model(make(jax.random.split(jax.random.key(0), count)), ALL)
    assert len(report.quantized) == taken
    if not taken:
        assert "stacked could be 0, 1 or 2" in report.skipped[0].reason


@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_layer_whose_weights_are_normalized_is_skipped(wrapper):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = wrapper(nnx.Linear(8, 8, use_bias=False, rngs=rngs), rngs=rngs)
            self.tail = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.tail(self.norm(x))

    model, report = qnnx.quantize_model(Model(nnx.Rngs(0)), ALL)
    assert {row.path: row.reason for row in report.rows} == {
        "norm.layer_instance": layer_kinds.NORMALIZED,
        "tail": "",
    }
    assert model(X).shape == (3, 4)


class Squared(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...] ** 2


class Doubled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class DoubledTwice(Doubled):
    @nnx.jit
    def __call__(self, x):
        return 2 * Doubled.__call__(self, x)


def test_a_subclass_that_multiplies_by_itself_is_skipped():
    model = nnx.List([cls(8, 8, rngs=nnx.Rngs(0)) for cls in (Squared, Doubled, DoubledTwice)])
    quantized, report = qnnx.quantize_model(model, ALL)
    assert [row.reason for row in report.rows] == ["the __call__ of Squared never calls that of Linear", "", ""]
    np.testing.assert_allclose(quantized[2](X), 2 * quantized[1](X), rtol=1e-6, atol=1e-6)


def test_a_model_that_reads_a_quantized_kernel_is_told():
    linear, _ = qnnx.quantize_model(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), ALL)
    for use in (lambda: X @ linear.kernel, lambda: jnp.dot(X, linear.kernel), lambda: jnp.asarray(linear.kernel)):
        with pytest.raises(TypeError, match="this kernel is quantized, and only its own layer can use it: keep"):
            use()


class TiedLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(self.first(x))


def test_layers_that_share_a_kernel_go_on_sharing_it():
    model, report = qnnx.quantize_model(TiedLayers(nnx.Rngs(0)), ALL)
    assert model.first.kernel is model.second.kernel
    assert report.total_after == 8 * 8 + 8 * 4 + 2 * 8 * 4
    assert model(X).shape == (3, 8)
    # A static scale is one of the input: the kernel is the same.
    static = Rule("first", W8A8(activation="per_tensor", activation_scale=0.1))
    model, _ = qnnx.quantize_model(TiedLayers(nnx.Rngs(0)), [static, Rule(".*", W8A8(activation="per_tensor"))])
    assert model.first.kernel is model.second.kernel


@pytest.mark.parametrize("rules", [[Rule("first", W8A8())], [Rule("first", W8A8()), Rule(".*", W8A8("float8_e4m3fn"))]])
def test_kernels_that_come_apart_are_reported(rules):
    model, report = qnnx.quantize_model(TiedLayers(nnx.Rngs(0)), rules)
    assert model.first.kernel is not model.second.kernel
    assert report.rows[0].reason == "it shared its kernel with second; now it has its own"


def test_sensitivity_is_the_relative_error_of_each_layer_on_its_float_input(capsys):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 8, rngs=rngs)
            self.stack = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(jax.random.split(rngs(), 3))
            self.heads = nnx.Einsum("...a,hab->...hb", (2, 8, 4), (2, 4), rngs=rngs)
            self.tail = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x, tail=False):
            run = nnx.scan(lambda x, layer: nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(self.first(x), self.stack)
            return self.tail(x) if tail else self.heads(x)

    model = Model(nnx.Rngs(0))
    static = W8A8(activation="per_tensor")
    batches = [data(4, 8), data(4, 8, seed=1)]
    quantized, report = qnnx.quantize_model(
        model, [Rule("stack", static), Rule(".*", W8A8("float8_e4m3fn"))], calibration=batches, sensitivity=batches
    )
    rows = {row.path: row for row in report.rows}
    x = jnp.concatenate(batches)
    want = model.first(x)
    error = jnp.linalg.norm(quantized.first(x) - want) / jnp.linalg.norm(want)
    np.testing.assert_allclose(rows["first"].error, error, rtol=1e-4)
    assert 0 < rows["stack"].error < 2 / 127 * 4  # steps of a tensor's largest value, about 4 times an average one
    assert 0 < rows["heads"].error < 2 / 16  # two operands, of 4 bits each
    assert rows["tail"].error is None
    assert "measuring sensitivity: 100%" in capsys.readouterr().err
    assert f"{rows['first'].error:.5f}" in str(report)


def test_install_is_the_door_for_kernels_from_elsewhere():
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    want = qnnx.QuantLinear.from_linear(linear)
    abstract = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    abstract.bias = linear.bias
    qnnx.install(abstract, want.kernel[...], W8A8())
    np.testing.assert_array_equal(abstract(X), want(X))
    with pytest.raises(ValueError, match=r"qarray is QArray.*, needs the kernel's shape \(8, 4\)"):
        qnnx.install(linear, want.kernel[...].T, W8A8())
    with pytest.raises(ValueError, match="scheme has dtype float8_e4m3fn, needs that of the QArray, int8"):
        qnnx.install(linear, want.kernel[...], W8A8("float8_e4m3fn"))
    with pytest.raises(ValueError, match="is packed, W8A8.* needs it plain"):
        qnnx.install(linear, want.kernel[...].pack(), W8A8())
    with pytest.raises(TypeError, match="layer is a LayerNorm, needs Linear, LinearGeneral, Einsum"):
        qnnx.install(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), want.kernel[...], W8A8())
    with pytest.raises(TypeError, match="layer is quantized already"):
        qnnx.install(want, want.kernel[...], W8A8())
