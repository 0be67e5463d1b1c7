import jax.numpy as jnp
import pytest

import jax_qmm
from jax_qmm.dtypes import check_qtype


@pytest.mark.parametrize("name", ["fp8", "float8", "e4m3", "float8_e4m3fn", jnp.float8_e4m3fn])
def test_names_for_float8(name):
    assert check_qtype("qtype", name) == jnp.float8_e4m3fn
    assert jax_qmm.W8A8(name) == jax_qmm.W8A8(jnp.float8_e4m3fn)


@pytest.mark.parametrize("name", ["fp4", "int4", None, 8, jnp.float8_e5m2])
def test_other_dtypes_are_refused(name):
    with pytest.raises(TypeError, match="qtype is .*, needs int8 or float8_e4m3fn"):
        check_qtype("qtype", name)
