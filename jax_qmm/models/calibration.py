"""Batches run through the float model: the ranges of the layers' inputs, and the errors that quantizing would make."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm


def call(model: Callable, batch: Any, *first: Any) -> Any:
    """Calls `model` with `first` and a batch: a tuple holds positional arguments, a mapping keyword arguments.

    >>> call(lambda x, scale=1: x * scale, {"x": 3, "scale": 2})
    6
    """
    if isinstance(batch, tuple):
        return model(*first, *batch)
    return model(*first, **batch) if isinstance(batch, Mapping) else model(*first, batch)


def run(batches: Iterable[Any], forward: Callable[[Any], Any], description: str) -> None:
    """Calls `forward` with each batch and shows progress."""
    for batch in tqdm(batches, desc=description, unit="batch"):
        jax.block_until_ready(jax.tree.leaves(forward(batch)))


def check_paths(paths: Collection[str]) -> None:
    """Raises ValueError if there is no layer to calibrate."""
    if not paths:
        raise ValueError(
            "calibration was given, but none of the layers to quantize takes it: that needs a "
            "scheme with activation='per_tensor' and no activation_scale"
        )


def check_ranges(ranges: Mapping[str, tuple[jax.Array, jax.Array]]) -> None:
    """Raises ValueError if calibration found nothing, or a range that is not finite."""
    if not ranges:
        raise ValueError("calibration held no batch that reached a layer which needs it")
    for path, (low, high) in ranges.items():
        if not jnp.isfinite(jnp.stack([low, high])).all():
            raise ValueError(f"calibration saw inputs of {path} that are not finite: from {low} to {high}")


def squares(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of squares, float32, of the error of `got` and of `want`: what `relative_error` needs.

    >>> [float(total) for total in squares(jnp.ones(4), jnp.full(4, 2.0))]
    [4.0, 16.0]
    """
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sum((got - want) ** 2), jnp.sum(want**2)


def relative_error(error: Any, size: Any) -> float:
    """The relative L2 error from sums of squares, over all layers of a stack; 0 where there is no error.

    >>> relative_error(jnp.array([1.0, 3.0]), jnp.array([8.0, 8.0]))
    0.5
    """
    error, size = float(jnp.sum(error)), float(jnp.sum(size))
    return 0.0 if error == 0 else (error / size) ** 0.5 if size else float("inf")
