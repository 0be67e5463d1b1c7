import jax.numpy as jnp
import pytest

from jax_qmm.models import calibration


def test_batches_are_arguments():
    model = lambda *args, **kwargs: (args, kwargs)
    assert calibration.call(model, (1, 2), "first") == (("first", 1, 2), {})
    assert calibration.call(model, {"x": 1}) == ((), {"x": 1})
    assert calibration.call(model, [1, 2]) == (([1, 2],), {})


def test_the_relative_error_of_a_stack_is_that_of_all_its_layers():
    assert calibration.relative_error(*calibration.squares(jnp.ones(3), jnp.ones(3))) == 0
    assert calibration.relative_error(jnp.array([1.0, 0.0]), jnp.array([2.0, 2.0])) == 0.5
    assert calibration.relative_error(jnp.zeros(2), jnp.zeros(2)) == 0
    assert calibration.relative_error(jnp.ones(2), jnp.zeros(2)) == float("inf")


def test_ranges_are_checked():
    calibration.check_ranges({"a": (jnp.zeros(2), jnp.ones(2))})
    with pytest.raises(ValueError, match="inputs of a that are not finite"):
        calibration.check_ranges({"a": (jnp.zeros(()), jnp.float32(jnp.inf))})
    with pytest.raises(ValueError, match="no batch that reached a layer"):
        calibration.check_ranges({})
