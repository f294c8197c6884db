"""Bounded staleness by pacing the starts, so that nothing finished is ever discarded.

Groups are numbered in the order in which they are started and trained in that order, ``groups_per_step`` at a time:
group ``j`` is trained by optimizer step ``j // groups_per_step``. A group may start only if that step is at most
``max_staleness`` away from the policy version (optimizer steps done) at the start. The policy lag of every trained
trajectory is then at most ``max_staleness`` whatever the speeds of samplers and learner, and because the order of
training is the order of starting, slow prompts are trained on as often as quick ones.

A pacing policy that drops groups (``vcpo.pipeline.pacing``) starts one more for each of them: the rule then counts the
groups that have been started and not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pacer:
    """The rule that says how many groups may have been started.

    max_staleness: the largest policy lag k allowed, in optimizer steps.
    groups_per_step: prompt groups in one minibatch.
    """

    max_staleness: int
    groups_per_step: int

    def started_limit(self, version: int, last_step: int, dropped: int = 0) -> int:
        """Groups with a number below this may start while ``version`` optimizer steps are done.

        last_step: the number of steps in the whole run; no group is started that would never be trained.
        dropped: how many of the groups started so far have been dropped.
        """
        return min(version + self.max_staleness + 1, last_step) * self.groups_per_step + dropped
