"""What is static of a product of labelled operands, and the small steps that its ways of computing share."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_qmm.schemes import W8A8


@dataclasses.dataclass(frozen=True)
class Product:
    """The labels of the axes of a product, and how to compute it.

    A label of both operands is a batch label or, if not in `out`, contracted.

    Attributes:
      lhs, rhs, out: the labels of the operands and the result.
      out_dtype, precision, out_sharding: as in `jax.lax.dot_general`.
      scheme: how to quantize a float operand, without its static scale; None if there is none or it stays float.
      dequantize: why dequantized operands are multiplied, a key of `dequantized_dot.REASONS`; None if they are not.
    """

    lhs: tuple
    rhs: tuple
    out: tuple
    out_dtype: Any
    precision: Any
    out_sharding: Any
    scheme: W8A8 | None
    dequantize: str | None = None

    @property
    def batch(self):
        return tuple(label for label in self.out if label in self.lhs and label in self.rhs)

    @property
    def contracted(self):
        return tuple(label for label in self.lhs if label in self.rhs and label not in self.out)

    def sizes(self, lhs, rhs):
        """The size of each label, given the operands: of two the one that is not 1."""
        sizes = {}
        for label, size in itertools.chain(zip(self.lhs, lhs.shape), zip(self.rhs, rhs.shape)):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
        return sizes

    def sharding(self, labels):
        """`out_sharding` for the axes of the result in the order of `labels`; None is an axis of size 1."""
        if self.out_sharding is None:
            return None
        spec = dict(zip(self.out, self.out_sharding.spec))
        return self.out_sharding.update(spec=PartitionSpec(*(spec.get(label) for label in labels)))


def transposed(x, axes):
    """`x` with its axes in the order `axes`; no operation where they are in it."""
    return x if list(axes) == list(range(x.ndim)) else jnp.transpose(x, axes)


def plus(out, bias, dtype):
    """`out + bias` in float32, rounded to `dtype`."""
    return (out.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)
