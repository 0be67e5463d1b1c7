"""Checks of the arguments of the ops; errors name the argument, what it had and needs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_qmm.dtypes import FLOAT8, INT32, QTYPES, SCALE_DTYPES
from jax_qmm.reference import activation as activations

Activation = str | tuple[float, float] | None  # as users write it


def array(name, x, dtypes):
    """`x` as a JAX array of one of `dtypes`."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    needs = f"needs an array of {' or '.join(dtype.name for dtype in dtypes)}"
    x = _narrow(name, x)
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{name} is a {type(x).__name__}; it {needs}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; it {needs}")
    return jnp.asarray(x)


def asarray(name, x):
    """`x` as a JAX array; lists too."""
    return _converted(name, _narrow(name, x), jnp.asarray)


def int32(name, x):
    """Integers as a JAX array of int32, which must hold them. Wider ones that are traced can't be seen: they wrap."""
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))
    if isinstance(x, (int, list, tuple, jax.Array)) and getattr(x, "dtype", None) != INT32 and not traced:
        x = _converted(name, x, np.asarray)
    x = asarray(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}, needs an integer dtype")
    return x.astype(jnp.int32)


def _converted(name, x, convert):
    try:
        return convert(x)
    except OverflowError:
        raise ValueError(f"{name} is {x}, which is out of range") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(x).__name__}, needs an array") from None


def _narrow(name, x):
    """NumPy's float64 as float32 and its wide integers as int32, which must hold them; with JAX's x64 too."""
    if not isinstance(x, (np.ndarray, np.generic)):
        return x
    if x.dtype == np.float64:
        return x.astype(np.float32)
    if x.dtype in (np.int64, np.uint64, np.uint32, np.object_):
        bounds = np.iinfo(np.int32)
        if x.size and not (bounds.min <= int(x.min()) and int(x.max()) <= bounds.max):
            raise ValueError(f"{name} is {x}, which is out of range of int32")
        return x.astype(np.int32)
    return x


def broadcasting(name, x, shape):
    """`x` with 1 for the leading dimensions that it lacks, if it broadcasts to a result of `shape`."""
    padded = (*(1,) * (len(shape) - x.ndim), *x.shape)
    if len(padded) != len(shape) or not all(size in (1, whole) for size, whole in zip(padded, shape)):
        raise ValueError(f"{name} has shape {x.shape}, needs one that broadcasts to the result's {shape}")
    return x.reshape(padded)


def matrices(a, b, qtypes=QTYPES):
    """`a` of shape (..., M, K) and `b` of shape (N, K), of one quantized dtype."""
    a, b = array("a", a, qtypes), array("b", b, qtypes)
    if a.dtype != b.dtype:
        raise TypeError(f"a has dtype {a.dtype} and b {b.dtype}; they need the same")
    product_shapes(a=a, b=b)
    return a, b


def product_shapes(**operands):
    """Two operands, by their names: the first of shape (..., M, K), the second (N, K)."""
    (name_a, a), (name_b, b) = operands.items()
    if a.ndim < 2:
        raise ValueError(f"{name_a} has shape {a.shape}; it needs two dimensions or more, (..., M, K)")
    if b.ndim != 2:
        raise ValueError(f"{name_b} has shape {b.shape}; it needs two dimensions, (N, K)")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{name_a} has shape {a.shape} and {name_b} {b.shape}; their last dimensions, K, need to be equal"
        )


def scale(name, x):
    """A scale as an array; a Python number is one of float32."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return jnp.float32(x)
    return array(name, x, SCALE_DTYPES)


def along_rows(name, x, a, scalar=True):
    """A scale or zero point of the rows of `a` in the shape of the rows, or with every dimension 1 for a scalar."""
    rows = a.shape[:-1]
    if scalar and x.shape in ((), (1,) * a.ndim):
        return x.reshape((1,) * len(rows))
    if x.shape == rows:
        return x
    if x.shape == (*rows, 1):
        return x.squeeze(-1)
    needs = f"(), {rows}, {(*rows, 1)} or {(1,) * a.ndim}" if scalar else f"{rows} or {(*rows, 1)}"
    raise ValueError(f"{name} has shape {x.shape}; with a of shape {a.shape} it needs {needs}")


def along_columns(name, x, b, scalar=False):
    """A vector along the rows of `b`, the output's columns, as `(N,)`, or `(1,)` for a scalar."""
    n = b.shape[0]
    if x.shape == (n,):
        return x
    if scalar and x.shape in ((), (1, 1)):
        return x.reshape(1)
    if scalar and x.shape == (1, n):
        return x.squeeze(0)
    needs = f"(), {(n,)}, {(1, n)} or (1, 1)" if scalar else f"{(n,)}"
    raise ValueError(f"{name} has shape {x.shape}; with b of shape {b.shape} it needs {needs}")


def out_dtype(dtype: Any) -> Any:
    """`dtype` as one of the output dtypes of an epilogue with scales."""
    try:
        dtype = None if dtype is None else jnp.dtype(dtype)  # jnp.dtype(None) is float64
    except TypeError:
        raise TypeError(f"out_dtype is {dtype!r}; it needs to be a dtype") from None
    if dtype not in (*SCALE_DTYPES, *QTYPES, INT32):
        raise TypeError(
            f"out_dtype is {dtype}; it needs to be bfloat16, float16, float32, int8 or float8_e4m3fn or, for the sums, "
            "int32"
        )
    return dtype


def bias_dtypes(out_dtype):
    """The dtypes that a bias may have."""
    return SCALE_DTYPES if out_dtype in QTYPES else tuple(dict.fromkeys((SCALE_DTYPES[0], out_dtype)))


