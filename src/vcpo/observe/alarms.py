"""``alarms.jsonl``: what the watchdog saw, which trajectories were behind it, and what was done."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from vcpo.observe.metrics import json_number
from vcpo.observe.watchdog import Alarm
from vcpo.records import Group, Trajectory

FILE_NAME = "alarms.jsonl"


class StepDetails(Protocol):
    """What an optimizer step tells about its trajectories, in the order of the groups and their members."""

    @property
    def log_ratios_B(self) -> Sequence[float]:
        """Sequence log-ratios, learner over sampler."""
        ...

    @property
    def weights_B(self) -> Sequence[float]:
        """The weights that the method applied."""
        ...

    @property
    def advantages_B(self) -> Sequence[float]:
        """What multiplied each gradient."""
        ...

    @property
    def squared_norms_B(self) -> Sequence[float] | None:
        """Squared gradient norms, NaN where there is none; ``None`` if the method needs none."""
        ...


@dataclass(frozen=True)
class Culprit:
    """A trajectory behind an alarm. quantity: what ``value`` is."""

    trajectory: str
    group: int
    response: int
    quantity: str
    value: float


def culprits(alarm: Alarm, groups: Sequence[Group], details: StepDetails, most: int = 3) -> list[Culprit]:
    """The trajectories of the step that did most for the alarm, the first most of all.

    ESS and largest share: by their share of the raw weights. KL: by the negative log-ratio. Gradient norm: by weight
    times advantage, times the trajectory's own norm where norms are taken. Reward and length: the lowest ones or the
    highest, as the alarm says. None for the entropy, which is not kept by trajectory. NaN comes first.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    scored = [i for i, t in enumerate(trajectories) if _reward(t) is not None and t.mask_T.any()]
    measured = _MEASURES.get(alarm.metric)
    if measured is None or not scored:
        return []
    quantity, measure = measured
    values = dict(zip(scored, measure(scored, trajectories, details), strict=True))
    sign = -1 if alarm.side == "below" and alarm.metric in ("reward", "response_length") else 1
    nan = [i for i in scored if math.isnan(values[i])]
    order = nan + sorted((i for i in scored if i not in nan), key=lambda i: -sign * values[i])
    worst = [(trajectories[i], values[i]) for i in order[:most]]
    return [Culprit(t.name, t.group_id, t.index, quantity, value) for t, value in worst]


class AlarmLog:
    """Appends to a run directory's ``alarms.jsonl``. The file is there only if there was an alarm."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        """resume_step: alarms after it are removed, because those steps are done again; ``None``: all are."""
        self._path = run_dir / FILE_NAME
        kept = [line for line in read_alarms(run_dir) if resume_step is not None and line["step"] <= resume_step]
        if kept:
            beside = self._path.with_suffix(".tmp")
            beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            beside.replace(self._path)
        else:
            self._path.unlink(missing_ok=True)

    def write(self, alarm: Alarm, found: Sequence[Culprit], **facts: Any) -> None:
        """One line: the verdict, the trajectories, and the facts about what was done. Raises OSError."""
        record = {**asdict(alarm), "trajectories": [asdict(culprit) for culprit in found], **facts}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record), allow_nan=False) + "\n")


def read_alarms(run_dir: Path) -> list[dict[str, Any]]:
    """The alarms of a run in order; a torn last line is left out, and there are none without a file."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def _weight_shares(scored: Sequence[int], _: Sequence[Trajectory], details: StepDetails) -> list[float]:
    log_ratios = [details.log_ratios_B[i] for i in scored]
    largest = max((v for v in log_ratios if not math.isnan(v)), default=0.0)
    if math.isinf(largest):
        return [math.nan if math.isnan(v) else float(v == largest) for v in log_ratios]
    weights = [math.exp(v - largest) for v in log_ratios]
    total = sum(w for w in weights if not math.isnan(w))
    return [w / total for w in weights]


def _negative_log_ratios(scored: Sequence[int], _: Sequence[Trajectory], details: StepDetails) -> list[float]:
    return [-details.log_ratios_B[i] for i in scored]


def _gradients(scored: Sequence[int], _: Sequence[Trajectory], details: StepDetails) -> list[float]:
    values = []
    for i in scored:
        value = abs(details.weights_B[i] * details.advantages_B[i])
        # trajectories that did not contribute have a NaN norm and an advantage of 0
        if details.squared_norms_B is not None and details.advantages_B[i] != 0:
            value *= math.sqrt(details.squared_norms_B[i])
        values.append(value)
    return values


def _rewards(scored: Sequence[int], trajectories: Sequence[Trajectory], _: StepDetails) -> list[float]:
    return [float(_reward(trajectories[i]) or 0.0) for i in scored]


def _lengths(scored: Sequence[int], trajectories: Sequence[Trajectory], _: StepDetails) -> list[float]:
    return [float(len(trajectories[i].response_ids_T)) for i in scored]


_Measure = Callable[[Sequence[int], Sequence[Trajectory], StepDetails], list[float]]
_MEASURES: dict[str, tuple[str, _Measure]] = {
    "ess": ("share of the weights", _weight_shares),
    "max_weight_share": ("share of the weights", _weight_shares),
    "kl": ("negative log-ratio", _negative_log_ratios),
    "grad_norm": ("size of its term in the gradient", _gradients),
    "reward": ("reward", _rewards),
    "response_length": ("tokens", _lengths),
}


def _reward(trajectory: Trajectory) -> float | None:
    return trajectory.grade.reward if trajectory.grade else None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
