"""What a figure or table is made of: variants of one recipe, seeds, panels and claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vcpo.report.comparison_figure import Panel
from vcpo.reproduce.claims import Claim


@dataclass(frozen=True)
class Sweep:
    """Panels whose horizontal axis is the lag. lines: legend -> lag -> variant. quantities: fields of RunEvidence."""

    lines: Mapping[str, Mapping[int, str]]
    quantities: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper.

    paper: what it shows and where we know that from. recipe: file in the recipes' directory. variants: name -> dotted
    overrides of the recipe. seeds: those that are run unless others are asked for. panels: metrics over steps.
    sweep: drawn instead of the panels. claims: what the paper says there.
    """

    name: str
    title: str
    paper: str
    claims: tuple[Claim, ...]
    recipe: str = "sort.yaml"
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    panels: tuple[Panel, ...] = ()
    sweep: Sweep | None = None
