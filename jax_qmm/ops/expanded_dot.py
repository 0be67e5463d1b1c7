"""A product of labelled operands by scaled_mm, of which a weight is int4 with a `scale_step`: `W4A8`.

Its values times the multiples of their blocks are int8, with one scale for all that is contracted. They are made by XLA
at each call, in a jit named "jax_qmm_expanded", so that `explain` can tell.
"""

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import INT8
from jax_qmm.ops import quantized_dot
from jax_qmm.qarray import QArray


def has_steps(product, lhs, rhs):
    """Whether a float operand is to be quantized, beside a QArray with a `scale_step`."""
    return product.scheme is not None and any(isinstance(x, QArray) and x.scale_step is not None for x in (lhs, rhs))


def unserved(product, lhs, rhs):
    """Why scaled_mm does not take these two operands, a key of `dequantized_dot.REASONS`; None where it does."""
    return quantized_dot.unserved(product, *jax.eval_shape(_expanded, lhs, rhs))


def dot(product, lhs, rhs, bias, static):
    """The product; a float operand has no static scale."""
    return quantized_dot.dot(product, *_expanded(lhs, rhs), bias, static)


def _expanded(*sides):
    return tuple(jax_qmm_expanded(x) if isinstance(x, QArray) else x for x in sides)


@jax.jit
def jax_qmm_expanded(q):
    """The same array, up to rounding, as int8 values with its `scale_step` as scale.

    >>> q = QArray(jnp.int4([[1, -7, 2, 3]]), jnp.float32([[1.5, 5]]), scale_step=jnp.float32([[0.5]]))
    >>> jax_qmm_expanded(q).qvalue.tolist()
    [[3, -21, 20, 30]]
    """
    multiples = jnp.rint(q.scale.astype(jnp.float32) / q.scale_step.astype(jnp.float32)).astype(INT8)
    values = q.qvalue.astype(INT8)
    if q.zero_point is not None:
        values = values - q.along_values(q.zero_point.astype(INT8))
    qvalue = values * q.along_values(multiples)
    return q._replace(qvalue=qvalue, scale=q.scale_step, zero_point=None, scale_step=None, _tile_size=None)
