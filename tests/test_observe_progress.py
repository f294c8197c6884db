"""The progress display: plain lines in a pipe, a redrawn display on a terminal, a summary at the end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from vcpo.observe.formatting import count, seconds
from vcpo.observe.progress import Progress

STEP = {
    "reward": 0.25,
    "accuracy": 0.3,
    "ess": 0.612,
    "lag_mean": 7.5,
    "lag_max": 16.0,
    "tokens_per_second": 12345.0,
}


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def plain(total: int) -> tuple[Progress, Clock, io.StringIO]:
    output, clock = io.StringIO(), Clock()
    return Progress(total, Console(file=output, width=60), clock), clock, output


def test_a_plain_line_has_every_number_on_one_line() -> None:
    progress, _, output = plain(100)
    progress.log(0, "eval", {"accuracy": 0.125, "reward": 0.2})
    progress.log(1, "train", STEP)
    assert output.getvalue().splitlines() == [
        "eval at step 0: accuracy 12.5%  reward 0.200",
        "step 1/100  reward 0.250  train acc 30.0%  eval acc 12.5% @0  ESS 0.612  lag 7.5 (max 16)"
        "  tokens/s 12,345  left -",
    ]


def test_plain_lines_come_every_ten_steps_and_at_the_end() -> None:
    progress, _, output = plain(24)
    for step in range(1, 25):
        progress.log(step, "train", STEP)
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["1/24", "11/24", "21/24", "24/24"]


def test_slow_steps_get_a_plain_line_after_thirty_seconds() -> None:
    progress, clock, output = plain(100)
    for step in range(1, 5):
        progress.log(step, "train", STEP)
        clock.now += 16
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["1/100", "3/100"]


def test_time_left_follows_the_pace_of_steps_and_not_that_of_evaluations() -> None:
    progress, clock, _ = plain(100)
    assert progress.seconds_left is None
    for step in range(1, 11):
        clock.now += 2
        progress.log(step, "train", STEP)
    with progress.phase("evaluation", 8):
        clock.now += 500
    clock.now += 2
    progress.log(11, "train", STEP)
    assert progress.seconds_left == pytest.approx(2 * 89)


def test_a_plain_phase_says_how_it_ended() -> None:
    progress, clock, output = plain(10)
    with progress.phase("warm start", 500) as update:
        update(1, detail="loss 2.3")
        clock.now += 31
        update(200, detail="loss 1.5")
        clock.now += 20
        update(500, detail="loss 0.9")
    assert output.getvalue().splitlines() == [
        "warm start: 200/500  loss 1.5",
        "warm start: 500/500 in 51s  loss 0.9",
    ]


def test_a_phase_may_learn_its_total_from_its_updates() -> None:
    progress, _, output = plain(10)
    with progress.phase("evaluation") as update:
        update(3, 128)
    assert output.getvalue() == "evaluation: 3/128 in 0s\n"


def test_missing_and_non_finite_numbers_are_shown_as_such() -> None:
    progress, _, output = plain(10)
    progress.log(1, "train", {"reward": float("nan"), "lag_mean": float("inf")})
    assert "reward nan  train acc -  ESS -  lag inf (max -)  tokens/s -" in output.getvalue()


def test_a_note_is_printed_as_it_is() -> None:
    progress, _, output = plain(10)
    progress.note("file [bold]x[/bold] of group [3]")
    assert output.getvalue() == "file [bold]x[/bold] of group [3]\n"


def test_the_live_display_shows_bars_numbers_and_notes() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, color_system=None)
    with Progress(4, console) as progress:
        with progress.phase("warm start", 2) as update:
            update(2, detail="loss 0.5")
        for step in range(1, 5):
            progress.log(step, "train", STEP)
        progress.log(4, "eval", {"accuracy": 0.875})
        progress.note("saved")
    shown = output.getvalue()
    for text in ("training", "4/4", "0.612", "87.5% @4", "7.5 (max 16)", "12,345", "saved"):
        assert text in shown
    progress.close()


def test_the_summary_names_the_run_its_numbers_and_its_report(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "time": 100.0, "kind": "eval", "accuracy": 0.125},
        {"step": 1, "time": 101.0, "kind": "train", **STEP, "skipped": 0},
        {"step": 2, "time": 102.0, "kind": "train", **STEP, "skipped": 1},
        {"step": 2, "time": 175.0, "kind": "eval", "accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = io.StringIO()
    Progress(2, Console(file=output, width=200)).summary(tmp_path, tmp_path / "report.html")
    shown = output.getvalue()
    numbers = ("50.0% (at first 12.5%, best 50.0%)", "0.612", "7.5 mean, 16 max", "12,345 (median)", "1m 15s")
    for text in (*numbers, "2 (1 skipped)"):
        assert text in shown
    assert str(tmp_path / "report.html") in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (185, "3m 05s"), (3600, "1h 00m"), (7620, "2h 07m"), (None, "-")],
)
def test_seconds_are_readable(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(16, "16"), (7.49, "7.5"), (99.96, "100.0"), (1234.6, "1,235"), (float("nan"), "nan")]
)
def test_quantities_are_readable(value: float, text: str) -> None:
    assert count(value) == text
