"""What products with QArrays become for CUDA: two custom calls and nothing that moves data around them."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_qmm
from jax_qmm import W4A8, W4A16, W8A8, W8A16

SCHEMES = {"symmetric": W8A8(), "asymmetric": W8A8(symmetric=False)}


def kernel(*shape, contracted):
    return SCHEMES["asymmetric"].quantize_weight(jnp.ones(shape), contracted)


PRODUCTS = {  # equation, shape of x, weight
    "linear": ("btk,kn->btn", (2, 8, 64), lambda: kernel(64, 32, contracted=(0,))),
    "query": ("btk,khd->bthd", (2, 8, 64), lambda: kernel(64, 4, 8, contracted=(0,))),
    "attention output": ("bthd,hdf->btf", (2, 8, 4, 16), lambda: kernel(4, 16, 32, contracted=(0, 1))),
    "experts": ("ebk,ekn->ebn", (2, 8, 64), lambda: kernel(2, 64, 32, contracted=(1,))),
    "same tokens for all experts": ("bk,ekn->ebn", (8, 64), lambda: kernel(2, 64, 32, contracted=(1,))),
    "weight first": ("kn,bk->nb", (8, 64), lambda: kernel(64, 32, contracted=(0,))),
    "one token": ("kn,k->n", (64,), lambda: kernel(64, 32, contracted=(0,))),
}
products = pytest.mark.parametrize("name", PRODUCTS)
schemes = pytest.mark.parametrize("scheme", SCHEMES)


def product(equation, scheme):
    """f(x, w), whichever comes first in the equation."""
    flip = equation.startswith("kn,")
    call = functools.partial(jax_qmm.einsum, equation, scheme=scheme, preferred_element_type=jnp.bfloat16)
    return jax.jit(lambda x, w: call(w, x) if flip else call(x, w))


@products
@schemes
def test_no_transpose_is_lowered(name, scheme):
    equation, shape, make = PRODUCTS[name]
    text = (
        product(equation, SCHEMES[scheme])
        .trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16), make())
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "transpose" not in text
    assert re.findall("@(jax_qmm_\\w+)", text) == ["jax_qmm_quantize_dynamic", "jax_qmm_scaled_mm"]


BLOCKS = {
    "int8": W8A8(tile_size=32),
    "asymmetric": W8A8(tile_size=32, symmetric=False, weight_symmetric=False),
    "fp8": W8A8("fp8", tile_size=32, weight_tile=(16, 32)),
}


@pytest.mark.parametrize("scheme", BLOCKS)
@pytest.mark.parametrize(
    "equation, shape, weight, contracted",
    [
        ("btk,kn->btn", (2, 8, 64), (64, 32), (0,)),
        ("btk,khd->bthd", (2, 8, 64), (64, 4, 16), (0,)),
        ("bthd,hdf->btf", (2, 8, 4, 32), (4, 32, 32), (0, 1)),
    ],
)
def test_no_transpose_is_lowered_for_blocks(scheme, equation, shape, weight, contracted):
    w = BLOCKS[scheme].quantize_weight(jnp.ones(weight), contracted)
    traced = product(equation, BLOCKS[scheme]).trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16), w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "transpose" not in text
    assert re.findall("@(jax_qmm_\\w+)", text) == ["jax_qmm_quantize_dynamic", "jax_qmm_block_quantized_mm"]


@pytest.mark.parametrize(
    "scheme", [W4A8(32, symmetric=symmetric, activation_dtype="fp8") for symmetric in (True, False)]
)
@pytest.mark.parametrize(
    "equation, shape, weight, contracted",
    [
        ("btk,kn->btn", (2, 8, 64), (64, 32), (0,)),
        ("bthd,hdf->btf", (2, 8, 4, 16), (4, 16, 32), (0, 1)),
    ],
)
def test_int4_is_read_as_it_is_beside_float8(scheme, equation, shape, weight, contracted):
    w = scheme.quantize_weight(jnp.ones(weight), contracted)
    traced = product(equation, scheme).trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16), w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall("@(jax_qmm_\\w+)\\(.*backend_config", text) == [
        "jax_qmm_quantize_dynamic",
        "jax_qmm_block_scaled_mm",
    ]
    assert "transpose" not in text and "xi4>" not in text
    # x is widened and the result is rounded, and nothing else is converted.
    converted = re.findall(r"stablehlo.convert .*tensor<([\w]*)>\) -> tensor<([\w]*)>", text)
    assert sorted(converted) == [("2x8x32xf32", "2x8x32xbf16"), ("2x8x64xf8E4M3FN", "2x8x64xf16")]


# Compiled for an H200

OF_BLOCKS = {  # a scheme, and what multiplies
    "int8": (W8A8(tile_size=128), "block_quantized_mm"),
    "fp8, scales for 128 x 128": (W8A8("fp8", tile_size=128, weight_tile=(128, 128)), "block_quantized_mm"),
    "int4 beside int8": (W4A8(), "expanded_mm"),
    "int4 beside int8, zero points": (W4A8(symmetric=False), "expanded_mm"),
    "int4": (W4A16(), "block_scaled_mm"),
    "int8 beside floats": (W8A16(), "block_scaled_mm"),
}


def compile_for_h200():
    """Prints {name: optimized module} as JSON."""
    from conftest import h200_topology
    from jax.experimental.topologies import make_mesh

    sharding = NamedSharding(make_mesh(h200_topology(1), (1,), ("d",)), PartitionSpec())
    spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    modules = {}

    def add(name, equation, shape, weight, scheme):
        operands = jax.tree.map(spec, (jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.eval_shape(weight)))
        modules[name] = product(equation, scheme).lower(*operands).compile().as_text()

    for name, (equation, shape, make) in PRODUCTS.items():
        for scheme in SCHEMES:
            add(f"{name}, {scheme}", equation, shape, make, SCHEMES[scheme])
    for name, (scheme, _) in OF_BLOCKS.items():
        weight = functools.partial(scheme.quantize_weight, jnp.ones((512, 256)), (0,))
        add(name, "bk,kn->bn", (64, 512), weight, scheme)
    print(json.dumps(modules))


@pytest.fixture(scope="module")
def h200(optimized_modules):
    return optimized_modules(__file__)


def assert_is_calls_and_views(text, calls):
    assert re.findall(r'custom_call_target="jax_qmm_(\w+)"', text) == calls
    entry = re.search(r"^ENTRY .*?^}", text, re.S | re.M).group(0)
    operations = set(re.findall(r" ([a-z][\w-]*)\(", entry)) - {
        "parameter",
        "constant",
        "bitcast",
        "get-tuple-element",
        "custom-call",
    }
    assert operations == set()


@products
@schemes
def test_compiled_for_h200_are_two_calls_and_views(h200, name, scheme):
    assert_is_calls_and_views(h200[f"{name}, {scheme}"], ["quantize_dynamic", "scaled_mm"])


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_products_in_blocks_compiled_for_h200_are_calls_and_views(h200, name):
    """No kernel of XLA's prepares the scales at each call."""
    scheme, multiplies = OF_BLOCKS[name]
    quantizes = ["quantize_dynamic"] if multiplies != "block_scaled_mm" else []
    assert_is_calls_and_views(h200[name], [*quantizes, multiplies])


if __name__ == "__main__":
    compile_for_h200()
