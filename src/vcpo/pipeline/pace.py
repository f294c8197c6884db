"""PACE, pool-aware control of effective staleness (arXiv 2609.36830): reject the stalest when too many are waiting.

Staleness has two parts, here as means over a group's trained tokens, in optimizer steps, whose sum is the ordinary mean
staleness of its tokens:

- waiting age: steps since the last token of its response was produced;
- generation age: steps that passed between a token and the last token of its response (in-flight updates).

A waiting group is stale in full. A long response that crossed several versions while it was generated is less so if
what it had written by then is still what the policy would write. So

    effective staleness = waiting age + generation age * (percentile of the prefix-forgetting score) ** sharpening.

By Little's law the mean wait is the number waiting divided by the groups trained per step, so waiting is controlled by
keeping that number, the pool's occupancy, at a target: the reject rate follows its excess, smoothed.

The publication gives the structure and the exponent 4. What it leaves open, or what we could not read, we decide [D]:

- Occupancy: finished groups when the learner asks for its minibatch, those that it will take included, after the age
  cap has dropped its own. The target, in minibatches, must be at least 1, so that rejecting never makes the learner
  wait; its default is 2, one that is trained next and one behind it.
- Rate: ``rate += smoothing * (excess - rate)`` with ``excess = max(0, occupancy - target)``, in groups per step,
  beginning at 0; smoothing 0.2 is a memory of about five steps. A step rejects ``floor(rate)`` groups, but never more
  than the excess: a rate that remembers a fuller pool does not take it below the target.
- Percentile: the share of the waiting groups with a generation age whose score is not larger than this one's. Where all
  scores are equal it is 1 and the effective staleness is the ordinary one.
- Score: mean absolute change of log-probability over the tokens that older versions than the last produced
  (``vcpo.pipeline.prefix_forgetting``). It is taken by a forward pass of the learner's model when the group is first
  ranked, and kept: once per group, over prefixes alone, and only in steps that reject, which is at most the price of
  the group's own forward pass in training. Scoring every waiting group again at every version would cost a multiple.
- Ties go to the group that was started first. The loss is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from vcpo.records import Group


class Pace:
    """The rejections of one run.

    rate: groups per step to reject, smoothed; all that has to be kept for a resumed run, whose pool is empty.
    """

    def __init__(self, target: float, smoothing: float, sharpening: float) -> None:
        """target: occupancy in groups; smoothing: weight of the newest excess in the rate; sharpening: the exponent."""
        self.rate = 0.0
        self._target = target
        self._smoothing = smoothing
        self._sharpening = sharpening
        self._scores: dict[int, float] = {}

    def rejects(
        self, step: int, waiting: Sequence[Group], scores: Callable[[Sequence[Group]], list[float]]
    ) -> list[int]:
        """The numbers of the groups to reject before step ``step``, stalest first; to be asked once per step.

        scores: gives the prefix-forgetting score of each group; asked about groups that have not been asked about.
        """
        excess = max(0.0, len(waiting) - self._target)
        self.rate += self._smoothing * (excess - self.rate)
        count = math.floor(min(self.rate, excess))
        self._scores = {group.id: self._scores[group.id] for group in waiting if group.id in self._scores}
        if not count:
            return []
        ages = [token_ages(group, step) for group in waiting]
        moving = [group for group, (_, generation) in zip(waiting, ages, strict=True) if generation > 0]
        new = [group for group in moving if group.id not in self._scores]
        self._scores |= zip((group.id for group in new), scores(new), strict=True)
        staleness = effective_staleness(
            [age for age, _ in ages],
            [age for _, age in ages],
            [self._scores.get(group.id, 0.0) for group in waiting],
            self._sharpening,
        )
        ranked = sorted(zip(staleness, waiting, strict=True), key=lambda pair: (-pair[0], pair[1].id))
        return [group.id for _, group in ranked[:count]]


def token_ages(group: Group, step: int) -> tuple[float, float]:
    """Waiting age and generation age of a group at policy version ``step``: means over its trained tokens, in steps.

    A group without a trained token has waited since it was started.
    """
    versions = [(t.versions_T[t.mask_T], int(t.versions_T[-1])) for t in group.trajectories if t.mask_T.any()]
    if not versions:
        return float(step - min(t.start_version for t in group.trajectories)), 0.0
    waiting = np.concatenate([np.full(len(tokens), step - last) for tokens, last in versions])
    generation = np.concatenate([last - tokens for tokens, last in versions])
    return float(waiting.mean()), float(generation.mean())


def effective_staleness(
    waiting: Sequence[float], generation: Sequence[float], scores: Sequence[float], sharpening: float
) -> list[float]:
    """Waiting age + generation age * percentile ** sharpening of each group, in steps.

    The percentile of a score is taken among the groups whose generation age is not 0.
    """
    moving = [score for score, age in zip(scores, generation, strict=True) if age > 0]
    effective = []
    for waited, generated, score in zip(waiting, generation, scores, strict=True):
        percentile = sum(other <= score for other in moving) / len(moving) if generated > 0 else 0.0
        effective.append(waited + generated * percentile**sharpening)
    return effective
