"""Sharded programs on two GPUs: bit for bit what one gives, with the collectives that the CPU's programs have."""

import concurrent.futures
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jax_qmm

pytestmark = pytest.mark.gpu(not_emulated="there is one CPU that plays a GPU")

M, N, K = 130, 192, 1024
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    if jax.device_count("gpu") < 2:
        pytest.skip("there is one GPU")


def make_mesh(platform, shape=(2,), names=("x",), kind=AxisType.Auto):
    return Mesh(np.array(jax.devices(platform)[:2]).reshape(shape), names, axis_types=(kind,) * len(names))


def int8(*shape, seed=0):
    return np.random.default_rng(seed).integers(-128, 128, shape, np.int8)


def of_rows(x):
    return np.random.default_rng(7).uniform(0.5, 2, x.shape[:-1]).astype("f") / 10000


def product(a, b, scale_a, scale_b):
    return jax_qmm.scaled_mm(a, b, scale_a, scale_b, activation="relu")


def weights(x, q, scale):
    return jax_qmm.block_scaled_mm(x, jax_qmm.QArray(q, scale, qtype="int8", tile_size=128).pack())


def convolution(lhs, rhs, scale):
    lhs = jax_qmm.QArray(lhs, jnp.full((1, 1, 1, 1), 0.01), jnp.full((1, 1, 1, 1), 3))
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))
    return jax_qmm.conv_general_dilated(lhs, jax_qmm.QArray(rhs, scale.reshape(-1, 1, 1, 1)), **options)


A, B = int8(M, K), int8(N, K, seed=1)
X = np.clip(int8(M, K, seed=2), -8, 8).astype(jnp.bfloat16)
IMAGES, TAPS = int8(4, 9, 7, 32), int8(48, 3, 3, 32, seed=3)
SCALES = np.float32(2.0) ** -np.random.default_rng(4).integers(8, 12, (N, K // 128)).astype("f")
PRODUCT, WEIGHTS, CONV = (A, B, of_rows(A), of_rows(B)), (X, B, SCALES), (IMAGES, TAPS, of_rows(TAPS[:, 0, 0]))
FLOAT8 = tuple(np.clip(x, -8, 8).astype(jnp.float8_e4m3fn) for x in (A, B))
BATCHED = (A.reshape(2, M // 2, K), *PRODUCT[1:2], of_rows(A).reshape(2, -1), PRODUCT[3])

# What is computed, how its operands and the result are sharded. Sums of floats are exact too: of whole numbers below
# 2**24, in units of the least scale.
CASES = {
    "product, M": (product, PRODUCT, (P("x"), P(), P("x"), P()), P("x")),
    "product, N": (product, PRODUCT, (P(), P("x"), P(), P("x")), P(None, "x")),
    "product, K": (product, PRODUCT, (P(None, "x"), P(None, "x"), P(), P()), P(None, None)),
    "product, batch": (product, BATCHED, (P("x"), P(), P("x"), P()), P("x")),
    "float8, N": (product, (*FLOAT8, *PRODUCT[2:]), (P(), P("x"), P(), P("x")), P(None, "x")),
    "float8, K": (product, (*FLOAT8, *PRODUCT[2:]), (P(None, "x"), P(None, "x"), P(), P()), P(None, None)),
    "weights, M": (weights, WEIGHTS, (P("x"), P(), P()), P("x")),
    "weights, N": (weights, WEIGHTS, (P(), P("x"), P("x")), P(None, "x")),
    "weights, K": (weights, WEIGHTS, (P(None, "x"), P(None, "x"), P(None, "x")), P(None, None)),
    "convolution, images": (convolution, CONV, (P("x"), P(), P()), P("x")),
    "convolution, outputs": (convolution, CONV, (P(), P("x"), P("x")), P(None, None, None, "x")),
}


def put(mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]


def compiled_on(mesh, f, operands, specs, out):
    with jax.set_mesh(mesh):
        args = put(mesh, operands, specs)
        compiled = jax.jit(f, out_shardings=NamedSharding(mesh, out)).lower(*args).compile()
        return compiled, compiled(*args)


def on_one(f, operands, device=0):
    return np.asarray(jax.jit(f)(*jax.device_put(operands, jax.devices("gpu")[device])))


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_give_what_one_gives(monkeypatch, name):
    f, operands, specs, out = CASES[name]
    cpu, _ = compiled_on(make_mesh("cpu"), f, operands, specs, out)
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    gpu, got = compiled_on(make_mesh("gpu"), f, operands, specs, out)
    assert re.findall(COLLECTIVES, gpu.as_text()) == re.findall(COLLECTIVES, cpu.as_text())
    assert len(got.sharding.device_set) == 2
    for _ in range(3):  # the first run makes no graph, the second does, the third changes it
        np.testing.assert_array_equal(gpu(*put(make_mesh("gpu"), operands, specs)), got)
    np.testing.assert_array_equal(got, on_one(f, operands))


@pytest.mark.parametrize("name", ["product, M", "product, N", "weights, M"])
def test_explicit_axes(name):
    f, operands, specs, out = CASES[name]
    mesh = make_mesh("gpu", kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        got = jax.jit(f)(*put(mesh, operands, specs))
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), got.ndim)
    np.testing.assert_array_equal(got, on_one(f, operands))


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}])
@pytest.mark.parametrize("name", ["product, M", "product, N", "weights, N", "convolution, images"])
def test_shard_map(name, manual):
    f, operands, specs, out = CASES[name]
    mesh = make_mesh("gpu", (2, 1), ("x", "y"))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(f, in_specs=specs, out_specs=out, axis_names=manual)
        got = jax.jit(mapped)(*put(mesh, operands, specs))
    np.testing.assert_array_equal(got, on_one(f, operands))


