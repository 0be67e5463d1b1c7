"""`explain`: the quantized operations of a function with what runs each, and the products that stayed float."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]

from jax_qmm import _extension
from jax_qmm.dtypes import INT4, QTYPES
from jax_qmm.ops import dispatch
from jax_qmm.ops.conv import conv_p
from jax_qmm.ops.dequantized_dot import dequantized_reason
from jax_qmm.ops.weight_only_conv import DEQUANTIZED_CONV, weight_only_conv_p
from jax_qmm.text_table import format_table
from jax_qmm.traced_shardings import TracedShardings, inner_jaxprs


@dataclasses.dataclass(frozen=True)
class OpRow:
    """One operation of a function.

    Attributes:
      op: "scaled_mm", "block_scaled_mm", "quantize" or "dequantized dot", with what belongs to it in parentheses;
        "expand" of int4 weights to 8 bits, for 8-bit activations; "transpose" of quantized values, for a weight that
        is stored in another order than the kernel reads, or of the images of a convolution; or a product of jax.lax
        that stayed float, as "dot_general" and "conv_general_dilated".
      inputs: dtypes and shapes of the matrices, or of what is quantized; inside a shard_map those of one
        device.
      out: dtype and shape of the result.
      count: how often it runs in one call of the function; a while loop counts as one turn, a cond as all of
        its branches.
      runs_on: the kernel that is chosen, "XLA: why" where XLA's operations are, or "reference: why"; for a transpose
        what spares it; "XLA" for a float product.
      inside: the control flow around it, outermost first ("scan", "while", "cond", "shard_map"); may be "".
      is_float: whether it is a product that stayed float.
      exchanged: what the devices of a mesh exchange for it, as which operands are gathered and why; "" for nothing.
    """

    op: str
    inputs: str
    out: str
    count: int
    runs_on: str
    inside: str = ""
    is_float: bool = False
    exchanged: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The quantized operations and the float products of a function; print it.

    Attributes:
      rows: an `OpRow` for each quantized operation, equal ones added up, in order of first appearance.
      float_rows: likewise for each product of float arrays (attention, a head, a convolution).
      gpu: the GPU that kernels are chosen for and the architecture whose code it runs; "" where no kernels run.
      launches: how kernels are launched: "recorded" into XLA's CUDA graphs, or "outside of CUDA graphs" and why; ""
        where no kernels run.
    """

    rows: tuple[OpRow, ...]
    float_rows: tuple[OpRow, ...] = ()
    gpu: str = ""
    launches: str = ""

    def __str__(self):
        columns = ("op", "inputs", "out", "count", "inside")
        cells = lambda row: tuple(getattr(row, column) for column in columns)
        parts = ["no quantized operation"]
        if self.rows:
            rows = [(*cells(row), row.runs_on, row.exchanged) for row in self.rows]
            parts = [format_table((*columns, "runs on", "devices exchange"), rows)]
        if self.rows:
            facts = {"GPU": self.gpu, "launches": self.launches}
            parts += [f"{name}: {fact}" for name, fact in facts.items() if fact]
        if self.float_rows:
            parts += ["", "products that stayed float:", format_table(columns, map(cells, self.float_rows))]
        return "\n".join(parts)


