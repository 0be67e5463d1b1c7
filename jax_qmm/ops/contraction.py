"""Products of operands with labelled axes, one or both a QArray: what dot_general, einsum and matmul share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_qmm import _compat
from jax_qmm.dtypes import SCALE_DTYPES
from jax_qmm.ops import (
    block_quantized_dot,
    checks,
    dequantized_dot,
    expanded_dot,
    int4_float8_dot,
    quantized_dot,
    weight_only_dot,
)
from jax_qmm.ops.fake_quantize import straight_through
from jax_qmm.ops.product import Product
from jax_qmm.ops.weight_only_dot import is_weight_only
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W4A8, W8A8, check_scheme, check_weight


def contract(lhs, rhs, labels, *, names, precision, preferred_element_type, out_sharding, scheme, bias):
    """The product of `lhs` and `rhs`, summed over the labels that the output does not have.

    Args:
      lhs, rhs: at least one of them a QArray, the other float or a QArray.
      labels: three tuples of labels, for the axes of lhs, of rhs and of the output. No tuple has one twice,
        and a label of one operand alone is one of the output. Sizes agree, but may be 1 in one operand, which
        is then repeated.
      names: how messages call lhs and rhs.
      precision, preferred_element_type, out_sharding: as in `jax.lax.dot_general`.
      scheme: how to quantize a float operand. None for the W8A8 of the other's type, or for no quantization where the
        other is weight-only; None for two QArrays.
      bias: float array that broadcasts against the output, or None.
    """
    sides = [x if isinstance(x, QArray) else float_operand(name, x) for name, x in zip(names, (lhs, rhs))]
    scheme, static = operand_scheme(scheme, sides)
    product = Product(
        *map(tuple, labels),
        _check_out_dtype(preferred_element_type, sides),
        precision,
        _compat.canonicalize_out_sharding(out_sharding, "dot_general"),
        scheme,
    )
    sizes = product.sizes(*sides)
    if bias is not None:
        bias = _check_bias(bias, tuple(sizes[label] for label in product.out), product.out_dtype)
    sides = [_repeated(x, own, product.contracted, sizes) for x, own in zip(sides, (product.lhs, product.rhs))]
    product = dataclasses.replace(product, dequantize=_way(product, *sides).unserved(product, *sides))
    return _product(product, *sides, bias, static)


def float_operand(name, x):
    x = checks.asarray(name, x)
    if x.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}, needs {', '.join(map(str, SCALE_DTYPES))} or to be a QArray")
    return x


def _check_out_dtype(dtype, sides):
    if dtype is None:
        return jnp.result_type(*(x.dtype if isinstance(x, QArray) else x for x in sides))
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        pass  # it is none of these either
    if dtype not in SCALE_DTYPES:
        raise TypeError(f"preferred_element_type is {dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
    return dtype


def operand_scheme(scheme, sides):
    """The scheme without its static scale and zero point, and these two; all None where nothing is to be quantized."""
    if all(isinstance(x, QArray) for x in sides):
        if scheme is not None:
            raise ValueError(f"scheme is {scheme!r}, needs to be None: both operands are QArrays already")
        return None, (None, None)
    (q,) = (x for x in sides if isinstance(x, QArray))
    if scheme is None:
        return None if is_weight_only(q) else W8A8(q.qtype), (None, None)
    check_scheme(scheme)
    check_weight(q, scheme)
    if isinstance(scheme, W4A8):
        return scheme.of_activations, (None, None)
    if not isinstance(scheme, W8A8):
        return None, (None, None)
    scale, zero_point = scheme.activation_scale, scheme.activation_zero_point
    if scale is None:
        return scheme, (None, None)
    scale = jnp.asarray(scale).astype(jnp.float32)
    if zero_point is not None:
        zero_point = checks.int32("activation_zero_point", zero_point)
    return scheme.with_static(None), (scale, zero_point)


def _check_bias(bias, shape, out_dtype):
    bias = checks.asarray("bias", bias)
    if bias.dtype not in SCALE_DTYPES:
        raise TypeError(f"bias has dtype {bias.dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
    bias = checks.broadcasting("bias", bias, shape)
    return bias if bias.dtype == out_dtype else bias.astype(jnp.float32)


def _repeated(x, own, contracted, sizes):
    """`x` with all of each contracted axis of which it has 1."""
    shape = [sizes[label] if label in contracted else size for label, size in zip(own, x.shape)]
    if tuple(shape) == x.shape:
        return x
    if not isinstance(x, QArray):
        return jnp.broadcast_to(x, shape)
    if x.merged_axes:
        raise ValueError(f"{x} has merged axes, needs all of each contracted axis: {shape}")
    stored = [shape[axis] for axis in map(x.storage_axes().index, range(x.ndim))]
    x = x.unpack()
    return x._replace(qvalue=jnp.broadcast_to(x.qvalue, stored), azp_adj=None)


# The product, and its derivative


@functools.partial(jax.jit, static_argnums=0)
def _product(product, lhs, rhs, bias, static):
    # Named for checkpoint policies, which don't look into a function with a derivative of its own.
    return checkpoint_name(_differentiable_product(product, lhs, rhs, bias, static), "quantized_product")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable_product(product, lhs, rhs, bias, static):
    if product.dequantize is not None:
        return dequantized_dot.DOTS[product.dequantize](product, lhs, rhs, bias)
    return _way(product, lhs, rhs).dot(product, lhs, rhs, bias, static)


def _jvp(product, primals, tangents):
    """Straight through the quantizer of a float operand, with the other dequantized; a QArray is a constant."""
    out = _differentiable_product(product, *primals)
    *sides, bias, static = primals
    terms = []
    for i, x in enumerate(sides):
        moving = _operand_tangent(product, x, tangents[i], static, tangents[3][0])
        if moving is not None:
            terms.append(_tangent_dot(product, i, moving, sides[1 - i]))
    if bias is not None and not isinstance(tangents[2], SymbolicZero):
        terms.append(tangents[2].astype(product.out_dtype))
    if not terms:
        return out, jnp.zeros_like(out)
    tangent = jnp.broadcast_to(sum(terms[1:], start=terms[0]), out.shape)
    return out, _compat.align_varying([tangent, out])[0]


_differentiable_product.defjvp(_jvp, symbolic_zeros=True)


def _operand_tangent(product, x, tangent, static, scale_tangent):
    """The tangent of an operand as it is multiplied; None where it is zero, as that of a QArray."""
    if isinstance(x, QArray):
        return None
    tangent, scale_tangent = (None if isinstance(t, SymbolicZero) else t for t in (tangent, scale_tangent))
    if product.dequantize is not None or static[0] is None or tangent is scale_tangent is None:
        return tangent
    return straight_through(x, *static, product.scheme.dtype, tangent, scale_tangent)


def _tangent_dot(product, i, moving, other):
    # Rematerialized: the 8-bit operand waits for the backward pass, not its dequantized copy.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def dot(moving, other):
        return dequantized_dot.float_dot(product, *((other, moving) if i else (moving, other)))

    return dot(moving, other)


# Which op is to serve


def _way(product, lhs, rhs):
    """The module of the op for these operands; its `unserved` says whether they have to be dequantized instead."""
    if product.scheme is None and not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return weight_only_dot
    if int4_float8_dot.serves(product, lhs, rhs):
        return int4_float8_dot
    if expanded_dot.serves(product, lhs, rhs):
        return expanded_dot
    return block_quantized_dot if block_quantized_dot.has_blocks(product, lhs, rhs) else quantized_dot
