"""Quantizers: `quantize`, and the primitives quantize_dynamic and quantize_static behind it."""

import functools
import math
import string

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from jax_qmm import _compat, _ffi, reference
from jax_qmm.ops import checks
from jax_qmm.ops.partitioning import even_spec, named_sharding, register_lowerings, without_mesh
from jax_qmm.qarray import SCALE_DTYPES, QArray
from jax_qmm.schemes import check_qtype


def quantize(x, qtype=jnp.int8, *, axis=-1, tile_size=None, symmetric=True, scale=None, zero_point=None):
    """Quantizes `x` to 8 bits: round half to even, saturate.

    int8 symmetric: `scale = absmax / 127`. int8 asymmetric: `scale = (max - min) / 255` over a range that
    includes 0, which the zero point then represents exactly. float8_e4m3fn: `scale = absmax / 448`. The
    arithmetic is float32. A row of zeros gives zeros. NaN and inf stay visible: a dynamic scale becomes NaN
    or inf, and so does the dequantized row. With a static scale inf saturates and NaN gives NaN in float8 but
    0 in int8, which has none. Gradients are stopped: the derivative by `x` is zero.

    The GPU kernels serve scales shared over trailing axes (any `tile_size` on the last axis too); other axes
    run as plain JAX. A weight is best stored with the axes last that products contract, a Flax kernel (K, N)
    as `quantize(kernel.T).T`; otherwise each product transposes it.

    Args:
      x: float32, bfloat16 or float16 array, rank 1 or more.
      qtype: `jnp.int8` or `jnp.float8_e4m3fn`.
      axis: the axis or axes that share a scale: -1 for one scale per row, None (all) for one per tensor.
      tile_size: with a single `axis`, splits it into blocks of this many elements with a scale each.
      symmetric: False adds an int8 zero point.
      scale: static scale, a float array of shape () or broadcastable to the shape of the scale that is
        returned.
      zero_point: static zero point, int, shapes as for `scale`; for int8 and with `scale` only.

    Returns:
      A `QArray` of x's shape and order. Its scale is float32 with x's rank: 1 on the shared axes, the number
      of blocks on a tiled one. Its zero point is int32 of the same shape, or None when symmetric.

    Raises:
      TypeError, ValueError: for an argument that does not fit; the message names it.

    >>> q = quantize(jnp.array([[0.5, -127.0], [0.0, 0.0]]))
    >>> q.qvalue.tolist(), q.scale[0].tolist()
    ([[0, -127], [0, 0]], [1.0])
    >>> quantize(jnp.ones((4, 256)), jnp.float8_e4m3fn, tile_size=128)
    QArray(float8_e4m3fn[4,256], scale=float32[4,2])
    """
    x = _check_x(x)
    qtype = check_qtype("qtype", qtype)
    axes = _check_axis(axis, x.ndim)
    if not isinstance(symmetric, (bool, np.bool_)):
        raise TypeError(f"symmetric is {symmetric!r}, needs True or False")
    if qtype != jnp.int8 and not (symmetric and zero_point is None):
        raise ValueError(f"{'zero_point' if symmetric else 'symmetric=False'} was given with qtype {qtype}, needs int8")
    if scale is None and zero_point is not None:
        raise ValueError("zero_point was given without scale")
    if scale is not None and zero_point is None and not symmetric:
        raise ValueError("symmetric=False and scale were given without zero_point")

    shape = scale_shape = tuple(1 if a in axes else size for a, size in enumerate(x.shape))
    if tile_size is not None:
        (tiled,) = axes if len(axes) == 1 else (None,)
        count = _check_tile_size(tile_size, tiled, x.shape)
        scale_shape = (*shape[:tiled], count, *shape[tiled + 1 :])
        shape = (*shape[:tiled], count, *shape[tiled:])
        whole, x = x.shape, x.reshape(*x.shape[:tiled], count, tile_size, *x.shape[tiled + 1 :])
        axes = (tiled + 1,)
    x = jax.lax.stop_gradient(x)
    if scale is None:
        out = quantize_dynamic_p.bind(x, qtype=qtype, axes=axes, symmetric=bool(symmetric))
        qvalue, scale, zero_point = (*out, None)[:3]
    else:
        scale = _check_parameter("scale", scale, scale_shape).reshape(shape)
        if zero_point is not None:
            zero_point = _check_parameter("zero_point", zero_point, scale_shape).reshape(shape)
        operands = (x, scale) if zero_point is None else (x, scale, zero_point)
        (qvalue,) = quantize_static_p.bind(*_compat.align_varying(operands), qtype=qtype)
    if tile_size is not None:
        qvalue, scale = qvalue.reshape(whole), jnp.squeeze(scale, tiled + 1)
        zero_point = None if zero_point is None else jnp.squeeze(zero_point, tiled + 1)
    return QArray(qvalue, scale, zero_point)


def _check_x(x):
    if isinstance(x, QArray):
        raise TypeError("x is a QArray already")
    x = checks.asarray("x", x)
    if x.dtype not in SCALE_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
    if x.ndim == 0:
        raise ValueError("x has rank 0, needs 1 or more")
    return x


