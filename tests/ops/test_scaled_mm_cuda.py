"""The program for an NVIDIA GPU, seen without one: what is lowered, and what XLA makes of it for an H200."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jax_qmm

M, N, K, DEVICES = 512, 2048, 1024, 4
spec = jax.ShapeDtypeStruct


def mm(a, b, scale_a, scale_b, bias):
    return jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias)


def stablehlo(f, *args):
    """The text of f for platform cuda, locations left out."""
    exported = export.export(jax.jit(f), platforms=["cuda"], disabled_checks=jax_qmm.export_disabled_checks())(*args)
    return exported.mlir_module()


def int8_operands(m=M, lead=()):
    return (
        spec((*lead, m, K), jnp.int8),
        spec((N, K), jnp.int8),
        spec((*lead, m, 1), jnp.float32),
        spec((1, N), jnp.float32),
        spec((N,), jnp.bfloat16),
    )


def calls(text):
    """(operand types, result type, attributes) of each custom call of the kernel."""
    found = re.findall(r"custom_call @jax_qmm_scaled_mm\(.*?\) (\{.*\}) : \((.*)\) -> (\S+)", text)
    return [(re.findall(r"tensor<(\S+?)>", operands), result, attributes) for attributes, operands, result in found]


def test_lowers_to_one_call_in_row_major_order_without_transposes():
    text = stablehlo(mm, *int8_operands())
    ((operands, result, attributes),) = calls(text)
    assert operands == ["1x512x1024xi8", "1x2048x1024xi8", "1x512xf32", "1x2048xf32", "1x2048xbf16"]
    assert result == "tensor<1x512x2048xbf16>"
    assert "fast_accum = false" in attributes and 'names = "scale_a scale_b bias"' in attributes
    # Minor to major, of a, b and the result, and of the three vectors.
    assert attributes.count("dense<[2, 1, 0]>") == 3 and attributes.count("dense<[1, 0]>") == 3
    assert "stablehlo.transpose" not in text and "stablehlo.dot_general" not in text


@pytest.mark.parametrize(
    "precision, fast",
    [(None, "true"), ("high", "true"), ("highest", "false"), (jax.lax.Precision.HIGHEST, "false")],
)
def test_precision_chooses_the_accumulation_of_float8(precision, fast):
    a, b = spec((M, K), jnp.float8_e4m3fn), spec((N, K), jnp.float8_e4m3fn)
    ((operands, _, attributes),) = calls(
        stablehlo(lambda a, b: jax_qmm.scaled_mm(a, b, 0.5, 0.5, precision=precision), a, b)
    )
    assert f"fast_accum = {fast}" in attributes
    assert operands[:4] == ["1x512x1024xf8E4M3FN", "1x2048x1024xf8E4M3FN", "1x1xf32", "1x1xf32"]


def test_the_default_precision_counts():
    a, b = spec((M, K), jnp.float8_e4m3fn), spec((N, K), jnp.float8_e4m3fn)
    with jax.default_matmul_precision("highest"):
        ((_, _, attributes),) = calls(stablehlo(lambda a, b: jax_qmm.scaled_mm(a, b, 0.5, 0.5), a, b))
    assert "fast_accum = false" in attributes


def test_vectors_are_named_and_absent_ones_are_no_operands():
    a, b, scale_a, scale_b, bias = int8_operands()
    adj, azp = spec((N,), jnp.int32), spec((M,), jnp.int32)

    def vectors(f, *args):
        ((operands, _, attributes),) = calls(stablehlo(f, *args))
        return dict(zip(re.search(r'names = "(.*?)"', attributes)[1].split(), operands[2:], strict=True))

    scales = {"scale_a": "1x512xf32", "scale_b": "1x2048xf32"}
    assert vectors(jax_qmm.scaled_mm, a, b, scale_a, scale_b) == scales
    assert vectors(jax_qmm.scaled_mm_azp, a, b, scale_a, scale_b, adj) == scales | {"azp_adj": "1x2048xi32"}
    assert vectors(jax_qmm.scaled_mm_azp_per_token, a, b, scale_a, scale_b, adj, azp, bias) == scales | {
        "azp_adj": "1x2048xi32",
        "azp": "1x512xi32",
        "bias": "1x2048xbf16",
    }
    raw = functools.partial(jax_qmm.scaled_mm, scale_a=1.0, scale_b=1.0, out_dtype=jnp.int32)
    assert vectors(raw, a, b) == {}


@pytest.mark.parametrize(
    "in_axes, want",
    [
        ((0, None, 0, None, None), ["1x2048x1024xi8", "1x2048x1024xi8", "1x2048xf32", "1x2048xf32", "1x2048xbf16"]),
        ((0, None, None, None, None), ["1x2048x1024xi8", "1x2048x1024xi8", "1x2048xf32", "1x2048xf32", "1x2048xbf16"]),
        ((0, 0, None, 0, None), ["4x512x1024xi8", "4x2048x1024xi8", "1x512xf32", "4x2048xf32", "1x2048xbf16"]),
        ((None, 0, 0, None, 0), ["1x512x1024xi8", "4x2048x1024xi8", "4x512xf32", "1x2048xf32", "4x2048xbf16"]),
        ((0, None, None, 0, None), ["4x512x1024xi8", "1x2048x1024xi8", "1x512xf32", "4x2048xf32", "1x2048xbf16"]),
    ],
)
def test_vmap_makes_one_call(in_axes, want):
    args = [spec((4, *x.shape), x.dtype) if axis == 0 else x for x, axis in zip(int8_operands(), in_axes)]
    text = stablehlo(jax.vmap(mm, in_axes), *args)
    ((operands, *_),) = calls(text)
    assert operands[:5] == want and "stablehlo.transpose" not in text


def test_symbolic_rows_stay_symbolic():
    (m,) = export.symbolic_shape("m")
    text = stablehlo(mm, *int8_operands(m, lead=(3,)))
    ((operands, result, _),) = calls(text)
    assert operands[0] == "1x?x1024xi8" and result == "tensor<1x?x2048xbf16>"


def test_several_platforms_get_the_kernel_or_the_reference():
    exported = export.export(
        jax.jit(mm), platforms=["cpu", "tpu", "cuda"], disabled_checks=jax_qmm.export_disabled_checks()
    )(*int8_operands(8))
    text = exported.mlir_module()
    assert len(calls(text)) == 1 and text.count("stablehlo.dot_general") == 2
    rng = np.random.default_rng(0)
    args = [rng.integers(-9, 9, x.shape).astype(x.dtype) for x in int8_operands(8)]
    np.testing.assert_array_equal(exported.call(*args), mm(*args))


def test_export_refuses_the_custom_call_without_the_disabled_checks():
    with pytest.raises(ValueError, match="jax_qmm_scaled_mm"):
        export.export(jax.jit(mm), platforms=["cuda"])(*int8_operands())


# Compiled for an H200

SHARDED = {  # name: specs of a, b, scale_a, scale_b and bias
    "one device": [P()] * 5,
    "M": [P("d"), P(), P("d"), P(), P()],
    "N": [P(), P("d"), P(), P(None, "d"), P("d")],
    "K": [P(None, "d"), P(None, "d"), P(), P(), P()],
}


def compile_for_h200():
    """Prints {name: optimized module} as JSON."""
    from conftest import sharded_modules

    modules = {}
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        operands = [spec(x.shape, dtype if x.dtype == jnp.int8 else x.dtype) for x in int8_operands()]
        found = sharded_modules(mm, operands, SHARDED, DEVICES)
        modules |= {f"{name} {jnp.dtype(dtype)}": text for name, text in found.items()}
    print(json.dumps(modules))


@pytest.fixture(scope="module")
def h200(optimized_modules):
    return optimized_modules(__file__)


@pytest.mark.parametrize("dtype, sums", [("int8", "s32"), ("float8_e4m3fn", "f32")])
@pytest.mark.parametrize("name", SHARDED)
def test_compiled_for_h200(h200, name, dtype, sums):
    text = h200[f"{name} {dtype}"]
    entry = re.search(r"^ENTRY .*?^}", text, re.S | re.M).group(0)
    targets = re.findall(r'custom_call_target="(\w+)"', text)
    assert targets == ["jax_qmm_scaled_mm"]
    # Nothing around it but views, constants and, over K, the all-reduce and one fused epilogue.
    operations = set(re.findall(r"= \S+ ([\w-]+)\(", entry)) - {
        "parameter",
        "constant",
        "bitcast",
        "get-tuple-element",
        "custom-call",
    }
    if name == "K":
        assert re.findall(r"= \(*(\w+)\[.*? all-reduce(?:-start)?\(", text) == [sums]
        operations -= {"all-reduce", "all-reduce-start", "all-reduce-done"}
        assert operations == {"fusion"} and entry.count(" fusion(") == 1
    else:
        assert operations == set()


if __name__ == "__main__":
    compile_for_h200()
