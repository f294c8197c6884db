"""The local runtime: sampler processes beside the learner, real asynchrony on one machine.

The learner's process holds the optimizer, starts groups as far as the pacer allows, and has one collector thread that
receives finished trajectories, hands whole groups to the graders, and watches the samplers. Which of the finished
groups make the next minibatch, and whether any are dropped, is the pacing policy's to say (``vcpo.pipeline.pacing``).

A sampler that dies or hangs is replaced while the others go on, and what it held is tried again
(``vcpo.pipeline.assignment``). A group that has to be given up is replaced by another one, as a dropped group is.
"""

from __future__ import annotations

import _thread
import atexit
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from transformers import PreTrainedModel

from vcpo.config import RunConfig
from vcpo.observe.timeline import Timeline
from vcpo.pipeline.assignment import TRIES, Assignment
from vcpo.pipeline.grading import Grading
from vcpo.pipeline.pacing import GroupPool, make_policy
from vcpo.pipeline.prefix_forgetting import PrefixForgetting
from vcpo.pipeline.rollouts import GroupStarter, StartedGroup, Stopped
from vcpo.pipeline.sampler_process import Ready, Served
from vcpo.pipeline.shared_weights import PublishedWeights, published_of
from vcpo.pipeline.staleness_control import StalenessControl
from vcpo.pipeline.supervision import Sampler, SamplerDied
from vcpo.records import Group, SamplingParams, Trajectory

_TICK = 0.2  # seconds between two looks at what nothing else tells: a stop that was asked for, a sampler that hangs


