"""How every figure looks, and how it leaves: PNG for files, SVG that takes the page's colours for HTML."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

# Okabe and Ito's palette, which the common kinds of colour blindness keep apart, without its yellow (too pale)
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))

# colours that stand for those of the page in inline SVG
_INK, _GRID = "#1f2328", "#d8dce1"

_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.hspace": 0.06,
    "figure.constrained_layout.wspace": 0.05,
    "svg.fonttype": "none",
    "savefig.dpi": 160,
}

# a panel becomes logarithmic when its values span more than this factor
_LOG_FROM = 30.0


@contextmanager
def style() -> Iterator[None]:
    """Figures made inside share one look, whatever the user's matplotlib settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)  # type: ignore[arg-type]
        yield


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the ``index``-th run or variant; colours repeat with other dashes after six."""
    return {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)]}


def scale_values(axes: Axes, values: Sequence[float], log: bool) -> None:
    """Set up the vertical axis: logarithmic where allowed and the positive values span decades, else from zero."""
    finite = [value for value in values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    if log and positive and max(positive) / min(positive) > _LOG_FROM:
        axes.set_yscale("log", nonpositive="mask")
    elif finite and min(finite) >= 0:
        set_limits(axes, 1.08 * max(finite) or 1.0)
    if axes.get_yscale() == "linear" and positive and max(positive) >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def set_limits(axes: Axes, top: float) -> None:
    """From zero to ``top``, with room for a line at zero to be seen above the axis."""
    axes.set_ylim(-0.015 * top, top)


def smooth(values: Sequence[float], window: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Centred running mean over ``window`` values (fewer at the ends); NaN is left out of the means."""
    array = np.asarray(values, dtype=float)
    half = window // 2
    known = np.isfinite(array)
    kernel = np.ones(2 * half + 1)
    # "full" and a cut, because "same" would return the kernel's length for a series shorter than the kernel
    cut = slice(half, half + len(array))
    total = np.convolve(np.where(known, array, 0.0), kernel)[cut]
    number = np.convolve(known.astype(float), kernel)[cut]
    means = np.full(len(array), np.nan)
    np.divide(total, number, out=means, where=number > 0.5)
    return means


def add_legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str], columns: int) -> None:
    """A legend above the panels, in which names appear letter by letter.

    Otherwise matplotlib hides names that begin with an underscore and reads dollar signs as formulas.
    """
    shown = [f" {name}" if name.startswith("_") else name for name in names]
    legend = figure.legend(handles, shown, loc="outside upper left", ncols=min(len(shown), columns))
    for text in legend.get_texts():
        text.set_parse_math(False)


def save_png(figure: Figure, path: Path) -> Path:
    """Write a PNG on white."""
    with style():
        figure.savefig(path, format="png", facecolor="white", metadata={"Software": None})
    return path


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element whose text and grid take the page's ``currentColor`` and ``--grid``.

    name: makes the ids inside unique among the figures of one page.
    """
    buffer = io.StringIO()
    with style(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
