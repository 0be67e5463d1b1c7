"""Products of operands with labelled axes, one or both a QArray: what dot_general, einsum and matmul share.

A product that the kernels cannot compute is taken of dequantized operands. Its jaxpr then has a jit named
"jax_qmm_dequantized_dot_" and the reason (a key of `DEQUANTIZED`), so that `explain` can tell.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_qmm import _compat, _ffi
from jax_qmm.ops import checks
from jax_qmm.ops.quantize import quantize
from jax_qmm.ops.scaled_mm import scaled_mm_p
from jax_qmm.qarray import SCALE_DTYPES, QArray
from jax_qmm.schemes import W8A8, check_scheme

DEQUANTIZED = {
    "no_contraction": "no axis is contracted",
    "two_dtypes": "one operand is int8 and the other float8",
    "blocks": "an operand has several scales within one axis",
    "scales_along_contraction": "scales vary along a contracted axis",
    "two_zero_points": "both operands have zero points",
}
_PREFIX = "jax_qmm_dequantized_dot_"


def dequantized_reason(jit_name):
    """Why a jit of this name in a jaxpr computes with dequantized operands; None if it is another function.

    >>> dequantized_reason("jax_qmm_dequantized_dot_blocks")
    'an operand has several scales within one axis'
    """
    return DEQUANTIZED.get(jit_name[len(_PREFIX) :]) if jit_name.startswith(_PREFIX) else None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static. A label of both operands is a batch label or, if not in `out`, contracted."""

    lhs: tuple
    rhs: tuple
    out: tuple
    out_dtype: Any
    precision: Any
    out_sharding: Any
    scheme: W8A8 | None
    dequantize: str | None = None  # a key of DEQUANTIZED

    @property
    def batch(self):
        return tuple(label for label in self.out if label in self.lhs and label in self.rhs)

    @property
    def contracted(self):
        return tuple(label for label in self.lhs if label in self.rhs and label not in self.out)


def contract(lhs, rhs, labels, *, names, precision, preferred_element_type, out_sharding, scheme, bias):
    """The product of `lhs` and `rhs`, summed over the labels that the output does not have.

    Args:
      lhs, rhs: at least one of them a QArray, the other float or a QArray.
      labels: three tuples of labels, for the axes of lhs, of rhs and of the output. No tuple has one twice,
        and a label of one operand alone is one of the output. Sizes agree, but that of a batch label may be 1
        in one operand.
      names: how messages call lhs and rhs.
      precision, preferred_element_type, out_sharding: as in `jax.lax.dot_general`.
      scheme: how to quantize a float operand, or None for the W8A8 of the other's type.
      bias: float array that broadcasts against the output, or None.
    """
    sides = [x if isinstance(x, QArray) else _check_float(name, x) for name, x in zip(names, (lhs, rhs))]
    out_dtype = preferred_element_type or jnp.promote_types(*(x.dtype for x in sides))
    try:
        out_dtype = jnp.dtype(out_dtype)
    except TypeError:
        pass  # it is none of these either
    if out_dtype not in SCALE_DTYPES:
        raise TypeError(f"preferred_element_type is {out_dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
    activation_scale = activation_zero_point = None
    if not all(isinstance(x, QArray) for x in sides):
        qtype = next(x.qtype for x in sides if isinstance(x, QArray))
        scheme = _check_scheme(scheme, qtype)
        activation_scale, activation_zero_point = scheme.activation_scale, scheme.activation_zero_point
        scheme = dataclasses.replace(scheme, activation_scale=None, activation_zero_point=None)
    else:
        scheme = None
    plan = _Plan(
        *map(tuple, labels),
        out_dtype,
        precision,
        _compat.canonicalize_out_sharding(out_sharding, "dot_general"),
        scheme,
    )
    if bias is not None:
        bias = _check_bias(bias, plan, sides)
    reason = _why_dequantized(plan, *sides)
    if reason is not None:
        _ffi.note_fallback("dot_general", DEQUANTIZED[reason])
        plan = dataclasses.replace(plan, dequantize=reason)
    return _contract(plan, *sides, bias, activation_scale, activation_zero_point)


def _check_float(name, x):
    x = checks.asarray(name, x)
    if x.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}, needs {', '.join(map(str, SCALE_DTYPES))} or to be a QArray")
    return x


