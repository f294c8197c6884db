"""What the watchdog's alarms lead to: a warning, a lower learning rate, fresh responses, an older checkpoint, the end.

A rollback goes to the newest checkpoint that is healthy: no alarm came within ``healthy_after`` steps after it. The
checkpoint of the start, and one that was written by a rollback (it holds the weights of a healthy one), always are.
The restored weights become the version that the step with the alarm would have made: the version counter and the data
position only ever go up, so no two sets of weights share a number and no trajectory is trained on twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vcpo.config import RunConfig
from vcpo.learner.learner import StepResult
from vcpo.method_config import MethodSection
from vcpo.methods.spec import MethodSpec
from vcpo.observe.alarms import AlarmLog, culprits
from vcpo.observe.watchdog import Alarm, Rule, Watchdog
from vcpo.pipeline.checkpoint import find_damage, list_checkpoints, version_of
from vcpo.pipeline.run_directory import RunDirectory
from vcpo.records import Group

Action = Literal["warn", "damp", "drain", "rollback", "stop"]


@dataclass(frozen=True)
class Answer:
    """What is to be done about the alarms of a step. checkpoint: where a rollback goes."""

    action: Action
    checkpoint: Path | None = None


class Guard:
    """The watchdog of one run with its memory: alarms, rollbacks, damping.

    method: what the run trains with; another than configured after a rollback that switched.
    fresh_from: no response of an earlier version is trained on any more; the version of the last rollback, or 0.
    stop_reason: why the run is to end now, or ``None``.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, note: Callable[[str], None]) -> None:
        self._config = config
        self._section = section = config.watchdog
        self._directory = directory
        self._note = note
        rules = [Rule(metric, **rule.model_dump()) for metric, rule in section.rules.items()]
        self._watchdog = Watchdog(rules, section.reference_steps)
        self._log: AlarmLog | None = None
        self._alarms: list[int] = []
        self._rollbacks: list[int] = []
        self._damped_until = 0
        self._raised = 0
        self.method: MethodSection = config.method
        self.stop_reason: str | None = None

    @property
    def spec(self) -> MethodSpec:
        """The method as the learner takes it."""
        return self._config.spec_of(self.method)

    @property
    def fresh_from(self) -> int:
        """See the class."""
        return self._rollbacks[-1] if self._rollbacks else 0

    @property
    def needs_first_checkpoint(self) -> bool:
        """Whether the run must be saved before its first step, as the place to go back to."""
        return self._section.rolls_back

    def spec_after_rollback(self) -> MethodSpec:
        """The method that a rollback would go on with."""
        method = self._section.rollback.method
        return self.spec if method is None else self._config.spec_of(method)

    def open(self, resume_step: int | None) -> None:
        """Begin the record of alarms, now that the run directory is there. resume_step: as for the metrics."""
        self._log = AlarmLog(self._directory.path, resume_step)

    def damping(self, version: int) -> float:
        """The factor on the learning rate of the step that follows ``version`` steps."""
        return self._section.damp_factor if version < self._damped_until else 1.0

    def metrics(self) -> dict[str, float]:
        """alarm: rules that raised one at the last step; nothing where nobody watches."""
        return {"alarm": float(self._raised)} if self._section.enabled else {}

    def inspect(self, step: int, groups: Sequence[Group], result: StepResult) -> Answer | None:
        """Watch the step just done; says what to do if there is an alarm. Raises OSError if it cannot be recorded.

        step: optimizer steps done, this one included. Damping and stopping are noted here; the caller does the rest.
        """
        if not self._section.enabled:
            return None
        alarms = self._watchdog.observe(step, result.metrics)
        self._raised = len(alarms)
        if not alarms:
            return None
        sentences = "; ".join(alarm.sentence for alarm in alarms)
        answer, done = self._decide(step, sentences)
        for alarm in alarms:
            self._tell(alarm, groups, result, answer, done)
        self._alarms.append(step)
        if answer.action == "rollback":
            self._rollbacks.append(step)
            self.method = self._section.rollback.method or self.method
            self._watchdog.forget()
        return answer

    def rolled_back_at(self, step: int) -> bool:
        """Whether version ``step`` are the weights of an older checkpoint."""
        return step in self._rollbacks

    def healthy_checkpoints(self, step: int) -> Iterator[Path]:
        """The healthy checkpoints after ``step`` steps, newest first; the last step may be the one with the alarm."""
        watched = self._section.rollback.healthy_after
        for path in reversed(list_checkpoints(self._directory.checkpoints)):
            version = version_of(path)
            settled = version + watched < step and not any(version <= a <= version + watched for a in self._alarms)
            if settled or version == 0 or version in self._rollbacks:
                yield path

    def to_keep(self, step: int) -> tuple[int, Path | None]:
        """How many of the newest checkpoints must be kept when one is written after ``step`` steps, and which other.

        The newest healthy one, and those that are to become it.
        """
        checkpoint = self._config.checkpoint
        if not self._section.rolls_back:
            return checkpoint.save_total_limit, None
        unsettled = 1 + math.ceil(self._section.rollback.healthy_after / checkpoint.save_steps)
        return max(checkpoint.save_total_limit, unsettled), next(self.healthy_checkpoints(step), None)

    def state(self) -> dict[str, Any] | None:
        """Plain data that continue the watch; ``None`` if there never was one."""
        if not self._section.enabled and not self._rollbacks:
            return None
        return {
            "watchdog": self._watchdog.state(),
            "alarms": list(self._alarms),
            "rollbacks": list(self._rollbacks),
            "damped_until": self._damped_until,
            "method": self.method.to_plain() if self._rollbacks else None,
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        """The inverse of ``state``."""
        if state is None:
            return
        self._watchdog.load_state(state["watchdog"])
        self._alarms = list(state["alarms"])
        self._rollbacks = list(state["rollbacks"])
        self._damped_until = state["damped_until"]
        if state["method"] is not None:
            self.method = MethodSection.model_validate(state["method"])

    def _decide(self, step: int, sentences: str) -> tuple[Answer, str]:
        """The answer, and what it means in words."""
        section = self._section
        if section.action == "damp":
            self._damped_until = step + section.damp_steps
            return Answer("damp"), f"learning rate x {section.damp_factor:g} for {section.damp_steps} steps"
        if section.action == "drain":
            return Answer("drain"), f"the next {section.drain_steps} steps train on fresh responses only"
        if section.action == "rollback":
            return self._decide_rollback(step, sentences)
        if section.action == "stop":
            return self._stop(step, sentences, "")
        return Answer("warn"), "watching on"

    def _decide_rollback(self, step: int, sentences: str) -> tuple[Answer, str]:
        rollback, used = self._section.rollback, len(self._rollbacks)
        checkpoint = next((path for path in self.healthy_checkpoints(step) if find_damage(path) is None), None)
        if checkpoint is not None and used < rollback.max_rollbacks:
            with_method = f" with {rollback.method.name}" if rollback.method is not None else ""
            return Answer("rollback", checkpoint), f"back to the weights of step {version_of(checkpoint)}{with_method}"
        why = " without a healthy checkpoint to go back to" if checkpoint is None else f" after {used} rollbacks"
        if rollback.then == "stop":
            return self._stop(step, sentences, why)
        return Answer("warn"), f"watching on{why}"

    def _stop(self, step: int, sentences: str, why: str) -> tuple[Answer, str]:
        self.stop_reason = f"the watchdog stopped the run at step {step}{why}: {sentences}"
        return Answer("stop"), f"stopping{why}"

    def _tell(self, alarm: Alarm, groups: Sequence[Group], result: StepResult, answer: Answer, done: str) -> None:
        found = culprits(alarm, groups, result)
        names = ", ".join(f"{culprit.trajectory} ({culprit.value:.3g})" for culprit in found)
        behind = f"; {found[0].quantity}: {names}" if found else ""
        self._note(f"watchdog, step {alarm.step}: {alarm.sentence}{behind}; {done}")
        if self._log is not None:
            to = None if answer.checkpoint is None else version_of(answer.checkpoint)
            self._log.write(alarm, found, action=answer.action, back_to_step=to)
