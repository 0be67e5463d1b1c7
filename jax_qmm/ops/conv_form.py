"""The form of a convolution, and its checks: which axis is which, and how the window moves.

Ops compute lhs `(N, *S, C)` with rhs `(O, *K, C / groups)`, the sums over the last axis of both; a `ConvForm` takes the
operands there in the order that a user has them, and the result back.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_qmm import _compat
from jax_qmm.explicit_axes import gathered_unless_divided
from jax_qmm.ops.product import transposed
from jax_qmm.ops.sharding import mesh_axes

SPATIAL = 3  # axes that kernels have


def in_three(sizes, other=1):
    """Of as many axes as kernels have, of which a convolution may have the last ones alone.

    >>> in_three((5, 6))
    (1, 5, 6)
    """
    return (*(other,) * (SPATIAL - len(sizes)), *sizes)


class Window(NamedTuple):
    """How the window moves along each spatial axis, and the groups of channels.

    Attributes:
      strides, lhs_dilation, rhs_dilation: an int for each spatial axis, as in `jax.lax.conv_general_dilated`.
      padding: for each a pair, before and after; negative ones crop.
      groups: of the input's channels, each for as many of the output's.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int

    def out_shape(self, lhs, rhs):
        """The spatial sizes of the result, given those of the operands."""
        one = lambda sizes: jax.ShapeDtypeStruct((1, 1, *sizes), jnp.float32)
        conv = lambda lhs, rhs: jax.lax.conv_general_dilated(lhs, rhs, *self[:4])
        return jax.eval_shape(conv, one(lhs), one(rhs)).shape[2:]

    def moves(self):
        """The strides, the padding before the image, and the dilation, of as many axes as kernels have."""
        before = [before for before, _ in self.padding]
        return in_three(self.strides), in_three(before, 0), in_three(self.rhs_dilation)

    def in_kernels(self, image, taps, pixels):
        """Sizes of the image, the window and the result, and `moves`, as kernels have them."""
        return *map(in_three, (image, taps, pixels)), *self.moves()

    def is_product(self, taps):
        """Whether a window of so many taps along each axis takes one value alone, and all in turn."""
        ones = (*taps, *self.strides, *self.lhs_dilation, self.groups)
        return all(size == 1 for size in ones) and not any(map(any, self.padding))

    def words(self, taps):
        """As `explain` has it, with what is not the usual.

        >>> Window((2, 2), ((1, 1), (0, 0)), (1, 1), (1, 1), 4).words((3, 3))
        '3x3, strides 2x2, padding 1:1 x 0:0, 4 groups'
        """
        by = lambda sizes: "x".join(map(str, sizes))
        parts = [by(taps)] if taps else []
        for name, sizes in (("strides", self.strides), ("dilation", self.rhs_dilation), ("lhs", self.lhs_dilation)):
            if any(size != 1 for size in sizes):
                parts.append(f"{'lhs dilation' if name == 'lhs' else name} {by(sizes)}")
        if any(map(any, self.padding)):
            parts.append("padding " + " x ".join(f"{before}:{after}" for before, after in self.padding))
        return ", ".join([*parts, *([f"{self.groups} groups"] if self.groups > 1 else [])])


