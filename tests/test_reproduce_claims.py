"""Verdicts follow from numbers by stated rules, and missing runs never support a claim."""

from __future__ import annotations

import pytest

from reproduce_cases import evidence, seeds
from vcpo.reproduce.claims import (
    Claim,
    Rule,
    Verdict,
    area_under_curve,
    as_good_as,
    better_than,
    both,
    collapses,
    collapses_late,
    costs,
    grows_with_lag,
    out_of_reach,
    outlasts,
    predicts_collapse,
    rescues,
    shows,
    survives,
)
from vcpo.reproduce.evidence import RunEvidence

YES, NO, OPEN = Verdict.REPRODUCED, Verdict.NOT_REPRODUCED, Verdict.NOT_TESTABLE


def verdict(rule: Rule, *variants: list[RunEvidence]) -> Verdict:
    return Claim("c", "text", rule).judge({runs[0].variant: runs for runs in variants}).verdict


def test_four_of_five_seeds_are_a_collapse_and_three_are_not() -> None:
    assert verdict(collapses("tis"), seeds("tis", [0.0] * 5, collapsed=4)) is YES
    assert verdict(collapses("tis"), seeds("tis", [0.0] * 5, collapsed=3)) is NO
    assert verdict(survives("tis"), seeds("tis", [0.5] * 5, collapsed=1)) is YES
    assert verdict(survives("tis"), seeds("tis", [0.5] * 5, collapsed=2)) is NO


def test_a_rescue_needs_the_collapse_and_its_absence() -> None:
    bad, good = seeds("tis", [0.0] * 5, collapsed=5), seeds("vcpo", [0.5] * 5)
    assert verdict(rescues("tis", "vcpo"), bad, good) is YES
    assert verdict(rescues("tis", "vcpo"), seeds("tis", [0.5] * 5), good) is NO
    assert verdict(rescues("tis", "vcpo"), bad, seeds("vcpo", [0.0] * 5, collapsed=5)) is NO


def test_missing_runs_are_named_and_never_support_a_claim() -> None:
    outcome = Claim("c", "text", rescues("tis", "vcpo")).judge({"tis": seeds("tis", [0.0] * 5, collapsed=5)})
    assert outcome.verdict is OPEN
    assert outcome.finding == "runs are missing: `vcpo` has 0 of at least 2 seeds"
    assert verdict(collapses("tis"), seeds("tis", [0.0], collapsed=1)) is OPEN
    assert verdict(as_good_as("vcpo", "sync"), seeds("vcpo", [0.5] * 2), seeds("sync", [0.5] * 2)) is OPEN


def test_as_good_as_allows_the_margin_and_says_when_it_is_open() -> None:
    sync = seeds("sync", [0.50, 0.52, 0.54])
    assert verdict(as_good_as("vcpo", "sync", 0.05), seeds("vcpo", [0.48, 0.50, 0.52]), sync) is YES
    assert verdict(as_good_as("vcpo", "sync", 0.05), seeds("vcpo", [0.40, 0.42, 0.44]), sync) is NO
    runs = {"vcpo": seeds("vcpo", [0.40, 0.52, 0.60]), "sync": sync}
    outcome = Claim("c", "text", as_good_as("vcpo", "sync", 0.05)).judge(runs)
    assert outcome.verdict is NO
    assert "leaves it open" in outcome.finding


def test_better_needs_a_clear_difference_within_seeds_to_each_of_the_others() -> None:
    # the seeds scatter more than the methods differ, but every seed says the same
    vcpo, tis = seeds("vcpo", [0.3, 0.5, 0.7]), seeds("tis", [0.2, 0.4, 0.6])
    assert verdict(better_than("vcpo", "tis"), vcpo, tis) is YES
    assert verdict(better_than("vcpo", "tis", "otb"), vcpo, tis, seeds("otb", [0.3, 0.4, 0.8])) is NO
    assert verdict(better_than("tis", "vcpo"), vcpo, tis) is NO


