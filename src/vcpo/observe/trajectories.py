"""Saved minibatches: the full records that an optimizer step trained on, for ``vcpo replay``.

One safetensors file per step, ``trajectories/step-000051.safetensors``: numbers only, so reading one never runs code.
Every array of a trajectory is one tensor over all trajectories, with a tensor of lengths beside it; everything else
(ids, texts, grades, stop reasons) is JSON in the tensor ``records``. Left out are the columns of problems: grades are
kept, and the problem's id leads back to the data. Files are written beside and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vcpo.errors import UserError
from vcpo.records import Grade, Group, Problem, StopReason, Trajectory, TurnRecord

DIRECTORY = "trajectories"

_RECORDS = "records"
_LENGTHS = ".lengths"


@dataclass(frozen=True)
class SavedMinibatch:
    """The groups that one optimizer step trained on. step: as in ``metrics.jsonl``, steps done with this one."""

    step: int
    groups: list[Group]

    @property
    def version(self) -> int:
        """The policy version whose weights computed the update of this step."""
        return self.step - 1


class TrajectoryLog:
    """Keeps the minibatches that a replay can use.

    These are the steps on both sides of every checkpoint that is kept (the one after it is trained at exactly the
    checkpoint's weights, the one before it is there even when the run ends with it), and every so many steps.
    """

    def __init__(self, run_dir: Path, every: int, resume_step: int | None = None) -> None:
        """
        every: steps between minibatches that are kept for good; 0 keeps only those beside checkpoints.
        resume_step: the checkpoint from which the run continues; files of later steps, which are done again, are
            removed. ``None``: a new run, all are removed.
        """
        self._run_dir = run_dir
        self._every = every
        self._checkpoints: list[int] = [] if resume_step is None else [resume_step]
        self._latest: tuple[int, Sequence[Group]] | None = None
        # of a process that was killed while it wrote; the library, too, writes to a name of its own first
        for unfinished in (run_dir / DIRECTORY).glob(".*"):
            unfinished.unlink()
        for step, path in saved_steps(run_dir).items():
            if resume_step is None or step > resume_step:
                path.unlink()

    def step_done(self, step: int, groups: Sequence[Group]) -> None:
        """Take the graded groups of the step that has just been made. Raises OSError or SafetensorError."""
        self._latest = step, groups
        if self._is_regular(step) or step - 1 in self._checkpoints:
            save_minibatch(self._run_dir, step, groups)

    def checkpoint_comes(self) -> None:
        """A checkpoint of the last step is about to be written, so its minibatch is kept. Raises as ``step_done`` does.

        Before and not after: of a run that is killed between the two, the checkpoint would be without its minibatch.
        """
        if self._latest is not None and self._latest[0] not in saved_steps(self._run_dir):
            save_minibatch(self._run_dir, *self._latest)

    def checkpoints_are(self, versions: Sequence[int]) -> None:
        """Keep the minibatches beside these checkpoints, and none beside others."""
        self._checkpoints = list(versions)
        for step, path in saved_steps(self._run_dir).items():
            if not self._is_regular(step) and not {step - 1, step} & set(versions):
                path.unlink()

    def _is_regular(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0


def saved_steps(run_dir: Path) -> dict[int, Path]:
    """The minibatch files of a run by step, in increasing order."""
    files = (run_dir / DIRECTORY).glob("step-*.safetensors")
    numbers = ((path.stem.removeprefix("step-"), path) for path in files)
    return dict(sorted((int(number), path) for number, path in numbers if number.isdecimal()))


def save_minibatch(run_dir: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write the records of a step, without loss but for the columns of problems; returns the file.

    Raises OSError or SafetensorError when the disk is full or not writable; no part of a file is then left.
    """
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{step:06d}.safetensors"
    beside = directory / f".{path.name}.tmp"
    records = {"step": step, "groups": [_group_record(group) for group in groups]}
    tensors = _arrays([trajectory for group in groups for trajectory in group.trajectories])
    tensors[_RECORDS] = np.frombuffer(json.dumps(records, allow_nan=False).encode(), dtype=np.uint8)
    try:
        save_file(tensors, beside, {"format": "vcpo trajectories", "step": str(step)})
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path


def load_minibatch(path: Path) -> SavedMinibatch:
    """Read what ``save_minibatch`` wrote. Raises UserError for a file that is damaged or something else."""
    try:
        tensors = load_file(path)
        records = json.loads(tensors.pop(_RECORDS).tobytes())
        names = [name.removesuffix(_LENGTHS) for name in tensors if name.endswith(_LENGTHS)]
        columns = {name: _pieces(tensors[name], tensors[name + _LENGTHS]) for name in names}
        groups = []
        first = 0
        for record in records["groups"]:
            trajectories = []
            for index, plain in enumerate(record["trajectories"], start=first):
                arrays: dict[str, Any] = {name: column[index] for name, column in columns.items()}
                trajectories.append(_trajectory(plain, arrays))
            first += len(trajectories)
            problem = Problem(**record["problem"])
            groups.append(Group(record["id"], problem, record["next_position"], trajectories))
        if any(len(column) != first for column in columns.values()):
            raise ValueError("arrays and records differ in number")
        return SavedMinibatch(records["step"], groups)
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise UserError(f"the trajectories in {str(path)!r} cannot be read ({detail})") from error


def _group_record(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "next_position": group.next_position,
        "problem": {"id": group.problem.id, "prompt": group.problem.prompt, "opening": group.problem.opening},
        "trajectories": [_trajectory_record(trajectory) for trajectory in group.trajectories],
    }


def _trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    record = {}
    for field in dataclasses.fields(trajectory):
        value = getattr(trajectory, field.name)
        if not isinstance(value, np.ndarray):
            record[field.name] = value
    record["stop_reason"] = trajectory.stop_reason.value
    record["turns"] = [dataclasses.asdict(turn) for turn in trajectory.turns]
    grade = trajectory.grade
    if grade is not None:
        record["grade"] = {
            "reward": None if grade.reward is None else _to_json(grade.reward),
            "correct": bool(grade.correct),
            "parts": {name: _to_json(value) for name, value in grade.parts.items()},
            "failure": grade.failure,
        }
    return record


def _trajectory(record: dict[str, Any], arrays: dict[str, Any]) -> Trajectory:
    plain = {**record, **{name: array for name, array in arrays.items() if array is not None}}
    plain["stop_reason"] = StopReason(record["stop_reason"])
    plain["turns"] = tuple(TurnRecord(**turn) for turn in record.get("turns", ()))
    grade = record["grade"]
    if grade is not None:
        reward = None if grade["reward"] is None else float(grade["reward"])
        parts = {name: float(value) for name, value in grade["parts"].items()}
        plain["grade"] = Grade(reward, grade["correct"], parts, grade.get("failure"))
    return Trajectory(**plain)


def _arrays(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Every array field as one tensor, with the lengths of its pieces: -1 where a trajectory has none."""
    tensors: dict[str, NDArray[Any]] = {}
    for field in dataclasses.fields(Trajectory):
        values = [getattr(trajectory, field.name) for trajectory in trajectories]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        if arrays:
            tensors[field.name] = np.ascontiguousarray(np.concatenate(arrays))
            lengths = [len(value) if isinstance(value, np.ndarray) else -1 for value in values]
            tensors[field.name + _LENGTHS] = np.array(lengths, dtype=np.int64)
    return tensors


def _pieces(joined: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any] | None]:
    ends = np.cumsum(lengths.clip(min=0)).tolist()
    if (ends[-1] if ends else 0) != len(joined):
        raise ValueError("an array and the lengths of its pieces do not fit")
    return [
        None if length < 0 else joined[end - length : end] for length, end in zip(lengths.tolist(), ends, strict=True)
    ]


def _to_json(value: float) -> float | str:
    """JSON has neither NaN nor infinities; ``float`` reads these strings."""
    value = float(value)
    return value if math.isfinite(value) else str(value)
