"""Products (*B, *R, K) x (*B, N, K) -> (*B, *R, N) with further operands: what every op of this form shares.

B are the first `num_batch` dimensions; any operand may have 1 for any of them. What follows them in an operand its
label says: "rk" and "nk" for the matrices, "r" alone for all of R (or 1 for each), "n" for N or 1, "g" for blocks of
K. R stays unfolded until the operands are one device's part, because each of its dimensions can be sharded.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_qmm import _compat
from jax_qmm.ops.sharding import mesh_axes
from jax_qmm.reference import activation as activations
from jax_qmm.reference.block_scaled_mm import epilogue


def batch_shape(operands, num_batch):
    """The sizes of B."""
    shapes = [x.shape for x in operands]
    return tuple(next((s[i] for s in shapes if s[i] != 1), 1) for i in range(num_batch))


def sizes(operands, num_batch):
    """The sizes of B, R, N and K, the first two as tuples."""
    a, b = operands[:2]
    return batch_shape(operands, num_batch), a.shape[num_batch:-1], b.shape[-2], a.shape[-1]


def fold(operands, labels, num_batch):
    """The operands with B in one dimension (1 or all of it) and R in one; no label is one dimension of 1."""
    batch = batch_shape(operands, num_batch)

    def folded(x, label):
        if not all(size == 1 for size in x.shape[:num_batch]):
            x = jnp.broadcast_to(x, (*batch, *x.shape[num_batch:]))
        first = x.ndim - max(len(label) - 1, 0)
        return x.reshape(math.prod(x.shape[:num_batch]), math.prod(x.shape[num_batch:first]), *x.shape[first:])

    return [folded(x, label) for x, label in zip(operands, labels)]


def abstract_result(op, operands, num_batch, out_dtype, out_sharding):
    """The type of the result; `op` is what messages call the product."""
    a, b = operands[:2]
    batch, rows, n, _ = sizes(operands, num_batch)
    shape = (*batch, *rows, n)
    if not _compat.explicit_mesh(a):
        return a.update(shape=shape, dtype=out_dtype, weak_type=False)
    spec = out_sharding.spec if out_sharding else _explicit_spec(op, a.sharding.spec, b.sharding.spec, num_batch)
    return a.update(shape=shape, dtype=out_dtype, weak_type=False, sharding=a.sharding.update(spec=spec))


def _explicit_spec(op, a, b, num_batch):
    if a[-1] is not None and b[-1] is not None:
        raise _compat.ShardingTypeError(
            f"{op}: K is sharded in a ({a}) and in b ({b}), so it is ambiguous how the result is; pass "
            "out_sharding to say so"
        )
    batch = [x if x is not None else y for x, y in zip(a[:num_batch], b[:num_batch])]
    spec = [*batch, *a[num_batch:-1], b[-2]]
    axes = [axis for entry in spec for axis in mesh_axes(entry)]
    if len(axes) != len(set(axes)):
        raise _compat.ShardingTypeError(
            f"{op}: with a sharded as {a} and b as {b}, the result would be sharded twice over one mesh "
            "axis; reshard one of them or pass out_sharding"
        )
    return PartitionSpec(*spec)


def result_and_argument(product, moving, activation, out_dtype):
    """The result of a product that is differentiated, and the float32 argument of its activation: of one product.

    The argument is None where no tangent needs it. `product` takes the activation and the dtype of its result.
    """
    if not moving or activation == activations.NONE:
        return product(activation=activation, out_dtype=out_dtype), None
    y = product(activation=activations.NONE, out_dtype=jnp.dtype(jnp.float32))
    return activations.activate(y, activation).astype(out_dtype), y


def batch_operands(operands, dims, labels, num_batch, out_sharding):
    """The operands of one product in place of those of a vmap.

    Args:
      operands, dims: as a batching rule has them.
      labels: of the operands.

    Returns:
      operands, num_batch, out_sharding, and the dimension of the result that is mapped.
    """
    along_rows = ["r" in label for label in labels]
    # Where only rows are mapped, the mapped dimension becomes one more of them.
    widen = dims[0] is not None and all(is_row for dim, is_row in zip(dims, along_rows) if dim is not None)
    at = num_batch if widen else 0
    operands = [
        x if widen and not is_row else jnp.expand_dims(x, at) if dim is None else jnp.moveaxis(x, dim, at)
        for x, dim, is_row in zip(operands, dims, along_rows)
    ]
    if widen:
        rows = operands[0].shape[num_batch:-1]
        for i, label in enumerate(labels):
            last = operands[i].ndim - len(label) + 1  # of the rows
            if label == "rg" or label == "r" and any(size != 1 for size in operands[i].shape[num_batch:]):
                shape = operands[i].shape
                operands[i] = jnp.broadcast_to(operands[i], (*shape[:num_batch], *rows, *shape[last:]))
    if out_sharding is not None:
        entry = next(jax.typeof(x).sharding.spec[at] for x, dim in zip(operands, dims) if dim is not None)
        spec = out_sharding.spec
        out_sharding = out_sharding.update(spec=PartitionSpec(*spec[:at], entry, *spec[at:]))
    return operands, num_batch + (not widen), out_sharding, at


def whole_and_across(local, names, *, num_batch, activation, out_dtype):
    """Two ways of `local`, whose vectors `names` lists, for `partitioned`: with all that is summed on a device, and
    over mesh axes with one all-reduce of float32 sums, before the bias and the activation."""

    def across(axes):
        def summed(*operands):
            vectors = dict(zip(names, operands[2:]))
            bias = vectors.pop("bias", None)
            sums = local(
                *(*operands[:2], *vectors.values()),
                names=tuple(vectors),
                activation=activations.NONE,
                out_dtype=jnp.dtype(jnp.float32),
            )
            sums = jax.lax.psum(sums, axes)
            return epilogue(sums, bias, num_batch=num_batch, activation=activation, out_dtype=out_dtype)

        return summed

    return functools.partial(local, names=names, activation=activation, out_dtype=out_dtype), across


def factors(shapes, labels, num_batch):
    """The factors of the operands and of the result, as `sharding.partitioned` takes them."""
    batch = [f"b{i}" for i in range(num_batch)]
    of = {"r": [f"r{i}" for i in range(len(shapes[0]) - num_batch - 1)], "n": ["n"], "k": ["k"], "g": ["k"]}
    spell = lambda label: [*batch, *(factor for letter in label for factor in of[letter])]
    return [spell(label) for label in labels], spell("rn")
