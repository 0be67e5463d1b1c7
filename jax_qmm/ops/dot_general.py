"""dot_general, einsum and matmul that take a QArray for either operand.

What the QArray is decides how a float operand on the other side is multiplied:

| QArray | float operand | kernel |
| --- | --- | --- |
| int8 or float8, scales for whole axes | quantized as the scheme says | `scaled_mm`; with `tile_size` the next |
| float8 with blocks of what is contracted, or int8 with such and a `W8A8` | likewise | `block_scaled_mm` |
| int4, packed, with float zero points, or int8 with blocks in its rows in memory | as it is | `block_scaled_mm` |
| int4 and a `W4A8` | int8 | `expanded_mm` |
| int4 and a `W4A8` of float8 | float8 | `block_scaled_mm` |

Two QArrays are multiplied by `scaled_mm`, or where one of them has blocks of what is contracted by `block_scaled_mm`.
By default the scheme quantizes symmetrically and per token: one scale for all that is contracted. With `tile_size` a
float operand gets the blocks of the QArray, or of that size where it has none. The result has the
dtype that the product with the dequantized weight would have, unless `preferred_element_type` names another. Weights
are best stored with the contracted axes last (`quantize(kernel.T).T` for a Flax kernel); stored otherwise they are
transposed at each call.

The derivative by a float operand is that of the product with the dequantized QArray: it passes straight
through the quantizer, as in `fake_quantize`. A static activation scale has the derivative that it has there.
QArrays are constants.

Results are named "quantized_product" for `jax.checkpoint`: its policy `dots_saveable` sees the products of jax.lax
alone, and `save_from_both_policies(dots_saveable, save_only_these_names("quantized_product"))` these too.

Products that the kernels cannot compute (a scale for each value of a contracted axis, blocks of two sizes, blocks or
the packed order along an axis that is not contracted, no contracted axis) are computed in floating point from
dequantized operands; see `jax_qmm.ops.dequantized_dot` for how `explain` sees this.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_qmm.ops import checks
from jax_qmm.ops.contraction import contract
from jax_qmm.qarray import QArray
from jax_qmm.schemes import Scheme


def dot_general(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    scheme: Scheme | None = None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` for QArrays; without one it is that function.

    Sharded operands communicate as those of `scaled_mm`. The kernel sees several contracted axes as one, and
    several uncontracted ones of the weight too: of these only the first in memory can be sharded without
    being gathered, or refused on an Explicit mesh.

    Args:
      lhs: QArray, or float32, bfloat16 or float16 array.
      rhs: likewise.
      dimension_numbers: `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`, in logical axes.
      precision: of fp8 sums, as in `scaled_mm`; int8 is always exact.
      preferred_element_type: float32, bfloat16 or float16; by default the result type of the float operand
        and the scale of the QArray.
      out_sharding: sharding of the result, for Explicit meshes.
      scheme: a `W8A8` or `W4A8` for the float operand, if there is one, or a `W4A16` or `W8A16`, which leave it as it
        is. By default as the table above says, with `W8A8(dtype of the QArray)`.
      bias: float array that broadcasts against the result, added before the one rounding to the output dtype,
        or None.

    Returns:
      Array of shape (batch, rest of lhs, rest of rhs).

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> from jax_qmm import quantize
    >>> w = quantize(jnp.array([[127.0, 0.0], [1.0, -127.0]]).T).T
    >>> dot_general(jnp.array([[127.0, 64.0]]), w, (((1,), (0,)), ((), ()))).tolist()
    [[16193.0, -8128.0]]
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    if not (isinstance(lhs, QArray) or isinstance(rhs, QArray)):
        return _plus(jax.lax.dot_general(lhs, rhs, dimension_numbers, **options), bias)
    shapes = (jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32) for x in (lhs, rhs))
    jax.eval_shape(lambda *args: jax.lax.dot_general(*args, dimension_numbers), *shapes)  # checks the numbers
    left = list(range(jnp.ndim(lhs)))
    right = list(range(len(left), len(left) + jnp.ndim(rhs)))
    contracted, batch = dimension_numbers
    for lhs_axis, rhs_axis in (*zip(*contracted), *zip(*batch)):
        right[rhs_axis] = left[lhs_axis]
    out = [left[axis] for axis in batch[0]]
    out += [label for label in left if label not in right] + [label for label in right if label not in left]
    return contract(lhs, rhs, (left, right, out), names=("lhs", "rhs"), scheme=scheme, bias=bias, **options)


def einsum(
    subscripts: str,
    *operands: ArrayLike | QArray,
    optimize: Any = "auto",
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    scheme: Scheme | None = None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """`jax.numpy.einsum` of two operands for QArrays; without one it is that function.

    Args:
      subscripts: as in `jax.numpy.einsum`, with `...` and without `->` too. With a QArray no letter may come
        twice in one term, and a letter of one term alone must be in the output.
      operands: with a QArray among them exactly two.
      optimize: as in `jax.numpy.einsum`; two operands leave nothing to optimize.
      precision, preferred_element_type, out_sharding, scheme, bias: as in `dot_general`.

    Returns:
      Array.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> from jax_qmm import quantize
    >>> w = quantize(jnp.ones((3, 2, 4)), axis=-1)  # (heads, dim, features), features contracted
    >>> einsum("btf,hdf->bthd", jnp.ones((1, 5, 4)), w).shape
    (1, 5, 3, 2)
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    if not any(isinstance(x, QArray) for x in operands):
        return _plus(jnp.einsum(subscripts, *operands, optimize=optimize, **options), bias)
    if not isinstance(subscripts, str):
        raise ValueError("einsum with a QArray needs its subscripts as a string")
    if len(operands) != 2:
        raise ValueError(f"einsum with a QArray needs 2 operands, got {len(operands)}")
    labels = _einsum_labels(subscripts, *map(jnp.shape, operands))
    return contract(*operands, labels, names=("operand 0", "operand 1"), scheme=scheme, bias=bias, **options)


