"""Products of activations, float or quantized, and weights whose scales belong to blocks of columns.

Two quantized sides are in ops/block_quantized_mm.py.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_qmm import _compat, _extension
from jax_qmm.dtypes import FLOAT8, SCALE_DTYPES, WEIGHT_QTYPES
from jax_qmm.ops import checks, dispatch, matmul_form
from jax_qmm.ops.block_quantized_mm import block_quantized_mm
from jax_qmm.ops.checks import Activation
from jax_qmm.ops.sharding import partitioned
from jax_qmm.qarray import QArray
from jax_qmm.reference import activation as activations, block_scaled_mm as reference, packing
from jax_qmm.reference.quantize import spread

# The public function


def block_scaled_mm(
    x: ArrayLike | QArray,
    w: QArray,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    out_dtype: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `activation(x @ w.dequantize().T + bias)` with weights of 4 or 8 bits, read as they are.

    x may be float, or a QArray too: then both sides are int8 or both float8_e4m3fn, with the same blocks of K (or one
    side with one scale for all of it), neither is packed, and tensor cores multiply 8 bits. What follows is of a float
    x; quantized ones are at the end.

    `quantize(weight, jnp.int4, tile_size=128).pack()` makes w: packed, in the order that the kernels read. A w that is
    not packed is packed at each call, which `explain` shows.

    Sums are float32, and so is what follows them, `y = activation(sums + bias)`, rounded once to `out_dtype`. Each
    value less its zero point is exact. Of bfloat16 and float16 x the products may be with weights that are rounded to
    the dtype of x once: the error of bfloat16 is at most that of a product of x with the dequantized weights in its
    dtype. float16 weights are rounded with their rows scaled by powers of two, so that none overflows, and are off by
    2^-11 of themselves or 2^-39 of the largest in their row. The reference does not round them.

    Where x has many rows, and more than 16 of float32, weights are dequantized once, to x's dtype, and XLA multiplies
    (float32 at its highest precision); `explain` says so. With symbolic sizes 16-bit x stays with the kernels.

    Differentiable by x, with one product of the gradient and the dequantized weights, which XLA computes; by bias;
    and by the scales and float zero points of w, as those of a product with its dequantized weights. The integers are
    constants.

    Sharded over M or N there is no communication. Sharded over K, at boundaries of blocks (of a packed w, those that
    are boundaries of 128 columns too), each device sums its part, and one all-reduce of float32 sums comes before the
    bias and the activation. An operand that is sharded over K in any other way is gathered, which `explain` shows. The
    rest is as in `scaled_mm`.

    Of two QArrays the sums of a block are exact: int32, less the zero points of both sides. Block after block they are
    scaled and added in float32, `sums = fma(x_scale, w_scale * block_sums, sums)`, so that the result is the same on
    every device, bit for bit; those of float8 are float32. A QArray of x that is asymmetric needs the sums of each
    block of w, and an asymmetric w those of x: `quantize(..., tile_size=128, sums=True)` gives them, else they are
    computed at each call. Kernels serve blocks of 32, 64, 128 and 256 columns, and shapes of one shorter block.
    Derivatives are by bias, scales and float zero points. Sharding over K is at boundaries of blocks.

    Args:
      x: `(..., M, K)`, bfloat16, float16 or float32, or a `QArray` of int8 or float8_e4m3fn, with int32 zero points or
        none.
      w: `QArray` `(N, K)` of int4 or int8, or float8_e4m3fn beside a QArray, with scales for blocks of K columns or for
        all of K; rows may share them too. The last block may be short. Zero points may be integers or floats.
      bias: `(N,)`, float32 or `out_dtype`, or None.
      activation: as in `scaled_mm`.
      out_dtype: bfloat16, float16 or float32; None for that of x, of a QArray the dtype of its scale.
      out_sharding: the sharding of the result, as in `scaled_mm`.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array, or w no QArray, or has a wrong dtype.
      ValueError: if a shape does not fit, or w is packed along N.

    >>> import jax.numpy as jnp, jax_qmm
    >>> w = jax_qmm.quantize(jnp.float32([[7, -3, 0.5], [14, 2, 1]]), jnp.int4, tile_size=2).pack()
    >>> x = jnp.bfloat16([[1, 1, 2], [0, 1, 0]])
    >>> jax_qmm.block_scaled_mm(x, w, activation="relu").tolist()
    [[5.0, 18.0], [0.0, 2.0]]
    >>> a = jax_qmm.quantize(jnp.float32([[127, 1, -254], [-127, 0, 127]]), tile_size=2)
    >>> b = jax_qmm.quantize(jnp.float32([[127, -2, 127]]), tile_size=2)
    >>> jax_qmm.block_scaled_mm(a, b).tolist()
    [[-16131.0], [0.0]]
    """
    x = x if isinstance(x, QArray) else checks.array("x", x, SCALE_DTYPES)
    if not isinstance(w, QArray):
        raise TypeError(f"w is a {type(w).__name__}; it needs to be a QArray, as quantize returns it")
    if not isinstance(x, QArray) and w.qtype not in WEIGHT_QTYPES:
        raise TypeError(f"w has values of {w.qtype}; beside floats it needs int4 or int8")
    checks.product_shapes(x=x, w=w)
    out_dtype = x.dtype if out_dtype is None else checks.out_dtype(out_dtype)
    if out_dtype not in SCALE_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; it needs to be bfloat16, float16 or float32")
    if bias is not None:
        bias = checks.along_columns("bias", checks.array("bias", bias, checks.bias_dtypes(out_dtype)), w)
    output: Any = {
        "activation": checks.activation(activation),
        "out_dtype": out_dtype,
        "out_sharding": _compat.canonicalize_out_sharding(out_sharding, "block_scaled_mm"),
    }
    if isinstance(x, QArray):
        return block_quantized_mm(x, w, bias, **output)
    values, scale, zero_point, block = _leaves(w)
    vectors = {"scale": scale, "zero_point": zero_point, "bias": bias}
    return weight_product(x, values, vectors, qtype=w.qtype, packed=w.is_packed, block=block, **output)


