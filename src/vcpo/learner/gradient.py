"""The gradient of one minibatch, assembled microbatch by microbatch.

Without gradient norms every coefficient is known when a trajectory's log-ratio is, so each microbatch is one forward
and one backward pass. With them, a trajectory's coefficient waits for its baseline, which waits for the norms of all
trajectories that share it: recorded microbatches are kept until then. A group that spans two microbatches keeps both;
a baseline shared by the minibatch (``opob_scope="minibatch"``) keeps all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vcpo.gradnorm import reference
from vcpo.gradnorm.recorder import GradientRecorder, Recording
from vcpo.learner.logprobs import keeps_logits, token_entropies, token_logprobs, trained_token_logits
from vcpo.learner.minibatch import Minibatch
from vcpo.learner.optimizer import MasterAdamW
from vcpo.learner.packing import PackedBatch, microbatches, pack
from vcpo.methods.advantages import optimal_baselines
from vcpo.methods.ratios import sum_by_trajectory, trajectory_log_ratios, truncated_weights
from vcpo.methods.spec import MethodSpec

_NOT_FINITE = "the gradient of {} is not finite"


@dataclass(frozen=True)
class _Forward:
    """One packed forward pass. log_ratios_K: token log-ratios, float64 on the CPU, without a graph."""

    batch: PackedBatch
    logits_KV: Tensor
    logprobs_K: Tensor
    log_ratios_K: Tensor


@dataclass(frozen=True)
class _Pending:
    """A recorded microbatch that waits for the baselines of its trajectories."""

    members: list[int]
    recording: Recording


class GradientAssembly:
    """Sums the gradient of a minibatch into an optimizer, and measures every trajectory on the way.

    Vectors over all trajectories of the minibatch, float64 on the CPU:

    log_ratios_B: sequence log-ratios, un-truncated.
    weights_B: importance weight of each trajectory's gradient; at token level the mean of its tokens' weights.
    squared_norms_B: NaN where not needed.

    token_log_ratios, entropies: per microbatch, of the trained tokens of scored trajectories.
    packed_tokens: tokens that went through the model, prompts included.
    problem: why no update can be made of this minibatch, or ``None``. Once there is one, the rest is only measured.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: MethodSpec,
        optimizer: MasterAdamW,
        recorder: GradientRecorder | None,
        temperature: float,
        max_tokens: int,
        minibatch: Minibatch,
    ) -> None:
        self._model = model
        self._spec = spec
        self._optimizer = optimizer
        self._recorder = recorder
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._minibatch = minibatch
        self._device = next(model.parameters()).device
        self._unseen_B = minibatch.active_B.clone()
        count = len(minibatch.trajectories)
        self.log_ratios_B = torch.zeros(count, dtype=torch.float64)
        self.weights_B = torch.ones(count, dtype=torch.float64)
        self.squared_norms_B = torch.full((count,), torch.nan, dtype=torch.float64)
        self.token_log_ratios: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self.packed_tokens = 0
        self.problem: str | None = None

    def run(self) -> None:
        """Go through the minibatch once, or twice where norms are taken one trajectory at a time."""
        minibatch = self._minibatch
        # trajectories that contribute nothing are measured like the others, but need no graph
        for members in self._cut((minibatch.trained_B > 0) & ~minibatch.active_B):
            self._only_measure(members)
        if not self._spec.needs_norms:
            for members in self._cut(minibatch.active_B):
                self._measure_and_backward(members)
        elif self._recorder is None:
            self._run_one_by_one()
        else:
            pending: list[_Pending] = []
            for members in self._cut(minibatch.active_B):
                pending = self._record(self._recorder, members, pending)
            if pending and self.problem is None:
                raise RuntimeError(
                    "a baseline stayed unknown: the gradient would lack the trajectories that wait for it"
                )

    def blame(self) -> str:
        """A sentence on a gradient that is not finite, with the name of the first trajectory whose own is not."""
        for index in self._minibatch.active_B.nonzero()[:, 0].tolist():
            squared_norm = self._single_squared_norm(self._forward([index]))
            sentence = self._unusable([index], _NOT_FINITE, ~squared_norm.isfinite())
            if sentence is not None:
                return sentence
        return "the gradient of the minibatch is not finite"

    def _cut(self, chosen_B: Tensor) -> list[list[int]]:
        """The chosen trajectories as microbatches, in the order of their groups."""
        members: list[int] = chosen_B.nonzero()[:, 0].tolist()
        trajectories = [self._minibatch.trajectories[i] for i in members]
        lengths = [len(t.prompt_ids) + len(t.response_ids_T) for t in trajectories]
        return [[members[i] for i in run] for run in microbatches(lengths, self._max_tokens)]

    def _forward(self, members: list[int]) -> _Forward:
        trajectories = [self._minibatch.trajectories[i] for i in members]
        return self._run_model(pack(trajectories, self._device), members)

    def _run_model(self, batch: PackedBatch, members: list[int]) -> _Forward:
        trajectories = [self._minibatch.trajectories[i] for i in members]
        logits_KV = trained_token_logits(self._model, batch)
        logprobs_K = token_logprobs(logits_KV, batch.targets_K, self._temperature)
        sampled_K = np.concatenate([t.logprobs_T[t.mask_T] for t in trajectories])
        log_ratios_K = logprobs_K.detach().double().cpu() - torch.from_numpy(sampled_K.astype(np.float64))
        return _Forward(batch, logits_KV, logprobs_K, log_ratios_K)

    def _only_measure(self, members: list[int]) -> None:
        with torch.no_grad():
            self._measure(self._forward(members), members)

    def _measure(self, forward: _Forward, members: list[int]) -> None:
        """Keep what the metrics and the coefficients need of a forward pass, and look for unusable numbers."""
        minibatch, level, cap = self._minibatch, self._spec.ratio_level, self._spec.ratio_cap
        lengths_B = torch.tensor(forward.batch.trained_B)
        log_ratios_B = sum_by_trajectory(forward.log_ratios_K, lengths_B)
        if level == "token":
            weights_B = sum_by_trajectory(self._token_weights(forward), lengths_B) / lengths_B
        else:
            weights_B = truncated_weights(trajectory_log_ratios(level, log_ratios_B, lengths_B), cap)
        self.log_ratios_B[members] = log_ratios_B
        self.weights_B[members] = weights_B
        self.packed_tokens += sum(forward.batch.lengths_B)

        scored_B = minibatch.scored_B[members]
        is_scored_K = scored_B.repeat_interleave(lengths_B)
        self.token_log_ratios.append(forward.log_ratios_K[is_scored_K])
        self.entropies.append(token_entropies(forward.logits_KV, self._temperature).cpu()[is_scored_K])
        if self.problem is None:
            self.problem = self._unusable(members, "the log-ratio of {} is NaN", scored_B & log_ratios_B.isnan())
        if self.problem is None:
            self.problem = self._unusable(
                members,
                "the importance weight of {} is infinite (method.ratio_cap is null)",
                scored_B & weights_B.isinf(),
            )

    def _unusable(self, members: list[int], sentence: str, is_unusable_B: Tensor) -> str | None:
        if not is_unusable_B.any():
            return None
        return sentence.format(self._minibatch.trajectories[members[int(is_unusable_B.nonzero()[0, 0])]].name)

    def _token_weights(self, forward: _Forward) -> Tensor:
        """(K,) what multiplies each token's gradient inside its trajectory: the ratio at token level, else 1."""
        if self._spec.ratio_level == "token":
            return truncated_weights(forward.log_ratios_K, self._spec.ratio_cap)
        return torch.ones_like(forward.log_ratios_K)

    def _coefficients(self, members: list[int]) -> Tensor:
        """(B,) what multiplies each trajectory's gradient of (token weights times log-probabilities)."""
        coefficients_B = self._minibatch.advantages() * self._minibatch.factors_B
        if self._spec.ratio_level != "token":
            coefficients_B = coefficients_B * self.weights_B
        return coefficients_B[members]

    def _measure_and_backward(self, members: list[int]) -> None:
        """The plain way: a trajectory's coefficient is known with its log-ratio."""
        if self.problem is not None:
            self._only_measure(members)
            return
        forward = self._forward(members)
        self._measure(forward, members)
        if self.problem is None:
            self._backward(forward, members)

    def _backward(self, forward: _Forward, members: list[int]) -> None:
        lengths_B = torch.tensor(forward.batch.trained_B)
        coefficients_K = self._coefficients(members).repeat_interleave(lengths_B) * self._token_weights(forward)
        # the optimizer goes down: the gradient of minus the objective
        torch.autograd.backward(forward.logprobs_K, -coefficients_K.to(forward.logprobs_K))
        self._optimizer.collect()

    def _record(self, recorder: GradientRecorder, members: list[int], pending: list[_Pending]) -> list[_Pending]:
        """Record a microbatch, then use up every recording whose baselines are known. Returns the others."""
        if self.problem is not None:
            self._only_measure(members)
            return []
        trajectories = [self._minibatch.trajectories[i] for i in members]
        batch = pack(trajectories, self._device)
        layouts = [batch.lengths_B, batch.trained_B] if keeps_logits(self._model) else [batch.lengths_B]
        with recorder.capture(*layouts, device=self._device) as recording:
            forward = self._run_model(batch, members)
        self._measure(forward, members)
        if self.problem is not None:
            return []
        recording.backward(forward.logprobs_K, self._token_weights(forward))
        self._take_norms(members, recording.squared_norms().cpu())
        self._unseen_B[members] = False
        self._find_baselines()
        if self.problem is not None:
            return []
        waiting = []
        for item in [*pending, _Pending(members, recording)]:
            if self._minibatch.baselines_B[item.members].isnan().any():
                waiting.append(item)
            else:
                coefficients_B = self._coefficients(item.members).to(self._device)
                self._optimizer.accumulate(item.recording.gradients(-coefficients_B))
        return waiting

    def _run_one_by_one(self) -> None:
        """Norms by one backward pass per trajectory, then the gradient by packed passes."""
        for index in self._minibatch.active_B.nonzero()[:, 0].tolist():
            forward = self._forward([index])
            self._measure(forward, [index])
            if self.problem is None:
                self._take_norms([index], self._single_squared_norm(forward))
        self._unseen_B[:] = False
        if self.problem is None:
            self._find_baselines()
            for members in self._cut(self._minibatch.active_B):
                self._backward(self._forward(members), members)

    def _single_squared_norm(self, forward: _Forward) -> Tensor:
        weights_K = self._token_weights(forward).to(forward.logprobs_K)
        return reference.squared_norms(self._optimizer.parameters, [lambda: (weights_K * forward.logprobs_K).sum()])

    def _take_norms(self, members: list[int], squared_norms_B: Tensor) -> None:
        self.squared_norms_B[members] = squared_norms_B
        self.problem = self._unusable(members, _NOT_FINITE, ~squared_norms_B.isfinite())

    def _find_baselines(self) -> None:
        """The baselines of the sets of which every trajectory has its norm."""
        minibatch = self._minibatch
        is_open = torch.isin(minibatch.set_B, minibatch.set_B[self._unseen_B])
        chosen = minibatch.active_B & ~is_open & minibatch.baselines_B.isnan()
        if not chosen.any():
            return
        log_ratios_B = trajectory_log_ratios(self._spec.ratio_level, self.log_ratios_B, minibatch.trained_B)
        minibatch.baselines_B[chosen] = optimal_baselines(
            self._spec,
            minibatch.rewards_B[chosen],
            log_ratios_B[chosen],
            self.squared_norms_B[chosen],
            (minibatch.factors_B / minibatch.scales_B)[chosen],
            minibatch.set_B[chosen],
        )
