"""Grading in processes of its own, because graders hang, raise, crash and eat memory, and the run goes on.

An answer that could not be graded has no reward (``None``, never 0) and the reason in its grade. What a process does is
in ``vcpo.pipeline.grading_worker``, how one is started and ended in ``vcpo.pipeline.grading_process``.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.pipeline.grading import (
    Grading,
    InProcessGrading,
    Work,
    checked_grades,
    graded,
    in_order,
    make_gradable_task,
    make_task_and_grader,
)
from vcpo.pipeline.grading_process import GradingProcess, Lost
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import Answer, Grade, Group, Problem, Trajectory
from vcpo.tasks.protocol import Task

_MOST_NOTES = 20  # different reasons that are told
_LOADS = 3  # of a process that ends while it loads, which can be anybody's doing


class GradingFailed(RuntimeError):
    """Too many prompts in a row could not be graded. Message and traceback are the last one's, and name the process."""


def make_task_and_grading(config: RunConfig, note: Callable[[str], None] = print) -> tuple[Task, Grading]:
    """The task with its data read, and its grading as the configuration wants it; the caller closes it.

    note: told about answers that could not be graded, once for each reason.
    Raises UserError for whatever is wrong with the data or the reward functions, also when nothing would give a reward.
    """
    if not config.reward.processes:
        task, grader = make_task_and_grader(config)
        return task, InProcessGrading(grader)
    grading = GradingPool(config, note)
    try:
        task = make_gradable_task(config)
        if config.reward.reward_funcs:  # otherwise they load what has just been loaded here
            grading.wait_until_loaded()
    except BaseException:
        grading.close()
        raise
    return task, grading


@dataclass
class _Job:
    """One group to be graded. The future is never marked as running, so that it can be cancelled at any time."""

    started: StartedGroup
    members: list[Trajectory]
    future: Future[Group] = field(default_factory=Future)


@dataclass(frozen=True)
class _Failure:
    """Why answers have no grade, in one line, and what else is known. died: the process has ended, unasked."""

    reason: str
    pid: int
    traceback: str
    died: bool = False


