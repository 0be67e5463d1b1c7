"""What runs an op, and what is said where that is no kernel."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jax_qmm
from jax_qmm import _extension
from jax_qmm.ops import dispatch


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    monkeypatch.setattr(dispatch, "_noted", set())


def test_fallback_is_said_once():
    a = jnp.ones((2, 4), jnp.int8)
    with pytest.warns(UserWarning, match="scaled_mm runs on the pure-JAX reference.*platform cpu"):
        jax.jit(lambda a: jax_qmm.scaled_mm(a, a, 1.0, 1.0))(a)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda a: jax_qmm.scaled_mm(a, a, 2.0, 1.0))(a)


@pytest.mark.parametrize("jit", [False, True])
def test_fallback_points_at_the_users_line(jit):
    call = lambda x: jax_qmm.matmul(x, jax_qmm.quantize(x, axis=0))
    with pytest.warns(UserWarning, match="runs on the pure-JAX reference") as caught:
        (jax.jit(call) if jit else call)(jnp.ones((4, 4)))
    assert len(caught) >= 2 and {warning.filename for warning in caught} == {__file__}


def test_strict_makes_a_fallback_an_error(monkeypatch):
    monkeypatch.setenv("JAX_QMM_STRICT", "1")
    a = jnp.ones((2, 4), jnp.int8)
    with pytest.raises(RuntimeError, match="JAX_QMM_STRICT"):
        jax.jit(lambda a: jax_qmm.scaled_mm(a, a, 3.0, 1.0))(a)


@pytest.fixture
def asked(monkeypatch):
    """The devices that lowerings ask the op for."""
    asked = []
    monkeypatch.setattr(_extension, "fallback_reason", lambda platform, devices: asked.append(devices) or "a test")
    return asked


def test_a_program_asks_for_its_own_devices(asked):
    cpus = jax.devices("cpu")
    quantize = lambda x: jax_qmm.quantize(x).qvalue
    x = jnp.ones((8, 4))
    jax.jit(quantize).lower(jax.device_put(x, cpus[2]))
    jax.jit(quantize).lower(jax.device_put(x, NamedSharding(Mesh(cpus[4:], "d"), P("d"))))
    jax.jit(jax.shard_map(quantize, mesh=Mesh(cpus[:2], "d"), in_specs=P("d"), out_specs=P("d"))).lower(x)
    assert [set(devices) for devices in asked] == [{cpus[2]}, set(cpus[4:]), set(cpus[:2])]


def test_an_abstract_mesh_has_no_devices_to_ask_for(asked):
    mesh = Mesh(jax.devices("cpu"), "d")
    quantize = lambda x: jax_qmm.quantize(x).qvalue
    split = jax.shard_map(quantize, mesh=mesh.abstract_mesh, in_specs=P("d"), out_specs=P("d"))
    jax.jit(split).lower(jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("d"))))
    assert asked == [frozenset()]
