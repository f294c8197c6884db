"""Sums of trajectory gradients whose coefficients are completed later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vcpo.gradnorm.uses import at_least_float32


@dataclass(frozen=True)
class LateCoefficients:
    """Coefficients that are linear in one number per set, which is known only after the norms.

    The coefficient of trajectory i is ``fixed[i] + slope[i] * v`` with the ``v`` of its set. For a baseline b:
    ``slope * (R - r) + slope * (r - b)`` with any r that is known in advance. Choosing r as the most frequent reward of
    the set makes ``fixed`` 0 for most trajectories, which saves their share of the work.
    """

    fixed: list[float]
    slope: list[float]
    sets: list[int]


class GradientSums:
    """The gradient of a step in float32 or better, by parameter name, and the parts of it that still lack a factor.

    A set of trajectories that is open holds one more buffer for every parameter whose single gradients were added, so
    close sets as soon as possible.

    totals: the gradient so far. A parameter without contributions has none.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self._open: dict[int, dict[str, Tensor]] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that is complete. It belongs to the sums afterwards: it may become the total itself."""
        gradient = at_least_float32(gradient)
        if name in self.totals:
            self.totals[name].add_(gradient)
        else:
            self.totals[name] = gradient

    def total(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """The total of a parameter, to add to in place."""
        if name not in self.totals:
            self.totals[name] = at_least_float32(like[:0]).new_zeros(*shape)
        return self.totals[name]

    def add_single(
        self, name: str, shape: Sequence[int], offset: int, part: Tensor, late: LateCoefficients, i: int
    ) -> None:
        """Add a consecutive part of the flattened gradient of trajectory i; ``shape`` is the parameter's."""
        if late.fixed[i]:
            self._part(self.total(name, shape, part), offset, part).add_(part, alpha=late.fixed[i])
        if late.slope[i]:
            self._part(self._waiting(late.sets[i], name, shape, part), offset, part).add_(part, alpha=late.slope[i])

    def add_singles(
        self, name: str, shape: Sequence[int], singles: Tensor, late: LateCoefficients, members: Sequence[int]
    ) -> None:
        """Add whole gradients (members, *shape) of several trajectories."""
        flat = singles.flatten(1)

        def add(total: Tensor, coefficients: list[float]) -> None:
            if any(coefficients):
                total.view(-1).addmv_(flat.T, flat.new_tensor(coefficients))

        if any(late.fixed[i] for i in members):
            add(self.total(name, shape, flat), [late.fixed[i] for i in members])
        for index in dict.fromkeys(late.sets[i] for i in members):
            slopes = [late.slope[i] if late.sets[i] == index else 0.0 for i in members]
            if any(slopes):
                add(self._waiting(index, name, shape, flat), slopes)

    def close(self, index: int, factor: float) -> None:
        """The number of a set is known: its waiting gradients are complete."""
        for name, waiting in self._open.pop(index, {}).items():
            if name in self.totals:
                self.totals[name].add_(waiting, alpha=factor)
            else:
                self.totals[name] = waiting.mul_(factor)

    @property
    def is_complete(self) -> bool:
        """Whether no set is open."""
        return not self._open

    def _waiting(self, index: int, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        waiting = self._open.setdefault(index, {})
        if name not in waiting:
            waiting[name] = at_least_float32(like[:0]).new_zeros(*shape)
        return waiting[name]

    @staticmethod
    def _part(buffer: Tensor, offset: int, part: Tensor) -> Tensor:
        return buffer.view(-1)[offset : offset + part.numel()]
