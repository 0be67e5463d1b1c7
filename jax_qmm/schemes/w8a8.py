"""8-bit weights times 8-bit activations."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qmm.dtypes import check_qtype
from jax_qmm.ops.quantize import quantize
from jax_qmm.qarray import QArray
from jax_qmm.schemes.granularity import (
    checked_tile_size,
    contracted_last,
    granularity_of,
    is_positive_int,
    share_scales,
)


@dataclasses.dataclass(frozen=True)
class W8A8:
    """8-bit weights times 8-bit activations, both of the same type.

    Weights get one scale per output channel, and a zero point where they are not symmetric. Activations are quantized
    inside the product: with scales computed from the data, or static ones where `activation_scale` is given. With
    `tile_size` both sides have scales, and zero points, for blocks of what is contracted.

    Args:
      dtype: `jnp.int8` or `jnp.float8_e4m3fn`.
      activation: "per_token" (one scale per row) or "per_tensor".
      symmetric: False gives activations a zero point too; int8 only.
      weight_symmetric: False gives weights a zero point per output channel; int8 only. It helps weights that are far
        from centered, and costs the sum of each row of the activations, which the quantizer takes along.
      activation_scale: static scale, a float or a float array of shape (), for instance from a calibration.
        Also inside a transformation: the scheme may hold a tracer.
      activation_zero_point: static zero point, an int or an integer array of shape (); needed with a static
        scale when `symmetric` is False.
      tile_size: the length of a block, of which a token and an output channel have a scale each; None for one scale for
        all that is contracted. Kernels serve 32, 64, 128 and 256. Activations get the blocks of the weight where that
        has several.
      weight_tile: how many output channels and how much of what they contract share a scale of the weight; fp8 only.
        The second is `tile_size`; None for one channel.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W8A8()
    W8A8(int8, per_token)
    >>> W8A8(tile_size=128, symmetric=False)
    W8A8(int8, blocks of 128, asymmetric)
    >>> W8A8(jnp.float8_e4m3fn, tile_size=128, weight_tile=(128, 128))  # as DeepSeek-V3
    W8A8(float8_e4m3fn, blocks of 128, weights in tiles of 128 x 128)
    >>> W8A8("int8", symmetric=False, activation_scale=0.1, activation_zero_point=-3)
    W8A8(int8, per_tensor static, asymmetric)
    >>> W8A8(weight_symmetric=False)
    W8A8(int8, per_token, weights asymmetric)
    """

    dtype: Any = jnp.int8
    activation: str = "per_token"
    symmetric: bool = True
    weight_symmetric: bool = True
    activation_scale: Any = None
    activation_zero_point: Any = None
    tile_size: int | None = None
    weight_tile: tuple[int, int] | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", check_qtype("dtype", self.dtype))
        object.__setattr__(self, "tile_size", checked_tile_size(self.tile_size))
        object.__setattr__(self, "weight_tile", self._checked_weight_tile())
        if self.activation not in ("per_token", "per_tensor"):
            raise ValueError(f"activation is {self.activation!r}, needs 'per_token' or 'per_tensor'")
        for name, flag in (("symmetric", self.symmetric), ("weight_symmetric", self.weight_symmetric)):
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"{name} is {flag!r}, needs True or False")
            if not flag and self.dtype != jnp.int8:
                raise ValueError(f"{name}=False was given with dtype {self.dtype}, needs int8")
        _check_scalar("activation_scale", self.activation_scale, jnp.floating)
        _check_scalar("activation_zero_point", self.activation_zero_point, jnp.integer)
        if self.activation_scale is None and self.activation_zero_point is not None:
            raise ValueError("activation_zero_point was given without activation_scale")
        if self.activation_scale is not None and self.symmetric != (self.activation_zero_point is None):
            raise ValueError(
                f"activation_zero_point is {self.activation_zero_point}, needs "
                + ("None with symmetric=True" if self.symmetric else "a value with symmetric=False")
            )
        if self.tile_size is not None and (self.activation != "per_token" or self.activation_scale is not None):
            what = "activation='per_tensor'" if self.activation_scale is None else "activation_scale"
            raise ValueError(f"{what} was given with tile_size={self.tile_size}, where each block gets its own scale")

    def _checked_weight_tile(self):
        tile = self.weight_tile
        if tile is None:
            return None
        if self.dtype == jnp.int8:
            raise ValueError(f"weight_tile={tile} was given with dtype int8, needs float8_e4m3fn")
        sizes = tuple(tile) if isinstance(tile, Sequence) else ()
        if len(sizes) != 2 or not all(map(is_positive_int, sizes)) or sizes[1] != self.tile_size:
            raise ValueError(f"weight_tile is {tile!r}, needs a positive int and tile_size, which is {self.tile_size}")
        return int(sizes[0]), int(sizes[1])

    def __str__(self):
        activation = self.activation if self.activation_scale is None else "per_tensor static"
        activation = activation if self.tile_size is None else f"blocks of {self.tile_size}"
        weights = "" if self.weight_symmetric else ", weights asymmetric"
        weights += "" if self.weight_tile is None else ", weights in tiles of {} x {}".format(*self.weight_tile)
        return f"{self.dtype}, {activation}{'' if self.symmetric else ', asymmetric'}{weights}"

    def __repr__(self):
        return f"W8A8({self})"

    def quantize_weight(self, kernel: jax.Array, contracted: Sequence[int]) -> QArray:
        """Quantizes a weight per channel, or in blocks, and stores its contracted axes last, as the kernels read them.

        Where several axes are contracted (the heads and features of an attention's output), blocks lie within the last
        of these: they have the largest common divisor of its size and `tile_size`. Tiles of several channels lie within
        the last axis of channels; where they don't divide it, each channel holds the scale of its tile.

        Args:
          kernel: float array of any shape.
          contracted: the axes that a product contracts with its input; they share a scale. Those of stacked
            layers are channels, so axes are best counted from the end.

        Returns:
          A `QArray` with the shape of `kernel`; for asymmetric activations it holds the weight's sums too.

        >>> W8A8().quantize_weight(jnp.ones((3, 4, 5)), (-3,))
        QArray(int8[3,4,5], scale=float32[1,4,5], stored=[4,5,3])
        >>> W8A8(tile_size=128).quantize_weight(jnp.ones((512, 8)), (-2,))
        QArray(int8[512,8], scale=float32[4,8], stored=[8,512])
        >>> W8A8("float8_e4m3fn", tile_size=128, weight_tile=(128, 128)).quantize_weight(jnp.ones((512, 256)), (-2,))
        QArray(float8_e4m3fn[512,256], scale=float32[4,2], stored=[256,512])
        """
        stored, back = contracted_last(kernel, contracted)
        options = {
            "symmetric": self.weight_symmetric,
            "sums": not self.symmetric,
            **granularity_of(self.tile_size, stored.shape[-len(contracted) :]),
        }
        q, channels = quantize(stored, self.dtype, **options), stored.ndim - len(contracted) - 1
        if self.weight_tile is not None and self.weight_tile[0] > 1 and channels >= 0:
            q = share_scales(stored, q, options, channels, self.weight_tile[0])
        return q.transpose(back)

    def quantize_activation(self, x: jax.Array, n: int, sums: bool = False, tile_size: int | None = None) -> QArray:
        """Quantizes the input of a product that contracts its last `n` axes.

        Args:
          x: float array of rank `n` or more.
          n: number of contracted axes.
          sums: True adds the sums over these axes, for a weight with zero points. They come from the pass that
            quantizes, but where one dynamic scale is of the whole tensor: then from a second read of the int8 values.
            With `tile_size` they are of each block.
          tile_size: that of the weight, in place of the scheme's if the scheme has one.

        Returns:
          A `QArray` of the shape of `x`, with the static scale if the scheme has one.

        >>> W8A8().quantize_activation(jnp.ones((5, 3, 4)), 2)
        QArray(int8[5,3,4], scale=float32[5,1,1])
        >>> W8A8(activation_scale=0.5).quantize_activation(jnp.ones((5, 3, 4)), 2)
        QArray(int8[5,3,4], scale=float32[1,1,1])
        >>> W8A8(tile_size=128).quantize_activation(jnp.ones((5, 512)), 1)
        QArray(int8[5,512], scale=float32[5,4])
        """
        if self.tile_size is not None:
            granularity = granularity_of(tile_size or self.tile_size, x.shape[-n:])
            return quantize(x, self.dtype, symmetric=self.symmetric, sums=sums, **granularity)
        contracted, static = tuple(range(x.ndim - n, x.ndim)), self.activation_scale is not None
        per_row = sums if static else self.activation == "per_token"  # a static scale for each row, with its sum
        q = quantize(
            x,
            self.dtype,
            axis=contracted if per_row else None,
            symmetric=self.symmetric,
            scale=self.activation_scale,
            zero_point=self.activation_zero_point,
            sums=sums and per_row,
        )
        return q if per_row or not sums else q.with_azp_adj(contracted)

    def why_not(self, kernel: Any, contracted: Sequence[int]) -> str | None:
        """Why a kernel is better left in float; None here."""
        return None

    def block(self, contracted: Sequence[int]) -> int:
        """How much of axes of these sizes, which a product contracts, shares a scale.

        >>> W8A8(tile_size=128).block((512,)), W8A8(tile_size=128).block((8, 64)), W8A8().block((8, 64))
        (128, 64, 512)
        """
        return granularity_of(self.tile_size, contracted).get("tile_size", math.prod(contracted))

    @property
    def convolves(self) -> bool:
        """Whether convolutions take it: they have one scale for all that is contracted."""
        return self.tile_size is None

    @property
    def takes_calibration(self) -> bool:
        """Whether a calibration is to find the scale of the activations."""
        return self.activation == "per_tensor" and self.activation_scale is None

    def static_range(self, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The static scale and zero point for activations that were seen between `low` and `high`.

        Args:
          low, high: float32 arrays of one shape, () for one layer.

        Returns:
          Scale float32 and zero point int32 (None where symmetric) of that shape.

        >>> scale, zero_point = W8A8(symmetric=False).static_range(jnp.float32(-1.0), jnp.float32(1.55))
        >>> round(float(scale), 6), int(zero_point)
        (0.01, -28)
        """
        q = quantize(jnp.stack([low, high], axis=-1), self.dtype, axis=-1, symmetric=self.symmetric)
        return q.scale[..., 0], None if q.zero_point is None else q.zero_point[..., 0]

    def with_static(self, scale: Any, zero_point: Any = None) -> "W8A8":
        """The scheme with this static activation scale and zero point; without one where `scale` is None."""
        return dataclasses.replace(self, activation_scale=scale, activation_zero_point=zero_point)


def _check_scalar(name, value, kind):
    if value is None:
        return
    try:
        dtype = jnp.result_type(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, needs a number or an array") from None
    if not jnp.issubdtype(dtype, kind):
        raise TypeError(f"{name} has dtype {dtype}, needs {kind.__name__}")
    if np.shape(value) != ():
        raise ValueError(f"{name} has shape {np.shape(value)}, needs ()")
