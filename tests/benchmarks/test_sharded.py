"""Tensor-parallel layers are measured with their parts; times are those of the fixture."""

import csv
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jax_qmm.bench import measure, shapes

SMALL = {"up": (256, 128, "N"), "down": (128, 256, "K")}


@pytest.fixture(scope="module")
def sharded(load_script):
    return load_script("benchmarks/sharded.py")


def test_lines_have_the_parts_of_a_layer(run_main, capsys):
    # Its times are 1, 2, 3... us of 32 calls, rounded.
    timed, lines = run_main("benchmarks/sharded.py", "--m", "16", "--layers", "up,down", LAYERS=SMALL)
    rows = [*csv.DictReader(lines)]
    assert len(timed) == 2 * (4 + 5) * measure.TURNS
    assert [(row["layer"], row["shards"]) for row in rows] == [(n, SMALL[n][2]) for n in SMALL for _ in shapes.DTYPES]
    for row in rows:
        us = {name: float(row[f"{name}_us"] or 0) for name in ("sharded", "local", "all-reduce", "xla", "one")}
        assert (us["all-reduce"] > 0) == (row["shards"] == "K")
        assert float(row["over_parts"]) == pytest.approx(us["sharded"] / (us["local"] + us["all-reduce"]), rel=0.1)
        assert float(row["over_xla"]) == pytest.approx(us["sharded"] / us["xla"], rel=0.1)
        assert float(row["of_linear"]) == pytest.approx(us["one"] / us["local"] / int(row["gpus"]), rel=0.1)
    assert "rows, over_parts" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", shapes.DTYPES.values())
@pytest.mark.parametrize("kind", "NK")
def test_programs_compute_the_layer(sharded, kind, dtype):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("gpus",))
    found = sharded.programs(shapes.product(16, 64, 256, dtype, "bfloat16"), kind, mesh)
    got = {name: f(*make(3)) for name, (f, _, make, _) in found.items()}
    a, b, scale_a, scale_b = (np.asarray(x, "f") for x in found["one"][2](3))
    whole = scale_a[:, None] * (scale_b * (a @ b.T))
    near = dict(rtol=2.0**-7, atol=2.0**-18 * (abs(a) @ abs(b.T)).max() * 1e-4)
    for name in ("sharded", "xla", "one"):
        np.testing.assert_allclose(np.asarray(got[name], "f"), whole, **near)
    local = np.asarray(got["local"], "f")
    if kind == "N":
        np.testing.assert_allclose(local, whole, **near)
    else:
        assert local.shape == (16, 128)  # of both, side by side
        np.testing.assert_allclose(1e-4 * (local[:, :64] + local[:, 64:]), whole, **near)
        sums = jnp.int32 if dtype == "int8" else jnp.float32
        assert got["all-reduce"].dtype == got["local"].dtype == sums
        np.testing.assert_array_equal(got["all-reduce"], np.full((16, 64), 6))


def compile_for_h200():
    """Prints [name, what is sharded, what the program of three calls runs in its order] of each as JSON."""
    import sharded
    from conftest import h200_topology  # of tests/ops
    from jax.experimental.topologies import make_mesh

    product, mesh = shapes.product(16, 64, 256, "int8", "bfloat16"), make_mesh(h200_topology(2), (2,), ("gpus",))
    found = []
    for kind in "NK":
        shardings = [NamedSharding(mesh, spec) for spec in sharded.SPECS[kind]]
        programs = sharded.programs(product, kind, mesh)
        for name in ("sharded", "local"):
            function, _, make, _ = programs[name]
            arrays = zip(jax.eval_shape(make, 0), shardings)
            given = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of) for x, of in arrays)
            text = jax.jit(sharded.in_turn(function)).lower(given, given, given).compile().as_text()
            entry = re.search(r"^ENTRY .*?^}", text, re.S | re.M).group(0)
            found.append((name, kind, re.findall(r" (custom-call|fusion|copy|all-[\w-]+)\(", entry)))
    print(json.dumps(found))


def test_calls_for_h200s_are_one_after_another(run_for_h200):
    """Each with an all-reduce of its own where K is sharded, and no copy."""
    own = ["custom-call", "all-reduce-start", "all-reduce-done", "fusion"]
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]
    printed = run_for_h200("-c", f"import sys; sys.path += {folders}; import test_sharded as t; t.compile_for_h200()")
    found = json.loads(printed.splitlines()[-1])
    assert len(found) == 4
    for name, kind, operations in found:
        assert operations == 3 * (own if (name, kind) == ("sharded", "K") else own[:1])
