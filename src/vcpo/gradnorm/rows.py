"""Which rows of a packed activation belong to which trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_LARGE = 2**20  # numbers from which one operation per trajectory is quicker than one scattering operation


@dataclass(frozen=True)
class Chunk:
    """Some trajectories, and their rows as a padded batch.

    members: positions of the trajectories in their ``Rows``.
    index_CT: (members, width) rows; padding repeats a row of the same trajectory. ``None`` if the trajectories are all
        rows in order and have the same length: then a view does.
    is_padding_CT: where padding is; ``None`` if nowhere.
    """

    members: Sequence[int]
    index_CT: Tensor | None
    is_padding_CT: Tensor | None

    def gather(self, rows_R: Tensor) -> Tensor:
        """The rows as (members, width, ...), padding included."""
        if self.index_CT is None:
            batched: Tensor = rows_R.unflatten(0, (len(self.members), -1))
            return batched
        return rows_R.index_select(0, self.index_CT.flatten()).view(*self.index_CT.shape, *rows_R.shape[1:])

    def gather_or_zero(self, rows_R: Tensor) -> Tensor:
        """The rows as (members, width, ...), 0 at the padding."""
        rows = self.gather(rows_R)
        if self.is_padding_CT is not None:
            rows.masked_fill_(self.is_padding_CT.view(*self.is_padding_CT.shape, *[1] * (rows.dim() - 2)), 0)
        return rows


class Rows:
    """Consecutive rows of the trajectories ``first``, ``first + 1``, ..., in a tensor of ``sum(lengths)`` rows."""

    def __init__(self, lengths: Sequence[int], device: torch.device, first: int = 0) -> None:
        self.lengths = list(lengths)
        self.first = first
        self.count = sum(self.lengths)
        self.device = device
        self._starts = [0, *accumulate(self.lengths)]
        self._lengths_B: Tensor | None = None
        self._owner_R: Tensor | None = None

    @property
    def lengths_B(self) -> Tensor:
        """The lengths as a tensor."""
        if self._lengths_B is None:
            self._lengths_B = torch.tensor(self.lengths, device=self.device)
        return self._lengths_B

    @property
    def owner_R(self) -> Tensor:
        """The position in ``lengths`` of the trajectory of each row."""
        if self._owner_R is None:
            self._owner_R = self.spread(torch.arange(len(self.lengths), device=self.device))
        return self._owner_R

    def slices(self) -> list[slice]:
        """The rows of each trajectory."""
        return [slice(begin, end) for begin, end in zip(self._starts, self._starts[1:], strict=False)]

    def repeated(self, factor: int) -> Rows:
        """The same trajectories with ``factor`` rows in place of each, such as one per attention head."""
        return Rows([factor * length for length in self.lengths], self.device, self.first)

    def is_batch(self, trajectories: int, tokens: int) -> bool:
        """Whether these are the rows of a padded batch of this shape."""
        return len(self.lengths) == trajectories and set(self.lengths) == {tokens}

    def own(self, values_B: Tensor) -> Tensor:
        """Of one value per trajectory of the whole recording, those of the trajectories in these rows."""
        return values_B[self.first : self.first + len(self.lengths)]

    def spread(self, values_B: Tensor) -> Tensor:
        """One value per trajectory of these rows, repeated for each of its rows."""
        return values_B.repeat_interleave(self.lengths_B, output_size=self.count)

    def sums(self, rows_RP: Tensor, row_weights_R: Tensor | None = None) -> Tensor:
        """(B, P) sums of each trajectory's rows, each row times its weight."""
        # never as a product with a 0/1 matrix: a trajectory's NaN would be in the sums of all others
        if rows_RP.numel() > _LARGE * (1 + len(self.lengths) // 64):
            if row_weights_R is None:
                row_weights_R = rows_RP.new_ones(self.count)
            return torch.stack([row_weights_R[own] @ rows_RP[own] for own in self.slices()])
        if row_weights_R is not None:
            rows_RP = rows_RP * row_weights_R[:, None]
        return rows_RP.new_zeros(len(self.lengths), *rows_RP.shape[1:]).index_add_(0, self.owner_R, rows_RP)

    def chunks(self, elements: int, per_member: int) -> Iterator[Chunk]:
        """All trajectories, those of similar length together, as many at a time as fit into ``elements`` numbers.

        per_member: numbers that one trajectory needs. A chunk holds at least one trajectory.
        """
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        size = max(1, elements // max(per_member, 1))
        for begin in range(0, len(order), size):
            yield self.chunk(order[begin : begin + size])

    def chunk(self, members: Sequence[int]) -> Chunk:
        """These trajectories (positions within these rows), in this order."""
        lengths = [self.lengths[i] for i in members]
        width = max(lengths)
        if min(lengths) == width > 0 and list(members) == list(range(len(self.lengths))):
            return Chunk(members, None, None)
        starts_C1 = torch.tensor([self._starts[i] for i in members], device=self.device)[:, None]
        index_T = torch.arange(width, device=self.device)[None, :]
        is_padding = None
        if min(lengths) < width:
            lengths_C1 = torch.tensor(lengths, device=self.device)[:, None]
            is_padding = index_T >= lengths_C1
            index_T = torch.minimum(index_T, (lengths_C1 - 1).clamp(min=0))
        index_CT = (starts_C1 + index_T).clamp(max=max(self.count - 1, 0))
        return Chunk(members, index_CT, is_padding)
