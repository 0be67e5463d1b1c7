"""A product of labelled operands by scaled_mm: a (*batch, *rows, K), b (*batch, N, K) -> (*batch, *rows, N)."""

import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_qmm import _compat
from jax_qmm.ops.product import transposed
from jax_qmm.ops.product_form import form_of, result, split_bias
from jax_qmm.ops.scaled_mm import scaled_mm_p
from jax_qmm.ops.weight_only_dot import is_weight_only
from jax_qmm.qarray import QArray
from jax_qmm.reference.activation import NONE


def unserved(product, lhs, rhs):
    """Why scaled_mm does not take these two operands, a key of `dequantized_dot.REASONS`; None where it does."""
    if not product.contracted:
        return "no_contraction"
    quantized = [x for x in (lhs, rhs) if isinstance(x, QArray)]
    for x in quantized:
        if x.merged_axes:
            return "weight_only"
        if not all(count in (1, size) for count, size in zip(x.scale.shape, x.stored_shape)):
            return "blocks"
    if len({x.qtype for x in quantized}) > 1:
        return "two_dtypes"
    return "weight_only" if any(map(is_weight_only, quantized)) else None


class _Operand(NamedTuple):
    """One side in the kernel's order; a vector has 1 for all that follows batch, or all of it."""

    values: Any  # (*batch, *rows, K) or (*batch, N, K)
    scale: Any  # (*batch, *rows) or (*batch, N), like the rest
    zero_point: Any
    sums: Any  # of values over K


def dot(product, lhs, rhs, bias, static):
    """The product; `static` are the scale and zero point of a float operand, or None."""
    form = _form(product, lhs, rhs)
    sides = (lhs, product.lhs), (rhs, product.rhs)
    (x, x_own), (y, y_own) = sides[::-1] if form.flipped else sides
    a = _operand(form, _quantized(product, form, x, x_own, static, other=y), form.rows)
    b = _operand(form, _quantized(product, form, y, y_own, static, other=x), form.columns, folded=True)
    vectors = {"scale_a": a.scale, "scale_b": b.scale, **_zero_points(a, b)}
    column_bias, late_bias = split_bias(product, form, bias)
    if column_bias is not None:
        vectors["bias"] = column_bias
    out = scaled_mm_p.bind(
        *_compat.align_varying([a.values, b.values, *vectors.values()]),
        names=tuple(vectors),
        num_batch=len(form.batch),
        activation=NONE,
        out_dtype=product.out_dtype if late_bias is None else jnp.dtype(jnp.float32),
        fast_accum=not _compat.asks_highest_precision(product.precision) and a.values.dtype != jnp.int8,
        out_sharding=form.out_sharding(product),
    )
    return result(product, form, out, late_bias)


def _form(product, lhs, rhs):
    flipped, batch = _arrange(product, isinstance(lhs, QArray))
    sides = (lhs, product.lhs), (rhs, product.rhs)
    a, b = sides[::-1] if flipped else sides
    return form_of(product, lhs, rhs, flipped, batch, b if isinstance(b[0], QArray) else a)


def _arrange(product, lhs_is_stored):
    """Whether rhs becomes a, and the batch labels, such that the kernel writes the output in its order.

    A label of one operand alone can be a batch label too; the other operand is then repeated along it.
    """
    batch, sides = product.batch, (product.lhs, product.rhs)
    orders = (True, False) if lhs_is_stored else (False, True)  # the stored operand rather as b
    for repeats in (False, True):
        for flipped in orders:
            a, b = sides[::-1] if flipped else sides
            rest = [label for label in product.out if label not in batch]
            taken = list(itertools.takewhile(lambda label: label in b, rest)) if repeats else []
            produced = [
                *batch,
                *taken,
                *(label for side in (a, b) for label in rest if label in side and label not in taken),
            ]
            if tuple(produced) == product.out:
                return flipped, (*batch, *taken)
    return orders[0], batch


def _quantized(product, form, x, own, static, other):
    """A QArray and its labels; a float operand is quantized with the contracted axes last."""
    if isinstance(x, QArray):
        return x, own
    order = [label for label in (*form.batch, *form.rows, *form.columns, *form.contracted) if label in own]
    x = transposed(x, [own.index(label) for label in order])
    scheme = product.scheme.with_static(*static)
    return scheme.quantize_activation(x, len(form.contracted), sums=other.zero_point is not None), order


def _operand(form, side, free, folded=False):
    """The `_Operand` of a QArray and its labels, `free` those of its rows or columns, in one dimension if `folded`."""
    x, own = side
    stored = dict(zip(own, x.storage_axes()))
    order = (*form.batch, *free, *form.contracted)
    axes = [stored[label] for label in order if label in stored]
    missing = [axis for axis, label in enumerate(order) if label not in stored]
    in_order = lambda leaf: jnp.expand_dims(transposed(leaf, axes), missing) if missing else transposed(leaf, axes)
    num_batch, last = len(form.batch), tuple(range(len(order) - len(form.contracted), len(order)))
    shape = form.shape(free)

    def vector(leaf):
        leaf = jnp.squeeze(in_order(leaf), last)
        if any(size != 1 for size in leaf.shape[num_batch:]):
            leaf = jnp.broadcast_to(leaf, (*leaf.shape[:num_batch], *shape))
        return leaf.reshape(*leaf.shape[:num_batch], math.prod(leaf.shape[num_batch:])) if folded else leaf

    summed = tuple(1 if axis in axes[-len(last) :] else size for axis, size in enumerate(x.qvalue.shape))
    sums = x.azp_adj if x.azp_adj is not None and x.azp_adj.shape == summed else None
    values = in_order(x.qvalue)
    middle = (math.prod(shape),) if folded else shape
    values = values.reshape(*values.shape[:num_batch], *middle, math.prod(form.shape(form.contracted)))
    return _Operand(values, *(None if leaf is None else vector(leaf) for leaf in (x.scale, x.zero_point, sums)))


def _zero_points(a, b):
    """The vectors of zero points: that of one side meets the sums of the other, whichever side it is."""
    sums = lambda side: jnp.sum(side.values, -1, dtype=jnp.int32) if side.sums is None else side.sums
    if a.zero_point is None:
        return {} if b.zero_point is None else {"azp": sums(a), "azp_adj": b.zero_point}
    vectors = {"azp": a.zero_point, "azp_adj": sums(b)}
    if b.zero_point is not None:
        vectors |= {"sums_a": sums(a) - a.values.shape[-1] * a.zero_point, "azp_b": b.zero_point}
    return vectors
