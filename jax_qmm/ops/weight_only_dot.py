"""A product of labelled operands by block_scaled_mm: x (*batch, *rows, K), w (*batch, N, K) -> (*batch, *rows, N)."""

import math

import jax.numpy as jnp

from jax_qmm.dtypes import INT4, WEIGHT_QTYPES
from jax_qmm.ops.block_scaled_mm import weight_product
from jax_qmm.ops.product import transposed
from jax_qmm.ops.product_form import form_of, result, split_bias
from jax_qmm.qarray import QArray
from jax_qmm.reference.activation import NONE
from jax_qmm.reference.packing import COLUMNS


def is_weight_only(x: QArray) -> bool:
    """Whether a QArray is for float activations: int4, packed, merged, with float zero points or blocks in rows."""
    if x.qtype not in WEIGHT_QTYPES:
        return False
    blocks = x.ndim > 0 and x.scale.shape[-1] not in (1, x.stored_shape[-1])
    float_zero_points = x.zero_point is not None and jnp.issubdtype(x.zero_point.dtype, jnp.floating)
    return x.qtype == INT4 or x.is_packed or x.merged_axes > 0 or blocks or float_zero_points


def unserved(product, lhs, rhs):
    """Why block_scaled_mm does not take these two operands, a key of `dequantized_dot.REASONS`; None where it does."""
    if not product.contracted:
        return "no_contraction"
    w, own = (lhs, product.lhs) if isinstance(lhs, QArray) else (rhs, product.rhs)
    stored = dict(zip(own, w.storage_axes()))
    *outer, inner = sorted(stored[label] for label in product.contracted)
    if not {*range(w.ndim - w.merged_axes, w.ndim)} <= {*outer, inner}:
        return "merged"
    sizes, counts = w.values_shape, w.scale.shape
    if any(counts[axis] not in (1, sizes[axis]) for axis in range(w.ndim) if axis != inner):
        return "blocks"
    several = any(sizes[axis] != 1 for axis in outer)
    if several and sizes[inner] % w.tile_along(inner) != 0:
        return "blocks"
    if w.is_packed and (inner != w.ndim - 1 or several and sizes[inner] % COLUMNS != 0):
        return "packed"
    return None


def dot(product, lhs, rhs, bias, static):
    """The product; a float operand has no static scale."""
    flipped = isinstance(lhs, QArray)
    sides = (lhs, product.lhs), (rhs, product.rhs)
    (x, x_own), (w, w_own) = sides[::-1] if flipped else sides
    form = form_of(product, lhs, rhs, flipped, product.batch, (w, w_own))
    x = transposed(x, [x_own.index(label) for label in (*form.batch, *form.rows, *form.contracted)])
    x = x.reshape(*x.shape[: -len(form.contracted)], math.prod(form.shape(form.contracted)))
    column_bias, late_bias = split_bias(product, form, bias)
    out_dtype = product.out_dtype if late_bias is None else jnp.dtype(jnp.float32)
    return result(product, form, of_matrix(product, form, x, w, w_own, column_bias, out_dtype), late_bias)


def of_matrix(product, form, x, w, own, bias, out_dtype):
    """The product of x `(*batch, *rows, K)` and w, with a bias of columns or None, as `(*batch, *rows, N)`."""
    values, vectors, block = _weight(form, w, own)
    return weight_product(
        *(x, values, vectors | {"bias": bias}),
        num_batch=len(form.batch),
        qtype=w.qtype,
        packed=w.is_packed,
        block=block,
        activation=NONE,
        out_dtype=out_dtype,
        out_sharding=form.out_sharding(product),
    )


def _weight(form, w, own):
    """The values of w as `(*batch, N, K)`, its scale and zero point as `(*batch, N, G)`, and the columns of a block."""
    stored = dict(zip(own, w.storage_axes()))
    axes = [stored[label] for label in (*form.batch, *form.columns, *form.contracted)]
    columns, first = form.shape(form.columns), len(form.batch) + len(form.columns)
    merged = lambda x: x.reshape(*x.shape[: len(form.batch)], math.prod(columns), math.prod(x.shape[first:]))
    shared = _shares_scale(form, w, stored)
    outer = [w.values_shape[stored[label]] for label in form.contracted[:-1]]

    def vector(leaf):
        leaf = transposed(leaf, axes)
        blocks = leaf.shape[first:] if shared else (*outer, leaf.shape[-1])
        return merged(jnp.broadcast_to(leaf, (*leaf.shape[: len(form.batch)], *columns, *blocks)))

    vectors = {"scale": vector(w.float_scale())}
    if w.zero_point is not None:
        vectors["zero_point"] = vector(w.zero_point)
    return merged(transposed(w.qvalue, axes)), vectors, block_of(form, w, own)


def block_of(form, w, own):
    """How many columns share a scale."""
    stored = dict(zip(own, w.storage_axes()))
    shared = _shares_scale(form, w, stored)
    return max(1, math.prod(form.shape(form.contracted))) if shared else w.tile_along(stored[form.contracted[-1]])


def _shares_scale(form, w, stored):
    return all(w.scale.shape[stored[label]] == 1 for label in form.contracted)
