"""The programs that XLA compiles for an H200 from products with packed weights, compiled without one."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_qmm

LAYERS, ROWS, SIZE = 16, 2048, 4096


def compile_for_h200():
    """Prints the bytes of temporaries of the gradient of LAYERS layers as JSON, {weights: bytes}."""
    from conftest import h200_topology
    from jax.experimental.topologies import make_mesh

    sharding = NamedSharding(make_mesh(h200_topology(1), (1,), ("d",)), PartitionSpec())
    spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def loss(x, ws):
        for w in ws:
            if isinstance(w, jax_qmm.QArray):
                x = jax_qmm.block_scaled_mm(x, w)
            else:
                x = x @ w.T
            x = jax.nn.relu(x)
        return x.astype(jnp.float32).sum()

    dense = lambda: jnp.ones((SIZE, SIZE))
    weights = {
        "bfloat16": lambda: dense().astype(jnp.bfloat16),
        "int4": lambda: jax_qmm.quantize(dense(), jnp.int4, tile_size=128).pack(),
        "int8": lambda: jax_qmm.quantize(dense(), jnp.int8, tile_size=128).pack(),
    }
    temporaries = {}
    for name, make in weights.items():
        operands = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.bfloat16), [jax.eval_shape(make)] * LAYERS
        compiled = jax.jit(jax.grad(loss)).lower(*jax.tree.map(spec, operands)).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        temporaries[name] = analysis.temp_size_in_bytes
    print(json.dumps(temporaries))


@pytest.fixture(scope="module")
def temporaries(run_for_h200):
    return json.loads(run_for_h200(__file__).splitlines()[-1])


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_gradient_dequantizes_one_weight_at_a_time(temporaries, weights):
    assert temporaries["bfloat16"] >= LAYERS * ROWS * SIZE * 2  # results of all layers
    assert temporaries[weights] <= temporaries["bfloat16"] + 3 * SIZE * SIZE * 2


if __name__ == "__main__":
    compile_for_h200()
