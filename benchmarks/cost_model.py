"""Measures every kernel on many products, and fits to that the costs by which the extension chooses among them.

    python benchmarks/cost_model.py measure kernels.csv.gz --products 500   # on a Hopper GPU: 6 minutes
    python benchmarks/cost_model.py fit kernels.csv.gz                      # on any machine: writes the GPU's file
    python benchmarks/cost_model.py check kernels.csv.gz                    # on any machine: how good the choices are

It needs optax and the extension. Several files are fitted as one, and the costs go to jax_qmm/tuned, to the file of the
GPU that --gpu names, which describes it. What is fitted is `predict` of cuda/scaled_mm/cost.cc, written again here for
gradients. The fit minimizes how far what the model chooses is behind the fastest, and how far its times of the fast
kernels are off.
"""

import argparse
import csv
import gzip
import math
import random
import re
from collections import defaultdict
from statistics import geometric_mean, median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jax_qmm import _extension, tuning
from jax_qmm.bench import convs, measure, tune
from jax_qmm.tuning import Cost, Product

LAST_END = 1.5  # microseconds, of the last tile of a pingpong kernel with the full epilogue: kLastEnd of cost.cc
FIELDS = ("dtype", "out_dtype", "full_epilogue", "fast_accum", "m", "n", "k", "kernel", "us")

# Weights (N, K): linear layers of Llama 3, Qwen 2.5, Gemma 2, DeepSeek V3, Mistral, Phi 3, BERT, their tensor-parallel
# cuts, language-model heads, routers, and others that fit no tile.
WEIGHTS = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
    (3072, 4096),
    (1536, 4096),
    (768, 4096),
    (4096, 2048),
    (4096, 1024),
    (4096, 512),
    (14336, 4096),
    (7168, 4096),
    (3584, 4096),
    (4096, 7168),
    (4096, 3584),
    (4096, 1792),
    (5120, 8192),
    (2560, 8192),
    (1280, 8192),
    (8192, 4096),
    (8192, 2048),
    (8192, 1024),
    (28672, 8192),
    (14336, 8192),
    (7168, 8192),
    (8192, 14336),
    (8192, 7168),
    (8192, 3584),
    (4608, 3584),
    (3584, 3584),
    (37888, 3584),
    (3584, 18944),
    (7168, 5120),
    (5120, 5120),
    (27648, 5120),
    (5120, 27648),
    (13824, 5120),
    (5120, 13824),
    (2304, 2304),
    (9216, 2304),
    (2112, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 2048),
    (9216, 3072),
    (3072, 3072),
    (16384, 3072),
    (3072, 8192),
    (768, 768),
    (3072, 768),
    (768, 3072),
    (1024, 1024),
    (1024, 4096),
    (128256, 4096),
    (151936, 3584),
    (256000, 2304),
    (128, 4096),
    (256, 7168),
    (512, 8192),
    (576, 16384),
    (1024, 8192),
    (4096, 496),
    (2000, 1040),
    (5120, 496),
    (2304, 16384),
    (1536, 7168),
    (2048, 8192),
)
# And convolutions with windows of one pixel, whose K is short.
POINTWISE = [layer for _, layer in convs.layers_of("conv") if layer.window == layer.stride == layer.groups == 1]
POINTWISE_PART, FULL_PART = 0.2, 0.25  # of the products; the latter have the full epilogue
MOST_US = 2500  # of a product's operations at the peak
LARGE_PART = 0.2  # of the products
LARGE_FINALISTS = 5  # of the kernels for a large product, which are measured alone
# Products of fp8 that are summed in float32 throughout have two kernels more than the skinny one.
KINDS = {("int8", False): 0.45, ("float8_e4m3fn", True): 0.45, ("float8_e4m3fn", False): 0.1}


