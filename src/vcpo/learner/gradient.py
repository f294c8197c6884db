"""The gradient of one minibatch, assembled microbatch by microbatch.

Without gradient norms a trajectory's coefficient is known when its log-ratio is, so each microbatch is one forward and
one backward pass. With them it waits for its baseline, which waits for the norms of all trajectories that share it:
their single gradients go into sums that lack the baseline, or their rows are kept (``vcpo.gradnorm.recorder``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vcpo.gradnorm.recorder import GradientRecorder, NormMode, Recording
from vcpo.gradnorm.sums import LateCoefficients
from vcpo.learner.forward import PolicyForward
from vcpo.learner.head import HeadResult, TokenWeights, add_head_gradients, run_head
from vcpo.learner.minibatch import Minibatch
from vcpo.learner.optimizer import MasterAdamW
from vcpo.learner.packing import PackedBatch, microbatches, pack, shares
from vcpo.learner.parallel import DataParallel
from vcpo.methods.advantages import optimal_baselines
from vcpo.methods.diagnostics import k3_terms
from vcpo.methods.ratios import sum_by_trajectory, trajectory_log_ratios, truncated_weights
from vcpo.methods.spec import MethodSpec

_Weigh = Callable[[list[int], Tensor], Tensor]
"""(members, their token log-ratios) to the weights of their tokens."""

_NOT_FINITE = "the gradient of {} is not finite"
_WAITING_ELEMENTS = 2**24  # of gradients that lack a baseline, beyond which a pass has the fewest groups possible


@dataclass(frozen=True)
class NormWay:
    """How norms are taken.

    recorder: ``None`` for one trajectory at a time. rows_may_be_kept: not with activation checkpointing.
    """

    recorder: GradientRecorder | None
    mode: NormMode
    rows_may_be_kept: bool


@dataclass(frozen=True)
class _Pending:
    """A recorded microbatch that waits for the baselines of its trajectories."""

    members: list[int]
    recording: Recording


class GradientAssembly:
    """Sums the gradient of a minibatch into an optimizer, and measures every trajectory on the way.

    Vectors over all trajectories of the minibatch (on every rank), float64 on the CPU:

    log_ratios_B: sequence log-ratios, un-truncated.
    weights_B: importance weight of each trajectory's gradient; at token level the mean of its tokens' weights.
    squared_norms_B: NaN where not needed.
    k3_B, truncated_B, entropies_B: sums over trained tokens of r - 1 - log r, of "the ratio is above the cap", and of
        the entropy in nats.

    packed_tokens: tokens that went through the model, prompts included.
    imprecise_norms: norms of one layer that needed another way because their token gradients nearly cancel.
    problem: why no update can be made of this minibatch, or ``None``. Once there is one, the rest is only measured.
    """

    def __init__(
        self,
        forward: PolicyForward,
        spec: MethodSpec,
        optimizer: MasterAdamW,
        norms: NormWay,
        parallel: DataParallel,
        temperature: float,
        max_tokens: int,
        minibatch: Minibatch,
    ) -> None:
        self._forward = forward
        self._spec = spec
        self._optimizer = optimizer
        self._norms = norms
        self._parallel = parallel
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._minibatch = minibatch
        self._device = optimizer.parameters[0].device
        self._unseen_B = minibatch.active_B.clone()
        self._fresh: list[int] = []
        self._pending: list[_Pending] = []
        count = len(minibatch.trajectories)
        self.log_ratios_B = torch.zeros(count, dtype=torch.float64)
        self.weights_B = torch.ones(count, dtype=torch.float64)
        self.squared_norms_B = torch.full((count,), torch.nan, dtype=torch.float64)
        self.k3_B, self.truncated_B, self.entropies_B = torch.zeros(3, count, dtype=torch.float64)
        self.packed_tokens = 0
        self.imprecise_norms = 0
        self.problem: str | None = None

    def run(self) -> None:
        """Go through the minibatch once."""
        minibatch = self._minibatch
        # trajectories that contribute nothing are measured like the others, but need no graph
        for members in self._cut((minibatch.trained_B > 0) & ~minibatch.active_B):
            self._only_measure(members)
            self._exchange()
        if self._spec.needs_norms:
            visit = self._single if self._norms.recorder is None else self._record
        else:
            visit = self._backward
        passes = self._cut(minibatch.active_B, one_by_one=visit == self._single)
        # a sharded model holds back the gradients of plain passes up to the last, which therefore has to be made
        must_go_on = self._parallel.needs_equal_passes and visit == self._backward
        for number, members in enumerate(passes, start=1):
            self._parallel.before_pass(is_last=number == len(passes))
            if self.problem is not None and not must_go_on:
                self._only_measure(members)
            else:
                visit(members)
            self._exchange()
            if self._spec.needs_norms and self.problem is None:
                self._find_baselines()
        self._parallel.after_passes()
        if self._pending and self.problem is None:
            raise RuntimeError("a baseline stayed unknown: the gradient would lack the trajectories that wait for it")
        totals = torch.tensor([self.packed_tokens, self.imprecise_norms], dtype=torch.float64)
        self.packed_tokens, self.imprecise_norms = (int(total) for total in self._parallel.sum(totals))

    def blame(self) -> str:
        """A sentence on a gradient that is not finite, with the name of the first trajectory whose own is not."""
        if not self._parallel.needs_equal_passes:
            for index in self._minibatch.active_B.nonzero()[:, 0].tolist():
                self._optimizer.begin()
                self._run(pack([self._minibatch.trajectories[index]], self._device), [index], self._token_weights)
                squares = [torch.linalg.vector_norm(g) for _, g in self._optimizer.take_single()]
                if not torch.stack(squares).isfinite().all():
                    return _NOT_FINITE.format(self._minibatch.trajectories[index].name)
        return "the gradient of the minibatch is not finite"

    def _cut(self, chosen_B: Tensor, one_by_one: bool = False) -> list[list[int]]:
        """The chosen trajectories of this rank as microbatches, in the order of their groups.

        Where passes must be equal in number, ranks with fewer get empty ones.
        """
        members: list[int] = chosen_B.nonzero()[:, 0].tolist()
        trajectories = [self._minibatch.trajectories[i] for i in members]
        lengths = [len(t.prompt_ids) + len(t.response_ids_T) for t in trajectories]
        sets = self._minibatch.set_B[members].tolist() if self._spec.needs_norms else None
        size = sum(p.numel() for p in self._optimizer.parameters)
        cuts = []
        for share in shares(lengths, self._parallel.size):
            runs = microbatches(
                [lengths[i] for i in share],
                1 if one_by_one else self._max_tokens,
                None if sets is None else [sets[i] for i in share],
                max(1, _WAITING_ELEMENTS // size),
            )
            cuts.append([[members[share[i]] for i in run] for run in runs])
        most = max(len(cut) for cut in cuts)
        return cuts[self._parallel.rank] + [[]] * (most - len(cuts[self._parallel.rank]))

    def _pack(self, members: list[int]) -> PackedBatch:
        return pack([self._minibatch.trajectories[i] for i in members], self._device)

    def _only_measure(self, members: list[int]) -> None:
        if not members and not self._parallel.needs_equal_passes:
            return
        with torch.no_grad():
            batch = self._pack(members or [self._shortest()])
            head = self._run_head(self._forward.rows(batch), batch, None, None)
        if members:
            self.measure(members, head.logprobs_K)
            self._measure_entropies(members, batch, head)

    def _shortest(self) -> int:
        """The trajectory for an empty pass."""
        chosen = self._minibatch.trained_B.nonzero()[:, 0].tolist()
        return min(chosen, key=lambda i: len(self._minibatch.trajectories[i].response_ids_T))  # type: ignore[no-any-return]

    def _run_head(
        self, rows_KD: Tensor, batch: PackedBatch, token_weights: TokenWeights | None, consumer: Any
    ) -> HeadResult:
        return run_head(
            rows_KD, self._forward.head, batch.targets_K, batch.trained_B, self._temperature, token_weights, consumer
        )

    def measure(self, members: list[int], logprobs_k: Tensor) -> Tensor:
        """Keep what the metrics and the coefficients need, and look for unusable numbers.

        Returns the token log-ratios, float64 on the CPU.
        """
        minibatch, level, cap = self._minibatch, self._spec.ratio_level, self._spec.ratio_cap
        trajectories = [minibatch.trajectories[i] for i in members]
        sampled_k = np.concatenate([t.logprobs_T[t.mask_T] for t in trajectories]).astype(np.float64)
        log_ratios_k = logprobs_k.double().cpu() - torch.from_numpy(sampled_k)
        lengths_B = minibatch.trained_B[members]
        log_ratios_B = sum_by_trajectory(log_ratios_k, lengths_B)
        if level == "token":
            weights_B = sum_by_trajectory(truncated_weights(log_ratios_k, cap), lengths_B) / lengths_B
            above_k = log_ratios_k > np.log(cap) if cap is not None else torch.zeros_like(log_ratios_k)
            self.truncated_B[members] = sum_by_trajectory(above_k.double(), lengths_B)
        else:
            weights_B = truncated_weights(trajectory_log_ratios(level, log_ratios_B, lengths_B), cap)
        self.log_ratios_B[members] = log_ratios_B
        self.weights_B[members] = weights_B
        self.k3_B[members] = sum_by_trajectory(k3_terms(log_ratios_k), lengths_B)
        self._fresh += members
        scored_B = minibatch.scored_B[members]
        if self.problem is None:
            self.problem = self._unusable(members, "the log-ratio of {} is NaN", scored_B & log_ratios_B.isnan())
        if self.problem is None:
            self.problem = self._unusable(
                members,
                "the importance weight of {} is infinite (method.ratio_cap is null)",
                scored_B & weights_B.isinf(),
            )
        return log_ratios_k

    def _measure_entropies(self, members: list[int], batch: PackedBatch, head: HeadResult) -> None:
        entropies_B = sum_by_trajectory(head.entropies_K.double().cpu(), torch.tensor(batch.trained_B))
        self.entropies_B[members] = entropies_B
        self.packed_tokens += sum(batch.lengths_B)

    def _unusable(self, members: list[int], sentence: str, is_unusable_B: Tensor) -> str | None:
        if not is_unusable_B.any():
            return None
        return sentence.format(self._minibatch.trajectories[members[int(is_unusable_B.nonzero()[0, 0])]].name)

    def _token_weights(self, members: list[int], log_ratios_k: Tensor) -> Tensor:
        """(k,) what multiplies each token's gradient inside its trajectory: the ratio at token level, else 1."""
        if self._spec.ratio_level == "token":
            return truncated_weights(log_ratios_k, self._spec.ratio_cap)
        return torch.ones_like(log_ratios_k)

    def _token_coefficients(self, members: list[int], log_ratios_k: Tensor) -> Tensor:
        """(k,) what multiplies each token's gradient; the optimizer goes down, hence minus the objective."""
        coefficients_B = (self._scales() * self._minibatch.advantages())[members]
        coefficients_k = coefficients_B.repeat_interleave(self._minibatch.trained_B[members])
        return -coefficients_k * self._token_weights(members, log_ratios_k)

    def _scales(self) -> Tensor:
        """(B,) what multiplies the advantage of each trajectory."""
        if self._spec.ratio_level == "token":
            return self._minibatch.factors_B
        return self._minibatch.factors_B * self.weights_B

    def _run(
        self, batch: PackedBatch, members: list[int], weigh: _Weigh, late: LateCoefficients | None = None
    ) -> HeadResult:
        """One plain forward and backward pass of sum_k u_k log pi_k into the parameters' ``grad``."""
        rows_KD = self._forward.rows(batch)
        layer = self._forward.head
        consumer = _SummingConsumer() if layer is not None and layer.weight.requires_grad else None
        visit = _Visit(self, members, weigh, late)
        head = self._run_head(rows_KD, batch, visit, consumer)
        visit.finish(head)
        gradient_KD = head.gradient_KD
        if gradient_KD is None and self._parallel.needs_equal_passes:
            gradient_KD = torch.zeros_like(rows_KD)
            if consumer is not None:
                weight = layer.weight.detach()
                consumer.total = {"weight": torch.zeros_like(weight), "bias": weight.new_zeros(len(weight))}
        if gradient_KD is not None:
            outputs = [rows_KD] if rows_KD.requires_grad else []
            if consumer is not None:
                attach: Any = _AttachGradients.apply
                outputs.append(attach(layer.weight, layer.bias, consumer.total))
            gradients = [gradient_KD if output is rows_KD else torch.ones_like(output) for output in outputs]
            torch.autograd.backward(outputs, gradients)
        return head

    def _backward(self, members: list[int]) -> None:
        """The plain way: a trajectory's coefficient is known with its log-ratio."""
        if members or self._parallel.needs_equal_passes:
            batch = self._pack(members or [self._shortest()])
            head = self._run(batch, members, self._token_coefficients)
            if members:
                self._measure_entropies(members, batch, head)
            self._optimizer.collect()

    def _record(self, members: list[int]) -> None:
        """One recorded pass: norms, and sums or rows that wait for the baselines."""
        recorder, minibatch = self._norms.recorder, self._minibatch
        assert recorder is not None
        if not members and not self._parallel.needs_equal_passes:
            return
        batch = self._pack(members or [self._shortest()])
        nothing = [0.0] * len(batch.trained_B)
        late = LateCoefficients(nothing.copy(), nothing, minibatch.set_B[members].tolist() or [-1])
        is_spread = any(
            count != late.sets.count(index)
            for index, count in Counter(minibatch.set_B[minibatch.active_B].tolist()).items()
            if index in late.sets
        )
        mode: NormMode = "single" if is_spread or not self._norms.rows_may_be_kept else self._norms.mode
        head_module = self._forward.head
        with recorder.record(
            *self._forward.layouts(batch),
            device=self._device,
            mode=mode,
            sums=self._optimizer.sums,
            late=late,
            delivers=head_module,
        ) as recording:
            rows_KD = self._forward.rows(batch)
            visit = _Visit(self, members, self._token_weights, late)
            consumer = _RecordingConsumer(recording, head_module) if head_module is not None else None
            head = self._run_head(rows_KD, batch, visit, consumer)
            visit.finish(head)
            gradient_KD = head.gradient_KD
            if gradient_KD is not None:
                recording.backward(rows_KD, gradient_KD)
            elif self._parallel.needs_equal_passes:
                torch.autograd.backward(rows_KD, torch.zeros_like(rows_KD))
        if members:
            self._measure_entropies(members, batch, head)
        if members and self.problem is None:
            self._take_norms(members, recording.squared_norms().cpu())
            self.imprecise_norms += recording.imprecise
            self._pending.append(_Pending(members, recording))

    def _single(self, members: list[int]) -> None:
        """One trajectory through autograd; its gradient goes into sums, as recorded ones do."""
        if not members:
            return
        sums = self._optimizer.sums
        late = LateCoefficients([0.0], [0.0], self._minibatch.set_B[members].tolist())
        batch = self._pack(members)
        head = self._run(batch, members, self._token_weights, late)
        self._measure_entropies(members, batch, head)
        if self.problem is None:
            squared_norm = torch.zeros(1, dtype=torch.float64)
            for name, gradient in self._optimizer.take_single():
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
                squared_norm += float(torch.linalg.vector_norm(gradient)) ** 2
                sums.add_single(name, gradient.shape, 0, gradient.view(-1), late, 0)
            self._take_norms(members, squared_norm)

    def _take_norms(self, members: list[int], squared_norms_B: Tensor) -> None:
        self.squared_norms_B[members] = squared_norms_B
        self.problem = self._unusable(members, _NOT_FINITE, ~squared_norms_B.isfinite())

    def fill_late(self, late: LateCoefficients, first: int, members: Sequence[int]) -> None:
        """c = -scale / sigma (R - b) = -scale / sigma (R - r) + (r - b) (-scale / sigma), where b comes later."""
        minibatch = self._minibatch
        slopes = -(self._scales() / minibatch.scales_B)[list(members)]
        fixed = slopes * (minibatch.rewards_B - minibatch.common_B)[list(members)]
        late.slope[first : first + len(members)] = slopes.tolist()
        late.fixed[first : first + len(members)] = fixed.tolist()

    def _exchange(self) -> None:
        """Let all ranks know what was measured of the trajectories of the latest pass."""
        fresh, self._fresh = self._fresh, []
        if self._parallel.size > 1:
            vectors = [
                self.log_ratios_B,
                self.weights_B,
                self.squared_norms_B,
                self.k3_B,
                self.truncated_B,
                self.entropies_B,
            ]
            # one row that tells what is known, and one more column that tells whether a rank has a problem
            table = torch.zeros(len(vectors) + 1, len(self.log_ratios_B) + 1, dtype=torch.float64)
            table[0, fresh] = 1
            table[0, -1] = float(self.problem is not None)
            table[1:, fresh] = torch.stack(vectors)[:, fresh]
            table = self._parallel.sum(table)
            known = table[0, :-1] > 0
            for vector, row in zip(vectors, table[1:, :-1], strict=True):
                vector[known] = row[known]
            self._unseen_B[known] = False
            if table[0, -1] > 0:
                self.problem = self._parallel.first(self.problem)
        else:
            self._unseen_B[fresh] = False

    def _find_baselines(self) -> None:
        """The baselines of the sets of which every trajectory has its norm, and what waited for them."""
        minibatch, sums = self._minibatch, self._optimizer.sums
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
        factors = dict(
            zip(
                minibatch.set_B[chosen].tolist(),
                (minibatch.common_B - minibatch.baselines_B)[chosen].tolist(),
                strict=True,
            )
        )
        for index, factor in factors.items():
            sums.close(index, factor)
        waiting = []
        for item in self._pending:
            if minibatch.baselines_B[item.members].isnan().any():
                waiting.append(item)
            else:
                coefficients_B = (-self._scales() * minibatch.advantages())[item.members].to(self._device)
                item.recording.add_kept_gradients(sums, coefficients_B)
        self._pending = waiting


