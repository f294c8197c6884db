"""The run directory: one run each, refused if it already holds one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import yaml

from vcpo.config import RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.observe.clock import now
from vcpo.observe.environment import environment
from vcpo.observe.ledger import FILE_NAME as LEDGER_FILE
from vcpo.observe.summary import read_sessions

Mode = Literal["new", "resume", "overwrite"]

_CONFIG = "config.yaml"
_BESIDE = f".{_CONFIG}.tmp"  # alone in a directory it is what a run has left that was killed at its very start
_MARKS = (_CONFIG, "metrics.jsonl", "checkpoints")
# a resumed run may differ in what it writes, where it runs and how long it goes on, not in what it computes; the
# watchdog may, too, because a run that it has stopped goes on under other orders
_MAY_CHANGE = {
    "": ("output_dir", "checkpoint", "logging", "watchdog", "compare", "eval"),
    "model": ("device",),
    "runtime": ("samplers", "sampler_threads", "learner_threads"),
}


class RunDirectory:
    """Paths of a run directory and the record of what ran in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.final_model = path / "model"
        self.final_adapter = path / "adapter"  # of a run that trains one; the final model has it merged in
        self.report = path / "report.html"
        self.ledger = path / LEDGER_FILE

    @classmethod
    def check(cls, config: RunConfig, mode: Mode) -> RunDirectory:
        """The directory, if ``open`` would accept it; changes nothing.

        Raises UserError when it holds a run and ``mode`` is new, holds none and ``mode`` is resume, holds something
        that is not a run and ``mode`` is overwrite, or holds a run with another configuration and ``mode`` is resume.
        """
        directory = cls(Path(config.output_dir))
        path = directory.path
        if path.exists() and not path.is_dir():
            raise UserError(f"output_dir {str(path)!r} is a file")
        occupied = path.is_dir() and any(inside.name != _BESIDE for inside in path.iterdir())
        holds_run = occupied and any((path / mark).exists() for mark in _MARKS)
        if mode == "new" and holds_run:
            raise UserError(
                f"output_dir {str(path)!r} already holds a run: continue it with --resume, replace it with --overwrite,"
                " or choose another output_dir"
            )
        if mode == "new" and occupied:
            raise UserError(f"output_dir {str(path)!r} is not empty: choose another output_dir")
        if mode == "overwrite" and occupied and not directory._may_be_emptied():
            raise UserError(
                f"output_dir {str(path)!r} holds files that are no run, or the working directory: choose another"
                " output_dir"
            )
        if mode == "resume":
            if not holds_run:
                raise UserError(f"output_dir {str(path)!r} holds no run to resume")
            directory._check_same(config)
        return directory

    @classmethod
    def open(cls, config: RunConfig, mode: Mode) -> RunDirectory:
        """Create the directory, continue the run in it, or empty it first. Raises UserError as ``check`` does."""
        directory = cls.check(config, mode)
        path = directory.path
        try:
            if mode == "overwrite" and path.is_dir():
                directory._empty()
            path.mkdir(parents=True, exist_ok=True)
            beside = path / _BESIDE
            beside.write_text(yaml.safe_dump(config.to_plain(), sort_keys=False), encoding="utf-8")
            beside.replace(path / _CONFIG)  # at every moment there is a configuration to resume with
        except OSError as error:
            raise UserError(f"output_dir {str(path)!r} cannot be written: {error}") from None
        return directory

    @classmethod
    def of_finished_or_running(cls, path: Path) -> tuple[RunDirectory, RunConfig]:
        """An existing run directory and its configuration."""
        if not (path / _CONFIG).is_file():
            raise UserError(f"{str(path)!r} is not a run directory (it has no {_CONFIG})")
        return cls(path), parse_config(_read_yaml(path / _CONFIG), source=str(path / _CONFIG))

    def record_start(self, resumed_at: int | None) -> None:
        """Append what runs, on what, from where."""
        self._write_environment({**environment(), "command": sys.argv, "started": now(), "resumed_at_step": resumed_at})

    def record_end(self, outcome: str, **facts: Any) -> None:
        """Complete the record of this start: ``finished``, ``interrupted``, ``stopped`` or ``failed``."""
        sessions = self.sessions()
        sessions[-1].update(outcome=outcome, ended=now(), **facts)
        self._dump(sessions)

    def sessions(self) -> list[dict[str, Any]]:
        """One record for every time that the run was started or resumed."""
        return read_sessions(self.path)

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its last step."""
        sessions = self.sessions()
        return bool(sessions) and sessions[-1].get("outcome") == "finished"

    def _write_environment(self, session: dict[str, Any]) -> None:
        self._dump([*self.sessions(), session])

    def _dump(self, sessions: list[dict[str, Any]]) -> None:
        target = self.path / "environment.json"
        beside = target.with_suffix(".tmp")
        beside.write_text(json.dumps(sessions, indent=2, default=str), encoding="utf-8")
        beside.replace(target)

    def _empty(self) -> None:
        """Remove what is there; the configuration last, so that what a killed process leaves is a run all the same."""
        for inside in sorted(self.path.iterdir(), key=lambda inside: inside.name == _CONFIG):
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside)
            else:
                inside.unlink()

    def _may_be_emptied(self) -> bool:
        """Whether this is a run's own directory: other programs, too, have a config.yaml and checkpoints."""
        try:
            keys = _read_yaml(self.path / _CONFIG).keys()
        except UserError:
            return False
        return keys >= {"output_dir", "model", "task", "training"} and not Path.cwd().is_relative_to(
            self.path.resolve()
        )

    def _check_same(self, config: RunConfig) -> None:
        before = parse_config(_read_yaml(self.path / _CONFIG), source=str(self.path / _CONFIG)).to_plain()
        after = config.to_plain()
        if config.training.lr_scheduler_type == "constant":  # the other schedules depend on the number of steps
            before["training"]["max_steps"] = after["training"]["max_steps"]
        for section, keys in _MAY_CHANGE.items():
            for key in keys:
                (before[section] if section else before).pop(key, None)
                (after[section] if section else after).pop(key, None)
        if before != after:
            changed = _first_difference(before, after, "")
            raise UserError(f"--resume needs the configuration of the interrupted run, but {changed}")


def _first_difference(before: Any, after: Any, key: str) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                return _first_difference(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    return f"{key} was {before!r} and is now {after!r}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{str(path)!r} does not hold a configuration")
    return data
