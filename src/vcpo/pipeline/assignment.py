"""Which sampler decodes which group, and what becomes of the groups of a sampler that dies.

A group goes, whole, to the sampler with the fewest responses to decode. When a sampler dies, the responses that it had
not handed in are tried again, because most deaths have nothing to do with what was decoded (a machine out of memory, an
operator). But one of the prompts may have killed it, and nobody can say which one:

- the second try is among other groups, on whichever sampler has room;
- the third is alone: one sampler is kept for such groups, one at a time, so that a death names the culprit;
- a group that kills its sampler alone is isolated: it is not tried again.

Plain bookkeeping: no process, no thread, no clock. Whoever uses it holds a lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import GenerationRequest, Trajectory

TRIES = 3  # of a group, the last one alone


@dataclass
class _Work:
    """A group on its way. deaths: of samplers that held it. sampler: that holds it now, or ``None`` while it waits."""

    group: StartedGroup
    missing: dict[int, GenerationRequest]
    arrived: list[Trajectory] = field(default_factory=list)
    deaths: int = 0
    sampler: int | None = None

    @property
    def alone(self) -> bool:
        return self.deaths >= TRIES - 1


class Assignment:
    """The groups that are being decoded, or wait for a sampler."""

    def __init__(self, samplers: int, num_generations: int, seed: int) -> None:
        self._num_generations = num_generations
        self._seed = seed
        self._available = [True] * samplers  # one that is starting for the first time takes work as well
        self._work: dict[int, _Work] = {}

    def add(self, groups: Iterable[StartedGroup]) -> None:
        """Groups to be decoded."""
        for group in groups:
            requests = group.requests(self._num_generations, self._seed)
            self._work[group.id] = _Work(group, {request.index: request for request in requests})

    def sends(self) -> list[tuple[int, list[GenerationRequest]]]:
        """What is to be sent now: a sampler and the requests of one group, in the order of starting."""
        waiting = sorted((work for work in self._work.values() if work.sampler is None), key=lambda w: w.group.id)
        alone = [work for work in waiting if work.alone]
        load = self._load()
        kept = self._kept(bool(alone), load)
        sends = []
        if alone and kept is not None and load[kept] == 0:
            sends.append(self._send(alone[0], kept))
        others = [index for index, available in enumerate(self._available) if available and index != kept]
        for work in waiting if others else []:
            if not work.alone:
                target = min(others, key=load.__getitem__)
                load[target] += len(work.missing)
                sends.append(self._send(work, target))
        return sends

    def arrived(self, sampler: int, trajectory: Trajectory) -> tuple[StartedGroup, list[Trajectory]] | None:
        """One response has come; the group with all its responses, if it was the last one."""
        work = self._work.get(trajectory.group_id)
        if work is None or work.sampler != sampler or trajectory.index not in work.missing:
            raise RuntimeError(f"sampler {sampler} sent {trajectory.name}, which it was not asked for")
        del work.missing[trajectory.index]
        work.arrived.append(trajectory)
        if work.missing:
            return None
        del self._work[trajectory.group_id]
        return work.group, work.arrived

    def died(self, sampler: int) -> list[int]:
        """The sampler is gone, until ``ready``: its groups wait for their next try. The numbers of those isolated."""
        self._available[sampler] = False
        isolated = []
        for number in self.held_by(sampler):
            work = self._work[number]
            if work.alone:
                isolated.append(number)
                del self._work[number]
            else:
                work.sampler = None
                work.deaths += 1
        return isolated

    def ready(self, sampler: int) -> None:
        """The sampler takes work."""
        self._available[sampler] = True

    def groups(self) -> list[StartedGroup]:
        """All of them."""
        return [work.group for work in self._work.values()]

    def held_by(self, sampler: int) -> list[int]:
        """The numbers of the groups of which the sampler owes a response."""
        return [number for number, work in self._work.items() if work.sampler == sampler]

    def _load(self) -> list[int]:
        """Responses owed by each sampler."""
        load = [0] * len(self._available)
        for work in self._work.values():
            if work.sampler is not None:
                load[work.sampler] += len(work.missing)
        return load

    def _kept(self, wanted: bool, load: list[int]) -> int | None:
        """The sampler that is kept for groups on their last try, if there are any."""
        for work in self._work.values():
            if work.alone and work.sampler is not None:
                return work.sampler
        candidates = [index for index, available in enumerate(self._available) if available]
        return min(candidates, key=load.__getitem__) if wanted and candidates else None

    def _send(self, work: _Work, sampler: int) -> tuple[int, list[GenerationRequest]]:
        work.sampler = sampler
        return sampler, list(work.missing.values())
