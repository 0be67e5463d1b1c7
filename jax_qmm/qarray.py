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

from jax_qmm.dtypes import INT32, QTYPES, SCALE_DTYPES
from jax_qmm.reference import quantize as reference

_LEAVES = {"qvalue": QTYPES, "scale": SCALE_DTYPES, "zero_point": (INT32,), "azp_adj": (INT32,)}


@jax.tree_util.register_pytree_with_keys_class
class QArray:
    """A quantized array: `x ~ (qvalue - zero_point) * scale`.

    The shape of `scale` is the granularity: it has the rank of `qvalue`, and each of its dimensions divides
    that of `qvalue`. 1 means that the axis shares one scale; anything between 1 and the whole dimension means
    equal blocks.

    Transposing makes a view: the leaves stay as they are and only the logical order of the axes changes. The
    kernels want the contracted axes last in memory, so the weight of a Flax layer, logically (K, N), is best
    made by `quantize(kernel.T).T`, which stores (N, K). Transformations that map over a leading axis (scan,
    vmap) act on the leaves, so an axis they map over must lie in front of all transposed ones.

    Args:
      qvalue: int8 or float8_e4m3fn array of any shape.
      scale: float32, bfloat16 or float16 array of the rank of `qvalue`.
      zero_point: int32 array of the shape of `scale`, or None. int8 only.
      azp_adj: int32 sums of `qvalue` over some axes, with those axes kept as 1, or None: by which a zero point of the
        other operand shifts a product. `quantize(x, sums=True)` and `with_azp_adj` make them.

    Raises:
      TypeError: for a leaf of a dtype not listed above.
      ValueError: for a leaf of a shape that does not fit.

    Attributes:
      shape, ndim, size: those of the logical array.
      dtype: the dtype of `scale`, which is what `dequantize()` returns.
      qtype: the dtype of `qvalue`.
      nbytes: bytes of all leaves.

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
    _permutation: tuple[int, ...]

    def __init__(
        self,
        qvalue: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array | None = None,
        azp_adj: jax.Array | None = None,
    ):
        self.qvalue, self.scale, self.zero_point, self.azp_adj = qvalue, scale, zero_point, azp_adj
        self._permutation = ()
        self._check()

    def _check(self):
        for name, dtypes in _LEAVES.items():
            leaf: Any = getattr(self, name)
            needs = ", ".join(map(str, dtypes))
            if leaf is None and name in ("zero_point", "azp_adj"):
                continue
            if leaf is None or not hasattr(leaf, "dtype"):
                raise TypeError(f"{name} is a {type(leaf).__name__}, needs an array of {needs}")
            if leaf.dtype not in dtypes:
                raise TypeError(f"{name} has dtype {leaf.dtype}, needs {needs}")
        shape, scale_shape = self.qvalue.shape, self.scale.shape
        if len(shape) != len(scale_shape) or not all(map(_divides, scale_shape, shape)):
            raise ValueError(
                f"scale has shape {scale_shape}, needs the rank of qvalue {shape} "
                "and dimensions that divide its dimensions"
            )
        if self.zero_point is not None:
            if self.qtype != jnp.int8:
                raise TypeError(f"zero_point was given with qvalue of dtype {self.qtype}, needs int8")
            if self.zero_point.shape != scale_shape:
                raise ValueError(f"zero_point has shape {self.zero_point.shape}, needs that of scale {scale_shape}")
        sums = () if self.azp_adj is None else self.azp_adj.shape
        if sums and (len(sums) != len(shape) or any(n not in (1, size) for n, size in zip(sums, shape))):
            raise ValueError(f"azp_adj has shape {sums}, needs that of qvalue {shape} with 1 on summed axes")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.qvalue.shape[axis] for axis in self.storage_axes())

    @property
    def ndim(self) -> int:
        return len(self.qvalue.shape)

    @property
    def size(self) -> int:
        return math.prod(self.qvalue.shape)

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.scale.dtype)

    @property
    def qtype(self) -> np.dtype:
        return jnp.dtype(self.qvalue.dtype)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

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

        Args:
          shape: as in `jax.Array.reshape`; one size can be -1.

        Raises:
          ValueError: where axes that are merged or split share some scales but not all, or do not lie beside each
            other in memory.

        >>> QArray(jnp.ones((6, 4), jnp.int8), jnp.ones((6, 1))).T.reshape(2, 2, 3, 2)
        QArray(int8[2,2,3,2], scale=float32[1,1,3,2], stored=[3,2,2,2])
        """
        sizes: Any = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        new = jax.eval_shape(lambda: jnp.empty(self.shape, jnp.int8).reshape(sizes)).shape
        stored = self.storage_axes()
        groups = [([stored[axis] for axis in axes], parts) for axes, parts in _groups(self.shape, new)]
        in_memory = sorted(range(len(groups)), key=lambda i: groups[i][0] or [self.ndim])

        def reshaped(leaf):
            out = []
            for axes, parts in (groups[i] for i in in_memory):
                counts, whole = ([x.shape[axis] for axis in axes] for x in (leaf, self.qvalue))
                beside = axes == [*range(axes[0], axes[0] + len(axes))] if axes else True
                if not beside or counts != whole and any(count != 1 for count in counts):
                    raise ValueError(
                        f"{self} has no shape {new}: scales or memory divide the axes {axes} of its leaves"
                    )
                out += [new[part] if counts == whole else 1 for part in parts]
            return leaf.reshape(out)

        order = [part for i in in_memory for part in groups[i][1]]
        return jax.tree.map(reshaped, self._replace(_permutation=())).transpose(
            [order.index(i) for i in range(len(new))]
        )

    def astype(self, dtype: DTypeLike) -> Self:
        """The same 8-bit values with their scale in `dtype`, which is the dtype of a QArray.

        Args:
          dtype: float32, bfloat16 or float16.

        Raises:
          TypeError: for another dtype.
        """
        if jnp.dtype(dtype) not in SCALE_DTYPES:
            needs = ", ".join(map(str, SCALE_DTYPES))
            raise TypeError(f"dtype is {jnp.dtype(dtype)}, needs {needs}: the dtype of a QArray is that of its scale")
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
        axes = normalize_axis_tuple(axis, self.ndim, "axis")
        stored = self.storage_axes()
        sums = jnp.sum(self.qvalue, axis=tuple(stored[a] for a in axes), dtype=jnp.int32, keepdims=True)
        return self._replace(azp_adj=sums)

    def dequantize(self, dtype: DTypeLike | None = None) -> jax.Array:
        """`(qvalue - zero_point) * scale` in the logical order, computed in float32.

        Args:
          dtype: of the result; the dtype of `scale` by default.

        >>> QArray(jnp.int8([2, 4]), jnp.float32([0.5])).dequantize(jnp.bfloat16).tolist()
        [1.0, 2.0]
        """
        blocked, blocks = [], []
        for size, count in zip(self.qvalue.shape, self.scale.shape):
            whole = count in (1, size)
            blocked += [size] if whole else [count, size // count]
            blocks += [count] if whole else [count, 1]
        leaves = self.qvalue, self.scale, self.zero_point
        if len(blocked) > self.ndim:
            split = lambda leaf, shape: None if leaf is None else leaf.reshape(shape)
            leaves = split(leaves[0], blocked), split(leaves[1], blocks), split(leaves[2], blocks)
        out = reference.dequantize(*leaves, dtype)
        if len(blocked) > self.ndim:
            out = out.reshape(self.qvalue.shape)
        return jnp.transpose(out, self.storage_axes()) if self._permutation else out

    def __getitem__(self, index):
        if index is not Ellipsis:  # flax.nnx reads its parameters by `param[...]`
            raise TypeError(
                f"a QArray can only be indexed by [...], got {index!r}; "
                "to take one of a stack: jax.tree.map(lambda leaf: leaf[i], q)"
            )
        return self

    def __repr__(self):
        leaves = [leaf for leaf in map(self.__dict__.get, _LEAVES) if leaf is not None]
        if not leaves or not all(hasattr(leaf, "dtype") for leaf in leaves):  # a tree of paths, specs, ...
            parts = [repr(self.qvalue), *(f"{name}={getattr(self, name)!r}" for name in [*_LEAVES][1:])]
            return f"QArray({', '.join(parts)})"
        stored = self.storage_axes()
        describe = lambda leaf: f"{leaf.dtype}[{','.join(str(leaf.shape[axis]) for axis in stored)}]"
        leaves = ((name, getattr(self, name)) for name in [*_LEAVES][1:])
        parts = [describe(self.qvalue)]
        parts += [f"{name}={describe(leaf)}" for name, leaf in leaves if leaf is not None]
        if self._permutation:
            parts.append(f"stored=[{','.join(map(str, self.qvalue.shape))}]")
        return f"QArray({', '.join(parts)})"

    def _replace(self, **changes):
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__ | changes)
        return new

    def tree_flatten_with_keys(self):
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in _LEAVES)
        return children, self._permutation

    def tree_flatten(self):
        return tuple(getattr(self, name) for name in _LEAVES), self._permutation

    @classmethod
    def tree_unflatten(cls, permutation, children):
        new = object.__new__(cls)  # no checks: transformations put all sorts of objects in place of leaves
        new.__dict__.update(zip(_LEAVES, children), _permutation=permutation)
        return new


