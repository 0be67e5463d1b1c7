"""A product of labelled operands of which one is int4 with a `scale_step`, as `W4A8` makes it, and the other of 8 bits.

Its values times the multiples of their blocks are int8, with one scale for all that is contracted. Where few rows meet
them, expanded_mm's kernel makes them on the way to the tensor cores; else XLA does, once at each call, in a jit named
"jax_qmm_expanded", so that `explain` can tell.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import INT8
from jax_qmm.ops import block_quantized_dot, quantized_dot
from jax_qmm.ops.block_quantized_dot import counts, folded, in_order
from jax_qmm.ops.block_quantized_mm import in_blocks
from jax_qmm.ops.expanded_mm import expanded_mm, is_faster
from jax_qmm.ops.product_form import form_of, result, split_bias
from jax_qmm.qarray import QArray
from jax_qmm.reference.scaled_mm import epilogue


def has_steps(lhs, rhs):
    """Whether an operand has a `scale_step`."""
    return any(isinstance(x, QArray) and x.scale_step is not None for x in (lhs, rhs))


def unserved(product, lhs, rhs):
    """Why no kernel takes these two operands, a key of `dequantized_dot.REASONS`; None where one does."""
    lhs, rhs = jax.eval_shape(_expanded, lhs, rhs)
    return _of_int8(product, lhs, rhs).unserved(product, lhs, rhs)


def dot(product, lhs, rhs, bias, static):
    """The product; a float operand has no static scale."""
    if _is_of_few_rows(product, lhs, rhs):
        return _dot_of_few_rows(product, lhs, rhs, bias, static)
    lhs, rhs = _expanded(lhs, rhs)
    return _of_int8(product, lhs, rhs).dot(product, lhs, rhs, bias, static)


def _of_int8(product, lhs, rhs):
    return block_quantized_dot if block_quantized_dot.has_blocks(product, lhs, rhs) else quantized_dot


# By expanded_mm


def _is_of_few_rows(product, lhs, rhs):
    """Whether x is float, and its rows, columns and the blocks of w are for expanded_mm's kernel."""
    form = _form(product, lhs, rhs)
    w, own = (lhs, product.lhs) if form.flipped else (rhs, product.rhs)
    sizes = [*form.shape(form.rows), *form.shape(form.contracted)]
    if isinstance(rhs if form.flipped else lhs, QArray) or not all(isinstance(size, int) for size in sizes):
        return False
    m, k = math.prod(form.shape(form.rows)), math.prod(form.shape(form.contracted))
    shared = all(count == 1 for count in counts(w, own, form.contracted))
    block = k if shared else w.tile_along(dict(zip(own, w.storage_axes()))[form.contracted[-1]])
    return k > 0 and is_faster(m, k, block)


def _form(product, lhs, rhs):
    flipped = has_steps(lhs, None)
    return form_of(product, lhs, rhs, flipped, product.batch, (lhs, product.lhs) if flipped else (rhs, product.rhs))


def _dot_of_few_rows(product, lhs, rhs, bias, static):
    form = _form(product, lhs, rhs)
    sides = (lhs, product.lhs), (rhs, product.rhs)
    (x, x_own), (w, w_own) = sides[::-1] if form.flipped else sides
    num_batch, count = len(form.batch), len(form.contracted)
    w: Any = in_order(form, w, w_own, form.columns)
    of_w = in_blocks(w._replace(scale=_multiples(w)), count)
    step = in_blocks(w._replace(scale=w.scale_step, zero_point=None), count).scale
    of_w, step = folded(form, of_w), folded(form, of_w._replace(scale=step))
    x = in_order(form, x, x_own, form.rows)
    x = x.reshape(*x.shape[:-count], of_w.values.shape[-1])
    x = product.scheme.with_static(*static).quantize_activation(x, 1)
    column_bias, late_bias = split_bias(product, form, bias)
    sums = expanded_mm(
        *(x.qvalue, of_w.values, of_w.scale, None if of_w.zero_point is None else of_w.zero_point.astype(INT8)),
        num_batch=num_batch,
        block=of_w.block,
        out_sharding=form.out_sharding(product),
    )
    out_dtype = product.out_dtype if late_bias is None else jnp.dtype(jnp.float32)
    vectors = {"scale_a": x.scale[..., 0], "scale_b": step.scale[..., 0]}
    vectors |= {} if column_bias is None else {"bias": column_bias}
    return result(product, form, epilogue(sums, num_batch=num_batch, out_dtype=out_dtype, **vectors), late_bias)


# By XLA


def _expanded(*sides):
    return tuple(jax_qmm_expanded(x) if has_steps(x, None) else x for x in sides)


@jax.jit
def jax_qmm_expanded(q):
    """The same array, up to rounding, as int8 values with its `scale_step` as scale.

    >>> q = QArray(jnp.int4([[1, -7, 2, 3]]), jnp.float32([[1.5, 5]]), scale_step=jnp.float32([[0.5]]))
    >>> jax_qmm_expanded(q).qvalue.tolist()
    [[3, -21, 20, 30]]
    """
    values = q.qvalue.astype(INT8)
    if q.zero_point is not None:
        values = values - q.along_values(q.zero_point.astype(INT8))
    qvalue = values * q.along_values(_multiples(q))
    return q._replace(qvalue=qvalue, scale=q.scale_step, zero_point=None, scale_step=None, _tile_size=None)


def _multiples(q):
    """What the values of each block are multiplied by."""
    return jnp.rint(q.scale.astype(jnp.float32) / q.scale_step.astype(jnp.float32)).astype(INT8)