class ConvForm(NamedTuple):
    """A convolution without its operands.

    Attributes:
      numbers: a `jax.lax.ConvDimensionNumbers`.
      window: a `Window`.
      batch_groups: groups of the input's batch, each for as many of the output's channels.
    """

    numbers: jax.lax.ConvDimensionNumbers
    window: Window
    batch_groups: int

    @property
    def lhs_order(self):
        """The axes of lhs as (N, *S, C)."""
        batch, channels, *spatial = self.numbers.lhs_spec
        return batch, *spatial, channels

    @property
    def rhs_order(self):
        """The axes of rhs as (O, *K, C / groups)."""
        out, channels, *spatial = self.numbers.rhs_spec
        return out, *spatial, channels

    @property
    def taps_of(self):
        """The axes of rhs along which the window lies."""
        return self.numbers.rhs_spec[2:]

    def grouped(self, x):
        """An operand, or a vector along its first axis, with the groups of the batch in front; as it is for one."""
        if self.batch_groups == 1:
            return x
        x = gathered_unless_divided(x, 0, self.batch_groups)
        first = 1 if x.shape[0] == 1 else x.shape[0] // self.batch_groups
        return x.reshape(1 if x.shape[0] == 1 else self.batch_groups, first, *x.shape[1:])

    def out(self, out):
        """The result (*batch groups, N, *P, O) in the user's order."""
        if self.batch_groups > 1:
            out = jnp.moveaxis(out, 0, -2)
            out = out.reshape(*out.shape[:-2], math.prod(out.shape[-2:]))
        return transposed(out, self._out_axes)

    def result_shape(self, lhs, rhs):
        """That of the result of operands with these shapes, all in the user's order."""
        floats = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
        return jax.eval_shape(lambda lhs, rhs: self.of_floats(lhs, rhs, None, None), *floats).shape

    def of_result(self, x):
        """What `out` makes the user's order of: an array of the result's shape there."""
        batch, channels, *spatial = self.numbers.out_spec
        x = transposed(x, (batch, *spatial, channels))
        if self.batch_groups == 1:
            return x
        x = gathered_unless_divided(x, -1, self.batch_groups)
        x = x.reshape(*x.shape[:-1], self.batch_groups, x.shape[-1] // self.batch_groups)
        return jnp.moveaxis(x, -2, 0)

    @property
    def _out_axes(self):
        """For each axis of the result in the user's order the one of (N, *P, O)."""
        batch, channels, *spatial = self.numbers.out_spec
        order = (batch, *spatial, channels)
        return [order.index(axis) for axis in range(len(order))]

    def along_channels(self, vector):
        """A vector (O,) that broadcasts against the result in the user's order."""
        channels = self.numbers.out_spec[1]
        return jnp.expand_dims(vector, [axis for axis in range(len(self.numbers.out_spec)) if axis != channels])

    def result_sharding(self, lhs, rhs, spatial=False):
        """`result_sharding` for a QArray as rhs, in the user's order of both, as (N, *P, O)."""
        sharding = jax.typeof(lhs).sharding
        of_lhs, of_rhs = [*sharding.spec], jax.typeof(rhs.qvalue).sharding.spec
        if self.batch_groups > 1:
            of_lhs[self.lhs_order[0]] = None  # images of all groups make one of the result
        of_rhs = [of_rhs[rhs.storage_axes()[axis]] for axis in self.rhs_order]
        spec = _result_spec([of_lhs[axis] for axis in self.lhs_order], of_rhs, 0, self.window.groups > 1, spatial)
        return sharding.update(spec=spec) if _compat.explicit_mesh(jax.typeof(lhs)) else None

    def out_sharding(self, lhs, rhs):
        """The same in the user's order of the result."""
        sharding = self.result_sharding(lhs, rhs)
        return sharding and sharding.update(spec=PartitionSpec(*(sharding.spec[axis] for axis in self._out_axes)))

    def of_floats(self, lhs, rhs, precision, dtype):
        """XLA's convolution of dense operands in the user's order.

        Groups of the batch become groups of channels: XLA may abort where it shards output channels of the former.
        """
        groups, (batch, channels, *_) = self.window.groups, self.numbers.lhs_spec
        if self.batch_groups > 1:
            groups = self.batch_groups
            lhs = lhs.reshape(*lhs.shape[:batch], groups, lhs.shape[batch] // groups, *lhs.shape[batch + 1 :])
            lhs = jnp.moveaxis(lhs, batch, channels)  # before the channels, as an axis went from before or behind them
            lhs = lhs.reshape(*lhs.shape[:channels], groups * lhs.shape[channels + 1], *lhs.shape[channels + 2 :])
        return jax.lax.conv_general_dilated(
            *(lhs, rhs, *self.window[:4], self.numbers, groups, 1, precision), preferred_element_type=dtype
        )


def abstract_result(lhs, rhs, shape, dtype, num_batch=0, grouped=False):
    """The type of a result (*B, I, *P, O) of operands with these types."""
    sharding = result_sharding(lhs, rhs, num_batch, grouped)
    kept = {} if sharding is None else {"sharding": sharding}
    return lhs.update(shape=shape, dtype=dtype, weak_type=False, **kept)


def result_sharding(lhs, rhs, num_batch=0, grouped=False, spatial=False):
    """The sharding of a result (*B, I, *P, O) on Explicit axes of a mesh; None where there are none.

    It is that of the images and the output channels, of images where both have the same axis; with groups of channels
    that of images alone. A product, with `spatial`, keeps that of the pixels too.
    """
    if not _compat.explicit_mesh(lhs):
        return None
    return lhs.sharding.update(spec=_result_spec(lhs.sharding.spec, rhs.sharding.spec, num_batch, grouped, spatial))


def _result_spec(lhs, rhs, num_batch, grouped, spatial):
    batch = [x if x is not None else y for x, y in zip(lhs[:num_batch], rhs[:num_batch])]
    pixels = [entry if spatial else None for entry in lhs[num_batch + 1 : -1]]
    taken, kept = set(), []
    for entry in [*batch, lhs[num_batch], *pixels, None if grouped else rhs[num_batch]]:
        kept.append(None if taken & set(mesh_axes(entry)) else entry)
        taken |= set(mesh_axes(entry))
    return PartitionSpec(*kept)


def mapped_behind(lhs, dim, num_batch=0):
    """Whether an axis of lhs that a vmap maps becomes one with the images behind them and not before.

    Images that Explicit axes of a mesh share have to come first, as they stay together on a device.
    """
    kind = jax.typeof(lhs)
    if not _compat.explicit_mesh(kind):
        return False
    return kind.sharding.spec[dim] is None and kind.sharding.spec[num_batch + (dim <= num_batch)] is not None


def read(
    lhs: Any,
    rhs: Any,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    feature_group_count,
    batch_group_count,
) -> ConvForm:
    """The form that the arguments of `jax.lax.conv_general_dilated` describe, of operands with these shapes."""
    ndim = len(lhs.shape)
    if ndim < 2 or len(rhs.shape) != ndim:
        raise ValueError(
            f"lhs has shape {lhs.shape} and rhs {rhs.shape}; they need as many axes, of which two are no spatial ones"
        )
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    _check_groups(lhs, rhs, numbers, feature_group_count, batch_group_count)
    spatial = [lhs.shape[axis] for axis in numbers.lhs_spec[2:]]
    taps = [rhs.shape[axis] for axis in numbers.rhs_spec[2:]]
    per_axis = lambda name, x: _per_axis(name, (1,) * (ndim - 2) if x is None else x, ndim - 2)
    strides = per_axis("window_strides", window_strides)
    lhs_dilation, rhs_dilation = per_axis("lhs_dilation", lhs_dilation), per_axis("rhs_dilation", rhs_dilation)
    if isinstance(padding, str):
        if any(by != 1 for by in lhs_dilation):
            raise ValueError(f"padding is {padding!r}; with lhs_dilation {lhs_dilation} it needs to be pairs of ints")
        reach = [size and 1 + by * (size - 1) for size, by in zip(taps, rhs_dilation)]
        padding = jax.lax.padtype_to_pads(spatial, reach, strides, padding)
    padding = _pads(padding, ndim - 2)
    window = Window(strides, padding, lhs_dilation, rhs_dilation, int(feature_group_count))
    form = ConvForm(numbers, window, int(batch_group_count))
    form.result_shape(lhs, rhs)  # lax's own checks
    return form


def _check_groups(lhs, rhs, numbers, feature_groups, batch_groups):
    for name, count in (("feature_group_count", feature_groups), ("batch_group_count", batch_groups)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}; it needs to be a positive int")
    if feature_groups > 1 and batch_groups > 1:
        raise ValueError(
            f"feature_group_count is {feature_groups} and batch_group_count {batch_groups}; one of them needs to be 1"
        )
    images, channels = (lhs.shape[axis] for axis in numbers.lhs_spec[:2])
    out, taken = (rhs.shape[axis] for axis in numbers.rhs_spec[:2])
    if channels % feature_groups:
        raise ValueError(
            f"feature_group_count is {feature_groups}; lhs of shape {lhs.shape} has {channels} channels in axis "
            f"{numbers.lhs_spec[1]}, and needs a multiple of it"
        )
    if taken != channels // feature_groups:
        of = f"{channels}" if feature_groups == 1 else f"{channels} / {feature_groups}"
        raise ValueError(
            f"rhs of shape {rhs.shape} takes {taken} channels in axis {numbers.rhs_spec[1]}; with lhs of shape "
            f"{lhs.shape} and feature_group_count {feature_groups} it needs {of} = {channels // feature_groups}"
        )
    for name, count in (("feature_group_count", feature_groups), ("batch_group_count", batch_groups)):
        if out % count:
            raise ValueError(
                f"{name} is {count}; rhs of shape {rhs.shape} has {out} output channels in axis "
                f"{numbers.rhs_spec[0]}, and needs a multiple of it"
            )
    if images % batch_groups:
        raise ValueError(
            f"batch_group_count is {batch_groups}; lhs of shape {lhs.shape} has {images} in its batch axis "
            f"{numbers.lhs_spec[0]}, and needs a multiple of it"
        )


def _per_axis(name, values, count):
    values = tuple(values) if isinstance(values, (tuple, list)) else values
    if not isinstance(values, tuple) or len(values) != count or not all(_is_int(v) and v > 0 for v in values):
        raise ValueError(f"{name} is {values}; it needs {count} positive ints, one for each spatial axis")
    return tuple(map(int, values))


def _pads(padding, count):
    pairs = tuple(tuple(pair) if isinstance(pair, (tuple, list)) else pair for pair in padding)
    fits = all(isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_int, pair)) for pair in pairs)
    if len(pairs) != count or not fits:
        raise ValueError(f"padding is {padding}; it needs {count} pairs of ints, one for each spatial axis, or a name")
    return tuple((int(before), int(after)) for before, after in pairs)


def _is_int(x):
    return hasattr(x, "__index__") and not isinstance(x, bool)
