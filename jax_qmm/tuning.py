"""What was measured of GPUs: the costs by which kernels are chosen, and the fastest kernels for some products.

A file is of one model of GPU. The package brings some in jax_qmm/tuned, which describe the GPU too; a GPU without
one gets the costs of another of its architecture, or where there is none estimates, which need its description
alone. `python -m jax_qmm tune` writes the user's own, whose products go before the package's. A process reads the
descriptions and costs when it loads the extension, and the products when it first lowers, explains or runs a
product on a GPU. Kernels are stored in words, so that the file outlives a build whose table has another order.
Results of 16 bits have the same kernels: what is tuned for bfloat16 serves float16 too, and the other way round; of
both, the last one counts. So it is with the two kinds of results of 8 bits.
"""

import json
import os
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "jax_qmm tuning 1"
OP = "scaled_mm"  # the only one whose kernels are chosen so
PACKAGED = Path(__file__).with_name("tuned")
DATASHEETS = PACKAGED / "gpus.json"  # what the maker says of models that were not measured, and where


class Product(NamedTuple):
    """What a kernel is chosen for, in the order of the extension's ScaledMmProblem.

    Attributes:
      m: rows of a.
      n: rows of b.
      k: what is contracted.
      batch: how many such products at once.
      dtype: of a and b, "int8" or "float8_e4m3fn".
      out_dtype: of the result.
      fast_accum: whether fp8 is summed in the tensor cores' narrow accumulator.
      full_epilogue: whether it has an activation or zero points of b; files leave out that it has none. Results of 8
        bits have the full epilogue either way.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    out_dtype: str
    fast_accum: bool
    full_epilogue: bool = False

    def __str__(self):
        batch = f"{self.batch} x " if self.batch > 1 else ""
        full = ", full epilogue" if self.full_epilogue else ""
        return f"{self.dtype} to {self.out_dtype}, {batch}M {self.m}, N {self.n}, K {self.k}{full}"

    def fields(self) -> dict[str, Any]:
        """What a file has of it."""
        named = self._asdict()
        if not self.full_epilogue:
            del named["full_epilogue"]
        return named


class Entry(NamedTuple):
    """The fastest kernel for a product: its words, and the microseconds it took."""

    product: Product
    kernel: str
    microseconds: float


class Cost(NamedTuple):
    """What the cost model takes a kernel's time from, in the order of the extension's set_scaled_mm_cost.

    Attributes:
      dtype: of the operands.
      kernel: its words, without the swizzle.
      k_tile: microseconds of one K tile in every SM.
      tile: microseconds of a tile's end.
      full_tile: likewise with the full epilogue, which pingpong kernels apply beside the next tile's products.
      launch: microseconds of a launch.
      reading: the time of the operands' and the result's bytes, against a copy's.
    """

    dtype: str
    kernel: str
    k_tile: float
    tile: float
    full_tile: float
    launch: float
    reading: float


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
    """The file that the package brings for the extension's `gpu`, if it has one.

    >>> packaged(types.SimpleNamespace(name="NVIDIA H200")).name
    'nvidia-h200.json'
    """
    return PACKAGED / f"{gpu.name.lower().replace(' ', '-')}.json"


def packaged_files() -> list[Path]:
    """The files of the package, each of one model of GPU that was measured."""
    return sorted(path for path in PACKAGED.glob("*.json") if path != DATASHEETS)


def choices(kernels, product: Product, gpu) -> dict[str, tuple[int, int]]:
    """The kernels of the extension `kernels` that serve `product` on `gpu`, by their words."""
    return {kernels.describe_scaled_mm(choice): choice for choice in kernels.ScaledMmProblem(*product).choices(gpu)}


def describe_gpus(kernels) -> None:
    """Gives the extension `kernels` the descriptions and costs of the GPUs that the package has files of.

    And the descriptions of those in gpus.json, of which nothing was measured.
    """
    for file in packaged_files():
        content = _read(file)
        model = content["device_kind"], content["sm_count"]
        described = content["gpu"]
        sms = {int(blocks): count for blocks, count in described["cluster_sms"].items()}
        kernels.describe_gpu(*model, **described | {"cluster_sms": sms})
        gpu = kernels.Gpu(*model, described["arch"])
        for cost in load_costs(file):
            kernels.set_scaled_mm_cost(gpu, *cost)

    for known in json.loads(DATASHEETS.read_text(encoding="utf-8"))["gpus"]:
        # As cuda/core/gpu.cc has it of GPUs that only the driver knows.
        described = {
            "copy_rate": 0.9 * known["bandwidth"],
            "l2_bytes": known["l2"] * 32 // 50,
            "cluster_sms": {},
        } | {name: known[name] for name in ("arch", "peak", "clock", "shared_memory")}
        kernels.describe_gpu(known["device_kind"], known["sm_count"], **described)


def h200() -> dict[str, Any]:
    """What the package's file says of the H200 as a GPU: its copy rate, its peak and so on."""
    return _read(PACKAGED / "nvidia-h200.json")["gpu"]