def _leaves(w):
    """The values of w as `(N, K)`, its scale and zero point as `(N, G)`, and the columns of a block."""
    n, axis = w.shape[0], w.storage_axes()[0]
    if w.merged_axes:
        raise ValueError(f"w is {w}; its rows and columns need to be apart in memory")
    if axis == 1 and w.is_packed:
        raise ValueError(f"w is {w}, which is packed along N; it needs to be packed along K, the last axis in memory")

    def of_rows(leaf):
        if leaf is not None and leaf.shape[axis] != n:  # several rows share a scale
            leaf = spread(leaf, w.tile_along(axis), n, axis)
        return leaf if leaf is None or axis == 0 else leaf.T

    values = w.qvalue if axis == 0 else w.qvalue.T
    return values, of_rows(w.float_scale()), of_rows(w.zero_point), w.tile_along(1 - axis)


def weight_product(x, w, vectors, *, num_batch=0, **params):
    """The product of operands that were checked; a vector that is None is absent."""
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    operands = _compat.align_varying([x, w, *vectors.values()])
    return block_scaled_mm_p.bind(*operands, names=tuple(vectors), num_batch=num_batch, **params)


# The primitive: operands x, w and the vectors that `names` lists, scale first, of the form in `matmul_form`

block_scaled_mm_p = Primitive("block_scaled_mm")


def _labels(names):
    return [reference.LABELS[name] for name in ("x", "w", *names)]


# Abstract evaluation


def _abstract_eval(*operands, num_batch, out_dtype, out_sharding, **params):
    return matmul_form.abstract_result("block_scaled_mm", operands, num_batch, out_dtype, out_sharding)


# Lowerings: to the kernel, and to the reference; each for the operands that one device holds


def _kernel(*operands, names, num_batch, qtype, packed, block, activation, out_dtype, workspace):
    batch, rows, n, _ = matmul_form.sizes(operands, num_batch)
    x, w, *vectors = operands
    if not packed:
        w, vectors = packed_leaves(w, vectors)
    result = jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), n), out_dtype)
    out, *_ = jax.ffi.ffi_call("jax_qmm_block_scaled_mm", dispatch.with_workspace(result, workspace))(
        *matmul_form.fold([x, w, *vectors], _labels(names), num_batch),
        bits=np.int32(jnp.iinfo(qtype).bits),
        block=np.int32(max(block, 1)),  # without columns, blocks have none
        names=" ".join(names[1:]),
        activation=activation.name,
        low=np.float32(activation.low),
        high=np.float32(activation.high),
    )
    return out.reshape(*batch, *rows, n)


def packed_leaves(w, vectors):
    """Plain w and its vectors as kernels take them."""
    # A traced zero point may be one that int8 has not; float32 has all that matter.
    return packing.pack(w), [v.astype(jnp.float32) if v.dtype == jnp.int32 else v for v in vectors]


