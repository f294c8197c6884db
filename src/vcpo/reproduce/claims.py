"""Claims and the rules that judge them. A rule is a function of the evidence; its text is made of its own numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from vcpo.report.ranking import MIN_COMMON_SEEDS, PairedDifference, paired_difference
from vcpo.reproduce.evidence import RunEvidence

Evidence = Mapping[str, Sequence[RunEvidence]]  # variant -> its runs, one per seed

MOST, FEW = 0.8, 0.2  # shares of seeds that count as "collapses" and as "does not collapse"
_MIN_SEEDS = 2


class Verdict(StrEnum):
    """What our runs say about a claim of the paper."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Outcome:
    """A verdict and the numbers on which it rests, in words."""

    verdict: Verdict
    finding: str


class MissingRuns(LookupError):
    """A rule needs runs that have not been made."""


@dataclass(frozen=True)
class Rule:
    """How a claim is judged. text: the rule in words. judge: applies it; raises MissingRuns."""

    text: str
    judge: Callable[[Evidence], Outcome]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper (or, where ``ours``, of this project) that runs of this size can support or not."""

    name: str
    text: str
    rule: Rule
    ours: bool = False

    def judge(self, evidence: Evidence) -> Outcome:
        """Apply the rule; runs that are missing make the claim not testable, and are named."""
        try:
            return self.rule.judge(evidence)
        except MissingRuns as error:
            return Outcome(Verdict.NOT_TESTABLE, f"runs are missing: {error}")


def out_of_reach(reason: str, recipe: str | None = None) -> Rule:
    """A claim about the paper's own scale. recipe: the full-scale recipe that would test it, if there is one."""
    test = f"full-scale recipe: `{recipe}`" if recipe else "no full-scale recipe yet"
    return Rule("needs the paper's scale", lambda _: Outcome(Verdict.NOT_TESTABLE, f"{reason}; {test}"))


def collapses(*variants: str, at_least: float = MOST) -> Rule:
    """Every one of the variants collapses in at least that share of its seeds."""

    def judge(evidence: Evidence) -> Outcome:
        return _decide(
            all(_collapse_share(evidence, v) >= at_least for v in variants), _collapse_counts(evidence, variants)
        )

    return Rule(f"{_names(variants)}: at least {at_least:.0%} of the seeds collapse", judge)


def survives(*variants: str, at_most: float = FEW) -> Rule:
    """No variant collapses in more than that share of its seeds."""

    def judge(evidence: Evidence) -> Outcome:
        return _decide(
            all(_collapse_share(evidence, v) <= at_most for v in variants), _collapse_counts(evidence, variants)
        )

    return Rule(f"{_names(variants)}: at most {at_most:.0%} of the seeds collapse", judge)


def rescues(bad: str, good: str) -> Rule:
    """One variant collapses and the other, which differs in one part, does not."""
    return both(collapses(bad), survives(good))


def both(*rules: Rule) -> Rule:
    """All of several rules hold."""

    def judge(evidence: Evidence) -> Outcome:
        outcomes = [rule.judge(evidence) for rule in rules]
        findings = dict.fromkeys(outcome.finding for outcome in outcomes)
        return _decide(all(o.verdict is Verdict.REPRODUCED for o in outcomes), "; ".join(findings))

    return Rule("; ".join(rule.text for rule in rules), judge)


def as_good_as(variant: str, reference: str, margin: float = 0.05) -> Rule:
    """Late accuracy of a variant is not below the reference's by more than the margin, with 95% confidence."""

    def judge(evidence: Evidence) -> Outcome:
        difference = _compare(evidence, variant, reference)
        assert difference.interval is not None
        low, high = difference.interval.low, difference.interval.high
        finding = _difference(variant, reference, difference)
        return _decide(low >= -margin, finding + (", which leaves it open" if low < -margin <= high else ""))

    text = (
        f"`{variant}` minus `{reference}`, late accuracy within seeds: the 95% interval lies above"
        f" -{100 * margin:.0f} points"
    )
    return Rule(text, judge)


