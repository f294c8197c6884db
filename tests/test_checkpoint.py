"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from vcpo.errors import UserError
from vcpo.pipeline.checkpoint import RunState, find_damage, latest_intact, list_checkpoints, load_state, save_checkpoint


def write_model(path: Path) -> None:
    (path / "model").mkdir()
    (path / "model" / "weights").write_bytes(b"w" * 1000)


def save(directory: Path, step: int, keep: int = 3) -> Path:
    state = RunState({"step": step, "nested": {"x": 0.1}}, {"a": torch.full((3,), float(step))})
    return save_checkpoint(directory, step, write_model, state, keep)


def test_state_is_restored_exactly(tmp_path: Path) -> None:
    state = load_state(save(tmp_path, 7))
    assert state.numbers == {"step": 7, "nested": {"x": 0.1}}
    assert torch.equal(state.tensors["a"], torch.full((3,), 7.0))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000015", "step-000020"]


def test_a_damaged_later_checkpoint_does_not_displace_a_new_one(tmp_path: Path) -> None:
    save(tmp_path, 20)
    (tmp_path / "step-000020" / "manifest.json").unlink()
    save(tmp_path, 5, keep=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000005"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no manifest", "empty manifest"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 5), save(tmp_path, 10)
    weights = bad / "model" / "weights"
    if damage == "truncate":
        weights.write_bytes(b"w" * 999)
    elif damage == "flip":
        weights.write_bytes(b"w" * 999 + b"x")
    elif damage == "remove":
        weights.unlink()
    elif damage == "no manifest":
        (bad / "manifest.json").unlink()
    else:
        (bad / "manifest.json").write_text("")
    said: list[str] = []
    assert latest_intact(tmp_path, said.append) == good
    assert len(said) == 1
    assert "step-000010" in said[0]
    assert "damaged" in said[0]


def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(tmp_path: Path) -> None:
    good = save(tmp_path, 5)

    def disk_full(path: Path) -> None:
        (path / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"No space left on device.*step-000005' is intact: free space and continue"):
        save_checkpoint(tmp_path, 10, disk_full, RunState({}, {}), keep=1)
    assert find_damage(good) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_a_defect_while_saving_keeps_its_own_exception(tmp_path: Path) -> None:
    def defect(path: Path) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        save_checkpoint(tmp_path, 10, defect, RunState({}, {}), keep=1)
    assert list(tmp_path.iterdir()) == []
