"""How one use of a parameter in a forward pass turns into its gradient, per trajectory or combined.

A use keeps what the gradient is made of, not the gradient: the rows that went in and the gradient rows that came back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vcpo.gradnorm.rows import Chunk, Rows


class ParameterUse(Protocol):
    """One use of a parameter of shape ``P`` by the trajectories of ``rows``."""

    @property
    def rows(self) -> Rows: ...

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """(members, *P) gradients of the chunk's trajectories. The chunk is cut for this use's ``rows``."""
        ...

    def squared_norms(self) -> Tensor:
        """(trajectories of the rows,) squared norms of the gradients of this use alone, in float64."""
        ...

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """(*P) sum over trajectories of coefficient times gradient, without forming the single gradients.

        coefficients_B: of all trajectories of the recording.
        """
        ...


@dataclass(frozen=True)
class OuterUse:
    """A matrix whose gradient is the sum over rows of left row times right row transposed."""

    left_RP: Tensor
    right_RQ: Tensor
    rows: Rows

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """See ``ParameterUse``."""
        left = at_least_float32(chunk.gather_or_zero(self.left_RP))
        right = at_least_float32(chunk.gather(self.right_RQ))
        return torch.bmm(left.transpose(1, 2), right)

    def squared_norms(self) -> Tensor:
        """See ``ParameterUse``."""
        size = self.left_RP.shape[1] * self.right_RQ.shape[1]
        squares_B = torch.zeros(len(self.rows.lengths), dtype=torch.float64, device=self.left_RP.device)
        for chunk in self.rows.chunks(2**20, size):
            squares_B[chunk.members] = row_squares(self.per_trajectory(chunk).flatten(1))
        return squares_B

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        left, right = at_least_float32(self.left_RP), at_least_float32(self.right_RQ)
        coefficients_R1 = self.rows.spread(self.rows.own(coefficients_B).to(left))[:, None]
        if right.shape[1] < left.shape[1]:
            return left.T @ (coefficients_R1 * right)
        return (coefficients_R1 * left).T @ right


@dataclass(frozen=True)
class LookupUse:
    """An embedding table: row ``ids_R[r]`` of its gradient collects gradient row r."""

    ids_R: Tensor
    gradients_RD: Tensor
    table_rows: int
    rows: Rows

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """See ``ParameterUse``."""
        members, table = len(chunk.members), self.table_rows
        gradients = at_least_float32(chunk.gather_or_zero(self.gradients_RD))
        offsets_C1 = torch.arange(members, device=self.ids_R.device)[:, None] * table
        ids = (chunk.gather(self.ids_R) + offsets_C1).flatten()
        flat = gradients.new_zeros(members * table, gradients.shape[-1]).index_add_(0, ids, gradients.flatten(0, 1))
        return flat.view(members, table, -1)

    def squared_norms(self) -> Tensor:
        """See ``ParameterUse``; from the table rows that occur, without forming tables."""
        count = len(self.rows.lengths)
        pairs, slot_R = torch.unique(self.rows.owner_R * self.table_rows + self.ids_R, return_inverse=True)
        gradients = at_least_float32(self.gradients_RD)
        summed = gradients.new_zeros(len(pairs), gradients.shape[-1]).index_add_(0, slot_R, gradients)
        squares = row_squares(summed)
        return squares.new_zeros(count).index_add_(0, pairs // self.table_rows, squares)

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        total = at_least_float32(self.gradients_RD[:0]).new_zeros(self.table_rows, self.gradients_RD.shape[1])
        self.add_combined(coefficients_B, total)
        return total

    def add_combined(self, coefficients_B: Tensor, total: Tensor) -> None:
        """Add ``combined`` to ``total``, touching only the table rows that occur."""
        gradients = at_least_float32(self.gradients_RD)
        weighted = self.rows.spread(self.rows.own(coefficients_B).to(gradients))[:, None] * gradients
        total.index_add_(0, self.ids_R, weighted)


@dataclass(frozen=True)
class VectorUse:
    """A bias or norm weight: small enough that each trajectory's gradient is kept."""

    gradients_BP: Tensor
    rows: Rows

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """See ``ParameterUse``."""
        return self.gradients_BP[list(chunk.members)]

    def squared_norms(self) -> Tensor:
        """See ``ParameterUse``."""
        return row_squares(self.gradients_BP.flatten(1))

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        coefficients = self.rows.own(coefficients_B).to(self.gradients_BP)
        combined: Tensor = torch.tensordot(coefficients, self.gradients_BP, dims=1)
        return combined


@dataclass(frozen=True)
class SingleUse:
    """The finished gradient of one trajectory (``rows`` has exactly one)."""

    gradient: Tensor
    rows: Rows

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """See ``ParameterUse``."""
        return self.gradient[None]

    def squared_norms(self) -> Tensor:
        """See ``ParameterUse``."""
        return row_squares(self.gradient.flatten()[None])

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        return self.rows.own(coefficients_B).to(self.gradient) * self.gradient


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if that is finer: sums over rows are not left to bfloat16."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def row_squares(rows: Tensor) -> Tensor:
    """(rows,) squared length of each row, in float64."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths.double().square()
