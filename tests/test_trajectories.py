"""Saved minibatches: nothing is lost, nothing of a file is executed, and a run keeps those that a replay can use."""

from __future__ import annotations

import dataclasses
import errno
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from run_cases import InterruptAfter, tiny_config
from vcpo.errors import UserError
from vcpo.observe.trajectories import TrajectoryLog, load_minibatch, save_minibatch, saved_steps
from vcpo.pipeline.run import train
from vcpo.records import Grade, Group, Problem, StopReason, Trajectory, TurnRecord


def trajectory(index: int, grade: Grade | None, length: int = 4, **changes: object) -> Trajectory:
    """Every number is one that a rounding or a default would change."""
    made = Trajectory(
        group_id=7,
        index=index,
        prompt_ids=np.array([151_643, 2, 3]),
        response_ids_T=np.arange(length) + 2**40,
        mask_T=np.arange(length) % 2 == 0,
        logprobs_T=-(np.arange(length, dtype=np.float32) + np.float32(0.1)),
        versions_T=np.arange(length) // 2 + 5,
        stop_reason=StopReason.STOP_STRING,
        start_version=5,
        text='"é\n</answer>\x00\ud800',
        grade=grade,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


GROUPS = [
    Group(
        7,
        Problem("row 3", [{"role": "user", "content": "1+1? Go!"}], {"answer": object()}, " Go!"),
        9,
        [
            trajectory(0, Grade(0.1, True, {"format": 1.0, "length": -math.inf})),
            trajectory(
                1,
                Grade(None, failure="no grade within 60 s"),
                turns=(TurnRecord(0, 1, 0.1, None, {"rows": 0.3}), TurnRecord(3, 4, reward=0.7)),
                failure="no answer",
            ),
            trajectory(2, None, length=0, stop_reason=StopReason.EOS),
            trajectory(3, Grade(math.nan)),
        ],
    ),
    Group(8, Problem("row 4", "2=", {}), 12, [trajectory(0, Grade(-math.inf), length=1)]),
    Group(9, Problem("row 5", "3=", {}), 13, []),
]


def assert_equal_records(ours: object, theirs: object) -> None:
    """Field by field, with dtypes; NaN equals NaN."""
    assert type(ours) is type(theirs)
    if dataclasses.is_dataclass(ours):
        for field in dataclasses.fields(ours):
            if field.name != "columns":
                assert_equal_records(getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(ours, list):
        assert isinstance(theirs, list)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal_records(one, other)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs)


def test_every_field_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save_minibatch(tmp_path, 51, GROUPS)
    assert path == tmp_path / "trajectories" / "step-000051.safetensors"
    saved = load_minibatch(path)
    assert (saved.step, saved.version) == (51, 50)
    assert_equal_records(GROUPS, saved.groups)
    assert saved.groups[0].problem.columns == {}


def test_no_record_has_fields_that_these_tests_do_not_know() -> None:
    """A new field of a grade or a group has to be saved, too; those of trajectories are found by themselves."""
    assert [field.name for field in dataclasses.fields(Grade)] == ["reward", "correct", "parts", "failure"]
    assert [field.name for field in dataclasses.fields(Group)] == ["id", "problem", "next_position", "trajectories"]
    assert [field.name for field in dataclasses.fields(Problem)] == ["id", "prompt", "columns", "opening"]


def test_an_empty_minibatch(tmp_path: Path) -> None:
    assert load_minibatch(save_minibatch(tmp_path, 1, [])).groups == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def other_file(path: Path) -> None:
    save_file({"weight": np.zeros(3)}, path)


def lengths_that_do_not_fit(path: Path) -> None:
    tensors = load_file(path)
    save_file({**tensors, "mask_T": np.append(tensors["mask_T"], True)}, path)


def fewer_arrays_than_records(path: Path) -> None:
    tensors = load_file(path)
    name = "prompt_ids"
    save_file({**tensors, name: tensors[name][:3], f"{name}.lengths": tensors[f"{name}.lengths"][:1]}, path)


def text_for_records(path: Path) -> None:
    save_file({**load_file(path), "records": np.frombuffer(b"import os", dtype=np.uint8)}, path)


@pytest.mark.parametrize(
    "damage", [Path.unlink, cut, other_file, lengths_that_do_not_fit, fewer_arrays_than_records, text_for_records]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object) -> None:
    path = save_minibatch(tmp_path, 3, GROUPS)
    damage(path)  # type: ignore[operator]
    with pytest.raises(UserError, match=r"the trajectories in '.*step-000003.safetensors' cannot be read"):
        load_minibatch(path)


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_minibatch(tmp_path, 3, GROUPS[:1])

    def full(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vcpo.observe.trajectories.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_minibatch(tmp_path, 3, GROUPS)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert len(load_minibatch(path).groups) == 1


def kept(run: Path) -> list[int]:
    return list(saved_steps(run))


def test_minibatches_beside_checkpoints_and_regular_ones_are_kept(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, every=5)
    for step in range(1, 10):
        log.step_done(step, GROUPS)
        if step == 3:
            log.checkpoint_comes()
            log.checkpoints_are([3])
        if step == 7:
            log.checkpoint_comes()
            assert kept(tmp_path) == [3, 4, 5, 7]
            log.checkpoints_are([7])  # the checkpoint of step 3 is gone
            assert kept(tmp_path) == [5, 7]
    assert kept(tmp_path) == [5, 7, 8]
    log.checkpoint_comes()
    log.checkpoints_are([7, 9])
    assert kept(tmp_path) == [5, 7, 8, 9]


def test_a_resumed_run_forgets_later_minibatches_and_keeps_the_one_after_its_checkpoint(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, every=1)
    for step in range(1, 6):
        log.step_done(step, GROUPS)
    for name in (".step-000006.safetensors.tmp", ".tmpYs7eM5"):
        (tmp_path / "trajectories" / name).write_bytes(b"killed while writing")
    log = TrajectoryLog(tmp_path, every=0, resume_step=3)
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == [
        f"step-00000{step}.safetensors" for step in (1, 2, 3)
    ]
    for step in (4, 5):
        log.step_done(step, GROUPS)
    assert kept(tmp_path) == [1, 2, 3, 4]
    TrajectoryLog(tmp_path, every=0)  # from the beginning
    assert kept(tmp_path) == []


def test_a_run_keeps_both_sides_of_its_checkpoints(tmp_path: Path) -> None:
    run = train(tiny_config(tmp_path / "run", "checkpoint.save_steps=3"), make_report=False)
    assert kept(run) == [3, 4, 6]
    run = train(
        tiny_config(tmp_path / "few", "checkpoint.save_steps=1", "checkpoint.save_total_limit=1"), make_report=False
    )
    assert kept(run) == [6]
    run = train(tiny_config(tmp_path / "all", "logging.trajectory_steps=1"), make_report=False)
    assert kept(run) == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_saves_what_an_uninterrupted_one_saves(tmp_path: Path) -> None:
    changes = ("runtime.max_staleness=1", "checkpoint.save_steps=2", "logging.trajectory_steps=3")
    whole = train(tiny_config(tmp_path / "whole", *changes), make_report=False)
    config = tiny_config(tmp_path / "halves", *changes)
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(4))
    halves = train(config, mode="resume", make_report=False)
    assert kept(whole) == kept(halves) == [3, 4, 5, 6]
    for step, path in saved_steps(whole).items():
        assert_equal_records(load_minibatch(path).groups, load_minibatch(saved_steps(halves)[step]).groups)


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, target: Path, metadata: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vcpo.observe.trajectories.save_file", full)
    with pytest.raises(UserError, match=r"trajectories in '.*run' could not be written \(.*continue with --resume"):
        train(tiny_config(tmp_path / "run"), make_report=False)
