"""The grid of the benchmark. Imports without torch, because every cell is measured in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SEED = 0


@dataclass(frozen=True)
class Size:
    """A model with random weights.

    ``qwen2`` has tied embeddings, RMSNorm and grouped-query attention. ``neox`` (GPT-NeoX) is built from nn.Linear,
    nn.LayerNorm and untied nn.Embedding only, which are what Opacus' ghost norms cover.
    """

    family: Literal["qwen2", "neox"]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int


SIZES = {
    "XS": Size("qwen2", 2, 32, 64, 4, 2, 128),
    "S": Size("qwen2", 4, 256, 1024, 4, 2, 4096),
    "L": Size("qwen2", 12, 768, 2048, 12, 4, 32000),
    "XS-neox": Size("neox", 2, 32, 64, 4, 4, 128),
    "S-neox": Size("neox", 4, 256, 1024, 4, 4, 4096),
    "L-neox": Size("neox", 12, 768, 2048, 12, 12, 32000),
}


@dataclass(frozen=True)
class Cell:
    """One measurement: a model size, and one minibatch of one group.

    tokens: length of the longest possible trajectory, prompt included.
    group: trajectories.
    threads: torch's CPU threads.
    device: ``cpu`` or ``cuda``.
    """

    size: str
    tokens: int
    group: int
    threads: int
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Also the name of the cell's result file."""
        return f"{self.size}-{self.tokens}tokens-group{self.group}-{self.threads}threads-{self.device}"

    def to_plain(self) -> dict[str, Any]:
        """The inverse of ``Cell(**plain)``."""
        return asdict(self)
