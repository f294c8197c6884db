"""The local runtime: sampler processes beside the learner, real asynchrony on one machine.

The learner's process holds the optimizer, starts groups as far as the pacer allows, and has one collector thread that
receives finished trajectories, assembles and grades groups, and watches the samplers. Which of the finished groups
make the next minibatch, and whether any are dropped, is the pacing policy's to say (``vcpo.pipeline.pacing``).
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from transformers import PreTrainedModel

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.pacing import GroupPool, make_policy
from vcpo.pipeline.prefix_forgetting import PrefixForgetting
from vcpo.pipeline.rollouts import Grader, GroupStarter, StartedGroup, Stopped
from vcpo.pipeline.sampler_process import Failure, run_sampler
from vcpo.pipeline.shared_weights import SharedWeights
from vcpo.pipeline.staleness_control import StalenessControl
from vcpo.records import Group, SamplingParams, Trajectory


class SamplerDied(RuntimeError):
    """A sampler process ended with an exception or was killed. The message names the process and the reason."""


class LocalRollouts:
    """Keeps the samplers busy and hands out graded minibatches.

    stop_requested: asked while waiting for rollouts; when it returns True, ``minibatch`` raises Stopped.
    """

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        params: SamplingParams,
        starter: GroupStarter,
        grader: Grader,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        assert config.runtime.name == "local"
        self._config = config
        self._model = model
        self._params = params
        self._starter = starter
        self._grader = grader
        self._stop_requested = stop_requested
        runtime, per_step = config.runtime, config.training.prompts_per_step
        self._samplers = runtime.samplers
        self._control = StalenessControl(runtime.max_staleness, runtime.target_ess, in_flight=True)
        policy = make_policy(runtime.pacing, per_step, self._forgetting_scores)
        self._pool = GroupPool(policy, per_step, config.training.max_steps)
        self._scorer: PrefixForgetting | None = None
        self._again: list[StartedGroup] = []  # to be sampled once more when the next weights are published
        self._launch()

    def _launch(self) -> None:
        """Start the samplers and the collector, with nothing in flight."""
        self._changed = threading.Condition()
        self._started: dict[int, StartedGroup] = {}
        self._arrived: dict[int, list[Trajectory]] = {}
        self._sampler_of: dict[int, int] = {}
        self._ready: dict[int, Group] = {}  # in the order of finishing
        self._graded = 0
        self._failure: BaseException | None = None
        self._waiting = False
        self._closing = False

        context = multiprocessing.get_context("spawn")
        self._weights = SharedWeights(self._model, context)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._load: list[int] = [0] * self._samplers  # responses asked for and not yet back
        # multiprocessing waits for its processes at exit, and samplers end by neither SIGINT nor SIGTERM
        atexit.register(self._kill)
        with _children_block_signals():
            for index in range(self._samplers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_sampler,
                    args=(index, self._config.to_plain(), self._params, self._weights, theirs),
                    name=f"vcpo-sampler-{index}",
                    daemon=True,
                )
                process.start()
                theirs.close()  # so that our end sees the end of file when the sampler is gone
                self._pipes.append(ours)
                self._processes.append(process)
        self._collector = threading.Thread(target=self._collect, name="vcpo-collector", daemon=True)
        self._collector.start()

    @property
    def failure(self) -> BaseException | None:
        """What went wrong in a sampler or a grader, if anything did."""
        return self._failure

    def publish(self, version: int) -> None:
        """Publish the learner's weights and start the groups that the new version allows."""
        self._weights.publish(self._model, version)
        self._start(version)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Let the effective sample size move the staleness limit."""
        self._control.observe(metrics)

    def drain(self, steps: int) -> None:
        """Start nothing ahead until what is in flight has been trained, and for ``steps`` steps after that."""
        self._control.drain(steps)

    def restart(self) -> None:
        """End the samplers with all that they hold; the same prompts go to new ones with the next weights."""
        if self._failure is not None:
            raise self._failure
        self.close()
        self._collector.join()  # a grader may still be at work
        finished = [
            StartedGroup(group.id, group.problem, group.trajectories[0].prompt_ids, group.next_position)
            for group in self._ready.values()
        ]
        self._again = sorted([*self._again, *self._started.values(), *finished], key=lambda group: group.id)
        self._starter.fates.given_up(group.id for group in self._again)
        self._launch()

    def metrics(self) -> dict[str, float]:
        """What was waiting, what has been dropped, and the limit, where it is controlled."""
        return {**self._pool.metrics(), **self._control.metrics()}

    def state(self) -> dict[str, Any]:
        """Of the pool's counts, the policy and the control; what is in flight or waiting is sampled again."""
        return {"pool": self._pool.state(), "control": self._control.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self._pool.load_state(state["pool"])
        self._control.load_state(state["control"])

    def _start(self, version: int) -> None:
        again, self._again = self._again, []
        for group in again:
            self._starter.fates.started(group.id, group.problem.id)
        for group in [*again, *self._starter.start(self._pool.started_limit(version, self._control.limit))]:
            with self._changed:
                self._started[group.id] = group
                self._arrived[group.id] = []
                target = self._sampler_of[group.id] = self._load.index(min(self._load))
                self._load[target] += self._config.sampling.num_generations
            requests = group.requests(self._config.sampling.num_generations, self._config.seed)
            with contextlib.suppress(OSError):  # a dead sampler is reported by the collector
                self._pipes[target].send(requests)

    def minibatch(self, step: int) -> list[Group]:
        """Wait until every group of this step is graded, dropping on the way what the policy drops."""
        seen = -1
        while True:
            seen, waiting = self._await_graded(seen)
            dropped = self._pool.drops(step, self._control.limit, waiting)
            self._take(dropped)
            self._starter.fates.dropped(step + 1, dropped)
            if dropped:
                self._start(step)  # in place of the dropped ones; not under the lock that the collector needs
            chosen = self._pool.choose(step, [group for group in waiting if group.id not in dropped])
            if chosen is not None:
                return self._take(chosen)

    def _await_graded(self, seen: int) -> tuple[int, list[Group]]:
        """Wait until more than ``seen`` groups have been graded; how many have, and those that are waiting."""
        with self._changed:
            self._waiting = True
            try:
                while self._graded <= seen:
                    if self._failure is not None:
                        raise self._failure
                    if self._stop_requested():
                        raise Stopped
                    self._changed.wait(0.2)  # woken by the collector; the time-out is for stop_requested
            finally:
                self._waiting = False
            return self._graded, list(self._ready.values())

    def _take(self, numbers: Iterable[int]) -> list[Group]:
        """Take groups out of those that are waiting, for good."""
        with self._changed:
            groups = [self._ready.pop(number) for number in numbers]
        self._starter.finish(group.id for group in groups)
        return groups

    def _forgetting_scores(self, groups: Sequence[Group]) -> list[float]:
        """Prefix-forgetting scores under the learner's weights, which do not change while a minibatch is awaited."""
        if self._scorer is None:
            config = self._config
            tokens = config.training.max_tokens_per_microbatch
            self._scorer = PrefixForgetting(self._model, config.sampling.temperature, tokens)
        return self._scorer(groups)

    def close(self) -> None:
        """End the samplers and the collector."""
        with self._changed:
            self._closing = True
        self._kill()
        self._collector.join(5)
        for pipe in self._pipes:
            pipe.close()
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        """Samplers hold nothing that is worth an orderly end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _collect(self) -> None:
        """The collector thread. Whatever goes wrong here or in a sampler interrupts the main thread at once."""
        try:
            while not self._closing:
                ready = wait([*self._pipes, *(p.sentinel for p in self._processes)], timeout=0.5)
                for index, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
                    if (pipe in ready or process.sentinel in ready) and not self._closing:
                        self._receive(index)
        except BaseException as error:
            with self._changed:
                if self._closing:
                    return
                self._failure = error
                self._changed.notify_all()
                # the main thread may be sending to a sampler that itself waits until somebody reads what it sends
                for process in self._processes:
                    process.kill()
                # a waiting main thread is told by the condition; an interrupt would reach it while it is closing
                if not self._waiting:
                    _thread.interrupt_main()

    def _receive(self, index: int) -> None:
        fates = self._starter.fates
        with fates.failing("sampling", lambda: self._held_by(index)):
            message = self._message(index)
        with self._changed:
            self._load[index] -= len(message)
        for trajectory in message:
            arrived = self._arrived[trajectory.group_id]
            arrived.append(trajectory)
            if len(arrived) == self._config.sampling.num_generations:
                with fates.failing("grading", [trajectory.group_id]):
                    group = self._grader.grade(self._started[trajectory.group_id], arrived)
                fates.graded(group)
                with self._changed:
                    del self._started[group.id], self._arrived[group.id], self._sampler_of[group.id]
                    self._ready[group.id] = group
                    self._graded += 1
                    self._changed.notify_all()

    def _message(self, index: int) -> list[Trajectory]:
        """What a sampler has sent. Raises what has gone wrong there."""
        try:
            message: Failure | list[Trajectory] = self._pipes[index].recv()
        except (EOFError, OSError):  # OSError: killed in the middle of a message
            process = self._processes[index]
            process.join(5)
            reason = " (killed; out of memory?)" if process.exitcode == -9 else ""
            raise SamplerDied(
                f"{process.name} (pid {process.pid}) died with exit code {process.exitcode}{reason}"
            ) from None
        if isinstance(message, Failure):
            if message.by_user:
                raise UserError(message.message)
            raise SamplerDied(
                f"{message.process}: {message.kind}: {message.message}\n"
                f"--- traceback of the sampler process ---\n{message.traceback}"
            )
        return message

    def _held_by(self, index: int) -> list[int]:
        """The groups that are lost with a sampler; none when the run itself is ending it."""
        with self._changed:
            return [] if self._closing else [number for number, its in self._sampler_of.items() if its == index]


@contextlib.contextmanager
def _children_block_signals() -> Iterator[None]:
    """Processes started in this block are deaf to the ending signals from their first instruction on.

    A sampler needs seconds to import what it needs before it can ignore them itself, and Ctrl-C in that time must not
    kill it. A new program inherits which signals are blocked. Here they stay pending until the end of the block.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where processes have no signals from outside
        yield
        return
    # the first process started in this way brings a resource tracker along, whose start would lift the block
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