class GradingPool:
    """``reward.processes`` processes that grade; each has a thread here that starts, asks, ends and replaces it.

    A group whose grading raises, takes longer than ``reward.timeout`` or ends the process loses its grades. Where only
    the task grades, its answers are tried again one by one, so that one hostile answer costs no other its grade; a
    user's function may compare the answers of a group, so there the whole group is lost, though not before a second try
    if its process died. UserError ends the run.
    """

    def __init__(self, config: RunConfig, note: Callable[[str], None] = print) -> None:
        """Starts the processes and does not wait for them. note: told why answers have no grade."""
        self._section = config.reward
        self._plain = config.to_plain()
        self._note = note
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._broken: Exception | None = None  # why no process can be had
        self._failed_in_a_row = 0  # prompts
        self._failures = 0  # answers
        self._restarts = 0
        self._seconds = 0.0
        self._told: set[str] = set()
        count = config.reward.processes
        self._processes: list[GradingProcess | None] = [None] * count
        self._loaded: list[Future[None]] = [Future() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._supervise, args=(index,), name=f"vcpo-grading-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_loaded(self) -> None:
        """Raises UserError when a task or a reward function cannot be loaded there, GradingFailed for worse."""
        for future in self._loaded:
            future.result()

    def submit(self, started: StartedGroup, trajectories: Sequence[Trajectory]) -> Future[Group]:
        """The future's callbacks run in the thread of the process that has graded."""
        job = _Job(started, in_order(trajectories))
        with self._lock:
            if self._closing:
                job.future.cancel()
            else:
                self._jobs.put(job)
        return job.future

    def grade_all(self, work: Sequence[Work]) -> list[Group]:
        """After an exception the rest is given up."""
        futures = [self.submit(started, trajectories) for started, trajectories in work]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def metrics(self) -> dict[str, float]:
        """Counts since the run was started or resumed, and seconds of all processes since the last call.

        grading_failures: answers without a grade because grading failed. grading_restarts: processes replaced.
        """
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
            return {
                "grading_failures": float(self._failures),
                "grading_restarts": float(self._restarts),
                "time_grading": seconds,
            }

    def close(self) -> None:
        """Kill the processes, whatever they are doing."""
        with self._lock:
            self._closing = True
            processes = [process for process in self._processes if process is not None]
        for process in processes:
            process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(5)

    def _supervise(self, index: int) -> None:
        """A thread's life. Signals are not for it, and so not for the processes that it starts."""
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            self._loaded_process(index)
            self._loaded[index].set_result(None)
        except Exception as error:
            self._loaded[index].set_exception(error)
        for job in iter(self._jobs.get, None):
            begin = time.perf_counter()
            try:
                outcome: Group | Exception = self._grade(index, job)
            except Exception as error:
                outcome = error
            with self._lock:
                self._seconds += time.perf_counter() - begin
            self._deliver(job.future, outcome)
        process = self._processes[index]
        if process is not None:
            process.close()

    def _deliver(self, future: Future[Group], outcome: Group | Exception) -> None:
        if self._closing:
            future.cancel()
        with contextlib.suppress(InvalidStateError):  # cancelled
            if isinstance(outcome, Group):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

    def _grade(self, index: int, job: _Job) -> Group:
        """Raises what is to end the run, and anything once the pool is being closed or the job has been cancelled."""
        problem, answers = job.started.problem, [Answer.of(t) for t in job.members]
        verdicts = self._ask(index, job, problem, answers)
        first = verdicts[0]
        if isinstance(first, _Failure):
            if len(answers) > 1 and not self._section.own_functions:
                verdicts = [self._ask(index, job, problem, [answer])[0] for answer in answers]
            elif first.died:  # most deaths have nothing to do with what was graded
                verdicts = self._ask(index, job, problem, answers)
        failures = [verdict for verdict in verdicts if isinstance(verdict, _Failure)]
        self._count(problem, failures, len(verdicts))
        grades = [Grade(None, failure=v.reason) if isinstance(v, _Failure) else v for v in verdicts]
        return graded(job.started, job.members, grades)

    def _ask(self, index: int, job: _Job, problem: Problem, answers: list[Answer]) -> Sequence[Grade | _Failure]:
        """One grade per answer, or for all of them the failure."""
        process = self._loaded_process(index)
        if job.future.cancelled():
            raise CancelledError
        try:
            outcome = process.ask(problem, answers)
        except Lost as lost:
            self._replace(index)
            return [_Failure(str(lost), process.pid, lost.traceback, lost.died)] * len(answers)
        if "user_error" in outcome:
            raise UserError(outcome["user_error"])
        if "error" in outcome:
            return [_Failure(outcome["error"], process.pid, outcome["traceback"])] * len(answers)
        # a process that has been talked into sending something else must not hurt the run either
        return checked_grades(
            [Grade(*row) for row in outcome["grades"]], len(answers), f"grading process {process.pid}"
        )

    def _loaded_process(self, index: int) -> GradingProcess:
        """The process, ready to be asked. Raises when it cannot be had, from then on for ever."""
        if self._broken is not None:
            raise self._broken
        process = self._processes[index]
        if process is None:
            process = self._start(index)
        elif process.has_ended():  # between two questions, which is the fault of neither
            process = self._replace(index)
        for load in range(_LOADS):
            if load:
                process = self._replace(index)
            try:
                outcome = process.loaded()
                break
            except Lost as lost:
                outcome = {"error": str(lost), "traceback": lost.traceback}
        if "user_error" in outcome:
            self._broken = UserError(outcome["user_error"])
        elif outcome:
            self._broken = _failed("the task and the reward functions could not be loaded", outcome, process.pid)
        if self._broken is not None:
            raise self._broken
        return process

    def _start(self, index: int) -> GradingProcess:
        with self._lock:
            if self._closing:
                raise CancelledError
            process = self._processes[index] = GradingProcess(self._plain, self._section)
        return process

    def _replace(self, index: int) -> GradingProcess:
        """Start another one, which loads while the run goes on."""
        old = self._processes[index]
        if old is not None:
            old.close()
        process = self._start(index)
        with self._lock:
            self._restarts += 1
        return process

    def _count(self, problem: Problem, failures: Sequence[_Failure], answers: int) -> None:
        """Note the failures of one prompt, and tell of new ones. Raises when too many prompts in a row have failed."""
        with self._lock:
            self._failures += len(failures)
            self._failed_in_a_row = self._failed_in_a_row + 1 if len(failures) == answers else 0
            in_a_row = self._failed_in_a_row
            new = {f.reason: f for f in failures if f.reason not in self._told}
            new = dict(list(new.items())[: _MOST_NOTES - len(self._told)])
            self._told.update(new)
        for reason, failure in new.items():
            count = sum(f.reason == reason for f in failures)
            self._note(
                f"{count} of {answers} answers to problem {problem.id} have no reward: {reason} (grading process"
                f" {failure.pid}); the run goes on, and counts such answers as grading_failures"
            )
        if in_a_row > self._section.max_failures:
            last, limit = failures[-1], self._section.max_failures
            what = f"grading failed for {in_a_row} prompts in a row (reward.max_failures is {limit})"
            raise _failed(what, {"error": last.reason, "traceback": last.traceback}, last.pid)


def _failed(what: str, outcome: dict[str, Any], pid: int) -> GradingFailed:
    message = f"{what}; grading process {pid}: {outcome['error']}"
    if outcome["traceback"]:
        message += f"\n--- traceback of the grading process ---\n{outcome['traceback'].strip()}"
    return GradingFailed(message)
