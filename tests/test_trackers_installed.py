"""The real W&B, trackio and MLflow, without a network: `make test-trackers` installs them.

Each is given a run and its resumption, and what it has stored is read with its own means.
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from run_cases import InterruptAfter, tiny_config
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress
from vcpo.observe.trackers.remote import RemoteTracker, tracked_run

SECRET = "0123456789abcdef" * 5

pytestmark = pytest.mark.skipif(
    not all((spec := importlib.util.find_spec(name)) and spec.origin for name in ("wandb", "trackio", "mlflow")),
    reason="wandb, trackio and mlflow are not installed; make test-trackers installs them",
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was interrupted after two of four steps and resumed, told to all three trackers."""
    from vcpo.pipeline.run import train

    root = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_API_KEY", SECRET)
        patch.setenv("HF_TOKEN", f"hf_{SECRET}")
        patch.setenv("TRACKIO_DIR", str(root / "trackio"))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        words = ["logging.report_to=[wandb,trackio,mlflow]", "logging.project=sorting", "training.max_steps=4",
                 "eval.eval_steps=2", "eval.num_problems=2"]  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(root / "run", *words), progress=InterruptAfter(2), make_report=False)
        train(tiny_config(root / "run", *words), mode="resume", progress=Progress(4), make_report=False)
        yield root


def expected(run: Path, name: str, kind: str) -> list[tuple[int, float]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [(line["step"], line[name]) for line in lines if line["kind"] == kind and name in line]


def test_wandb_has_every_metric_under_one_run(stored: Path) -> None:
    files = sorted((stored / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one file for each start"
    rows = [row for path in files for row in wandb_rows(path)]
    for name, kind in (("reward", "train"), ("accuracy", "eval")):
        found = [(int(row["step"]), row[f"{kind}/{name}"]) for row in rows if f"{kind}/{name}" in row]
        assert found == expected(stored / "run", name, kind)
    ids = {path.stem.removeprefix("run-") for path in files}
    assert ids == {json.loads((stored / "run" / "tracking.json").read_text())["id"]}


def test_trackio_has_every_metric_under_one_run(stored: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("sorting")
    assert name == f"run-{json.loads((stored / 'run' / 'tracking.json').read_text())['id']}"
    rows = SQLiteStorage.get_logs("sorting", name)
    for metric, kind in (("reward", "train"), ("accuracy", "eval")):
        found = [(row["step"], row[f"{kind}/{metric}"]) for row in rows if f"{kind}/{metric}" in row]
        assert found == expected(stored / "run", metric, kind)


def test_mlflow_has_every_metric_and_parameter_under_one_run(stored: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{stored / 'run' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sorting")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.max_steps"] == "4"
    assert run.data.params["task.digits"] == "4"
    for metric, kind in (("reward", "train"), ("accuracy", "eval")):
        history = client.get_metric_history(run.info.run_id, f"{kind}/{metric}")
        assert [(m.step, m.value) for m in history] == expected(stored / "run", metric, kind)


def test_no_secret_is_in_the_run_directory(stored: Path) -> None:
    files = [path for path in stored.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_numbers_that_are_none_are_taken(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    notes: list[str] = []
    tracker = RemoteTracker(name, tracked_run(tmp_path, "p", None, {"a": {"b": None}, "c": [1, "x"]}), notes.append)
    tracker.log(1, "train", {"kl": math.nan, "up": math.inf, "down": -math.inf, "part/ä@1": 1.0})
    tracker.log(1, "train", {"reward": 1.0})  # a step that is done again
    tracker.log(0, "eval", {"accuracy": 1.0})  # an evaluation that comes late
    tracker.close()
    assert tracker._process.returncode == 0
    assert not [note for note in notes if "no more metrics" in note]


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("wandb", {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "/nowhere"}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}),
        ("trackio", {"TRACKIO_SERVER_URL": "http://127.0.0.1:9"}),
    ],
)
def test_a_server_or_an_account_that_is_not_there_is_noted_once(
    tmp_path: Path, name: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    notes: list[str] = []
    tracker = RemoteTracker(name, tracked_run(tmp_path, "p", None, {}), notes.append, end_seconds=60)
    for step in range(3):
        tracker.log(step, "train", {"reward": 1.0})
    tracker.close()
    assert sum("gets no more metrics of this run" in note for note in notes) == 1


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The history rows of an offline run's file: a log in LevelDB's format with records of W&B's own."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, block, pending = 7, 32768, b""
    while position < len(data):
        if block - position % block < 7:  # no header fits into the rest of a block
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(pending)
            pending = b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                       for item in record.history.item}  # fmt: skip