def products(count, seed):
    """`count` different ones: M from 1 to 16384, evenly by its logarithm, some multiples of 32 or powers of two."""
    draw = random.Random(seed)
    wanted = {True: round(LARGE_PART * count)}  # by whether they are large
    wanted[False] = count - wanted[True]
    drawn = {}
    while len(drawn) < count:
        if draw.random() < POINTWISE_PART:
            m, n, k = draw.choice(POINTWISE).shape(draw.choice(convs.IMAGES))
        else:
            m = round(2 ** draw.uniform(0, math.log2(16384)))
            m = draw.choice((m, m // 32 * 32 or m, 2 ** round(math.log2(m))))
            n, k = draw.choice(WEIGHTS)
        [(dtype, fast_accum)] = draw.choices(list(KINDS), KINDS.values())
        full = draw.random() < FULL_PART
        out_dtype = draw.choice(("bfloat16", "int8")) if full else "bfloat16"
        product = Product(m, n, k, 1, dtype, out_dtype, fast_accum, full)
        if n % 16 or k % 16:  # as TMA needs it
            continue
        large = tune.is_large(product)
        if product not in drawn and wanted[large] and measure.roofline_us(product, math.inf) < MOST_US:
            drawn[product] = None
            wanted[large] -= 1
    return list(drawn)


def measure_all(file, count, seed):
    kernels, gpu = measure.open_gpu("cost_model.py")
    with gzip.open(file, "wt", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(FIELDS)
        for product in tqdm(products(count, seed), unit="product"):
            choices = [choice for choice in kernels.ScaledMmProblem(*product).choices(gpu) if choice[0] >= 0]
            try:
                times = measure_one(kernels, product, choices)
            except RuntimeError as error:  # of CUDA: too little memory
                tqdm.write(f"left out: {product} ({error})")
                continue
            for choice, us in times.items():
                fields = product._asdict() | {"kernel": kernels.describe_scaled_mm(choice), "us": round(us, 3)}
                writer.writerow(int(value) if isinstance(value := fields[name], bool) else value for name in FIELDS)


def measure_one(kernels, product, choices):
    """Microseconds by choice; of a large product, whose kernels lend each other their clocks, as if measured alone."""
    times = tune.first_us(kernels, product, choices)
    if not tune.is_large(product):
        return times
    alone = {
        choice: tune.alone_us(kernels, product, choice) for choice in sorted(times, key=times.get)[:LARGE_FINALISTS]
    }
    slower = median(us / times[choice] for choice, us in alone.items())
    return {choice: us * slower for choice, us in times.items()} | alone


def predict(costs, waves, k_tiles, copy):
    """Of kernels with the plain epilogue."""
    k_tile, tile, launch, reading = costs.T
    return launch + jnp.cbrt((waves * (k_tiles * k_tile + tile)) ** 3 + (copy * reading) ** 3)


def terms_of(kernels, gpu, product):
    """What the model takes a time from, of each choice (kernel, swizzle) that it may make."""
    problem = kernels.ScaledMmProblem(*product)
    return {choice: terms for choice in problem.choices(gpu) if (terms := problem.terms(choice, gpu))}


class Measured:
    """Times of products by product and kernel, with the fastest of any, and what the model takes them from.

    Kernels are the extension's and numbered as there, those that the model chooses among; infinite is a time that was
    not measured, or of a kernel that it may not choose for the product.
    """

    def __init__(self, kernels, gpu, times):
        self.products = list(times)
        terms = [terms_of(kernels, gpu, product) for product in times]
        self.kernels = sorted({kernel for of_product in terms for kernel, _ in of_product})
        shape = len(self.products), len(self.kernels)
        self.us, self.terms = np.full(shape, np.inf), np.ones((3, *shape))
        self.fastest = np.array([min(by_name.values()) for by_name in times.values()])
        for row, product in enumerate(times):
            for choice, of_choice in terms[row].items():
                if us := times[product].get(kernels.describe_scaled_mm(choice)):
                    column = self.kernels.index(choice[0])
                    self.us[row, column], self.terms[:, row, column] = us, of_choice
        self.least = np.array(
            [(least_k_tile_us(kernels.describe_scaled_mm((kernel, 1))), 0.01, 0.3, 0.8) for kernel in self.kernels]
        )

    def behind(self, costs, rows):
        """How many times as long as the fastest the model's choices take."""
        chosen = jnp.where(np.isfinite(self.us), predict(costs, *self.terms), np.inf).argmin(1)
        return (self.us[np.arange(len(self.us)), chosen] / self.fastest)[rows]


def least_k_tile_us(kernel):
    """What the multipliers need for a K tile at 1.9 GHz, 4096 products a clock; skinny kernels do with less."""
    if "skinny" in kernel:
        return 0.05
    blocks = 2 if "2 per SM" in kernel else 1
    return blocks * math.prod(map(int, re.findall(r"\d+", kernel)[1:4])) / (4096 * 1.9e3)


def fit(measured, rows, steps=6000):
    """Costs that are right for the products in `rows`.

    Loss: the mean logarithm of how far behind a soft choice is, and of how far off the times of nearly the fastest are.
    """
    soft, weight_power, outlier = 0.01, 6, 0.1
    least, most = measured.least, np.array((5.0, 9.0, 9.0, 4.0))
    us = measured.us[rows]
    known = np.isfinite(us)
    us = np.where(known, us, 1.0)
    behind = np.where(known, us / measured.fastest[rows, None], 1.0)
    weights = np.where(known, behind**-weight_power, 0.0)
    given = measured.terms[:, rows]

    def costs_of(x):
        return least + (most - least) * jax.nn.sigmoid(x)

    def loss(x):
        times = jnp.log(predict(costs_of(x), *given))
        choice = jax.nn.softmax(jnp.where(known, -times / soft, -jnp.inf), axis=1)
        lost = jnp.sum(choice * jnp.log(jnp.minimum(behind, 3)), axis=1).mean()
        off = optax.huber_loss(times, jnp.log(us), delta=outlier) / outlier
        return lost + jnp.sum(weights * off) / weights.sum()

    start = np.array([(1.3 * k_tile, 2.0, 1.0, 1.0) for k_tile, *_ in least])
    x = jnp.log((start - least) / (most - start))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    state = optimizer.init(x)

    @jax.jit
    def step(x, state):
        updates, state = optimizer.update(jax.grad(loss)(x), state)
        return optax.apply_updates(x, updates), state

    for _ in range(steps):
        x, state = step(x, state)
    found = np.asarray(costs_of(x), np.float64)
    return np.concatenate([np.round(found[:, :1], 3), np.round(found[:, 1:], 2)], axis=1)


def fit_full_tiles(kernels, gpu, times, costs):
    """Costs with the `full_tile` by which kernels are right for the products that have the full epilogue.

    Each kernel's is found by itself, among 400. What is far behind the fastest counts as little as in `fit`.
    """
    of_kernel = defaultdict(list)
    for product, by_name in times.items():
        fastest = min(by_name.values())
        for choice, terms in terms_of(kernels, gpu, product).items():
            words = kernels.describe_scaled_mm(choice)
            if words in by_name:
                key = product.dtype, plain_words(kernels, choice[0])
                of_kernel[key].append((*terms, by_name[words], fastest / by_name[words]))
    tried = np.geomspace(0.2, 50, 400)[:, None]
    for key, lines in of_kernel.items():
        waves, k_tiles, copy, us, part = np.array(lines).T
        cost = costs[key]
        products = k_tiles * cost.k_tile
        pingpong = "pingpong" in cost.kernel
        ends = np.maximum(products + cost.tile, tried) if pingpong else products + tried
        launch = cost.launch + LAST_END * pingpong
        off = np.log(launch + np.cbrt((waves * ends) ** 3 + (copy * cost.reading) ** 3)) - np.log(us)
        lost = (part**6 * np.minimum(np.abs(off), 0.3)).sum(1)
        yield key, cost._replace(full_tile=round(float(tried[lost.argmin(), 0]), 2))


def plain_words(kernels, kernel):
    """By which costs are known: a kernel's, by its number, without the swizzle and the full epilogue."""
    return kernels.describe_scaled_mm((kernel, 1)).removesuffix(" swizzle 1").replace(" full epilogue", "")


def has_full_epilogue(product):
    return product.full_epilogue or jnp.dtype(product.out_dtype).itemsize == 1


def read_times(files):
    """Microseconds of each kernel by product."""
    times = defaultdict(dict)
    for file in files:
        with gzip.open(file, "rt", newline="") as lines:
            for row in csv.DictReader(lines):
                m, n, k = (int(row[name]) for name in "mnk")
                out_dtype, full = row.get("out_dtype", "bfloat16"), row.get("full_epilogue") == "1"
                product = Product(m, n, k, 1, row["dtype"], out_dtype, row["fast_accum"] == "1", full)
                times[product][row["kernel"]] = float(row["us"])
    return times


def fit_all(files, gpu):
    kernels, missing = _extension._load()
    if missing:
        raise SystemExit(missing)
    gpu = tuning.packaged_gpu(kernels, gpu)
    file = tuning.packaged(gpu)
    times = read_times(files)
    found = {(cost.dtype, cost.kernel): cost for cost in tuning.load_costs(file)}
    for dtype in dict.fromkeys(dtype for dtype, _ in KINDS):
        of_dtype = {
            product: of_it
            for product, of_it in times.items()
            if product.dtype == dtype and not has_full_epilogue(product)
        }
        measured = Measured(kernels, gpu, of_dtype)
        rows = np.arange(len(measured.products))
        weights = sorted({(product.n, product.k) for product in measured.products})
        part = np.array([weights.index((product.n, product.k)) % 6 for product in measured.products])
        left_out = np.empty(len(rows))
        for out in (part == i for i in range(6)):
            left_out[out] = measured.behind(fit(measured, rows[~out]), rows[out])
        costs = fit(measured, rows)
        behind = measured.behind(costs, rows)
        for kind in (kind for kind in KINDS if kind[0] == dtype):
            of_kind = np.array([(product.dtype, product.fast_accum) == kind for product in measured.products])
            mean, most, mean_out, most_out = (
                of(ratios[of_kind]) for ratios in (behind, left_out) for of in (geometric_mean, max)
            )
            print(
                *kind,
                f"{of_kind.sum()} products: {mean:.3f} times the fastest's time, at most {most:.2f}; "
                f"{mean_out:.3f} where a fit leaves their weights out, at most {most_out:.2f}",
            )
        found |= costs_by_words(kernels, dtype, dict(zip(measured.kernels, costs.tolist())), found)
    full = {product: of_it for product, of_it in times.items() if has_full_epilogue(product)}
    found |= fit_full_tiles(kernels, gpu, full, found)
    tuning.save_costs(file, gpu, found.values())


def costs_by_words(kernels, dtype, found, before):
    """The costs of kernels of operands of `dtype`, found by their numbers in the extension, by their words there.

    What they have `before` of the full epilogue stays.
    """
    for kernel, (k_tile, tile, launch, reading) in found.items():
        words = plain_words(kernels, kernel)
        full_tile = before[dtype, words].full_tile if (dtype, words) in before else tile
        yield (dtype, words), Cost(dtype, words, k_tile, tile, full_tile, launch, reading)


def behind_now(kernels, gpu, times):
    """How many times as long as the fastest kernel the chosen one takes, by product; without those not measured."""
    found = {}
    for product, by_name in times.items():
        chosen = kernels.describe_scaled_mm(kernels.ScaledMmProblem(*product).select(gpu))
        if chosen in by_name:
            found[product] = by_name[chosen] / min(by_name.values())
    return found


def check(files, gpu):
    kernels, missing = _extension._load()
    if missing:
        raise SystemExit(missing)
    kernels.clear_scaled_mm_tuning()
    times = read_times(files)
    behind = behind_now(kernels, tuning.packaged_gpu(kernels, gpu), times)
    worst = max(behind, key=behind.get)
    print(
        f"{len(behind)} of {len(times)} products have a time for the kernel that the model chooses: "
        f"{geometric_mean(behind.values()):.3f} times the fastest's, at most {behind[worst]:.2f} ({worst})"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure", help="on a Hopper GPU; writes the file")
    command.add_argument("file")
    command.add_argument("--products", type=int, required=True, help="how many")
    command.add_argument("--seed", type=int, default=0, help="draws others (%(default)s)")
    for name, words in (
        ("fit", "reads the files and writes the GPU's costs"),
        ("check", "how far behind the fastest kernels those are that the model chooses"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("files", nargs="+")
        command.add_argument("--gpu", default="NVIDIA H200", help="that was measured (%(default)s)")
    args = parser.parse_args()
    if args.command == "measure":
        measure_all(args.file, args.products, args.seed)
    else:
        {"fit": fit_all, "check": check}[args.command](args.files, args.gpu)


if __name__ == "__main__":
    main()
