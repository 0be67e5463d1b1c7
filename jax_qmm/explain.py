"""`explain`: every quantized operation of a function, and the kernel or the fallback that runs it."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_qmm import _ffi, report
from jax_qmm.ops.contraction import dequantized_reason
from jax_qmm.ops.quantize import quantize_dynamic_p, quantize_static_p, rows_and_columns
from jax_qmm.ops.scaled_mm import scaled_mm_p
from jax_qmm.qarray import QTYPES


@dataclasses.dataclass(frozen=True)
class OpRow:
    """One quantized operation of a function.

    Attributes:
      op: "scaled_mm", "quantize" or "dequantized dot", with what belongs to it in parentheses; or "transpose"
        of 8-bit values, for a weight that is stored in another order than the kernel reads.
      inputs: dtypes and shapes of the matrices, or of what is quantized; inside a shard_map those of one
        device.
      out: dtype and shape of the result.
      count: how often it runs in one call of the function; a while loop counts as one turn, a cond as all of
        its branches.
      runs_on: the kernel that is chosen, or "reference: why"; for a transpose what spares it.
      inside: the control flow around it, outermost first ("scan", "while", "cond", "shard_map"); may be "".
    """

    op: str
    inputs: str
    out: str
    count: int
    runs_on: str
    inside: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The quantized operations of a function; print it.

    Attributes:
      rows: an `OpRow` for each operation, equal ones added up, in order of first appearance.
    """

    rows: tuple[OpRow, ...]

    def __str__(self):
        if not self.rows:
            return "no quantized operation"
        return report.format_table(
            ("op", "inputs", "out", "count", "inside", "runs on"),
            [(row.op, row.inputs, row.out, row.count, row.inside, row.runs_on) for row in self.rows],
        )


def explain(fn: Callable, *args, **kwargs) -> Explanation:
    """Lists the quantized operations that a call of `fn` runs, each with its kernel or with why it has none.

    The function is traced, not run. Kernels are those that the default device has for the shapes as traced:
    operands that the compiler splits over devices count as a whole.

    Args:
      fn: any function that JAX can trace, or a model that is a pytree, such as an nnx.Module.
      *args: positional arguments as in a call of `fn`; arrays can be ShapeDtypeStructs. What is no array is
        not traced.
      **kwargs: likewise.

    Returns:
      An `Explanation`: print it, or read its `rows`.

    >>> import jax.numpy as jnp, jax_qmm
    >>> def f(x, w):
    ...     q = jax_qmm.quantize(x)
    ...     return jax_qmm.scaled_mm(q.qvalue, w, q.scale, 0.5)
    >>> w = jax.ShapeDtypeStruct((16, 32), jnp.int8)
    >>> table = explain(f, jax.ShapeDtypeStruct((8, 32), jnp.bfloat16), w)
    >>> [(row.op, row.inputs, row.out, row.count) for row in table.rows]  # doctest: +NORMALIZE_WHITESPACE
    [('quantize (dynamic, per row)', 'bfloat16[8,32]', 'int8[8,32]', 1),
     ('scaled_mm (scale_a, scale_b)', 'int8[8,32] x int8[16,32]', 'bfloat16[8,16]', 1)]
    """
    jaxpr = trace(fn, *args, **kwargs)
    counts: dict[OpRow, int] = {}
    for row in _walk(jaxpr.jaxpr, 1, (), report.platform()):
        key = dataclasses.replace(row, count=0)
        counts[key] = counts.get(key, 0) + row.count
    return Explanation(tuple(dataclasses.replace(row, count=count) for row, count in counts.items()))


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def trace(fn: Callable, *args, **kwargs) -> ClosedJaxpr:
    """The jaxpr of a call of `fn`, traced over only the arrays in `fn` and its arguments."""
    leaves, tree = jax.tree.flatten((fn, args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)}

    def call(arrays):
        fn, args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return jax.tree.leaves(fn(*args, **kwargs))

    return jax.make_jaxpr(call)(arrays)


def _walk(jaxpr: Jaxpr, count: int, inside: tuple[str, ...], platform: str) -> Iterator[OpRow]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if described := _describe(eqn, _ffi.fallback_reason(platform)):
            op, inputs, runs_on = described
            operands = " x ".join(_typed(var.aval) for var in inputs)
            yield OpRow(op, operands, _typed(eqn.outvars[0].aval), count, runs_on, " > ".join(inside))
            continue
        turns = eqn.params["length"] if name == "scan" else 1
        around = (*inside, name) if name in ("scan", "while", "cond", "shard_map") else inside
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
                yield from _walk(inner, count * turns, around, platform)


def _is_jaxpr(value):
    return isinstance(value, Jaxpr | ClosedJaxpr)


def _typed(aval):
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _describe(eqn, reason):
    """What to call an equation, its inputs and what runs it; None if it is no quantized operation.

    `reason` says why the platform has no kernels, or is None.
    """
    if eqn.primitive is scaled_mm_p:
        op = f"scaled_mm ({', '.join(eqn.params['names']) or 'sums'})"
        return op, eqn.invars[:2], _reference(reason) or _kernel_of_scaled_mm(eqn)
    if eqn.primitive in (quantize_dynamic_p, quantize_static_p):
        dynamic = eqn.primitive is quantize_dynamic_p
        x, scale = eqn.invars[0], (eqn.outvars if dynamic else eqn.invars)[1].aval.shape
        granularity = "per tensor" if math.prod(scale) == 1 else "per row" if scale[-1] == 1 else "per column"
        if 0 not in x.aval.shape and rows_and_columns(x.aval.shape, scale, dynamic) is None:
            reason = "its scales are not one per row"
        op = f"quantize ({'dynamic' if dynamic else 'static'}, {granularity})"
        return op, [x], _reference(reason) or "kernel"
    if eqn.primitive.name == "transpose" and eqn.invars[0].aval.dtype in QTYPES:
        return "transpose", eqn.invars, "XLA, at each call: store the axes that the product contracts last"
    if dequantized := dequantized_reason(str(eqn.params.get("name", ""))):
        return "dequantized dot", eqn.invars, _reference(dequantized)
    return None


def _reference(reason):
    return reason and f"reference: {reason}"


def _kernel_of_scaled_mm(eqn):
    (a, b), out = (var.aval for var in eqn.invars[:2]), eqn.outvars[0].aval
    num_batch = eqn.params["num_batch"]
    rows, batch = math.prod(a.shape[num_batch:-1]), math.prod(out.shape[:num_batch])
    if not all(isinstance(dim, int) for dim in (rows, *b.shape[-2:], batch)):
        return "kernel, chosen at run time: the shapes are symbolic"
    return _ffi.describe_scaled_mm(rows, *b.shape[-2:], batch, a.dtype, out.dtype, eqn.params["fast_accum"])
