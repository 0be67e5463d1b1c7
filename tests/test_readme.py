"""The Python of README.md and docs, run block by block as a reader would paste it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jax_qmm


def blocks(path):
    return re.findall(r"```python\n(.*?)```", Path(__file__).parents[1].joinpath(path).read_text(), re.DOTALL)


def test_the_blocks_run_one_after_the_other(capsys):
    names = {"__name__": "readme"}
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), names)
    error, *_ = capsys.readouterr().out.split()
    assert 0.005 < float(error) < 0.015  # "about 0.01"
    chained, exact = names["step"] * names["mlp"](names["a"]), names["exact"]
    assert 0.02 < jnp.linalg.norm(chained - exact) / jnp.linalg.norm(exact) < 0.04  # "about 0.03"
    assert names["y"].shape == (4, 64, 512) and names["gradient"].shape == (256, 512)


def test_a_split_has_a_filter_for_quantized_kernels():
    model, _ = jax_qmm.nnx.quantize_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), [jax_qmm.Rule("", jax_qmm.W8A8())])
    names = {"jax": jax, "nnx": nnx, "model": model, "x": jnp.ones((2, 8)), "loss": jnp.sum}
    (block,) = (block for block in blocks("docs/models.md") if "nnx.split" in block)
    exec(compile(block, "docs/models.md", "exec"), names)
    assert names["gradients"]["bias"][...].tolist() == [2.0] * 4
