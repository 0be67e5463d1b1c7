"""Quantized matrix multiplication for JAX on NVIDIA GPUs: int8 and fp8 at the speed of the chip."""

import importlib

# For now each name loads its module when first used, so that modules under construction don't block each other.
_HOME = {
    "export_disabled_checks": "_ffi",
    "explain": "explain",
    "dot_general": "ops.dot_general",
    "einsum": "ops.dot_general",
    "matmul": "ops.dot_general",
    "quantize": "ops.quantize",
    "azp_adjustment": "ops.scaled_mm",
    "scaled_mm": "ops.scaled_mm",
    "scaled_mm_azp": "ops.scaled_mm",
    "scaled_mm_azp_per_token": "ops.scaled_mm",
    "QArray": "qarray",
    "W8A8": "schemes",
    "Rule": "schemes",
}


def __getattr__(name):
    if name in ("nnx", "linen"):
        return importlib.import_module(f"jax_qmm.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"jax_qmm.{_HOME[name]}"), name)
    raise AttributeError(f"module 'jax_qmm' has no attribute {name!r}")
