"""What `quantize_model` did, layer by layer, and the plain-text tables that it and `explain` print."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from jax_qmm import _ffi


def platform() -> str:
    """The platform that this process computes on by default, named as lowering names it ("cuda")."""
    with jax.ensure_compile_time_eval():
        device = next(iter(jnp.zeros(()).devices()))
    if device.platform != "gpu":
        return device.platform
    try:
        return "cuda" if device in jax.devices("cuda") else device.platform
    except RuntimeError:  # a GPU of another maker
        return device.platform


def runs_on() -> str:
    """Where quantized products of this process run: "kernel", or "reference: why"."""
    reason = _ffi.fallback_reason(platform())
    return "kernel" if reason is None else f"reference: {reason}"


def nbytes(tree) -> int:
    """The bytes of all arrays in `tree`."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


def format_bytes(n: int) -> str:
    """`n` bytes in the largest unit that leaves at least one whole unit.

    >>> format_bytes(1536), format_bytes(90_000_000)
    ('1.5 KiB', '85.8 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of text under `header` in aligned columns; a column with no text in any row is left out.

    >>> print(format_table(("path", "why", "bytes"), [("attn.query", "", "16 B"), ("out", "", "1.0 KiB")]))
    path        bytes
    attn.query  16 B
    out         1.0 KiB
    """
    rows = [tuple(str(cell) for cell in row) for row in rows]
    columns = [(name, *cells) for name, *cells in zip(header, *rows) if any(cells)]
    widths = [max(map(len, column)) for column in columns]
    padded = ([cell.ljust(width) for cell in column] for column, width in zip(columns, widths))
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded))


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One layer of a model: how it was quantized, or why it was not.

    Attributes:
      path: where the layer is in the model, as rules see it ("encoder.layers.0.attn.query").
      op: the layer's class, as "Linear".
      scheme: the scheme in words, "" for a skipped layer.
      runs_on: "kernel", or "reference: why" where this process has no kernel; "" for a skipped layer.
      bytes_before: bytes of the layer's own parameters in the model given.
      bytes_after: the same in the model returned.
      reason: why the layer was skipped, or a remark on one that was not; may be "".
    """

    path: str
    op: str
    scheme: str
    runs_on: str
    bytes_before: int
    bytes_after: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `quantize_model` did; print it.

    Attributes:
      rows: a `LayerRow` for each layer that holds a weight of two or more dimensions, in the model's order.
      unused_rules: the rules that were first to match no layer.
      total_before: bytes of all parameters of the model given.
      total_after: the same of the model returned.
    """

    rows: tuple[LayerRow, ...]
    unused_rules: tuple
    total_before: int
    total_after: int

    @property
    def quantized(self) -> tuple[LayerRow, ...]:
        """The rows of the layers that were quantized."""
        return tuple(row for row in self.rows if row.scheme)

    @property
    def skipped(self) -> tuple[LayerRow, ...]:
        """The rows of the layers that were left as they are."""
        return tuple(row for row in self.rows if not row.scheme)

    def __str__(self):
        table = format_table(
            ("path", "op", "scheme", "runs on", "bytes", "reason"),
            [
                (
                    row.path or "(the model)",
                    row.op,
                    row.scheme or "skipped",
                    row.runs_on,
                    _change(row.bytes_before, row.bytes_after),
                    row.reason,
                )
                for row in self.rows
            ],
        )
        lines = [table] if self.rows else ["no layer holds a weight of two or more dimensions"]
        lines += [f"matched nothing: {rule}" for rule in self.unused_rules]
        total = _change(self.total_before, self.total_after)
        lines.append(f"{len(self.quantized)} of {len(self.rows)} layers quantized, all parameters {total}")
        return "\n".join(lines)


def _change(before, after):
    return format_bytes(before) if before == after else f"{format_bytes(before)} -> {format_bytes(after)}"
