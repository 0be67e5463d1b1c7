"""A product of float8 with one scale a row and int4, labelled operands, by block_scaled_mm.

float8_e4m3fn has all values of int4 less their zero points: the products are exact, and sums of them are scaled. So
weights are read in 4 bits, where a product of two float8 operands needs float8 made of them first.
"""

import math
from typing import Any

import jax.numpy as jnp

from jax_qmm.dtypes import FLOAT8, INT4
from jax_qmm.ops import expanded_dot, weight_only_dot
from jax_qmm.ops.block_quantized_dot import counts, in_order
from jax_qmm.ops.block_quantized_mm import in_blocks
from jax_qmm.ops.block_scaled_mm import unserved_blocks
from jax_qmm.ops.product_form import form_of, result, split_bias
from jax_qmm.qarray import QArray
from jax_qmm.reference.scaled_mm import epilogue


def serves(product, lhs, rhs):
    """Whether float8 meets int4 whose blocks kernels serve, or that can't become float8."""
    (x, x_own), (w, w_own) = _sides(product, lhs, rhs)
    if not (_is_int4(w) and _is_float8_in_rows(product, x, x_own)):
        return False
    if weight_only_dot.unserved(product, *((w, None) if w is lhs else (None, w))):
        return False
    if not expanded_dot.serves(product, lhs, rhs):
        return True
    form = _form(product, lhs, rhs)
    k = math.prod(form.shape(form.contracted))
    return isinstance(k, int) and unserved_blocks(weight_only_dot.block_of(form, w, w_own), k) is None


def _is_int4(x):
    return isinstance(x, QArray) and x.qtype == INT4


def _is_float8_in_rows(product, x, own):
    """Whether an operand is float8, or is to become it, with one scale for all that is contracted."""
    if not isinstance(x, QArray):
        return product.scheme is not None and product.scheme.dtype == FLOAT8 and product.scheme.tile_size is None
    shared = all(count == 1 for count in counts(x, own, product.contracted))
    return x.qtype == FLOAT8 and x.zero_point is None and shared


def _sides(product, lhs, rhs):
    """x and w, with their labels."""
    sides = (lhs, product.lhs), (rhs, product.rhs)
    return sides[::-1] if _is_int4(lhs) else sides


def _form(product, lhs, rhs):
    _, w = _sides(product, lhs, rhs)
    return form_of(product, lhs, rhs, _is_int4(lhs), product.batch, w)


def unserved(product, lhs, rhs):
    """None: `serves` says all of it."""
    return None


def dot(product, lhs, rhs, bias, static):
    """The product; `static` are the scale and zero point of a float operand, or None."""
    form = _form(product, lhs, rhs)
    (x, x_own), (w, w_own) = _sides(product, lhs, rhs)
    x, count = in_order(form, x, x_own, form.rows), len(form.contracted)
    if not isinstance(x, QArray):
        x = product.scheme.with_static(*static).quantize_activation(x, count)
    x = in_blocks(x, count)
    column_bias, late_bias = split_bias(product, form, bias)
    sums = weight_only_dot.of_matrix(product, form, x.values, w, w_own, None, jnp.dtype(jnp.float32))
    of_rows: dict[str, Any] = {"scale_a": x.scale[..., 0]} | ({} if column_bias is None else {"bias": column_bias})
    out_dtype = product.out_dtype if late_bias is None else jnp.dtype(jnp.float32)
    return result(product, form, epilogue(sums, num_batch=len(form.batch), out_dtype=out_dtype, **of_rows), late_bias)
