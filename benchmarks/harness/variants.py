"""Every way to make the gradient behind one call that times it."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from alternatives.objective import SPECS
from alternatives.one_at_a_time import OneAtATime
from alternatives.opacus_ghost import OpacusGhost
from alternatives.padded import Padded
from alternatives.protocol import Alternative
from alternatives.torch_func import TorchFunc
from torch import Tensor
from transformers import PreTrainedModel

from harness.cells import SIZES, Cell
from harness.flops import synchronize
from harness.workload import sharing_weights
from vcpo.config import TrainingSection
from vcpo.learner.learner import Learner
from vcpo.models.attention import ATTENTION
from vcpo.records import Group

MANDATORY = ("plain", "ours", "one_at_a_time")

# AdamW does its full work, but no weight moves, so that every call of every variant sees the same weights
_TRAINING = TrainingSection(learning_rate=1e-30, weight_decay=0.0, max_grad_norm=1e30, gradient_cosine=False)


@dataclass(frozen=True)
class Call:
    """One step. seconds: up to the finished gradient; optimizer_seconds: clipping and AdamW, where they were run."""

    seconds: float
    optimizer_seconds: float | None
    squared_norms_B: Tensor | None


class Variant(Protocol):
    """A named way to make the gradient of the cell's group."""

    name: str
    baseline: str

    def run(self, update: bool = True, on_gradient: Callable[[], None] | None = None) -> Call:
        """One step from no gradient to no gradient.

        update: whether the optimizer does its part, for variants that have one.
        on_gradient: called when the gradient of minus the objective is in the parameters' ``grad``.
        """
        ...


class LearnerVariant:
    """``Learner.step``; the optimizer's part is timed apart."""

    def __init__(self, name: str, baseline: str, model: PreTrainedModel, group: Group) -> None:
        self.name = name
        self.baseline = baseline
        self._model = model
        self._groups = [group]
        self._learner = Learner(model, SPECS[baseline], _TRAINING, temperature=1.0)
        self._apart_seconds = 0.0
        optimizer: Any = self._learner.optimizer
        self._clip, self._step = optimizer.clip, optimizer.step

    def run(self, update: bool = True, on_gradient: Callable[[], None] | None = None) -> Call:
        """See ``Variant``."""
        optimizer: Any = self._learner.optimizer
        self._apart_seconds = 0.0

        def step(learning_rate: float) -> None:
            if on_gradient is not None:
                self._timed(on_gradient)
            if update:
                self._timed(self._step, learning_rate)

        optimizer.clip = partial(self._timed, self._clip)
        optimizer.step = step
        device = self._model.device.type
        synchronize(device)
        start = time.perf_counter()
        result = self._learner.step(self._groups)
        synchronize(device)
        seconds = time.perf_counter() - start - self._apart_seconds
        _forget_gradient(self._model)
        if result.skipped is not None:
            raise RuntimeError(f"{self.name} skipped the step: {result.skipped}")
        norms = result.squared_norms_B
        norms_B = None if norms is None else torch.tensor(norms, dtype=torch.float64)
        return Call(seconds, self._apart_seconds if update else None, norms_B)

    def _timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        device = self._model.device.type
        synchronize(device)
        start = time.perf_counter()
        result = function(*arguments)
        synchronize(device)
        self._apart_seconds += time.perf_counter() - start
        return result


class AlternativeVariant:
    """An alternative; it has no optimizer."""

    def __init__(self, alternative: Alternative, model: PreTrainedModel) -> None:
        self.name = alternative.name
        self.baseline = alternative.baseline
        self._alternative = alternative
        self._model = model

    def run(self, update: bool = True, on_gradient: Callable[[], None] | None = None) -> Call:
        """See ``Variant``."""
        device = self._model.device.type
        synchronize(device)
        start = time.perf_counter()
        squared_norms_B = self._alternative.gradient()
        synchronize(device)
        seconds = time.perf_counter() - start
        if on_gradient is not None:
            on_gradient()
        _forget_gradient(self._model)
        return Call(seconds, None, squared_norms_B)


def make_variants(model: PreTrainedModel, cell: Cell, group: Group) -> tuple[dict[str, Variant], dict[str, str]]:
    """The variants that can run this cell's model, by name, and why the others cannot."""
    variants: dict[str, Variant] = {
        "plain": LearnerVariant("plain", "group_mean", sharing_weights(model, ATTENTION), group),
        "ours": LearnerVariant("ours", "opob", sharing_weights(model, ATTENTION), group),
    }
    skipped = {}
    for kind, attention in ((OneAtATime, "sdpa"), (Padded, "sdpa"), (TorchFunc, ATTENTION), (OpacusGhost, "sdpa")):
        reason = _unfit(kind.name, SIZES[cell.size].family)
        if reason is not None:
            skipped[kind.name] = reason
            continue
        twin = sharing_weights(model, attention)
        variants[kind.name] = AlternativeVariant(kind(twin, group.trajectories), twin)
    return variants, skipped


def _unfit(name: str, family: str) -> str | None:
    if name in ("padded", "torch_func") and family == "neox":
        return "measured on the Qwen2 sizes"
    if name == "opacus" and family == "qwen2":
        return "Opacus refuses tied parameters under ghost norms; measured on the GPT-NeoX sizes"
    if name == "opacus" and importlib.util.find_spec("opacus") is None:
        return "Opacus is not installed (pip install 'vcpo[bench]')"
    return None


def _forget_gradient(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = None
