"""A product of labelled operands of which one is int4, as `W4A8` makes it, and the other of 8 bits.

Beside int8 it needs a `scale_step`: its values times the multiples of their blocks are int8, with one scale for all
that is contracted. Where x is float, expanded_mm's kernels make them on the way to the tensor cores, if they take such
blocks; else XLA does, once at each call, in a jit named "jax_qmm_expanded", so that `explain` can tell. Beside float8
XLA makes float8 of the values, and the scales of blocks stay; what kernels read in 4 bits is for int4_float8_dot.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import FLOAT8, INT4, INT8
from jax_qmm.ops import block_quantized_dot, quantized_dot
from jax_qmm.ops.block_quantized_dot import folded, in_order
from jax_qmm.ops.block_quantized_mm import in_blocks
from jax_qmm.ops.expanded_mm import expanded_mm, serves_blocks
from jax_qmm.ops.product_form import form_of, result, split_bias
from jax_qmm.ops.weight_only_dot import block_of
from jax_qmm.qarray import QArray


def serves(product, lhs, rhs):
    """Whether an operand is int4 that is to become 8 bits."""
    return any(_dtype(product, *sides) is not None for sides in ((lhs, rhs), (rhs, lhs)))


def _dtype(product, x, other):
    """What the values of an operand become beside the other one; None where they stay as they are."""
    if not isinstance(x, QArray) or x.qtype != INT4:
        return None
    if (other.qtype if isinstance(other, QArray) else product.scheme.dtype) != FLOAT8:
        return None if x.scale_step is None else INT8
    integers = x.zero_point is None or jnp.issubdtype(x.zero_point.dtype, jnp.integer)
    return FLOAT8 if integers and not x.merged_axes else None


def unserved(product, lhs, rhs):
    """Why no kernel takes these two operands, a key of `dequantized_dot.REASONS`; None where one does."""
    lhs, rhs = jax.eval_shape(functools.partial(_expanded, product), lhs, rhs)
    return _of_int8(product, lhs, rhs).unserved(product, lhs, rhs)


def dot(product, lhs, rhs, bias, static):
    """The product; a float operand has no static scale."""
    if _is_for_kernels(product, lhs, rhs):
        return _dot_by_kernel(product, lhs, rhs, bias, static)
    lhs, rhs = _expanded(product, lhs, rhs)
    return _of_int8(product, lhs, rhs).dot(product, lhs, rhs, bias, static)


def _of_int8(product, lhs, rhs):
    return block_quantized_dot if block_quantized_dot.has_blocks(product, lhs, rhs) else quantized_dot


# By expanded_mm


def _is_for_kernels(product, lhs, rhs):
    """Whether x is float and becomes int8, and expanded_mm's kernels serve K and the blocks of w."""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray) or product.scheme.dtype != INT8:
        return False
    form = _form(product, lhs, rhs)
    w, own = (lhs, product.lhs) if form.flipped else (rhs, product.rhs)
    k = math.prod(form.shape(form.contracted))
    return isinstance(k, int) and k > 0 and serves_blocks(k, block_of(form, w, own))


def _form(product, lhs, rhs):
    flipped = isinstance(lhs, QArray)
    return form_of(product, lhs, rhs, flipped, product.batch, (lhs, product.lhs) if flipped else (rhs, product.rhs))


def _dot_by_kernel(product, lhs, rhs, bias, static):
    form = _form(product, lhs, rhs)
    sides = (lhs, product.lhs), (rhs, product.rhs)
    (x, x_own), (w, w_own) = sides[::-1] if form.flipped else sides
    num_batch, count = len(form.batch), len(form.contracted)
    w: Any = in_order(form, w, w_own, form.columns)
    of_w = in_blocks(w, count)
    step = in_blocks(w._replace(scale=w.scale_step, zero_point=None), count).scale
    of_w, step = folded(form, of_w), folded(form, of_w._replace(scale=step))
    x = in_order(form, x, x_own, form.rows)
    x = x.reshape(*x.shape[:-count], of_w.values.shape[-1])
    x = product.scheme.with_static(*static).quantize_activation(x, 1)
    column_bias, late_bias = split_bias(product, form, bias)
    out = expanded_mm(
        *(x.qvalue, of_w.values, of_w.scale, of_w.zero_point),
        num_batch=num_batch,
        block=of_w.block,
        scale_a=x.scale[..., 0],
        scale_b=step.scale[..., 0],
        bias=column_bias,
        out_dtype=product.out_dtype if late_bias is None else jnp.dtype(jnp.float32),
        out_sharding=form.out_sharding(product),
    )
    return result(product, form, out, late_bias)


# By XLA


def _expanded(product, lhs, rhs):
    dtypes = _dtype(product, lhs, rhs), _dtype(product, rhs, lhs)
    return tuple(x if dtype is None else jax_qmm_expanded(x.unpack(), dtype) for x, dtype in zip((lhs, rhs), dtypes))


@functools.partial(jax.jit, static_argnums=1)
def jax_qmm_expanded(q, dtype):
    """The same array as int8 values with its `scale_step` as scale, or as float8 values.

    >>> q = QArray(jnp.int4([[1, -7, 2, 3]]), jnp.int8([[3, 10]]), scale_step=jnp.float32([[0.5]]))
    >>> jax_qmm_expanded(q, INT8).qvalue.tolist(), jax_qmm_expanded(q, FLOAT8).qvalue.tolist()
    ([[3, -21, 20, 30]], [[1.0, -7.0, 2.0, 3.0]])
    """
    values = q.qvalue.astype(INT8)
    if q.zero_point is not None:
        values = values - q.along_values(q.zero_point.astype(INT8))
    if dtype == FLOAT8:  # which has all integers up to 16, and these are up to 15
        return q._replace(qvalue=values.astype(FLOAT8), scale=q.float_scale(), zero_point=None, scale_step=None)
    qvalue = values * q.along_values(q.scale)
    return q._replace(qvalue=qvalue, scale=q.scale_step, zero_point=None, scale_step=None, _tile_size=None)
