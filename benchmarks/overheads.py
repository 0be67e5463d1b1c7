"""Prints what quantized products cost in Python and in the compiler, as ratios to float ones; runs without a GPU.

    python benchmarks/overheads.py

Each figure is the smallest of several times, the quantized and the float program taking turns, so that it holds on a
machine that does other things as well. "uncached" clears JAX's caches before each turn.
"""

import argparse
import time

import jax
import jax.numpy as jnp

import jax_qmm

LAYERS, WIDTH, TOKENS = 32, 64, 16


def smallest_times(functions, repeats, before=lambda: None):
    """The smallest seconds of each function, which take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            before()
            start = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def layer(x, weights, matmul):
    """A transformer's layer with one head and no mask."""
    normed = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = jnp.split(matmul(normed, weights["qkv"]), 3, -1)
    x = x + matmul(jax.nn.softmax(q @ k.T) @ v, weights["out"])
    return x + matmul(jax.nn.gelu(matmul(x, weights["up"])), weights["down"])


def transformer(matmul):
    """A function of an input and a list of layers' weights, its layers unrolled."""

    def call(x, layers):
        for weights in layers:
            x = layer(x, weights, matmul)
        return x.sum()

    return call


def matmul_figures(repeats):
    """(what, seconds, seconds of float) of single products."""
    x, w = jnp.ones((TOKENS, WIDTH)), jnp.ones((WIDTH, WIDTH))
    q = jax_qmm.quantize(w.T).T
    # jnp.matmul is a jit, whose trace JAX keeps; __wrapped__ is the function in it.
    programs = {"quantized": (jax_qmm.matmul, q), "float": (jnp.matmul.__wrapped__, w)}

    def traced(fn):
        return {n: lambda f=f, w=w: jax.make_jaxpr(fn(f))(x, w) for n, (f, w) in programs.items()}

    plain = traced(lambda f: lambda x, w: f(x, w))
    gradient = traced(lambda f: jax.grad(lambda x, w: f(x, w).sum()))
    float_trace = smallest_times({"float": plain["float"]}, repeats)["float"]
    jax.block_until_ready(jax_qmm.matmul(x, q))
    eager = smallest_times({"quantized": lambda: jax_qmm.matmul(x, q)}, repeats)["quantized"]
    yield "eager matmul, over a float trace", eager, float_trace
    for name, functions in (("trace of matmul", plain), ("trace of its gradient", gradient)):
        yield name, *smallest_times(functions, repeats).values()
        yield f"{name}, uncached", *smallest_times(functions, max(3, repeats // 10), jax.clear_caches).values()


def transformer_figures(repeats):
    """(what, seconds, seconds of float) of a transformer, from nothing to a compiled program."""
    shapes = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH, "down": WIDTH}
    inputs = {"down": 4 * WIDTH}
    x = jnp.ones((TOKENS, WIDTH))
    dense = {name: jnp.ones((inputs.get(name, WIDTH), n)) for name, n in shapes.items()}
    quantized = {name: jax_qmm.quantize(w.T).T for name, w in dense.items()}
    programs = {
        "quantized": (transformer(jax_qmm.matmul), [quantized] * LAYERS),
        "float": (transformer(jnp.matmul), [dense] * LAYERS),
    }

    def stages(transform):
        trace = lambda f, layers: jax.jit(transform(f)).trace(x, layers)
        return {
            "trace": {n: lambda f=f, w=w: trace(f, w) for n, (f, w) in programs.items()},
            "trace + lower": {n: lambda f=f, w=w: trace(f, w).lower() for n, (f, w) in programs.items()},
            "trace + lower + compile": {
                n: lambda f=f, w=w: trace(f, w).lower().compile() for n, (f, w) in programs.items()
            },
        }

    for name, transform in (("transformer", lambda f: f), ("its gradient", jax.grad)):
        for stage, functions in stages(transform).items():
            yield f"{LAYERS}-layer {name}, {stage}", *smallest_times(functions, repeats, jax.clear_caches).values()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="turns of each transformer (%(default)s)")
    args = parser.parse_args()
    print(f"{'':48} {'ms':>9} {'float ms':>9} {'ratio':>6}")
    for figures in (matmul_figures(100 * args.repeats), transformer_figures(args.repeats)):
        for what, seconds, of_float in figures:
            print(f"{what:48} {seconds * 1e3:9.3f} {of_float * 1e3:9.3f} {seconds / of_float:6.2f}", flush=True)


if __name__ == "__main__":
    main()
