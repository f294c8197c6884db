"""Random streams of generated tasks: one generator per problem, so that any problem can be made on its own.

Whether a problem is held out for evaluation is a function of the problem itself, so training never meets an
evaluation problem, even where the space of problems is so small that two independent streams would collide.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Hashable
from typing import TypeVar

from vcpo.errors import UserError

_HELD_OUT_OF = 8  # one in this many problems is held out
_MAX_DRAWS = 10_000

Drawn = TypeVar("Drawn")


def train_draw(seed: int, position: int, make: Callable[[random.Random], tuple[Hashable, Drawn]]) -> Drawn:
    """The training problem at ``position``: the same on every machine, never a held-out one.

    make: draws a problem and gives it with a key that is equal for problems which count as the same.
    """
    return _draw(f"train/{seed}/{position}", make, held_out=False)


def eval_draw(index: int, make: Callable[[random.Random], tuple[Hashable, Drawn]]) -> Drawn:
    """Held-out problem ``index``."""
    return _draw(f"eval/{index}", make, held_out=True)


def _draw(stream: str, make: Callable[[random.Random], tuple[Hashable, Drawn]], held_out: bool) -> Drawn:
    rng = random.Random(stream)
    for _ in range(_MAX_DRAWS):
        key, drawn = make(rng)
        if (zlib.crc32(repr(key).encode()) % _HELD_OUT_OF == 0) == held_out:
            return drawn
    raise UserError("the task has too few different problems to hold some out for evaluation; make its problems larger")
