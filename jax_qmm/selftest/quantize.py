"""Arrays of floats that are quantized."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_qmm
from jax_qmm.reference.quantize import quantize_dynamic, quantize_static
from jax_qmm.selftest.result import Checks, Result, bits

# Shapes to quantize, with columns around the lengths at which the kernels change.
ARRAYS = ((3, 1), (5, 31), (3, 1000), (2, 28672), (1, 131075))
FLOATS = ("float32", "bfloat16", "float16")
QTYPES = (("int8", True), ("int8", False), ("float8_e4m3fn", True))  # qtype, symmetric
SCALES = (("dynamic per row", (1,)), ("dynamic per tensor", (0, 1)), ("static", None))  # name, axes that share one
STATIC_SCALE, STATIC_ZERO_POINT = 0.013, 5


def checks(kernels, gpu) -> Checks:
    """A check for each shape, by name."""
    for shape in ARRAYS:
        yield f"quantize {shape}", functools.partial(check_quantize, *shape)


def check_quantize(rows: int, columns: int) -> Iterator[Result]:
    """Quantizes an array in every way that has a kernel; all must agree with the reference bit for bit."""
    x = np.random.default_rng(columns).standard_normal((rows, columns), np.float32)
    ways: list[tuple[Any, ...]] = [(dtype, *qtype, *scale) for dtype in FLOATS for qtype in QTYPES for scale in SCALES]

    def by_kernels(x, dtype, qtype, symmetric, name, axes):
        options: dict[str, Any] = {"axis": axes} if axes else {"scale": STATIC_SCALE}
        if not (axes or symmetric):
            options["zero_point"] = STATIC_ZERO_POINT
        q = jax_qmm.quantize(x.astype(dtype), jnp.dtype(qtype), symmetric=symmetric, **options)
        return (q.qvalue, q.scale, q.zero_point) if axes else q.qvalue

    def by_reference(x, dtype, qtype, symmetric, name, axes):
        x, qtype = x.astype(dtype), jnp.dtype(qtype)
        if axes:
            return quantize_dynamic(x, qtype, axes, symmetric)
        zero_point = None if symmetric else jnp.int32(STATIC_ZERO_POINT)
        return quantize_static(x, jnp.float32(STATIC_SCALE), zero_point, qtype)

    outputs = jax.jit(lambda x: [by_kernels(x, *way) for way in ways])(x)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.jit(lambda x: [by_reference(x, *way) for way in ways])(x)
    for (dtype, qtype, symmetric, name, _), got, want in zip(ways, outputs, wanted):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want))
        wrong = sum(int((bits(np.asarray(g)) != bits(np.asarray(w))).sum()) for g, w in pairs)
        op = f"quantize, {dtype} to {qtype}" + ("" if symmetric else ", zero points")
        yield Result(op, name, f"({rows}, {columns})", wrong)
