"""Convolutions of int8 with scales, zero points and bias applied to the sums."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from jax_qmm import _compat
from jax_qmm.dtypes import INT32
from jax_qmm.ops import dispatch, matmul_form
from jax_qmm.ops.pointwise_conv import as_product
from jax_qmm.ops.sharding import partitioned
from jax_qmm.reference import activation as activations, conv as reference


def bind(lhs, rhs, vectors, *, num_batch, window, activation, out_dtype):
    """The convolution of operands in the primitive's order, by whichever primitive computes it."""
    lhs, rhs, *values = _compat.align_varying([lhs, rhs, *vectors.values()])
    vectors = dict(zip(vectors, values))
    zero_points = any(name.startswith("zero_point") for name in vectors)
    if window.is_product(rhs.shape[num_batch + 1 : -1]) and not (out_dtype == INT32 and zero_points):
        return as_product(lhs, rhs, vectors, num_batch=num_batch, activation=activation, out_dtype=out_dtype)
    return conv_p.bind(
        *(lhs, rhs, *values),
        names=tuple(vectors),
        num_batch=num_batch,
        window=window,
        activation=activation,
        out_dtype=out_dtype,
    )


# The primitive: operands lhs (*B, I, *S, C), rhs (*B, O, *K, C / groups) and the vectors that `names` lists, as
# `reference.conv` has them

conv_p = Primitive("conv")


def _labels(names):
    return [reference.LABELS[name] for name in ("lhs", "rhs", *names)]


# Abstract evaluation


def _out_shape(operands, num_batch, window):
    lhs, rhs = (x.shape[num_batch:] for x in operands[:2])
    return (*matmul_form.batch_shape(operands, num_batch), lhs[0], *window.out_shape(lhs[1:-1], rhs[1:-1]), rhs[0])


def _abstract_eval(*operands, num_batch, window, out_dtype, **params):
    lhs, rhs = operands[:2]
    shape = _out_shape(operands, num_batch, window)
    if not _compat.explicit_mesh(lhs):
        return lhs.update(shape=shape, dtype=out_dtype, weak_type=False)
    images, out = lhs.sharding.spec[: num_batch + 1], rhs.sharding.spec[num_batch]
    if window.groups > 1 or out in images:
        out = None
    spec = PartitionSpec(*images, *(None,) * len(window.strides), out)
    return lhs.update(shape=shape, dtype=out_dtype, weak_type=False, sharding=lhs.sharding.update(spec=spec))


# Lowerings: to the reference, for the operands that one device holds; there is no kernel yet


def _reference(lhs, rhs, *vectors, names, **params):
    return reference.conv(lhs, rhs, **params, **dict(zip(names, vectors)))


def _unserved(platform, devices, operands, **params):
    return "there are no kernels for convolutions yet, but for windows of one value"


def _describe(operands, results, *, names, num_batch, window, activation, **params):
    taps = operands[1].shape[num_batch + 1 : -1]
    terms = [name for name in names if name != "sums_rhs"]
    terms += [] if activation == activations.NONE else [str(activation)]
    lhs = operands[0]
    if _compat.explicit_mesh(lhs) and any(lhs.sharding.spec[num_batch + 1 : -1]):
        terms.append("spatial axes gathered")
    return f"conv ({window.words(taps)}; {', '.join(terms) or 'sums'})", operands[:2]


# Batching


def _batch(operands, dims, *, names, num_batch, **params):
    of_images = ["i" in label for label in _labels(names)]
    if dims[0] is not None and all(of for of, dim in zip(of_images, dims) if dim is not None):
        return _batch_images(operands, dims, of_images, names, num_batch, **params)
    operands = [jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims)]
    return conv_p.bind(*operands, names=names, num_batch=num_batch + 1, **params), 0


def _batch_images(operands, dims, of_images, names, num_batch, **params):
    """Where only images are mapped they become one longer axis."""
    at, count = num_batch, operands[0].shape[dims[0]]
    images = operands[0].shape[num_batch + (dims[0] <= num_batch)]

    def longer(x, dim, of):
        if not of or (dim is None and x.shape[at] == 1):
            return x
        x = jnp.expand_dims(x, at) if dim is None else jnp.moveaxis(x, dim, at)
        x = jnp.broadcast_to(x, (*x.shape[:at], count, images, *x.shape[at + 2 :]))
        return x.reshape(*x.shape[:at], count * images, *x.shape[at + 2 :])

    out = conv_p.bind(*map(longer, operands, dims, of_images), names=names, num_batch=num_batch, **params)
    return out.reshape(*out.shape[:at], count, images, *out.shape[at + 1 :]), at


# Sharding


def _partitioned(run, shapes, *, names, num_batch, window, **output):
    whole = window.groups == 1  # a device has all channels of several groups
    spatial = [None] * len(window.strides)
    of = {"i": ["i"], "s": spatial, "k": spatial, "c": ["c" if whole else None], "o": ["o" if whole else None]}
    batch = [f"b{i}" for i in range(num_batch)]
    spell = lambda label: [*batch, *(factor for letter in label for factor in of[letter])]
    local = functools.partial(run, OP, num_batch=num_batch, window=window)

    def across(axes):
        def sum_over_channels(lhs, rhs, *vectors):
            vectors = dict(zip(names, vectors))
            vectors.pop("sums_rhs", None)  # of all channels
            zero_points = {name: vectors.pop(name) for name in list(vectors) if name.startswith("zero_point")}
            acc = local(
                *(lhs, rhs, *zero_points.values()),
                names=tuple(zero_points),
                activation=activations.NONE,
                out_dtype=INT32,
            )
            return reference.epilogue(jax.lax.psum(acc, axes), num_batch=num_batch, **output, **vectors)

        return sum_over_channels

    entire = functools.partial(local, names=names, **output)
    operands = [spell(label) for label in _labels(names)]
    sides = ("lhs", "rhs", *names)
    return partitioned(entire, operands, [spell("iso")], shapes, names=sides, over=("c",), across=across)


# Registration

OP = dispatch.Op(
    name="conv_general_dilated",
    targets=(),
    kernel=_reference,
    reference=_reference,
    unserved=_unserved,
    describe=_describe,
    choice=lambda operands, results, **params: "",
    partitioned=_partitioned,
)
dispatch.register(conv_p, OP)
conv_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[conv_p] = _batch
