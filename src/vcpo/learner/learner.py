"""One optimizer update.

Order: log-probabilities of the packed batch under the current weights, log-ratios, the method's weights, squared
gradient norms, baselines, gradient, effective sample size, step size, clip, optimizer. Everything that concerns the
whole minibatch (ESS, B, group statistics, baselines) is computed from all of its microbatches, so that the update does
not depend on how the minibatch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vcpo.config import TrainingSection
from vcpo.errors import UserError
from vcpo.gradnorm.recorder import GradientRecorder
from vcpo.learner.forward import PolicyForward
from vcpo.learner.gradient import GradientAssembly, NormWay
from vcpo.learner.metrics import (
    baseline_metrics,
    norm_metrics,
    ratio_metrics,
    reward_metrics,
    staleness_metrics,
)
from vcpo.learner.minibatch import Minibatch
from vcpo.learner.optimizer import MasterAdamW
from vcpo.learner.packing import default_microbatch
from vcpo.learner.parallel import DataParallel
from vcpo.learner.schedule import scheduled_learning_rate
from vcpo.methods.spec import MethodSpec
from vcpo.methods.step_size import step_scale
from vcpo.records import Group


@dataclass(frozen=True)
class StepResult:
    """What one step did. Lists ending in ``_B`` follow the order of the groups and their members.

    metrics: flat names and numbers (``vcpo.learner.metrics``).
    skipped: why no optimizer step was made, or ``None``.
    log_ratios_B: sequence log-ratios, learner over sampler, un-truncated.
    weights_B: the weight of each trajectory's gradient; with weights or masks by token, their mean over its tokens.
    advantages_B: what multiplied it; 0 for trajectories that did not contribute.
    squared_norms_B: squared gradient norms, NaN for trajectories that did not contribute; ``None`` if the method needs
        none.
    """

    metrics: dict[str, float]
    skipped: str | None
    log_ratios_B: list[float]
    weights_B: list[float]
    advantages_B: list[float]
    squared_norms_B: list[float] | None


@dataclass(frozen=True)
class Examination:
    """What a method makes of a minibatch, without a step.

    gradient: by parameter name, of minus the objective, before control, clipping and step size; float32 or better;
        empty if the step would be skipped.
    applied_squared_norms_B: squared norms of the single gradients whose sum it is, coefficients included; NaN for
        trajectories without one; ``None`` where norms were not asked for.
    """

    result: StepResult
    gradient: dict[str, Tensor]
    applied_squared_norms_B: list[float] | None


class Learner:
    """A model, its optimizer, and the method that turns groups of trajectories into updates.

    version: optimizer steps done; skipped steps count, because trajectories were consumed and weights published.
    damping: times the learning rate of the next steps, beside everything else that scales it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: MethodSpec,
        training: TrainingSection,
        temperature: float,
        parallel: DataParallel | None = None,
    ) -> None:
        """temperature: at which the trajectories are sampled; ratios are between distributions at this temperature.

        parallel: the other learner processes, if there are any; every rank passes the same groups to ``step``.

        Raises UserError if the method needs gradient norms and a layer has no rule for them, unless
        ``training.gradient_norm_fallback`` allows to take them one trajectory at a time (not for a sharded model).
        """
        self.model = model
        self.spec = spec
        self.training = training
        self.temperature = temperature
        self.version = 0
        self.damping = 1.0
        self._parallel = parallel or DataParallel()
        self.optimizer = MasterAdamW(model, training, self._parallel)
        self._consecutive_skips = 0
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        self._rows_may_be_kept = not checkpointing
        self._norms = self.norm_way(spec)
        # dropout would make the learner's distribution another than the sampler's; layers recompute only when training
        layers: nn.Module = model
        layers.eval()
        if checkpointing:
            for module in layers.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True
        device = self.optimizer.parameters[0].device
        self._forward = PolicyForward(model, device)
        hidden_size = model.config.get_text_config().hidden_size
        self._max_tokens = training.max_tokens_per_microbatch or default_microbatch(hidden_size, device)
        self._parallel.after_passes()

    def step(self, groups: Sequence[Group]) -> StepResult:
        """One update from a minibatch of groups.

        A step without a scored trajectory, or with a NaN or otherwise unusable number, is skipped: no weight changes,
        ``StepResult.skipped`` names the reason. Raises RuntimeError with the reason after more than
        ``training.max_skipped_steps`` such steps in a row. A step is skipped, too, when the method leaves nothing of
        the minibatch or its gradient control says so; that is no failure, however often it happens in a row.
        """
        minibatch, assembly = self._assemble(groups, self._norms)
        metrics = self._metrics(minibatch, assembly)
        skip = self._reason_to_skip(metrics, assembly) or self._update(metrics, assembly)
        if skip is not None:
            self.optimizer.drop_gradient()
            metrics |= {"learning_rate": 0.0, "step_scale": 0.0}
        metrics["skipped"] = float(skip is not None)
        self.version += 1
        if skip is None or skip.is_failure:
            self._consecutive_skips = 0 if skip is None else self._consecutive_skips + 1
        if skip is not None and self._consecutive_skips > self.training.max_skipped_steps:
            raise RuntimeError(f"{self._consecutive_skips} steps in a row were skipped; the last one: {skip.reason}")
        return self._result(minibatch, assembly, metrics, skip)

    def examine(self, groups: Sequence[Group], norms: bool = False) -> Examination:
        """What ``step`` would do with these groups at the present weights. Nothing changes.

        norms: take the norms of the gradients as they are applied, for any method. Raises UserError if a layer has no
        rule for them.
        """
        way = self._norms
        if norms and not self.spec.needs_norms:
            way = replace(way, recorder=GradientRecorder(self.model), always=True)
        minibatch, assembly = self._assemble(groups, way)
        metrics = self._metrics(minibatch, assembly)
        skip = self._reason_to_skip(metrics, assembly)
        gradient: dict[str, Tensor] = {}
        if skip is None:
            metrics["step_scale"] = step_scale(self.spec.step_size, metrics["ess"], self.spec.ess_on_policy)
            self.optimizer.finish()
            gradient = self.optimizer.gradient()
        self.optimizer.drop_gradient()
        metrics["skipped"] = float(skip is not None)
        applied_B = assembly.measured.squared_norms_B
        if self.spec.needs_norms:
            applied_B = applied_B * (assembly.measured.outer_B * minibatch.factors_B * minibatch.advantages()).square()
        return Examination(
            self._result(minibatch, assembly, metrics, skip),
            gradient,
            applied_B.tolist() if norms or self.spec.needs_norms else None,
        )

    def _assemble(self, groups: Sequence[Group], norms: NormWay) -> tuple[Minibatch, GradientAssembly]:
        minibatch = Minibatch(groups, self.spec)
        self.optimizer.begin()
        assembly = GradientAssembly(
            self._forward,
            self.spec,
            self.optimizer,
            norms,
            self._parallel,
            self.temperature,
            self._max_tokens,
            minibatch,
        )
        assembly.run()
        return minibatch, assembly

    def _metrics(self, minibatch: Minibatch, assembly: GradientAssembly) -> dict[str, float]:
        metrics = {
            **reward_metrics(minibatch),
            **staleness_metrics(minibatch, self.version),
            **ratio_metrics(minibatch, assembly.measured),
            **baseline_metrics(minibatch),
        }
        if self.spec.needs_norms:
            metrics |= {
                **norm_metrics(minibatch, assembly.measured),
                "imprecise_norms": float(assembly.imprecise_norms),
            }
        tokens = float(minibatch.trained_B[minibatch.scored_B].sum())
        return metrics | {"tokens": tokens, "packed_tokens": float(assembly.packed_tokens)}

    def _result(
        self, minibatch: Minibatch, assembly: GradientAssembly, metrics: dict[str, float], skip: _Skip | None
    ) -> StepResult:
        measured = assembly.measured
        return StepResult(
            metrics=metrics,
            skipped=None if skip is None else skip.reason,
            log_ratios_B=measured.log_ratios_B.tolist(),
            weights_B=measured.weights_B.tolist(),
            advantages_B=minibatch.advantages().tolist(),
            squared_norms_B=measured.squared_norms_B.tolist() if self.spec.needs_norms else None,
        )

    def _reason_to_skip(self, metrics: dict[str, float], assembly: GradientAssembly) -> _Skip | None:
        if assembly.problem is not None:
            return _Skip(assembly.problem, is_failure=True)
        if math.isnan(metrics["ess"]):
            return _Skip("the effective sample size is undefined: every importance ratio is 0", is_failure=True)
        if assembly.measured.drops_everything():
            return _Skip("the method gives every token weight 0", is_failure=False)
        return None

    def _update(self, metrics: dict[str, float], assembly: GradientAssembly) -> _Skip | None:
        """Step size, control, clip, optimizer step. Adds their metrics; returns why there was none, if so."""
        scale = step_scale(self.spec.step_size, metrics["ess"], self.spec.ess_on_policy)
        self.optimizer.finish()
        control = self.spec.gradient_control
        if self.training.gradient_cosine or control is not None:
            alignment = self.optimizer.align(control)
            if not math.isnan(alignment.cosine):
                metrics["gradient_cosine"] = alignment.cosine
            if alignment.must_skip:
                reason = f"the gradient repeats the previous one (cosine {alignment.cosine:.3f})"
                return _Skip(reason, is_failure=False)
        norm = self.optimizer.clip(self.training.max_grad_norm)
        metrics |= {"grad_norm": norm, "grad_clipped": float(norm > self.training.max_grad_norm)}
        if not math.isfinite(norm):
            return _Skip(assembly.blame(), is_failure=True)
        learning_rate = scale * self.spec.learning_rate_factor * scheduled_learning_rate(self.training, self.version)
        learning_rate *= self.damping
        self.optimizer.step(learning_rate)
        metrics |= {"learning_rate": learning_rate, "step_scale": scale}
        return None

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain numbers and tensors that, with the model's weights, continue the run exactly."""
        numbers = {"version": self.version, "consecutive_skips": self._consecutive_skips}
        return numbers, self.optimizer.tensors()

    def load_state(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """The inverse of ``state``, for a learner of the same model."""
        self.version = numbers["version"]
        self._consecutive_skips = numbers["consecutive_skips"]
        self.optimizer.load_tensors(tensors)

    def go_on_from(self, numbers: dict[str, Any], tensors: dict[str, Tensor], spec: MethodSpec) -> None:
        """Continue from an earlier state, whose weights the model has got back, at the present version.

        numbers, tensors: what ``state`` returned then. Nothing of what has been learned since stays in the optimizer.
        spec: the method from now on. The version does not go back, so that it keeps counting the steps that consumed
        trajectories, and no two sets of weights have the same number.
        """
        version = self.version
        self.spec = spec
        self._norms = self.norm_way(spec)
        self.optimizer = MasterAdamW(self.model, self.training, self._parallel)
        self.load_state(numbers, tensors)
        self.version = version

    def norm_way(self, spec: MethodSpec) -> NormWay:
        """How the gradient norms that a method needs are taken. Raises UserError if they cannot be, see ``Learner``."""
        recorder = self._make_recorder() if spec.needs_norms else None
        if spec.needs_norms and recorder is None and spec.opob_leave_one_out:
            raise UserError(
                "method.opob_leave_one_out keeps every layer's rows until all norms of a group are known, which"
                " training.gradient_norm_fallback cannot do"
            )
        return NormWay(recorder, self.training.gradient_norm_mode, rows_may_be_kept=self._rows_may_be_kept)

    def _make_recorder(self) -> GradientRecorder | None:
        try:
            return GradientRecorder(self.model)
        except UserError as error:
            if not self.training.gradient_norm_fallback:
                raise
            if self._parallel.needs_equal_passes:
                raise UserError(
                    "training.gradient_norm_fallback takes one trajectory at a time, which a sharded model cannot do,"
                    f" and without it {error}"
                ) from error
            return None


@dataclass(frozen=True)
class _Skip:
    """is_failure: whether a number was unusable, rather than the method deciding so."""

    reason: str
    is_failure: bool
