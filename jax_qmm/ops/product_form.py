"""The order of a product's labels in which the kernels compute it: (*batch, *rows, K) x (*batch, N, K)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_qmm.ops.product import plus, transposed


class Form(NamedTuple):
    """The labels of a product in the kernel's order; a is rhs if `flipped`, K all of `contracted`, N of `columns`."""

    flipped: bool
    batch: tuple
    rows: tuple
    columns: tuple
    contracted: tuple
    sizes: dict

    def shape(self, labels):
        return tuple(self.sizes[label] for label in labels)

    def out_sharding(self, product):
        """The sharding of the kernel's result: several columns make one axis, sharded as the first of them."""
        return product.sharding([*self.batch, *self.rows, *(self.columns[:1] or [None])])


def form_of(product, lhs, rhs, flipped, batch, stored_side):
    """The `Form` with these batch labels and K as `stored_side`, the operand and its labels, has it in memory."""
    a, b = (product.rhs, product.lhs) if flipped else (product.lhs, product.rhs)
    x, own = stored_side
    stored = dict(zip(own, x.storage_axes()))
    contracted = sorted(product.contracted, key=stored.__getitem__)  # as they lie in memory: no weight is transposed
    rows, columns = (tuple(label for label in product.out if label in own and label not in batch) for own in (a, b))
    return Form(flipped, batch, rows, columns, tuple(contracted), product.sizes(lhs, rhs))


def split_bias(product, form, bias):
    """The bias as a vector for the kernel and None, or None and what is to be added later: it varies along rows."""
    if bias is None:
        return None, None
    bias = transposed(bias, [product.out.index(label) for label in (*form.batch, *form.rows, *form.columns)])
    num_batch, rows = len(form.batch), range(len(form.batch), len(form.batch) + len(form.rows))
    if any(bias.shape[axis] != 1 for axis in rows):
        return None, bias
    bias = jnp.squeeze(bias, tuple(rows))
    if any(size != 1 for size in bias.shape[num_batch:]):
        bias = jnp.broadcast_to(bias, (*bias.shape[:num_batch], *form.shape(form.columns)))
    return bias.reshape(*bias.shape[:num_batch], math.prod(bias.shape[num_batch:])), None


def result(product, form, out, late_bias):
    """The kernel's result in the order of the product's, with the bias that the kernel did not take."""
    out = out.reshape(*out.shape[:-1], *form.shape(form.columns)) if len(form.columns) != 1 else out
    if late_bias is not None:
        out = plus(out, late_bias, product.out_dtype)
    out = transposed(out, [(*form.batch, *form.rows, *form.columns).index(label) for label in product.out])
    late = dict(zip(product.out, product.out_sharding.spec)) if product.out_sharding is not None else {}
    if any(late.get(label) is not None for label in form.columns[1:]):
        out = jax.sharding.reshard(out, product.out_sharding)
    return out
