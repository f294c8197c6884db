"""What an evaluation's grades say: mean@n, pass@k, maj@n, and how far chance may have moved them.

Problems are the independent unit: every metric is a mean over problems of a value in [0, 1], and intervals are over
problems. Responses of the same problem depend on each other through it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vcpo.report.bootstrap import CONFIDENCE, RESAMPLES, Interval, wilson_share

INTERVALS = f"{CONFIDENCE:.0%} percentile bootstrap over problems ({RESAMPLES:,} resamples); Wilson where all agree"

_AT_ONCE = 500  # resamples, so that memory stays small with thousands of problems


@dataclass(frozen=True)
class Estimate:
    """A metric over problems. interval: ``None`` for a single problem."""

    value: float
    interval: Interval | None


def mean_correct(correct: Sequence[bool]) -> float:
    """The share of a problem's responses that are correct; its mean over problems is mean@n."""
    return sum(correct) / len(correct)


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """The probability that at least one of k responses is correct, for k drawn without replacement from these.

    1 - C(n - c, k) / C(n, k) for c correct ones of n: unbiased for k independent responses (Chen et al. 2021, eq. 1).
    Raises ValueError unless 1 <= k <= n.
    """
    n, c = len(correct), sum(correct)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} responses and k of 1 or more; there are {n} responses")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """The probability that the answer which most responses give is correct; its mean over problems is maj@n.

    A response without an answer (``None``) has no vote. Among answers with equally many votes the lot decides, and
    among responses with the same answer that were graded differently, too: the expected value is returned, so that the
    metric does not depend on the order of responses. 0 where nobody votes.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = sum(c for answer, c in zip(answers, correct, strict=True) if answer is not None and votes[answer] == most)
    # every winner has the same number of responses, so the mean over winners is the mean over their responses
    return right / sum(1 for answer in answers if answer is not None and votes[answer] == most)


def estimates(values: Sequence[Sequence[float]]) -> list[Estimate]:
    """Means over problems with their intervals. values: for each metric one number in [0, 1] per problem.

    Percentile bootstrap: problems are drawn with replacement 10,000 times, the ends are quantiles of the means, always
    the same for the same values. Where every problem has the value 0, or every one 1, all resamples agree and say
    nothing; there the interval is Wilson's for so many of so many.
    """
    values_MP = np.asarray(values, dtype=np.float64)
    problems = values_MP.shape[1]
    means = [float(mean) for mean in values_MP.mean(axis=1)]
    if problems < 2:
        return [Estimate(mean, None) for mean in means]
    rng = np.random.default_rng(0)
    shares = np.full(problems, 1.0 / problems)
    resampled_RM = np.concatenate(
        [rng.multinomial(problems, shares, size=_AT_ONCE) @ values_MP.T for _ in range(RESAMPLES // _AT_ONCE)]
    )
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(resampled_RM / problems, [tail, 1 - tail], axis=0)
    found = []
    for mean, low, high, row in zip(means, low_M, high_M, values_MP, strict=True):
        interval: Interval | None = Interval(float(low), float(high))
        if (row == 0).all() or (row == 1).all():
            interval = wilson_share(int(row.sum()), problems)
        found.append(Estimate(mean, interval))
    return found


def logged_k(n: int) -> list[int]:
    """For which k pass@k is among the metrics of n responses: powers of two and n, without 1, which is mean@n."""
    return sorted({*(2**i for i in range(1, n.bit_length()) if 2**i <= n), n} - {1})
