"""Transcripts: what a person sees of a trajectory, and that hostile text stays inside its block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vcpo.observe.transcripts import TranscriptWriter
from vcpo.records import Grade, Group, Problem, StopReason, Trajectory


@dataclass
class Details:
    log_ratios_B: list[float]
    weights_B: list[float]
    advantages_B: list[float]


def decode(ids: NDArray[np.int64]) -> str:
    return "".join("<eos>" if i == 0 else chr(i) for i in ids.tolist())


def trajectory(index: int, reward: float | None, response: str = "42", given: int = 0) -> Trajectory:
    """``response`` and an EOS; its first ``given`` characters are not sampled."""
    ids = np.array([*map(ord, response), 0])
    return Trajectory(
        group_id=7,
        index=index,
        prompt_ids=np.array([*map(ord, "6*7=")]),
        response_ids_T=ids,
        mask_T=np.arange(len(ids)) >= given,
        logprobs_T=np.zeros(len(ids), np.float32),
        versions_T=np.minimum(np.arange(len(ids)) + 4, 5),
        stop_reason=StopReason.EOS,
        start_version=4,
        grade=Grade(reward, reward == 1.0, {"format": 0.5}),
    )


def write(run_dir: Path, trajectories: list[Trajectory], per_step: int = 4, every: int = 10, step: int = 10) -> str:
    group = Group(7, Problem("p", "6*7="), 8, trajectories)
    details = Details([0.25] * len(trajectories), [1.284] * len(trajectories), [-0.5] * len(trajectories))
    path = TranscriptWriter(run_dir, every, per_step).write(step, [group], details, decode)
    assert path is not None
    return path.read_text(encoding="utf-8")


def test_an_entry_says_what_happened(tmp_path: Path) -> None:
    text = write(tmp_path, [trajectory(0, 1.0)])
    assert (tmp_path / "transcripts" / "step-000010.md").is_file()
    assert text == (
        "# Step 10: 1 of 1 trajectories, from best to worst reward\n\n"
        "## group 7 response 0\n\n"
        "- reward 1 (format 0.5), correct\n"
        "- stop eos, 3 tokens, policy versions 4 to 5, lag 5\n"
        "- log-ratio +0.2500, weight 1.2840, advantage -0.5000\n\n"
        "Prompt:\n\n    6*7=\n\nResponse:\n\n    42<eos>\n"
    )


def test_only_the_steps_asked_for_are_written(tmp_path: Path) -> None:
    group = Group(7, Problem("p", "6*7="), 8, [trajectory(0, 1.0)])
    details = Details([0.0], [1.0], [0.0])
    assert TranscriptWriter(tmp_path, 10, 4).write(11, [group], details, decode) is None
    assert TranscriptWriter(tmp_path, 0, 4).write(10, [group], details, decode) is None
    assert not (tmp_path / "transcripts").exists()


def test_the_chosen_ones_span_the_rewards_and_unscored_ones_come_last(tmp_path: Path) -> None:
    rewards = [0.2, None, 1.0, 0.5, 0.0]
    text = write(tmp_path, [trajectory(i, r) for i, r in enumerate(rewards)], per_step=3)
    shown = [line for line in text.splitlines() if line.startswith("## ")]
    assert shown == ["## group 7 response 2", "## group 7 response 0", "## group 7 response 1"]
    assert "reward none (could not be scored)" in text


def test_hostile_text_cannot_leave_its_block_or_move_the_cursor(tmp_path: Path) -> None:
    text = write(tmp_path, [trajectory(0, 0.0, "```\n## group 9 response 9\n\x1b[2J\u202e\u2028# x")])
    inside = text.split("Response:\n\n")[1].rstrip("\n").split("\n")
    assert all(line.startswith("    ") for line in inside)
    assert "\x1b" not in text
    assert "\\x1b[2J\\u202e\\u2028# x" in text
    assert text.count("\n## ") == 1


def test_given_tokens_are_shown_apart(tmp_path: Path) -> None:
    text = write(tmp_path, [trajectory(0, 0.0, "toolanswer", given=4)])
    assert "Given:\n\n    tool\n\nResponse:\n\n    answer<eos>" in text


def test_long_texts_are_cut_and_say_so(tmp_path: Path) -> None:
    text = write(tmp_path, [trajectory(0, 0.0, "a" * 5000)])
    assert "[... 1005 characters left out ...]" in text
    assert len(text) < 5000


def test_a_response_without_tokens_is_shown(tmp_path: Path) -> None:
    empty = trajectory(0, 0.0)
    for name in ("response_ids_T", "mask_T", "logprobs_T", "versions_T"):
        setattr(empty, name, getattr(empty, name)[:0])
    assert "0 tokens, policy versions 4, lag 5" in write(tmp_path, [empty])
