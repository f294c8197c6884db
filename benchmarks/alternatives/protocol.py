"""What a way to compute the gradient of a minibatch looks like to the benchmark."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Alternative(Protocol):
    """Bound to one model and one group of trajectories.

    name: as it appears in results.
    baseline: ``opob``, which needs the norms, or ``group_mean``, which needs none.
    """

    name: str
    baseline: str

    def gradient(self) -> Tensor | None:
        """Leave the gradient of minus the objective in every parameter's ``grad``, which is ``None`` before.

        On the way, compute what a step reports: log-ratios and the trained tokens' entropies. Returns the (B,)
        float64 squared norms of the trajectories' gradients, or ``None`` if they are not computed.
        """
        ...
