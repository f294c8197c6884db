"""Which variant wins, as far as the seeds can tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcpo.report.bootstrap import Interval, bootstrap_mean

# two seeds agree in sign by chance half of the time, and their interval leaves out 0 whenever they do
MIN_COMMON_SEEDS = 3


@dataclass(frozen=True)
class PairedDifference:
    """One variant's score minus another's over the seeds that both have.

    A seed fixes prompts and warm start, so the difference within seeds is less noisy than that of the means.
    interval: of the mean, by bootstrap over the seeds; ``None`` for a single seed.
    """

    seeds: list[int]
    mean: float
    interval: Interval | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0; never with fewer than three common seeds."""
        return self.interval is not None and len(self.seeds) >= MIN_COMMON_SEEDS and 0.0 not in self.interval


@dataclass(frozen=True)
class Standing:
    """One row of a ranking.

    rank: 1 + the number of variants that are clearly better; ``None`` without a score. Variants that the seeds cannot
    tell apart from the same others share a rank: ``tied``. mean: of the score over seeds. interval: see
    ``bootstrap_mean``. to_best: minus the variant with the highest mean; ``None`` for that one, and without a common
    seed.
    """

    variant: str
    rank: int | None
    tied: bool
    mean: float | None
    interval: Interval | None
    to_best: PairedDifference | None


def late_accuracy(eval_accuracies: Sequence[float]) -> float:
    """The score that variants are ranked by: the mean over the last third of a run's evaluations, rounded up.

    A third of a run is long enough to average the noise of single evaluations and short dips away, and late enough
    that what counts is where a run arrives, not how fast. eval_accuracies: of every evaluation in order, the one
    before training included. Raises ValueError without any.
    """
    if not eval_accuracies:
        raise ValueError("a run without evaluations has no accuracy")
    return statistics.fmean(eval_accuracies[-math.ceil(len(eval_accuracies) / 3) :])


def rank(scores: Mapping[str, Mapping[int, float]]) -> list[Standing]:
    """Rank variants by their mean score, the best first; those without a score come last, without a rank.

    scores: variant -> seed -> score, larger is better. "Clearly better" is decided for each pair of variants from
    their paired difference (``PairedDifference.is_clear``), without a correction for the number of pairs.

    Rows are ordered by the mean. A variant whose seeds scatter can therefore share a rank with one further up although
    a less scattered one between them is clearly worse than the upper one.
    """
    means = {name: statistics.fmean(by_seed.values()) for name, by_seed in scores.items() if by_seed}
    order = sorted(means, key=lambda name: -means[name])
    ranks = dict.fromkeys(order, 1)
    to_best: dict[str, PairedDifference | None] = {}
    for position, better in enumerate(order):
        for worse in order[position + 1 :]:
            difference = paired_difference(scores[worse], scores[better])
            if position == 0:
                to_best[worse] = difference
            if difference is not None and difference.is_clear:
                # over the common seeds, the one with the higher mean over all of its seeds can be the lower one
                ranks[worse if difference.mean < 0 else better] += 1
    taken = list(ranks.values())
    ranked = [
        Standing(
            variant=name,
            rank=ranks[name],
            tied=taken.count(ranks[name]) > 1,
            mean=means[name],
            interval=bootstrap_mean(list(scores[name].values())),
            to_best=to_best.get(name),
        )
        for name in order
    ]
    return ranked + [Standing(name, None, False, None, None, None) for name in scores if name not in means]


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> PairedDifference | None:
    """Ours minus theirs, seed by seed; ``None`` without a common seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    return PairedDifference(seeds, statistics.fmean(differences), bootstrap_mean(differences))
