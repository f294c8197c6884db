"""Beyond the paper: the main contrast on other tasks, longer responses and larger models. What decides?"""

from __future__ import annotations

from typing import Any

from vcpo.report.comparison_figure import PANELS
from vcpo.reproduce.catalogue import BASIC, RISE, SPIKE
from vcpo.reproduce.claims import Claim, as_good_as, rescues
from vcpo.reproduce.figure import Figure


def _regime(name: str, title: str, difference: str, recipe: str, **overrides: Any) -> Figure:
    return Figure(
        name,
        title,
        f"Not in the paper: figure 5's contrast, {difference}.",
        (
            Claim("collapse", "with a lag, sequence TIS collapses and VCPO does not", rescues("tis", "vcpo")),
            Claim("match", "with a lag, VCPO matches synchronous training", as_good_as("vcpo", "sync")),
            Claim("spike", "a spike of the gradient norm comes before TIS's collapse", SPIKE),
            Claim("kl", "KL(sampler, learner) rises by 2 to 3 decades before TIS's collapse", RISE),
        ),
        recipe=recipe,
        variants={variant: {**changes, **overrides} for variant, changes in BASIC.items()},
        seeds=(1, 2, 3),
        panels=PANELS,
    )


REGIMES: tuple[Figure, ...] = (
    _regime("long", "Longer responses", "with twice as many tokens per response", "sort-long.yaml"),
    _regime("wide", "A model of a million parameters", "with a wider and deeper model", "sort-wide.yaml"),
    _regime("distinct", "Another task: distinct digits", "on naming the digits that occur", "distinct.yaml"),
    _regime(
        "distinct-fast",
        "The other task at three times the learning rate",
        "on naming the digits that occur, at 1.2e-3",
        "distinct.yaml",
        **{"training.learning_rate": 1.2e-3},
    ),
    _regime(
        "gentle",
        "Half the learning rate",
        "at 2e-4",
        "sort.yaml",
        **{"training.learning_rate": 2e-4},
    ),
)
