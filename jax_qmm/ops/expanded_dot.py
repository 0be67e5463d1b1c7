"""A product of labelled operands of which one is int4 with a `scale_step`, as `W4A8` makes it, and the other of 8 bits.

Its values times the multiples of their blocks are int8, with one scale for all that is contracted. They are made by XLA
at each call, in a jit named "jax_qmm_expanded", so that `explain` can tell.
"""

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import INT8
from jax_qmm.ops import block_quantized_dot, quantized_dot
from jax_qmm.qarray import QArray


def has_steps(lhs, rhs):
    """Whether an operand has a `scale_step`."""
    return any(isinstance(x, QArray) and x.scale_step is not None for x in (lhs, rhs))


def unserved(product, lhs, rhs):
    """Why no kernel takes these two operands, a key of `dequantized_dot.REASONS`; None where one does."""
    lhs, rhs = jax.eval_shape(_expanded, lhs, rhs)
    return _of_int8(product, lhs, rhs).unserved(product, lhs, rhs)


def dot(product, lhs, rhs, bias, static):
    """The product; a float operand has no static scale."""
    lhs, rhs = _expanded(lhs, rhs)
    return _of_int8(product, lhs, rhs).dot(product, lhs, rhs, bias, static)


def _of_int8(product, lhs, rhs):
    return block_quantized_dot if block_quantized_dot.has_blocks(product, lhs, rhs) else quantized_dot


def _expanded(*sides):
    return tuple(jax_qmm_expanded(x) if has_steps(x, None) else x for x in sides)


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