def better_than(variant: str, *others: str) -> Rule:
    """Late accuracy of a variant is above that of every other, with 95% confidence each."""

    def judge(evidence: Evidence) -> Outcome:
        differences = {other: _compare(evidence, variant, other) for other in others}
        better = all(d.is_clear and d.mean > 0 for d in differences.values())
        return _decide(better, "; ".join(_difference(variant, other, d) for other, d in differences.items()))

    return Rule(f"`{variant}` minus {_names(others)}, late accuracy within seeds: the 95% interval lies above 0", judge)


def shows(variant: str, what: str, holds: Callable[[RunEvidence], bool], value: Callable[[RunEvidence], float | None],
          unit: str = "", of_collapsed: bool = True) -> Rule:  # fmt: skip
    """A sign in at least 80% of the runs of a variant. what: the sign in words. value: for the finding."""
    kind = "collapsed runs" if of_collapsed else "runs"

    def judge(evidence: Evidence) -> Outcome:
        runs = [run for run in _runs(evidence, variant) if run.collapsed or not of_collapsed]
        if not runs:
            return Outcome(Verdict.NOT_TESTABLE, f"no run of `{variant}` collapsed")
        values = [v for v in map(value, runs) if v is not None]
        middle = f"; median {statistics.median(values):.3g}{unit}" if values else ""
        number = sum(map(holds, runs))
        return _decide(number >= MOST * len(runs), f"{number} of {len(runs)} {kind}{middle}")

    return Rule(f"in at least {MOST:.0%} of the {kind} of `{variant}`: {what}", judge)


def predicts_collapse(what: str, value: Callable[[RunEvidence], float | None], at_least: float = 0.9) -> Rule:
    """A number that is lower where a run collapses tells such runs from the others, over all runs with a lag."""

    def judge(evidence: Evidence) -> Outcome:
        runs = {(r.variant, r.seed): r for rs in evidence.values() for r in rs if r.lag and value(r) is not None}
        numbers = {flag: [value(r) or 0.0 for r in runs.values() if r.collapsed is flag] for flag in (True, False)}
        if not numbers[True] or not numbers[False]:
            raise MissingRuns("some that collapse and some that do not")
        auc = area_under_curve(numbers[True], numbers[False])
        finding = f"{auc:.2f} over {len(numbers[True])} collapsed and {len(numbers[False])} other runs"
        return _decide(auc >= at_least, finding)

    text = (
        f"of two runs with a lag, one of which collapsed, that one has the lower {what} (up to its collapse) in at"
        f" least {at_least:.0%} of all pairs"
    )
    return Rule(text, judge)


def outlasts(vcpo: Mapping[int, str], tis: Mapping[int, str], from_lag: int = 16) -> Rule:
    """Over a sweep of the lag: VCPO does not collapse, TIS mostly does at large lags. lag -> variant.

    The lags take the place of seeds, so that one seed is enough.
    """

    def judge(evidence: Evidence) -> Outcome:
        shares, parts = [], []
        for name, by_lag in (("TIS", tis), ("VCPO", vcpo)):
            runs = {k: _runs(evidence, variant, 1) for k, variant in sorted(by_lag.items())}
            far = [run.collapsed for k, of_lag in runs.items() if k >= from_lag for run in of_lag]
            shares.append(statistics.fmean(far))
            fallen = [f"k={k}: {sum(r.collapsed for r in rs)}/{len(rs)}" for k, rs in runs.items()]
            parts.append(f"{name} {sum(far)}/{len(far)} ({', '.join(fallen)})")
        return _decide(shares[0] >= 0.5 and shares[1] <= FEW, "collapsed: " + "; ".join(parts))

    text = f"of all runs at k >= {from_lag}, at least half of TIS's and at most {FEW:.0%} of VCPO's collapse"
    return Rule(text, judge)


