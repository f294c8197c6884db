"""Sample transcripts that a person can read: what was asked, what was answered, and what the update made of it.

The files are Markdown. Prompts and responses are indented by four spaces (a code block), so that nothing a model
writes can end the block or become a heading, and control characters are spelt out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vcpo.records import Group, Trajectory, TurnRecord

DIRECTORY = "transcripts"
HEADING = "## "

_MAX_CHARACTERS = 4000  # of a prompt or a response; what is cut is said

Decode = Callable[[NDArray[np.int64]], str]


class UpdateDetails(Protocol):
    """What the learner knows about the trajectories of a step, in the order of the groups and their members.

    log_ratios_B: sequence log-ratio of each trajectory, learner over sampler.
    weights_B: the importance weight of each trajectory's gradient. advantages_B: what multiplied it.
    """

    @property
    def log_ratios_B(self) -> Sequence[float]: ...

    @property
    def weights_B(self) -> Sequence[float]: ...

    @property
    def advantages_B(self) -> Sequence[float]: ...


class TranscriptWriter:
    """Writes ``transcripts/step-000010.md`` every so many steps."""

    def __init__(self, run_dir: Path, every: int, per_step: int) -> None:
        """every: steps between files; 0 writes none. per_step: trajectories in one file."""
        self._directory = run_dir / DIRECTORY
        self._every = every
        self._per_step = per_step

    def write(self, step: int, groups: Sequence[Group], details: UpdateDetails, decode: Decode) -> Path | None:
        """Write the transcripts of a finished step if it is one of those asked for.

        The trajectories shown span the rewards of the minibatch from best to worst. ``decode`` must keep special
        tokens. Returns the file, or ``None`` when the step has none.
        """
        if not self._every or step % self._every:
            return None
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        chosen = _spread(trajectories, self._per_step)
        entries = [
            _entry(
                trajectories[i],
                f"log-ratio {details.log_ratios_B[i]:+.4f}, weight {details.weights_B[i]:.4f},"
                f" advantage {details.advantages_B[i]:+.4f}",
                step,
                decode,
            )
            for i in chosen
        ]
        head = f"# Step {step}: {len(chosen)} of {len(trajectories)} trajectories, from best to worst reward"
        self._directory.mkdir(exist_ok=True)
        path = self._directory / f"step-{step:06d}.md"
        path.write_text("\n\n".join([head, *entries]) + "\n", encoding="utf-8")
        return path


def _spread(trajectories: Sequence[Trajectory], count: int) -> list[int]:
    """Indices of ``count`` trajectories, evenly spaced in the order of their rewards (unscored ones last)."""

    def worst_last(i: int) -> tuple[bool, float, int]:
        reward = _reward(trajectories[i])
        return (reward is None, -(reward or 0.0), i)

    order = sorted(range(len(trajectories)), key=worst_last)
    if count >= len(order):
        return order
    if count == 1:
        return order[:1]
    return [order[round(k * (len(order) - 1) / (count - 1))] for k in range(count)]


def _reward(trajectory: Trajectory) -> float | None:
    return trajectory.grade.reward if trajectory.grade else None


def _entry(trajectory: Trajectory, update: str, step: int, decode: Decode) -> str:
    versions = trajectory.versions_T
    # the step that made version ``step`` trained with version ``step - 1``
    lag = step - 1 - trajectory.start_version
    span = f"{versions.min()} to {versions.max()}" if len(versions) else str(trajectory.start_version)
    facts = [
        _grade(trajectory),
        f"stop {trajectory.stop_reason.value}, {len(trajectory.response_ids_T)} tokens,"
        f" policy versions {span}, lag {lag}",
        update,
        *(_turn(number, turn, trajectory) for number, turn in enumerate(trajectory.turns, start=1)),
    ]
    if trajectory.failure is not None:
        facts.append(f"failed: {_visible(trajectory.failure)}")
    parts = [HEADING + trajectory.name, "\n".join(f"- {fact}" for fact in facts)]
    parts += ["Prompt:", _block(decode(trajectory.prompt_ids))]
    for title, ids in _spans(trajectory):
        parts += [title, _block(decode(ids))]
    return "\n\n".join(parts)


def _turn(number: int, turn: TurnRecord, trajectory: Trajectory) -> str:
    versions = trajectory.versions_T[turn.start : turn.end]
    span = f", policy versions {versions[0]} to {versions[-1]}" if len(versions) else ""
    reward = "" if turn.reward is None else f", reward {turn.reward:g}"
    measured = "".join(f", {name} {value:g}" for name, value in turn.measurements.items())
    return (
        f"turn {number}: {turn.end - turn.start} tokens{span}, environment {turn.seconds:.3f} s"
        f"{reward}{_visible(measured)}"
    )


def _grade(trajectory: Trajectory) -> str:
    grade = trajectory.grade
    if grade is None or grade.reward is None:
        return "reward none (could not be scored)"
    parts = ", ".join(f"{name} {value:g}" for name, value in grade.parts.items())
    return f"reward {grade.reward:g}{f' ({parts})' if parts else ''}, {'correct' if grade.correct else 'not correct'}"


def _spans(trajectory: Trajectory) -> list[tuple[str, NDArray[Any]]]:
    """The response in pieces: sampled by the policy, or given to it (tool output, never trained)."""
    pieces, start = [], 0
    for sampled, members in groupby(trajectory.mask_T.tolist()):
        stop = start + len(list(members))
        pieces.append(("Response:" if sampled else "Given:", trajectory.response_ids_T[start:stop]))
        start = stop
    return pieces or [("Response:", trajectory.response_ids_T)]


def _block(text: str) -> str:
    if len(text) > _MAX_CHARACTERS:
        half = _MAX_CHARACTERS // 2
        cut = len(text) - 2 * half
        text = f"{text[:half]}\n[... {cut} characters left out ...]\n{text[-half:]}"
    # split at "\n" only: splitlines() would also break at separators that are the model's own characters
    return "\n".join("    " + _visible(line) for line in text.split("\n"))


def _visible(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode("ascii") for c in line)
