"""Times the linear layers of Llama 3 70B on all GPUs, tensor-parallel, beside their parts and XLA's.

    NCCL_NVLS_ENABLE=0 python benchmarks/sharded.py --out sharded.csv

Columns of weights are sharded where each GPU has outputs of its own, rows where their sums are reduced over all GPUs.
What a product's parts take is measured alone: the product of one GPU's operands ("local"), and the all-reduce of its
sums, which are of 4 bytes. "one" is the whole product on one GPU. Calls come one after another in one program, each
with operands of its own, which together exceed the L2 cache of each GPU. The CSV has the medians, the least and the
most of three turns.
"""

import argparse
import csv
import os
from statistics import geometric_mean, median

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tqdm import tqdm

import jax_qmm
from jax_qmm.bench import measure, shapes

LAYERS = {  # with what is sharded of their weights (N, K)
    name: (*shape, sharded)
    for name, shape, sharded in zip(("qkv", "out", "gate-up", "down"), shapes.MODELS["llama-3-70b"], "NKNK")
}
SPECS = {  # of a, b, scale_a, scale_b and the result
    "N": (P(), P("gpus"), P(), P("gpus"), P(None, "gpus")),
    "K": (P(None, "gpus"), P(None, "gpus"), P(), P(), P()),
}
CALLS = ("sharded", "local", "all-reduce", "xla", "one")
COLUMNS = ("layer", "shards", "gpus", "dtype", "m", "n", "k", "over_parts", "over_xla", "of_linear")
SPREAD = tuple(f"{name}{of}_us" for name in CALLS for of in ("", "_least", "_most"))


def in_turn(function):
    """A function of sets of arguments that calls `function` with each, none before the one before it is done.

    XLA would reduce the sums of all calls together otherwise, or those of one during the product of another.
    """

    def call(*sets):
        out = []
        for each in sets:
            if out:
                each, out[-1] = jax.lax.optimization_barrier((each, out[-1]))
            out.append(function(*each))
        return out

    return call


def operands(product, mesh, specs):
    """A set of a (M, K) and b (N, K) of the product's dtype, scale_a (M,) and scale_b (N,), by number."""
    m, n, k = product[:3]

    def values(key, shape):
        if product.dtype == "int8":
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, "uint8"), jnp.int8)
        return jax.random.normal(key, shape, jnp.bfloat16).astype(product.dtype)

    def make(i):
        a, b = jax.random.split(jax.random.key(i))
        return values(a, (m, k)), values(b, (n, k)), jnp.full(m, 0.01), jnp.full(n, 0.01)

    return jax.jit(make, out_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))


def programs(product, sharded, mesh):
    """What is compared: by name a function, its mesh, what makes its sets of arguments, and bytes of one on a GPU."""
    specs, count = SPECS[sharded], mesh.size
    *given, result = specs
    one = Mesh(mesh.devices[:1], mesh.axis_names)
    # Sums of a part of K leave a kernel in 4 bytes, as they are reduced.
    sums = jnp.int32 if product.dtype == "int8" else jnp.float32
    local = jax_qmm.scaled_mm if sharded == "N" else lambda a, b, *_: jax_qmm.scaled_mm(a, b, 1.0, 1.0, out_dtype=sums)
    parts = P(None, "gpus")  # the local results side by side
    sets, nbytes = operands(product, mesh, given), measure.nbytes(product)
    whole = lambda f: jax.jit(f, out_shardings=NamedSharding(mesh, result))
    found = {
        "sharded": (whole(jax_qmm.scaled_mm), mesh, sets, nbytes / count),
        "local": (jax.shard_map(local, mesh=mesh, in_specs=(*given,), out_specs=parts), mesh, sets, nbytes / count),
        "xla": (whole(measure.xla_scaled_mm), mesh, sets, nbytes / count),
        "one": (jax_qmm.scaled_mm, one, operands(product, one, [P()] * 4), nbytes),
    }
    if sharded == "K":
        # Sharded, or XLA would multiply what all GPUs have by their number.
        reduce = jax.shard_map(lambda x: jax.lax.psum(x, "gpus"), mesh=mesh, in_specs=P("gpus"), out_specs=P())
        shape, of_rows = (count * product.m, product.n), NamedSharding(mesh, P("gpus"))
        fill = jax.jit(lambda i: (jnp.full(shape, i, sums),), out_shardings=(of_rows,))
        found["all-reduce"] = reduce, mesh, fill, 4 * product.m * product.n
    return found


def calls(product, sharded, mesh):
    """What is measured of a product: functions that give microseconds, by name."""

    def timed(function, mesh, make, nbytes):
        ordered = in_turn(function)

        def us():
            sets = measure.chain([make(i) for i in range(measure.count_sets(nbytes, 12))], nbytes / 4e6)
            with jax.set_mesh(mesh):
                return measure.jit_us(ordered, [(*sets,)]) / len(sets)

        return us

    return {name: timed(*program) for name, program in programs(product, sharded, mesh).items()}


def row_of(name, product, sharded, mesh):
    """The line of a product in the CSV."""
    times = measure.times(calls(product, sharded, mesh), str(product))
    us = {call: median(turns) for call, turns in times.items()}
    parts = us["local"] + us.get("all-reduce", 0)
    ratios = us["sharded"] / parts, us["sharded"] / us["xla"], us["one"] / us["local"] / mesh.size
    row = dict(zip(COLUMNS, (name, sharded, mesh.size, product.dtype, *product[:3], *(round(r, 3) for r in ratios))))
    spread = [round(of(times[call]), 2) if call in times else "" for call in CALLS for of in (median, min, max)]
    return row | dict(zip(SPREAD, spread))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", default="1,16,512,4096", help="numbers of tokens (%(default)s)")
    parser.add_argument("--layers", default=",".join(LAYERS), help="layers (%(default)s)")
    parser.add_argument("--out", help="CSV file to write")
    args = parser.parse_args()
    measure.open_gpu("sharded.py")
    mesh = Mesh(np.array(jax.devices()), ("gpus",))
    products = [
        (name, shapes.product(int(m), n, k, dtype, "bfloat16"), sharded)
        for name in args.layers.split(",")
        for n, k, sharded in [LAYERS[name]]
        for dtype in shapes.DTYPES.values()
        for m in args.m.split(",")
    ]
    rows = []
    with open(args.out or os.devnull, "w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *SPREAD))
        writer.writeheader()
        for each in tqdm(products, unit="product"):
            rows.append(row_of(*each, mesh))
            writer.writerow(rows[-1])
            file.flush()
    for sharded, what in (("N", "columns"), ("K", "rows")):
        mine = [row for row in rows if row["shards"] == sharded]
        for column in ("over_parts", "over_xla", "of_linear") if mine else ():
            ratios = [row[column] for row in mine]
            print(f"{what}, {column}: {geometric_mean(ratios):.3f} (geometric mean), {min(ratios)} to {max(ratios)}")


if __name__ == "__main__":
    main()
