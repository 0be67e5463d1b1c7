"""How to quantize a product (W8A8, W4A8, W4A16, W8A16), and for which layers (Rule)."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_qmm.dtypes import INT4, INT8, array_bytes, check_qtype
from jax_qmm.ops.quantize import quantize
from jax_qmm.qarray import QArray
from jax_qmm.reference.quantize import spread


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
        object.__setattr__(self, "tile_size", _checked_tile_size(self.tile_size))
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
        if len(sizes) != 2 or not all(map(_is_positive_int, sizes)) or sizes[1] != self.tile_size:
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
        stored, back = _contracted_last(kernel, contracted)
        options = {
            "symmetric": self.weight_symmetric,
            "sums": not self.symmetric,
            **_granularity(self.tile_size, stored.shape[-len(contracted) :]),
        }
        q, channels = quantize(stored, self.dtype, **options), stored.ndim - len(contracted) - 1
        if self.weight_tile is not None and self.weight_tile[0] > 1 and channels >= 0:
            q = _share_scales(stored, q, options, channels, self.weight_tile[0])
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
            granularity = _granularity(tile_size or self.tile_size, x.shape[-n:])
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
        return _granularity(self.tile_size, contracted).get("tile_size", math.prod(contracted))

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


@dataclasses.dataclass(frozen=True, repr=False)
class _WeightOnly:
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
        object.__setattr__(self, "tile_size", _checked_tile_size(self.tile_size))
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

        >>> W4A16().quantize_weight(jnp.ones((512, 8)), (-2,))
        QArray(int4[512,8], scale=float32[4,8], stored=[8,512], packed)
        >>> W8A16(tile_size=64, symmetric=False).quantize_weight(jnp.ones((4, 32, 8)), (-3, -2))
        QArray(int8[4,32,8], scale=float32[1,2,8], zero_point=int8[1,2,8], stored=[8,4,32], merged=2, packed)
        """
        stored, back = _contracted_last(kernel, contracted)
        n = stored.ndim - len(contracted)
        rows = stored.reshape(*stored.shape[:n], math.prod(stored.shape[n:]))
        q = self._in_blocks(rows, rows.shape[-1:], clip_search=self.clip_search)
        return q.pack().reshape(stored.shape).transpose(back)

    def _in_blocks(self, x, contracted, **options) -> QArray:
        """`x` in blocks of its last axes, which have the sizes `contracted`."""
        granularity = _granularity(self.tile_size, contracted)
        return quantize(x, self.dtype, symmetric=self.symmetric, **granularity, **options)

    def quantize_activation(self, x: jax.Array, n: int, sums: bool = False) -> Any:
        """`x` as it is."""
        return x

    def why_not(self, kernel: Any, contracted: Sequence[int]) -> str | None:
        """Why a kernel is better left in float: it has too few columns to get smaller; None where it does.

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


class W4A16(_WeightOnly):
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


class W8A16(_WeightOnly):
    """8-bit weights times activations as they are; otherwise as `W4A16`.

    Args:
      tile_size, symmetric, clip_search: as in `W4A16`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> W8A16(tile_size=None)
    W8A16(int8 weights, per channel)
    """

    dtype = INT8


class W4A8(_WeightOnly):
    """4-bit weights times int8 activations, on the tensor cores' int8.

    Weights have two levels of scales: one for each output channel, and for each block of `tile_size` a small integer by
    which its values are multiplied. These products are int8, exactly, so that a product is that of `W8A8` with one
    scale per channel. Activations get one scale per token, symmetric. Each call makes int8 of all weights first, which
    `explain` shows: there is no kernel yet that does so on the way to the tensor cores.

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
        stored, back = _contracted_last(kernel, contracted)
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
        errors = [_sums_like_scale(jnp.square(each.dequantize() - stored), each) for each in made]
        multiple = jnp.where(errors[1] < errors[0], multiples[1], multiples[0])
        q = self._in_blocks(stored, sizes, scale=multiple * step, zero_point=q.zero_point)
        return q._replace(scale_step=step).transpose(back)

    def quantize_activation(self, x: jax.Array, n: int, sums: bool = False) -> QArray:
        """As `W8A8().quantize_activation`."""
        return W8A8().quantize_activation(x, n, sums)


