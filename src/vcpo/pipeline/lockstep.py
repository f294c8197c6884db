"""The lockstep runtime: one process, a virtual clock, exact lag schedules, bit-for-bit repeatable on the CPU.

A minibatch is sampled just before the step that trains on it, from snapshots of earlier weights:

- ``fixed``: every response comes from the weights of k steps ago;
- ``mixed``: each group from the weights of 0..k steps ago, uniformly;
- ``in_flight``: decoding starts with the weights of k steps ago and swaps to newer ones at equal intervals of
  ``max_completion_length``, reaching the current weights at its end, with the key/value cache kept.

During the first k steps the lag is what is there: step s cannot be more than s versions old, and after the ring of
weights has been cleared (a rollback) no older than what has been published since. k is ``max_staleness``,
or the limit to which ``target_ess`` has lowered it for the next minibatch (``vcpo.pipeline.staleness_control``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.config import RunConfig
from vcpo.observe.timeline import Timeline
from vcpo.pipeline.grading import Grading
from vcpo.pipeline.pacer import Pacer
from vcpo.pipeline.rollouts import GroupStarter, StartedGroup
from vcpo.pipeline.snapshots import SnapshotRing
from vcpo.pipeline.staleness_control import StalenessControl
from vcpo.records import GenerationRequest, Group, SamplingParams, Trajectory
from vcpo.sampler.engines import make_engine
from vcpo.tasks.registry import environment_task


class LockstepRollouts:
    """Samples every minibatch on demand at the configured lag."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase,
        starter: GroupStarter,
        grading: Grading,
        snapshots: SnapshotRing,
        timeline: Timeline | None = None,
    ) -> None:
        assert config.runtime.name == "lockstep"
        self._config = config
        self._runtime = config.runtime
        self._learner_model = model
        self._starter = starter
        self._grading = grading
        self.snapshots = snapshots
        self._timeline = timeline or Timeline.off()
        self._engine = make_engine(
            environment_task(config.task.name, config.task.params),
            copy.deepcopy(model),
            params,
            slots=config.training.prompts_per_step * config.sampling.num_generations,
            max_length=config.sampling.max_prompt_length + config.sampling.max_completion_length,
            tokenizer=tokenizer,
            in_rounds=True,  # how long environments take must not decide what is decoded together
        )
        # sampled on demand, so no group is started ahead of the step that trains on it
        self._pacer = Pacer(0, config.training.prompts_per_step)
        self._control = StalenessControl(config.runtime.max_staleness, config.runtime.target_ess, in_flight=False)

    def minibatch(self, step: int) -> list[Group]:
        """Sample and grade the groups of ``step`` at the schedule's lag."""
        fates = self._starter.fates
        started = self._starter.start(self._pacer.started_limit(step, self._config.training.max_steps))
        self._starter.finish(group.id for group in started)
        with fates.failing("sampling", [group.id for group in started]), self._timeline.span("sampling"):
            members = self._sample_all(step, started)
        groups = []
        with self._timeline.span("grading"):
            futures = [self._grading.submit(group, members[group.id]) for group in started]
            for group, future in zip(started, futures, strict=True):
                with fates.failing("grading", [group.id]):
                    graded = future.result()
                fates.graded(graded)
                groups.append(graded)
        return groups

    def _sample_all(self, step: int, started: list[StartedGroup]) -> dict[int, list[Trajectory]]:
        """The responses of every group, at the schedule's lag."""
        oldest = max(self.snapshots.oldest, step - self._control.limit)
        if self._runtime.lag == "mixed":
            trajectories = []
            lags = np.random.default_rng([self._config.seed, step]).integers(0, step - oldest + 1, len(started))
            for lag in sorted(set(lags.tolist()), reverse=True):
                chosen = [group for group, its_lag in zip(started, lags, strict=True) if its_lag == lag]
                trajectories += self._sample(self._requests(chosen), step - lag, step - lag)
        else:
            newest = step if self._runtime.lag == "in_flight" else oldest
            trajectories = self._sample(self._requests(started), oldest, newest)
        members: dict[int, list[Trajectory]] = {group.id: [] for group in started}
        for trajectory in trajectories:
            members[trajectory.group_id].append(trajectory)
        return members

    def publish(self, version: int) -> None:
        """Keep a copy of the learner's weights."""
        self.snapshots.add(self._learner_model, version)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Let the effective sample size move the lag of the next minibatch."""
        self._control.observe(metrics)

    def drain(self, steps: int) -> None:
        """Sample the next ``steps`` minibatches at lag 0."""
        self._control.drain(steps)

    def restart(self) -> None:
        """Never sample again from the weights published so far; the lag grows anew from 0."""
        self.snapshots.clear()

    def metrics(self) -> dict[str, float]:
        """The limit, where it is controlled."""
        return self._control.metrics()

    def state(self) -> dict[str, Any]:
        """The control's; the weights of earlier versions are in the ring."""
        return {"control": self._control.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self._control.load_state(state["control"])

    def close(self) -> None:
        """Nothing runs between steps."""

    def _requests(self, groups: list[StartedGroup]) -> list[GenerationRequest]:
        num_generations = self._config.sampling.num_generations
        return [request for group in groups for request in group.requests(num_generations, self._config.seed)]

    def _sample(self, requests: list[GenerationRequest], first: int, last: int) -> list[Trajectory]:
        """Decode with the weights of ``first`` at the first token, moving on to ``last`` at the length limit."""
        engine, length = self._engine, self._config.sampling.max_completion_length
        engine.load_weights(self.snapshots.get(first), first)
        engine.submit(requests)
        finished: list[Trajectory] = []
        token = 0
        while engine.num_active:
            version = first + (last - first) * min(token, length) // length
            if version != engine.version:
                engine.load_weights(self.snapshots.get(version), version)
            finished += engine.step()
            token += 1
        return finished
