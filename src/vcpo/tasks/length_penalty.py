"""A penalty for responses that are about to be cut off."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from vcpo.errors import UserError
from vcpo.tasks.options import TaskOptions


class OverlongOptions(TaskOptions):
    """Options of the reward ``overlong``."""

    max_length: PositiveInt | None = Field(None, description="tokens; null: sampling.max_completion_length")
    cache: NonNegativeInt | None = Field(
        None, description="tokens before max_length over which the penalty grows; null: a fifth of max_length"
    )


class SoftOverlongPunishment:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), to be added to another reward.

    With a response of ``n`` tokens, ``L = max_length`` and ``c = cache``: 0 for ``n <= L - c``, then
    ``(L - c - n) / c`` for ``n <= L``, and -1 beyond. So a response that was cut off at ``L`` has -1. DAPO takes
    ``L = 20480``, ``c = 4096``, which is where the default of a fifth comes from.
    """

    Options = OverlongOptions

    def __init__(self, max_length: int | None = None, cache: int | None = None) -> None:
        """Raises UserError when the numbers do not go together."""
        if max_length is None:
            raise UserError("reward 'overlong' needs max_length, in tokens")
        self._max_length = max_length
        self._cache = max_length // 5 if cache is None else cache
        if self._cache > max_length:
            raise UserError(
                f"reward 'overlong' has cache={self._cache}, more than max_length={max_length}: the penalty would begin"
                " before the first token; lower cache"
            )

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """One value from -1 to 0 per response."""
        return [self._penalty(len(ids)) for ids in completion_ids]

    def _penalty(self, tokens: int) -> float:
        free = self._max_length - self._cache
        if tokens <= free:
            return 0.0
        return -1.0 if tokens > self._max_length else (free - tokens) / self._cache