class _Visit:
    """Measures trajectories as the output layer comes to them, and gives their tokens' weights."""

    def __init__(
        self, assembly: GradientAssembly, members: list[int], weigh: _Weigh, late: LateCoefficients | None
    ) -> None:
        self._assembly = assembly
        self._members = members
        self._weigh = weigh
        self._late = late
        self._rows = 0
        self._visited = 0

    def __call__(self, first: int, count: int, logprobs_k: Tensor) -> Tensor | None:
        members = self._members[first : first + count]
        self._rows += len(logprobs_k)
        self._visited = first + count
        if not members:  # an empty pass
            return torch.zeros_like(logprobs_k)
        log_ratios_k = self._assembly.measure(members, logprobs_k)
        if self._assembly.problem is not None:
            return None
        if self._late is not None:
            self._assembly.fill_late(self._late, first, members)
        return self._weigh(members, log_ratios_k).to(logprobs_k)

    def finish(self, head: HeadResult) -> None:
        """Measure the trajectories that came after an unusable one."""
        rest = self._members[self._visited :]
        if rest:
            self._assembly.measure(rest, head.logprobs_K[self._rows :])


class _SummingConsumer:
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


class _RecordingConsumer:
    """Hands the output layer's rows to a recording."""

    def __init__(self, recording: Recording, head: nn.Module) -> None:
        self._recording = recording
        self._head = head

    def rows(self, x_RD: Tensor, g_RV: Tensor, lengths: Sequence[int], first: int, is_everything: bool) -> None:
        # kept rows of several chunks would be the logits of the whole batch
        self._recording.deliver(self._head, x_RD, g_RV, lengths, first, may_keep=is_everything)

    def single(self, gradients: dict[str, Tensor], index: int) -> None:
        self._recording.deliver_single(self._head, gradients, index)


class _AttachGradients(torch.autograd.Function):
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