def _reference(x, w, *vectors, names, **params):
    return reference.block_scaled_mm(x, w, **dict(zip(names, vectors)), **params)


def _dequantized_once(x, w, *vectors, names, packed, **params):
    dequantize = dequantized_by_kernel if packed else None  # what is not packed, XLA reads as fast as memory gives it
    return reference.dequantized_once(x, w, **dict(zip(names, vectors)), packed=packed, dequantize=dequantize, **params)


def dequantized_by_kernel(w, scale, zero_point, *, qtype, packed, block, k, dtype):
    """`reference.dequantized` of a packed w by a kernel."""
    leaves = [w, scale] if zero_point is None else [w, scale, zero_point]
    num_batch = w.ndim - 2
    folded = matmul_form.fold(leaves, [reference.LABELS["w"]] * len(leaves), num_batch)
    batch, n = matmul_form.batch_shape(leaves, num_batch), w.shape[-2]
    out = jax.ffi.ffi_call("jax_qmm_dequantize_weights", jax.ShapeDtypeStruct((math.prod(batch), n, k), dtype))(
        *folded, bits=np.int32(jnp.iinfo(qtype).bits), block=np.int32(max(block, 1))
    )
    return out.reshape(*batch, n, k)


def _unserved(platform, devices, operands, *, num_batch, block, **params):
    *_, k = matmul_form.sizes(operands, num_batch)
    if why := _extension.fallback_reason(platform, devices, OLDEST):
        return why
    return "K is symbolic" if not isinstance(k, int) else unserved_blocks(block, k)


def unserved_blocks(block: int, k: int) -> str | None:
    """Why kernels don't serve weights of k columns in such blocks; None where they do."""
    if k > _LONGEST_K:
        return f"K is {k}; kernels serve up to {_LONGEST_K}"
    if block < k and block % 16:
        return f"blocks have {block} columns; kernels serve multiples of 16"
    return None


_LONGEST_K = 2**19 - 1
OLDEST = 80  # compute capability 8.0, the first with tensor cores for bfloat16


def _describe(operands, results, *, names, num_batch, qtype, packed, block, activation, **params):
    _, _, n, k = matmul_form.sizes(operands, num_batch)
    terms = [*names[1:], *([] if activation == activations.NONE else [str(activation)])]
    scales = "per channel" if operands[2].shape[-1] == 1 else f"blocks of {block}"
    order = "packed" if packed else "plain"
    w = jax.ShapeDtypeStruct((*operands[1].shape[:-1], k), qtype)
    return f"block_scaled_mm ({', '.join([scales, order, *terms])})", [operands[0], w]


def _prepared(devices, operands, **params):
    """With float8 x as float16, which has all of its values, where no kernel multiplies float8 faster."""
    if not _stays(devices, operands, **params):
        x, *others = operands
        operands = [x.astype(jnp.float16), *others]
    return operands, params


def _stays(devices, operands, **params):
    """Whether kernels on these devices are to take x in its dtype."""
    product = _product(operands, **params)
    return operands[0].dtype != FLOAT8 or product is not None and _extension.multiplies_float8(devices, product)


def _by_xla(devices, operands, *, out_dtype, **params):
    x = operands[0]
    if x.dtype == FLOAT8:  # whose products are exact, with weights that are not rounded
        return None
    m = math.prod(x.shape[params["num_batch"] : -1])
    if x.dtype == jnp.float32 and not (isinstance(m, int) and m <= _FLOAT32_ROWS):
        return f"dequantized once, then a product of float32, as kernels serve up to {_FLOAT32_ROWS} rows of it"
    product = _product(operands, out_dtype, **params)
    if product is not None and _extension.dequantizes_once(devices, product):
        return f"dequantized once, then a product of {x.dtype}, which is predicted to be faster than kernels"
    return None


_FLOAT32_ROWS = 16


def _workspace(devices, operands, **params):
    product = _product(operands, **params)
    return _extension.block_scaled_mm_workspace(devices, product) if product else 0


def _choice(operands, results, *, packed, **params):
    at_each_call = [] if packed else ["w packed"]
    _, devices = _extension.default_devices()
    if not _stays(devices, operands, **params):
        operands = [jax.ShapeDtypeStruct(operands[0].shape, jnp.float16), *operands[1:]]
        at_each_call += ["x widened to float16"]
    product = _product(operands, **params)
    if product is None:
        kernel = "kernel, chosen at run time: the shapes are symbolic"
    else:
        kernel = _extension.describe_block_scaled_mm(product)
    return f"{kernel}, {' and '.join(at_each_call)} at each call" if at_each_call else kernel


