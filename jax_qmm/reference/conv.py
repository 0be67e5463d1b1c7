"""conv once more in plain jax.numpy: the lowering where no kernel runs, and the oracle of the tests.

The kernels follow this arithmetic bit for bit.
"""

import math

import jax
import jax.numpy as jnp

from jax_qmm.reference import activation as activations, scaled_mm as products

# What each operand has after its batch dimensions: i the images of lhs, s its spatial axes, c channels; o those of the
# result, k the taps.
LABELS = {
    "lhs": "isc",
    "rhs": "okc",
    **dict.fromkeys(("scale_lhs", "zero_point_lhs"), "i"),
    **dict.fromkeys(("scale_rhs", "zero_point_rhs", "sums_rhs", "bias"), "o"),
    "residual": "iso",
    **dict.fromkeys(("scale_residual", "zero_point_residual", "out_scale", "out_zero_point"), ""),
}


def conv(lhs, rhs, *, num_batch=0, window, out_dtype, activation=activations.NONE, **vectors):
    """`activation(scale_lhs * scale_rhs * sum (lhs - zero_point_lhs) * (rhs - zero_point_rhs) + bias + residual)`.

    Padding is the real 0: it adds nothing to a sum. What follows the sums is that of `reference.scaled_mm`. An int8
    residual stands for `scale_residual * (residual - zero_point_residual)`, of which the product and the sum with what
    stands before it are rounded once.

    Args:
      lhs: `(*B, I, *S, C)` int8, B the first `num_batch` dimensions.
      rhs: `(*B, O, *K, C / groups)` int8. A dimension of B may be 1 in any operand.
      num_batch: the length of B.
      window: an `ops.conv_form.Window`.
      out_dtype: bfloat16, float16, float32, int8 or float8_e4m3fn; or int32 for the sums, which are exact modulo 2^32.
      activation: an `Activation`.
      **vectors: `scale_lhs` and `zero_point_lhs` (int8) `(*B, I)` or `(*B, 1)`; `scale_rhs`, `zero_point_rhs` (int32)
        and `bias` `(*B, O)` or `(*B, 1)`; `residual` `(*B, I, *P, O)` float or int8, the latter with `scale_residual`
        and perhaps `zero_point_residual` `B`; `out_scale` and `out_zero_point` `B`. Each may be absent. `sums_rhs`,
        the sums of rhs for each output channel, spares kernels to add them up, and has no effect.

    Returns:
      `(*B, I, *P, O)` of `out_dtype`.

    >>> from jax_qmm.ops.conv_form import Window
    >>> window = Window((1,), ((1, 1),), (1,), (1,), 1)
    >>> lhs, rhs = jnp.int8([[[1], [2], [3]]]), jnp.int8([[[1], [10], [100]]])
    >>> conv(lhs, rhs, window=window, out_dtype=jnp.int32).tolist()
    [[[210], [321], [32]]]
    >>> conv(lhs, rhs, window=window, out_dtype=jnp.int32, zero_point_lhs=jnp.int8([1])).tolist()
    [[[100], [210], [21]]]
    """
    vectors.pop("sums_rhs", None)
    zero_points = {name: vectors.pop(name) for name in ("zero_point_lhs", "zero_point_rhs") if name in vectors}
    acc = sums(lhs, rhs, num_batch=num_batch, window=window, **zero_points)
    return epilogue(acc, num_batch=num_batch, out_dtype=out_dtype, activation=activation, **vectors)


def sums(lhs, rhs, zero_point_lhs=None, zero_point_rhs=None, *, num_batch=0, window):
    """The sums `(*B, I, *P, O)` in int32, one tap after the other."""
    spatial = range(num_batch + 1, lhs.ndim - 1)
    sizes, taps = ([x.shape[axis] for axis in spatial] for x in (lhs, rhs))
    if zero_point_lhs is not None or zero_point_rhs is not None:
        lhs, rhs = lhs.astype(jnp.int32), rhs.astype(jnp.int32)
    if zero_point_lhs is not None:
        lhs = lhs - along_first(zero_point_lhs, lhs.ndim, num_batch).astype(jnp.int32)
    if zero_point_rhs is not None:
        rhs = rhs - along_first(zero_point_rhs, rhs.ndim, num_batch)
    pads = [(*pair, by - 1) for pair, by in zip(window.padding, window.lhs_dilation)]
    lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0)] * (num_batch + 1) + pads + [(0, 0, 0)])
    lhs = lhs.reshape(*lhs.shape[:-1], window.groups, lhs.shape[-1] // window.groups)
    rhs = rhs.reshape(
        *rhs.shape[:num_batch],
        window.groups,
        rhs.shape[num_batch] // window.groups,
        math.prod(taps),
        rhs.shape[-1],
    )
    places = window.out_shape(sizes, taps)
    reach = [(count - 1) * stride + 1 for count, stride in zip(places, window.strides)]
    letters = "xyzuvw"[: len(taps)]

    def of_tap(tap):
        starts = jnp.unravel_index(tap, tuple(taps)) if taps else ()
        seen = lhs
        for axis, start, size, by, stride in zip(spatial, starts, reach, window.rhs_dilation, window.strides):
            seen = jax.lax.dynamic_slice_in_dim(seen, start * by, size, axis)
            seen = jax.lax.slice_in_dim(seen, 0, size, stride, axis)
        weight = jax.lax.dynamic_index_in_dim(rhs, tap, -2, keepdims=False)
        subscripts = f"...i{letters}gc,...goc->...i{letters}go"
        return jnp.einsum(subscripts, seen, weight, preferred_element_type=jnp.int32)

    if 0 in (*taps, *places):
        batch = jnp.broadcast_shapes(lhs.shape[:num_batch], rhs.shape[:num_batch])
        acc = jnp.zeros((*batch, lhs.shape[num_batch], *places, *rhs.shape[num_batch : num_batch + 2]), jnp.int32)
    else:
        acc = of_tap(0)
        if (count := math.prod(taps)) > 1:
            acc = jax.lax.fori_loop(1, count, lambda tap, acc: acc + of_tap(tap), acc)
    return acc.reshape(*acc.shape[:-2], math.prod(acc.shape[-2:]))


def epilogue(acc, *, num_batch=0, out_dtype, activation=activations.NONE, **vectors):
    """The result of `conv`, given its `sums`."""
    named, residual = {}, vectors.pop("residual", None)
    if residual is not None:
        of_entry = lambda name: jnp.expand_dims(vectors.pop(name), tuple(range(num_batch, acc.ndim)))
        if "zero_point_residual" in vectors:
            residual = residual.astype(jnp.int32) - of_entry("zero_point_residual")
        scale = of_entry("scale_residual").astype(jnp.float32) if "scale_residual" in vectors else None
        named["residual"] = scale, residual.astype(jnp.float32)
    for name, vector in vectors.items():
        if name == "scale_lhs":
            vector = along_first(vector, acc.ndim - 1, num_batch)
        named[{"scale_lhs": "scale_a", "scale_rhs": "scale_b"}.get(name, name)] = vector
    return products.epilogue(acc, num_batch=num_batch, out_dtype=out_dtype, activation=activation, **named)


def along_first(vector, ndim, num_batch):
    """A vector with 1 on all that follows the first axis after the batch."""
    return jnp.expand_dims(vector, tuple(range(num_batch + 1, ndim)))