def _check_axis(axis, ndim):
    axes = tuple(range(ndim)) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    if not all(isinstance(a, (int, np.integer)) for a in axes):
        raise TypeError(f"axis is {axis!r}, needs an int, a tuple of ints or None")
    canonical = tuple(sorted(int(a) % ndim for a in axes))
    if not axes or not all(-ndim <= a < ndim for a in axes):
        raise ValueError(f"axis is {axis}, needs at least one axis, each from {-ndim} to {ndim - 1}")
    if len(set(canonical)) != len(axes):
        raise ValueError(f"axis is {axis}, which names an axis twice")
    return canonical


def _check_tile_size(tile_size, tiled, shape):
    if tiled is None:
        raise ValueError("tile_size needs a single axis")
    if not isinstance(tile_size, (int, np.integer)) or tile_size < 1 or shape[tiled] % tile_size != 0:
        raise ValueError(f"tile_size is {tile_size}, needs a divisor of {shape[tiled]}, the size of axis {tiled}")
    return shape[tiled] // tile_size


def _check_parameter(name, value, shape):
    integer = name == "zero_point"
    if not integer and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = np.float32(value)
    value = checks.asarray(name, value)
    if not (jnp.issubdtype(value.dtype, jnp.integer) if integer else value.dtype in SCALE_DTYPES):
        kind = "an integer dtype" if integer else ", ".join(map(str, SCALE_DTYPES))
        raise TypeError(f"{name} has dtype {value.dtype}, needs {kind}")
    trailing = shape[len(shape) - value.ndim :] if value.ndim <= len(shape) else None
    if trailing is None or not all(a == 1 or a == b for a, b in zip(value.shape, trailing)):
        raise ValueError(f"{name} has shape {value.shape}, needs () or one that broadcasts to {shape}")
    value = jax.lax.stop_gradient(value.astype(jnp.int32 if integer else jnp.float32))
    return jnp.broadcast_to(value, shape)


# Operands of the primitives: x, and for the static one a scale and perhaps a zero point, of x's rank and in
# each dimension 1 or x's. Parameters: qtype; for the dynamic one also axes (sorted, not negative), symmetric.
quantize_dynamic_p = Primitive("quantize_dynamic")
quantize_static_p = Primitive("quantize_static")
for _primitive in (quantize_dynamic_p, quantize_static_p):
    _primitive.multiple_results = True
    _compat.define_impl(_primitive)