def _product(operands, out_dtype, *, names, num_batch, qtype, block, activation, **params):
    """What `BlockScaledMmProblem` is made of; None where shapes are symbolic."""
    batch, rows, n, k = matmul_form.sizes(operands, num_batch)
    m, count = math.prod(rows), math.prod(batch)
    if not all(isinstance(size, int) for size in (m, n, count)):
        return None
    dtypes = str(operands[0].dtype), str(out_dtype)
    apart = ends_apart(operands, names, activation, out_dtype, num_batch)
    return m, n, k, count, *dtypes, *weight_kind(names, operands, qtype, block), None, apart


def weight_kind(names, operands, qtype, block):
    """What `BlockScaledMmProblem` needs of the weight: bits, block, and the dtype of zero points or None."""
    zero_point = dict(zip(names, operands[2:])).get("zero_point")
    zero_dtype = None if zero_point is None else "int8" if zero_point.dtype == jnp.int8 else "float32"
    return jnp.iinfo(qtype).bits, block, zero_dtype


def ends_apart(operands, names, activation, out_dtype, num_batch=0):
    """Whether what follows the sums takes XLA a pass of its own."""
    bias = dict(zip(names, operands[2:])).get("bias")
    fuses = num_batch == 0 and activations.fuses(operands[0].dtype, bias, activation, out_dtype)
    return (bias is not None or activation != activations.NONE) and not fuses


# Batching


def _batch(operands, dims, *, names, num_batch, out_sharding, **params):
    operands, num_batch, out_sharding, at = matmul_form.batch_operands(
        operands, dims, _labels(names), num_batch, out_sharding
    )
    return block_scaled_mm_p.bind(*operands, names=names, num_batch=num_batch, out_sharding=out_sharding, **params), at


# Differentiation


def jvp_of(primitive, linear):
    """The rule of a primitive of x and weights: by x, scale, a float zero point and bias, as of `linear`.

    Args:
      linear: called with x, w and the vectors by name, gives the argument of the activation in float32, with the
        weights dequantized.
    """

    def jvp(primals, tangents, *, names, activation, out_dtype, **params):
        product = functools.partial(primitive.bind, *primals, names=names, **params)
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != float0]
        out, y = matmul_form.result_and_argument(product, moving, activation, out_dtype)
        if not moving:
            return out, _compat.zero_tangent(out)

        # Rematerialized: the packed weight waits for the backward pass, not its dequantized copy.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def of_parts(operands, parts):
            operands = [*operands]
            for i, part in zip(moving, parts):
                operands[i] = part
            return linear(*operands[:2], **dict(zip(names, operands[2:])), **params)

        parts = [primals[i] for i in moving]
        _, tangent = jax.jvp(functools.partial(of_parts, primals), (parts,), ([tangents[i] for i in moving],))
        if y is not None:
            tangent = activations.tangent(y, tangent, activation)
        return out, tangent.astype(out_dtype)

    return jvp


# Sharding


def _partitioned(run, shapes, *, names, num_batch, packed, block, activation, out_dtype, **params):
    operands, result = matmul_form.factors(shapes, _labels(names), num_batch)
    local = functools.partial(run, OP, num_batch=num_batch, packed=packed, block=block, **params)

    output = {"activation": activation, "out_dtype": out_dtype}
    whole, across = matmul_form.whole_and_across(local, names, num_batch=num_batch, **output)
    k, blocks = shapes[0][-1], shapes[2][-1]
    unit = math.lcm(1 if blocks == 1 else block, packing.COLUMNS if packed else 1)
    units = {"k": k // unit if k % unit == 0 else 1}
    sides = ("x", "w", *names)
    return partitioned(whole, operands, [result], shapes, names=sides, over=("k",), across=across, units=units)


# Registration

OP = dispatch.Op(
    name="block_scaled_mm",
    targets=("jax_qmm_block_scaled_mm", "jax_qmm_dequantize_weights"),
    kernel=_kernel,
    reference=_reference,
    unserved=_unserved,
    describe=_describe,
    choice=_choice,
    partitioned=_partitioned,
    workspace=_workspace,
    by_xla=_by_xla,
    xla=_dequantized_once,
    prepared=_prepared,
)
dispatch.register(block_scaled_mm_p, OP)
block_scaled_mm_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[block_scaled_mm_p] = _batch
ad.primitive_jvps[block_scaled_mm_p] = jvp_of(block_scaled_mm_p, reference.linear)
