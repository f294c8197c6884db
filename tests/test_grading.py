"""Grading in processes of its own: whatever a grader does, the run goes on, and says what has become of the grades."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from grading_cases import HERE, ObedientTask, answer, answered, grading_config
from run_cases import (
    assert_equal_weights,
    children_running,
    final_weights,
    gone_within,
    tiny_config,
)
from vcpo.errors import UserError
from vcpo.observe.ledger import read_ledger
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.grading import Grader, InProcessGrading, graded
from vcpo.pipeline.grading_pool import GradingFailed, GradingPool, make_task_and_grading
from vcpo.pipeline.run import train
from vcpo.records import Grade, Group, Problem, Trajectory, TurnRecord

ORPHAN = 2.0  # seconds in which a process must follow the run that was killed
SECONDS = 60.0  # for anything else: a busy machine


@contextlib.contextmanager
def grading(*functions: str, **reward: Any) -> Iterator[tuple[GradingPool, list[str]]]:
    """A pool and what it has to tell the user; nothing of it is left afterwards."""
    before = psutil.Process().children()
    notes: list[str] = []
    pool = GradingPool(grading_config(*functions, **reward), notes.append)
    try:
        yield pool, notes
    finally:
        pool.close()
        assert psutil.Process().children() == before


def grades_of(group: Group) -> list[Grade]:
    return [t.grade for t in group.trajectories if t.grade is not None]


def grade(pool: GradingPool, number: int, *answers: str) -> list[Grade]:
    return grades_of(pool.submit(*answered(number, *answers)).result(SECONDS))


def rewards(pool: GradingPool, number: int, *answers: str) -> list[float | None]:
    return [grade.reward for grade in grade(pool, number, *answers)]


@pytest.mark.parametrize(
    ("hostile", "reason", "restarts"),
    [
        ("hang", "no grade within 0.4 s, in obey (", 2),
        ("hang in C", "no grade within 0.4 s, in obey (", 2),
        ("crash", "the grading process was killed by SIGSEGV, in obey (", 2),
        ("out of memory", "the grading process was killed by SIGKILL (out of memory?)", 2),
        ("quit", "the grading process ended with exit code 3", 2),
        ("exit", "SystemExit: enough (raised by the grader of task ObedientTask)", 0),
        ("raise", "ZeroDivisionError: the judge has no more paper (raised by the grader of task ObedientTask)", 0),
    ],
)
def test_a_hostile_answer_loses_its_own_grade_and_costs_no_other_its_grade(
    hostile: str, reason: str, restarts: int
) -> None:
    with grading() as (pool, notes):
        first, second, third = grade(pool, 7, "1", hostile, "2")
        assert [first, third] == [Grade(1.0, correct=True), Grade(2.0)]
        assert second.reward is None
        assert second.failure is not None
        assert second.failure.startswith(reason)
        assert pool.metrics() | {"time_grading": 0.0} == {
            "grading_failures": 1.0,
            "grading_restarts": restarts,
            "time_grading": 0.0,
        }
        (note,) = notes
        assert note.startswith(f"1 of 3 answers to problem p7 have no reward: {reason}")
        assert rewards(pool, 8, "3", "4") == [3.0, 4.0]


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        ("hang", "no grade within 0.4 s, in obey ("),
        ("crash", "the grading process was killed by SIGSEGV"),
        ("exit", "SystemExit: enough (raised by reward function 'obedient')"),
        ("raise", "ZeroDivisionError: the judge has no more paper (raised by reward function 'obedient')"),
        ("unshowable", "Unshowable: (its message cannot be shown) (raised by reward function 'obedient')"),
    ],
)
def test_where_a_users_function_fails_the_group_that_it_may_have_compared_has_no_reward(
    hostile: str, reason: str
) -> None:
    with grading("obedient") as (pool, notes):
        lost = grade(pool, 1, "1", hostile)
        assert [grade.reward for grade in lost] == [None, None]
        assert all(grade.failure is not None and grade.failure.startswith(reason) for grade in lost)
        assert rewards(pool, 2, "1", "2") == [1.0, 2.0]
        grade(pool, 3, "1", hostile)
        assert len(notes) == 1  # once for each reason
        assert pool.metrics()["grading_failures"] == 4.0


def test_a_process_that_dies_once_costs_nobody_a_reward(tmp_path: Path) -> None:
    """Most deaths have nothing to do with what was graded."""
    for functions in ([], ["obedient"]):
        with grading(*functions) as (pool, notes):
            assert rewards(pool, 1, "2", f"quit once {tmp_path / str(functions)}") == [2.0, 1.0]
            assert pool.metrics()["grading_restarts"] == 1.0
            assert notes == []


def test_an_answer_of_the_wrong_kind_ends_the_run_at_once() -> None:
    with grading("one_value", max_failures=100) as (pool, notes):
        future = pool.submit(*answered(0, "1", "2"))
        with pytest.raises(UserError, match="reward function 'one_value' returned 1 values for 2 completions"):
            future.result(SECONDS)
        assert notes == []


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("nan", "a reward must be a finite number, or None for an answer that cannot be scored"),
        ("inf", "a reward must be a finite number, or None for an answer that cannot be scored"),
    ],
)
def test_a_task_whose_grades_are_no_numbers_ends_the_run_at_once(value: str, sentence: str) -> None:
    with (
        grading() as (pool, _),
        pytest.raises(UserError, match=f"task ObedientTask returned .* for answer 1; {sentence}"),
    ):
        pool.submit(*answered(0, "1", value)).result(SECONDS)


class GivesBack:
    """A task whose grades are whatever the test wants."""

    def __init__(self, grades: Any) -> None:
        self._grades = grades

    def grade(self, problems: Any, completions: Any) -> Any:
        return self._grades


@pytest.mark.parametrize(
    ("grades", "sentence"),
    [
        ([Grade(1.0)], "must return a list with one Grade per answer (2)"),
        (None, "must return a list with one Grade per answer (2)"),
        ([Grade(1.0), 1.0], "returned 1.0 for answer 1, which is no Grade"),
        (
            [Grade(1.0), Grade(1.0, parts={str(i): 0.0 for i in range(101)})],
            "parts must be at most 100 numbers",
        ),
        ([Grade(1.0), Grade(1.0, parts={"style": "good"})], "parts must be at most 100 numbers"),  # type: ignore[dict-item]
    ],
)
def test_what_a_task_gives_back_is_checked(grades: Any, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        Grader(GivesBack(grades), None).grade(Problem("p", "1="), [answer("a"), answer("b")])
    assert sentence in str(error.value)
    assert len(str(error.value)) < 400


def test_numbers_of_other_types_become_plain_ones() -> None:
    given = [Grade(np.float32(0.5), correct=np.True_, parts={"style": np.int64(2)})]  # type: ignore[arg-type, dict-item]
    (made,) = Grader(GivesBack(given), None).grade(Problem("p", "1="), [answer("a")])
    assert made == Grade(0.5, correct=True, parts={"style": 2.0})
    assert {type(made.reward), type(made.correct), type(made.parts["style"])} == {float, bool}


def test_too_many_failed_prompts_in_a_row_end_the_run_with_the_last_error_and_its_process() -> None:
    with grading("obedient", max_failures=2) as (pool, notes):
        for number in range(2):
            assert rewards(pool, number, "raise") == [None]
        assert rewards(pool, 2, "1") == [1.0]  # which begins a new row
        for number in range(2):
            assert rewards(pool, number, "raise") == [None]
        with pytest.raises(GradingFailed) as error:
            pool.submit(*answered(5, "raise")).result(SECONDS)
        (worker,) = workers()
        assert str(error.value).startswith(
            "grading failed for 3 prompts in a row (reward.max_failures is 2); grading process"
            f" {worker.pid}: ZeroDivisionError: the judge has no more paper (raised by reward function 'obedient')"
        )
        assert "--- traceback of the grading process ---" in str(error.value)
        assert 'raise ZeroDivisionError("the judge has no more paper")' in str(error.value)
        assert len(notes) == 1


def test_prompts_with_one_hostile_answer_among_others_never_end_the_run() -> None:
    with grading(max_failures=0) as (pool, _):
        for number in range(3):
            assert rewards(pool, number, "1", "raise") == [1.0, None]
        with pytest.raises(GradingFailed, match="grading failed for 1 prompts in a row"):
            pool.submit(*answered(3, "raise", "raise")).result(SECONDS)


def test_the_place_where_a_grader_hung_is_in_the_final_error() -> None:
    with grading("obedient", max_failures=0) as (pool, _), pytest.raises(GradingFailed) as error:
        pool.submit(*answered(0, "hang")).result(SECONDS)
    assert "no grade within 0.4 s" in str(error.value)
    assert f'File "{HERE}", line ' in str(error.value)
    assert " in obedient" in str(error.value)


def test_a_functions_state_lives_on_until_its_process_has_to_be_replaced() -> None:
    with grading("count_calls") as (pool, _):
        assert [rewards(pool, number, "1", "1") for number in range(3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert rewards(pool, 3, "raise") == [None]
        assert rewards(pool, 4, "1") == [5.0]
        assert rewards(pool, 5, "quit") == [None]
        assert rewards(pool, 6, "1") == [1.0]


def workers() -> list[psutil.Process]:
    return children_running("grading_worker")


def test_a_process_that_ends_while_it_has_nothing_to_do_is_replaced_and_no_answer_suffers() -> None:
    with grading("process_number") as (pool, notes):
        rewards(pool, 0, "1")
        (worker,) = workers()
        worker.kill()
        gone_within([worker], SECONDS)
        (number,) = rewards(pool, 1, "1")
        assert number == workers()[0].pid != worker.pid
        assert pool.metrics()["grading_restarts"] == 1.0
        assert notes == []


def test_the_signals_that_end_a_run_do_not_touch_its_grading_processes() -> None:
    with grading("process_number") as (pool, _):
        (number,) = rewards(pool, 0, "1")
        (worker,) = workers()
        for ending in (signal.SIGINT, signal.SIGTERM):
            worker.send_signal(ending)
            assert rewards(pool, 1, "1") == [number]
        assert os.getpgid(worker.pid) != os.getpgid(0)


def test_several_processes_share_the_work() -> None:
    with grading("process_number", processes=3) as (pool, _):
        work = [answered(number, "1", "2") for number in range(30)]
        groups = pool.grade_all(work)
        assert [group.id for group in groups] == list(range(30))
        assert {grade.reward for group in groups for grade in grades_of(group)} <= {float(p.pid) for p in workers()}
        assert len(workers()) == 3


def test_members_come_back_in_order() -> None:
    with grading() as (pool, _):
        started, trajectories = answered(0, "1", "2", "3")
        group = pool.submit(started, trajectories[::-1]).result(SECONDS)
        assert [(t.index, t.grade.reward) for t in group.trajectories if t.grade] == [(0, 1.0), (1, 2.0), (2, 3.0)]
        assert (group.id, group.next_position) == (0, 1)


def test_processes_have_no_torch_unless_a_function_wants_it() -> None:
    with grading("has_torch") as (pool, _):
        assert rewards(pool, 0, "1") == [0.0]


def test_a_problem_that_cannot_be_sent_ends_the_run_with_a_sentence() -> None:
    with grading("obedient") as (pool, _), pytest.raises(UserError, match="problem 'p0' cannot be sent to the grading"):
        pool.submit(*answered(0, "1", columns={"check": lambda: None})).result(SECONDS)


def test_what_cannot_be_loaded_there_is_said_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module_of_mine\n")
    config = tiny_config(tmp_path / "run", f"reward.reward_funcs=['{tmp_path}/mine.py:f']", "reward.processes=1")
    with pytest.raises(UserError, match="failed while it was loaded: ModuleNotFoundError: No module named 'no_such"):
        make_task_and_grading(config)
    (tmp_path / "mine.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(GradingFailed, match=r"could not be loaded; grading process .* ended with exit code 5"):
        make_task_and_grading(config)
    assert workers() == []


def test_closing_gives_up_what_is_not_graded() -> None:
    with grading("says_who_it_is_and_hangs", timeout=1000.0) as (pool, _):
        pool.wait_until_loaded()
        futures = [pool.submit(*answered(number, "1")) for number in range(3)]
        pool.close()
        for future in [*futures, pool.submit(*answered(3, "1"))]:
            with pytest.raises(CancelledError):
                future.result(SECONDS)


def test_no_process_outlives_a_run_that_is_killed_at_once() -> None:
    """Not even one that hangs where Python cannot look up."""
    program = (
        "from grading_cases import *; from vcpo.pipeline.grading_pool import GradingPool\n"
        "pool = GradingPool(grading_config('says_who_it_is_and_hangs', timeout=1000.0))\n"
        "pool.submit(*answered(0, '1')).result()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    worker = psutil.Process(int(run.stdout.readline()))
    family = psutil.Process(run.pid).children(recursive=True)
    assert worker in family
    assert len(family) == 2  # and its guard
    run.kill()
    run.communicate()
    assert gone_within(family, ORPHAN)


def test_time_in_which_the_whole_run_is_suspended_is_not_the_graders(tmp_path: Path) -> None:
    program = (
        "from grading_cases import *; from vcpo.pipeline.grading_pool import GradingPool\n"
        "pool = GradingPool(grading_config('waits_for_a_file', timeout=2.0))\n"
        f"print(pool.submit(*answered(0, '{tmp_path}/file')).result().trajectories[0].grade)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    worker = psutil.Process(int(run.stdout.readline()))
    worker.suspend()
    run.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(3.0)
    (tmp_path / "file").touch()
    run.send_signal(signal.SIGCONT)
    worker.resume()
    assert run.communicate(timeout=SECONDS)[0].startswith("Grade(reward=1.0, ")


def test_what_the_environment_gave_for_the_turns_is_added_to_the_grade() -> None:
    def with_turns(*rewards_: float | None, failure: str | None = None) -> Trajectory:
        (trajectory,) = answered(0, "1")[1]
        trajectory.turns = tuple(TurnRecord(i, i + 1, reward=reward) for i, reward in enumerate(rewards_))
        trajectory.failure = failure
        return trajectory

    def graded_as(trajectory: Trajectory, grade: Grade) -> Grade:
        return grades_of(graded(answered(0)[0], [trajectory], [grade]))[0]

    given = Grade(1.0, correct=True, parts={"style": 0.5})
    assert graded_as(with_turns(), given) == given
    assert graded_as(with_turns(None), given) == given
    assert graded_as(with_turns(0.25, None, 0.5), given) == Grade(1.75, True, {"style": 0.5, "environment": 0.75})
    assert graded_as(with_turns(0.25), Grade(None)) == Grade(0.25, parts={"environment": 0.25})
    lost = Grade(None, failure="SystemExit: enough")
    assert graded_as(with_turns(0.25), lost) == lost
    assert graded_as(with_turns(0.25, failure="it hung"), given) == Grade(None, True, {"style": 0.5}, "it hung")

    judged = with_turns(None, None, None)
    judged.turns = tuple(replace(t, correct=c) for t, c in zip(judged.turns, (None, True, False), strict=True))
    assert graded_as(judged, given) == replace(given, correct=False)
    judged.turns = judged.turns[:2]
    assert graded_as(judged, replace(given, correct=False)) == given


def test_in_this_process_an_exception_is_the_futures() -> None:
    here = InProcessGrading(Grader(ObedientTask(), None))
    assert [grade.reward for grade in grades_of(here.submit(*answered(0, "1", "2")).result())] == [1.0, 2.0]
    with pytest.raises(ZeroDivisionError, match="no more paper"):
        here.submit(*answered(1, "raise")).result()


def run_with(path: Path, *changes: str) -> Path:
    return train(tiny_config(path, *changes), make_report=False)


def test_a_run_graded_in_a_process_equals_one_graded_in_its_own_bit_for_bit(tmp_path: Path) -> None:
    changes = ("eval.eval_steps=3", "eval.num_problems=5", "runtime.max_staleness=2")
    one = run_with(tmp_path / "one", *changes)
    other = run_with(tmp_path / "other", *changes, "reward.processes=1")
    assert_equal_weights(final_weights(one), final_weights(other))
    evaluations = [
        [line | {"time": 0} for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
        for run in (one, other)
    ]
    assert len(evaluations[0]) == 3
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["lockstep", "local"])
def test_groups_whose_grading_hung_are_in_the_metrics_and_in_the_ledger(tmp_path: Path, runtime: str) -> None:
    """The third call of every process hangs, so four of twelve groups."""
    run = run_with(
        tmp_path / "run",
        f"runtime={runtime}",
        f"reward.reward_funcs=['{HERE}:hangs_in_the_third_call']",
        "reward.processes=1",
        "reward.timeout=0.3",
    )
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert sum(line["unscored"] for line in lines) == 16
    assert lines[-1]["grading_failures"] == 16
    assert lines[-1]["grading_restarts"] == 4
    counts = read_ledger(run / "ledger.sqlite").counts
    assert sum(counts.values()) == 48
    assert sum(count for (_, reason), count in counts.items() if reason is not None) == 16
    if runtime == "lockstep":
        assert [line["unscored"] for line in lines] == [0.0, 4.0, 4.0, 0.0, 4.0, 4.0]
        (reason,) = {reason for _, reason in counts if reason is not None}
        assert reason.startswith("no grade within 0.3 s, in obey (")


ALWAYS_RAISES = (f"reward.reward_funcs=['{HERE}:always_raises']", "reward.processes=1", "reward.max_failures=1")


@pytest.mark.parametrize("runtime", ["lockstep", pytest.param("local", marks=pytest.mark.slow)])
def test_a_run_whose_grading_always_fails_ends_with_the_error_and_no_prompt_is_unaccounted_for(
    tmp_path: Path, runtime: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GradingFailed, match=r"grading failed for 2 prompts in a row .*no more paper"):
        run_with(tmp_path / "run", *ALWAYS_RAISES, f"runtime={runtime}", "training.prompts_per_step=3")
    fates = read_ledger(tmp_path / "run" / "ledger.sqlite").fates
    assert fates["failed"] == 4
    assert fates["trained"] == fates["filtered"] == fates["unrecorded"] == 0
    assert workers() == []
    output = capfd.readouterr().out
    assert output.count("raising") >= 2  # what a function prints is seen
    assert output.count("4 of 4 answers to problem train-0-0 have no reward: ZeroDivisionError: the judge has no") == 1