def rows_and_columns(shape, scale_shape, dynamic):
    """The (R, C) that the kernels see, one scale per row or one in all; None for scales of another layout.

    `explain` reads this too: where it is None, plain JAX runs on every platform.

    >>> rows_and_columns((2, 3, 4), (2, 3, 1), True), rows_and_columns((8, 4), (1, 1), True)
    ((6, 4), (8, 4))
    >>> rows_and_columns((8, 4), (1, 4), True) is None
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


def _scale_shape(shape, axes):
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


@quantize_dynamic_p.def_abstract_eval
def _dynamic_abstract(x, *, qtype, axes, symmetric):
    kept = {}
    if _compat.explicit_mesh(x):
        spec = (None if axis in axes else name for axis, name in enumerate(x.sharding.spec))
        kept = {"sharding": x.sharding.update(spec=PartitionSpec(*spec))}
    scale = x.update(shape=_scale_shape(x.shape, axes), dtype=jnp.dtype(jnp.float32), weak_type=False, **kept)
    out = [x.update(dtype=qtype, weak_type=False), scale]
    return out if symmetric else [*out, scale.update(dtype=jnp.dtype(jnp.int32))]


@quantize_static_p.def_abstract_eval
def _static_abstract(x, scale, zero_point=None, *, qtype):
    return [x.update(dtype=qtype, weak_type=False)]


def _dynamic_reference(x, *, qtype, axes, symmetric):
    out = reference.quantize_dynamic(x, qtype, axes, symmetric)
    return list(out[:2] if symmetric else out)


def _static_reference(x, scale, zero_point=None, *, qtype):
    return [reference.quantize_static(x, scale, zero_point, qtype)]


def _dynamic_kernel(x, *, qtype, axes, symmetric):
    scale_shape = _scale_shape(x.shape, axes)
    layout = _kernel_layout(x.shape, scale_shape, dynamic=True)
    if layout is None:
        return _dynamic_reference(x, qtype=qtype, axes=axes, symmetric=symmetric)
    rows = math.prod(scale_shape)
    column = functools.partial(jax.ShapeDtypeStruct, (rows, 1))
    workspace = jax.ShapeDtypeStruct((2,), jnp.uint32)
    call = jax.ffi.ffi_call(
        "jax_qmm_quantize_dynamic",
        (
            jax.ShapeDtypeStruct(layout, qtype),
            column(jnp.float32),
            workspace,
            *([] if symmetric else [column(jnp.int32)]),
        ),
    )
    qvalue, scale, _, *zero_point = call(x.reshape(layout))
    return [qvalue.reshape(x.shape), *(parameter.reshape(scale_shape) for parameter in (scale, *zero_point))]


def _static_kernel(x, *parameters, qtype):
    scale_shape = parameters[0].shape
    layout = _kernel_layout(x.shape, scale_shape, dynamic=False)
    if layout is None:
        return _static_reference(x, *parameters, qtype=qtype)
    varies = [axis for axis, size in enumerate(scale_shape) if size != 1]
    per_row = x.shape[: varies[-1] + 1] + (1,) * (x.ndim - varies[-1] - 1) if varies else scale_shape
    as_column = lambda parameter: jnp.broadcast_to(parameter, per_row).reshape(layout[0] if varies else 1, 1)
    call = jax.ffi.ffi_call("jax_qmm_quantize_static", jax.ShapeDtypeStruct(layout, qtype))
    return [call(x.reshape(layout), *map(as_column, parameters)).reshape(x.shape)]


def _kernel_layout(shape, scale_shape, dynamic):
    if 0 in shape:
        return None
    layout = rows_and_columns(shape, scale_shape, dynamic)
    if layout is None:
        _ffi.note_fallback("quantize", f"scales of shape {scale_shape} for an array {shape} are not one per row")
    return layout


def _dynamic_batched(operands, dims, **params):
    x = jnp.moveaxis(operands[0], dims[0], 0)
    params["axes"] = tuple(axis + 1 for axis in params["axes"])
    out = quantize_dynamic_p.bind(x, **params)
    return out, (0,) * len(out)


def _static_batched(operands, dims, *, qtype):
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims) if dim is not None}
    operands = [x[None] if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims)]
    operands[0] = jnp.broadcast_to(operands[0], (size, *operands[0].shape[1:]))
    return quantize_static_p.bind(*operands, qtype=qtype), (0,)


batching.primitive_batchers[quantize_dynamic_p] = _dynamic_batched
batching.primitive_batchers[quantize_static_p] = _static_batched


# Sharding: scales shared over a sharded axis come from one all-reduce of the extrema.


def _partitioned_dynamic(dynamic, shapes):
    qtype, axes, symmetric = (dynamic.keywords[name] for name in ("qtype", "axes", "symmetric"))
    static = _STATIC[dynamic.func]
    whole = custom_partitioning(lambda x: dynamic(x))

    def local(shared_axes, x):
        # One all-reduce. Then the scale is that of the extrema quantized, so that it is divided as unsharded.
        bits = jax.lax.pmax(jnp.stack(reference.extrema(x, axes, symmetric), -1), shared_axes)
        extrema = jax.lax.bitcast_convert_type(bits, jnp.float32) * jnp.float32([1] if symmetric else [-1, 1])
        _, *parameters = dynamic(extrema, axes=(x.ndim,))
        parameters = [jnp.squeeze(parameter, -1) for parameter in parameters]
        return static(x, *parameters, qtype=qtype) + parameters

    def partition(mesh, operands, results):
        spec = even_spec(mesh, operands[0])
        shared_axes = tuple(name for axis in axes for name in spec[axis])
        reduced = [() if axis in axes else names for axis, names in enumerate(spec)]
        x, scale = named_sharding(mesh, spec), named_sharding(mesh, reduced)
        lower = without_mesh(functools.partial(local, shared_axes) if shared_axes else dynamic)
        return mesh, lower, [x] + [scale] * (len(results) - 1), (x,)

    x, scale = _factors(*shapes, _scale_shape(*shapes, axes))
    results = ", ".join([x, scale] if symmetric else [x, scale, scale])
    whole.def_partition(partition=partition, sharding_rule=f"{x} -> {results}")
    return whole


def _partitioned_static(static, shapes):
    whole = custom_partitioning(lambda *operands: static(*operands))

    def partition(mesh, operands, results):
        spec = even_spec(mesh, operands[0])
        shardings = [
            named_sharding(mesh, [names if size != 1 else () for names, size in zip(spec, operand.shape)])
            for operand in operands
        ]
        return mesh, without_mesh(static), shardings[:1], tuple(shardings)

    x, *parameters = _factors(*shapes)
    whole.def_partition(partition=partition, sharding_rule=f"{', '.join([x, *parameters])} -> {x}")
    return whole


def _factors(shape, *parameter_shapes):
    """Factors of a sharding rule: one for each axis of x; a parameter of 1 there has a factor of its own."""
    letters = iter(string.ascii_letters)
    factors = [next(letters) for _ in shape]
    return [" ".join(factors)] + [
        " ".join(factor if size != 1 else next(letters) for factor, size in zip(factors, parameter))
        for parameter in parameter_shapes
    ]


_STATIC = {_dynamic_kernel: _static_kernel, _dynamic_reference: _static_reference}
register_lowerings(quantize_dynamic_p, "quantize", _dynamic_kernel, _dynamic_reference, _partitioned_dynamic)
register_lowerings(quantize_static_p, "quantize", _static_kernel, _static_reference, _partitioned_static)
