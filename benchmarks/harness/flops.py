"""How many floating-point operations a step needs at least, and how many the machine can do."""

from __future__ import annotations

import time

import torch
from torch import nn
from transformers import PreTrainedModel

from harness.cells import SIZES, Cell
from vcpo.records import Trajectory

_TIMED_PRODUCTS = 5


def plain_step_flops(model: PreTrainedModel, cell: Cell, trajectories: list[Trajectory]) -> float:
    """Matrix products of one forward and backward pass over the trajectories, without padding or recomputation.

    A layer of P weights costs 6 P per row: 2 P forward, 4 P backward. Layers see every token, the output head only
    the trained ones. Causal attention costs 6 d T^2 per layer and trajectory (two products of 2 d T^2, of which the
    mask leaves half, and twice that backward), d being the width of all query heads.
    """
    size = SIZES[cell.size]
    head = model.get_output_embeddings()
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    totals = [len(t.prompt_ids) + len(t.response_ids_T) for t in trajectories]
    trained = sum(len(t.response_ids_T) for t in trajectories)
    attention = 6.0 * size.layers * size.hidden * sum(total**2 for total in totals)
    return 6.0 * weights * sum(totals) + 6.0 * size.hidden * size.vocabulary * trained + attention


def measured_peak(device: str) -> float:
    """FLOP per second of a large float32 matrix product in this process: the best of a few."""
    width = 8192 if device == "cuda" else 2048
    left, right = (torch.randn(width, width, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(_TIMED_PRODUCTS + 1):
        synchronize(device)
        start = time.perf_counter()
        left @ right
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * width**3 / best


def synchronize(device: str) -> None:
    """Wait until the device has done everything asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()
