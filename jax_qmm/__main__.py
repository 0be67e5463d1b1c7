"""The command line: `python -m jax_qmm COMMAND`."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from jax_qmm.bench.shapes import OUT_DTYPES, add_arguments, products

# What the commands need beside jax, by import name.
OPTIONAL_PACKAGES = {"flax", "matplotlib", "optax", "sklearn", "tqdm"}


def user_path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # a shell leaves the ~ of --file=~/name


def output_file(text: str) -> Path:
    path = user_path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} can't be written")
    return path


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("python -m jax_qmm", description="Quantized matrix multiplication for JAX.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="train a small transformer on handwritten digits and quantize it three ways"
    )
    demo.add_argument("--png", type=output_file, metavar="FILE", help="also draw the comparison as a PNG")
    demo.add_argument("--seed", type=int, default=0, help="of split, parameters and order (%(default)s)")
    demo.add_argument("--epochs", type=positive, default=20, help="passes over the images (%(default)s)")
    demo.set_defaults(run=run_demo)

    bench = commands.add_parser(
        "bench",
        help="measure the kernels against the roofline, XLA and cuBLASLt on this GPU",
        description="Measures the kernels on this GPU against the roofline, XLA and, where PyTorch is "
        "installed, cuBLASLt. Ctrl-C reports what is measured by then.",
    )
    add_arguments(bench)
    bench.add_argument(
        "--peers",
        type=peers,
        default="xla,cublaslt",
        metavar="xla,cublaslt",
        help='"xla", "cublaslt", both or "none" (%(default)s)',
    )
    bench.add_argument("--csv", type=output_file, metavar="FILE", help="also write the figures as CSV")
    bench.add_argument(
        "--png", type=output_file, metavar="FILE", help="also draw what is achieved of the roofline by M"
    )
    bench.set_defaults(run=run_bench)

    tune = commands.add_parser(
        "tune",
        help="measure every kernel on this GPU and remember the fastest",
        description="Measures every kernel on this GPU and writes the fastest to a file, which later "
        "processes load: that of JAX_QMM_TUNING, or else of the user's cache directory. Ctrl-C "
        "keeps what is measured by then.",
    )
    add_arguments(tune)
    tune.add_argument(
        "--out-dtype", choices=OUT_DTYPES, nargs="+", default=["bfloat16"], help="of the results (bfloat16)"
    )
    tune.add_argument("--file", type=user_path, metavar="PATH", help="the file to write, or to add to")
    tune.set_defaults(run=run_tune)
    return top


def peers(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    if unknown := set(names) - {"xla", "cublaslt"}:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of xla, cublaslt and none")
    return names


def load(command: str, module: str, install: str | None = None):
    """The module of a command; ends the process, naming what to install, where a package is absent."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        if package not in OPTIONAL_PACKAGES:
            raise
        sys.exit(f"the {command} needs the package {package!r}, which is absent: pip install {install or package}")


def run_demo(**options) -> None:
    load("demo", "jax_qmm.demo", '"jax_qmm[demo]"').main(**options)


def run_bench(*, model, shapes, m, dtype, **options) -> None:
    if options["png"]:  # now, not after minutes, if matplotlib is absent
        load("plot", "jax_qmm.bench.figure")
    named = products(model=model, shapes=shapes, m=m, dtype=dtype)
    load("benchmark", "jax_qmm.bench.run").main(products=named, **options)


def run_tune(*, model, shapes, m, dtype, out_dtype, file) -> None:
    named = products(model=model, shapes=shapes, m=m, dtype=dtype, out_dtype=out_dtype)
    load("tuning", "jax_qmm.bench.tune").main(products=named, file=file)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that `arguments` (by default the process's own) names; without one prints the help."""
    options = vars(parser().parse_args(arguments))
    run = options.pop("run", None)
    if run is None:
        parser().print_help()
        return 0
    try:
        run(**options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130  # as the shell has it for SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
