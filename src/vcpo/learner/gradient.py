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

import torch
from torch import Tensor

from vcpo.gradnorm.recorder import GradientRecorder, NormMode, Recording
from vcpo.gradnorm.sums import LateCoefficients
from vcpo.learner.forward import PolicyForward
from vcpo.learner.head import HeadResult, TokenWeights, run_head
from vcpo.learner.head_gradients import AttachGradients, RecordingConsumer, SummingConsumer
from vcpo.learner.measurements import Measurements
from vcpo.learner.minibatch import Minibatch
from vcpo.learner.optimizer import MasterAdamW
from vcpo.learner.packing import PackedBatch, microbatches, pack, shares
from vcpo.learner.parallel import DataParallel
from vcpo.methods.advantages import optimal_baselines
from vcpo.methods.ratios import sum_by_trajectory
from vcpo.methods.spec import MethodSpec
from vcpo.methods.weighing import Weighing

_Weigh = Callable[[list[int], Weighing], Tensor]
"""(members, their weights) to what multiplies log pi of their tokens in the objective of a pass."""

_IS_NAN = "the log-ratio of {} is NaN"
_UNBOUNDED_WEIGHT = "the importance weight of {} is not finite (method.weight does not bound it)"
_UNBOUNDED_PENALTY = "the penalty of {} is not finite (its log-ratio is infinite, which method.penalty does not bound)"
_NOT_FINITE = "the gradient of {} is not finite"
WAITING_ELEMENTS = 2**24  # of gradients that lack a baseline, beyond which a pass has the fewest groups possible


@dataclass(frozen=True)
class NormWay:
    """How norms are taken.

    recorder: ``None`` for one trajectory at a time. rows_may_be_kept: not with activation checkpointing.
    always: also for a method that needs none; then they are the norms of the gradients as applied.
    """

    recorder: GradientRecorder | None
    mode: NormMode
    rows_may_be_kept: bool
    always: bool = False


@dataclass(frozen=True)
class _Pending:
    """A recorded microbatch that waits for the baselines of its trajectories."""

    members: list[int]
    recording: Recording


