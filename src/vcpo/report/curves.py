"""The curves of one or several runs as small multiples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vcpo.report.figures import add_legend, line_style, scale_values, set_limits, smooth, style
from vcpo.report.runs import RunData, series

_COLUMNS = 3


@dataclass(frozen=True)
class _Panel:
    """One small plot. ``keys``: metrics in order of preference, the first that a run has is drawn."""

    title: str
    keys: tuple[str, ...]
    log: bool = False
    share: bool = False  # a number between 0 and 1
    percent: bool = False
    evaluated: bool = False  # measured on held-out problems as well
    upper: str = ""  # a metric drawn thinly above, such as the maximum


_PANELS = (
    _Panel("Accuracy", ("accuracy",), percent=True, evaluated=True),
    _Panel("Training reward", ("reward",)),
    _Panel("Effective sample size (share)", ("ess",), share=True),
    _Panel("KL(sampler ‖ learner) per token", ("kl_k3", "kl"), log=True),
    _Panel("Gradient norm before clipping", ("grad_norm",), log=True),
    _Panel("Policy lag in steps", ("lag_mean",), upper="lag_max"),
    _Panel("Step size factor", ("step_scale",), share=True),
    _Panel("Response length in tokens", ("response_length",)),
    _Panel("Training tokens per second", ("tokens_per_second",)),
)


def draw_runs(runs: Sequence[RunData]) -> Figure:
    """Every panel for which at least one run has numbers; one colour per run throughout."""
    panels = [panel for panel in _PANELS if any(_has(run, panel) for run in runs)]
    rows = max(1, -(-len(panels) // _COLUMNS))
    window = smoothing_window(max((len(run.train) for run in runs), default=0))
    with style():
        figure = Figure(figsize=(11, 2.55 * rows + 0.55), layout="constrained")
        grid = figure.subplots(rows, _COLUMNS, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number < len(panels):
                _draw_panel(axes, panels[number], runs, window)
                if number >= len(panels) - _COLUMNS:
                    axes.set_xlabel("optimizer step")
            else:
                axes.set_axis_off()
        add_legend(figure, *_legend(runs, window), columns=5)
    return figure


def smoothing_window(steps: int) -> int:
    """Steps of the running mean that is drawn over the raw numbers; 1 (none) for a short run."""
    return 1 if steps < 40 else 2 * (steps // 40) + 1


def _has(run: RunData, panel: _Panel) -> bool:
    lines = [*run.train, *run.eval] if panel.evaluated else run.train
    return any(key in line for line in lines for key in panel.keys)


def _draw_panel(axes: Axes, panel: _Panel, runs: Sequence[RunData], window: int) -> None:
    lines = [line for run in runs for line in run.train]
    key = next((key for key in panel.keys if any(key in line for line in lines)), panel.keys[0])
    scale_values(axes, [line[k] for line in lines for k in (key, panel.upper) if k in line], panel.log)
    # an arithmetic mean over steps would smear a spike of several decades
    smoothed = window > 1 and axes.get_yscale() == "linear"
    for index, run in enumerate(runs):
        look = line_style(index)
        evaluated = panel.evaluated and any(key in line for line in run.eval)
        steps, values = series(run.train, key)
        faint = 0.3 if smoothed or evaluated else 1.0
        axes.plot(steps, values, **look | {"linestyle": "-"}, alpha=faint, linewidth=1.0)
        if evaluated:
            axes.plot(*series(run.eval, key), **look, marker="o", markersize=3.5)
        elif smoothed:
            axes.plot(steps, smooth(values, window), **look)
        if panel.upper:
            axes.plot(*series(run.train, panel.upper), **look | {"linestyle": ":"}, linewidth=1.2)
    axes.set_title(panel.title + (" (dotted: max)" if panel.upper else ""))
    if panel.share or panel.percent:
        set_limits(axes, 1.03)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _legend(runs: Sequence[RunData], window: int) -> tuple[list[Line2D], list[str]]:
    handles = [Line2D([], [], **line_style(index)) for index in range(len(runs))]
    labels = [run.name for run in runs]
    if any(run.eval for run in runs):
        handles.append(Line2D([], [], color="0.5", marker="o", markersize=4))
        labels.append("held-out problems")
    handles.append(Line2D([], [], color="0.5", alpha=0.5))
    labels.append(f"training, with its running mean over {window} steps" if window > 1 else "training, every step")
    return handles, labels
