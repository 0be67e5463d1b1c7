"""cuBLASLt on the same products, as PyTorch calls it, in CUDA graphs."""

import statistics
from collections.abc import Callable

from jax_qmm.bench.measure import count_sets, nbytes
from jax_qmm.tuning import Product


def missing() -> str:
    """Why cuBLASLt can't be measured here; "" where it can."""
    try:
        import torch
    except (ImportError, OSError) as error:  # an OSError where its shared libraries do not load
        return f"PyTorch does not load here ({error})"
    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} sees no GPU"


def version() -> str:
    """The version of PyTorch."""
    import torch

    return torch.__version__


def calls(product: Product) -> dict[str, Callable[[], float]]:
    """What measures cuBLASLt on a product: in its own dtype and in bfloat16, each in microseconds.

    fp8 is scaled by row and column, and tensorwise, which is faster: with one scale for each operand. PyTorch has
    int8 for M > 16 alone, and without scales: the int32 sums.
    """
    import torch

    m, n, k, _, dtype = product[:5]

    def matrix(rows, dtype):
        if dtype == torch.int8:
            return torch.randint(-127, 128, (rows, k), dtype=dtype, device="cuda")
        return torch.randn(rows, k, dtype=torch.bfloat16, device="cuda").to(dtype)

    def int8():
        a, b = matrix(m, torch.int8), matrix(n, torch.int8)
        out = torch.empty(m, n, dtype=torch.int32, device="cuda")
        return lambda: torch._int_mm(a, b.t(), out=out)

    def fp8(*scales):
        a, b = matrix(m, torch.float8_e4m3fn), matrix(n, torch.float8_e4m3fn)
        scale_a, scale_b = (torch.full(shape, 0.01, device="cuda") for shape in scales)
        return lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)

    def bf16():
        a, b = matrix(m, torch.bfloat16), matrix(n, torch.bfloat16)
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.mm(a, b.t(), out=out)

    measured = {"cublas_bf16": lambda: _graph_us(bf16, 2 * (m + n) * k + 2 * m * n)}
    if dtype == "int8" and m > 16:
        measured["cublaslt"] = lambda: _graph_us(int8, nbytes(product) + 2 * m * n)
    if dtype == "float8_e4m3fn":
        measured["cublaslt"] = lambda: _graph_us(lambda: fp8((m, 1), (1, n)), nbytes(product))
        measured["cublaslt_tensorwise"] = lambda: _graph_us(lambda: fp8((), ()), nbytes(product))
    return measured


def _graph_us(make, nbytes, rounds=9):
    """Median microseconds of a call, over calls that `make` binds to operands of their own, `nbytes` each."""
    import torch

    bound = [make() for _ in range(count_sets(nbytes, 24))]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def call_all(repeats):
        for _ in range(repeats):
            for call in bound:
                call()

    def milliseconds(function, *arguments):
        begin.record()
        function(*arguments)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    call_all(1)
    # As many calls as make the graph's own start small beside them: what the extension does for ours.
    repeats = max(1, min(200 // len(bound), int(3 / milliseconds(call_all, 1))))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Only what this thread does can spoil the capture: XLA frees and profiles in others.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call_all(repeats)
    graph.replay()
    times = [milliseconds(graph.replay) for _ in range(rounds)]
    graph.reset()
    count = repeats * len(bound)
    bound.clear()
    torch.cuda.empty_cache()  # XLA and the extension allocate beside PyTorch
    return statistics.median(times) * 1e3 / count