def activation(x):
    """The `Activation` that a user names."""
    if x is None:
        return activations.NONE
    needs = "None, 'relu', 'relu6', 'gelu', 'silu' or (lo, hi), two numbers"
    if isinstance(x, str):
        if x not in activations.NAMED:
            raise ValueError(f"activation is {x!r}; it needs to be {needs}")
        return activations.NAMED[x]
    numbers = (int, float, np.integer, np.floating)
    if not (isinstance(x, (tuple, list)) and len(x) == 2 and all(isinstance(bound, numbers) for bound in x)):
        raise TypeError(f"activation is {x!r}; it needs to be {needs}")
    with np.errstate(over="ignore"):
        low, high = (float(np.float32(bound)) + 0.0 for bound in x)  # of two zeros the positive one
    if not low <= high:
        raise ValueError(f"activation is {x}; of (lo, hi) it needs lo <= hi")
    return activations.Activation("clamp", low, high)


def output(out_dtype, out_scale, out_zero_point):
    """The vectors of an 8-bit output, by name; none for other outputs."""
    if out_dtype not in QTYPES:
        for name, x, needs in (
            ("out_scale", out_scale, "int8 or float8_e4m3fn"),
            ("out_zero_point", out_zero_point, "int8"),
        ):
            if x is not None:
                raise ValueError(f"{name} was given with out_dtype {out_dtype}; it needs out_dtype {needs}")
        return {}
    if out_scale is None:
        raise ValueError(f"out_dtype is {out_dtype}; it needs out_scale, the step of the result")
    vectors = {"out_scale": _scalar("out_scale", scale("out_scale", out_scale)).astype(jnp.float32)}
    if isinstance(out_scale, (int, float, np.ndarray, np.generic, jax.Array)) and not isinstance(out_scale, Tracer):
        with np.errstate(over="ignore"):
            value = np.asarray(out_scale).astype(np.float32)
        if value == 0 or not np.isfinite(value):
            raise ValueError(f"out_scale is {out_scale}; it needs to be finite and not 0 in float32")
    if out_zero_point is not None and out_dtype == FLOAT8:
        raise ValueError(f"out_zero_point was given with out_dtype {out_dtype}; it needs out_dtype int8")
    if out_zero_point is not None:
        vectors["out_zero_point"] = _scalar("out_zero_point", int32("out_zero_point", out_zero_point))
    return vectors


def _scalar(name, x):
    if x.shape != ():
        raise ValueError(f"{name} has shape {x.shape}; it needs (): one for the whole result")
    return x


def raw_sums(a, scale_a, scale_b, zero_points, **absent):
    """Checks what `out_dtype=int32` asks for: the sums of int8 products and nothing more."""
    if zero_points:
        raise ValueError(
            "out_dtype is int32, which only scaled_mm has; with zero points it needs to be bfloat16, float16, float32, "
            "int8 or float8_e4m3fn"
        )
    if a.dtype != jnp.int8:
        raise ValueError(f"out_dtype int32 gives the exact sums of int8 products, but a has dtype {a.dtype}")
    for name, x in (("scale_a", scale_a), ("scale_b", scale_b)):
        if isinstance(x, jax.Array) or np.size(x) != 1 or np.any(np.asarray(x) != 1):
            raise ValueError(
                f"out_dtype int32 gives the unscaled sums: {name} needs to be the constant 1.0 "
                f"of Python or numpy, not {x}"
            )
    for name, x in absent.items():
        if x is not None:
            raise ValueError(f"out_dtype int32 gives the unscaled sums: {name} needs to be None")


# Of quantize


def axes(axis, ndim):
    """`axis` as sorted axes, not negative."""
    axes = tuple(range(ndim)) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    if not all(isinstance(a, (int, np.integer)) for a in axes):
        raise TypeError(f"axis is {axis!r}, needs an int, a tuple of ints or None")
    canonical = tuple(sorted(int(a) % ndim for a in axes))
    if not axes or not all(-ndim <= a < ndim for a in axes):
        raise ValueError(f"axis is {axis}, needs at least one axis, each from {-ndim} to {ndim - 1}")
    if len(set(canonical)) != len(axes):
        raise ValueError(f"axis is {axis}, which names an axis twice")
    return canonical


def tile_size(tile_size, tiled, shape):
    """The number of blocks of `tile_size` along the axis `tiled`, of which the last may be short on the last axis."""
    if tiled is None:
        raise ValueError("tile_size needs a single axis")
    if isinstance(tile_size, bool) or not isinstance(tile_size, (int, np.integer)) or tile_size < 1:
        raise ValueError(f"tile_size is {tile_size}, needs to be a positive int")
    if tiled != len(shape) - 1 and shape[tiled] % tile_size != 0:
        raise ValueError(f"tile_size is {tile_size}, needs a divisor of {shape[tiled]}, the size of axis {tiled}")
    return -(-shape[tiled] // tile_size)


def static(name, value, shape):
    """A static scale or zero point, in `shape`."""
    if name == "zero_point":
        value = int32(name, value)
    else:
        value = np.float32(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        value = asarray(name, value)
        if value.dtype not in (*SCALE_DTYPES, np.dtype(np.float64)):
            raise TypeError(f"{name} has dtype {value.dtype}, needs {', '.join(map(str, SCALE_DTYPES))}")
        value = value.astype(jnp.float32)  # with JAX's x64, a scale computed from Python numbers is a float64
    trailing = shape[len(shape) - value.ndim :] if value.ndim <= len(shape) else None
    if trailing is None or not all(a == 1 or a == b for a, b in zip(value.shape, trailing)):
        raise ValueError(f"{name} has shape {value.shape}, needs () or one that broadcasts to {shape}")
    return jnp.broadcast_to(value, shape)
