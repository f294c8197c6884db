"""What the engine knows on the host about every occupied slot, as arrays over slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from vcpo.records import GenerationRequest, ResponsePrefix, StopReason, Trajectory


@dataclass
class SlotTable:
    """Rows 0 .. ``count`` - 1 are occupied; each array has one row per slot (``_S``).

    lengths_S: tokens of the response so far, its prefix included; prefix_lengths_S: those it was submitted with.
    pending_S: the newest token of prompt and response, not yet in the cache.
    ids_ST, mask_ST, logprobs_ST, versions_ST: the response so far.
    """

    requests_S: NDArray[np.object_]
    seeds_S: NDArray[np.uint64]
    prompt_lengths_S: NDArray[np.int64]
    start_versions_S: NDArray[np.int64]
    lengths_S: NDArray[np.int64]
    prefix_lengths_S: NDArray[np.int64]
    pending_S: NDArray[np.int64]
    ids_ST: NDArray[np.int64]
    mask_ST: NDArray[np.bool_]
    logprobs_ST: NDArray[np.float32]
    versions_ST: NDArray[np.int64]
    count: int = 0

    @classmethod
    def empty(cls, slots: int, max_tokens: int) -> SlotTable:
        """No slot occupied."""
        return cls(
            requests_S=np.empty(slots, dtype=object),
            seeds_S=np.zeros(slots, dtype=np.uint64),
            prompt_lengths_S=np.zeros(slots, dtype=np.int64),
            start_versions_S=np.zeros(slots, dtype=np.int64),
            lengths_S=np.zeros(slots, dtype=np.int64),
            prefix_lengths_S=np.zeros(slots, dtype=np.int64),
            pending_S=np.zeros(slots, dtype=np.int64),
            ids_ST=np.zeros((slots, max_tokens), dtype=np.int64),
            mask_ST=np.ones((slots, max_tokens), dtype=np.bool_),
            logprobs_ST=np.zeros((slots, max_tokens), dtype=np.float32),
            versions_ST=np.zeros((slots, max_tokens), dtype=np.int64),
        )

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position in its sequence of each occupied slot's pending token."""
        return self.prompt_lengths_S[: self.count] + self.lengths_S[: self.count] - 1

    def add(self, requests: Sequence[GenerationRequest], version: int) -> range:
        """Occupy the next free slots; returns their rows."""
        rows = range(self.count, self.count + len(requests))
        new = slice(rows.start, rows.stop)
        self.start_versions_S[new] = version
        self.lengths_S[new] = self.prefix_lengths_S[new] = 0
        for row, request in zip(rows, requests, strict=True):
            self.requests_S[row] = request
            self.seeds_S[row] = request.seed % 2**64
            self.prompt_lengths_S[row] = len(request.prompt_ids)
            self.pending_S[row] = request.prompt_ids[-1]
            if request.prefix is not None:
                self._continue(row, request.prefix)
        self.count = rows.stop
        return rows

    def _continue(self, row: int, prefix: ResponsePrefix) -> None:
        length = len(prefix.ids_T)
        self.ids_ST[row, :length] = prefix.ids_T
        self.mask_ST[row, :length] = prefix.mask_T
        self.logprobs_ST[row, :length] = prefix.logprobs_T
        self.versions_ST[row, :length] = prefix.versions_T
        self.lengths_S[row] = self.prefix_lengths_S[row] = length
        self.start_versions_S[row] = prefix.start_version
        if length:
            self.pending_S[row] = prefix.ids_T[-1]

    def append(self, ids_B: NDArray[np.int64], logprobs_B: NDArray[np.float32], version: int) -> None:
        """One more token in every occupied slot."""
        rows, ends = np.arange(self.count), self.lengths_S[: self.count]
        self.ids_ST[rows, ends] = ids_B
        self.mask_ST[rows, ends] = True
        self.logprobs_ST[rows, ends] = logprobs_B
        self.versions_ST[rows, ends] = version
        self.pending_S[: self.count] = ids_B
        self.lengths_S[: self.count] += 1

    def response(self, row: int) -> NDArray[np.int64]:
        """The response so far in a slot (a view)."""
        return self.ids_ST[row, : self.lengths_S[row]]

    def drawn(self, row: int) -> NDArray[np.int64]:
        """What has been drawn in a slot, the response without its prefix (a view)."""
        return self.ids_ST[row, self.prefix_lengths_S[row] : self.lengths_S[row]]

    def cached_tokens(self, row: int) -> NDArray[np.int64]:
        """What the key/value cache holds for a slot: everything but the pending token."""
        tokens = np.concatenate([self.requests_S[row].prompt_ids, self.response(row)])
        return tokens[:-1]

    def trajectory(self, row: int, reason: StopReason, text: str) -> Trajectory:
        """The record of a finished slot."""
        request, length = self.requests_S[row], int(self.lengths_S[row])
        return Trajectory(
            group_id=request.group_id,
            index=request.index,
            prompt_ids=request.prompt_ids,
            response_ids_T=self.ids_ST[row, :length].copy(),
            mask_T=self.mask_ST[row, :length].copy(),
            logprobs_T=self.logprobs_ST[row, :length].copy(),
            versions_T=self.versions_ST[row, :length].copy(),
            stop_reason=reason,
            start_version=int(self.start_versions_S[row]),
            text=text,
        )

    def remove(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free slots and close the gaps with the last rows; returns (rows moved to, rows moved from)."""
        remaining = self.count - len(rows)
        targets = rows[rows < remaining]
        sources = np.setdiff1d(np.arange(remaining, self.count), rows, assume_unique=True)
        for field in fields(self):
            if field.name != "count":
                array = getattr(self, field.name)
                array[targets] = array[sources]
        self.requests_S[remaining : self.count] = None
        self.count = remaining
        return targets, sources
