"""Tuning files: the kernels that `python -m jax_qmm tune` measured to be the fastest, for later processes.

The package brings one for each GPU in jax_qmm/tuned; the user's own goes before it, product by product.
A process reads the file when it first lowers or explains a product for a GPU. One that only calls programs
exported elsewhere lowers none, and keeps the kernels that the cost model chooses. Kernels are stored in
words, so that the file outlives a build whose table has another order. Results of 16 bits have the same
kernels: what is tuned for bfloat16 serves float16 too, and the other way round; of both, the last one counts.
"""

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FORMAT = "jax_qmm tuning 1"


class Product(NamedTuple):
    """What a kernel is chosen for, in the order of the extension's arguments.

    Attributes:
      m: rows of a.
      n: rows of b.
      k: what is contracted.
      batch: how many such products at once.
      dtype: of a and b, "int8" or "float8_e4m3fn".
      out_dtype: of the result.
      fast_accum: whether fp8 is summed in the tensor cores' narrow accumulator.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    out_dtype: str
    fast_accum: bool

    def __str__(self):
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.dtype} to {self.out_dtype}, {batch}M {self.m}, N {self.n}, K {self.k}"


class Entry(NamedTuple):
    """The fastest kernel for a product: its words, and the microseconds it took."""

    product: Product
    kernel: str
    microseconds: float


class RefusedError(ValueError):
    """A tuning file that can't serve this process; the message says why."""


def default_path() -> Path:
    """The tuning file in the user's cache directory."""
    # Path.expanduser would raise where a user has no home.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "jax_qmm", "tuning.json")


def path() -> Path | None:
    """The tuning file of this process: JAX_QMM_TUNING, where "" and "0" are none, or else the default."""
    named = os.environ.get("JAX_QMM_TUNING")
    if named is None:
        return default_path()
    return None if named in ("", "0") else Path(os.path.expanduser(named))


def packaged(gpu) -> Path:
    """The file that the package brings for the JAX device `gpu`, if it has one.

    >>> import types
    >>> packaged(types.SimpleNamespace(device_kind="NVIDIA H200")).name
    'nvidia-h200.json'
    """
    return Path(__file__).with_name("tuned") / f"{gpu.device_kind.lower().replace(' ', '-')}.json"


def choices(kernels, product: Product) -> dict[str, tuple[int, int]]:
    """The kernels of the extension `kernels` that serve `product`, by their words."""
    return {kernels.describe_scaled_mm(choice): choice for choice in kernels.scaled_mm_choices(*product)}


def save(path: Path, gpu, entries: Iterable[Entry]) -> None:
    """Replaces the file at once, so that no reader ever sees half of it.

    Args:
      path: of the file; missing folders are made.
      gpu: the JAX device that was measured.
      entries: all that the file shall hold.

    Raises:
      OSError: if the file can't be written.
    """
    products = [
        {**e.product._asdict(), "kernel": e.kernel, "microseconds": round(e.microseconds, 3)} for e in sorted(entries)
    ]
    # One line an entry: small, and readable in a diff.
    lines = ",\n".join("  " + json.dumps(product) for product in products)
    head = json.dumps({"format": FORMAT, "device_kind": gpu.device_kind, "sm_count": gpu.core_count})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f'{head[:-1]}, "products": [\n{lines}\n]}}\n', encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path, kernels, gpu) -> list[Entry]:
    """Reads a tuning file for the extension `kernels` and the JAX device `gpu`.

    Raises:
      RefusedError: if the file can't be read, is no tuning file, or is one of another GPU or of kernels that
        this build lacks.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedError(error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RefusedError(f'it does not have the format "{FORMAT}"')
    measured = _gpu(content.get("device_kind"), content.get("sm_count"))
    if measured != (present := _gpu(gpu.device_kind, gpu.core_count)):
        raise RefusedError(f"it was measured on {measured}; this is {present}")
    try:
        entries = [_entry(fields) for fields in content["products"]]
    except (KeyError, TypeError) as error:
        raise RefusedError(f"its products are malformed ({error!r})") from None
    for entry in entries:
        try:
            known = entry.kernel in choices(kernels, entry.product)
        except (TypeError, ValueError):  # a number or a dtype that the extension does not take
            raise RefusedError(f"there is no product {entry.product}") from None
        if not known:
            raise RefusedError(f'this build has no kernel "{entry.kernel}" for {entry.product}')
    return entries


def _gpu(device_kind, sm_count):
    return f"{device_kind} with {sm_count} SMs"


def _entry(fields):
    kinds = Product.__annotations__ | {"kernel": str, "microseconds": (int, float)}
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise TypeError(f"{name} is {fields[name]!r}")
    *product, kernel, microseconds = (fields[name] for name in kinds)
    return Entry(Product(*product), kernel, microseconds)


def apply(kernels, gpu) -> None:
    """Makes the extension `kernels` use the package's tuning file and this process's; warns if the latter is refused.

    Args:
      kernels: the extension module.
      gpu: the JAX device that it runs on.
    """
    own = path()
    if own is None:
        return
    entries = []
    for file in (packaged(gpu), own):
        try:
            entries += load(file, kernels, gpu)
        except RefusedError as error:
            # Nobody said that there is one: the package has none for most GPUs, and few users have one.
            expected = file is own and ("JAX_QMM_TUNING" in os.environ or not isinstance(error.__cause__, OSError))
            if expected:
                warnings.warn(
                    f"the tuning file {file} is refused: {error}. The defaults serve; remove the file, "
                    "or set JAX_QMM_TUNING to another or to 0.",
                    stacklevel=2,
                )
    for entry in entries:
        kernels.tune_scaled_mm(*entry.product, choices(kernels, entry.product)[entry.kernel])
