"""The plots: metrics over steps in the paper's panels, or quantities over the lag."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from vcpo.report.comparison_figure import draw_comparison
from vcpo.report.figures import add_legend, line_style, scale_values, set_limits, style
from vcpo.report.runs import RunData
from vcpo.reproduce.evidence import RunEvidence
from vcpo.reproduce.figure import Figure, Sweep

_TITLES = {
    "late_accuracy": "Late accuracy",
    "collapsed": "Share of seeds that collapse",
    "ess_median": "Median effective sample size",
    "step_scale": "Mean step size factor",
    "weight_share": "Largest weight over its even share",
    "kl_rise": "Rise of KL in decades",
}
_SHARES = ("late_accuracy", "collapsed", "ess_median", "step_scale")
_LOG = ("weight_share",)


def draw(
    figure: Figure, runs: Mapping[str, Sequence[RunData]], evidence: Mapping[str, Sequence[RunEvidence]]
) -> Drawing:
    """The figure's plot of the runs that there are."""
    if figure.sweep is not None:
        return draw_sweep(figure.sweep, evidence)
    return draw_comparison(runs, figure.panels)


def draw_sweep(sweep: Sweep, evidence: Mapping[str, Sequence[RunEvidence]]) -> Drawing:
    """Mean over seeds as a line over the lag, every seed as a dot."""
    with style():
        columns = min(2, len(sweep.quantities))
        rows = -(-len(sweep.quantities) // columns)
        drawing = Drawing(figsize=(4.5 * columns, 2.9 * rows + 0.5), layout="constrained")
        grid = drawing.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number < len(sweep.quantities):
                _draw_quantity(axes, sweep.quantities[number], sweep, evidence)
            else:
                axes.set_axis_off()
        handles = [Line2D([], [], **line_style(index)) for index in range(len(sweep.lines))]
        add_legend(drawing, handles, list(sweep.lines), columns=4)
    return drawing


def _draw_quantity(axes: Axes, name: str, sweep: Sweep, evidence: Mapping[str, Sequence[RunEvidence]]) -> None:
    points = {
        legend: [(k, [float(v) for r in evidence.get(variant, ()) if (v := getattr(r, name)) is not None])
                 for k, variant in by_lag.items()]
        for legend, by_lag in sweep.lines.items()
    }  # fmt: skip
    scale_values(axes, [v for line in points.values() for _, values in line for v in values], log=name in _LOG)
    lags = sorted({k for by_lag in sweep.lines.values() for k in by_lag})
    axes.set_xscale("symlog", base=2, linthresh=2, linscale=0.7)
    axes.xaxis.set_major_locator(FixedLocator(lags))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    for index, line in enumerate(points.values()):
        known = [(k, values) for k, values in line if values]
        look = line_style(index)
        axes.plot([k for k, _ in known], [statistics.fmean(values) for _, values in known], **look)
        dots = [(k, value) for k, values in known for value in values]
        axes.plot([k for k, _ in dots], [v for _, v in dots], "o", color=look["color"], markersize=3, alpha=0.6)
    axes.set_title(_TITLES[name])
    axes.set_xlabel("lag k")
    if name in _SHARES:
        set_limits(axes, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