def _check_scheme(scheme, qtype):
    if scheme is None:
        return W8A8(qtype)
    check_scheme(scheme)
    if scheme.dtype != qtype:
        raise ValueError(f"scheme has dtype {scheme.dtype}, needs that of the QArray, {qtype}")
    return scheme


def _check_bias(bias, plan, sides):
    bias = checks.asarray("bias", bias)
    if bias.dtype not in SCALE_DTYPES:
        raise TypeError(f"bias has dtype {bias.dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
    sizes = _sizes(plan, *sides)
    bias = checks.broadcasting("bias", bias, tuple(sizes[label] for label in plan.out))
    return bias.astype(jnp.result_type(bias.dtype, plan.out_dtype))


def _sizes(plan, lhs, rhs):
    sizes = {}
    for label, size in itertools.chain(zip(plan.lhs, lhs.shape), zip(plan.rhs, rhs.shape)):
        if sizes.get(label, 1) == 1:
            sizes[label] = size
    return sizes


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _contract(plan, lhs, rhs, bias, activation_scale, activation_zero_point):
    if plan.dequantize is not None:
        return _DEQUANTIZED_DOT[plan.dequantize](plan, lhs, rhs, bias)
    return _quantized_dot(plan, lhs, rhs, bias, activation_scale, activation_zero_point)


@_contract.defjvp
def _contract_jvp(plan, primals, tangents):
    """Straight through the quantizer of a float operand, by the other dequantized; a QArray is a constant."""
    out = _contract(plan, *primals)
    lhs, rhs, *_ = primals
    tangent = None if primals[2] is None else tangents[2].astype(plan.out_dtype)
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        moving, frozen = (tangents[1], lhs) if isinstance(lhs, QArray) else (tangents[0], rhs)

        # Rematerialized: the 8-bit operand waits for the backward pass, not its dequantized copy.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def dot(moving, frozen):
            return _float_dot(plan, *((frozen, moving) if isinstance(lhs, QArray) else (moving, frozen)))

        by_float = dot(moving, frozen)
        tangent = by_float if tangent is None else by_float + tangent
    if tangent is None:
        return out, jnp.zeros_like(out)
    return out, jnp.broadcast_to(tangent, out.shape)


def _why_dequantized(plan, lhs, rhs):
    if not plan.contracted:
        return "no_contraction"
    quantized = [(x, labels) for x, labels in ((lhs, plan.lhs), (rhs, plan.rhs)) if isinstance(x, QArray)]
    for x, labels in quantized:
        if not all(count in (1, size) for count, size in zip(x.scale.shape, x.qvalue.shape)):
            return "blocks"
        stored = dict(zip(labels, x.storage_axes()))
        if any(x.scale.shape[stored[label]] != 1 for label in plan.contracted):
            return "scales_along_contraction"
    if len({x.qtype for x, _ in quantized}) > 1:
        return "two_dtypes"
    zero_points = sum(x.zero_point is not None for x, _ in quantized)
    if plan.scheme is not None and not plan.scheme.symmetric:
        zero_points += 1
    return "two_zero_points" if zero_points == 2 else None


def _float_dot(plan, lhs, rhs):
    """The product of the dequantized operands, in the float type that holds all of them and the output."""
    dtype = functools.reduce(
        jnp.promote_types, (x.dtype for x in (lhs, rhs) if not isinstance(x, QArray)), plan.out_dtype
    )
    lhs, rhs = (x.dequantize(dtype) if isinstance(x, QArray) else x.astype(dtype) for x in (lhs, rhs))
    sizes, labels = _sizes(plan, lhs, rhs), [plan.lhs, plan.rhs]
    for i, x in enumerate((lhs, rhs)):  # lax.dot_general does not broadcast batch axes
        repeated = [
            axis for axis, label in enumerate(labels[i]) if label in plan.batch and x.shape[axis] != sizes[label]
        ]
        labels[i] = tuple(label for axis, label in enumerate(labels[i]) if axis not in repeated)
        lhs, rhs = (jnp.squeeze(x, repeated), rhs) if i == 0 else (lhs, jnp.squeeze(x, repeated))
    left, right = labels
    batch = tuple(label for label in plan.batch if label in left and label in right)
    both = (plan.contracted, batch)
    produced = [
        *batch,
        *(label for side in labels for label in side if label not in (*plan.contracted, *batch)),
    ]
    order = [produced.index(label) for label in plan.out]
    out_sharding = plan.out_sharding
    if out_sharding is not None:
        spec = dict(zip(plan.out, (*out_sharding.spec, *(None,) * len(plan.out))))
        out_sharding = out_sharding.update(spec=jax.sharding.PartitionSpec(*(spec[label] for label in produced)))
    out = jax.lax.dot_general(
        lhs,
        rhs,
        tuple(zip(*(tuple(tuple(map(side.index, some)) for some in both) for side in labels))),
        precision=plan.precision,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    return (out if order == sorted(order) else jnp.transpose(out, order)).astype(plan.out_dtype)


def _named_dequantized_dot(reason):
    def dot(plan, lhs, rhs, bias):
        out = _float_dot(plan, lhs, rhs)
        return out if bias is None else (out + bias).astype(plan.out_dtype)

    dot.__name__ = dot.__qualname__ = _PREFIX + reason
    return jax.jit(dot, static_argnums=0)


_DEQUANTIZED_DOT = {reason: _named_dequantized_dot(reason) for reason in DEQUANTIZED}


# The kernel's form: a (*B, *R, K), b (*B, N, K) -> (*B, *R, N)


def _quantized_dot(plan, lhs, rhs, bias, activation_scale, activation_zero_point):
    flipped, batch = _arrange(plan, isinstance(lhs, QArray))
    a, b = (lhs, plan.lhs), (rhs, plan.rhs)
    if flipped:
        a, b = b, a
    x, own = b if isinstance(b[0], QArray) else a
    stored = dict(zip(own, x.storage_axes()))
    contracted = sorted(plan.contracted, key=stored.get)  # as they lie in memory: no weight is transposed
    sizes = _sizes(plan, lhs, rhs)
    size_of = lambda some: tuple(sizes[label] for label in some)
    rows, columns = ([label for label in plan.out if label in own and label not in batch] for _, own in (a, b))
    k = math.prod(size_of(contracted))

    quantized = []
    for (x, own), free in ((a, rows), (b, columns)):
        order = [*batch, *free, *contracted]
        if not isinstance(x, QArray):
            x = _transposed(x, [own.index(label) for label in order if label in own])
            x = _quantize_activation(x, len(contracted), plan.scheme, activation_scale, activation_zero_point)
            own = [label for label in order if label in own]
        quantized.append(_leaves_in_order(x, own, order, len(contracted)))
    (a, scale_a, azp_a, sums_a), (b, scale_b, azp_b, sums_b) = quantized
    num_batch = len(batch)
    along_rows = lambda v: _spread(v, num_batch, size_of(rows))
    along_columns = lambda v: _flat(_spread(v, num_batch, size_of(columns)), num_batch)
    vectors = {"scale_a": along_rows(scale_a), "scale_b": along_columns(scale_b)}
    a = a.reshape(*a.shape[:num_batch], *size_of(rows), k)
    b = b.reshape(*b.shape[:num_batch], math.prod(size_of(columns)), k)
    # The zero point of one side meets the sums of the other, whichever side it is.
    if azp_a is not None:
        vectors["azp"] = along_rows(azp_a)
        vectors["azp_adj"] = jnp.sum(b, -1, dtype=jnp.int32) if sums_b is None else along_columns(sums_b)
    elif azp_b is not None:
        vectors["azp"] = jnp.sum(a, -1, dtype=jnp.int32) if sums_a is None else along_rows(sums_a)
        vectors["azp_adj"] = along_columns(azp_b)
    out_dtype, late_bias = plan.out_dtype, None
    if bias is not None:
        order = [*batch, *rows, *columns]
        bias = _transposed(bias, [plan.out.index(label) for label in order])
        if all(size == 1 for size in bias.shape[num_batch : num_batch + len(rows)]):
            bias = jnp.squeeze(bias, tuple(range(num_batch, num_batch + len(rows))))
            vectors["bias"] = along_columns(bias if bias.dtype == out_dtype else bias.astype(jnp.float32))
        else:
            late_bias, out_dtype = bias, jnp.dtype(jnp.float32)

    out_sharding, spec = plan.out_sharding, {}
    if out_sharding is not None:
        spec = dict(zip(plan.out, (*out_sharding.spec, *(None,) * len(plan.out))))
        # Several columns make one axis, sharded as the first of them; the rest of the sharding comes after.
        entries = [spec[label] for label in (*batch, *rows)] + [spec[columns[0]] if columns else None]
        out_sharding = out_sharding.update(spec=jax.sharding.PartitionSpec(*entries))
    out = scaled_mm_p.bind(
        *_compat.align_varying([a, b, *vectors.values()]),
        names=tuple(vectors),
        num_batch=num_batch,
        out_dtype=out_dtype,
        fast_accum=not _compat.asks_highest_precision(plan.precision) and a.dtype != jnp.int8,
        out_sharding=out_sharding,
    )
    out = out.reshape(*out.shape[:-1], *size_of(columns)) if len(columns) != 1 else out
    if late_bias is not None:
        out = (out + late_bias).astype(plan.out_dtype)
    out = _transposed(out, [(*batch, *rows, *columns).index(label) for label in plan.out])
    if plan.out_sharding is not None and any(spec[label] is not None for label in columns[1:]):
        out = jax.sharding.reshard(out, plan.out_sharding)
    return out


def _arrange(plan, lhs_is_stored):
    """Whether rhs becomes a, and the batch labels, such that the kernel writes the output in its order.

    A label of one operand alone can be a batch label too; the other operand is then repeated along it.
    """
    batch, sides = plan.batch, (plan.lhs, plan.rhs)
    orders = (True, False) if lhs_is_stored else (False, True)  # the stored operand rather as b
    for repeats in (False, True):
        for flipped in orders:
            a, b = sides[::-1] if flipped else sides
            rest = [label for label in plan.out if label not in batch]
            taken = list(itertools.takewhile(lambda label: label in b, rest)) if repeats else []
            produced = [
                *batch,
                *taken,
                *(label for side in (a, b) for label in rest if label in side and label not in taken),
            ]
            if tuple(produced) == plan.out:
                return flipped, (*batch, *taken)
    return orders[0], batch


def _quantize_activation(x, contracted, scheme, scale, zero_point):
    per_token = scheme.activation == "per_token" and scale is None
    axis = tuple(range(x.ndim - contracted, x.ndim)) if per_token else None
    return quantize(x, scheme.dtype, axis=axis, symmetric=scheme.symmetric, scale=scale, zero_point=zero_point)


def _leaves_in_order(x, own, order, contracted):
    """qvalue, scale, zero_point and sums, None where there are none, with their axes in `order`.

    All but qvalue come without the contracted axes, which are the last.
    """
    stored = dict(zip(own, x.storage_axes()))
    axes = [stored[label] for label in order if label in stored]
    missing = [axis for axis, label in enumerate(order) if label not in stored]
    arrange = lambda leaf: jnp.expand_dims(_transposed(leaf, axes), missing) if missing else _transposed(leaf, axes)
    last = tuple(range(len(order) - contracted, len(order)))
    summed = tuple(1 if axis in axes[-contracted:] else size for axis, size in enumerate(x.qvalue.shape))
    sums = x.azp_adj if x.azp_adj is not None and x.azp_adj.shape == summed else None
    vectors = (x.scale, x.zero_point, sums)
    return [arrange(x.qvalue), *(None if v is None else jnp.squeeze(arrange(v), last) for v in vectors)]


def _transposed(x, axes):
    return x if list(axes) == list(range(x.ndim)) else jnp.transpose(x, axes)


def _spread(vector, num_batch, sizes):
    """(*B, ...) with 1 for all that follows B, or with all of it."""
    if all(size == 1 for size in vector.shape[num_batch:]):
        return vector
    return jnp.broadcast_to(vector, (*vector.shape[:num_batch], *sizes))


def _flat(vector, num_batch):
    return vector.reshape(*vector.shape[:num_batch], math.prod(vector.shape[num_batch:]))