Scheme = W8A8 | W4A8 | W4A16 | W8A16


@dataclasses.dataclass(frozen=True)
class Rule:
    """Names the scheme of all layers whose path matches; of several rules the first that matches counts.

    Args:
      path: regular expression that must match the whole path of the layer, such as "encoder.*attention.*".
      scheme: a `W8A8`, `W4A8`, `W4A16` or `W8A16`.

    Raises:
      TypeError, ValueError: for an argument that does not fit.

    >>> Rule(".*mlp.*", W8A8())
    Rule(path='.*mlp.*', scheme=W8A8(int8, per_token))
    """

    path: str
    scheme: Scheme

    def __post_init__(self):
        if not isinstance(self.path, str):
            raise TypeError(f"path is {self.path!r}, needs a regular expression as str")
        try:
            re.compile(self.path)
        except re.error as error:
            raise ValueError(f"path is {self.path!r}, needs a regular expression: {error}") from None
        check_scheme(self.scheme)


def check_scheme(scheme):
    """Raises TypeError if `scheme` is no scheme."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme is {scheme!r}, needs a W8A8, W4A8, W4A16 or W8A16")


def check_weight(q, scheme):
    """Raises ValueError if `q` is no weight for `scheme`."""
    if q.qtype != scheme.dtype:
        raise ValueError(f"scheme has dtype {scheme.dtype}, needs that of the QArray, {q.qtype}")
    if q.is_packed and isinstance(scheme, W8A8 | W4A8):
        raise ValueError(f"{q} is packed, {scheme!r} needs it plain: take its .unpack()")
    if q.merged_axes and isinstance(scheme, W8A8 | W4A8):
        raise ValueError(f"{q} has merged axes, {scheme!r} needs a weight of its own: take its quantize_weight")
    if q.scale_step is None and isinstance(scheme, W4A8):
        raise ValueError(f"{q} has no scale_step, {scheme!r} needs one, as its quantize_weight gives it")


def _contracted_last(kernel, contracted):
    """A kernel with its contracted axes last, and the order of axes that takes it back."""
    last = [axis % kernel.ndim for axis in contracted]
    order = [axis for axis in range(kernel.ndim) if axis not in last] + last
    return kernel.transpose(order), [order.index(axis) for axis in range(kernel.ndim)]


def _granularity(tile, sizes) -> dict[str, Any]:
    """How `quantize` is to share scales within the last axes of an array, which have these sizes and are contracted."""
    *outer, inner = sizes
    if tile is None or tile >= math.prod(sizes):
        return {"axis": tuple(range(-len(sizes), 0))}
    return {"tile_size": math.gcd(tile, inner) if outer else tile}


def _share_scales(x, q, options, axis, rows):
    """`x` as `q`, which is quantized with these options, but with a scale for each `rows` along `axis`."""
    size = x.shape[axis]
    rows = max(1, min(rows, size))
    count = -(-size // rows)
    padding = [(0, count * rows - size if i == axis else 0) for i in range(x.ndim)]
    scale = jnp.pad(q.scale, padding)
    largest = scale.reshape(*scale.shape[:axis], count, rows, *scale.shape[axis + 1 :]).max(axis + 1)
    largest = jnp.maximum(largest, float(jnp.finfo(jnp.float32).tiny))  # tiles of zeros divide by it
    of_rows = spread(largest, rows, size, axis)
    q = quantize(x, q.qtype, scale=of_rows, **options)
    return q if size % rows else q._replace(scale=largest)


def _sums_like_scale(x, q):
    """The sums of `x` over the blocks, within its last axis, and the whole axes that share a scale of `q`."""
    count = q.scale.shape[-1]
    tile = q.tile_size if count != 1 else max(x.shape[-1], 1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * tile - x.shape[-1])])
    x = x.reshape(*x.shape[:-1], count, tile).sum(-1)
    return x.sum(tuple(axis for axis in range(x.ndim - 1) if q.scale.shape[axis] == 1), keepdims=True)


def _is_positive_int(size):
    return isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size > 0


def _checked_tile_size(tile):
    if tile is not None and not _is_positive_int(tile):
        raise ValueError(f"tile_size is {tile!r}, needs a positive int, or None for one scale per channel")
    return tile if tile is None else int(tile)


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
