"""What `quantize_model` did, layer by layer."""

import dataclasses
import math
from collections.abc import Mapping

import jax

from jax_qmm.dtypes import array_bytes
from jax_qmm.models.plan import Plan
from jax_qmm.ops import block_quantized_mm, block_scaled_mm, dispatch
from jax_qmm.schemes import W4A8, W8A8
from jax_qmm.text_table import format_bytes, format_table


def nbytes(tree) -> int:
    """The bytes of all arrays in `tree` on a device."""
    return sum(map(array_bytes, (x for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))))


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
      error: relative L2 error of the layer's output, quantized against float on the float model's input of
        the layer, over all batches of `sensitivity`; None where that was not asked for or no batch came by.
    """

    path: str
    op: str
    scheme: str
    runs_on: str
    bytes_before: int
    bytes_after: int
    reason: str = ""
    error: float | None = None


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
        ways = {row.runs_on for row in self.quantized}
        table = format_table(
            ("path", "op", "scheme", "runs on", "bytes", "error", "reason"),
            [
                (
                    row.path or "(the model)",
                    row.op,
                    row.scheme or "skipped",
                    row.runs_on if len(ways) > 1 else "",
                    _change(row.bytes_before, row.bytes_after),
                    "" if row.error is None else f"{row.error:.5f}",
                    row.reason,
                )
                for row in self.rows
            ],
        )
        lines = [table] if self.rows else ["no layer holds a weight of two or more dimensions"]
        lines += [f"matched nothing: {rule}" for rule in self.unused_rules]
        if len(ways) == 1:
            lines.append(f"the quantized layers run on the {ways.pop()}")
        total = _change(self.total_before, self.total_after)
        lines.append(f"{len(self.quantized)} of {len(self.rows)} layers quantized, all parameters {total}")
        return "\n".join(lines)


def make_report(
    plan: Plan,
    before: Mapping[str, int],
    after: Mapping[str, int],
    totals: tuple[int, int],
    errors: Mapping[str, float],
) -> Report:
    """The report of a plan that was carried out.

    Args:
      plan: what became of each layer.
      before, after: bytes of each layer's own parameters, by path.
      totals: bytes of all parameters, before and after.
      errors: relative L2 errors of the layers' outputs, by path.
    """
    rows = []
    for path in before:
        if path in plan.skipped:
            use = plan.skipped[path]
            rows.append(LayerRow(path, use.op, "", "", before[path], after[path], use.reason or ""))
        else:
            each = plan.conversions[path]
            op, words, error = each.use.op, str(each), errors.get(path)
            rows.append(LayerRow(path, op, words, _runs_on(each), before[path], after[path], each.note, error))
    return Report(tuple(rows), plan.unused_rules, *totals)


def _runs_on(conversion):
    use, scheme = conversion.use, conversion.scheme
    sizes = [use.shape[axis] for axis in use.contracted]
    k = math.prod(sizes)
    if isinstance(scheme, W8A8 | W4A8):
        if scheme.block(sizes) == k:
            return dispatch.runs_on()
        op, block = block_quantized_mm, scheme.block(sizes)
    else:
        op, block = block_scaled_mm, scheme.tile_size or k
    runs_on, why = dispatch.runs_on(op.OLDEST), op.unserved_blocks(block, k)
    return f"reference: {why}" if why and runs_on == "kernel" else runs_on


def _change(before, after):
    return format_bytes(before) if before == after else f"{format_bytes(before)} -> {format_bytes(after)}"
