"""Quantized kernels among the variables of linen: schemes in the structure, sharding metadata, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, serialization
from jax.sharding import NamedSharding, PartitionSpec as P
from random_arrays import data

from jax_qmm import linen as qlinen
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W8A8, Rule

ALL = [Rule(".*", W8A8())]
SCHEMES = [
    W8A8(),
    W8A8(symmetric=False),
    W8A8(weight_symmetric=False),
    W8A8(activation="per_tensor"),
    W8A8("float8_e4m3fn"),
]


X = data(3, 8)


JittedDense = nn.jit(nn.Dense)  # one class, so one cache


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedDense(16, name="up")(x)


def test_under_nn_jit_each_scheme_runs_as_itself():
    variables = Jitted().init(jax.random.key(0), X)
    for scheme in SCHEMES:
        model, qvariables, _ = qlinen.quantize_model(Jitted(), variables, [Rule("up", scheme)])
        layer = qlinen.QuantDense(16, scheme=scheme)
        want = jax.jit(layer.apply)({"params": qvariables["params"]["up"]}, X)
        np.testing.assert_array_equal(model.apply(qvariables, X), want)


def test_the_structure_tells_schemes_apart():
    kernels = []
    for scheme in SCHEMES:
        qarray = scheme.quantize_weight(data(8, 4), (-2,))
        kernel = qlinen.QuantizedKernel(qarray, scheme, jnp.float32)
        assert type(kernel.qarray()) is QArray and kernel.T.scheme == scheme
        np.testing.assert_array_equal(kernel.dequantize(), qarray.dequantize())
        mapped = jax.tree.map(lambda x: x, kernel)
        assert isinstance(mapped, qlinen.QuantizedKernel) and mapped.scheme == scheme
        kernels.append(kernel)
    assert len({jax.tree.structure(kernel) for kernel in kernels}) == len(SCHEMES)


class Sharded(nn.Module):
    boxes: str = "with_partitioning"

    @nn.compact
    def __call__(self, x):
        boxed = lambda *names: getattr(nn, self.boxes)(nn.initializers.lecun_normal(), names)
        x = nn.Dense(16, kernel_init=boxed(None, "model"), name="up")(x)

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(16, kernel_init=boxed("model", None), name="dense")(x), None

        scanned = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "data"},
        )
        return scanned(name="stack")(x, None)[0]


def test_sharding_metadata_reaches_the_arrays_of_a_quantized_kernel():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    variables = Sharded().init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(Sharded(), variables, [Rule(".*", W8A8(symmetric=False))])
    specs = nn.unbox(nn.get_partition_spec(qvariables))["params"]
    up, dense = specs["up"]["kernel"], specs["stack"]["dense"]["kernel"]
    assert up.qvalue == P("model", None) and up.scale == up.azp_adj == P("model", None)  # (out, in)
    assert dense.qvalue == P("data", None, "model") and dense.scale == P("data", None, None)  # (layers, out, in)

    shardings = nn.get_sharding(qvariables, mesh)
    placed = jax.device_put(qvariables, shardings)  # boxes on both sides
    unboxed = jax.device_put(nn.unbox(qvariables), nn.unbox(shardings))
    for tree in (nn.unbox(placed), unboxed):
        kernel = tree["params"]["up"]["kernel"]
        assert kernel.qvalue.sharding == NamedSharding(mesh, P("model", None))
        assert kernel.scheme == W8A8(symmetric=False)
    with jax.set_mesh(mesh):
        constrained = jax.jit(lambda v: jax.lax.with_sharding_constraint(v, nn.get_partition_spec(v)))(qvariables)
        got = jax.jit(model.apply)(placed, X)
    sharding = nn.unbox(constrained)["params"]["up"]["kernel"].qvalue.sharding
    assert sharding.is_equivalent_to(NamedSharding(mesh, P("model", None)), 2)
    want = Sharded().apply(variables, X)
    assert jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


def test_a_box_shows_its_kernel_and_names():
    kernel = qlinen.QuantizedKernel(W8A8().quantize_weight(data(8, 4), (-2,)), W8A8(), jnp.float32)
    box = qlinen.QuantizedBox(kernel, nn.LogicallyPartitioned(None, ("in", "out")))
    assert repr(box) == "QuantizedBox(QArray(int8[8,4], scale=float32[1,4], stored=[4,8]), names=('in', 'out'))"
    assert repr(qlinen.QuantizedBox(kernel, qlinen.QuantizedBox(kernel, box))).endswith(", names=None)")


def test_logical_names_become_mesh_axes():
    variables = Sharded("with_logical_partitioning").init(jax.random.key(0), X)
    _, qvariables, _ = qlinen.quantize_model(Sharded(), variables, ALL)
    specs = nn.logical_to_mesh(nn.get_partition_spec(qvariables), [("model", "x"), ("data", None)])
    kernel = nn.unbox(specs)["params"]["stack"]["dense"]["kernel"]
    assert kernel.qvalue == P(None, None, "x")


def test_quant_dense_boxes_its_kernel_as_dense_does():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    layer = qlinen.QuantDense(16, kernel_init=init)
    variables = layer.init(jax.random.key(0), X)
    specs = nn.get_partition_spec(variables)
    assert nn.unbox(specs)["params"]["kernel"].qvalue == P("model", None)
    np.testing.assert_array_equal(layer.apply(variables, X), layer.apply(nn.unbox(variables), X))
    stacked = nn.vmap(
        qlinen.QuantDense,
        in_axes=None,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        axis_size=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    specs = nn.get_partition_spec(stacked(16, kernel_init=init).init(jax.random.key(0), X))
    assert nn.unbox(specs)["params"]["kernel"].qvalue == P("layers", "model", None)


@pytest.mark.parametrize("scheme", [W8A8(symmetric=False), W8A8(activation_scale=0.05)], ids=str)
def test_flax_serialization(scheme):
    layer = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    model, qvariables, _ = qlinen.quantize_model(layer, layer.init(jax.random.key(0), X), [Rule("", scheme)])
    target = jax.tree.map(jnp.zeros_like, qvariables)
    restored = serialization.from_bytes(target, serialization.to_bytes(qvariables))
    assert jax.tree.structure(restored) == jax.tree.structure(qvariables)
    jax.tree.map(np.testing.assert_array_equal, restored, qvariables)
    np.testing.assert_array_equal(model.apply(restored, X), model.apply(qvariables, X))


def test_the_state_of_another_layer_is_refused():
    kernel = qlinen.QuantizedKernel(W8A8().quantize_weight(data(8, 4), (-2,)), W8A8(), jnp.float32)
    with pytest.raises(ValueError, match=r"the state of a quantized kernel is \['a'\], needs \['qvalue', 'scale'\]"):
        serialization.from_state_dict(kernel, {"a": 1})


def test_a_checkpoint_restored_without_a_target_is_called_one(tmp_path):
    variables = nn.Dense(4).init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(nn.Dense(4), variables, ALL)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", qvariables)
        checkpointer.wait_until_finished()
        bare = checkpointer.restore(tmp_path / "model")
        restored = checkpointer.restore(tmp_path / "model", jax.eval_shape(lambda: qvariables))
    with pytest.raises(TypeError, match="a quantized kernel that was restored without a target"):
        model.apply(bare, X)
    np.testing.assert_array_equal(model.apply(restored, X), model.apply(qvariables, X))


def test_a_kernel_without_a_scheme_is_refused():
    variables = nn.Dense(4).init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(nn.Dense(4), variables, ALL)
    params = qvariables["params"] | {"kernel": qvariables["params"]["kernel"].qarray()}
    with pytest.raises(TypeError, match="the kernel of the model is a QArray without a scheme"):
        model.apply({"params": params}, X)


@pytest.mark.parametrize("scheme", [W8A8(symmetric=False), W8A8("float8_e4m3fn", "per_tensor")], ids=str)
def test_exported_programs_can_be_serialized(scheme):
    variables = nn.Dense(4).init(jax.random.key(0), X)
    model, qvariables, _ = qlinen.quantize_model(nn.Dense(4), variables, [Rule("", scheme)])
    exported = jax.export.export(jax.jit(model.apply))(qvariables, X)
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(qvariables, X), jax.jit(model.apply)(qvariables, X))
