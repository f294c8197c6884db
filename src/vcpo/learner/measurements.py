"""What is measured of every trajectory of a minibatch while its gradient is made."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vcpo.learner.minibatch import Minibatch
from vcpo.learner.parallel import DataParallel
from vcpo.methods.diagnostics import k3_terms
from vcpo.methods.ratios import TokenRatios, sum_by_trajectory
from vcpo.methods.spec import MethodSpec
from vcpo.methods.weighing import Statistics, Weighing, batch_statistics, weigh


class Measurements:
    """Vectors over all trajectories of the minibatch, float64 on the CPU; complete on every rank after ``exchange``.

    log_ratios_B: sequence log-ratios, un-truncated.
    outer_B, outer_log_ratios_B, weights_B, reduced_B, dropped_B: see ``Weighing``.
    squared_norms_B: NaN where not taken.
    k3_B, entropies_B: sums over trained tokens of r - 1 - log r and of the entropy in nats.
    token_log_ratios_K: of this rank's trajectories, 0 elsewhere.
    ratios_are_of_tokens: whether ``reduced_B`` counts tokens; otherwise it is 0 or 1.
    unseen_B: active trajectories that have not been measured.
    """

    def __init__(self, minibatch: Minibatch, spec: MethodSpec) -> None:
        self._minibatch = minibatch
        self._spec = spec
        self._statistics = Statistics()
        self._fresh: list[int] = []
        self.unseen_B = minibatch.active_B.clone()
        count, tokens = len(minibatch.trajectories), int(minibatch.trained_B.sum())
        self.log_ratios_B = torch.zeros(count, dtype=torch.float64)
        self.outer_B, self.weights_B = torch.ones(2, count, dtype=torch.float64)
        self.outer_log_ratios_B, self.reduced_B, self.dropped_B = torch.zeros(3, count, dtype=torch.float64)
        self.k3_B, self.entropies_B = torch.zeros(2, count, dtype=torch.float64)
        self.squared_norms_B = torch.full((count,), torch.nan, dtype=torch.float64)
        self.token_log_ratios_K = torch.zeros(tokens, dtype=torch.float64)
        self.ratios_are_of_tokens = spec.ratio_level == "token"
        self._previewed: dict[str, Tensor] = {}

    def preview(self, members: list[int], logprobs_k: Tensor, energies_k: Tensor | None) -> None:
        """Keep what the method needs of some trajectories before any gradient is made."""
        where = self._minibatch.tokens_of(members)
        values = {"log_ratios": self._log_ratios(members, logprobs_k), "logprobs": logprobs_k}
        if energies_k is not None:
            values["energies"] = energies_k
        for name, values_k in values.items():
            table = self._previewed.setdefault(name, torch.zeros_like(self.token_log_ratios_K))
            table[where] = values_k.double().cpu()

    def finish_preview(self, parallel: DataParallel) -> Tensor:
        """All trajectories have been looked at on some rank: shape the rewards and find the parts' statistics.

        Returns the (B,) sequence log-ratios.
        """
        minibatch = self._minibatch
        names = ["log_ratios", "logprobs", *(["energies"] if self._spec.baseline == "token_optimal" else [])]
        nothing = torch.zeros_like(self.token_log_ratios_K)
        table = parallel.sum(torch.stack([self._previewed.pop(name, nothing) for name in names]))
        log_ratios_K, logprobs_K = table[:2]
        log_ratios_B = sum_by_trajectory(log_ratios_K, minibatch.trained_B)
        if self._spec.reward_kl > 0:
            minibatch.penalize(log_ratios_B)
        if self._spec.baseline == "token_optimal":
            minibatch.find_token_baselines(table[2])
        scored = minibatch.scored_B.nonzero()[:, 0].tolist()
        where = minibatch.tokens_of(scored)
        self._statistics = batch_statistics(
            self._spec,
            TokenRatios(
                log_ratios_K[where],
                logprobs_K[where],
                minibatch.trained_B[scored],
                minibatch.token_advantages(scored).sign(),
            ),
        )
        return log_ratios_B

    def measure(self, members: list[int], logprobs_k: Tensor) -> Weighing:
        """Keep what the metrics and the coefficients need of some trajectories."""
        minibatch = self._minibatch
        where, lengths_B = minibatch.tokens_of(members), minibatch.trained_B[members]
        log_ratios_k = self._log_ratios(members, logprobs_k)
        sign_k = minibatch.token_advantages(members).sign()
        tokens = TokenRatios(log_ratios_k, logprobs_k.double().cpu(), lengths_B, sign_k)
        weighing = weigh(self._spec, tokens, self._statistics)
        self.token_log_ratios_K[where] = log_ratios_k
        self.log_ratios_B[members] = tokens.sum_log_ratios_B
        self.outer_B[members] = weighing.outer_B
        self.outer_log_ratios_B[members] = weighing.log_ratios_B
        self.weights_B[members] = weighing.weights_B
        self.reduced_B[members] = weighing.reduced_B
        self.dropped_B[members] = weighing.dropped_B
        self.k3_B[members] = sum_by_trajectory(k3_terms(log_ratios_k), lengths_B)
        self._fresh += members
        return weighing

    def exchange(self, parallel: DataParallel, has_problem: bool) -> bool:
        """Let all ranks know what was measured since the last call; whether another rank has a problem."""
        fresh, self._fresh = self._fresh, []
        if parallel.size == 1:
            self.unseen_B[fresh] = False
            return False
        vectors = [
            self.log_ratios_B,
            self.outer_B,
            self.outer_log_ratios_B,
            self.weights_B,
            self.reduced_B,
            self.dropped_B,
            self.squared_norms_B,
            self.k3_B,
            self.entropies_B,
        ]
        # one row that tells what is known, and one more column that tells whether a rank has a problem
        table = torch.zeros(len(vectors) + 1, len(self.log_ratios_B) + 1, dtype=torch.float64)
        table[0, fresh] = 1
        table[0, -1] = float(has_problem)
        table[1:, fresh] = torch.stack(vectors)[:, fresh]
        table = parallel.sum(table)
        known = table[0, :-1] > 0
        for vector, row in zip(vectors, table[1:, :-1], strict=True):
            vector[known] = row[known]
        self.unseen_B[known] = False
        return bool(table[0, -1] > 0)

    def drops_everything(self) -> bool:
        """Whether the method leaves no token a gradient that has one by its advantage."""
        # an advantage of 0 leaves a trajectory nothing, whatever its weight
        active = self._minibatch.active_B & (self._minibatch.advantages() != 0)
        kept_B = self._minibatch.trained_B - self.dropped_B
        return self._spec.penalty is None and bool(active.any()) and not bool((kept_B[active] > 0).any())

    def _log_ratios(self, members: list[int], logprobs_k: Tensor) -> Tensor:
        trajectories = [self._minibatch.trajectories[i] for i in members]
        sampled_k = np.concatenate([t.logprobs_T[t.mask_T] for t in trajectories]).astype(np.float64)
        return logprobs_k.double().cpu() - torch.from_numpy(sampled_k)
