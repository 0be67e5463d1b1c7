"""The quantized kernel of a linen layer: a QArray that knows how its layer runs, with or without a sharding box.

What the kernel knows is part of the structure of the variables. So it goes where they go, through every
transformation, and caches (nn.jit's too) tell two schemes apart.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_qmm.models.leaf_specs import leaf_specs
from jax_qmm.qarray import QArray, tags_from_json
from jax_qmm.schemes import W4A8, W4A16, W8A8, W8A16, Scheme


@jax.tree_util.register_pytree_with_keys_class
class QuantizedKernel(QArray):
    """A `QArray` among the parameters of a layer.

    Args:
      qarray: the values.
      scheme: how to quantize the layer's input; static scales in it are left out, they are parameters.
      float_dtype: the dtype of the float kernel, which counts when Flax promotes dtypes.

    >>> kernel = QuantizedKernel(W8A8().quantize_weight(jnp.ones((3, 4)), (-2,)), W8A8(), jnp.bfloat16)
    >>> kernel, kernel.scheme
    (QArray(int8[3,4], scale=float32[1,4], stored=[4,3]), W8A8(int8, per_token))
    """

    def __init__(self, qarray: QArray, scheme: Scheme, float_dtype: Any):
        self.__dict__.update(qarray.__dict__)
        self.scheme, self.float_dtype = scheme.with_static(None), jnp.dtype(float_dtype)

    def qarray(self) -> QArray:
        """The plain QArray."""
        return QArray.tree_unflatten(QArray.tree_flatten(self)[1], QArray.tree_flatten(self)[0])

    def tree_flatten_with_keys(self):
        children, tags = super().tree_flatten_with_keys()
        return children, (tags, self.scheme, self.float_dtype)

    def tree_flatten(self):
        children, tags = super().tree_flatten()
        return children, (tags, self.scheme, self.float_dtype)

    @classmethod
    def tree_unflatten(cls, static, children):
        tags, scheme, float_dtype = static
        new = super().tree_unflatten(tags, children)
        new.__dict__.update(scheme=scheme, float_dtype=float_dtype)
        return new


@jax.tree_util.register_pytree_with_keys_class
class QuantizedBox(meta.AxisMetadata):
    """A `QuantizedKernel` with the sharding metadata that the float kernel had, for the kernel's order of axes.

    `nn.unbox` takes the kernel out. `nn.get_partition_spec` and `nn.get_sharding` give a box of specs and
    shardings, one for each array in the kernel: like the variables themselves, `nn.unbox` unboxes them.

    Args:
      value: the quantized kernel.
      box: the float kernel's box, such as an nn.Partitioned; its value does not matter.

    >>> from flax import linen as nn
    >>> kernel = QuantizedKernel(W8A8().quantize_weight(jnp.ones((3, 4)), (-2,)), W8A8(), jnp.float32)
    >>> box = QuantizedBox(kernel, nn.Partitioned(None, (None, "model")))
    >>> box
    QuantizedBox(QArray(int8[3,4], scale=float32[1,4], stored=[4,3]), names=(None, 'model'))
    >>> tuple(nn.get_partition_spec(box).unbox().qvalue)  # stored as (4, 3)
    ('model', None)
    """

    def __init__(self, value: Any, box: meta.AxisMetadata):
        self.value, self.box = value, box.replace_boxed(0)

    def __repr__(self):
        return f"QuantizedBox({self.value!r}, names={getattr(self.box, 'names', None)})"

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "QuantizedBox":
        return QuantizedBox(val, self.box)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "QuantizedBox":
        return QuantizedBox(self.value, self.box.add_axis(index, params))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "QuantizedBox":
        return QuantizedBox(self.value, self.box.remove_axis(index, params))

    def get_partition_spec(self) -> "QuantizedBox":
        """The box with a PartitionSpec for each array."""
        return self._specs(None)

    def get_sharding(self, mesh: Mesh) -> "QuantizedBox":
        """The box with a NamedSharding for each array."""
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._specs(mesh))

    def _specs(self, mesh):
        specs = getattr(self.box, "get_partition_spec", PartitionSpec)  # not all boxes have specs
        return self.replace_boxed(leaf_specs(self.value, specs(), mesh))

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("value"), self.value)], jax.tree.structure(self.box)

    def tree_flatten(self):
        return [self.value], jax.tree.structure(self.box)

    @classmethod
    def tree_unflatten(cls, box, children):
        return cls(*children, jax.tree.unflatten(box, [0]))


def _leaves_to_state(q):
    return {name: leaf for name, leaf in _named_leaves(q)}


def _leaves_from_state(q, state):
    names = [name for name, _ in _named_leaves(q)]
    if not isinstance(state, dict) or sorted(state) != sorted(names):
        found = sorted(state) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"the state of a quantized kernel is {found}, needs {sorted(names)}")
    return jax.tree.unflatten(jax.tree.structure(q), [state[name] for name in names])


def _named_leaves(q):
    return [(path[0].name, leaf) for path, leaf in jax.tree.leaves_with_path(q)]


for _kind in (QArray, QuantizedKernel):
    serialization.register_serialization_state(_kind, _leaves_to_state, _leaves_from_state)
serialization.register_serialization_state(
    QuantizedBox,
    lambda box: {"value": serialization.to_state_dict(box.value)},
    lambda box, state: box.replace_boxed(serialization.from_state_dict(box.value, state["value"])),
)


def _static_to_bytes(static):
    tags, scheme, dtype = static
    return json.dumps([tags, type(scheme).__name__, dataclasses.asdict(scheme), str(dtype)], default=str).encode()


def _static_from_bytes(data):
    tags, name, fields, dtype = json.loads(bytes(data))
    scheme = next(cls for cls in (W8A8, W4A8, W4A16, W8A16) if cls.__name__ == name)
    return tags_from_json(tags), scheme(**fields), jnp.dtype(dtype)


jax.export.register_pytree_node_serialization(
    QuantizedKernel,
    serialized_name="jax_qmm.linen.QuantizedKernel",
    serialize_auxdata=_static_to_bytes,
    deserialize_auxdata=_static_from_bytes,
)
