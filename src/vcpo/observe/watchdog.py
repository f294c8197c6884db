"""The watchdog's rules: which metrics of a run have left the range in which it is healthy, for how long, by how much.

A rule watches one metric. Its bounds are the values themselves, multiples of the metric's median over the first steps
of the run, or robust deviations (1.4826 MAD) from that median. A step counts against the run when its value is outside,
and the rule raises an alarm when ``count`` of the last ``window`` values were: one bad minibatch is noise. After an
alarm the rule is silent for ``cooldown`` steps and begins with an empty window.

NaN counts as outside: in a collapse it is what there is to see. A step without the metric counts neither way.
Everything here is plain Python over numbers, and the state is plain data, so a finished run's metrics can be replayed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Scale = Literal["value", "median", "deviation"]

_TO_SIGMA = 1.4826  # of a normal distribution's MAD
# metrics that hardly vary must not make the smallest change count as many deviations
_LEAST_DEVIATION = 0.02


@dataclass(frozen=True)
class Rule:
    """When a metric is out of its range.

    below, above: the bounds, in the unit that ``scale`` says; ``None`` for no bound on that side.
    scale: ``value``; ``median``: multiples of the reference's median; ``deviation``: robust deviations from it.
    count, window: how many of the last values must be outside.
    """

    metric: str
    below: float | None = None
    above: float | None = None
    scale: Scale = "value"
    count: int = 3
    window: int = 5
    cooldown: int = 10


@dataclass(frozen=True)
class Alarm:
    """One rule's verdict at one step.

    value: the step's. bound: in the metric's own unit. outside: how many of the last ``seen`` values were.
    """

    step: int
    metric: str
    side: Literal["below", "above"]
    value: float
    bound: float
    outside: int
    seen: int
    sentence: str


@dataclass
class _Reference:
    """The first finite values of a metric, until there are enough of them, and what they came to."""

    values: list[float] = field(default_factory=list)
    median: float | None = None
    deviation: float | None = None

    def add(self, value: float, enough: int) -> None:
        if self.median is None and math.isfinite(value):
            self.values.append(value)
            if len(self.values) >= enough:
                self.median = statistics.median(self.values)
                spread = _TO_SIGMA * statistics.median(abs(v - self.median) for v in self.values)
                self.deviation = max(spread, _LEAST_DEVIATION * abs(self.median))
                self.values = []


@dataclass
class _Progress:
    """recent: +1 above, -1 below, 0 inside, newest last; silent_until: no alarm at this step or before."""

    recent: list[int] = field(default_factory=list)
    silent_until: int = -1


class Watchdog:
    """Takes the metrics of every step in order and says which rules raise an alarm."""

    def __init__(self, rules: Sequence[Rule], reference_steps: int) -> None:
        """reference_steps: how many of a metric's first values make its reference; until then relative rules wait."""
        self._rules = list(rules)
        self._reference_steps = reference_steps
        self._references = {rule.metric: _Reference() for rule in rules if rule.scale != "value"}
        self._progress = {rule.metric: _Progress() for rule in rules}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms of this step, in the order of the rules. step: optimizer steps done."""
        alarms = []
        for rule in self._rules:
            if rule.metric not in metrics:
                continue
            value = float(metrics[rule.metric])
            bounds = self._bounds(rule)
            if rule.metric in self._references:
                self._references[rule.metric].add(value, self._reference_steps)
            progress = self._progress[rule.metric]
            if bounds is None or step <= progress.silent_until:
                continue
            side = _side(value, *bounds)
            progress.recent = [*progress.recent, side][-rule.window :]
            for sign in (-1, 1):
                outside = progress.recent.count(sign)
                if outside >= rule.count and side == sign:
                    alarms.append(_alarm(rule, step, value, bounds, sign, outside, len(progress.recent)))
                    self._progress[rule.metric] = _Progress(silent_until=step + rule.cooldown)
                    break
        return alarms

    def forget(self) -> None:
        """Begin with empty windows and no cool-down, for weights that these values do not speak of. References stay."""
        self._progress = {metric: _Progress() for metric in self._progress}

    def state(self) -> dict[str, Any]:
        """Plain data that continue the watch."""
        return {
            "references": {
                metric: {"values": list(r.values), "median": r.median, "deviation": r.deviation}
                for metric, r in self._references.items()
            },
            "progress": {
                metric: {"recent": list(p.recent), "silent_until": p.silent_until}
                for metric, p in self._progress.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``. A rule that the state does not know begins anew; one that is gone is ignored."""
        for metric, reference in state["references"].items():
            if metric in self._references:
                self._references[metric] = _Reference(**reference)
        for metric, progress in state["progress"].items():
            if metric in self._progress:
                self._progress[metric] = _Progress(**progress)

    def _bounds(self, rule: Rule) -> tuple[float, float] | None:
        """Lower and upper bound in the metric's unit, infinite where there is none; ``None`` without a reference."""
        below = -math.inf if rule.below is None else rule.below
        above = math.inf if rule.above is None else rule.above
        if rule.scale == "value":
            return below, above
        reference = self._references[rule.metric]
        if reference.median is None or reference.deviation is None:
            return None
        if rule.scale == "median":
            # multiples of a median that is not positive mean nothing
            return (below * reference.median, above * reference.median) if reference.median > 0 else None
        return reference.median + below * reference.deviation, reference.median + above * reference.deviation


def _side(value: float, below: float, above: float) -> int:
    """NaN counts on the side that is bounded, the upper one if both are."""
    if math.isnan(value):
        return 1 if math.isfinite(above) else -1
    return -1 if value < below else 1 if value > above else 0


def _alarm(
    rule: Rule, step: int, value: float, bounds: tuple[float, float], sign: int, outside: int, seen: int
) -> Alarm:
    side: Literal["below", "above"] = "below" if sign < 0 else "above"
    bound = bounds[0] if sign < 0 else bounds[1]
    meaning = ""
    if rule.scale == "median":
        meaning = f" ({rule.below if sign < 0 else rule.above:g} x its first median)"
    elif rule.scale == "deviation":
        meaning = f" ({rule.below if sign < 0 else rule.above:+g} deviations from its first median)"
    sentence = f"{rule.metric} was {side} {bound:.4g}{meaning} in {outside} of the last {seen} steps, now {value:.4g}"
    return Alarm(step, rule.metric, side, value, bound, outside, seen, sentence)
