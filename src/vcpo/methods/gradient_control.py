"""Rules on the whole gradient of a step, by its angle to the one before. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass


class GradientControl:
    """Base of the rules."""

    def parallel_factor(self, cosine: float) -> float | None:
        """What the part of the gradient along the previous gradient is multiplied with; ``None`` skips the step.

        cosine: between this step's gradient and the previous step's, both before any control or clipping.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LimitAlignment(GradientControl):
    """Gradient alignment control (arXiv 2603.01501): stale gradients that repeat the previous one are held back.

    Below ``low`` nothing is done; from ``high`` on the step is skipped; between them the parallel part is scaled by
    low / cosine. The source does not publish thresholds: take them from the quantiles of ``gradient_cosine`` in a
    synchronous run on the same setup. The defaults are the 95% quantile and about the largest of five synchronous runs
    of ``recipes/reproduce/sort.yaml``.
    """

    low: float = 0.55
    high: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"low and high must satisfy 0 < low <= high <= 1, not {self.low} and {self.high}")

    def parallel_factor(self, cosine: float) -> float | None:
        """See ``GradientControl``."""
        if cosine >= self.high:
            return None
        return self.low / cosine if cosine > self.low else 1.0


GRADIENT_CONTROLS: dict[str, type[GradientControl]] = {"limit_alignment": LimitAlignment}