def test_several_layers_reduce_in_one_program():
    """Columns and rows in turn, as tensor parallelism has them, quantized between."""
    up, down = int8(N, K, seed=5), int8(K, N, seed=6)

    def layers(x, up, down):
        for _ in range(3):
            q = jax_qmm.quantize(x)
            y = jax_qmm.scaled_mm(q.qvalue, up, q.scale, 0.001)
            q = jax_qmm.quantize(y, axis=None)  # one scale: of all devices
            x = jax_qmm.scaled_mm(q.qvalue, down, q.scale, 0.001)
        return x

    operands, specs = (X, up, down), (P(), P("x"), P(None, "x"))
    compiled, got = compiled_on(make_mesh("gpu"), layers, operands, specs, P(None, None))
    assert "all-gather" not in compiled.as_text()
    mesh = make_mesh("gpu")
    for _ in range(3):
        np.testing.assert_array_equal(compiled(*put(mesh, operands, specs)), got)
    np.testing.assert_array_equal(got, on_one(layers, operands))


@pytest.mark.parametrize("name", ["product, M", "weights, M", "convolution, images"])
def test_the_second_gpu_alone(name):
    f, operands, *_ = CASES[name]
    with jax.default_device(jax.devices("gpu")[1]):
        got = jax.jit(f)(*operands)
    assert got.device == jax.devices("gpu")[1]
    np.testing.assert_array_equal(got, on_one(f, operands))


def test_both_gpus_at_once_with_programs_of_their_own():
    names = ["product, M", "weights, M", "convolution, images"]
    alone = {name: on_one(*CASES[name][:2]) for name in names}

    def repeat(device, names):
        return [(name, on_one(*CASES[name][:2], device)) for _ in range(10) for name in names]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [*pool.map(repeat, (0, 1), (names, names[::-1]))]
    for name, got in (pair for each in found for pair in each):
        np.testing.assert_array_equal(got, alone[name])


def test_exported_programs():
    """Of shard_map: JAX cannot serialize the partitioning of custom calls."""
    mesh = make_mesh("gpu")
    f, operands, specs, out = CASES["product, M"]
    args = put(mesh, operands, specs)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))
    exported = jax.export.export(mapped, platforms=["cuda"], disabled_checks=jax_qmm.export_disabled_checks())(*args)
    assert exported.nr_devices == 2
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(*args), on_one(f, operands))
