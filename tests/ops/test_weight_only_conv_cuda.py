"""Convolutions with weights in blocks, in the programs that XLA compiles for H200s, compiled without one."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_qmm

DEVICES, CHANNELS = 4, 512
X = jax.ShapeDtypeStruct((8, 8, 7, CHANNELS), jnp.bfloat16)
BIAS = jax.ShapeDtypeStruct((128,), jnp.float32)
DENSE = jax.ShapeDtypeStruct((128, 3, 3, CHANNELS), jnp.float32)
W = jax.eval_shape(lambda dense: jax_qmm.quantize(dense, jnp.int4, tile_size=64).pack(), DENSE)
MERGED = jax.eval_shape(lambda dense: jax_qmm.W4A16(64).quantize_weight(dense, (1, 2, 3)), DENSE)

of_all = lambda spec: [spec] * 2  # the leaves
SHARDED = {  # name: specs of x, bias and the leaves of w
    "one device": [P(), P(), *of_all(P())],
    "images": [P("d"), P(), *of_all(P())],
    "output channels": [P(), P("d"), *of_all(P("d"))],
    "input channels": [P(None, None, None, "d"), P(), *of_all(P(None, None, None, "d"))],
    "rows of images": [P(None, "d"), P(), *of_all(P())],
}
SHARDED_MERGED = {
    "input channels of x": [P(None, None, None, "d"), P(), *of_all(P())]
}  # beside taps with channels in one


def conv(tree, x, bias, *leaves):
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    w = jax.tree.unflatten(tree, leaves)
    return jax_qmm.conv_general_dilated(x, w, **options, bias=bias, activation="relu")


def compile_for_h200():
    """Prints {name: optimized module} as JSON."""
    from conftest import sharded_modules

    modules = {}
    for w, sharded in ((W, SHARDED), (MERGED, SHARDED_MERGED)):
        leaves, tree = jax.tree.flatten(w)
        modules |= sharded_modules(functools.partial(conv, tree), [X, BIAS, *leaves], sharded, DEVICES)
    print(json.dumps(modules))


@pytest.fixture(scope="module")
def h200(optimized_modules):
    return optimized_modules(__file__)


@pytest.mark.parametrize("name", [*SHARDED, *SHARDED_MERGED])
def test_compiled_for_h200(h200, name):
    text = h200[name]
    assert re.findall(r'custom_call_target="(\w+)"', text) == ["jax_qmm_weight_only_conv"]
    collectives = re.findall(r"= \(*(\w+)\[.*? (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    want = [("f32", "all-reduce")] if name.startswith("input channels") else []
    assert collectives == ([("bf16", "all-gather")] if name == "rows of images" else want)


@pytest.mark.parametrize(("block", "calls"), [(16, []), (32, ["jax_qmm_weight_only_conv"])])
def test_blocks_of_any_images(block, calls):
    """Kernels multiply 32 channels of a block at once; what no kernel serves is not left to the run."""
    w = jax.eval_shape(lambda: jax_qmm.quantize(jnp.ones((128, 3, 3, CHANNELS)), jnp.int4, tile_size=block))
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    images = jax.export.symbolic_shape("n, 8, 7, 512")
    traced = jax.jit(lambda x, w: jax_qmm.conv_general_dilated(x, w, **options))
    exported = jax.export.export(
        traced,
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jax_qmm_weight_only_conv")],
    )(jax.ShapeDtypeStruct(images, jnp.bfloat16), w)
    assert sorted(set(re.findall(r"@(jax_qmm_weight_only_conv)\b", exported.mlir_module()))) == calls


if __name__ == "__main__":
    compile_for_h200()
