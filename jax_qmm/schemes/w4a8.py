"""4-bit weights times 8-bit activations."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import INT4, INT8, check_qtype
from jax_qmm.qarray import QArray
from jax_qmm.schemes.float_activations import WeightInBlocks
from jax_qmm.schemes.granularity import contracted_last, sums_like_scale
from jax_qmm.schemes.w8a8 import W8A8


@dataclasses.dataclass(frozen=True, repr=False)
class W4A8(WeightInBlocks):
    """4-bit weights times 8-bit activations, on the tensor cores' int8 or float8.

    Activations get one scale per token, symmetric.

    Beside int8 weights have two levels of scales: one for each output channel, and for each block of `tile_size` a
    small integer by which its values are multiplied. These products are int8, exactly, so that a product is that of
    `W8A8` with one scale per channel. Kernels make int8 of weights on the way to the tensor cores, where blocks and all
    that is contracted are multiples of 32; else each call makes int8 of all weights first, which `explain` shows.

    Beside float8_e4m3fn, which has the values of int4 less their zero points exactly, blocks keep float scales, and
    weights are packed, as those of `W4A16`, for the kernels of `block_scaled_mm`, which read 4 bits. On Hopper these
    multiply many rows of activations in float8, where blocks are multiples of 32 and all that is contracted is one of
    16. Else activations become float16 at each call, exactly, or where blocks are no multiple of 16, weights float8.
    `explain` shows which.

    Args:
      tile_size, symmetric, clip_search: as in `W4A16`.
      activation_dtype: `jnp.int8` or `jnp.float8_e4m3fn`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W4A8(64, symmetric=False)
    W4A8(int4 weights, blocks of 64, asymmetric, int8 activations)
    >>> W4A8(activation_dtype="fp8")
    W4A8(int4 weights, blocks of 128, float8_e4m3fn activations)
    """

    activation_dtype: Any = jnp.int8

    dtype = INT4
    convolves = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "activation_dtype", check_qtype("activation_dtype", self.activation_dtype))

    def __str__(self):
        return f"{super().__str__()}, {self.activation_dtype} activations"

    def quantize_weight(self, kernel: jax.Array, contracted: Sequence[int]) -> QArray:
        """Quantizes a weight in blocks, as `W8A8` does; beside int8 with scales that are multiples of a channel's step.

        With r the largest distance of an int4 value from its block's zero point, `step` is the largest of
        `scale * r / 127` in the channel, and a block's multiple is the integer below or above `scale / step` that
        gives the smaller squared error, of those for which r times it does not exceed 127.

        Args:
          kernel, contracted: as in `W4A16`.

        Returns:
          A `QArray` with the shape of `kernel`; beside int8 it is not packed and has a `scale_step`.

        >>> q = W4A8().quantize_weight(jnp.ones((512, 8)), (-2,))
        >>> q
        QArray(int4[512,8], scale=int8[4,8], scale_step=float32[1,8], stored=[8,512])
        >>> int(q.scale[0, 0])
        15
        """
        if self.activation_dtype != INT8:
            return super().quantize_weight(kernel, contracted)
        stored, back = contracted_last(kernel, contracted)
        sizes = stored.shape[-len(contracted) :]
        q = self._in_blocks(stored, sizes, clip_search=self.clip_search)
        low, high = jnp.iinfo(INT4).min, jnp.iinfo(INT4).max
        zero_point = jnp.zeros(q.scale.shape, jnp.int32) if q.zero_point is None else q.zero_point
        reach = jnp.maximum(high - zero_point, zero_point - low)
        largest = jnp.max(q.scale * reach, axis=tuple(range(-len(sizes), 0)), keepdims=True, initial=0.0)
        step = jnp.where(largest < 127 * jnp.finfo(jnp.float32).tiny, 1.0, largest / 127)  # channels of zeros
        below = jnp.clip(jnp.floor(q.scale / step), 1, 127 // reach)
        multiples = below, jnp.minimum(below + 1, 127 // reach)
        made = [self._in_blocks(stored, sizes, scale=each * step, zero_point=q.zero_point) for each in multiples]
        errors = [sums_like_scale(jnp.square(each.dequantize() - stored), each) for each in made]
        multiple = jnp.where(errors[1] < errors[0], multiples[1], multiples[0])
        q = self._in_blocks(stored, sizes, scale=multiple * step, zero_point=q.zero_point)
        zero_point = None if q.zero_point is None else q.zero_point.astype(INT8)
        return q._replace(scale=multiple.astype(INT8), zero_point=zero_point, scale_step=step).transpose(back)

    def quantize_activation(self, x: jax.Array, n: int, sums: bool = False) -> QArray:
        """As `of_activations` does."""
        return self.of_activations.quantize_activation(x, n, sums)

    def block(self, contracted: Sequence[int]) -> int:
        """How much of axes of these sizes, which a product contracts, shares a float scale.

        >>> W4A8().block((512,)), W4A8(activation_dtype="fp8").block((512,))
        (512, 128)
        """
        k = math.prod(contracted)
        return k if self.activation_dtype == INT8 or self.tile_size is None else min(self.tile_size, k)

    @property
    def of_activations(self) -> W8A8:
        """How activations are quantized: with one scale per token."""
        return W8A8(self.activation_dtype)