def packaged_gpu(kernels, name: str):
    """The extension's description of the GPU of this name, of which the package has a file."""
    content = _read(packaged(types.SimpleNamespace(name=name)))
    return kernels.Gpu(content["device_kind"], content["sm_count"], content["gpu"]["arch"])


def default_gpu(kernels):
    """That of the GPU that programs are taken to be for in a process without one: an H200."""
    return packaged_gpu(kernels, "NVIDIA H200")


def load_costs(path: Path) -> list[Cost]:
    """The costs in a file of the package."""
    return [Cost(*(fields[name] for name in Cost._fields)) for fields in _read(path)["costs"]]


def save(path: Path, gpu, entries: Iterable[Entry]) -> None:
    """Replaces the products of a file, at once, so that no reader ever sees half of it.

    Its description of the GPU and its costs, if it has them, stay.

    Args:
      path: of the file; missing folders are made.
      gpu: the extension's GPU that was measured.
      entries: all products that the file shall hold.

    Raises:
      OSError: if the file can't be written.
    """
    products = [
        {"op": OP} | e.product.fields() | {"kernel": e.kernel, "microseconds": round(e.microseconds, 3)}
        for e in sorted(entries)
    ]
    _update(path, gpu, products=products)


def save_costs(path: Path, gpu, costs: Iterable[Cost]) -> None:
    """Replaces the costs of a file, as `save` does its products."""
    _update(path, gpu, costs=[{"op": OP} | cost._asdict() for cost in costs])


def _update(path, gpu, **lists):
    content = {"format": FORMAT, "device_kind": gpu.name, "sm_count": gpu.sm_count}
    try:
        content |= _read(path)
    except RefusedError:
        content["products"] = []
    content |= lists
    # One line an entry: small, and readable in a diff.
    sections = [
        f'"{name}": [\n' + ",\n".join("  " + json.dumps(entry) for entry in content.pop(name)) + "\n]"
        for name in ("costs", "products")
        if name in content
    ]
    text = ",\n".join([json.dumps(content)[:-1], *sections])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "}\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedError(error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RefusedError(f'it does not have the format "{FORMAT}"')
    return content


def load(path: Path, kernels, gpu) -> list[Entry]:
    """Reads the products of a tuning file for the extension `kernels` and its GPU `gpu`.

    Raises:
      RefusedError: if the file can't be read, is no tuning file, or is one of another GPU or of kernels that
        this build lacks.
    """
    content = _read(path)
    measured = _model(content.get("device_kind"), content.get("sm_count"))
    if measured != (present := _model(gpu.name, gpu.sm_count)):
        raise RefusedError(f"it was measured on {measured}; this is {present}")
    try:
        entries = [_entry(fields) for fields in content["products"]]
    except (KeyError, TypeError) as error:
        raise RefusedError(f"its products are malformed ({error!r})") from None
    for entry in entries:
        try:
            known = entry.kernel in choices(kernels, entry.product, gpu)
        except (TypeError, ValueError):  # a number or a dtype that the extension does not take
            raise RefusedError(f"there is no product {entry.product}") from None
        if not known:
            raise RefusedError(f'this build has no kernel "{entry.kernel}" for {entry.product}')
    return entries


def _model(name, sm_count):
    return f"{name} with {sm_count} SMs"


def _entry(fields):
    if fields["op"] != OP:
        raise TypeError(f"op is {fields['op']!r}")
    fields = Product._field_defaults | fields
    kinds = Product.__annotations__ | {"kernel": str, "microseconds": (int, float)}
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise TypeError(f"{name} is {fields[name]!r}")
    *product, kernel, microseconds = (fields[name] for name in kinds)
    return Entry(Product(*product), kernel, microseconds)


def apply(kernels, gpus) -> None:
    """Makes the extension use the package's tuning files and this process's; warns if no GPU takes the latter.

    Args:
      kernels: the extension module.
      gpus: the extension's GPUs that it runs on, one of each model.
    """
    own = path()
    if own is None:
        return
    refusals = []
    for gpu in gpus:
        entries = []
        for file in (packaged(gpu), own):
            try:
                entries += load(file, kernels, gpu)
            except RefusedError as error:
                if file is own:  # the package has none for most GPUs
                    refusals.append(error)
        for entry in entries:
            choice = choices(kernels, entry.product, gpu)[entry.kernel]
            kernels.ScaledMmProblem(*entry.product).tune(choice, gpu)
    # Few users have a file where nobody named one.
    expected = "JAX_QMM_TUNING" in os.environ or not all(isinstance(error.__cause__, OSError) for error in refusals)
    if len(refusals) == len(gpus) > 0 and expected:
        warnings.warn(
            f"the tuning file {own} is refused: {refusals[0]}. The defaults serve; remove the file, "
            "or set JAX_QMM_TUNING to another or to 0.",
            stacklevel=2,
        )
