"""Quantizers: `quantize`, and the primitives quantize_dynamic and quantize_static behind it."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_qmm import _compat, _extension
from jax_qmm.dtypes import INT4, QTYPES, SCALE_DTYPES, WEIGHT_QTYPES, check_qtype
from jax_qmm.explicit_axes import gathered_unless_divided
from jax_qmm.ops import checks, dispatch
from jax_qmm.ops.sharding import partitioned
from jax_qmm.qarray import QArray
from jax_qmm.reference import quantize as reference


def quantize(
    x: ArrayLike,
    qtype: DTypeLike = jnp.int8,
    *,
    axis: int | Sequence[int] | None = -1,
    tile_size: int | None = None,
    symmetric: bool = True,
    scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    sums: bool = False,
    scale_dtype: DTypeLike = jnp.float32,
    clip_search: bool = False,
) -> QArray:
    """Quantizes `x` to 8 or 4 bits: round half to even, saturate.

    It has no derivative, and differentiating through it is an error: `fake_quantize` is for training.

    int8 symmetric: `scale = absmax / 127`. int8 asymmetric: `scale = (max - min) / 255` over a range that
    includes 0, which the zero point then represents exactly. int4 likewise: `absmax / 7`, or `(max - min) / 15`.
    float8_e4m3fn: `scale = absmax / 448`. The arithmetic is float32. A row of zeros gives zeros. NaN and inf stay
    visible: a dynamic scale becomes NaN or inf, and so does the dequantized row. With a static scale inf saturates and
    NaN gives NaN in float8 but 0 in the integers, which have none.

    The GPU kernels serve scales shared over trailing axes (any `tile_size` on the last axis too); other axes and int4
    run as plain JAX. A weight is best stored with the axes last that products contract, a Flax kernel (K, N)
    as `quantize(kernel.T).T`; otherwise each product transposes it. A weight for float activations is packed besides:
    `quantize(kernel.T, jnp.int4, tile_size=128).pack().T`.

    Args:
      x: float32, bfloat16 or float16 array, rank 1 or more.
      qtype: `jnp.int8`, `jnp.int4` or `jnp.float8_e4m3fn`.
      axis: the axis or axes that share a scale: -1 for one scale per row, None (all) for one per tensor.
      tile_size: with a single `axis`, splits it into blocks of this many elements with a scale each. On the last axis
        the last block may be shorter, on others it needs to divide the axis. Where the devices that share the axis
        don't divide its blocks, it is gathered.
      symmetric: False adds a zero point in the range of int8 or int4.
      scale: static scale, a float array of shape () or broadcastable to the shape of the scale that is
        returned.
      zero_point: static zero point, int, shapes as for `scale`; for int8 and int4 and with `scale` only.
      sums: True adds the sums of the int8 values over the axes that share a scale, the `azp_adj` of the QArray, from
        the same pass over x. A product with an asymmetric operand needs those of the other one over what it contracts:
        with one scale per tensor `with_azp_adj` makes them, from a second read of the int8 values. With `tile_size`
        they are of each block.
      scale_dtype: the dtype of the scale that is returned, float32, bfloat16 or float16; x is quantized with the scale
        as rounded to it.
      clip_search: True looks for the scale with the least squared error among 16, from the one that spans the range
        down to 17/32 of it, which saturates the largest values: for weights of few bits. Not with `scale`.

    Returns:
      A `QArray` of x's shape and order. Its scale is of `scale_dtype` with x's rank: 1 on the shared axes, the number
      of blocks on a tiled one. Its zero point is int32 of the same shape, or None when symmetric, and so are its sums,
      or None when they are not asked for.

    Raises:
      TypeError, ValueError: for an argument that does not fit; the message names it.

    >>> q = quantize(jnp.array([[0.5, -127.0], [0.0, 0.0]]))
    >>> q.qvalue.tolist(), q.scale[0].tolist()
    ([[0, -127], [0, 0]], [1.0])
    >>> quantize(jnp.ones((4, 256)), jnp.float8_e4m3fn, tile_size=128)
    QArray(float8_e4m3fn[4,256], scale=float32[4,2])
    >>> quantize(jnp.ones((4, 300)), jnp.int4, tile_size=128, symmetric=False)
    QArray(int4[4,300], scale=float32[4,3], zero_point=int32[4,3], tile_size=128)
    >>> quantize(jnp.array([[0.5, -127.0], [0.0, 0.0]]), sums=True).azp_adj.tolist()
    [[-127], [0]]
    """
    x = _check_x(x)
    qtype = check_qtype("qtype", qtype, (*QTYPES, INT4))
    axes = checks.axes(axis, x.ndim)
    for name, flag in (("symmetric", symmetric), ("sums", sums), ("clip_search", clip_search)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} is {flag!r}, needs True or False")
    if qtype not in WEIGHT_QTYPES and not (symmetric and zero_point is None):
        what = "zero_point" if symmetric else "symmetric=False"
        raise ValueError(f"{what} was given with qtype {qtype}, needs int8 or int4")
    if sums and qtype != jnp.int8:
        raise ValueError(f"sums=True was given with qtype {qtype}, needs int8")
    if scale is None and zero_point is not None:
        raise ValueError("zero_point was given without scale")
    if scale is not None and zero_point is None and not symmetric:
        raise ValueError("symmetric=False and scale were given without zero_point")
    if scale is not None and clip_search:
        raise ValueError("clip_search=True was given with scale, needs scale None")
    scale_dtype = check_qtype("scale_dtype", scale_dtype, SCALE_DTYPES)

    shape = scale_shape = tuple(1 if a in axes else size for a, size in enumerate(x.shape))
    whole = x.shape
    tiled: Any = axes[0] if tile_size is not None and len(axes) == 1 else None
    if tile_size is not None:
        count = checks.tile_size(tile_size, tiled, x.shape)
        x = gathered_unless_divided(x, tiled, count)
        if x.shape[tiled] % tile_size != 0:  # zeros change no range: an asymmetric one holds 0
            x = jnp.pad(x, [(0, 0)] * tiled + [(0, -x.shape[tiled] % tile_size)])
        scale_shape = (*shape[:tiled], count, *shape[tiled + 1 :])
        shape = (*shape[:tiled], count, *shape[tiled:])
        x = x.reshape(*x.shape[:tiled], count, tile_size, *x.shape[tiled + 1 :])
        axes = (tiled + 1,)
    leaves: Any
    step: Any = None  # by which x is quantized, where that is known or chosen here
    if scale is None:
        params = {"qtype": qtype, "axes": axes, "symmetric": bool(symmetric), "sums": bool(sums)}
        leaves = quantize_dynamic_p.bind(x, **params)
        leaves = leaves if not symmetric else [*leaves[:2], None, *leaves[2:]]
        if clip_search or scale_dtype != jnp.float32:
            _, step, zero_point, *_ = leaves
            step = jnp.maximum(step, float(jnp.finfo(scale_dtype).smallest_subnormal))  # rows of zeros divide by it
        if clip_search:
            step = reference.least_error_scale(x, step, zero_point, qtype, axes, scale_dtype)
    else:
        step = checks.static("scale", scale, scale_shape).reshape(shape)
        if zero_point is not None:
            zero_point = checks.static("zero_point", zero_point, scale_shape).reshape(shape)
    if step is not None:
        stored = step.astype(scale_dtype)  # x is quantized with the scale as it is stored
        operands = (x, stored.astype(jnp.float32), *([] if zero_point is None else [zero_point]))
        qvalue, *rest = quantize_static_p.bind(*_compat.align_varying(operands), qtype=qtype, sums=bool(sums))
        leaves = [qvalue, stored, zero_point, *rest]
    if tile_size is not None:
        squeeze = lambda leaf: None if leaf is None else jnp.squeeze(leaf, tiled + 1)
        values = leaves[0].reshape(*whole[:tiled], count * tile_size, *whole[tiled + 1 :])
        leaves = [jax.lax.slice_in_dim(values, 0, whole[tiled], axis=tiled), *map(squeeze, leaves[1:])]
        if sums and leaves[2] is not None and whole[tiled] % tile_size != 0:  # the last block's are of zeros too
            padding = np.array([0] * (count - 1) + [-whole[tiled] % tile_size], np.int32)
            leaves[3] = leaves[3] - padding * leaves[2]
    qvalue, step, zero_points, *rest = leaves
    given = None if scale is None else zero_points  # those that are computed fit, and are not waited for
    q = QArray(
        qvalue, step, given, *rest, tile_size=None if tiled is None or whole[tiled] % tile_size == 0 else tile_size
    )
    return q._replace(zero_point=zero_points)


def _check_x(x):
    if isinstance(x, QArray):
        raise TypeError("x is a QArray already")
    x = checks.asarray("x", x)
    if x.dtype not in SCALE_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
    if x.ndim == 0:
        raise ValueError("x has rank 0, needs 1 or more")
    return x


# The primitives: operands x, and for the static one a scale and perhaps a zero point, of x's rank and in each
# dimension 1 or x's. Parameters: qtype, sums (one more result, of the shape of the scale); for the dynamic one also
# axes (sorted, not negative), symmetric.

quantize_dynamic_p = Primitive("quantize_dynamic")
quantize_static_p = Primitive("quantize_static")
quantize_dynamic_p.multiple_results = quantize_static_p.multiple_results = True


# Abstract evaluation


def _scale_shape(shape, axes):
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


def _shared(scale_shape):
    return tuple(axis for axis, size in enumerate(scale_shape) if size == 1)


def _parameter(x, axes, dtype):
    """The type of a scale, zero point or sum of x that `axes` share."""
    kept = {}
    if _compat.explicit_mesh(x):
        spec = (None if axis in axes else name for axis, name in enumerate(x.sharding.spec))
        kept = {"sharding": x.sharding.update(spec=PartitionSpec(*spec))}
    return x.update(shape=_scale_shape(x.shape, axes), dtype=jnp.dtype(dtype), weak_type=False, **kept)


def _dynamic_abstract(x, *, qtype, axes, symmetric, sums):
    integers = [_parameter(x, axes, jnp.int32)] * ((not symmetric) + sums)
    return [x.update(dtype=qtype, weak_type=False), _parameter(x, axes, jnp.float32), *integers]


def _static_abstract(x, scale, zero_point=None, *, qtype, sums):
    return [x.update(dtype=qtype, weak_type=False)] + [_parameter(x, _shared(scale.shape), jnp.int32)] * sums


# Lowerings


def _dynamic_reference(x, *, qtype, axes, symmetric, sums):
    out = reference.quantize_dynamic(x, qtype, axes, symmetric)
    return [*out[: 2 if symmetric else 3], *([reference.sums(out[0], axes)] if sums else [])]


def _static_reference(x, scale, zero_point=None, *, qtype, sums):
    qvalue = reference.quantize_static(x, scale, zero_point, qtype)
    return [qvalue, *([reference.sums(qvalue, _shared(scale.shape))] if sums else [])]


def _rows_and_columns(shape, scale_shape, dynamic):
    """The (R, C) that the kernels see, one scale per row or one in all; None for scales of another layout.

    >>> _rows_and_columns((2, 3, 4), (2, 3, 1), True), _rows_and_columns((8, 4), (1, 1), True)
    ((6, 4), (8, 4))
    >>> _rows_and_columns((8, 4), (1, 4), True) is None
    True
    """
    varies = [axis for axis, size in enumerate(scale_shape) if size != 1]
    if not varies:
        return math.prod(shape[:-1]), shape[-1]
    split = varies[-1] + 1
    repeated = any(scale_shape[axis] == 1 and shape[axis] != 1 for axis in range(split))
    if repeated and (dynamic or split == len(shape)):
        return None
    return math.prod(shape[:split]), math.prod(shape[split:])


def _unserved(platform, devices, shape, scale_shape, qtype, dynamic):
    if qtype != INT4 and 0 not in shape and _rows_and_columns(shape, scale_shape, dynamic) is None:
        return "its scales are not one per row"
    return _extension.fallback_reason(platform, devices)


def _dynamic_unserved(platform, devices, operands, *, qtype, axes, **params):
    (x,) = operands
    return _unserved(platform, devices, x.shape, _scale_shape(x.shape, axes), qtype, dynamic=True)


def _static_unserved(platform, devices, operands, *, qtype, **params):
    x, scale, *_ = operands
    return _unserved(platform, devices, x.shape, scale.shape, qtype, dynamic=False)


def _by_xla(devices, operands, *, qtype, **params):
    return "int4 values are weights, quantized once" if qtype == INT4 else None


def _dynamic_kernel(x, *, qtype, axes, symmetric, sums):
    if 0 in x.shape:  # nothing to launch a kernel for
        return _dynamic_reference(x, qtype=qtype, axes=axes, symmetric=symmetric, sums=sums)
    scale_shape = _scale_shape(x.shape, axes)
    layout = _rows_and_columns(x.shape, scale_shape, dynamic=True)
    column = functools.partial(jax.ShapeDtypeStruct, (math.prod(scale_shape), 1))
    workspace = jax.ShapeDtypeStruct((2,), jnp.uint32)
    integers = [column(jnp.int32)] * ((not symmetric) + sums)
    results = [jax.ShapeDtypeStruct(layout, qtype), column(jnp.float32), workspace, *integers]
    qvalue, scale, _, *integers = jax.ffi.ffi_call("jax_qmm_quantize_dynamic", results)(x.reshape(layout), sums=sums)
    return [qvalue.reshape(x.shape), *(parameter.reshape(scale_shape) for parameter in (scale, *integers))]


def _static_kernel(x, *parameters, qtype, sums):
    if 0 in x.shape:
        return _static_reference(x, *parameters, qtype=qtype, sums=sums)
    scale_shape = parameters[0].shape
    layout: Any = _rows_and_columns(x.shape, scale_shape, dynamic=False)
    varies = [axis for axis, size in enumerate(scale_shape) if size != 1]
    per_row = x.shape[: varies[-1] + 1] + (1,) * (x.ndim - varies[-1] - 1) if varies else scale_shape
    column = (layout[0] if varies else 1, 1)
    as_column = lambda parameter: jnp.broadcast_to(parameter, per_row).reshape(column)
    results = [jax.ShapeDtypeStruct(layout, qtype), *[jax.ShapeDtypeStruct(column, jnp.int32)] * sums]
    call = jax.ffi.ffi_call("jax_qmm_quantize_static", results)
    qvalue, *of_rows = call(x.reshape(layout), *map(as_column, parameters))
    whole = (reference.sums(part.reshape(per_row), _shared(scale_shape)) for part in of_rows)
    return [qvalue.reshape(x.shape), *whole]


def _describe(kind, x, axes, sums):
    granularity = "per tensor" if len(axes) == x.ndim else "per row" if x.ndim - 1 in axes else "per column"
    return f"quantize ({kind}, {granularity}{', sums' if sums else ''})", [x]


def _dynamic_describe(operands, results, *, axes, sums, **params):
    return _describe("dynamic", *operands, axes, sums)


def _static_describe(operands, results, *, sums, **params):
    x, scale, *_ = operands
    return _describe("static", x, _shared(scale.shape), sums)


def _choice(operands, results, **params):
    return "kernel"


# Batching


def _dynamic_batched(operands, dims, *, axes, **params):
    x = jnp.moveaxis(operands[0], dims[0], 0)
    out = quantize_dynamic_p.bind(x, axes=tuple(axis + 1 for axis in axes), **params)
    return out, (0,) * len(out)


def _static_batched(operands, dims, *, sums, **params):
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims) if dim is not None}
    operands = [x[None] if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims)]
    for i in range(len(operands) if sums else 1):  # sums are over the axes of which a scale has 1
        operands[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape[1:]))
    out = quantize_static_p.bind(*operands, sums=sums, **params)
    return out, (0,) * len(out)


# Differentiation: none, and not silently


def _no_derivative(primitive):
    def jvp(primals, tangents, **params):
        if not all(isinstance(t, ad.Zero) for t in tangents[:2]):
            raise TypeError(
                "jax_qmm.quantize has no derivative. For training, jax_qmm.fake_quantize gives the quantized values "
                "with straight-through gradients; where no gradient is wanted, pass jax.lax.stop_gradient(x)"
            )
        out = primitive.bind(*primals, **params)
        return out, [_compat.zero_tangent(x) for x in out]

    return jvp


# Sharding: scales shared over a sharded axis come from one all-reduce of the extrema, and sums from one more


def _dynamic_partitioned(run, shapes, *, qtype, axes, symmetric, sums):
    (shape,) = shapes
    dynamic = functools.partial(run, DYNAMIC, qtype=qtype, symmetric=symmetric)

    def across(mesh_axes):
        def local(x):
            # One all-reduce. Then the scale is that of the extrema quantized, so that it is divided as unsharded.
            bits = jax.lax.pmax(jnp.stack(reference.extrema(x, axes, symmetric), -1), mesh_axes)
            extrema = jax.lax.bitcast_convert_type(bits, jnp.float32) * jnp.float32([1] if symmetric else [-1, 1])
            _, *parameters = dynamic(extrema, axes=(x.ndim,), sums=False)
            parameters = [jnp.squeeze(parameter, -1) for parameter in parameters]
            qvalue, *rest = run(STATIC, x, *parameters, qtype=qtype, sums=sums)
            return [qvalue, *parameters, *jax.lax.psum(rest, mesh_axes)]

        return local

    factors, over, parameter = _parameter_factors(shape, axes)
    results = [factors, parameter, *[parameter] * ((not symmetric) + sums)]
    whole = functools.partial(dynamic, axes=axes, sums=sums)
    return partitioned(whole, [factors], results, shapes, names=("x",), over=over, across=across)


def _static_partitioned(run, shapes, *, qtype, sums):
    static = functools.partial(run, STATIC, qtype=qtype, sums=sums)
    factors, over, parameter = _parameter_factors(shapes[0], _shared(shapes[1]))
    names, operands = ("x", "scale", "zero_point"), [factors] * len(shapes)
    if not sums:
        return partitioned(static, operands, [factors], shapes, names=names)

    def across(mesh_axes):
        def local(*operands):
            qvalue, partial = static(*operands)
            return [qvalue, jax.lax.psum(partial, mesh_axes)]

        return local

    return partitioned(static, operands, [factors, parameter], shapes, names=names, over=over, across=across)


def _parameter_factors(shape, axes):
    """The factors of x, those that `axes` reduce, and those of a scale, zero point or sum."""
    factors = [f"d{axis}" for axis in range(len(shape))]
    over = tuple(factors[axis] for axis in axes)
    return factors, over, [f"scale{axis}" if axis in axes else factor for axis, factor in enumerate(factors)]


# Registration

DYNAMIC = dispatch.Op(
    name="quantize",
    targets=("jax_qmm_quantize_dynamic",),
    kernel=_dynamic_kernel,
    reference=_dynamic_reference,
    unserved=_dynamic_unserved,
    describe=_dynamic_describe,
    choice=_choice,
    partitioned=_dynamic_partitioned,
    by_xla=_by_xla,
    xla=_dynamic_reference,
)
STATIC = dispatch.Op(
    name="quantize",
    targets=("jax_qmm_quantize_static",),
    kernel=_static_kernel,
    reference=_static_reference,
    unserved=_static_unserved,
    describe=_static_describe,
    choice=_choice,
    partitioned=_static_partitioned,
    by_xla=_by_xla,
    xla=_static_reference,
)
dispatch.register(quantize_dynamic_p, DYNAMIC)
dispatch.register(quantize_static_p, STATIC)
quantize_dynamic_p.def_abstract_eval(_dynamic_abstract)
quantize_static_p.def_abstract_eval(_static_abstract)
batching.primitive_batchers[quantize_dynamic_p] = _dynamic_batched
batching.primitive_batchers[quantize_static_p] = _static_batched
ad.primitive_jvps[quantize_dynamic_p] = _no_derivative(quantize_dynamic_p)
ad.primitive_jvps[quantize_static_p] = _no_derivative(quantize_static_p)
