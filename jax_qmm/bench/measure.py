"""Times on the GPU: of kernels in CUDA graphs, and of jitted programs by JAX's profiler.

Either rotates over sets of operands that together exceed the L2 cache several times, or it would serve them.
"""

import functools
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

import jax_qmm
from jax_qmm import _extension, tuning
from jax_qmm.tuning import Product

PEAK = tuning.h200()["peak"]  # operations a second, dense and of 8 bits
TURNS = 3  # the least, the median and the most of them are reported


def open_gpu(command: str) -> tuple[Any, Any]:
    """The extension module and its GPU that its kernels run on; ends the process with code 2 without them."""
    if reason := _extension.why_none_runs():
        print(f"{command} measures the kernels on a GPU, and can't: {reason}", file=sys.stderr)
        raise SystemExit(2)
    gpu = _extension.gpu()
    gpu.prepare()
    return _extension._load()[0], gpu


@functools.cache
def _pattern(dtype):
    # The power that the multipliers draw, and so the clock, depends on the operands: no zeros or small ones.
    rng = np.random.default_rng(0)
    if dtype == jnp.int8:
        return rng.integers(-127, 128, 8 << 20, np.int8)
    return rng.standard_normal(8 << 20, np.float32).astype(dtype)


def kernel_us(kernels, product: Product, choices: Sequence[tuple[int, int]], rounds: int) -> list[float]:
    """Median microseconds of each choice of the extension for `product`, taking turns `rounds` times.

    A launch's start may overlap the end of the one before, as in graphs that XLA records.
    """
    pattern = _pattern(jnp.dtype(product.dtype)).tobytes()
    problem = kernels.ScaledMmProblem(*product._replace(batch=1))
    return problem.measure(choices=list(choices), gpu=_extension.gpu(), pattern=pattern, rounds=rounds)


def count_sets(nbytes: int, most: int) -> int:
    """How many sets of operands of `nbytes` exceed the L2 cache, but at least two and at most `most`."""
    return min(most, max(2, math.ceil(400e6 / nbytes)))


@functools.partial(jax.jit, static_argnums=0)
def _call_each(function, sets):
    return [function(*arguments) for arguments in sets]