def collapses_late(by_lag: Mapping[int, str], from_lag: int = 16) -> Rule:
    """Collapses come after the first k steps, in which the sampler is a frozen copy of the start. lag -> variant."""

    def judge(evidence: Evidence) -> Outcome:
        runs = [r for k, name in by_lag.items() if k >= from_lag for r in _runs(evidence, name, 1) if r.collapsed]
        if not runs:
            return Outcome(Verdict.NOT_TESTABLE, "none of the runs collapsed")
        late = [r for r in runs if r.collapse_step is not None and r.collapse_step > r.lag]
        listed = ", ".join(f"k={r.lag}: step {r.collapse_step}" for r in runs)
        return _decide(len(late) >= MOST * len(runs), f"{len(late)} of {len(runs)} collapsed runs ({listed})")

    return Rule(f"at least {MOST:.0%} of TIS's collapses at k >= {from_lag} come after step k", judge)


def grows_with_lag(by_lag: Mapping[int, str], what: str, value: Callable[[RunEvidence], float | None],
                   at_least: float = 0.9) -> Rule:  # fmt: skip
    """A quantity's rank correlation with the lag over the sweep."""

    def judge(evidence: Evidence) -> Outcome:
        points = [(k, v) for k, name in by_lag.items() for v in map(value, _runs(evidence, name, 1)) if v is not None]
        lags = sorted({k for k, _ in points})
        means = [statistics.fmean(v for lag, v in points if lag == k) for k in lags]
        ranks = np.argsort(np.argsort(means))
        correlation = float(np.corrcoef(np.arange(len(lags)), ranks)[0, 1])
        listed = ", ".join(f"k={k}: {m:.3g}" for k, m in zip(lags, means, strict=True))
        return _decide(correlation >= at_least, f"{correlation:.2f} ({listed})")

    return Rule(f"rank correlation of {what} with the lag is at least {at_least:g}", judge)


def costs(variant: str, reference: str, at_most: float) -> Rule:
    """Median time of an update, over seeds, as a multiple of the reference's."""

    def judge(evidence: Evidence) -> Outcome:
        ours, theirs = ([r.train_time for r in _runs(evidence, name) if r.train_time] for name in (variant, reference))
        ratio = statistics.median(ours) / statistics.median(theirs)
        return _decide(ratio <= at_most, f"{ratio:.2f} times")

    return Rule(f"median update time of `{variant}` is at most {at_most:g} times that of `{reference}`", judge)


def area_under_curve(lower: Sequence[float], higher: Sequence[float]) -> float:
    """Share of the pairs in which the first one's value is the lower one; ties count half."""
    pairs = [1.0 if a < b else 0.5 if a == b else 0.0 for a in lower for b in higher]
    return statistics.fmean(pairs)


def _compare(evidence: Evidence, variant: str, reference: str) -> PairedDifference:
    ours, theirs = ({run.seed: run.late_accuracy for run in _runs(evidence, name)} for name in (variant, reference))
    difference = paired_difference(ours, theirs)
    if difference is None or len(difference.seeds) < MIN_COMMON_SEEDS:
        raise MissingRuns(f"`{variant}` and `{reference}` have fewer than {MIN_COMMON_SEEDS} seeds in common")
    return difference


def _difference(variant: str, reference: str, difference: PairedDifference) -> str:
    low, high = (difference.interval.low, difference.interval.high) if difference.interval else (0.0, 0.0)
    return (
        f"`{variant}` minus `{reference}`: {100 * difference.mean:+.1f} points"
        f" [{100 * low:+.1f}, {100 * high:+.1f}] over {len(difference.seeds)} seeds"
    )


def _runs(evidence: Evidence, variant: str, at_least: int = _MIN_SEEDS) -> Sequence[RunEvidence]:
    runs = evidence.get(variant, ())
    if len(runs) < at_least:
        raise MissingRuns(f"`{variant}` has {len(runs)} of at least {at_least} seeds")
    return runs


def _collapse_share(evidence: Evidence, variant: str) -> float:
    return statistics.fmean(run.collapsed for run in _runs(evidence, variant))


def _collapse_counts(evidence: Evidence, variants: Sequence[str]) -> str:
    counts = [f"`{v}` {sum(r.collapsed for r in _runs(evidence, v))}/{len(_runs(evidence, v))}" for v in variants]
    return f"collapsed: {', '.join(counts)}"


def _decide(holds: bool, finding: str) -> Outcome:
    return Outcome(Verdict.REPRODUCED if holds else Verdict.NOT_REPRODUCED, finding)


def _names(variants: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in variants)
