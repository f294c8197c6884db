"""Experiment trackers: handed everything, waited for never, and missed by nobody when they fail."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import tracker_cases
from run_cases import InterruptAfter, assert_equal_weights, final_weights, gone_within, tiny_config
from vcpo.errors import UserError
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress
from vcpo.observe.trackers import protocol
from vcpo.observe.trackers.protocol import BUILT_IN, check_trackers
from vcpo.observe.trackers.remote import RemoteTracker, tracked_run

CASES = Path(tracker_cases.__file__)


def start(directory: Path, case: str, notes: list[str], **options: Any) -> RemoteTracker:
    run = tracked_run(directory, "project", None, {"seed": 4})
    return RemoteTracker(f"{CASES}:{case}", run, notes.append, **options)


def recorded(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "recorded.jsonl").read_text().splitlines()]


def test_everything_is_handed_over_in_order(tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = start(tmp_path, "Recording", notes)
    tracker.log(1, "train", {"reward": 0.5, "kl": math.nan, "largest": math.inf})
    tracker.log(0, "eval", {"accuracy": 0.25})
    tracker.close()
    tracker.close()
    first, train, evaluated, last = recorded(tmp_path)
    id_ = json.loads((tmp_path / "tracking.json").read_text())["id"]
    assert first["started"] == {"id": id_, "name": tmp_path.name, "project": "project", "seed": 4}
    assert (train["step"], train["kind"], train["metrics"]["reward"]) == (1, "train", 0.5)
    assert math.isnan(train["metrics"]["kl"])
    assert train["metrics"]["largest"] == math.inf
    assert evaluated == {"step": 0, "kind": "eval", "metrics": {"accuracy": 0.25}}
    assert last == {"closed": True}
    assert notes == ["recording"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("FailsToStart", "failed with ConnectionError: no route to host"),
        ("FailsAtStep2", "failed with OSError: [Errno 28] No space left on device"),
        ("DiesAtStep2", "ended with exit code 7"),
        ("Missing", "has no 'Missing'"),
    ],
)
def test_a_tracker_that_fails_is_noted_once_and_off(tmp_path: Path, case: str, reason: str) -> None:
    notes: list[str] = []
    tracker = start(tmp_path, case, notes)
    for step in range(1, 6):
        tracker.log(step, "train", {"reward": 0.0})
    tracker.close()
    tracker.log(6, "train", {"reward": 0.0})  # a logger never raises
    failures = [note for note in notes if note != "recording"]
    assert len(failures) == 1
    assert reason in failures[0]
    assert failures[0].endswith("metrics.jsonl has them all")


@pytest.mark.parametrize("case", ["Hangs", "HangsAtTheEnd"])
def test_a_tracker_that_hangs_is_killed_after_the_run(tmp_path: Path, case: str) -> None:
    notes: list[str] = []
    tracker = start(tmp_path, case, notes, end_seconds=0.5)
    for step in range(50):
        tracker.log(step, "train", {f"metric {i}": 0.0 for i in range(500)})  # more than a pipe holds
    tracker.close()
    assert tracker._process.poll() is not None
    assert "was not done 0.5 s after the end of the run" in notes[-1]


def test_a_tracker_that_does_not_keep_up_is_given_up(tmp_path: Path) -> None:
    notes: list[str] = []
    tracker = start(tmp_path, "Hangs", notes, most_waiting=5)
    begin = time.monotonic()
    while not any("has not taken 5 lines" in note for note in notes):
        tracker.log(1, "train", {f"metric {i}": 0.0 for i in range(500)})
        assert time.monotonic() - begin < 60
    tracker._process.wait(30)
    tracker.close()
    assert len([note for note in notes if note != "recording"]) == 1


def test_a_killed_run_leaves_no_process_and_loses_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from vcpo.observe.trackers.remote import RemoteTracker, tracked_run
tracker = RemoteTracker({f"{CASES}:Recording"!r}, tracked_run(Path({str(tmp_path)!r}), "p", None, {{}}), print)
for step in range(3):
    tracker.log(step, "train", {{"x": 1.0}})
while not tracker._lines.empty():
    pass
print(tracker._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout.split()[-1])
    if psutil.pid_exists(pid):
        assert gone_within([psutil.Process(pid)], 30)
    lines = recorded(tmp_path)
    assert lines[0]["pid"] == pid
    # the last line may have been in the dead process's hands
    assert [line["step"] for line in lines[1:-1]] in ([0, 1], [0, 1, 2])
    assert lines[-1] == {"closed": True}


def test_names_that_are_no_trackers_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vcpo.pipeline.run import train

    def refused(names: str) -> str:
        config = tiny_config(tmp_path / "run", f"logging.report_to={names}", "model={path: /nowhere}")
        with pytest.raises(UserError) as caught:
            train(config)
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    assert refused("[wandbb]") == "logging.report_to: unknown tracker 'wandbb'; did you mean 'wandb'?"
    assert "there is no file" in refused("['none.py:Tracker']")
    monkeypatch.setitem(protocol.BUILT_IN, "not_there", "x:y")
    expected = (
        "logging.report_to has 'not_there', which is not installed: pip install 'vcpo[not_there]', or leave it out"
    )
    assert refused("[not_there]") == expected
    # what W&B leaves behind in the working directory is not W&B
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(protocol.BUILT_IN, "left_behind", "x:y")
    assert "which is not installed" in refused("[left_behind]")


def test_every_built_in_tracker_is_an_extra() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert all(f"\n{name} = [" in extras for name in BUILT_IN)
    check_trackers([f"{CASES}:Recording"])


def test_a_run_and_its_resumption_are_one_tracked_run(tmp_path: Path) -> None:
    from vcpo.pipeline.run import train

    run = tmp_path / "run"
    words = [f"logging.report_to=['{CASES}:Recording']", "logging.run_name=mine", "eval.eval_steps=2",
             "eval.num_problems=2", "training.max_steps=4"]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(run, *words), progress=InterruptAfter(2), make_report=False)
    train(tiny_config(run, *words), mode="resume", progress=Progress(4), make_report=False)
    lines = recorded(run)
    started = [line["started"] for line in lines if "started" in line]
    assert [fact["name"] for fact in started] == ["mine", "mine"]
    assert len({fact["id"] for fact in started}) == 1
    logged = [(line["step"], line["kind"], line["metrics"]) for line in lines if "step" in line]
    kept = [
        (line["step"], line["kind"], {k: v for k, v in line.items() if k not in ("step", "time", "kind")})
        for line in read_metrics(run / "metrics.jsonl")
    ]
    assert json.dumps(logged) == json.dumps(kept)  # NaN is equal to NaN as text


def test_a_broken_tracker_changes_nothing_about_the_run(tmp_path: Path) -> None:
    from vcpo.pipeline.run import train

    notes: list[str] = []

    class Noting(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    names = f"['{CASES}:FailsToStart','{CASES}:FailsAtStep2','{CASES}:DiesAtStep2']"
    config = tiny_config(tmp_path / "broken", f"logging.report_to={names}", "training.max_steps=3")
    train(config, progress=Noting(3), make_report=False)
    train(tiny_config(tmp_path / "plain", "training.max_steps=3"), make_report=False)
    assert_equal_weights(final_weights(tmp_path / "broken"), final_weights(tmp_path / "plain"))
    assert sum("gets no more metrics" in note for note in notes) == 3