def jit_us(function: Callable, sets: Sequence[tuple]) -> float:
    """Microseconds of a call of `function`, of those for all `sets` of arguments in one jitted program.

    By JAX's profiler, from the start of the program's first kernel to the end of its last, without what the host
    needs to start a program: median of 7 runs. Where it runs on several GPUs, from when the last of them starts.
    """
    runs = 7

    def run():
        for _ in range(runs):
            out = _call_each(function, sets)
        jax.block_until_ready(out)

    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        gpus = [
            sorted(
                (event.start_ns, event.start_ns + event.duration_ns)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            )
            for trace in Path(folder).rglob("*.xplane.pb")
            for plane in ProfileData.from_file(str(trace)).planes
            if plane.name.startswith("/device:GPU")
        ]
    gpus = [kernels for kernels in gpus if kernels]
    if not gpus or any(len(kernels) % runs for kernels in gpus):
        raise RuntimeError(f"JAX's profiler saw {sum(map(len, gpus))} kernels in {runs} runs of a program")
    spans = []
    for i in range(runs):  # each has as many kernels on a GPU, in the order of their starts
        own = [kernels[len(kernels) // runs * i : len(kernels) // runs * (i + 1)] for kernels in gpus]
        spans.append(max(end for kernels in own for _, end in kernels) - max(kernels[0][0] for kernels in own))
    return statistics.median(spans) / len(sets) / 1e3


def jit_call(function: Callable, make: Callable[[int], tuple], nbytes: int, us: float) -> Callable[[], float]:
    """What measures calls of `function`, of about `us`, by `jit_us`; `make` gives its operands, of `nbytes`, by a seed.

    They are made once, when it is first called.
    """
    sets = functools.cache(lambda: chain([make(i) for i in range(count_sets(nbytes, 12))], us))
    return lambda: jit_us(function, sets())


def by_kernel(restrict: Callable[[str], None], words: str, us: Callable[[], float]) -> float:
    """What `us` gives while one kernel is left to choose, by one of the extension's functions that restrict choices."""
    _call_each.clear_cache()  # the same function runs others  # pyright: ignore[reportAttributeAccessIssue]
    restrict(words)
    try:
        return us()
    finally:
        restrict("")


def copy_bandwidth(nbytes: int = 128 << 20, count: int = 8) -> float:
    """Bytes a second, read and written, of `count` copies of `nbytes` each on the device."""
    sets = [(jnp.full((nbytes,), i, jnp.int8),) for i in range(count)]
    return 2 * nbytes / jit_us(jnp.copy, sets) * 1e6  # outputs of their own, so that XLA can't but copy


def nbytes(product: Product) -> int:
    """Bytes of the operands and the result of a product."""
    m, n, k = product[:3]
    return product.batch * (m * k + n * k + m * n * jnp.dtype(product.out_dtype).itemsize)


def roofline_us(product: Product, bandwidth: float, peak: float = PEAK) -> float:
    """The larger of the microseconds that a product's bytes take at `bandwidth` and its operations at `peak`.

    It is a yardstick and no bound where `bandwidth` is a copy's: a product reads more than it writes, and memory is
    read faster than it is copied.

    >>> product = Product(1024, 6144, 4096, 1, "int8", "bfloat16", False)
    >>> f"{roofline_us(product, 4.3e12):.1f}"
    '26.0'
    """
    operations = 2 * product.m * product.n * product.k * product.batch
    return 1e6 * max(nbytes(product) / bandwidth, operations / peak)


def operands(product: Product, dtype: str, most: int = 12) -> list[tuple]:
    """Sets of a `(M, K)` and b `(N, K)` of `dtype`, scale_a `(M,)` and scale_b `(N,)` on the GPU."""
    pattern = _pattern(jnp.dtype(dtype))
    m, n, k = product[:3]

    def matrix(rows, offset):
        return jnp.asarray(np.resize(np.roll(pattern, offset), (rows, k)))

    size = (m + n) * k * pattern.itemsize + 2 * m * n
    return [
        (matrix(m, 4099 * i), matrix(n, 8209 * i + 1), jnp.full(m, 0.01), jnp.full(n, 0.01))
        for i in range(count_sets(size, most))
    ]


def xla_scaled_mm(a, b, scale_a, scale_b):
    """What `jax_qmm.scaled_mm` computes, written for XLA alone."""
    wide = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    sums = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return (scale_a[:, None] * (scale_b * sums.astype(jnp.float32))).astype(jnp.bfloat16)


def xla_bf16(a, b, scale_a, scale_b):
    """The product of bfloat16 operands that quantizing replaces."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def autotune_xla(calls: Sequence[tuple[Callable, Sequence[Any]]]) -> None:
    """Has XLA choose its kernels for functions of operands as `jax.ShapeDtypeStruct`s.

    That takes it as long for all of one program as for one of them, and it remembers the choices for later programs of
    this process.
    """
    program = jax.jit(lambda each: [function(*operands) for (function, _), operands in zip(calls, each)])
    # Kernels are timed, but not checked, which takes ten times as long where there is much to compute.
    program.lower([operands for _, operands in calls]).compile({"xla_gpu_autotune_level": 2})


def specs(product: Product, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """The `operands` of a product."""
    m, n, k = product[:3]
    of = ((m, k), dtype), ((n, k), dtype), ((m,), "float32"), ((n,), "float32")
    return [jax.ShapeDtypeStruct(*each) for each in of]


def chain(sets: list[tuple], us: float) -> list[tuple]:
    """The sets again and again, for so many calls of `us` that the first and last are few of them: up to 32, or 2 ms.

    >>> len(chain([(), ()], 26.0)), len(chain([(), ()], 420.0))
    (32, 5)
    """
    calls = min(32, max(len(sets), math.ceil(2000 / us)))
    return (sets * calls)[:calls]


def turns(names: Iterable[Any], seed: str) -> list[Any]:
    """The order in which to measure `names`: each once in each of `TURNS` turns, which a `seed` shuffles.

    Each leaves the next one a clock and a temperature of the GPU: no two shall always be neighbours.
    """
    names, shuffle = [*names], random.Random(seed)
    return [name for _ in range(TURNS) for name in shuffle.sample(names, len(names))]


def times(calls: Mapping[Any, Callable[[], float]], seed: str) -> dict[Any, list[float]]:
    """What each of `calls` gives in its `turns`."""
    found = {name: [] for name in calls}
    for name in turns(calls, seed):
        found[name].append(calls[name]())
    return found


def in_jit(product: Product) -> dict[str, Callable[[], float]]:
    """What measures, inside jitted programs: `scaled_mm`, the same by XLA, and XLA's product of bfloat16."""
    _call_each.clear_cache()  # of the products before  # pyright: ignore[reportAttributeAccessIssue]
    sets = functools.cache(lambda dtype: chain(operands(product, dtype), roofline_us(product, 4e12)))
    return {
        "jit": lambda: jit_us(jax_qmm.scaled_mm, sets(product.dtype)),
        "xla": lambda: jit_us(xla_scaled_mm, sets(product.dtype)),
        "xla_bf16": lambda: jit_us(xla_bf16, sets("bfloat16")),
    }
