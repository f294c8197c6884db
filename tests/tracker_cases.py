"""Trackers of a user's own, well behaved and otherwise; they run in processes of their own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from vcpo.observe.trackers.protocol import TrackedRun


class Recording:
    """Writes what it is given to ``recorded.jsonl`` in the run directory."""

    note = "recording"

    def __init__(self, run: TrackedRun) -> None:
        print("this must not get among the answers")
        self._file = (run.directory / "recorded.jsonl").open("a")
        facts = {"id": run.id, "name": run.name, "project": run.project, "seed": run.config.get("seed")}
        self._say({"started": facts, "pid": os.getpid()})

    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        self._say({"step": step, "kind": kind, "metrics": dict(metrics)})

    def close(self) -> None:
        self._say({"closed": True})

    def _say(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


class FailsToStart(Recording):
    def __init__(self, run: TrackedRun) -> None:
        raise ConnectionError("no route\nto host")


class FailsAtStep2(Recording):
    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")
        super().log(step, kind, metrics)


class DiesAtStep2(Recording):
    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        if step == 2:
            os._exit(7)


class Hangs(Recording):
    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        threading.Event().wait()


class HangsAtTheEnd(Recording):
    def close(self) -> None:
        threading.Event().wait()
