"""The figure of a comparison: four panels, one line per variant with the range over its seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vcpo.report.figures import add_legend, line_style, scale_values, set_limits, style
from vcpo.report.runs import RunData, series


@dataclass(frozen=True)
class Panel:
    """One small plot over the steps. keys: metrics in order of preference. kind: of the lines. share: from 0 to 1."""

    title: str
    keys: tuple[str, ...]
    kind: str = "train"
    log: bool = False
    share: bool = False


PANELS = (
    Panel("Accuracy on held-out problems", ("accuracy",), kind="eval", share=True),
    Panel("Effective sample size (share of the minibatch)", ("ess",), share=True),
    Panel("KL(sampler ‖ learner) per token", ("kl_k3", "kl"), log=True),
    Panel("Gradient norm before clipping", ("grad_norm",), log=True),
)


def draw_comparison(variants: Mapping[str, Sequence[RunData]], panels: Sequence[Panel] = PANELS) -> Figure:
    """Mean over seeds as a line and their range, minimum to maximum, as a band; geometric means on logarithmic axes.

    panels: two to a row.
    """
    with style():
        rows = -(-len(panels) // 2)
        figure = Figure(figsize=(9, 2.9 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, 2, squeeze=False).flat
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, variants)
        for axes in grid:
            axes.set_axis_off()
        handles = [Line2D([], [], **line_style(index)) for index in range(len(variants))]
        names = [f"{name} ({len(runs)} seed{'s' * (len(runs) != 1)})" for name, runs in variants.items()]
        add_legend(figure, handles, names, columns=4)
    return figure


def _draw_panel(axes: Axes, panel: Panel, variants: Mapping[str, Sequence[RunData]]) -> None:
    lines = [line for runs in variants.values() for run in runs for line in getattr(run, panel.kind)]
    key = next((key for key in panel.keys if any(key in line for line in lines)), panel.keys[0])
    scale_values(axes, [line[key] for line in lines if key in line], panel.log)
    log = axes.get_yscale() == "log"
    for index, runs in enumerate(variants.values()):
        steps, mean, low, high = _over_seeds([series(getattr(run, panel.kind), key) for run in runs], log)
        look = line_style(index)
        axes.plot(steps, mean, **look, marker="o" if panel.kind == "eval" else "", markersize=3)
        axes.fill_between(steps, low, high, color=look["color"], alpha=0.18, linewidth=0)
    axes.set_title(panel.title + (", geometric mean" if log else ""))
    axes.set_xlabel("optimizer step")
    if panel.share:
        set_limits(axes, 1.03)
    if panel.kind == "eval" and panel.share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _over_seeds(
    runs: Sequence[tuple[list[int], list[float]]], log: bool
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, minimum and maximum over the runs that have a usable number at the step."""
    at: dict[int, list[float]] = {}
    for steps, values in runs:
        for step, value in zip(steps, values, strict=True):
            if math.isfinite(value) and (value > 0 or not log):
                at.setdefault(step, []).append(value)
    ordered = sorted(at)
    means = [float(np.exp(np.mean(np.log(at[s])))) if log else float(np.mean(at[s])) for s in ordered]
    return ordered, means, [min(at[s]) for s in ordered], [max(at[s]) for s in ordered]
