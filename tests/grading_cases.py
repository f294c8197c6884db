"""A task and reward functions that do what an answer tells them, named in configurations by this file's path."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vcpo.config import RunConfig, parse_config
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import Answer, Grade, Problem, StopReason, Trajectory

HERE = __file__
calls = 0


class Unshowable(Exception):
    """An exception that can be neither printed nor pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise ValueError("no words")


def obey(answer: str) -> float:
    """The number that the answer is, or whatever else it says."""
    if answer == "hang":
        threading.Event().wait()
    if answer == "hang in C":  # and never let go of the interpreter's lock
        re.match(r"(a+)+$", "a" * 64 + "b")
    if answer == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if answer == "out of memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if answer == "grow":  # by more than a test allows, and not end
        memory = b"1" * (1 << 28)
        threading.Event().wait(len(memory))
    if answer == "quit":
        os._exit(3)
    if answer.startswith("quit once "):  # the rest is a path, which remembers
        path = Path(answer.removeprefix("quit once "))
        if not path.exists():
            path.touch()
            os._exit(3)
        return 1.0
    if answer == "exit":
        sys.exit("enough")
    if answer == "raise":
        raise ZeroDivisionError("the judge has no more paper")
    if answer == "unshowable":
        raise Unshowable
    return float(answer)


class ObedientTask:
    """A prompt that says nothing, and answers that decide what becomes of their grades."""

    def train_problem(self, position: int, seed: int) -> Problem:
        return Problem(f"p{position}", "1=")

    def eval_problems(self, count: int) -> list[Problem]:
        return [Problem(f"e{position}", "1=") for position in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        return [Grade(obey(completion), correct=completion == "1") for completion in completions]


def obedient(completions: list[str], **columns: Any) -> list[float]:
    return [obey(completion) for completion in completions]


def process_number(completions: list[str], **columns: Any) -> list[float]:
    """Who grades."""
    obedient(completions)
    return [float(os.getpid())] * len(completions)


def count_calls(completions: list[str], **columns: Any) -> list[float]:
    """A state that must live on between calls."""
    global calls
    calls += 1
    obedient(completions)
    return [float(calls)] * len(completions)


def has_torch(completions: list[str], **columns: Any) -> list[float]:
    return [float("torch" in sys.modules)] * len(completions)


def says_who_it_is_and_hangs(completions: list[str], **columns: Any) -> list[float]:
    print(os.getpid(), flush=True)
    obey("hang in C")
    return []


def hangs_in_the_third_call(completions: list[str], **columns: Any) -> list[float]:
    global calls
    calls += 1
    if calls == 3:
        obey("hang")
    return [float(len(set(completion))) for completion in completions]


def waits_for_a_file(completions: list[str], **columns: Any) -> list[float]:
    """Says who it is, then waits until there is a file of that name."""
    print(os.getpid(), flush=True)
    while not os.path.exists(completions[0]):
        pass
    return [1.0] * len(completions)


def one_value(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


def always_raises(completions: list[str], **columns: Any) -> list[float]:
    print("raising", flush=True)
    return obedient(["raise"])


def grading_config(*functions: str, **reward: Any) -> RunConfig:
    """A run that is graded by the obedient task or, beside a tame one, by functions of this file; with a short time."""
    return parse_config(
        {
            "model": {"init": {}},
            "task": "sort" if functions else f"{HERE}:ObedientTask",
            "reward": {"reward_funcs": [f"{HERE}:{name}" for name in functions], "timeout": 0.4, **reward},
        }
    )


def answer(text: str) -> Answer:
    """An answer that ended by itself."""
    return Answer(text, list(range(len(text))), StopReason.EOS)


def answered(number: int, *answers: str, **columns: Any) -> tuple[StartedGroup, list[Trajectory]]:
    """A group that has these answers and is not graded yet."""
    none = np.zeros(1, np.int64)
    trajectories = [
        Trajectory(number, i, none, none, none == 0, none.astype(np.float32), none, StopReason.EOS, 0, answer)
        for i, answer in enumerate(answers)
    ]
    return StartedGroup(number, Problem(f"p{number}", "1=", {"answer": "1", **columns}), none, number + 1), trajectories
