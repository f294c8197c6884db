"""Which GPU each process of a local run has."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def visible_gpus() -> list[str]:
    """The GPUs that torch finds, as ``CUDA_VISIBLE_DEVICES`` would name them for another process."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    # torch stops at the first name that is none, and so finds fewer
    return named[:count] or [str(number) for number in range(count)]


def sampler_gpu(index: int, gpus: Sequence[str]) -> str | None:
    """The GPU of a sampler process: the learner has the first one, the samplers have the others in turn.

    With a single GPU everybody shares it; ``None`` without any. The process of a background evaluation counts as one
    more sampler.
    """
    if not gpus:
        return None
    others = gpus[1:] or gpus
    return others[index % len(others)]
