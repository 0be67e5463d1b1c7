"""QArray: the quantized-array pytree."""

import json
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from numpy.lib.array_utils import normalize_axis_tuple

from jax_qmm.dtypes import INT8, INT32, SCALE_DTYPES, WEIGHT_QTYPES, array_bytes, check_qtype
from jax_qmm.qarray_leaves import LEAVES, cast, check
from jax_qmm.qarray_reshape import reshaped
from jax_qmm.reference import packing, quantize as reference


@jax.tree_util.register_pytree_with_keys_class
class QArray:
    """A quantized array: `x ~ (qvalue - zero_point) * scale`.

    The shape of `scale` is the granularity: it has the rank of `qvalue`, and each of its dimensions divides
    that of `qvalue`. 1 means that the axis shares one scale; anything between 1 and the whole dimension means
    equal blocks. On the last axis the blocks may also be of `tile_size` with a shorter last one.

    Transposing makes a view: the leaves stay as they are and only the logical order of the axes changes. The
    kernels want the contracted axes last in memory, so the weight of a Flax layer, logically (K, N), is best
    made by `quantize(kernel.T).T`, which stores (N, K). Transformations that map over a leading axis (scan,
    vmap) act on the leaves, so an axis they map over must lie in front of all transposed ones.

    int4 and int8 weights for products with float activations (`block_scaled_mm`) are best packed: `pack()` puts the
    values into the order that the kernels read, two int4 values a byte. All else of the QArray stays the same.

    Where a product contracts several axes, its weight is best quantized and packed with these as one: reshaping it to
    have them apart merges them in memory, so that the leaves have 1 for each but the last.

    Args:
      qvalue: int8, int4 or float8_e4m3fn array of any shape; with `qtype` any integers.
      scale: float32, bfloat16 or float16 array of the rank of `qvalue`; with `scale_step` int8, multiples of it.
      zero_point: array of the shape of `scale`, or None: int32 (with `scale_step` int8), or for weights of products
        with float activations float32, bfloat16 or float16 (see `from_offset`). int8 and int4 only.
      azp_adj: int32 sums of `qvalue` over some axes, with those axes kept as 1, or over blocks, in the shape of
        `scale`, or None: by which a zero point of the other operand shifts a product. `quantize(x, sums=True)` and
        `with_azp_adj` make them.
      scale_step: for int4, float array of the shape of `scale` with 1 on the axes that a product contracts, or None:
        the second level of scales, `x ~ (qvalue - zero_point) * scale * scale_step`. The values less their zero points
        times the multiples in `scale` are int8. `W4A8` makes it.
      qtype: int8 or int4, to which the integers of `qvalue` are cast; None takes them as they are.
      tile_size: the length of a block on the last axis, needed where the blocks there are not equal.

    Raises:
      TypeError: for a leaf of a dtype not listed above.
      ValueError: for a leaf of a shape that does not fit, for values out of the range of `qtype`, or for integer zero
        points out of the range of the values. Traced ones can't be seen.

    Attributes:
      shape, ndim, size: those of the logical array.
      dtype: the dtype of `scale`, or of `scale_step` where there is one, which is what `dequantize()` returns.
      qtype: the dtype of the values, int8, int4 or float8_e4m3fn.
      tile_size: how many values of the last axis in memory share a scale; the last block may be shorter.
      stored_shape: the shape of the values in the order of their axes in memory.
      values_shape: that with merged axes as in the leaves, the shape of an unpacked `qvalue`.
      merged_axes: how many of the last axes in memory are merged; 0 for none.
      is_packed: whether `qvalue` is uint8 in the order of the kernels.
      nbytes: bytes of all leaves on a device, where int4 takes half a byte.

    >>> q = QArray(jnp.ones((2, 3), jnp.int8), jnp.full((2, 1), 0.5))
    >>> q.T
    QArray(int8[3,2], scale=float32[1,2], stored=[2,3])
    >>> q.T.dequantize().tolist()
    [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    """

    __array_ufunc__ = None  # numpy's arrays leave `array @ q` to __rmatmul__, and so on

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    azp_adj: jax.Array | None
    scale_step: jax.Array | None
    _permutation: tuple[int, ...]
    _tile_size: int | None  # None where the blocks of the last axis are equal
    _packed: tuple[str, int] | None  # the qtype, and the columns that fill up the last axis
    _merged: tuple[int, ...]  # the sizes of merged axes

    def __init__(
        self,
        qvalue: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array | None = None,
        azp_adj: jax.Array | None = None,
        scale_step: jax.Array | None = None,
        *,
        qtype: DTypeLike | None = None,
        tile_size: int | None = None,
    ):
        self.qvalue, self.scale, self.zero_point = qvalue, scale, zero_point
        self.azp_adj, self.scale_step = azp_adj, scale_step
        if qtype is not None:
            self.qvalue = cast("qvalue", qvalue, check_qtype("qtype", qtype, WEIGHT_QTYPES))
        check(self, tile_size)
        if tile_size and (scale.shape[-1] <= 1 or scale.shape[-1] * tile_size == self.qvalue.shape[-1]):
            tile_size = None  # it follows from the shapes
        self._permutation, self._tile_size, self._packed, self._merged = (), tile_size and int(tile_size), None, ()

    @classmethod
    def from_offset(
        cls,
        qvalue: jax.Array,
        scale: jax.Array,
        offset: jax.Array,
        *,
        qtype: DTypeLike | None = None,
        tile_size: int | None = None,
    ) -> Self:
        """The QArray of `qvalue * scale + offset`, for offsets of any size: its zero point is `-offset / scale`.

        Where the scale is 0, or so small beside the offset that the quotient overflows, the block is a constant. It
        becomes exact with values of 0, a scale of 1 and the zero point `-offset`.

        Args:
          qvalue, scale, qtype, tile_size: as in `QArray`; int8 or int4.
          offset: float array of the shape of `scale`.

        Returns:
          A QArray with a float32 zero point.

        Raises:
          TypeError, ValueError: as in `QArray`, and for an offset that is no float array of the shape of `scale`.

        >>> QArray.from_offset(jnp.int8([[1, 2]]), jnp.float32([[0.5]]), jnp.float32([[10.25]])).dequantize().tolist()
        [[10.75, 11.25]]
        >>> QArray.from_offset(jnp.int8([[1, 2]]), jnp.float32([[0.0]]), jnp.float32([[10.25]])).dequantize().tolist()
        [[10.25, 10.25]]
        """
        q = cls(qvalue, scale, qtype=qtype, tile_size=tile_size)
        if q.qtype not in WEIGHT_QTYPES:
            raise TypeError(f"qvalue has dtype {q.qtype}, needs int8 or int4 beside an offset")
        if not hasattr(offset, "dtype") or not jnp.issubdtype(offset.dtype, jnp.floating):
            raise TypeError(f"offset is {offset!r}, needs a float array")
        if offset.shape != scale.shape:
            raise ValueError(f"offset has shape {offset.shape}, needs that of scale {scale.shape}")
        offset = jnp.asarray(offset, jnp.float32)
        constant = (q.scale == 0) | jnp.isinf(offset / q.scale.astype(jnp.float32))
        values = jnp.where(q.along_values(constant), jnp.zeros((), q.qtype), q.qvalue)
        scale = jnp.where(constant, jnp.ones((), q.dtype), q.scale)  # also below: a gradient of x / 0 is NaN
        return q._replace(qvalue=values, scale=scale, zero_point=-offset / scale.astype(jnp.float32))

    def offset(self) -> jax.Array | None:
        """`-scale * zero_point` in float32, what `from_offset` takes; None without a zero point.

        >>> QArray.from_offset(jnp.int8([[1]]), jnp.float32([[0.5]]), jnp.float32([[10.25]])).offset().tolist()
        [[10.25]]
        """
        if self.zero_point is None:
            return None
        return -self.float_scale().astype(jnp.float32) * self.zero_point.astype(jnp.float32)

    def float_scale(self) -> jax.Array:
        """The scale of each block: `scale`, or in float32 `scale * scale_step` where there is a step.

        >>> QArray(jnp.int4([[1, 2]]), jnp.int8([[3, 4]]), scale_step=jnp.float32([[0.5]])).float_scale().tolist()
        [[1.5, 2.0]]
        """
        if self.scale_step is None:
            return self.scale
        return self.scale.astype(jnp.float32) * self.scale_step.astype(jnp.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.stored_shape
        return tuple(stored[axis] for axis in self.storage_axes())

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.values_shape[: self.ndim - self.merged_axes], *self._merged)

    @property
    def values_shape(self) -> tuple[int, ...]:
        if self._packed is None:
            return self.qvalue.shape
        *leading, size = self.qvalue.shape
        return (*leading, size * packing.columns_a_byte(self.qtype) - self._packed[1])

    @property
    def merged_axes(self) -> int:
        return len(self._merged)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def tile_size(self) -> int:
        return self.tile_along(self.ndim - 1)

    def tile_along(self, axis: int) -> int:
        """How many values along one of the `values_shape`'s axes share a scale; the last tile may be short."""
        size, count = self.values_shape[axis], self.scale.shape[axis]
        return (axis == self.ndim - 1 and self._tile_size) or (1 if 0 in (size, count) else size // count)

    @property
    def ndim(self) -> int:
        return len(self.qvalue.shape)

    @property
    def size(self) -> int:
        return math.prod(self.stored_shape)

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype((self.scale if self.scale_step is None else self.scale_step).dtype)

    @property
    def qtype(self) -> np.dtype:
        return jnp.dtype(self.qvalue.dtype if self._packed is None else self._packed[0])

    @property
    def nbytes(self) -> int:
        return sum(map(array_bytes, jax.tree.leaves(self)))

    @property
    def sharding(self) -> Self:
        """A QArray with the sharding of each leaf in its place, as `jax.device_put` and `jax.jit` take them."""
        of = lambda leaf: getattr(jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf, "sharding", None)
        return jax.tree.map(of, self)

    @property
    def T(self) -> Self:
        """The view with all axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> Self:
        """The view with the last two axes swapped."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """The view with two axes swapped."""
        (axis1,), (axis2,) = (normalize_axis_tuple(axis, self.ndim, "axis") for axis in (axis1, axis2))
        axes = list(range(self.ndim))
        axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
        return self.transpose(axes)

    def transpose(self, *axes: int | Sequence[int]) -> Self:
        """The view with its axes in the order `axes`, reversed by default; as `jax.Array.transpose`."""
        order: Any = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = tuple(order or range(self.ndim)[::-1])
        if sorted(axis + self.ndim * (axis < 0) for axis in order) != list(range(self.ndim)):
            raise ValueError(f"axes is {order}, needs a permutation of the {self.ndim} axes")
        stored = self.storage_axes()
        permutation = tuple(stored[axis] - self.ndim for axis in order)
        while permutation and permutation[0] == -len(permutation):
            permutation = permutation[1:]  # leading axes in their place may come and go
        return self._replace(_permutation=permutation)

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """The same values in another shape, where the scales go along.

        Of packed values, or blocks, the last axis in memory can be split: into axes that are merged in memory.

        Args:
          shape: as in `jax.Array.reshape`; one size can be -1.

        Raises:
          ValueError: where axes that are merged or split share some scales but not all, or do not lie beside each
            other in memory.

        >>> QArray(jnp.ones((6, 4), jnp.int8), jnp.ones((6, 1))).T.reshape(2, 2, 3, 2)
        QArray(int8[2,2,3,2], scale=float32[1,1,3,2], stored=[3,2,2,2])
        >>> QArray(jnp.ones((4, 6), jnp.int8), jnp.ones((4, 1))).pack().reshape(4, 2, 3)
        QArray(int8[4,2,3], scale=float32[4,1,1], merged=2, packed)
        """
        sizes: Any = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        new = jax.eval_shape(lambda: jnp.empty(self.shape, jnp.int8).reshape(sizes)).shape
        return reshaped(self, new)

    def astype(self, dtype: DTypeLike) -> Self:
        """The same values with their scale in `dtype`, which is the dtype of a QArray.

        Args:
          dtype: float32, bfloat16 or float16.

        Raises:
          TypeError: for another dtype.
        """
        if jnp.dtype(dtype) not in SCALE_DTYPES:
            needs = ", ".join(map(str, SCALE_DTYPES))
            raise TypeError(f"dtype is {jnp.dtype(dtype)}, needs {needs}: the dtype of a QArray is that of its scale")
        if self.scale_step is not None:
            return self._replace(scale_step=self.scale_step.astype(dtype))
        return self._replace(scale=self.scale.astype(dtype))

    def __matmul__(self, other):
        from jax_qmm.ops.dot_general import matmul  # which is made of QArrays

        return matmul(self, other)

    def __rmatmul__(self, other):
        from jax_qmm.ops.dot_general import matmul

        return matmul(other, self)

    def _no_arithmetic(self, *others):
        raise TypeError(f"{self} has no arithmetic but @ and jax_qmm.matmul: compute with its .dequantize()")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _no_arithmetic
    __neg__ = __pos__ = __abs__ = _no_arithmetic

    def storage_axes(self) -> tuple[int, ...]:
        """For each logical axis the axis of the leaves that holds it."""
        if len(self._permutation) > self.ndim:
            raise ValueError(
                f"a QArray view that permutes its last {len(self._permutation)} axes has leaves of rank "
                f"{self.ndim}: a transformation (vmap, scan, indexing) took away a permuted axis"
            )
        leading = self.ndim - len(self._permutation)
        return (*range(leading), *(self.ndim + axis for axis in self._permutation))

    def with_azp_adj(self, axis: int | Sequence[int]) -> Self:
        """The same array with its sums over `axis` as a leaf.

        Products with an asymmetric operand subtract its zero point times these sums of the other. Without
        the leaf each call adds up the whole weight again: XLA cannot know that an argument of a jitted
        function never changes.

        Args:
          axis: int or tuple, the logical axes that the product contracts.

        >>> QArray(jnp.int8([[1, 2], [3, 4]]), jnp.ones((2, 1))).T.with_azp_adj(0).azp_adj.tolist()
        [[3], [7]]
        """
        if self.is_packed or self.merged_axes:
            how = "has merged axes, needs to have one" if self.merged_axes else "is packed, needs to be plain"
            raise ValueError(f"{self} {how} for sums of its values: take its .unpack()")
        axes = normalize_axis_tuple(axis, self.ndim, "axis")
        stored = self.storage_axes()
        sums = jnp.sum(self.qvalue, axis=tuple(stored[a] for a in axes), dtype=jnp.int32, keepdims=True)
        return self._replace(azp_adj=sums)

    def along_values(self, leaf: jax.Array) -> jax.Array:
        """A scale or zero point with a value for each one of `qvalue` along the axes of which it has blocks."""
        for axis, (count, size) in enumerate(zip(leaf.shape, self.values_shape)):
            if count not in (1, size):
                tile = self._tile_size if axis == leaf.ndim - 1 else None
                leaf = reference.spread(leaf, tile or size // count, size, axis)
        return leaf

    def pack(self) -> Self:
        """The same array with its values in the order that the kernels of `block_scaled_mm` read.

        That is one order for all kernels and all GPUs (`jax_qmm.reference.packing`), along the last axis in memory,
        which products contract: `quantize(kernel.T, jnp.int4, tile_size=128).pack().T` for a Flax kernel. Products take
        a QArray that is not packed as well, and pack it at each call. `azp_adj` is left out. An axis that is sharded
        off the boundaries of 128 columns is gathered, as by `unpack` and `dequantize`.

        Returns:
          A QArray with a uint8 `qvalue`, and int8 zero points if they are integers; itself where it is packed.

        Raises:
          TypeError: if the values are not int8 or int4.
          ValueError: if an integer zero point is out of the range of the values. Traced ones can't be seen: they wrap.

        >>> q = QArray(jnp.zeros((4, 300), jnp.int4), jnp.ones((4, 3)), tile_size=128)
        >>> q.pack(), q.pack().qvalue.shape, q.pack().nbytes
        (QArray(int4[4,300], scale=float32[4,3], tile_size=128, packed), (4, 192), 816)
        """
        if self.is_packed:
            return self
        if self.qtype not in WEIGHT_QTYPES or self.ndim == 0:
            raise TypeError(f"{self} can't be packed: it needs int8 or int4 values of rank 1 or more")
        zero_point = self.zero_point
        if zero_point is not None and zero_point.dtype == INT32:
            zero_point = cast("zero_point", zero_point, self.qtype).astype(INT8)
        padding = -self.qvalue.shape[-1] % packing.COLUMNS
        return self._replace(
            qvalue=packing.pack(self.qvalue),
            zero_point=zero_point,
            azp_adj=None,
            _packed=(self.qtype.name, padding),
        )

    def unpack(self) -> Self:
        """The same array with its values in their plain order, and the zero points of a plain QArray."""
        if not self.is_packed:
            return self
        zero_point = self.zero_point
        if zero_point is not None and zero_point.dtype == INT8 and self.scale_step is None:
            zero_point = zero_point.astype(INT32)
        qvalue = packing.unpack(self.qvalue, self.qtype, self.values_shape[-1])
        return self._replace(qvalue=qvalue, zero_point=zero_point, _packed=None)

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """`(qvalue - zero_point) * scale` in the logical order, computed in float32.

        Args:
          dtype: of the result; the QArray's by default.

        >>> QArray(jnp.int8([2, 4]), jnp.float32([0.5])).dequantize(jnp.bfloat16).tolist()
        [1.0, 2.0]
        """
        q = self.unpack()
        along = (None if leaf is None else q.along_values(leaf) for leaf in (q.float_scale(), q.zero_point))
        out = reference.dequantize(q.qvalue, *along, dtype or self.dtype)
        out = out.reshape(self.stored_shape) if self.merged_axes else out
        return jnp.transpose(out, self.storage_axes()) if self._permutation else out

    def __getitem__(self, index):
        if index is not Ellipsis:  # flax.nnx reads its parameters by `param[...]`
            raise TypeError(
                f"a QArray can only be indexed by [...], got {index!r}; "
                "to take one of a stack: jax.tree.map(lambda leaf: leaf[i], q)"
            )
        return self

    def __repr__(self):
        leaves = [leaf for leaf in map(self.__dict__.get, LEAVES) if leaf is not None]
        if not leaves or not all(hasattr(leaf, "dtype") for leaf in leaves):  # a tree of paths, specs, ...
            parts = [repr(self.qvalue), *(f"{name}={getattr(self, name)!r}" for name in [*LEAVES][1:])]
            return f"QArray({', '.join(parts)})"
        stored = self.storage_axes()
        describe = lambda dtype, shape: f"{dtype}[{','.join(str(shape[axis]) for axis in stored)}]"
        leaves = ((name, getattr(self, name)) for name in [*LEAVES][1:])
        parts = [describe(self.qtype, self.stored_shape)]
        parts += [f"{name}={describe(leaf.dtype, leaf.shape)}" for name, leaf in leaves if leaf is not None]
        if self._permutation:
            parts.append(f"stored=[{','.join(map(str, self.stored_shape))}]")
        parts += [] if self._tile_size is None else [f"tile_size={self._tile_size}"]
        parts += [f"merged={self.merged_axes}"] if self.merged_axes else []
        parts += ["packed"] if self.is_packed else []
        return f"QArray({', '.join(parts)})"

    def _replace(self, **changes):
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__ | changes)
        return new

    def _tags(self):
        return self._permutation, self._tile_size, self._packed, self._merged

    def tree_flatten_with_keys(self):
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in LEAVES)
        return children, self._tags()

    def tree_flatten(self):
        return tuple(getattr(self, name) for name in LEAVES), self._tags()

    @classmethod
    def tree_unflatten(cls, tags, children):
        new = object.__new__(cls)  # no checks: transformations put all sorts of objects in place of leaves
        new.__dict__.update(zip((*LEAVES, "_permutation", "_tile_size", "_packed", "_merged"), (*children, *tags)))
        return new


def tags_from_json(tags):
    """The static tags of a QArray, of which JSON made lists."""
    permutation, tile_size, packed, merged = tags
    return tuple(permutation), tile_size, None if packed is None else tuple(packed), tuple(merged)


jax.export.register_pytree_node_serialization(
    QArray,
    serialized_name="jax_qmm.QArray",
    serialize_auxdata=lambda tags: json.dumps(tags).encode(),
    deserialize_auxdata=lambda data: tags_from_json(json.loads(bytes(data))),
)