class GradientAssembly:
    """Sums the gradient of a minibatch into an optimizer, and measures every trajectory on the way.

    measured: what was measured of all trajectories of the minibatch (on every rank).
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
        self._pending: list[_Pending] = []
        self.measured = Measurements(minibatch, spec)
        self.packed_tokens = 0
        self.imprecise_norms = 0
        self.problem: str | None = minibatch.problem()

    def run(self) -> None:
        """Go through the minibatch once, or twice if the method must know all of it first."""
        minibatch = self._minibatch
        if self._spec.needs_preview and self.problem is None:
            self._preview()
        # trajectories that contribute nothing are measured like the others, but need no graph
        for members in self._cut((minibatch.trained_B > 0) & ~minibatch.active_B):
            self._only_measure(members)
            self._exchange()
        if self._spec.needs_norms:
            visit = self._single if self._norms.recorder is None else self._record
        else:
            visit = self._record_applied if self._norms.always else self._backward
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
        totals = self._parallel.sum(torch.cat([totals, self.measured.token_log_ratios_K]))
        self.packed_tokens, self.imprecise_norms = int(totals[0]), int(totals[1])
        self.measured.token_log_ratios_K = totals[2:]

    def blame(self) -> str:
        """A sentence on a gradient that is not finite, with the name of the first trajectory whose own is not."""
        if not self._parallel.needs_equal_passes:
            for index in self._minibatch.active_B.nonzero()[:, 0].tolist():
                self._optimizer.begin()
                self._run(pack([self._minibatch.trajectories[index]], self._device), [index], self._inner_weights)
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
                max(1, WAITING_ELEMENTS // size),
            )
            cuts.append([[members[share[i]] for i in run] for run in runs])
        most = max(len(cut) for cut in cuts)
        return cuts[self._parallel.rank] + [[]] * (most - len(cuts[self._parallel.rank]))

    def _pack(self, members: list[int]) -> PackedBatch:
        return pack([self._minibatch.trajectories[i] for i in members], self._device)

    def _preview(self) -> None:
        """One pass without gradients, for what the method's parts need of the whole minibatch."""
        measured = self.measured
        wants_energies = self._spec.baseline == "token_optimal"
        for members in self._cut(self._minibatch.scored_B):
            if members or self._parallel.needs_equal_passes:
                head, batch = self._look(members, wants_energies)
                if members:
                    measured.preview(members, head.logprobs_K, head.energies_K)
                    self.packed_tokens += sum(batch.lengths_B)
        log_ratios_B = measured.finish_preview(self._parallel)
        if self.problem is None:
            every = list(range(len(log_ratios_B)))
            self.problem = self._unusable(every, _IS_NAN, self._minibatch.scored_B & log_ratios_B.isnan())
        if self.problem is None:
            minibatch = self._minibatch
            everyone = list(range(len(minibatch.trajectories)))
            sentence = "the log-ratio of {} is infinite, so that method.reward_kl leaves it no finite reward"
            self.problem = self._unusable(everyone, sentence, minibatch.scored_B & minibatch.shaped_B.isinf())

    def _only_measure(self, members: list[int]) -> None:
        if members or self._parallel.needs_equal_passes:
            head, batch = self._look(members)
            if members:
                self.measure(members, head.logprobs_K)
                self._measure_entropies(members, batch, head)

    @torch.no_grad()
    def _look(self, members: list[int], wants_energies: bool = False) -> tuple[HeadResult, PackedBatch]:
        batch = self._pack(members or [self._shortest()])
        rows_KD = self._forward.rows(batch)
        return self._run_head(rows_KD, batch, None, None, wants_energies), batch

    def _shortest(self) -> int:
        """The trajectory for an empty pass."""
        chosen = self._minibatch.trained_B.nonzero()[:, 0].tolist()
        return min(chosen, key=lambda i: len(self._minibatch.trajectories[i].response_ids_T))  # type: ignore[no-any-return]

    def _run_head(
        self,
        rows_KD: Tensor,
        batch: PackedBatch,
        token_weights: TokenWeights | None,
        consumer: Any,
        wants_energies: bool = False,
    ) -> HeadResult:
        return run_head(
            rows_KD,
            self._forward.head,
            batch.targets_K,
            batch.trained_B,
            self._temperature,
            token_weights,
            consumer,
            wants_energies,
        )

    def measure(self, members: list[int], logprobs_k: Tensor) -> Weighing:
        """Keep what the metrics and the coefficients need, and look for unusable numbers."""
        weighing = self.measured.measure(members, logprobs_k)
        scored_B = self._minibatch.scored_B[members]
        if self.problem is None:
            is_nan_B = self.measured.log_ratios_B[members].isnan()
            self.problem = self._unusable(members, _IS_NAN, scored_B & is_nan_B)
        active_B = self._minibatch.active_B[members]
        if self.problem is None:
            self.problem = self._unusable(members, _UNBOUNDED_WEIGHT, active_B & ~weighing.weights_B.isfinite())
        if self.problem is None and weighing.penalty_N is not None:
            penalties_B = sum_by_trajectory(weighing.penalty_N, self._minibatch.trained_B[members])
            self.problem = self._unusable(members, _UNBOUNDED_PENALTY, active_B & ~penalties_B.isfinite())
        return weighing

    def _measure_entropies(self, members: list[int], batch: PackedBatch, head: HeadResult) -> None:
        entropies_B = sum_by_trajectory(head.entropies_K.double().cpu(), torch.tensor(batch.trained_B))
        self.measured.entropies_B[members] = entropies_B
        self.packed_tokens += sum(batch.lengths_B)

    def _unusable(self, members: list[int], sentence: str, is_unusable_B: Tensor) -> str | None:
        if not is_unusable_B.any():
            return None
        return sentence.format(self._minibatch.trajectories[members[int(is_unusable_B.nonzero()[0, 0])]].name)

    def _inner_weights(self, members: list[int], weighing: Weighing) -> Tensor:
        """(k,) what multiplies each token's gradient inside its trajectory."""
        return weighing.inner_N

    def _token_coefficients(self, members: list[int], weighing: Weighing) -> Tensor:
        """(k,) what multiplies each token's gradient; the optimizer goes down, hence minus the objective."""
        minibatch = self._minibatch
        lengths_B = minibatch.trained_B[members]
        weights_k = weighing.outer_B.repeat_interleave(lengths_B) * weighing.inner_N
        coefficients_k = weights_k * minibatch.token_advantages(members)
        if weighing.penalty_N is not None:
            coefficients_k = coefficients_k + weighing.penalty_N
        descending_k: Tensor = -minibatch.factors_B[members].repeat_interleave(lengths_B) * coefficients_k
        return descending_k

    def _scales(self) -> Tensor:
        """(B,) what multiplies the advantage of each trajectory."""
        scales_B: Tensor = self._minibatch.factors_B * self.measured.outer_B
        return scales_B

    def _run(
        self, batch: PackedBatch, members: list[int], weigh: _Weigh, late: LateCoefficients | None = None
    ) -> HeadResult:
        """One plain forward and backward pass of sum_k u_k log pi_k into the parameters' ``grad``."""
        rows_KD = self._forward.rows(batch)
        layer = self._forward.head
        consumer = SummingConsumer() if layer is not None and layer.weight.requires_grad else None
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
                attach: Any = AttachGradients.apply
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
        minibatch = self._minibatch
        late: LateCoefficients | None = None
        mode = self._norms.mode
        # sums are completed by one number per set, so baselines that differ within a set need all rows
        if not self._spec.opob_leave_one_out:
            count = max(len(members), 1)
            late = LateCoefficients([0.0] * count, [0.0] * count, minibatch.set_B[members].tolist() or [-1])
            is_spread = any(
                number != late.sets.count(index)
                for index, number in Counter(minibatch.set_B[minibatch.active_B].tolist()).items()
                if index in late.sets
            )
            mode = "single" if is_spread or not self._norms.rows_may_be_kept else mode
        recording = self._recorded(members, self._inner_weights, mode, late)
        if recording is not None and self.problem is None:
            self._take_norms(members, recording.squared_norms().cpu())
            self._pending.append(_Pending(members, recording))

    def _record_applied(self, members: list[int]) -> None:
        """One recorded pass for a method that needs no norms: those of the gradients as they are applied."""
        recording = self._recorded(members, self._token_coefficients, self._norms.mode, None)
        if recording is not None and self.problem is None:
            self._take_norms(members, recording.squared_norms().cpu())
            recording.add_kept_gradients(self._optimizer.sums, torch.ones(len(members), device=self._device))

    def _recorded(
        self, members: list[int], weigh: _Weigh, mode: NormMode, late: LateCoefficients | None
    ) -> Recording | None:
        """A recorded pass. late: for single gradients that go into sums; without it every row is kept."""
        recorder, head_module = self._norms.recorder, self._forward.head
        assert recorder is not None
        if not members and not self._parallel.needs_equal_passes:
            return None
        batch = self._pack(members or [self._shortest()])
        with recorder.record(
            *self._forward.layouts(batch),
            device=self._device,
            mode=mode,
            sums=None if late is None else self._optimizer.sums,
            late=late,
            delivers=head_module,
        ) as recording:
            rows_KD = self._forward.rows(batch)
            visit = _Visit(self, members, weigh, late)
            consumer = RecordingConsumer(recording, head_module) if head_module is not None else None
            head = self._run_head(rows_KD, batch, visit, consumer)
            visit.finish(head)
            gradient_KD = head.gradient_KD
            if gradient_KD is not None:
                recording.backward(rows_KD, gradient_KD)
            elif self._parallel.needs_equal_passes:
                torch.autograd.backward(rows_KD, torch.zeros_like(rows_KD))
        if not members:
            return None
        self._measure_entropies(members, batch, head)
        if self.problem is None:
            self.imprecise_norms += recording.imprecise
        return recording

    def _single(self, members: list[int]) -> None:
        """One trajectory through autograd; its gradient goes into sums, as recorded ones do."""
        if not members:
            return
        sums = self._optimizer.sums
        late = LateCoefficients([0.0], [0.0], self._minibatch.set_B[members].tolist())
        batch = self._pack(members)
        head = self._run(batch, members, self._inner_weights, late)
        self._measure_entropies(members, batch, head)
        if self.problem is None:
            squared_norm = torch.zeros(1, dtype=torch.float64)
            for name, gradient in self._optimizer.take_single():
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
                squared_norm += float(torch.linalg.vector_norm(gradient)) ** 2
                sums.add_single(name, gradient.shape, 0, gradient.view(-1), late, 0)
            self._take_norms(members, squared_norm)

    def _take_norms(self, members: list[int], squared_norms_B: Tensor) -> None:
        self.measured.squared_norms_B[members] = squared_norms_B
        self.problem = self._unusable(members, _NOT_FINITE, ~squared_norms_B.isfinite())

    def fill_late(self, late: LateCoefficients, first: int, members: Sequence[int]) -> None:
        """c = -scale / sigma (R - b) = -scale / sigma (R - r) + (r - b) (-scale / sigma), where b comes later."""
        minibatch = self._minibatch
        slopes = -(self._scales() / minibatch.scales_B)[list(members)]
        fixed = slopes * (minibatch.shaped_B - minibatch.common_B)[list(members)]
        late.slope[first : first + len(members)] = slopes.tolist()
        late.fixed[first : first + len(members)] = fixed.tolist()

    def _exchange(self) -> None:
        """Let all ranks know what was measured of the trajectories of the latest pass."""
        if self.measured.exchange(self._parallel, self.problem is not None):
            self.problem = self._parallel.first(self.problem)

    def _find_baselines(self) -> None:
        """The baselines of the sets of which every trajectory has its norm, and what waited for them."""
        minibatch, sums = self._minibatch, self._optimizer.sums
        measured = self.measured
        is_open = torch.isin(minibatch.set_B, minibatch.set_B[measured.unseen_B])
        chosen = minibatch.active_B & ~is_open & minibatch.baselines_B.isnan()
        if not chosen.any():
            return
        minibatch.baselines_B[chosen] = optimal_baselines(
            self._spec,
            minibatch.shaped_B[chosen],
            measured.outer_log_ratios_B[chosen],
            measured.outer_B[chosen].log(),
            measured.squared_norms_B[chosen],
            (minibatch.factors_B / minibatch.scales_B)[chosen],
            minibatch.set_B[chosen],
        )
        if not self._spec.opob_leave_one_out:
            missing_B = (minibatch.common_B - minibatch.baselines_B)[chosen].tolist()
            for index, factor in dict(zip(minibatch.set_B[chosen].tolist(), missing_B, strict=True)).items():
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
        weighing = self._assembly.measure(members, logprobs_k)
        if self._assembly.problem is not None:
            return None
        if self._late is not None:
            self._assembly.fill_late(self._late, first, members)
        return self._weigh(members, weighing).to(logprobs_k)

    def finish(self, head: HeadResult) -> None:
        """Measure the trajectories that came after an unusable one."""
        rest = self._members[self._visited :]
        if rest:
            self._assembly.measure(rest, head.logprobs_K[self._rows :])