def test_a_sign_is_looked_for_in_the_collapsed_runs_only() -> None:
    rule = shows("tis", "a spike", lambda r: (r.grad_spike or 0) > 10, lambda r: r.grad_spike)
    runs = [evidence("tis", 1, collapsed=True, grad_spike=20.0), evidence("tis", 2, grad_spike=1.0)]
    assert verdict(rule, runs) is YES
    assert verdict(rule, [evidence("tis", 1), evidence("tis", 2)]) is OPEN


def test_ess_predicts_collapse_if_the_collapsed_runs_had_the_lower_one() -> None:
    rule = predicts_collapse("smallest ESS", lambda r: r.ess_low)
    low, high = seeds("tis", [0.0] * 3, collapsed=3, ess_low=0.05), seeds("vcpo", [0.5] * 3, ess_low=0.3)
    assert verdict(rule, low, high) is YES
    # synchronous runs would make it easy and are left out
    assert verdict(rule, low, seeds("sync", [0.5] * 3, ess_low=1.0, lag=0)) is OPEN
    assert area_under_curve([0.1, 0.4], [0.2, 0.4]) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_a_sweep_is_won_by_the_method_that_does_not_collapse_at_large_lags() -> None:
    good, bad = {4: "vcpo 4", 16: "vcpo 16", 32: "vcpo 32"}, {4: "tis 4", 16: "tis 16", 32: "tis 32"}
    stable = [seeds(name, [0.5]) for name in ("vcpo 4", "vcpo 16", "vcpo 32", "tis 4", "tis 16")]
    assert verdict(outlasts(good, bad), *stable, seeds("tis 32", [0.0], collapsed=1)) is YES  # one of two
    assert verdict(outlasts(good, bad), *stable, seeds("tis 32", [0.5])) is NO
    assert verdict(outlasts(bad, good), *stable, seeds("tis 32", [0.0], collapsed=1)) is NO
    assert verdict(outlasts(good, bad), *stable) is OPEN


def test_a_collapse_while_the_sampler_is_frozen_is_told_from_one_by_the_lag() -> None:
    rule = collapses_late({4: "tis 4", 16: "tis 16"})
    early = seeds("tis 4", [0.0], collapsed=1, lag=4, collapse_step=2)  # below the lags that count
    assert verdict(rule, early, seeds("tis 16", [0.0], collapsed=1, collapse_step=20)) is YES
    assert verdict(rule, early, seeds("tis 16", [0.0], collapsed=1, collapse_step=10)) is NO
    assert verdict(rule, early, seeds("tis 16", [0.5])) is OPEN


def test_growth_with_the_lag_is_a_rank_correlation() -> None:
    rule = grows_with_lag({k: f"k={k}" for k in (2, 4, 8)}, "the share", lambda r: r.weight_share)

    def swept(*shares: float) -> list[list[RunEvidence]]:
        return [seeds(f"k={k}", [0.5] * 2, weight_share=v) for k, v in zip((2, 4, 8), shares, strict=True)]

    assert verdict(rule, *swept(2.0, 3.0, 50.0)) is YES
    assert verdict(rule, *swept(2.0, 50.0, 3.0)) is NO


def test_costs_are_ratios_of_medians() -> None:
    tis = seeds("tis", [0.5] * 2, train_time=0.2)
    assert verdict(costs("vcpo", "tis", 1.5), seeds("vcpo", [0.5] * 2, train_time=0.28), tis) is YES
    assert verdict(costs("vcpo", "tis", 1.5), seeds("vcpo", [0.5] * 2, train_time=0.32), tis) is NO


def test_what_needs_the_papers_scale_is_not_testable_and_says_why() -> None:
    outcome = Claim("c", "text", out_of_reach("needs GPUs", "recipes/gsm8k/vcpo-k12.yaml")).judge({})
    assert outcome.verdict is OPEN
    assert outcome.finding == "needs GPUs; full-scale recipe: `recipes/gsm8k/vcpo-k12.yaml`"


def test_all_parts_of_a_rule_must_hold() -> None:
    runs = seeds("vcpo", [0.5] * 3), seeds("sync", [0.5] * 3)
    assert verdict(both(survives("vcpo"), as_good_as("vcpo", "sync")), *runs) is YES
    assert verdict(both(survives("vcpo"), better_than("vcpo", "sync")), *runs) is NO