def explain(fn: Callable, *args, **kwargs) -> Explanation:
    """Lists the quantized operations that a call of `fn` runs, each with its kernel or with why it has none.

    The products that stayed float are listed apart, those of attention for instance.

    The function is traced, not run. Kernels are those that the default device has for the shapes as traced:
    operands that the compiler splits over devices count as a whole.

    What devices exchange follows from the shardings of operands, which the types of arrays have on Explicit axes of a
    mesh. On Auto axes arguments and constants have them that get to an operation as they are; the compiler chooses
    those of all that is computed, and the row says that it decides.

    Args:
      fn: any function that JAX can trace, or a model that is a pytree, such as an nnx.Module.
      *args: positional arguments as in a call of `fn`; arrays can be ShapeDtypeStructs. What is no array is
        not traced.
      **kwargs: likewise.

    Returns:
      An `Explanation`: print it, or read its `rows`.

    Raises:
      TypeError: if `fn` is no function.

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
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; explain needs a function, and then the arguments of a call")
    jaxpr = trace(fn, *args, **kwargs)
    counts: dict[OpRow, int] = {}
    where = _extension.default_devices()
    arguments = [leaf for leaf in jax.tree.leaves((fn, args, kwargs)) if isinstance(leaf, _ARRAYS)]
    for row in _walk(jaxpr.jaxpr, 1, (), where, TracedShardings.of_call(jaxpr, arguments)):
        key = dataclasses.replace(row, count=0)
        counts[key] = counts.get(key, 0) + row.count
    counted = [dataclasses.replace(row, count=count) for row, count in counts.items()]
    rows, float_rows = (tuple(row for row in counted if row.is_float == is_float) for is_float in (False, True))
    if _extension.fallback_reason(*where):
        return Explanation(rows, float_rows)
    return Explanation(rows, float_rows, _extension.described_gpu(), _extension.launches())


_FLOAT_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
_CONVS = (conv_p, weight_only_conv_p)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def trace(fn: Callable, *args, **kwargs) -> ClosedJaxpr:
    """The jaxpr of a call of `fn`, traced over only the arrays in `fn` and its arguments."""
    leaves, tree = jax.tree.flatten((fn, args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)}

    def call(arrays):
        fn, args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return jax.tree.leaves(fn(*args, **kwargs))

    return jax.make_jaxpr(call)(arrays)


def _walk(
    jaxpr: Jaxpr, count: int, inside: tuple[str, ...], where: tuple, shardings: TracedShardings
) -> Iterator[OpRow]:
    of_convs = {id(var) for eqn in jaxpr.eqns if eqn.primitive in _CONVS for var in (*eqn.invars[:2], *eqn.outvars)}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if described := _describe(eqn, where, of_convs):
            op, inputs, runs_on = described
            types = " x ".join(map(_typed, inputs)), _typed(eqn.outvars[0].aval)
            exchanged = _exchanged(eqn, shardings)
            yield OpRow(op, *types, count, runs_on, " > ".join(inside), name in _FLOAT_PRODUCTS, exchanged)
            continue
        turns = eqn.params["length"] if name == "scan" else 1
        around = (*inside, name) if name in ("scan", "while", "cond", "shard_map") else inside
        for inner in inner_jaxprs(eqn):
            yield from _walk(inner, count * turns, around, where, shardings.inside(eqn, inner))


def _typed(aval):
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _of_op(eqn):
    """The types of the operands and results of a quantized op, and its parameters."""
    operands, results = ([var.aval for var in some] for some in (eqn.invars, eqn.outvars))
    return operands, results, {name: value for name, value in eqn.params.items() if name != "out_sharding"}


def _exchanged(eqn, shardings):
    op = dispatch.OPS.get(eqn.primitive)
    if op is None:
        known = [shardings.of(var) for var in eqn.invars]
        sharded = any(each is None or any(each.spec) for each in known)
        return "the compiler decides" if sharded and eqn.params.get("name") == DEQUANTIZED_CONV else ""
    operands, results, params = _of_op(eqn)
    return dispatch.exchanged(op, operands, results, [shardings.of(var) for var in eqn.invars], **params)


def _describe(eqn, where, of_convs):
    """What to call an equation, its inputs and what runs it; None if it is neither quantized nor a product.

    `of_convs` has what quantized convolutions of the same jaxpr read and write, by identity.
    """
    if op := dispatch.OPS.get(eqn.primitive):
        operands, results, params = _of_op(eqn)
        label, shown = op.describe(operands, results, **params)
        return label, shown, dispatch.what_runs(op, *where, operands, results, **params)
    avals = [var.aval for var in eqn.invars]
    if eqn.primitive.name == "transpose" and avals[0].dtype in (*QTYPES, INT4):
        return "transpose", avals, "XLA, at each call: store the axes that the product contracts last"
    if eqn.primitive.name == "transpose" and of_convs & {id(var) for var in (*eqn.invars, *eqn.outvars)}:
        return "transpose", avals, "XLA, at each call: kernels have the channels of images last"
    if why := dequantized_reason(str(eqn.params.get("name", ""))):
        return "dequantized dot", avals, f"reference: {why}"
    if str(eqn.params.get("name", "")) == DEQUANTIZED_CONV:
        return "dequantized conv", avals[:2], f"XLA: weights dequantized once, then a convolution of {avals[0].dtype}"
    if str(eqn.params.get("name", "")) == "jax_qmm_expanded":
        return "expand", avals[:1], "XLA, at each call: no kernel that reads int4 serves it beside these 8 bits"
    if eqn.primitive.name in _FLOAT_PRODUCTS and jnp.issubdtype(avals[0].dtype, jnp.floating):
        return eqn.primitive.name, avals[:2], "XLA"
    return None
