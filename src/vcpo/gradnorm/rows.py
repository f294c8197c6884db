"""Which rows of a packed activation belong to which trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Some trajectories, and their rows as a padded batch.

    members: indices of the trajectories.
    index_CT: (members, width) rows; padding repeats a row of the same trajectory.
    is_padding_CT: where it does; ``None`` if nowhere.
    """

    members: Tensor
    index_CT: Tensor
    is_padding_CT: Tensor | None

    def gather(self, rows_R: Tensor) -> Tensor:
        """The rows as (members, width, ...), padding included."""
        return rows_R.index_select(0, self.index_CT.flatten()).view(*self.index_CT.shape, *rows_R.shape[1:])

    def gather_or_zero(self, rows_R: Tensor) -> Tensor:
        """The rows as (members, width, ...), 0 at the padding."""
        rows = self.gather(rows_R)
        if self.is_padding_CT is not None:
            rows.masked_fill_(self.is_padding_CT.view(*self.index_CT.shape, *[1] * (rows.dim() - 2)), 0)
        return rows


class Rows:
    """Consecutive rows of trajectories 0, 1, ...: ``lengths_B`` rows each, in a tensor of their sum."""

    def __init__(self, lengths_B: Sequence[int], device: torch.device) -> None:
        self.lengths_B = torch.tensor(lengths_B, device=device)
        self.count = sum(lengths_B)
        self._lengths = lengths_B
        self._starts = [0, *accumulate(lengths_B)]
        self._device = device

    def repeated(self, factor: int) -> Rows:
        """The same trajectories with ``factor`` rows in place of each, such as one per attention head."""
        return Rows([factor * length for length in self._lengths], self._device)

    def spread(self, values_B: Tensor) -> Tensor:
        """One value per trajectory, repeated for each of its rows."""
        return values_B.repeat_interleave(self.lengths_B, output_size=self.count)

    def sums(self, rows_RP: Tensor) -> Tensor:
        """(B, P) sums of each trajectory's rows."""
        total: Tensor = torch.segment_reduce(rows_RP.contiguous(), "sum", lengths=self.lengths_B, axis=0, initial=0)
        return total

    def chunks(self, elements: int, per_member: int) -> Iterator[Chunk]:
        """All trajectories, those of similar length together, as many at a time as fit into ``elements`` numbers.

        per_member: numbers that one trajectory needs. A chunk holds at least one trajectory.
        """
        order = sorted(range(len(self._lengths)), key=self._lengths.__getitem__)
        size = max(1, elements // max(per_member, 1))
        for begin in range(0, len(order), size):
            yield self.chunk(order[begin : begin + size])

    def chunk(self, members: Sequence[int]) -> Chunk:
        """These trajectories, in this order."""
        lengths = [self._lengths[i] for i in members]
        width = max(lengths)
        starts_C1 = torch.tensor([self._starts[i] for i in members], device=self._device)[:, None]
        index_T = torch.arange(width, device=self._device)[None, :]
        is_padding = None
        if min(lengths) < width:
            lengths_C1 = torch.tensor(lengths, device=self._device)[:, None]
            is_padding = index_T >= lengths_C1
            index_T = torch.minimum(index_T, (lengths_C1 - 1).clamp(min=0))
        index_CT = (starts_C1 + index_T).clamp(max=max(self.count - 1, 0))
        return Chunk(torch.tensor(members, device=self._device), index_CT, is_padding)
