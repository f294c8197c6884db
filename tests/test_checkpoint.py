"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from run_cases import tiny_config
from vcpo.errors import UserError
from vcpo.pipeline.checkpoint import RunState, find_damage, latest_intact, list_checkpoints, load_state, save_checkpoint
from vcpo.pipeline.ledger import Ledger
from vcpo.pipeline.run import train


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


def test_what_a_killed_process_left_unfinished_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    """An interruption saves at any step, so the next checkpoint may be one of another step."""
    (tmp_path / ".step-000003.tmp" / "model").mkdir(parents=True)
    (tmp_path / ".step-000003.tmp" / "model" / "weights").write_bytes(b"w")
    save(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_checkpoints_are_in_the_order_of_their_steps_and_nothing_else_is_one(tmp_path: Path) -> None:
    for name in ("step-1000000", "step-999999", "step-000004-copy"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


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


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs to know the files of descriptors")
def test_what_a_checkpoint_relies_on_is_on_the_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power loses what nobody has waited for; kills do not show that."""
    done: list[str] = []
    fsync, rename, sync_ledger = os.fsync, Path.rename, Ledger.sync

    def noted_fsync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{run.resolve()}/"))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    def noted_sync(ledger: Ledger) -> None:
        done.append("ledger")
        sync_ledger(ledger)

    run = tmp_path / "run"
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(Ledger, "sync", noted_sync)
    train(tiny_config(run, "training.max_steps=1"), make_report=False)

    (checkpoint,) = list_checkpoints(run / "checkpoints")
    beside = f"checkpoints/.{checkpoint.name}.tmp"
    named = done.index(f"rename .{checkpoint.name}.tmp {checkpoint.name}")
    manifest = done.index(f"{beside}/manifest.json")
    files = [
        f"{beside}/{path.relative_to(checkpoint)}" for path in checkpoint.rglob("*") if path.name != "manifest.json"
    ]
    assert len(files) > 3
    assert {"ledger", "metrics.jsonl", *files} <= set(done[:manifest])
    assert done.index(beside) in range(manifest, named)
    assert "checkpoints" in done[named:]
