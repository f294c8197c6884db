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
    """One use of a parameter of shape ``P``."""

    @property
    def rows(self) -> Rows: ...

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """(members, *P) gradients of the chunk's trajectories. The chunk is cut for this use's ``rows``."""
        ...

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """(*P) sum over trajectories of coefficient times gradient, without forming the single gradients."""
        ...


@dataclass(frozen=True)
class OuterUse:
    """A matrix whose gradient is sum over rows of left row times right row transposed."""

    left_RI: Tensor
    right_RJ: Tensor
    rows: Rows

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """See ``ParameterUse``."""
        left = at_least_float32(chunk.gather_or_zero(self.left_RI))
        right = at_least_float32(chunk.gather(self.right_RJ))
        return torch.bmm(left.transpose(1, 2), right)

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        left = at_least_float32(self.left_RI)
        coefficients = self.rows.spread(coefficients_B.to(left))
        return (coefficients[:, None] * left).T @ at_least_float32(self.right_RJ)


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
        """(B,) squared norms from the table rows that occur, without forming tables."""
        count = len(self.rows.lengths_B)
        trajectory_R = self.rows.spread(torch.arange(count, device=self.ids_R.device))
        pairs, slot_R = torch.unique(trajectory_R * self.table_rows + self.ids_R, return_inverse=True)
        gradients = at_least_float32(self.gradients_RD)
        summed = gradients.new_zeros(len(pairs), gradients.shape[-1]).index_add_(0, slot_R, gradients)
        squares = summed.square().sum(dim=1).double()
        return squares.new_zeros(count).index_add_(0, pairs // self.table_rows, squares)

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        gradients = at_least_float32(self.gradients_RD)
        weighted = self.rows.spread(coefficients_B.to(gradients))[:, None] * gradients
        return gradients.new_zeros(self.table_rows, gradients.shape[-1]).index_add_(0, self.ids_R, weighted)


@dataclass(frozen=True)
class VectorUse:
    """A bias or norm weight: small enough that each trajectory's gradient is kept."""

    gradients_BP: Tensor
    rows: Rows

    def per_trajectory(self, chunk: Chunk) -> Tensor:
        """See ``ParameterUse``."""
        return self.gradients_BP.index_select(0, chunk.members)

    def combined(self, coefficients_B: Tensor) -> Tensor:
        """See ``ParameterUse``."""
        return coefficients_B.to(self.gradients_BP) @ self.gradients_BP


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if that is finer: sums over rows are not left to bfloat16."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
