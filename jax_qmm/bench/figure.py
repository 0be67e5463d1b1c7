"""The benchmark's results as a figure: how much of the roofline is achieved by M."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jax_qmm.bench.report import Row

COLORS = {"int8": "C0", "fp8": "C1", "bf16": "0.5"}
# Dash, marker and width by what is measured; the last is drawn on top. XLA's time is that in jit.
STYLES = {
    "xla_bf16": (":", "^", 1.2),
    "cublas_bf16": ("--", "s", 1.2),
    "xla": (":", "^", 1.2),
    "cublaslt_tensorwise": ("-.", "s", 1.2),
    "cublaslt": ("--", "s", 1.2),
    "ours": ("-", "o", 2),
}


def draw(rows: Sequence[Row], title: str) -> Figure:
    """A panel for each weight, a line for each kernel; bfloat16 ones against the same 8-bit roofline."""
    weights = list(dict.fromkeys(row.shape[1:] for row in rows))
    ticks = sorted({row.shape[0] for row in rows})
    columns = min(4, math.ceil(math.sqrt(len(weights))))
    lines = math.ceil(len(weights) / columns)
    drawing = Figure(figsize=(max(8, 4 * columns), 1.2 + 3 * lines), layout="constrained")
    drawing.suptitle(title, fontsize="medium", x=0.01, ha="left")
    panels = drawing.subplots(lines, columns, sharey=True, squeeze=False)
    labelled = {}
    for axes, (n, k) in zip(panels.flat, weights):
        inside = [row for row in rows if row.shape[1:] == (n, k)]
        for label, (shares, color, name) in _lines(inside).items():
            dash, marker, width = STYLES[name]
            m = sorted(shares)
            (labelled[label],) = axes.plot(
                [ticks.index(i) for i in m],
                [shares[i] for i in m],
                dash,
                marker=marker,
                markersize=4,
                linewidth=width,
                color=color,
            )
        axes.set_title(f"N {n}, K {k}", fontsize="medium")
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.set_xticks(range(len(ticks)), map(str, ticks), rotation=60)
        axes.set_xlabel("M", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(weights) :]:
        axes.set_visible(False)
    panels[0, 0].set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    panels[0, 0].yaxis.set_major_formatter(PercentFormatter(1))
    drawing.supylabel("achieved of the 8-bit roofline", fontsize="small")
    drawing.legend(
        list(labelled.values())[::-1],
        list(labelled)[::-1],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize="small",
    )
    return drawing


def _lines(rows):
    """The lines of a panel by label: ({M: part of the roofline}, color, key of STYLES)."""
    found = {}
    for name in STYLES:
        for row in rows:
            if name in row.us:
                kind = "bf16" if name.endswith("bf16") else row.kind
                label = row.labels[name][0] + (f", {kind}" if kind != "bf16" else "")
                points, *_ = found.setdefault(label, ({}, COLORS[kind], name))
                points[row.shape[0]] = row.share(name)
    return found
