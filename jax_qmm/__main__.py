"""The command line: `python -m jax_qmm COMMAND`."""

import argparse
import sys
from pathlib import Path

DEMO_PACKAGES = {"flax", "matplotlib", "optax", "sklearn", "tqdm"}


def png_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
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
        "demo", help="train a small transformer on handwritten digits and quantize it three ways")
    demo.add_argument("--png", type=png_file, metavar="FILE", help="also draw the comparison as a PNG")
    demo.add_argument("--seed", type=int, default=0, help="of split, parameters and order (%(default)s)")
    demo.add_argument("--epochs", type=positive, default=20, help="passes over the images (%(default)s)")
    demo.set_defaults(run=run_demo)
    return top


def run_demo(*, seed: int, epochs: int, png: Path | None) -> None:
    try:
        from jax_qmm import demo
    except ModuleNotFoundError as error:
        if error.name not in DEMO_PACKAGES:
            raise
        sys.exit(f'the demo needs the package {error.name!r}, which is absent: pip install "jax_qmm[demo]"')
    demo.main(seed=seed, epochs=epochs, png=png)


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
