"""The workspace of kernels that split K over blocks: a result of the custom call where its kernel needs one.

Of `scaled_mm`, and of `expanded_mm`, whose blocks may share tiles.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops.expanded_mm import expanded_mm

spec = jax.ShapeDtypeStruct
A, B = spec((16, 4096), jnp.int8), spec((64, 4096), jnp.int8)


def mm(a, b):
    return jax_qmm.scaled_mm(a, b, 0.5, 0.25)


def result_types(text, op="scaled_mm"):
    """Of the one custom call of the kernel."""
    ((line),) = re.findall(rf"custom_call @jax_qmm_{op}\(.*", text)
    return re.findall(r"tensor<(\S+?)>", line.partition(" -> ")[2])


@pytest.fixture
def asked(monkeypatch):
    """Lowers as for a GPU whose kernels need 96 bytes of workspace; what they are asked for."""
    products = []

    def workspace(devices, *product):
        products.append(product)
        return 96

    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    monkeypatch.setattr(_extension, "scaled_mm_workspace", workspace)
    return products


def test_a_call_has_a_workspace_where_its_kernel_needs_one(asked, monkeypatch):
    assert result_types(jax.jit(mm).lower(A, B).as_text()) == ["1x16x64xbf16", "96xui8"]
    assert asked == [(16, 64, 4096, 1, jnp.int8, jnp.bfloat16, False, False)]
    monkeypatch.setattr(_extension, "scaled_mm_workspace", lambda *product: 0)
    assert result_types(jax.jit(lambda *x: mm(*x)).lower(A, B).as_text()) == ["1x16x64xbf16"]


def test_an_activation_and_zero_points_of_b_need_the_full_epilogue(asked):
    jax.jit(lambda a, b: jax_qmm.scaled_mm(a, b, 0.5, 0.25, activation="relu")).lower(A, B)
    assert asked[-1][-1] is True


def test_a_batch_has_the_workspace_of_its_one_call(asked):
    a, b = (spec((3, *x.shape), x.dtype) for x in (A, B))
    assert result_types(jax.jit(jax.vmap(mm)).lower(a, b).as_text()) == ["3x16x64xbf16", "96xui8"]
    jax.jit(jax.vmap(mm, (0, None))).lower(a, B)
    assert [product[:4] for product in asked] == [(16, 64, 4096, 3), (48, 64, 4096, 1)]


def test_an_export_has_none(asked):
    """It may run on another machine, where the kernels need another one."""
    exported = export.export(jax.jit(mm), disabled_checks=jax_qmm.export_disabled_checks())(A, B)
    assert result_types(exported.mlir_module()) == ["1x16x64xbf16"] and not asked


def test_symbolic_shapes_have_none(asked):
    (m,) = export.symbolic_shape("m")
    a = spec((m, 4096), jnp.int8)
    exported = export.export(jax.jit(mm), disabled_checks=jax_qmm.export_disabled_checks())(a, B)
    assert result_types(exported.mlir_module()) == ["1x?x64xbf16"] and not asked


def test_only_the_gpus_of_the_program_are_asked(monkeypatch):
    """And the one that needs the most decides."""

    class Kernels:
        class Gpu:
            of_device = staticmethod(lambda ordinal: ordinal)

        class ScaledMmProblem:
            def __init__(self, *product):
                pass

            def workspace(self, gpu):
                return 100 * gpu

    gpus = [type("Gpu", (), {"local_hardware_id": i})() for i in range(4)]
    monkeypatch.setattr(_extension, "_load", lambda: (Kernels, None))
    monkeypatch.setattr(_extension, "_fit_gpus", lambda kernels: gpus[:3])
    product = (16, 64, 4096, 1, jnp.int8, jnp.bfloat16, False, False)
    assert _extension.scaled_mm_workspace(gpus, *product) == 200
    assert _extension.scaled_mm_workspace(gpus[:2], *product) == 100
    assert _extension.scaled_mm_workspace(gpus[3:], *product) == 0


@pytest.mark.parametrize(("block", "as_asked"), [(128, 128), (2**20, 4096)])
def test_a_call_of_expanded_mm_has_one_where_its_kernel_needs_it(monkeypatch, block, as_asked):
    asked = []
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    monkeypatch.setattr(_extension, "expanded_mm_workspace", lambda devices, product: asked.append(product) or 96)
    operands = A, spec(B.shape, jnp.int4), spec((64, -(-4096 // block)), jnp.int8)
    run = jax.jit(lambda *leaves: expanded_mm(*leaves, block=block, out_dtype=jnp.bfloat16))
    assert result_types(run.lower(*operands).as_text(), "expanded_mm") == ["1x16x64xbf16", "96xui8"]
    assert asked == [(16, 64, 4096, 1, "bfloat16", as_asked)]
    monkeypatch.setattr(_extension, "expanded_mm_workspace", lambda *product: 0)
    run.clear_cache()
    assert result_types(run.lower(*operands).as_text(), "expanded_mm") == ["1x16x64xbf16"]


@pytest.mark.gpu
def test_each_device_of_a_mesh_has_the_workspace_of_its_part(extension, gpu, oracle, emulated, monkeypatch):
    if not emulated:
        pytest.skip("the emulator stands for several GPUs")
    key = (16, 64, 4096, 1, "int8", "bfloat16", False)
    problem = extension.ScaledMmProblem(*key)
    for choice in problem.choices(gpu):
        problem.tune(choice, gpu)
        if problem.workspace(gpu):
            break
    else:
        pytest.skip("this GPU has no kernel that splits K through memory")
    asked = []
    workspace = _extension.scaled_mm_workspace
    monkeypatch.setattr(
        _extension, "scaled_mm_workspace", lambda *where: asked.append((where[1:4], workspace(*where))) or asked[-1][1]
    )
    mesh = jax.make_mesh((2,), ("n",))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((16, 4096), (128, 4096)))
    a = jax.device_put(a, NamedSharding(mesh, P()))
    b = jax.device_put(b, NamedSharding(mesh, P("n")))
    got = np.asarray(jax.jit(mm)(a, b))
    want = oracle.scaled_mm(np.asarray(a), np.asarray(b), np.float32(0.5), np.float32(0.25), out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got.view("u2"), want.view("u2"))
    assert asked[-1] == ((16, 64, 4096), problem.workspace(gpu))
