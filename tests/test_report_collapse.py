"""The definition of collapse."""

from __future__ import annotations

import pytest

from vcpo.report.collapse import is_collapsed


@pytest.mark.parametrize(
    ("accuracies", "collapsed"),
    [
        ([0.12, 0.5, 0.7], False),
        ([0.12, 0.5, 0.0], True),
        ([0.12, 0.5, 0.24], True),
        ([0.12, 0.5, 0.25], False),
        ([0.12, 0.1, 0.05], True),
        ([0.12, 0.0, 0.12], False),
        ([0.0, 0.5, 0.1], True),
        ([0.0, 0.0], False),
        ([0.0, 0.02, 0.0], False),
        ([0.05, 0.0], True),
        ([0.3], None),
        ([], None),
    ],
    ids=[
        "improves",
        "falls to zero",
        "just below half of the best",
        "exactly half of the best",
        "loses half of what it started with",
        "falls and recovers",
        "starts at zero and loses what it learned",
        "never had any",
        "a few lucky answers lost",
        "the least that can be lost",
        "one evaluation",
        "no evaluation",
    ],
)
def test_a_run_has_collapsed_when_it_ends_below_half_of_its_best(
    accuracies: list[float], collapsed: bool | None
) -> None:
    assert is_collapsed(accuracies) is collapsed
