"""Checkpoints: written beside and renamed, verified by checksum before use, never half there.

A checkpoint directory holds the model in transformers format (loadable on its own), ``state.safetensors`` with every
other tensor of the run, ``state.json`` with its plain numbers, and ``manifest.json`` with each file's SHA-256. The
manifest is written last and the directory renamed after it, so a crash or a full disk leaves the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from vcpo.errors import UserError

_MANIFEST = "manifest.json"


@dataclass
class RunState:
    """What a run needs to continue, apart from the model's weights.

    numbers: plain data (version, data position, the learner's counters); tensors: everything else by name.
    """

    numbers: dict[str, Any]
    tensors: dict[str, Tensor]


def save_checkpoint(
    directory: Path,
    step: int,
    save_model: Callable[[Path], None],
    state: RunState,
    keep: int,
    spare: Path | None = None,
) -> Path:
    """Write the checkpoint of ``step`` and remove all but the newest ``keep`` up to it, and ``spare``.

    Raises UserError when the disk is full or not writable; the previous checkpoints are then untouched.
    """
    target = directory / _name(step)
    beside = directory / f".{_name(step)}.tmp"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_model(beside)
        save_file({k: t.detach().cpu().contiguous() for k, t in state.tensors.items()}, beside / "state.safetensors")
        (beside / "state.json").write_text(json.dumps(state.numbers), encoding="utf-8")
        files = {str(p.relative_to(beside)): _sha256(p) for p in sorted(beside.rglob("*")) if p.is_file()}
        for path in sorted(beside.rglob("*")):  # directories, too: they hold the names
            _sync(path)
        (beside / _MANIFEST).write_text(json.dumps(files, indent=2), encoding="utf-8")
        _sync(beside / _MANIFEST)
        _sync(beside)
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
        _sync(directory)
    except Exception as error:
        shutil.rmtree(beside, ignore_errors=True)
        if not _is_disk_error(error):
            raise
        kept = list_checkpoints(directory)
        last = f"the checkpoint {str(kept[-1])!r} is intact" if kept else "there is no earlier checkpoint"
        raise UserError(
            f"the checkpoint of step {step} could not be written to {str(directory)!r} ({error}); {last}: free space"
            " and continue with --resume"
        ) from error
    remove_old_checkpoints(directory, step, keep, spare)
    return target


def remove_old_checkpoints(directory: Path, step: int, keep: int, spare: Path | None = None) -> None:
    """Remove all but the newest ``keep`` up to ``step``, and ``spare``, and what was never finished."""
    saved = list_checkpoints(directory)
    # a later checkpoint was found damaged when the run was resumed before it; it must not count as one that is kept
    damaged = [path for path in saved if version_of(path) > step]
    for old in [*damaged, *saved[: len(saved) - len(damaged)][:-keep]]:
        if old != spare:
            shutil.rmtree(old)
    for unfinished in directory.glob(".step-*.tmp"):  # of a process that was killed while it wrote
        shutil.rmtree(unfinished)


def list_checkpoints(directory: Path) -> list[Path]:
    """Checkpoint directories, oldest first, whether intact or not."""
    found = (path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(found, key=version_of)


def version_of(checkpoint: Path) -> int:
    """The policy version (optimizer steps done) whose state a checkpoint holds."""
    return int(checkpoint.name.removeprefix("step-"))


def latest_intact(directory: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files all match their checksums; damaged ones are named to ``warn``."""
    for path in reversed(list_checkpoints(directory)):
        damage = find_damage(path)
        if damage is None:
            return path
        warn(f"checkpoint {str(path)!r} is damaged ({damage}); trying the one before it")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        files = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
        for name, digest in files.items():
            if _sha256(checkpoint / name) != digest:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return None


def load_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint that ``latest_intact`` has verified."""
    numbers = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    return RunState(numbers, load_file(checkpoint / "state.safetensors"))


def check_base(checkpoint: Path, checksum: int | None) -> None:
    """Raises UserError when the adapters in a checkpoint belong on another model.

    checksum: ``base_checksum`` of the model that they are on now.
    """
    saved = json.loads((checkpoint / "state.json").read_text(encoding="utf-8")).get("base_checksum")
    if saved != checksum:
        raise UserError(
            f"{str(checkpoint)!r} holds adapters of a base model whose weights have changed since: put back the model"
            " that the run began with"
        )


@contextlib.contextmanager
def disk_errors_explained(what: str, advice: str) -> Iterator[None]:
    """Turn a full or unwritable disk inside the block into a UserError: ``what`` could not be written; ``advice``."""
    try:
        yield
    except Exception as error:
        if not _is_disk_error(error):
            raise
        raise UserError(f"{what} could not be written ({error}); {advice}") from error


def replace_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Write a directory beside ``target``, then rename it over."""
    beside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_disk_error(error: Exception) -> bool:
    # safetensors reports input/output errors as its own exception type, with the operating system's words inside
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO)
    return type(error).__name__ == "SafetensorError" and "os error" in str(error).lower()
