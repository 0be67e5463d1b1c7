"""A product of labelled operands by block_scaled_mm of two QArrays: x (*batch, *rows, K), w (*batch, N, K)."""

import math

import jax.numpy as jnp

from jax_qmm.dtypes import QTYPES
from jax_qmm.ops.block_quantized_mm import in_blocks, product_in_blocks
from jax_qmm.ops.product import transposed
from jax_qmm.ops.product_form import form_of, result, split_bias
from jax_qmm.qarray import QArray
from jax_qmm.reference.activation import NONE


def has_blocks(product, lhs, rhs):
    """Whether an operand has several scales along what is contracted, or a float one is to get them."""
    sizes = product.sizes(lhs, rhs)
    k = math.prod(sizes[label] for label in product.contracted)

    def several(x, own):
        if not isinstance(x, QArray):
            return product.scheme.tile_size is not None and product.scheme.tile_size < k
        return any(count != 1 for count in counts(x, own, product.contracted))

    return several(lhs, product.lhs) or several(rhs, product.rhs)


def counts(x, own, labels):
    """How many scales a QArray has along each of these labels."""
    stored = dict(zip(own, x.storage_axes()))
    return [x.scale.shape[stored[label]] for label in labels]


def unserved(product, lhs, rhs):
    """Why block_scaled_mm does not take these two operands, a key of `dequantized_dot.REASONS`; None where it does."""
    quantized = [(x, own) for x, own in ((lhs, product.lhs), (rhs, product.rhs)) if isinstance(x, QArray)]
    if len({x.qtype for x, _ in quantized}) > 1:
        return "two_dtypes"
    if any(x.qtype not in QTYPES or x.is_packed for x, _ in quantized) or _has_offset(lhs) and _has_offset(rhs):
        return "weight_only"
    form, blocks = _form(product, lhs, rhs), set()
    *outer, inner = form.shape(form.contracted)
    for x, own in quantized:
        *of_outer, of_inner = counts(x, own, form.contracted)
        if all(count == 1 for count in (*of_outer, of_inner)):
            continue
        block = x.tile_along(dict(zip(own, x.storage_axes()))[form.contracted[-1]])
        if any(count not in (1, size) for count, size in zip(of_outer, outer)):
            return "blocks"
        if any(size != 1 for size in outer) and inner % block != 0:
            return "blocks"
        blocks.add(block)
    return "blocks" if len(blocks) > 1 else "scales_along_contraction" if 1 in blocks else None


def _has_offset(x):
    """Whether an operand has float zero points, which only w may have."""
    return isinstance(x, QArray) and x.zero_point is not None and jnp.issubdtype(x.zero_point.dtype, jnp.floating)


def _form(product, lhs, rhs):
    flipped = isinstance(lhs, QArray) and not isinstance(rhs, QArray) or _has_offset(lhs)
    w = (lhs, product.lhs) if flipped else (rhs, product.rhs)
    return form_of(product, lhs, rhs, flipped, product.batch, w)


def dot(product, lhs, rhs, bias, static):
    """The product; `static` are the scale and zero point of a float operand, or None."""
    form = _form(product, lhs, rhs)
    sides = (lhs, product.lhs), (rhs, product.rhs)
    (x, x_own), (w, w_own) = sides[::-1] if form.flipped else sides
    w = folded(form, in_blocks(in_order(form, w, w_own, form.columns), len(form.contracted)))
    x = in_order(form, x, x_own, form.rows)
    if isinstance(x, QArray):
        x = in_blocks(x, len(form.contracted))
    else:
        x = x.reshape(*x.shape[: -len(form.contracted)], w.values.shape[-1])
        scheme, tile = product.scheme.with_static(*static), w.block if w.count != 1 else None
        x = in_blocks(scheme.quantize_activation(x, 1, sums=w.zero_point is not None, tile_size=tile))
    column_bias, late_bias = split_bias(product, form, bias)
    out = product_in_blocks(
        *(x, w, column_bias),
        num_batch=len(form.batch),
        activation=NONE,
        out_dtype=product.out_dtype if late_bias is None else jnp.dtype(jnp.float32),
        out_sharding=form.out_sharding(product),
    )
    return result(product, form, out, late_bias)


def in_order(form, x, own, free):
    """An operand with its batch first and what is contracted last."""
    order = [own.index(label) for label in (*form.batch, *free, *form.contracted)]
    return x.transpose(order) if isinstance(x, QArray) else transposed(x, order)


def folded(form, w):
    """The columns in one dimension."""
    batch, columns = len(form.batch), len(form.columns)
    fold = lambda x: x.reshape(*x.shape[:batch], math.prod(x.shape[batch : batch + columns]), x.shape[-1])
    leaves = (None if x is None else fold(x) for x in w[:4])
    return w._replace(**dict(zip(w._fields, leaves)))
