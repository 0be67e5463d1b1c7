"""Convolutions whose window takes one value, as products of pixels and weights."""

import jax
import jax.numpy as jnp

from jax_qmm.ops import conv_form
from jax_qmm.ops.scaled_mm import scaled_mm_p


def as_product(lhs, rhs, vectors, *, num_batch, activation, out_dtype):
    """The result of `ops.conv.bind` by `scaled_mm`: a (*B, I, *S, C), b (*B, O, C)."""
    pixels = lhs.shape[num_batch:-1]
    rhs = rhs.reshape(*rhs.shape[: num_batch + 1], rhs.shape[-1])

    def of_pixels(vector):
        vector = jnp.expand_dims(vector, tuple(range(num_batch + 1, num_batch + len(pixels))))
        if vector.shape[num_batch] == 1:
            return vector
        return jnp.broadcast_to(vector, (*vector.shape[:num_batch], *pixels))

    named = {name: vectors[name] for name in ("bias", "out_scale", "out_zero_point") if name in vectors}
    if "scale_lhs" in vectors:
        named |= {"scale_a": of_pixels(vectors["scale_lhs"]), "scale_b": vectors["scale_rhs"]}
    zero_point_lhs, zero_point_rhs = vectors.get("zero_point_lhs"), vectors.get("zero_point_rhs")
    if zero_point_lhs is not None:
        sums_rhs = vectors["sums_rhs"] if "sums_rhs" in vectors else jnp.sum(rhs, -1, dtype=jnp.int32)
        named |= {"azp": of_pixels(zero_point_lhs.astype(jnp.int32)), "azp_adj": sums_rhs}
    if zero_point_rhs is not None:
        sums_lhs = jnp.sum(lhs, -1, dtype=jnp.int32)
        if zero_point_lhs is None:  # the plain epilogue has one product of a row's and a column's value
            named |= {"azp": sums_lhs, "azp_adj": zero_point_rhs}
        else:
            named |= {"sums_a": sums_lhs - lhs.shape[-1] * named["azp"], "azp_b": zero_point_rhs}
    return scaled_mm_p.bind(
        *(lhs, rhs, *named.values()),
        names=tuple(named),
        num_batch=num_batch,
        activation=activation,
        out_dtype=out_dtype,
        fast_accum=False,
        out_sharding=conv_form.result_sharding(jax.typeof(lhs), jax.typeof(rhs), num_batch, spatial=True),
    )
