"""Draws how many times as long XLA's bfloat16 program takes, of CSVs that `python -m jax_qmm bench --scheme` wrote.

    python benchmarks/speedups.py w4a16.csv conv.csv --png speedups.png

A panel for each scheme, and for each network of convolutions: a thin line for each weight or layer over rows or images,
and a thick one for their geometric mean.
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

TICKS = 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8
Panels = dict[str, dict[str, dict[int, float]]]  # {panel: {line: {rows or images: ratio}}}


def read(paths: Iterable[Path]) -> Panels:
    panels: Panels = defaultdict(lambda: defaultdict(dict))
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                of_network = f", {row['network']}" if "network" in row else ""
                line, x = f"{row.get('layer', '')} {row['n']} {row['k']}", int(row.get("images", row["m"]))
                panels[row["scheme"] + of_network][line][x] = float(row["xla_bf16_us"]) / float(row["ours_us"])
    return panels


def means(lines: Iterable[dict[int, float]]) -> dict[int, float]:
    """The geometric mean of all lines at each place."""
    ratios = defaultdict(list)
    for line in lines:
        for x, ratio in line.items():
            ratios[x].append(ratio)
    return {x: statistics.geometric_mean(found) for x, found in sorted(ratios.items())}


def draw(panels: Panels, title: str) -> Figure:
    columns = min(3, len(panels))
    drawing = Figure(figsize=(4.5 * columns, 0.8 + 3.2 * -(-len(panels) // columns)), layout="constrained")
    drawing.suptitle(title, fontsize="medium", x=0.01, ha="left")
    grid = drawing.subplots(-(-len(panels) // columns), columns, sharey=True, squeeze=False)
    for axes, (name, lines) in zip(grid.flat, panels.items()):
        mean = means(lines.values())
        for line in lines.values():
            axes.plot(sorted(line), [line[x] for x in sorted(line)], color="0.75", linewidth=0.8, marker=".")
        axes.plot(list(mean), list(mean.values()), color="C0", linewidth=2, marker="o", markersize=4)
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(list(mean), map(str, mean), rotation=60)
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("images" if "," in name else "rows", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    low, high = grid[0, 0].get_ylim()
    ticks = [y for y in TICKS if low <= y <= high]
    grid[0, 0].set_yticks(ticks, [f"{y}x" for y in ticks])
    grid[0, 0].yaxis.set_minor_locator(NullLocator())
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    title = "time of XLA's bfloat16 program / of jax_qmm's; thick: geometric mean"
    draw(read(options.csv), title).savefig(options.png, dpi=110)


if __name__ == "__main__":
    main()
