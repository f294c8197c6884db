"""Beyond the paper: the main contrast on other tasks, longer responses and larger models. What decides?"""

from __future__ import annotations

from vcpo.report.comparison_figure import PANELS
from vcpo.reproduce.catalogue import BASIC
from vcpo.reproduce.claims import Claim, as_good_as, rescues
from vcpo.reproduce.figure import Figure


def _regime(name: str, title: str, difference: str, recipe: str) -> Figure:
    return Figure(
        name,
        title,
        f"Not in the paper: figure 5's contrast, {difference}.",
        (
            Claim("collapse", "with a lag, sequence TIS collapses and VCPO does not", rescues("tis", "vcpo")),
            Claim("match", "with a lag, VCPO matches synchronous training", as_good_as("vcpo", "sync")),
        ),
        recipe=recipe,
        variants=BASIC,
        seeds=(1, 2, 3),
        panels=PANELS,
    )


REGIMES: tuple[Figure, ...] = (
    _regime("long", "Longer responses", "with twice as many tokens per response", "sort-long.yaml"),
    _regime("wide", "A model of a million parameters", "with a wider and deeper model", "sort-wide.yaml"),
    _regime("distinct", "Another task: distinct digits", "on naming the digits that occur", "distinct.yaml"),
)
