"""metrics.jsonl and TensorBoard events: what is written is what is read, also after a crash and a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.errors import UserError
from vcpo.observe.metrics import MetricsLog, read_metrics
from vcpo.observe.tensorboard import TensorBoardLogger


def write_steps(run_dir: Path, last: int) -> Path:
    log = MetricsLog(run_dir)
    for step in range(1, last + 1):
        log.log(step, "train", {"reward": step / 10})
    log.close()
    return run_dir / "metrics.jsonl"


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(3, "eval", {"accuracy": 0.5})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    data = json.loads(line)
    assert list(data) == ["step", "time", "kind", "accuracy"]
    assert (data["step"], data["kind"], data["accuracy"]) == (3, "eval", 0.5)
    log.close()


@given(st.dictionaries(st.sampled_from(["reward", "ess", "kl", "grad_norm"]), st.floats()))
def test_every_float_survives_and_the_file_is_strict_json(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    log = MetricsLog(run_dir)
    log.log(1, "train", metrics)
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((run_dir / "metrics.jsonl").read_text(), parse_constant=refuse)
    (line,) = read_metrics(run_dir / "metrics.jsonl")
    for name, value in metrics.items():
        assert line[name] == value or (math.isnan(value) and math.isnan(line[name]))


def test_a_metric_must_not_take_the_name_of_a_line_key(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match="'time'"):
        log.log(1, "train", {"time": 1.0})
    log.close()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 3)
    path.write_bytes(path.read_bytes() + b'{"step": 4, "kind": "train", "rew\xc3')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_complete_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 3)
    path.write_text(path.read_text().rstrip("\n"))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("bad", ["garbage", "[1]", '{"step": 1.5, "kind": "train"}', '{"step": 1, "kind": "other"}'])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    path = write_steps(tmp_path, 3)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], bad, lines[2]]) + "\n")
    with pytest.raises(UserError, match="line 2 of"):
        read_metrics(path)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl.*cannot be read: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_resume_drops_the_steps_that_are_done_again_and_says_so(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "ki')
    notes: list[str] = []
    log = MetricsLog(tmp_path, resume_step=3, note=notes.append)
    log.log(4, "train", {"reward": math.inf})
    log.close()
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["reward"] for line in lines] == [0.1, 0.2, 0.3, math.inf]
    assert notes == [
        "metrics.jsonl: dropped an unfinished last line",
        "metrics.jsonl: dropped 2 lines after step 3, which is done again",
    ]


def test_resume_without_a_metrics_file_starts_one(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, resume_step=3)
    log.log(4, "train", {})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [4]


def test_tensorboard_gets_the_same_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLogger(tmp_path)
    log.log(1, "train", {"reward": 0.25, "kl": math.nan})
    log.log(2, "train", {"reward": 0.5})
    log.log(2, "eval", {"accuracy": 0.75})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(2, 0.75)]
    assert math.isnan(events.Scalars("train/kl")[0].value)


def test_tensorboard_hides_steps_that_are_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        first.log(step, "train", {"reward": float(step)})
    first.close()
    second = TensorBoardLogger(tmp_path, resume_step=1)
    second.log(2, "train", {"reward": 20.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 1.0), (2, 20.0)]
