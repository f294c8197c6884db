"""The local runtime: sampler processes beside the learner, real asynchrony on one machine.

The learner's process holds the optimizer, starts groups as far as the pacer allows, and has one collector thread that
receives finished trajectories, assembles and grades groups, and watches the samplers. Minibatches are taken in the
order in which groups were started, so the staleness bound holds by construction.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import nn

from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.pipeline.interrupt import ENDING_SIGNALS
from vcpo.pipeline.pacer import Pacer
from vcpo.pipeline.rollouts import Grader, GroupStarter, StartedGroup, Stopped
from vcpo.pipeline.sampler_process import Failure, run_sampler
from vcpo.pipeline.shared_weights import SharedWeights
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
        model: nn.Module,
        params: SamplingParams,
        starter: GroupStarter,
        grader: Grader,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        assert config.runtime.name == "local"
        self._config = config
        self._model = model
        self._starter = starter
        self._grader = grader
        self._stop_requested = stop_requested
        self._pacer = Pacer(config.runtime.max_staleness, config.training.prompts_per_step)

        self._changed = threading.Condition()
        self._started: dict[int, StartedGroup] = {}
        self._arrived: dict[int, list[Trajectory]] = {}
        self._ready: dict[int, Group] = {}
        self._failure: BaseException | None = None
        self._waiting = False
        self._closing = False

        context = multiprocessing.get_context("spawn")
        self._weights = SharedWeights(model, context)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._load: list[int] = [0] * config.runtime.samplers  # responses asked for and not yet back
        # multiprocessing waits for its processes at exit, and samplers end by neither SIGINT nor SIGTERM
        atexit.register(self._kill)
        with _children_block_signals():
            for index in range(config.runtime.samplers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_sampler,
                    args=(index, config.to_plain(), params, self._weights, theirs),
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
        limit = self._pacer.started_limit(version, self._config.training.max_steps)
        for group in self._starter.start(limit):
            with self._changed:
                self._started[group.id] = group
                self._arrived[group.id] = []
                target = self._load.index(min(self._load))
                self._load[target] += self._config.sampling.num_generations
            requests = group.requests(self._config.sampling.num_generations, self._config.seed)
            with contextlib.suppress(OSError):  # a dead sampler is reported by the collector
                self._pipes[target].send(requests)

    def minibatch(self, step: int) -> list[Group]:
        """Wait until every group of this step is graded."""
        ids = self._pacer.groups_of(step)
        with self._changed:
            self._waiting = True
            try:
                while not all(i in self._ready for i in ids):
                    if self._failure is not None:
                        raise self._failure
                    if self._stop_requested():
                        raise Stopped
                    self._changed.wait(0.2)  # woken by the collector; the time-out is for stop_requested
            finally:
                self._waiting = False
            return [self._ready.pop(i) for i in ids]

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
        try:
            message = self._pipes[index].recv()
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
        with self._changed:
            self._load[index] -= len(message)
        for trajectory in message:
            arrived = self._arrived[trajectory.group_id]
            arrived.append(trajectory)
            if len(arrived) == self._config.sampling.num_generations:
                group = self._grader.grade(self._started[trajectory.group_id], arrived)
                with self._changed:
                    del self._started[group.id], self._arrived[group.id]
                    self._ready[group.id] = group
                    self._changed.notify_all()


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
