"""A disk that is full in the middle of a run: one sentence, nothing lost, and the resumed run is the uninterrupted one.

``/dev/full`` takes the place of a file while the run goes on, so that the operating system itself refuses what is
written next. Checkpoints that do not fit are in ``test_bad_input``.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from run_cases import assert_equal_weights, final_weights, timeless_metrics, tiny_config
from vcpo.errors import UserError
from vcpo.observe.ledger import read_ledger
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not (FULL.exists() and Path("/proc/self/fd").exists()), reason="needs /dev/full")

CHANGES = (
    "runtime.max_staleness=2",
    "eval.eval_steps=3",
    "eval.num_problems=4",
    "checkpoint.save_steps=2",
    "logging.transcript_steps=1",
    "logging.trajectory_steps=1",
    "watchdog.enabled=true",
    "watchdog.ess={below: 2.0, count: 5, window: 5}",  # an alarm at step 5
)


class Fills(Progress):
    """A display that fills the disk when step 4 is logged."""

    def __init__(self, fill: Callable[[], object]) -> None:
        super().__init__(6)
        self._fill = fill

    def log(self, step: int, kind: Any, metrics: Mapping[str, float]) -> None:
        super().log(step, kind, metrics)
        if (step, kind) == (4, "train"):
            self._fill()


def open_file_is_full(path: Path) -> None:
    """Every descriptor that this process has of the file."""
    found = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path.resolve())]
    assert found
    full = os.open(FULL, os.O_RDWR)
    for descriptor in found:
        os.dup2(full, int(descriptor))
    os.close(full)


def path_is_full(path: Path) -> None:
    path.symlink_to(FULL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_config(tmp_path_factory.mktemp("whole") / "run", *CHANGES), make_report=False)


@pytest.mark.parametrize(
    ("file", "fill", "what", "resumed_from"),
    [
        ("metrics.jsonl", open_file_is_full, "metrics", 4),
        ("ledger.sqlite-wal", open_file_is_full, "the ledger", 2),
        ("ledger.sqlite", open_file_is_full, "the ledger", 2),
        ("transcripts/step-000005.md", path_is_full, "transcripts", 4),
        ("alarms.jsonl", path_is_full, "alarms", 4),
    ],
)
def test_a_full_disk_ends_the_run_in_one_sentence_and_with_space_it_goes_on(
    tmp_path: Path, whole: Path, file: str, fill: Callable[[Path], None], what: str, resumed_from: int
) -> None:
    run = tmp_path / "run"
    config = tiny_config(run, *CHANGES)
    with pytest.raises(UserError) as error:
        train(config, make_report=False, progress=Fills(lambda: fill(run / file)))
    sentence = str(error.value)
    assert sentence.startswith(f"{what} in {str(run)!r} could not be written (")
    assert sentence.endswith("free space and continue with --resume from the last checkpoint")
    assert "\n" not in sentence
    assert RunDirectory(run).sessions()[-1]["outcome"] == "failed"
    # what is there can be read
    read_metrics(run / "metrics.jsonl")
    summary = read_ledger(run / "ledger.sqlite")
    assert summary.planned == sum(summary.fates.values())

    if (run / file).is_symlink():
        (run / file).unlink()
    resumed = train(config, mode="resume", make_report=False)
    assert RunDirectory(run).sessions()[-1]["resumed_at_step"] == resumed_from
    assert_equal_weights(final_weights(whole), final_weights(resumed))
    assert timeless_metrics(whole) == timeless_metrics(resumed)
    assert read_ledger(whole / "ledger.sqlite") == read_ledger(resumed / "ledger.sqlite")


def test_a_disk_that_is_still_full_refuses_to_resume_and_changes_nothing(tmp_path: Path) -> None:
    """First nothing fits, then everything but the weights."""
    changes = ("training.max_steps=2", "model.init.hidden_size=64")
    config = tiny_config(tmp_path / "run", *changes)
    run = train(config, make_report=False)
    weights, metrics = final_weights(run), timeless_metrics(run)
    (run / "model" / "model.safetensors").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit, sentence in (
            (1_000, r"^output_dir '.*run' cannot be written"),
            (
                config_size(run) + 100,
                r"^the record of this run in '.*run' could not be written .*; free space and start",
            ),
            (60_000, r"^the final model in '.*run' could not be written"),
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            with pytest.raises(UserError, match=sentence):
                train(config, mode="resume", make_report=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    train(config, mode="resume", make_report=False)
    assert_equal_weights(final_weights(run), weights)
    assert timeless_metrics(run) == metrics


def config_size(run: Path) -> int:
    """Of the configuration as it is written, in bytes."""
    return (run / "config.yaml").stat().st_size
