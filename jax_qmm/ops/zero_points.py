"""scaled_mm with zero points: products of int8 operands of which one or both are asymmetric."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_qmm.dtypes import INT8, INT32
from jax_qmm.ops import checks
from jax_qmm.ops.checks import Activation
from jax_qmm.ops.scaled_mm import scaled_product


def scaled_mm_azp(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    azp_with_adj: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    out_scale: ArrayLike | None = None,
    out_zero_point: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `activation(scale_a * scale_b * (a @ b.T - azp_with_adj) + bias)`: one zero point for all of a.

    Args:
      a: `(..., M, K)` int8.
      b: `(N, K)` int8.
      scale_a: as in `scaled_mm`.
      scale_b: as in `scaled_mm`.
      azp_with_adj: `(N,)` int32, `azp * azp_adjustment(b)`; subtracted from the sums in int32.
      bias: as in `scaled_mm`.
      activation, out_scale, out_zero_point, out_sharding: as in `scaled_mm`.
      out_dtype: likewise, but not int32.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array or has a wrong dtype.
      ValueError: if a shape does not fit.

    >>> import jax.numpy as jnp, jax_qmm
    >>> a, b = jnp.int8([[11, 12]]), jnp.int8([[3, 4], [5, 6]])
    >>> azp_with_adj = 10 * jax_qmm.azp_adjustment(b)
    >>> jax_qmm.scaled_mm_azp(a, b, 0.5, 1.0, azp_with_adj, out_dtype=jnp.float32).tolist()
    [[5.5, 8.5]]
    """
    a, b = checks.matrices(a, b, (INT8,))
    adj = checks.along_columns("azp_with_adj", checks.array("azp_with_adj", azp_with_adj, (INT32,)), b)
    return scaled_product(
        *(a, b, scale_a, scale_b, bias, {"azp_adj": adj}),
        activation=activation,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
    )


def scaled_mm_azp_per_token(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    azp_adj: ArrayLike,
    azp: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    out_scale: ArrayLike | None = None,
    out_zero_point: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `activation(scale_a * scale_b * (a @ b.T - azp * azp_adj) + bias)`: a zero point for each row of a.

    Args:
      a: `(..., M, K)` int8.
      b: `(N, K)` int8.
      scale_a: as in `scaled_mm`.
      scale_b: as in `scaled_mm`.
      azp_adj: `(N,)` int32, `azp_adjustment(b)`.
      azp: int32 zero points in any of the shapes of scale_a. The product and difference are taken in int32.
      bias: as in `scaled_mm`.
      activation, out_scale, out_zero_point, out_sharding: as in `scaled_mm`.
      out_dtype: likewise, but not int32.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array or has a wrong dtype.
      ValueError: if a shape does not fit.

    >>> import jax.numpy as jnp, jax_qmm
    >>> a, b = jnp.int8([[11, 12], [21, 22]]), jnp.int8([[3, 4], [5, 6]])
    >>> adj, azp = jax_qmm.azp_adjustment(b), jnp.int32([10, 20])
    >>> jax_qmm.scaled_mm_azp_per_token(a, b, 0.5, 1.0, adj, azp, out_dtype=jnp.float32).tolist()
    [[5.5, 8.5], [5.5, 8.5]]
    """
    a, b = checks.matrices(a, b, (INT8,))
    adj = checks.along_columns("azp_adj", checks.array("azp_adj", azp_adj, (INT32,)), b)
    azp = checks.along_rows("azp", checks.array("azp", azp, (INT32,)), a)
    return scaled_product(
        *(a, b, scale_a, scale_b, bias, {"azp_adj": adj, "azp": azp}),
        activation=activation,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
    )


def scaled_mm_zero_points(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    zero_point_a: ArrayLike,
    zero_point_b: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    sums_a: ArrayLike | None = None,
    sums_b: ArrayLike | None = None,
    activation: Activation = None,
    out_scale: ArrayLike | None = None,
    out_zero_point: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes `activation(scale_a * scale_b * sum_k (a - zero_point_a) * (b - zero_point_b) + bias)`.

    The sum is `a @ b.T - zero_point_a * sums_b - zero_point_b * sums_a + K * zero_point_a * zero_point_b`, all four
    terms in int32, exact modulo 2**32.

    Args:
      a: `(..., M, K)` int8.
      b: `(N, K)` int8.
      scale_a: as in `scaled_mm`.
      scale_b: as in `scaled_mm`.
      zero_point_a: integers in any of the shapes of scale_a.
      zero_point_b: integers in any of the shapes of scale_b.
      bias: as in `scaled_mm`.
      sums_a: `(..., M)` or `(..., M, 1)` int32, the sum of each row of a, which `quantize(x, sums=True)` gives in its
        one pass. If None it is computed here, from a second read of a.
      sums_b: `(N,)` int32, `azp_adjustment(b)`; computed if None, at each call.
      activation, out_scale, out_zero_point, out_sharding: as in `scaled_mm`.
      out_dtype: likewise, but not int32.

    Returns:
      `(..., M, N)` of `out_dtype`.

    Raises:
      TypeError: if an argument is no array or has a wrong dtype.
      ValueError: if a shape does not fit.

    >>> import jax.numpy as jnp, jax_qmm
    >>> a, b = jnp.int8([[11, 12]]), jnp.int8([[3, 4], [5, 6]])
    >>> jax_qmm.scaled_mm_zero_points(a, b, 0.5, 1.0, 10, jnp.int32([3, 5]), out_dtype=jnp.float32).tolist()
    [[1.0, 1.0]]
    """
    a, b = checks.matrices(a, b, (INT8,))
    azp = checks.along_rows("zero_point_a", checks.int32("zero_point_a", zero_point_a), a)
    azp_b = checks.along_columns("zero_point_b", checks.int32("zero_point_b", zero_point_b), b, scalar=True)
    if sums_a is None:
        rows = jnp.sum(a, -1, dtype=jnp.int32)
    else:
        rows = checks.along_rows("sums_a", checks.array("sums_a", sums_a, (INT32,)), a, scalar=False)
    if sums_b is None:
        adj = azp_adjustment(b)
    else:
        adj = checks.along_columns("sums_b", checks.array("sums_b", sums_b, (INT32,)), b)
    vectors = {"azp": azp, "azp_adj": adj, "sums_a": rows - a.shape[-1] * azp, "azp_b": azp_b}
    return scaled_product(
        *(a, b, scale_a, scale_b, bias, vectors),
        activation=activation,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
    )


def azp_adjustment(b: ArrayLike) -> jax.Array:
    """The sum of each row of b, by which a zero point of a shifts the result.

    Args:
      b: `(N, K)` int8.

    Returns:
      `(N,)` int32.

    Raises:
      TypeError: if b is no int8 array.
      ValueError: if b does not have two dimensions.

    >>> import jax.numpy as jnp, jax_qmm
    >>> jax_qmm.azp_adjustment(jnp.int8([[3, 4], [5, -128]])).tolist()
    [7, -123]
    """
    b = checks.array("b", b, (INT8,))
    if b.ndim != 2:
        raise ValueError(f"b has shape {b.shape}; it needs two dimensions, (N, K)")
    return jnp.sum(b, axis=1, dtype=jnp.int32)
