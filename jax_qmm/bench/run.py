"""`python -m jax_qmm bench`: the kernels against the roofline, XLA and cuBLASLt."""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from jax_qmm import _extension
from jax_qmm.bench import check, cublaslt, measure, report
from jax_qmm.bench.shapes import DTYPES
from jax_qmm.text_table import first_line
from jax_qmm.tuning import Product

ROUNDS = 9
LABELS = {
    "ours": ("jax_qmm", None),
    "cublaslt": ("cuBLASLt", "ours"),
    "cublaslt_tensorwise": ("cuBLASLt tensorwise", "ours"),
    "cublas_bf16": ("bf16 cuBLAS", "ours"),
    "jit": ("jax_qmm in jit", None),
    "xla": ("XLA in jit", "jit"),
    "xla_bf16": ("bf16 XLA in jit", "jit"),
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
NOTES = """\
The peak is that of dense 8-bit products by the GPU's datasheet, or else by its architecture, SMs and clock.
A copy reads and writes: kernels that almost only read, those of small M, pass the roofline by several per cent.
us: median of CUDA graph replays; in jit: by JAX's profiler, in one program of many such calls. All that is measured
of a product is measured three times, each time in another random order; the times are the medians.
(1.20x): takes 1.20 times as long as jax_qmm measured in the same way.
The calls have operands of their own, which together exceed the L2 cache several times.
Kernels of jax_qmm that are "tuned" were chosen by measurement, those of cuBLASLt by its heuristic. Launches of
jax_qmm overlap: each starts while the one before it ends.
cuBLASLt is PyTorch's: fp8 with the same scales, and tensorwise with one for each operand; int8 for M > 16 alone, to
int32 and without scales."""


def row_of(product: Product, kernel: str, roofline_us: float) -> report.Row:
    """A row without times."""
    kind = KINDS[product.dtype]
    columns = {"dtype": kind, "out_dtype": product.out_dtype}
    return report.Row(kind, product[:3], columns, kernel, measure.nbytes(product), roofline_us, LABELS)


def measure_all(
    kernels,
    products: Sequence[Product],
    peers: Sequence[str],
    bandwidth: float,
    peak: float,
    rows: list[report.Row],
    failures: list[str],
) -> None:
    """Measures ours and the peers and shows a progress bar; appends to `rows` and `failures` as it goes."""
    if "xla" in peers:
        for m in tqdm(dict.fromkeys(product.m for product in products), desc="XLA compiles", unit="M"):
            of_m = [product for product in products if product.m == m]
            calls = [(measure.xla_scaled_mm, measure.specs(product, product.dtype)) for product in of_m]
            bf16 = {product[:3]: (measure.xla_bf16, measure.specs(product, "bfloat16")) for product in of_m}
            try:
                measure.autotune_xla([*calls, *bf16.values()])
            except RuntimeError as error:  # one by one, then
                failures.append(f"XLA failed on all products of M {m} together: {first_line(error)}")
    with tqdm(products, desc="bench", unit="product") as bar:
        for product in bar:
            where = _extension.describe_scaled_mm(*product)
            row = row_of(product, where, measure.roofline_us(product, bandwidth, peak))
            chosen = kernels.ScaledMmProblem(*product).select(_extension.gpu())
            calls = {"ours": lambda: measure.kernel_us(kernels, product, [chosen], ROUNDS)[0]}
            if "cublaslt" in peers:
                calls |= cublaslt.calls(product)
            if "xla" in peers:
                calls |= measure.in_jit(product)
            for name in measure.turns(calls, str(product)):
                if name not in calls:
                    continue
                label = LABELS[name][0]
                bar.set_postfix_str(f"M {product.m}, N {product.n}, K {product.k}, {label}")
                try:
                    us = calls[name]()
                except RuntimeError as error:  # of CUDA, PyTorch or XLA: no memory, a shape not supported
                    failures.append(f"{label} failed on {product}: {first_line(error)}")
                    if name == "ours":
                        break
                    del calls[name]
                    continue
                row.times.setdefault(name, []).append(us)
                if name == "ours" and len(row.times[name]) == 1:
                    rows.append(row)


def main(
    *,
    products: Sequence[Product],
    peers: Sequence[str],
    csv: Path | None,
    png: Path | None,
    reference: check.Reference | None = None,
) -> None:
    """Measures and prints the report, if interrupted of what there is; see `python -m jax_qmm bench --help`.

    Ends the process with code 1 where a product is slower than in `reference`.
    """
    kernels, gpu = measure.open_gpu("bench")
    if reference and reference.gpu not in ("", gpu.name):
        print(f"{reference.path} was measured on {reference.gpu}; this is {gpu.name}", file=sys.stderr)
        raise SystemExit(2)
    title = f"jax_qmm on {_extension.described_gpu()}, jax {jax.__version__}"
    remark = ""
    if "cublaslt" in peers and (missing := cublaslt.missing()):
        peers = [peer for peer in peers if peer != "cublaslt"]
        remark = f"\ncuBLASLt is left out: {missing}."
    elif "cublaslt" in peers:
        title += f", PyTorch {cublaslt.version()}"
    print(title + remark, flush=True)
    bandwidth = measure.copy_bandwidth()
    rows, failures, stopped = [], [], None
    try:
        measure_all(kernels, products, peers, bandwidth, gpu.peak, rows, failures)
    except BaseException as error:  # raised again when what there is has been reported
        stopped = error
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped by {type(error).__name__}"
        failures.append(f"{why}: {len(rows)} of {len(products)} products were measured")
    roofline = report.roofline_words(bandwidth, gpu.peak)
    report.show(rows, failures, roofline, NOTES)
    if rows and csv:
        report.write_csv(csv, rows, bandwidth, gpu.name)
        print(f"wrote {csv}")
    if rows and png:
        from jax_qmm.bench import figure  # matplotlib is needed for this alone

        figure.draw(rows, f"{title}\n{roofline}").savefig(png, format="png", dpi=150)
        print(f"wrote {png}")
    if stopped:
        raise stopped
    if reference:
        slower = check.slower(rows, reference)
        print(f"\n{check.table(slower, len(rows), reference)}")
        if slower or len(rows) < len(products):
            raise SystemExit(1)