class LocalRollouts:
    """Keeps the samplers busy and hands out graded minibatches.

    grading: stays open when this is closed; it serves evaluations, too.
    stop_requested: asked while waiting for rollouts; when it returns True, ``minibatch`` raises Stopped.
    note: told about samplers that are replaced and groups that are given up, from the collector's thread.
    """

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        params: SamplingParams,
        starter: GroupStarter,
        grading: Grading,
        stop_requested: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = print,
        timeline: Timeline | None = None,
    ) -> None:
        assert config.runtime.name == "local"
        self._config = config
        self._runtime = config.runtime
        self._model = model
        self._params = params
        self._starter = starter
        self._grading = grading
        self._stop_requested = stop_requested
        self._note = note
        self._timeline_until = timeline.last_step if timeline is not None else 0
        runtime, per_step = config.runtime, config.training.prompts_per_step
        self._control = StalenessControl(runtime.max_staleness, runtime.target_ess, in_flight=True)
        policy = make_policy(runtime.pacing, per_step, self._forgetting_scores)
        self._pool = GroupPool(policy, per_step, config.training.max_steps)
        self._scorer: PrefixForgetting | None = None
        self._published, self._base = published_of(model, config.sampling.merges_adapters)
        self._restarts = 0
        self._deaths_in_a_row = 0  # without a finished response between them
        self._again: list[StartedGroup] = []  # to be sampled once more when the next weights are published
        self._launch()

    def _launch(self) -> None:
        """Start the samplers and the collector, with nothing in flight."""
        config = self._config
        self._changed = threading.Condition()
        self._assignment = Assignment(self._runtime.samplers, config.sampling.num_generations, config.seed)
        self._grading_now: dict[int, StartedGroup] = {}
        self._ready: dict[int, Group] = {}  # in the order of finishing
        self._lost: list[int] = []  # groups that were given up, until the main thread has taken note
        self._events = 0  # groups that have become ready or were lost
        self._failure: BaseException | None = None
        self._waiting = False
        self._closing = threading.Event()
        self._weights = PublishedWeights(self._published, self._base)
        self._served = [-1] * self._runtime.samplers
        # a sampler would end by itself, but not before its present step
        atexit.register(self._kill)
        self._samplers = [self._start_sampler(index) for index in range(self._runtime.samplers)]
        self._collector = threading.Thread(target=self._collect, name="vcpo-collector", daemon=True)
        self._collector.start()

    def _start_sampler(self, index: int) -> Sampler:
        return Sampler(index, self._config, self._params, self._weights, self._timeline_until)

    @property
    def failure(self) -> BaseException | None:
        """What went wrong beside the main thread and ends the run, if anything did."""
        return self._failure

    def publish(self, version: int) -> None:
        """Publish the learner's weights and start the groups that the new version allows."""
        self._weights.publish(self._published, version)
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
        with self._changed:
            self._take_note_of_lost()
            finished = [
                StartedGroup(group.id, group.problem, first.prompt_ids, group.next_position, bool(first.turns))
                for group in self._ready.values()
                for first in group.trajectories[:1]
            ]
            unfinished = [*self._assignment.groups(), *self._grading_now.values()]
        self._again = sorted([*self._again, *unfinished, *finished], key=lambda group: group.id)
        self._starter.fates.given_up(group.id for group in self._again)
        self._launch()

    def metrics(self) -> dict[str, float]:
        """What was waiting, what has been dropped, the limit where it is controlled, and the samplers' state."""
        return {
            **self._pool.metrics(),
            **self._control.metrics(),
            "sampler_restarts": float(self._restarts),
            # the newest version that every sampler has shown, by its checksum, to decode with
            "served_version": float(min(self._served)),
        }

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
        started = self._starter.start(self._pool.started_limit(version, self._control.limit))
        with self._changed:
            self._assignment.add([*again, *started])
            self._send()

    def _send(self) -> None:
        """Send what can be sent; under the lock, so that nothing is sent twice."""
        for index, requests in self._assignment.sends():
            self._samplers[index].send(requests)

    def minibatch(self, step: int) -> list[Group]:
        """Wait until every group of this step is graded, dropping on the way what the policy drops."""
        seen = -1
        while True:
            seen, waiting, unfinished = self._await_event(seen, step)
            dropped = self._pool.drops(step, self._control.limit, waiting)
            self._take(dropped)
            self._starter.fates.dropped(step + 1, dropped)
            if dropped:
                self._start(step)  # in place of the dropped ones; not under the lock that the collector needs
            chosen = self._pool.choose([group for group in waiting if group.id not in dropped], unfinished)
            if chosen is not None:
                return self._take(chosen)

    def _await_event(self, seen: int, step: int) -> tuple[int, list[Group], list[int]]:
        """Wait for more than ``seen`` events: how many there were, the groups that are waiting, those unfinished."""
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._events > seen and not self._lost:
                    unfinished = [group.id for group in self._assignment.groups()] + list(self._grading_now)
                    return self._events, list(self._ready.values()), unfinished
                if self._stop_requested():
                    raise Stopped
                if not self._lost:
                    self._waiting = True
                    self._changed.wait(_TICK)  # woken by every event
                    self._waiting = False
                lost = self._take_note_of_lost()
            if lost:
                self._start(step)  # in their place
            self._end_hung()

    def _take_note_of_lost(self) -> bool:
        """Account for the groups that were given up; under the lock. Whether there were any."""
        lost, self._lost = self._lost, []
        self._starter.finish(lost)
        self._pool.lost(len(lost))
        return bool(lost)

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
        """End the samplers and the collector. What graders still have is of no use any more."""
        self._closing.set()
        self._kill()
        self._collector.join(5)
        for sampler in self._samplers:
            sampler.close()
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        for sampler in self._samplers:
            sampler.kill()

    def _collect(self) -> None:
        """The collector thread."""
        closing = self._closing
        try:
            while not closing.is_set():
                pipes = {sampler.pipe: sampler for sampler in self._samplers}
                for pipe in wait(list(pipes), timeout=_TICK):
                    if not closing.is_set():
                        self._receive(pipes[pipe])  # type: ignore[index]
                self._end_hung()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Something beside the main thread ends the run: the main thread is interrupted at once, wherever it is."""
        with self._changed:
            if self._closing.is_set() or self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
            for sampler in self._samplers:
                sampler.kill()
            # a waiting main thread is told by the condition; an interrupt would reach it while it is closing
            if not self._waiting:
                _thread.interrupt_main()

    def _receive(self, sampler: Sampler) -> None:
        try:
            message = sampler.receive()
        except SamplerDied as error:
            if not self._closing.is_set() and self._failure is None:
                self._replace(sampler, error)
            return
        if isinstance(message, Ready):
            with self._changed:
                sampler.is_ready()
                self._assignment.ready(sampler.index)
                self._send()
        elif isinstance(message, Served):
            self._served[sampler.index] = message.version
        else:
            self._arrived(sampler, message)

    def _arrived(self, sampler: Sampler, trajectories: list[Trajectory]) -> None:
        self._deaths_in_a_row = 0
        for trajectory in trajectories:
            with self._changed:
                whole = self._assignment.arrived(sampler.index, trajectory)
                if whole is None:
                    continue
                started, members = whole
                self._grading_now[started.id] = started
                self._send()  # one that has to be alone may have waited for this
            future = self._grading.submit(started, members)
            future.add_done_callback(partial(self._graded, started.id, self._closing))

    def _graded(self, number: int, closing: threading.Event, future: Future[Group]) -> None:
        """A group has its grades; called in whatever thread has them. closing: of the launch that it belongs to."""
        if closing.is_set():
            return  # its prompt is sampled again, or the run has ended
        try:
            with self._starter.fates.failing("grading", [number]):
                group = future.result()
            with self._changed:
                if closing.is_set():
                    return
                self._starter.fates.graded(group)
                del self._grading_now[number]
                self._ready[number] = group
                self._events += 1
                self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _replace(self, sampler: Sampler, error: SamplerDied) -> None:
        """Start a sampler in the place of a dead one. Raises its error when too many have died in a row."""
        fates, index = self._starter.fates, sampler.index
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > self._runtime.max_restarts:
            with fates.failing("sampling", lambda: self._held_by(index)):
                raise error
        sampler.close()
        with self._changed:
            held = self._assignment.held_by(index)
            isolated = self._assignment.died(index)
            self._samplers[index] = self._start_sampler(index)
            self._served[index] = -1
            self._restarts += 1
            fates.failed(isolated, f"its sampler died with it {TRIES} times, the last time alone: {_first_line(error)}")
            self._lost += isolated
            self._events += len(isolated)
            self._send()  # others may have room for what it held
            self._changed.notify_all()
        for number in isolated:
            self._note(f"group {number} was given up: its sampler died with it {TRIES} times, the last time alone")
        again = len(held) - len(isolated)
        self._note(f"{error}; it was started again, and {again} unfinished groups that it held are tried again")

    def _held_by(self, index: int) -> list[int]:
        with self._changed:
            return self._assignment.held_by(index)

    def _end_hung(self) -> None:
        """End samplers that owe something and do nothing; the collector then finds them dead."""
        with self._changed:
            owing = [(sampler, bool(self._assignment.held_by(sampler.index))) for sampler in self._samplers]
        for sampler, owes in owing:
            sampler.end_if_hung(owes, self._runtime)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
