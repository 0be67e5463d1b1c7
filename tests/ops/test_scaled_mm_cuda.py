"""The program for an NVIDIA GPU, seen without one: what is lowered, and what XLA makes of it for an H200."""

import ctypes
import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import _ffi

M, N, K, DEVICES = 512, 2048, 1024, 4
spec = jax.ShapeDtypeStruct


def mm(a, b, scale_a, scale_b, bias):
    return jax_qmm.scaled_mm(a, b, scale_a, scale_b, bias)


def stablehlo(f, *args):
    """The text of f for platform cuda, locations left out."""
    exported = export.export(
        jax.jit(f), platforms=["cuda"], disabled_checks=jax_qmm.export_disabled_checks()
    )(*args)
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
    return [
        (re.findall(r"tensor<(\S+?)>", operands), result, attributes)
        for attributes, operands, result in found
    ]


def test_lowers_to_one_call_in_row_major_order_without_transposes():
    text = stablehlo(mm, *int8_operands())
    ((operands, result, attributes),) = calls(text)
    assert operands == [
        "1x512x1024xi8",
        "1x2048x1024xi8",
        "1x512xf32",
        "1x2048xf32",
        "1x2048xbf16",
        "0x0xi32",
        "0x0xi32",
    ]
    assert result == "tensor<1x512x2048xbf16>"
    assert "fast_accum = false" in attributes
    # Minor to major, of a, b and the result, and of the five vectors.
    assert attributes.count("dense<[2, 1, 0]>") == 3 and attributes.count("dense<[1, 0]>") == 5
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


def test_zero_points_and_absent_operands():
    a, b, scale_a, scale_b, _ = int8_operands()
    vector, rows = spec((N,), jnp.int32), spec((M,), jnp.int32)
    ((operands, *_),) = calls(stablehlo(jax_qmm.scaled_mm_azp, a, b, scale_a, scale_b, vector))
    assert operands[4:] == ["0x0xf32", "1x2048xi32", "0x0xi32"]
    ((operands, *_),) = calls(
        stablehlo(jax_qmm.scaled_mm_azp_per_token, a, b, scale_a, scale_b, vector, rows)
    )
    assert operands[4:] == ["0x0xf32", "1x2048xi32", "1x512xi32"]
    raw = functools.partial(jax_qmm.scaled_mm, scale_a=1.0, scale_b=1.0, out_dtype=jnp.int32)
    ((operands, result, _),) = calls(stablehlo(raw, a, b))
    assert operands[2:] == ["0x0xf32"] * 3 + ["0x0xi32"] * 2 and result == "tensor<1x512x2048xi32>"


@pytest.mark.parametrize(
    "in_axes, want",
    [
        (
            (0, None, 0, None, None),
            ["1x2048x1024xi8", "1x2048x1024xi8", "1x2048xf32", "1x2048xf32", "1x2048xbf16"],
        ),
        (
            (0, None, None, None, None),
            ["1x2048x1024xi8", "1x2048x1024xi8", "1x2048xf32", "1x2048xf32", "1x2048xbf16"],
        ),
        (
            (0, 0, None, 0, None),
            ["4x512x1024xi8", "4x2048x1024xi8", "1x512xf32", "4x2048xf32", "1x2048xbf16"],
        ),
        (
            (None, 0, 0, None, 0),
            ["1x512x1024xi8", "4x2048x1024xi8", "4x512xf32", "1x2048xf32", "4x2048xbf16"],
        ),
        (
            (0, None, None, 0, None),
            ["4x512x1024xi8", "1x2048x1024xi8", "1x512xf32", "4x2048xf32", "1x2048xbf16"],
        ),
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


# Compiled for an H200, in a process with its own environment and maybe a stand-in for the extension.

H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""

STAND_IN = """
#include "xla/ffi/api/ffi.h"
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    StandIn, [](xla::ffi::RemainingArgs, xla::ffi::RemainingRets, xla::ffi::Dictionary) {
      return xla::ffi::Error::Success(); },
    xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(), {xla::ffi::Traits::kCmdBufferCompatible});
"""

SHARDED = {  # name: specs of a, b, scale_a, scale_b and bias
    "one device": [P()] * 5,
    "M": [P("d"), P(), P("d"), P(), P()],
    "N": [P(), P("d"), P(), P(None, "d"), P("d")],
    "K": [P(None, "d"), P(None, "d"), P(), P(), P()],
}


def compile_for_h200(folder):
    """Prints {name: optimized module} as JSON."""
    from jax.experimental import topologies

    if _ffi._load()[0] is None:  # XLA compiles a call only of a target that is registered
        library = os.path.join(folder, "stand_in.so")
        command = [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-shared",
            "-fPIC",
            "-w",
            f"-I{jax.ffi.include_dir()}",
            "-x",
            "c++",
            "-",
            "-o",
            library,
        ]
        subprocess.run(command, input=STAND_IN, text=True, check=True)
        for target in _ffi.TARGETS:
            jax.ffi.register_ffi_target(
                target, jax.ffi.pycapsule(ctypes.CDLL(library).StandIn), platform="CUDA"
            )
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{DEVICES}")
    modules = {}
    for name, shardings in SHARDED.items():
        mesh = topologies.make_mesh(topology, (DEVICES,), ("d",))
        if name == "one device":
            mesh = jax.sharding.Mesh(mesh.devices[:1], ("d",))
        for dtype in (jnp.int8, jnp.float8_e4m3fn):
            shapes = [
                spec(x.shape, dtype if x.dtype == jnp.int8 else x.dtype, sharding=NamedSharding(mesh, s))
                for x, s in zip(int8_operands(), shardings)
            ]
            modules[f"{name} {jnp.dtype(dtype)}"] = jax.jit(mm).lower(*shapes).compile().as_text()
    print(json.dumps(modules))


@pytest.fixture(scope="module")
def h200(tmp_path_factory):
    """The optimized modules by name."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the plugin jax-cuda13-plugin is not installed")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("h200"))],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
        "custom-call",
    }
    if name == "K":
        assert re.findall(r"= (\w+)\[\S+ all-reduce(?:-start)?\(", text) == [sums]
        operations -= {"all-reduce", "all-reduce-start", "all-reduce-done"}
        assert operations == {"fusion"} and entry.count(" fusion(") == 1
    else:
        assert operations == set()


if __name__ == "__main__":
    compile_for_h200(sys.argv[1])
