"""What to measure: the products of a model, or of shapes given by hand."""

import argparse
import sys

from jax_qmm.tuning import Product

# (N, K) of the linear layers: query-key-value, attention output, gate-up, down.
MODELS = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
OUT_DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name products: --model, --shapes, --m and --dtype."""
    parser.add_argument(
        "--model",
        choices=[*MODELS, "custom"],
        help="the weights of its linear layers (llama-3-8b); custom has those of --shapes",
    )
    parser.add_argument("--shapes", type=_weight, nargs="+", metavar="N,K", help="weights of these shapes instead")
    parser.add_argument("--m", type=_numbers, metavar="M,M,...", help=f"numbers of tokens ({','.join(map(str, ROWS))})")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", help="of the operands (both)")


def products(
    *, model: str | None, shapes, m, dtype, out_dtype=("bfloat16",), full_epilogue: bool = False
) -> list[Product]:
    """The products that the arguments name, each once, those of one weight together; without dtypes those of each.

    Ends the process with code 2 where `shapes` are given for another model than custom, or none for that.

    >>> [str(product) for product in products(model=None, shapes=[(6144, 4096)], m=(1, 16), dtype=["fp8"])]
    ['float8_e4m3fn to bfloat16, M 1, N 6144, K 4096', 'float8_e4m3fn to bfloat16, M 16, N 6144, K 4096']
    """
    model = model or ("custom" if shapes else "llama-3-8b")
    if (model == "custom") != bool(shapes):
        print("--model custom needs --shapes, and no other model takes them", file=sys.stderr)
        raise SystemExit(2)
    named = (
        product(rows, n, k, DTYPES[kind], out, full_epilogue)
        for n, k in shapes or MODELS[model]
        for kind in dtype or DTYPES
        for out in out_dtype
        for rows in m or ROWS
    )
    return list(dict.fromkeys(named))


def product(m: int, n: int, k: int, dtype: str, out_dtype: str, full_epilogue: bool = False) -> Product:
    """A product as `scaled_mm` computes it by default: fp8 is summed fast, int8 exactly as always."""
    return Product(m, n, k, 1, dtype, out_dtype, dtype != "int8", full_epilogue or out_dtype in DTYPES.values())


def _numbers(text):
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list of numbers with commas between them") from None
    if min(numbers) < 1 or max(numbers) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} holds a number that is no positive 32-bit integer")
    return numbers


def _weight(text):
    if text.count(",") != 1:
        raise argparse.ArgumentTypeError(f"{text} is no pair N,K such as 6144,4096")
    return _numbers(text)
