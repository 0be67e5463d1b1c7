"""Products that no kernel computes, in floating point from dequantized operands.

The jaxpr of one has a jit named "jax_qmm_dequantized_dot_" and the reason (a key of `REASONS`), so that `explain` can
tell.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_qmm import _compat
from jax_qmm.ops import dispatch
from jax_qmm.ops.product import plus, transposed
from jax_qmm.qarray import QArray

REASONS = {
    "no_contraction": "no axis is contracted",
    "two_dtypes": "the operands are quantized to two dtypes",
    "blocks": "an operand has several scales within one axis, or two have different blocks",
    "scales_along_contraction": "each value along a contracted axis has a scale",
    "weight_only": "int4, packed values, merged axes and float zero points need a float operand that is to stay so",
    "packed": "an operand is packed along an axis that is not contracted, or as several with padding between",
    "merged": "an operand has axes merged in memory that are not all contracted",
}
_PREFIX = "jax_qmm_dequantized_dot_"


def dequantized_reason(jit_name):
    """Why a jit of this name in a jaxpr computes with dequantized operands; None if it is another function.

    >>> dequantized_reason("jax_qmm_dequantized_dot_blocks")
    'an operand has several scales within one axis, or two have different blocks'
    """
    return REASONS.get(jit_name[len(_PREFIX) :]) if jit_name.startswith(_PREFIX) else None


def float_dot(product, lhs, rhs):
    """The product of the dequantized operands, in the float type that holds all of them and the output."""
    dtypes = {product.out_dtype, *(x.dtype for x in (lhs, rhs) if not isinstance(x, QArray))}
    dtype = product.out_dtype if len(dtypes) == 1 else jnp.dtype(jnp.float32)
    sizes = product.sizes(lhs, rhs)
    # Before the product and not in it: see reference.block_scaled_mm.
    dequantized = lambda x: jax.lax.optimization_barrier(x.dequantize(dtype))
    dense = (dequantized(x) if isinstance(x, QArray) else x.astype(dtype) for x in (lhs, rhs))
    (lhs, left), (rhs, right) = (_without_ones(x, own, sizes) for x, own in zip(dense, (product.lhs, product.rhs)))
    batch = tuple(label for label in product.batch if label in left and label in right)
    free = tuple(label for label in (*left, *right) if label not in (*product.contracted, *batch))
    produced = (*batch, *free)
    axes = lambda own, labels: tuple(own.index(label) for label in labels)
    out = jax.lax.dot_general(
        lhs,
        rhs,
        ((axes(left, product.contracted), axes(right, product.contracted)), (axes(left, batch), axes(right, batch))),
        precision=product.precision,
        preferred_element_type=dtype,
        out_sharding=product.sharding(produced),
    )
    return transposed(out, axes(produced, product.out)).astype(product.out_dtype)


def _without_ones(x, own, sizes):
    """`x` and its labels without the axes along which lax.dot_general would have to repeat it."""
    repeated = tuple(axis for axis, label in enumerate(own) if x.shape[axis] != sizes[label])
    return jnp.squeeze(x, repeated), tuple(label for axis, label in enumerate(own) if axis not in repeated)


# The identity, whose lowering notes the fallback. Tracing alone, as `explain` does, must neither raise nor leave a
# trace in JAX's cache of which a lowering would then say nothing.
noted_p = Primitive("noted_dequantized_dot")


def _lower_noted(ctx, x, *, why):
    dispatch.note_fallback("dot_general", REASONS[why])
    return [x]


_compat.define_impl(noted_p)
noted_p.def_abstract_eval(lambda x, *, why: x)
mlir.register_lowering(noted_p, _lower_noted)
batching.primitive_batchers[noted_p] = lambda operands, dims, *, why: (noted_p.bind(*operands, why=why), *dims)


def _named_dequantized_dot(why):
    def dot(product, lhs, rhs, bias):
        out = noted_p.bind(float_dot(product, lhs, rhs), why=why)
        return out if bias is None else plus(out, bias, product.out_dtype)

    dot.__name__ = dot.__qualname__ = _PREFIX + why
    return jax.jit(dot, static_argnums=0)


DOTS = {why: _named_dequantized_dot(why) for why in REASONS}
