"""One optimizer update.

Order: log-probabilities of the packed batch under the current weights, log-ratios, the method's weights, squared
gradient norms, baselines, gradient, effective sample size, step size, clip, optimizer. Everything that concerns the
whole minibatch (ESS, B, group statistics, baselines) is computed from all of its microbatches, so that the update does
not depend on how the minibatch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vcpo.config import TrainingSection
from vcpo.errors import UserError
from vcpo.gradnorm.recorder import GradientRecorder
from vcpo.learner.forward import PolicyForward
from vcpo.learner.gradient import GradientAssembly, NormWay
from vcpo.learner.metrics import baseline_metrics, ratio_metrics, reward_metrics, staleness_metrics
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
    weights_B: the importance weight of each trajectory's gradient; at token level the mean of its tokens' weights.
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


class Learner:
    """A model, its optimizer, and the method that turns groups of trajectories into updates.

    version: optimizer steps done; skipped steps count, because trajectories were consumed and weights published.
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
        self._parallel = parallel or DataParallel()
        self.optimizer = MasterAdamW(model, training, self._parallel)
        self._consecutive_skips = 0
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        recorder = self._make_recorder() if spec.needs_norms else None
        self._norms = NormWay(recorder, training.gradient_norm_mode, rows_may_be_kept=not checkpointing)
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
        ``training.max_skipped_steps`` such steps in a row.
        """
        minibatch = Minibatch(groups, self.spec)
        assembly = GradientAssembly(
            self._forward,
            self.spec,
            self.optimizer,
            self._norms,
            self._parallel,
            self.temperature,
            self._max_tokens,
            minibatch,
        )
        assembly.problem = minibatch.problem()
        self.optimizer.begin()
        assembly.run()
        metrics = {
            **reward_metrics(minibatch),
            **staleness_metrics(minibatch, self.version),
            **ratio_metrics(
                minibatch,
                self.spec,
                assembly.log_ratios_B,
                assembly.k3_B,
                assembly.truncated_B,
                assembly.entropies_B,
            ),
            **baseline_metrics(minibatch, assembly.squared_norms_B if self.spec.needs_norms else None),
            **({"imprecise_norms": float(assembly.imprecise_norms)} if self.spec.needs_norms else {}),
            "tokens": float(minibatch.trained_B[minibatch.scored_B].sum()),
            "packed_tokens": float(assembly.packed_tokens),
        }
        skipped = assembly.problem or self._update(metrics, assembly)
        if skipped:
            self.optimizer.drop_gradient()
            metrics |= {"learning_rate": 0.0, "step_scale": 0.0}
        metrics["skipped"] = float(skipped is not None)
        self.version += 1
        self._consecutive_skips = self._consecutive_skips + 1 if skipped else 0
        if self._consecutive_skips > self.training.max_skipped_steps:
            raise RuntimeError(f"{self._consecutive_skips} steps in a row were skipped; the last one: {skipped}")
        return StepResult(
            metrics=metrics,
            skipped=skipped,
            log_ratios_B=assembly.log_ratios_B.tolist(),
            weights_B=assembly.weights_B.tolist(),
            advantages_B=minibatch.advantages().tolist(),
            squared_norms_B=assembly.squared_norms_B.tolist() if self.spec.needs_norms else None,
        )

    def _update(self, metrics: dict[str, float], assembly: GradientAssembly) -> str | None:
        """Step size, clip, optimizer step. Adds their metrics; returns why there was none, if so."""
        scale = step_scale(self.spec.step_size, metrics["ess"], self.spec.ess_on_policy)
        if math.isnan(scale):
            return "the effective sample size is undefined: every importance ratio is 0"
        self.optimizer.finish()
        norm = self.optimizer.clip(self.training.max_grad_norm)
        metrics |= {"grad_norm": norm, "grad_clipped": float(norm > self.training.max_grad_norm)}
        if not math.isfinite(norm):
            return assembly.blame()
        learning_rate = scale * scheduled_learning_rate(self.training, self.version)
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
