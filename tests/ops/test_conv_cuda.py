"""A convolution for an NVIDIA GPU, seen without one: what is lowered, and what XLA makes of it for an H200."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jax_qmm
from jax_qmm import QArray

DEVICES = 4
spec = jax.ShapeDtypeStruct
SHAPES = dict(
    x=((8, 16, 12, 64), jnp.int8),
    w=((128, 3, 3, 64), jnp.int8),
    scale=((128, 1, 1, 1), jnp.float32),
    bias=((128,), jnp.float32),
)


def conv(x, w, scale, bias, **options):
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")) | options
    x, w = QArray(x, jnp.full((1,) * 4, 0.5)), QArray(w, scale)
    return jax_qmm.conv_general_dilated(x, w, **options, bias=bias, activation="relu", out_dtype=jnp.bfloat16)


def calls(f, *args):
    """(operand types, result type, attributes) of each custom call of the kernel for platform cuda, and the module."""
    exported = export.export(jax.jit(f), platforms=["cuda"], disabled_checks=jax_qmm.export_disabled_checks())(*args)
    text = exported.mlir_module()
    found = re.findall(r"custom_call @jax_qmm_conv\(.*?\) (\{.*\}) : \((.*)\) -> (\S+)", text)
    return [(re.findall(r"tensor<(\S+?)>", types), result, attributes) for attributes, types, result in found], text


def operands(**shapes):
    return [spec(shapes.get(name, shape), dtype) for name, (shape, dtype) in SHAPES.items()]


def test_lowers_to_one_call_without_transposes_and_padded_copies():
    ((types, result, attributes),), text = calls(conv, *operands())
    assert types == ["1x8x1x16x12x64xi8", "1x128x1x3x3x64xi8", "1x1xf32", "1x128xf32", "1x128xf32"]
    assert result == "tensor<1x8x1x16x12x128xbf16>"
    assert 'names = "scale_lhs scale_rhs bias"' in attributes and 'activation = "clamp"' in attributes
    assert not re.search(r"stablehlo\.(transpose|pad|convolution)", text)


def test_a_symbolic_batch_stays_symbolic():
    (n,) = export.symbolic_shape("n")
    ((types, result, _),), _ = calls(conv, *operands(x=(n, 16, 12, 64)))
    assert types[0] == "1x?x1x16x12x64xi8" and result == "tensor<1x?x1x16x12x128xbf16>"


def test_a_window_of_one_value_is_a_product():
    found, text = calls(lambda *args: conv(*args, padding="VALID"), *operands(w=(128, 1, 1, 64)))
    assert not found and text.count("custom_call @jax_qmm_scaled_mm") == 1


# Compiled for an H200

SHARDED = {  # name: specs of x, w, scale and bias
    "one device": [P()] * 4,
    "images": [P("d"), P(), P(), P()],
    "output channels": [P(), P("d"), P("d"), P("d")],
    "input channels": [P(None, None, None, "d"), P(None, None, None, "d"), P(), P()],
    "rows of images": [P(None, "d"), P(), P(), P()],
}


def compile_for_h200():
    """Prints {name: optimized module} as JSON."""
    from conftest import sharded_modules

    print(json.dumps(sharded_modules(conv, operands(), SHARDED, DEVICES)))


@pytest.fixture(scope="module")
def h200(optimized_modules):
    return optimized_modules(__file__)


@pytest.mark.parametrize("name", SHARDED)
def test_compiled_for_h200(h200, name):
    text = h200[name]
    entry = re.search(r"^ENTRY .*?^}", text, re.S | re.M).group(0)
    assert re.findall(r'custom_call_target="(\w+)"', text) == ["jax_qmm_conv"]
    collectives = re.findall(r"= \(*(\w+)\[.*? (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    views = {"parameter", "constant", "bitcast", "get-tuple-element", "custom-call"}
    operations = set(re.findall(r"= \S+ ([\w-]+)\(", entry)) - views
    if name == "input channels":  # the sums of the window, then the epilogue in one kernel
        assert collectives == [("s32", "all-reduce")]
        assert operations - {"all-reduce", "all-reduce-start", "all-reduce-done"} == {"fusion"}
        assert entry.count(" fusion(") == 1
    elif name == "rows of images":  # in 8 bits
        assert collectives[0] == ("s8", "all-gather")
    else:
        assert not collectives and operations == set()


if __name__ == "__main__":
    compile_for_h200()
