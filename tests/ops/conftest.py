"""What the tests of the ops share: scaled_mm in numpy, and compiling for an H200 without one."""

import ctypes
import functools
import json
import os
import re
import subprocess
import tempfile
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops import dispatch

# What scaled_mm computes: exact sums, then each float32 step rounded once


@pytest.fixture(scope="session")
def oracle():
    """scaled_mm and its steps."""
    return types.SimpleNamespace(scaled_mm=scaled_mm, sums=sums, epilogue=epilogue, activated=activated, fma=fma)


def scaled_mm(a, b, *args, **kwargs):
    return epilogue(sums(a, b), *args, **kwargs)


def sums(a, b):
    """`a @ b.T`: int32 with wrap-around for int8, float64 for float8."""
    acc = a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)  # exact below 2**53
    return acc.astype(np.int64).astype(np.int32) if a.dtype == np.int8 else acc


def epilogue(
    acc,
    scale_a,
    scale_b,
    bias=None,
    *,
    azp=1,
    azp_adj=0,
    sums_a=0,
    azp_b=0,
    residual=None,
    activation=None,
    out_scale=None,
    out_zero_point=0,
    out_dtype=np.float32,
):
    """Takes scale_a, azp and sums_a as `()` or `(..., M)`, scale_b, bias, azp_adj and azp_b as `()` or `(N,)`; a
    residual as floats, or as a scale and integers."""
    column = lambda v: np.asarray(v)[..., None]
    with np.errstate(all="ignore"):
        if acc.dtype == np.int32:
            correction = column(azp).astype(np.int64) * np.asarray(azp_adj)
            correction = correction + column(sums_a).astype(np.int64) * np.asarray(azp_b)
            acc = (acc - correction).astype(np.int32)
        out = np.asarray(scale_b, np.float32) * acc.astype(np.float32)
        scale_a = column(scale_a).astype(np.float32)
        out = scale_a * out if bias is None else fma(scale_a, out, bias)
        if residual is not None:
            scale, values = residual if isinstance(residual, tuple) else (None, residual)
            values = values.astype(np.float32)
            out = out + values if scale is None else fma(np.float32(scale), values, out)
        out = activated(out, activation)
        return out.astype(out_dtype) if out_scale is None else quantized(out, out_scale, out_zero_point, out_dtype)


def activated(y, activation):
    """gelu and silu of float32 in float64, rounded once: near what scaled_mm gives, and clamps exactly."""
    if activation is None:
        return y
    low, high = {"relu": (0, np.inf), "relu6": (0, 6), "gelu": (0, 0), "silu": (0, 0)}.get(activation, activation)
    if not isinstance(activation, str) or activation.startswith("relu"):
        return np.where(y <= np.float32(low), np.float32(low), np.where(y > np.float32(high), np.float32(high), y))
    y = y.astype(np.float64)
    gelu = activation == "gelu"
    return (0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3) if gelu else y / 2))).astype(np.float32)


def quantized(y, scale, zero_point, dtype):
    """8 bits of float32: NaN becomes 0 in int8."""
    scaled = (y / np.float32(scale)).astype(np.float32)
    if dtype != np.int8:
        return np.clip(scaled, -448, 448).astype(dtype)
    return np.nan_to_num(np.clip(np.rint(scaled).astype(np.float64) + zero_point, -128, 127)).astype(np.int8)


def fma(x, y, z):
    """`x * y + z` of float32, rounded once: the float64 sum is rounded to odd before it goes to float32."""
    x, y, z = (np.asarray(v, np.float32).astype(np.float64) for v in (x, y, z))
    with np.errstate(all="ignore"):
        product = x * y
        total = product + z
        part = total - product
        rest = (product - (total - part)) + (z - part)
        toward = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
        even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
        return np.where((rest != 0) & np.isfinite(rest) & even, toward, total).astype(np.float32)


# Compiling for an H200, in a process with its own environment and maybe a stand-in for the extension

H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
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


@functools.cache
def h200_topology(devices):
    """H200s to compile for; without the extension stand-ins are registered for its targets."""
    from jax.experimental import topologies

    if _extension._load()[0] is None:  # XLA compiles a call only of a target that is registered
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "stand_in.so")
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
            stand_in = jax.ffi.pycapsule(ctypes.CDLL(library).StandIn)
        for target in dispatch.targets():
            jax.ffi.register_ffi_target(target, stand_in, platform="CUDA")
    return topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{devices}")


def sharded_modules(f, operands, sharded, devices):
    """{name: the module that XLA makes of `f` for H200s}: operands are sharded over a mesh axis "d" of so many as
    `sharded` says by name, which has their specs, and "one device" has one."""
    from jax.experimental.topologies import make_mesh

    topology = h200_topology(devices)
    modules = {}
    for name, specs in sharded.items():
        mesh = make_mesh(topology, (devices,), ("d",))
        if name == "one device":
            mesh = jax.sharding.Mesh(mesh.devices[:1], ("d",))
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
            for x, spec in zip(operands, specs)
        ]
        modules[name] = jax.jit(f).lower(*shapes).compile().as_text()
    return modules


@pytest.fixture(scope="session")
def optimized_modules(run_for_h200):
    """Runs a test file as a script, which prints {name: optimized module} as JSON."""
    return lambda file: json.loads(run_for_h200(file).splitlines()[-1])


@pytest.fixture
def sharded_matmul():
    """Runs `x @ w` by a scheme, tokens sharded over "x", and w over "y" by K or by its columns."""

    def run(scheme, mesh_shape, kind, k, x, w):
        """The result, and the dtypes of the program's all-reduces, beside which it has no all-gather."""
        mesh = Mesh(np.array(jax.devices("cpu")).reshape(mesh_shape), ("x", "y"), axis_types=(kind,) * 2)
        n = None if k else "y"
        f = lambda x, w, **options: jax_qmm.matmul(x, w, scheme=scheme, **options)
        place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
        with jax.set_mesh(mesh):
            placed = jax.tree.map(lambda leaf: place(leaf, n, None if leaf.shape[1] == 1 else k), w)
            options = {"out_sharding": PartitionSpec("x", n)} if kind == AxisType.Explicit and k else {}
            args = place(x, "x", k), placed
            compiled = jax.jit(lambda x, w: f(x, w, **options)).lower(*args).compile()
            got = compiled(*args)
        assert "all-gather" not in compiled.as_text()
        return got, sorted(re.findall(r"= (\w+)\[.* all-reduce\(", compiled.as_text()))

    return run
