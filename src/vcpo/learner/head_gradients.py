"""Where the gradient of the output layer goes: into a sum, or to a recording of every layer's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.gradnorm.recorder import Recording
from vcpo.learner.head import add_head_gradients


class SummingConsumer:
    """Sums the output layer's gradient."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}

    def rows(self, x_RD: Tensor, g_RV: Tensor, lengths: Sequence[int], first: int, is_everything: bool) -> None:
        add_head_gradients(self.total, x_RD, g_RV)

    def single(self, gradients: dict[str, Tensor], index: int) -> None:
        for local, gradient in gradients.items():
            if local in self.total:
                self.total[local] += gradient
            else:
                self.total[local] = gradient


class RecordingConsumer:
    """Hands the output layer's rows to a recording."""

    def __init__(self, recording: Recording, head: nn.Module) -> None:
        self._recording = recording
        self._head = head

    def rows(self, x_RD: Tensor, g_RV: Tensor, lengths: Sequence[int], first: int, is_everything: bool) -> None:
        # kept rows of several chunks would be the logits of the whole batch
        self._recording.deliver(self._head, x_RD, g_RV, lengths, first, may_keep=is_everything)

    def single(self, gradients: dict[str, Tensor], index: int) -> None:
        self._recording.deliver_single(self._head, gradients, index)


class AttachGradients(torch.autograd.Function):
    """A zero whose backward pass delivers gradients of weight and bias that are known already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, gradients: dict[str, Tensor]) -> Tensor:
        ctx.gradients = gradients
        ctx.has_bias = bias is not None
        ctx.dtype = weight.dtype
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, bias = (ctx.gradients.pop(name).to(ctx.dtype) for name in ("weight", "bias"))
        return weight, bias if ctx.has_bias else None, None
