"""4-bit weights times 8-bit activations."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_qmm.dtypes import INT4
from jax_qmm.qarray import QArray
from jax_qmm.schemes.float_activations import WeightInBlocks
from jax_qmm.schemes.granularity import contracted_last, sums_like_scale
from jax_qmm.schemes.w8a8 import W8A8


class W4A8(WeightInBlocks):
    """4-bit weights times int8 activations, on the tensor cores' int8.

    Weights have two levels of scales: one for each output channel, and for each block of `tile_size` a small integer by
    which its values are multiplied. These products are int8, exactly, so that a product is that of `W8A8` with one
    scale per channel. Activations get one scale per token, symmetric. For up to 64 rows of activations a kernel makes
    int8 of weights on the way to the tensor cores, where blocks and all that is contracted are multiples of 32; else
    each call makes int8 of all weights first, which `explain` shows.

    Args:
      tile_size, symmetric, clip_search: as in `W4A16`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W4A8(64, symmetric=False)
    W4A8(int4 weights, blocks of 64, asymmetric, int8 activations)
    """

    dtype = INT4
    convolves = False

    def __str__(self):
        return f"{super().__str__()}, int8 activations"

    def quantize_weight(self, kernel: jax.Array, contracted: Sequence[int]) -> QArray:
        """Quantizes a weight in blocks, as `W8A8` does, with scales that are multiples of one step per channel.

        With r the largest distance of an int4 value from its block's zero point, `step` is the largest of
        `scale * r / 127` in the channel, and a block's multiple is the integer below or above `scale / step` that
        gives the smaller squared error, of those for which r times it does not exceed 127.

        Args:
          kernel, contracted: as in `W4A16`.

        Returns:
          A `QArray` with the shape of `kernel` and a `scale_step`. It is not packed.

        >>> q = W4A8().quantize_weight(jnp.ones((512, 8)), (-2,))
        >>> q
        QArray(int4[512,8], scale=float32[4,8], scale_step=float32[1,8], stored=[8,512])
        >>> round(float(q.scale[0, 0] / q.scale_step[0, 0]), 4)
        15.0
        """
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
        return q._replace(scale_step=step).transpose(back)

    def quantize_activation(self, x: jax.Array, n: int, sums: bool = False) -> QArray:
        """As `W8A8().quantize_activation`."""
        return W8A8().quantize_activation(x, n, sums)
