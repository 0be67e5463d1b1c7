"""Quantized matrix multiplication for JAX on NVIDIA GPUs: int8 and fp8 at the speed of the chip."""

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__path__ = extend_path(__path__, __name__)  # in a checkout, the kernels are those of the installed package

from jax_qmm.explanation import explain
from jax_qmm.ops.block_scaled_mm import block_scaled_mm
from jax_qmm.ops.conv_general_dilated import conv_general_dilated
from jax_qmm.ops.dispatch import export_disabled_checks
from jax_qmm.ops.dot_general import dot_general, einsum, matmul
from jax_qmm.ops.fake_quantize import fake_quantize
from jax_qmm.ops.quantize import quantize
from jax_qmm.ops.scaled_mm import scaled_mm
from jax_qmm.ops.zero_points import azp_adjustment, scaled_mm_azp, scaled_mm_azp_per_token, scaled_mm_zero_points
from jax_qmm.qarray import QArray
from jax_qmm.schemes import W4A8, W4A16, W8A8, W8A16, Rule

__all__ = [
    "QArray",
    "Rule",
    "W4A8",
    "W4A16",
    "W8A16",
    "W8A8",
    "azp_adjustment",
    "block_scaled_mm",
    "conv_general_dilated",
    "dot_general",
    "einsum",
    "explain",
    "fake_quantize",
    "export_disabled_checks",
    "matmul",
    "quantize",
    "scaled_mm",
    "scaled_mm_azp",
    "scaled_mm_azp_per_token",
    "scaled_mm_zero_points",
]


if TYPE_CHECKING:
    from jax_qmm import linen as linen, nnx as nnx


def __getattr__(name: str):
    # Flax is an optional dependency: its modules load when they are first named.
    if name in ("nnx", "linen"):
        return importlib.import_module(f"jax_qmm.{name}")
    raise AttributeError(f"module 'jax_qmm' has no attribute {name!r}")
