"""Weights of 4 and 8 bits times activations as they are."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jax_qmm.dtypes import INT4, INT8, array_bytes
from jax_qmm.explicit_axes import gathered_unless_divided
from jax_qmm.ops.quantize import quantize
from jax_qmm.qarray import QArray
from jax_qmm.schemes.granularity import checked_tile_size, contracted_last, granularity_of


@dataclasses.dataclass(frozen=True, repr=False)
class WeightInBlocks:
    """What W4A16, W8A16 and W4A8 share: how weights are quantized."""

    tile_size: int | None = 128
    symmetric: bool = True
    clip_search: bool = False

    dtype: ClassVar[Any]
    activation_scale: ClassVar[None] = None
    activation_zero_point: ClassVar[None] = None
    takes_calibration: ClassVar[bool] = False
    convolves: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "tile_size", checked_tile_size(self.tile_size))
        for name in ("symmetric", "clip_search"):
            if not isinstance(flag := getattr(self, name), (bool, np.bool_)):
                raise TypeError(f"{name} is {flag!r}, needs True or False")
            object.__setattr__(self, name, bool(flag))

    def __str__(self):
        blocks = "per channel" if self.tile_size is None else f"blocks of {self.tile_size}"
        clipped = ", clipped" if self.clip_search else ""
        return f"{self.dtype} weights, {blocks}{'' if self.symmetric else ', asymmetric'}{clipped}"

    def __repr__(self):
        return f"{type(self).__name__}({self})"

    def quantize_weight(self, kernel: jax.Array, contracted: Sequence[int]) -> QArray:
        """Quantizes a weight in blocks of its contracted axis, and packs it in the order that the kernels read.

        A block that is as long as all that is contracted, or longer, is a scale per channel. Where several axes are
        contracted (the heads and features of an attention's output), they are merged in memory: blocks and packed
        columns are those of one axis. A product has to contract all of them.

        Args:
          kernel: float array of any shape.
          contracted: the axes that a product contracts with its input. Those of stacked layers are channels, so axes
            are best counted from the end.

        Returns:
          A `QArray` with the shape of `kernel`.

        >>> import jax.numpy as jnp
        >>> W4A16().quantize_weight(jnp.ones((512, 8)), (-2,))
        QArray(int4[512,8], scale=float32[4,8], stored=[8,512], packed)
        >>> W8A16(tile_size=64, symmetric=False).quantize_weight(jnp.ones((4, 32, 8)), (-3, -2))
        QArray(int8[4,32,8], scale=float32[1,2,8], zero_point=int8[1,2,8], stored=[8,4,32], merged=2, packed)
        """
        stored, back = contracted_last(kernel, contracted)
        n = stored.ndim - len(contracted)
        for axis in range(n + 1, stored.ndim):
            stored = gathered_unless_divided(stored, axis, 1)  # merged axes are sharded by the first of them alone
        rows = stored.reshape(*stored.shape[:n], math.prod(stored.shape[n:]))
        q = self._in_blocks(rows, rows.shape[-1:], clip_search=self.clip_search)
        return q.pack().reshape(stored.shape).transpose(back)

    def _in_blocks(self, x, contracted, **options) -> QArray:
        """`x` in blocks of its last axes, which have the sizes `contracted`."""
        granularity = granularity_of(self.tile_size, contracted)
        return quantize(x, self.dtype, symmetric=self.symmetric, **granularity, **options)

    def quantize_activation(self, x: jax.Array, n: int, sums: bool = False) -> Any:
        """`x` as it is."""
        return x

    def why_not(self, kernel: Any, contracted: Sequence[int]) -> str | None:
        """Why a kernel is better left in float: it has too few columns to get smaller; None where it does.

        >>> import jax.numpy as jnp
        >>> W4A16().why_not(jnp.ones((8, 64)), (-2,))
        'too small to gain: its kernel of 2048 bytes would take 4352'
        """
        as_given = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        after = jax.eval_shape(lambda kernel: self.quantize_weight(kernel, contracted), as_given).nbytes
        before = array_bytes(as_given)
        return None if after < before else f"too small to gain: its kernel of {before} bytes would take {after}"

    def with_static(self, scale: Any, zero_point: Any = None) -> Any:
        """The scheme itself: there are no static scales."""
        return self


class W4A16(WeightInBlocks):
    """4-bit weights times activations as they are: bfloat16, float16 or float32.

    The values of an output channel get a scale, and a zero point where they are not symmetric, for each block of
    `tile_size`. Weights are packed, two values a byte. For products that are bound by reading weights, as those of few
    tokens.

    Args:
      tile_size: the length of a block along the contracted axis; None for one scale per channel.
      symmetric: False gives blocks a zero point, which helps weights of 4 bits.
      clip_search: True takes the scale of the least squared error for each block, as `quantize` does. It helps weights
        of 4 bits, most of all symmetric ones and long blocks.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W4A16(64, symmetric=False)
    W4A16(int4 weights, blocks of 64, asymmetric)
    """

    dtype = INT4


class W8A16(WeightInBlocks):
    """8-bit weights times activations as they are; otherwise as `W4A16`.

    Args:
      tile_size, symmetric, clip_search: as in `W4A16`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W8A16(tile_size=None)
    W8A16(int8 weights, per channel)
    """

    dtype = INT8
