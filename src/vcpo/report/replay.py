"""What several methods make of the same saved minibatch: tables for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.observe.environment import environment
from vcpo.observe.formatting import fixed, percent

_TOP = 5
_CHARACTERS = 60
_LEGEND = (
    "ESS: of raw ratios, and of the weights applied; max w: share of the largest raw ratio; cosine: with the first"
    " method's gradient g; noise: estimated variance of g over |g|^2; top: share of the sum of all |g_i|^2"
)
_NESTED = ("second_moments", "parts")
# narrow, so that ten numbers fit into a terminal of 80 columns
_COLUMNS = ("ESS", "ESS\nappl.", "max\nw", "step\nsize", "base-\nline", "|g|", "cos-\nine", "noise", "top 1", "top 5")


@dataclass(frozen=True)
class TrajectoryPart:
    """One trajectory's part in one method's gradient g = sum_i g_i.

    log_ratio: un-truncated sequence log-ratio. weight: as applied (at token level the mean of its tokens' weights).
    weight_share: of the sum of all un-truncated ratios. advantage: what multiplied the weighted gradient.
    norm: |g_i|, with everything that multiplies it; 0 if the trajectory contributes nothing.
    share: of the sum of all |g_i|^2. Not finite or unknown is ``None``.
    """

    name: str
    problem: str
    reward: float | None
    log_ratio: float | None
    weight: float | None
    weight_share: float | None
    advantage: float | None
    norm: float | None
    share: float | None
    text: str


@dataclass(frozen=True)
class MethodReplay:
    """One method on the minibatch; ``None`` where a number is not finite or the step would be skipped.

    ess: of the un-truncated ratios, as in training; ess_applied: of the weights that the method applies.
    largest_weight_share: max w / sum w, un-truncated. step_scale: the factor on the learning rate.
    gradient_norm: before clipping and gradient control. cosine: of the gradient with that of the first method.
    second_moment: sum_i |g_i|^2, which the optimal baseline makes small; variance: the estimate
        B / (B - 1) (sum_i |g_i|^2 - |g|^2 / B) of the summed variance of all components of g, as if the B scored
        trajectories were independent; noise: variance / |g|^2.
    top_1, top_5: parts of the second moment of the largest one and five trajectories.
    second_moments: what the second moment would be with other baselines, for methods that take norms anyway.
    parts: every trajectory, the largest share first.
    """

    method: str
    skipped: str | None
    ess: float | None
    ess_applied: float | None
    largest_weight_share: float | None
    step_scale: float | None
    baseline_mean: float | None
    gradient_norm: float | None
    cosine: float | None
    second_moment: float | None
    variance: float | None
    noise: float | None
    top_1: float | None
    top_5: float | None
    second_moments: dict[str, float | None]
    parts: list[TrajectoryPart]


@dataclass(frozen=True)
class Replay:
    """A minibatch under several methods.

    step: whose minibatch it is. trained_at: the version whose weights computed that step; version: the one of the
    weights used here. weights: the directory of their model.
    """

    run: str
    step: int
    trained_at: int
    version: int
    weights: str
    methods: list[MethodReplay]

    def print(self, console: Console) -> None:
        """One table of methods, and for every method the trajectories that dominate its gradient."""
        console.print(
            Text(f"{self.run}: minibatch of step {self.step} at version {self.version} ({self._distance_in_words()})"),
            soft_wrap=True,
        )
        table = _table("method", _COLUMNS)
        for method in self.methods:
            table.add_row(Text(method.method), *_cells(method))
        console.print(table)
        console.print(_LEGEND, style="dim")
        for method in self.methods:
            if method.skipped:
                console.print(Text(f"{method.method} would skip this step: {method.skipped}"), soft_wrap=True)
            elif method.second_moment == 0:
                console.print(Text(f"{method.method}: no trajectory has a gradient"), soft_wrap=True)
            else:
                console.print(_top_table(method))

    def write(self, out: Path) -> list[Path]:
        """Write ``replay.json`` (everything) and ``replay.csv`` (one row per method). Raises OSError."""
        out.mkdir(parents=True, exist_ok=True)
        data, rows = out / "replay.json", out / "replay.csv"
        content = {**asdict(self), "environment": environment()}
        data.write_text(json.dumps(content, indent=2, allow_nan=False, default=str) + "\n", encoding="utf-8")
        with rows.open("w", encoding="utf-8", newline="") as file:
            lines = [{key: value for key, value in asdict(m).items() if key not in _NESTED} for m in self.methods]
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
        return [data, rows]

    def _distance_in_words(self) -> str:
        steps = self.version - self.trained_at
        if not steps:
            return "the weights that trained on it"
        place = "after" if steps > 0 else "before"
        return f"{abs(steps)} step{'s' if abs(steps) > 1 else ''} {place} the weights that trained on it"


def finite(value: float | None) -> float | None:
    """The number, or ``None`` where there is none."""
    return value if value is not None and math.isfinite(value) else None


def _cells(method: MethodReplay) -> Sequence[str]:
    return (
        fixed(method.ess),
        fixed(method.ess_applied),
        percent(method.largest_weight_share),
        fixed(method.step_scale),
        _number(method.baseline_mean),
        _number(method.gradient_norm),
        fixed(method.cosine),
        _number(method.noise),
        percent(method.top_1),
        percent(method.top_5),
    )


def _top_table(method: MethodReplay) -> Table:
    title = Text(f"{method.method}: the trajectories that dominate")
    table = _table("trajectory", ("reward", "log-\nratio", "weight", "advan-\ntage", "norm", "share"), title)
    table.add_column("response", overflow="fold")
    for part in method.parts[:_TOP]:
        numbers = (part.reward, part.log_ratio, part.weight, part.advantage, part.norm)
        table.add_row(
            Text(part.name), *(_number(number) for number in numbers), percent(part.share), Text(_excerpt(part.text))
        )
    return table


def _table(first: str, numbers: Sequence[str], title: Text | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=title, title_justify="left", title_style="bold")
    table.add_column(first, style="bold", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _excerpt(text: str) -> str:
    line = " ".join(text[: 4 * _CHARACTERS].split())[:_CHARACTERS]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
