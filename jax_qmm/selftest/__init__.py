"""`python -m jax_qmm selftest`: every kernel of the build on this machine's GPU, against the reference."""

import os
import sys
from collections import defaultdict

import jax
from tqdm import tqdm

import jax_qmm
from jax_qmm import _extension
from jax_qmm.selftest import (
    block_quantized_mm,
    block_scaled_mm,
    conv,
    expanded_mm,
    quantize,
    scaled_mm,
    weight_only_conv,
)
from jax_qmm.selftest.result import Result
from jax_qmm.text_table import first_line, format_table

# In the order in which they are checked.
FAMILIES = (scaled_mm, block_scaled_mm, weight_only_conv, block_quantized_mm, expanded_mm, conv, quantize)


def run(kernels, gpu) -> tuple[list[Result], list[str]]:
    """Runs every kernel and shows a progress bar; returns the results, and in words what could not run."""
    programs = {name: check for family in FAMILIES for name, check in family.checks(kernels, gpu)}
    results, failures = [], []
    with tqdm(programs.items(), desc="selftest", unit="program") as bar:
        for name, check in bar:
            bar.set_postfix_str(name)
            try:
                results += check()
            except RuntimeError as error:  # of CUDA or XLA
                failures.append(f"{name} failed: {first_line(error)}")
    kernels.clear_scaled_mm_tuning()
    return results, failures


def table(results: list[Result]) -> str:
    """A line for each op.

    >>> print(table([Result("quantize", "static", "(2, 4)", 0), Result("quantize", "static", "(2, 8)", 3)]))
    op        kernels  runs  wrong
    quantize  1        2     1
    """
    by_op = defaultdict(list)
    for result in results:
        by_op[result.op].append(result)
    lines = [
        (op, str(len({r.kernel for r in of_op})), str(len(of_op)), str(sum(r.wrong > 0 for r in of_op)))
        for op, of_op in by_op.items()
    ]
    return format_table(("op", "kernels", "runs", "wrong"), lines)


def main() -> None:
    """Runs and prints the results; ends the process with code 1 where one is wrong, with 2 where no kernel can run."""
    if missing := _extension.why_none_runs():
        words = "selftest runs each of the build's kernels on the GPU and compares its results with the reference's"
        print(f"{words}. It can't here: {missing}. No kernel was tested.", file=sys.stderr)
        raise SystemExit(2)
    platform = _extension.platform()
    gpu = next(gpu for gpu in _extension._gpus() if not _extension.fallback_reason(platform, [gpu]))
    os.environ["JAX_QMM_STRICT"] = "1"  # what ran on the reference was not tested
    with jax.default_device(gpu):
        print(f"jax_qmm {jax_qmm.__version__} on {_extension.described_gpu()}, jax {jax.__version__}", flush=True)
        gpu = _extension.gpu()
        gpu.prepare()
        results, failures = run(_extension._load()[0], gpu)
    wrong = [result for result in results if result.wrong]
    print(f"\n{table(results)}")
    for op, kernel, shape, count in wrong:
        failures.append(f"{op}, {shape}: {count} elements of the result are wrong: {kernel}")
    print(*failures, sep="\n", end="\n" if failures else "")
    if failures or not results:
        raise SystemExit(1)
    print("Every kernel agrees with the reference: int8 bit for bit, others within their rounding.")