def matmul(
    a: ArrayLike | QArray,
    b: ArrayLike | QArray,
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    scheme: Scheme | None = None,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """`jax.numpy.matmul` for QArrays; without one it is that function.

    Args:
      a: QArray or float array of rank 1 or more.
      b: likewise.
      precision, preferred_element_type, out_sharding, scheme, bias: as in `dot_general`.

    Returns:
      Array.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> from jax_qmm import quantize
    >>> matmul(jnp.ones((5, 1, 4)), quantize(jnp.ones((3, 4))).T).shape
    (5, 1, 3)
    """
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    if not (isinstance(a, QArray) or isinstance(b, QArray)):
        return _plus(jnp.matmul(a, b, **options), bias)
    for name, x in (("a", a), ("b", b)):
        if jnp.ndim(x) == 0:
            raise ValueError(f"{name} has rank 0, needs 1 or more")
    left, right = ("k" if jnp.ndim(x) == 1 else term for x, term in ((a, "...mk"), (b, "...kn")))
    out = "..." + left[3:-1] + right[4:]
    labels = _einsum_labels(f"{left},{right}->{out}", jnp.shape(a), jnp.shape(b))
    return contract(a, b, labels, names=("a", "b"), scheme=scheme, bias=bias, **options)


def _plus(out, bias):
    if bias is None:
        return out
    return (out + checks.broadcasting("bias", checks.asarray("bias", bias), out.shape)).astype(out.dtype)


def _einsum_labels(subscripts, *shapes):
    """Labels of both operands and the output: letters, and negative numbers for what `...` stands for."""

    def fail(why):
        raise ValueError(f"einsum({subscripts!r}) with operands of shapes {shapes[0]} and {shapes[1]}: {why}")

    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        fail("a QArray needs a string of two terms")
    labels = []
    for term, shape in zip(terms, shapes):
        head, dots, tail = term.partition("...")
        missing = len(shape) - len(head + tail)
        if not (head + tail).isalpha() and head + tail or missing < 0 or (missing and not dots):
            fail(f"{term!r} does not fit shape {shape}")
        if len(set(head + tail)) != len(head + tail):
            fail(f"{term!r} repeats a letter, which a QArray does not support")
        labels.append((*head, *range(-missing, 0), *tail))
    left, right = labels
    dotted = range(min((label for label in left + right if isinstance(label, int)), default=0), 0)
    if arrow:
        head, dots, tail = result.partition("...")
        out = (*head, *(dotted if dots else ()), *tail)
    else:
        letters = sorted(label for label in {*left} ^ {*right} if isinstance(label, str))
        out = (*dotted, *letters)
    if len(set(out)) != len(out) or not set(out) <= {*left, *right}:
        fail(f"the output {result!r} repeats a letter or has one of neither operand")
    spell = lambda label: "'...'" if isinstance(label, int) else repr(label)
    for label in ({*left} ^ {*right} | {*dotted}) - {*out}:
        fail(f"{spell(label)} is summed in one operand alone, which a QArray does not support")
    sizes = dict(zip(left, shapes[0]))
    for label, size in zip(right, shapes[1]):
        other = sizes.get(label, size)
        if other != size and 1 not in (size, other):
            fail(f"{spell(label)} has sizes {other} and {size}")
    return left, right, out
