"""QArray: the quantized-array pytree."""

import json
import math

import jax
import jax.numpy as jnp
from numpy.lib.array_utils import normalize_axis_tuple

from jax_qmm import reference

QTYPES = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
SCALE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_INT32 = (jnp.dtype(jnp.int32),)
_LEAVES = {"qvalue": QTYPES, "scale": SCALE_DTYPES, "zero_point": _INT32, "azp_adj": _INT32}


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
      azp_adj: int32 sums of `qvalue` over some axes, with those axes kept as 1, or None. See `with_azp_adj`.

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

    def __init__(self, qvalue, scale, zero_point=None, azp_adj=None):
        self.qvalue, self.scale, self.zero_point, self.azp_adj = qvalue, scale, zero_point, azp_adj
        self._permutation = ()
        self._check()

    def _check(self):
        for name, dtypes in _LEAVES.items():
            leaf, needs = getattr(self, name), ", ".join(map(str, dtypes))
            if leaf is None and name in ("zero_point", "azp_adj"):
                continue
            if not hasattr(leaf, "dtype"):
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
    def shape(self):
        return tuple(self.qvalue.shape[axis] for axis in self.storage_axes())

    @property
    def ndim(self):
        return len(self.qvalue.shape)

    @property
    def size(self):
        return math.prod(self.qvalue.shape)

    @property
    def dtype(self):
        return jnp.dtype(self.scale.dtype)

    @property
    def qtype(self):
        return jnp.dtype(self.qvalue.dtype)

    @property
    def nbytes(self):
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def T(self):
        """The view with all axes reversed."""
        return self.transpose()

    @property
    def mT(self):
        """The view with the last two axes swapped."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1, axis2):
        """The view with two axes swapped."""
        (axis1,), (axis2,) = (normalize_axis_tuple(axis, self.ndim, "axis") for axis in (axis1, axis2))
        axes = list(range(self.ndim))
        axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
        return self.transpose(axes)

    def transpose(self, *axes):
        """The view with its axes in the order `axes`, reversed by default; as `jax.Array.transpose`."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            axes = axes[0]
        axes = tuple(range(self.ndim))[::-1] if not axes else axes
        if sorted(axis + self.ndim * (axis < 0) for axis in axes) != list(range(self.ndim)):
            raise ValueError(f"axes is {tuple(axes)}, needs a permutation of the {self.ndim} axes")
        stored = self.storage_axes()
        permutation = tuple(stored[axis] - self.ndim for axis in axes)
        while permutation and permutation[0] == -len(permutation):
            permutation = permutation[1:]  # leading axes in their place may come and go
        return self._replace(_permutation=permutation)

    def storage_axes(self):
        """For each logical axis the axis of the leaves that holds it."""
        if len(self._permutation) > self.ndim:
            raise ValueError(
                f"a QArray view that permutes its last {len(self._permutation)} axes has leaves of rank "
                f"{self.ndim}: a transformation (vmap, scan, indexing) took away a permuted axis"
            )
        leading = self.ndim - len(self._permutation)
        return (*range(leading), *(self.ndim + axis for axis in self._permutation))

    def with_azp_adj(self, axis):
        """The same array with its sums over `axis` as a leaf.

        Products with asymmetric activations subtract the activation's zero point times these sums. Without
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

    def dequantize(self, dtype=None):
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
        new = object.__new__(QArray)
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


def _divides(part, whole):
    # Symbolic dimensions and 0 divide by 1 and themselves alone.
    if isinstance(part, int) and isinstance(whole, int) and part > 0:
        return whole % part == 0
    return reference.is_one(part) or part == whole


jax.export.register_pytree_node_serialization(
    QArray,
    serialized_name="jax_qmm.QArray",
    serialize_auxdata=lambda permutation: json.dumps(permutation).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(bytes(data))),
)
