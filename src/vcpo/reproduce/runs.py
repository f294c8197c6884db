"""Which runs the figures need, and where they are: figures that ask for the same configuration share one run.

A run counts as the one that is asked for if its recorded configuration, read by the present code, is equal but for
what does not touch its numbers. So a new option with a default keeps old runs valid, and a changed default does not.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo.config import RunConfig, read_recipe
from vcpo.errors import UserError
from vcpo.observe.summary import read_sessions
from vcpo.pipeline.compare import PlannedRun
from vcpo.pipeline.run_directory import RunDirectory
from vcpo.pipeline.variants import changed
from vcpo.reproduce.figure import Figure

_WITHOUT_EFFECT = ("output_dir", "checkpoint", "logging", "compare")


@dataclass(frozen=True)
class Cell:
    """One variant and seed of one figure, and the run that serves it (perhaps other figures, too)."""

    figure: str
    variant: str
    seed: int
    run: PlannedRun

    @property
    def is_finished(self) -> bool:
        """Whether the run has been made."""
        return RunDirectory(self.run.directory).is_finished


class RunStore:
    """The runs below one directory, found by configuration."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._by_identity: dict[str, Path] = {}
        for path in sorted(directory.glob("*/config.yaml")):
            try:
                _, config = RunDirectory.of_finished_or_running(path.parent)
            except UserError:
                continue  # made by a version whose options were others
            self._by_identity[_identity(config)] = path.parent

    def locate(self, config: RunConfig) -> Path:
        """The directory of the run with this configuration; a new name for one that is not there."""
        identity = _identity(config)
        if identity not in self._by_identity:
            digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
            lag = f"k{config.runtime.max_staleness}"
            name = f"{config.task.name.rpartition(':')[2]}-{config.method.name}-{lag}-seed{config.seed}-{digest}"
            self._by_identity[identity] = self._directory / name
        return self._by_identity[identity]


def plan_figures(figures: Sequence[Figure], seeds: Sequence[int] | None, recipes: Path, store: RunStore) -> list[Cell]:
    """Every run that the figures need, validated before any of them starts.

    seeds: instead of the figures' own. Raises UserError for a missing recipe or an invalid variant.
    """
    cells = []
    bases: dict[str, dict[str, Any]] = {}
    for figure in figures:
        for name, changes in figure.variants.items():
            for seed in figure.seeds if seeds is None else seeds:
                if figure.recipe not in bases:
                    bases[figure.recipe] = read_recipe(recipes / figure.recipe)
                source = f"variant {name!r} of {figure.name}"
                chosen = {**changes, "seed": seed}
                directory = store.locate(changed(bases[figure.recipe], chosen, source))
                config = changed(bases[figure.recipe], {**chosen, "output_dir": str(directory)}, source)
                cells.append(Cell(figure.name, name, seed, PlannedRun(name, seed, directory, config)))
    return cells


def distinct(cells: Sequence[Cell]) -> list[PlannedRun]:
    """Each run once, in the order of the cells."""
    return list({cell.run.directory: cell.run for cell in cells}.values())


def typical_seconds(cells: Sequence[Cell]) -> float | None:
    """Median wall time of the runs that are finished; ``None`` when none is."""
    spans = []
    for run in distinct([cell for cell in cells if cell.is_finished]):
        spans += [s["ended"] - s["started"] for s in read_sessions(run.directory) if s.get("outcome") == "finished"]
    return statistics.median(spans) if spans else None


def _identity(config: RunConfig) -> str:
    plain = {key: value for key, value in config.to_plain().items() if key not in _WITHOUT_EFFECT}
    return json.dumps(plain, sort_keys=True)
