"""The exception types that end a command with one sentence, and the hint that goes with a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was wrong, where, what is allowed and what to do, in one sentence.

    The command line prints the sentence without a traceback and exits with code 2. Anything else that is
    raised is a defect of the program or of the user's own code and keeps its traceback.
    """


class StoppedByWatchdog(Exception):
    """The watchdog has ended the run as it was configured to; the message says why. Its state is saved.

    The command line prints the sentence without a traceback and exits with code 3.
    """


def suggest(word: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest choice, or the allowed choices when none is near."""
    allowed = sorted(choices)
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; allowed: {', '.join(allowed)}"
