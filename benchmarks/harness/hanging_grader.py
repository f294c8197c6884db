"""A grader that some answers keep busy for ever, deaf to everything but a kill."""

from __future__ import annotations

import re

from vcpo.records import Grade
from vcpo.tasks.graders.exact import ExactGrader


class HangingGrader(ExactGrader):
    """As ``exact``, but text with "for ever" in it is searched with a pattern that backtracks exponentially."""

    needs_time_limit = True

    def grade(self, gold: str, response: str) -> Grade:
        """Perhaps never."""
        if "for ever" in response:
            re.match(r"(a+)+$", "a" * 64 + "b")
        return super().grade(gold, response)
