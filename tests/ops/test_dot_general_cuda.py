"""What products with QArrays become for CUDA: two custom calls and nothing that moves data around them."""

import ctypes
import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_qmm
from jax_qmm import W8A8, _ffi


def kernel(*shape, contracted):
    """A weight as quantize_model stores it: contracted axes last, their sums at hand."""
    order = [axis for axis in range(len(shape)) if axis not in contracted] + list(contracted)
    last = tuple(range(len(shape) - len(contracted), len(shape)))
    q = jax_qmm.quantize(jnp.ones([shape[axis] for axis in order]), axis=last)
    return q.transpose([order.index(axis) for axis in range(len(shape))]).with_azp_adj(contracted)


PRODUCTS = {  # equation, shape of x, weight
    "linear": ("btk,kn->btn", (2, 8, 64), lambda: kernel(64, 32, contracted=(0,))),
    "query": ("btk,khd->bthd", (2, 8, 64), lambda: kernel(64, 4, 8, contracted=(0,))),
    "attention output": ("bthd,hdf->btf", (2, 8, 4, 16), lambda: kernel(4, 16, 32, contracted=(0, 1))),
    "experts": ("ebk,ekn->ebn", (2, 8, 64), lambda: kernel(2, 64, 32, contracted=(1,))),
    "same tokens for all experts": ("bk,ekn->ebn", (8, 64), lambda: kernel(2, 64, 32, contracted=(1,))),
    "weight first": ("kn,bk->nb", (8, 64), lambda: kernel(64, 32, contracted=(0,))),
    "one token": ("kn,k->n", (64,), lambda: kernel(64, 32, contracted=(0,))),
}
SCHEMES = {"symmetric": W8A8(), "asymmetric": W8A8(symmetric=False)}
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
    text = product(equation, SCHEMES[scheme]).trace(jax.ShapeDtypeStruct(shape, jnp.bfloat16), make()).lower(
        lowering_platforms=("cuda",)).as_text()
    assert "transpose" not in text
    assert re.findall("@(jax_qmm_\\w+)", text) == ["jax_qmm_quantize_dynamic", "jax_qmm_scaled_mm"]


# Compiled for an H200, in a process of its own as in test_scaled_mm_cuda.py.


def compile_for_h200(folder):
    """Prints {name: optimized module} as JSON."""
    from jax.experimental import topologies
    from test_scaled_mm_cuda import H200, STAND_IN

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
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("d",)), PartitionSpec())
    spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    modules = {}
    for name, (equation, shape, make) in PRODUCTS.items():
        operands = jax.tree.map(spec, (jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.eval_shape(make)))
        for scheme in SCHEMES:
            modules[f"{name}, {scheme}"] = (
                product(equation, SCHEMES[scheme]).lower(*operands).compile().as_text()
            )
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


@products
@schemes
def test_compiled_for_h200_are_two_calls_and_views(h200, name, scheme):
    text = h200[f"{name}, {scheme}"]
    assert re.findall(r'custom_call_target="(\w+)"', text) == [
        "jax_qmm_quantize_dynamic",
        "jax_qmm_scaled_mm",
    ]
    entry = re.search(r"^ENTRY .*?^}", text, re.S | re.M).group(0)
    operations = set(re.findall(r" ([a-z][\w-]*)\(", entry)) - {
        "parameter", "constant", "bitcast", "get-tuple-element", "custom-call"}
    assert operations == set()


if __name__ == "__main__":
    compile_for_h200(sys.argv[1])