def _groups(old, new):
    """Axes of the shape `old` and those of `new` that hold the same values, as few at once as can be.

    >>> _groups((6, 4, 5), (2, 3, 20))
    [((0,), (0, 1)), ((1, 2), (2,))]
    >>> _groups((0, 4), (7, 0))  # of no values: all at once, where the sizes don't tell
    [((0, 1), (0, 1))]
    """
    groups, i, j = [], 0, 0
    while i < len(old):
        ends = ((p, q) for p in range(i + 1, len(old) + 1) for q in range(j, len(new) + 1))
        same = [(p, q) for p, q in ends if math.prod(old[i:p]) == math.prod(new[j:q])]
        if not same:
            break
        p, q = same[0]
        groups.append((tuple(range(i, p)), tuple(range(j, q))))
        i, j = p, q
    if i < len(old) or math.prod(new[j:]) != 1:
        return [(tuple(range(len(old))), tuple(range(len(new))))]
    return groups + [((), (axis,)) for axis in range(j, len(new))]


def _divides(part, whole):
    return part == whole or (part != 0 and whole % part == 0)


jax.export.register_pytree_node_serialization(
    QArray,
    serialized_name="jax_qmm.QArray",
    serialize_auxdata=lambda permutation: json.dumps(permutation).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
)
