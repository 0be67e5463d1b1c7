"""The command line: `python -m jax_qmm COMMAND`."""

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

import jax

import jax_qmm
from jax_qmm import _extension
from jax_qmm.bench.shapes import OUT_DTYPES, add_arguments, products

CONVOLUTIONS = "conv", "conv-w4a16"  # what bench takes as a scheme beside those of products
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


def png_file(text: str) -> Path:
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{path} would be a PNG: name a file that ends in .png")
    return path


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser("python -m jax_qmm", description="Quantized matrix multiplication for JAX.")
    top.add_argument("--version", action="store_true", help="say which version this is, of jax and of the kernels too")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="train a small transformer on handwritten digits and quantize it eight ways"
    )
    demo.add_argument("--png", type=png_file, metavar="FILE", help="also draw the comparison as a PNG")
    demo.add_argument("--seed", type=int, default=0, help="of split, parameters and order (%(default)s)")
    demo.add_argument("--epochs", type=positive, default=20, help="passes over the images (%(default)s)")
    demo.set_defaults(run=run_demo)

    selftest = commands.add_parser(
        "selftest",
        help="run every kernel on this GPU and compare it with the reference",
        description="Runs every kernel of this build on this GPU, on a few ragged shapes, and compares the results "
        "with the reference's: int8 bit for bit, others within their rounding. Ends with code 1 if a kernel is wrong, "
        "and with code 2 if none can run here. Takes about two minutes.",
    )
    selftest.set_defaults(run=run_selftest)

    bench = commands.add_parser(
        "bench",
        help="measure the kernels against the roofline, XLA and cuBLASLt on this GPU",
        description="Measures the kernels on this GPU against the roofline, XLA and, where PyTorch is "
        "installed, cuBLASLt. Ctrl-C reports what is measured by then.",
    )
    add_arguments(bench)
    bench.add_argument(
        "--scheme",
        choices=["w8a8", "w4a16", "w8a16", "w8a8-block", "fp8-block", "w4a8", "w4a8-fp8", *CONVOLUTIONS],
        default="w8a8",
        help="w8a8 measures products of 8-bit operands, the others those of bfloat16 activations with weights in "
        "blocks of 128, beside XLA's of bfloat16: packed ones (w4a16, w8a16), and with activations that are quantized "
        "too, in blocks (w8a8-block, fp8-block) or per token (w4a8, w4a8-fp8); conv and conv-w4a16 measure the "
        "convolutions of ResNet-50, MobileNet-v2 and a diffusion UNet beside XLA's, with --m images (1,8,64) "
        "(%(default)s)",
    )
    bench.add_argument(
        "--peers",
        type=peers,
        metavar="xla,cublaslt",
        help='"xla", "cublaslt", both or "none" (both; with --check none)',
    )
    bench.add_argument(
        "--check",
        type=earlier_run,
        metavar="FILE",
        help="measure the products of this CSV of an earlier run again, and end with code 1 where one became slower; "
        "--m and --dtype take some of them",
    )
    bench.add_argument("--csv", type=output_file, metavar="FILE", help="also write the figures as CSV")
    bench.add_argument("--png", type=png_file, metavar="FILE", help="also draw what is achieved of the roofline by M")
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
    tune.add_argument(
        "--full-epilogue",
        action="store_true",
        help="products with an activation or with zero points of b, which have kernels of their own; results of 8 bits "
        "have these anyway",
    )
    tune.add_argument("--file", type=user_path, metavar="PATH", help="the file to write, or to add to")
    tune.set_defaults(run=run_tune)
    return top


def peers(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    if unknown := set(names) - {"xla", "cublaslt"}:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of xla, cublaslt and none")
    return names


def earlier_run(text: str):
    check = importlib.import_module("jax_qmm.bench.check")
    try:
        return check.read(user_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load(command: str, module: str, install: str | None = None):
    """The module of a command; ends the process, naming what to install, where a package is absent."""
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # some imports swallow KeyboardInterrupt
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL_PACKAGES:
            raise
        sys.exit(f"the {command} needs the package {package!r}, which is absent: pip install {install or package}")
    finally:
        signal.signal(signal.SIGINT, on_interrupt)


def versions() -> str:
    kernels, missing = _extension._load()
    built = "kernels for " + ", ".join(kernels.architectures()) if kernels else missing
    return f"jax_qmm {jax_qmm.__version__} with jax {jax.__version__}: {built}"


def run_demo(**options) -> None:
    load("demo", "jax_qmm.demo", '"jax_qmm[demo]"').main(**options)


def run_selftest() -> None:
    load("selftest", "jax_qmm.selftest").main()


def run_bench(*, scheme, model, shapes, m, dtype, peers, check, **options) -> None:
    if scheme != "w8a8":
        if check or peers is not None or options.pop("png"):
            sys.exit(f"--scheme {scheme} is measured beside XLA alone: leave --check, --peers and --png out")
        if dtype:
            sys.exit(f"--scheme {scheme} has dtypes of its own: leave --dtype out")
        if scheme in CONVOLUTIONS:
            if model or shapes:
                sys.exit(f"--scheme {scheme} has layers of its own: leave --model and --shapes out")
            run = load("benchmark", "jax_qmm.bench.convs")
            return run.main(scheme=scheme, images=m or run.IMAGES, **options)
        run = load("benchmark", "jax_qmm.bench.schemes")
        named = products(model=model, shapes=shapes, m=m, dtype=["int8"])
        return run.main(scheme=scheme, shapes=[product[:3] for product in named], **options)
    if options["png"]:  # now, not after minutes, if matplotlib is absent
        load("plot", "jax_qmm.bench.figure")
    run = load("benchmark", "jax_qmm.bench.run")
    if check is None:
        named = products(model=model, shapes=shapes, m=m, dtype=dtype)
        run.main(products=named, peers=["xla", "cublaslt"] if peers is None else peers, **options)
    elif model or shapes:
        sys.exit("--check takes its products from the file: leave --model and --shapes out")
    else:
        named = [p for p in check.us if (not m or p.m in m) and (not dtype or run.KINDS[p.dtype] in dtype)]
        run.main(products=named, peers=peers or [], reference=check, **options)


def run_tune(*, file, **options) -> None:
    load("tuning", "jax_qmm.bench.tune").main(products=products(**options), file=file)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that `arguments` (by default the process's own) names; without one prints the help."""
    options = vars(parser().parse_args(arguments))
    run = options.pop("run", parser().print_help)
    try:
        if options.pop("version"):
            print(versions())
        else:
            run(**options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130  # as the shell has it for SIGINT
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the process's end
        return 141  # as the shell has it for SIGPIPE
    return 0


if __name__ == "__main__":
    sys.exit(main())
