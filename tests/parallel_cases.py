"""Two learner processes on this machine that run functions together, and the updates that their tests compare."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from learner_cases import make_groups, make_model
from test_learner_failures import break_backward
from vcpo.config import TrainingSection
from vcpo.errors import UserError
from vcpo.gradnorm.recorder import GradientRecorder
from vcpo.learner.forward import trained_token_logits
from vcpo.learner.learner import Learner, StepResult
from vcpo.learner.packing import pack
from vcpo.learner.parallel import DataParallel, Replicated, Sharded
from vcpo.methods.spec import METHODS
from vcpo.records import Group, Trajectory

_COLLECTIVE_SECONDS = 20.0  # after which a rank that waits for the other gives up
_CALL_SECONDS = 60.0


class Ranks:
    """Processes that wait for a function and run it at the same time, as ranks of one gloo group."""

    def __init__(self, directory: Path, size: int = 2, collective_seconds: float = _COLLECTIVE_SECONDS) -> None:
        self._directory = directory
        self._size = size
        self._collective_seconds = collective_seconds
        self._starts = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        rendezvous = str(self._directory / f"rendezvous-{self._starts}")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rendezvous, rank, self._size, self._collective_seconds)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank. Raises RuntimeError with the traceback of a rank that failed."""
        answers = self.answers(function, *arguments)
        if not all(is_good for is_good, _ in answers):
            self.close()  # the next call starts others
        for rank, (is_good, answer) in enumerate(answers):
            if not is_good:
                raise RuntimeError(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """For each rank: (True, what the function returned) or (False, how it failed)."""
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(_CALL_SECONDS):
                self.close()
                raise TimeoutError(f"no answer in {_CALL_SECONDS} seconds")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, "the process has ended"))
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, rendezvous: str, rank: int, size: int, collective_seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collective_seconds),
    )
    with suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = (True, function(*arguments))
            except Exception:
                answer = (False, traceback.format_exc())
            pipe.send(answer)


@dataclass(frozen=True)
class Case:
    """Some updates of a tiny model.

    rewards: of each group of a step; the groups of the steps differ in everything else.
    spec, options: changes to the method and to the training section.
    broken: of each step, trajectories whose sampler log-probabilities are NaN.
    frozen: beginning of the names of parameters that are not trained.
    unknown_layer: whether a layer is of a type without a rule.
    """

    method: str = "vcpo"
    rewards: Sequence[Sequence[float | None]] = ((1, 0, 0, 1), (0.5, 0.5, 0.5), (0, 1, None, 2.0), (1, 0), (3.0,))
    steps: int = 2
    family: str = "gpt2"
    tied: bool = True
    dtype: torch.dtype = torch.float64
    max_tokens: int = 45
    spec: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    broken: Sequence[Sequence[int]] = ()
    checkpointing: bool = False
    frozen: str | None = None
    unknown_layer: bool = False

    def model(self) -> Any:
        model: Any = make_model(self.family, self.tied, self.dtype)
        if self.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for name, parameter in model.named_parameters():
            if self.frozen is not None and name.startswith(self.frozen):
                parameter.requires_grad_(False)
        if self.unknown_layer:
            layer = model.transformer.h[0].mlp.c_proj
            known = type(layer)
            layer.__class__ = type("Renamed", (known,), {"forward": lambda self, x: known.forward(self, x)})
        return model

    def learner(self, kind: str, weights: dict[str, torch.Tensor] | None = None) -> Learner:
        """kind: "one", "replicated" or "sharded". weights: other than the model's initial ones."""
        model = self.model()
        if weights is not None:
            model.load_state_dict(weights, strict=False)
        parallel: DataParallel | None = None
        if kind != "one":
            parallel = Replicated() if kind == "replicated" else Sharded(model)
        training: dict[str, Any] = {
            "learning_rate": 1e-2,
            "max_grad_norm": 0.05,  # always clips, for which the norm of the whole gradient has to be right
            "adam_epsilon": 1e-4,
            "max_tokens_per_microbatch": self.max_tokens,
        }
        section = TrainingSection.model_validate(training | self.options)
        return Learner(model, replace(METHODS[self.method], **self.spec), section, 1.0, parallel)

    def minibatches(self) -> list[list[Group]]:
        model = make_model(self.family, self.tied)
        minibatches = []
        for step in range(self.steps):
            groups = make_groups(model, self.rewards, seed=step, drift=1.0)
            trajectories = [t for group in groups for t in group.trajectories]
            for index in self.broken[step] if step < len(self.broken) else ():
                trajectories[index].logprobs_T[:] = np.nan
            minibatches.append(groups)
        return minibatches


@dataclass(frozen=True)
class Outcome:
    """weights: after the last step, whole, by name; so are the moments and master copies of the optimizer."""

    weights: dict[str, np.ndarray]
    results: list[StepResult]


def outcome(case: Case, kind: str) -> Outcome:
    """Make the updates of a case in this process, as one of the ranks or alone."""
    learner = case.learner(kind)
    results = [learner.step(groups) for groups in case.minibatches()]
    return Outcome(_numbers(learner), results)


def outcome_of_resumed(case: Case, kind: str, later: str) -> Outcome:
    """The same with a new learner of kind ``later`` from the second step on."""
    first, *rest = case.minibatches()
    learner = case.learner(kind)
    results = [learner.step(first)]
    numbers, tensors = learner.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed = case.learner(later, _whole_weights(learner))
    resumed.load_state(numbers, tensors)
    results += [resumed.step(groups) for groups in rest]
    return Outcome(_numbers(resumed), results)


def _whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    weights: dict[str, Any] = {name: p.detach() for name, p in learner.model.named_parameters()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in weights.items()}


def _numbers(learner: Learner) -> dict[str, np.ndarray]:
    tensors = _whole_weights(learner) | learner.state()[1]
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


class _Collectives(TorchDispatchMode):
    """Counts calls of collectives by kind, those that distributed tensors make of an operation among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if "c10d" in func.namespace and not any(word in str(func) for word in ("wait", "wrap")):
            name = str(func).replace("_", "")
            self.counts[next((k for k in ("allgather", "reducescatter", "allreduce") if k in name), name)] += 1
        return func(*args, **kwargs or {})


def communication(case: Case, kind: str) -> tuple[int, Counter[str]]:
    """The forward passes of one step, and how often each kind of collective runs in it."""
    learner = case.learner(kind)
    (groups,) = case.minibatches()
    passes: list[int] = []
    learner.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with _Collectives() as collectives:
        learner.step(groups)
    return len(passes), collectives.counts


def refusal(case: Case, kind: str) -> str:
    """The sentence with which the learner refuses a case."""
    try:
        case.learner(kind)
    except UserError as error:
        return str(error)
    return "accepted"


def step_with_broken_backward(case: Case, kind: str) -> tuple[str | None, list[tuple[np.ndarray, np.ndarray]]]:
    """Why a step was skipped in which the gradient of one trajectory is NaN, and all weights before and after it."""
    learner = case.learner(kind)
    groups = case.minibatches()[0]
    groups[0].trajectories[2].prompt_ids[0] = 0  # a token that occurs nowhere else
    break_backward(learner.model, token=0)
    before = {name: tensor.numpy().copy() for name, tensor in _whole_weights(learner).items()}
    skipped = learner.step(groups).skipped
    return skipped, [(before[name], tensor.numpy()) for name, tensor in _whole_weights(learner).items()]


def step_in_which_a_rank_dies(case: Case, kind: str) -> None:
    """Rank 1 ends without a word in its second forward pass."""
    learner = case.learner(kind)
    if dist.get_rank() == 1:
        passes: list[int] = []

        def die(*_: Any) -> None:
            passes.append(1)
            if len(passes) == 2:
                os._exit(1)

        learner.model.register_forward_pre_hook(die)
    learner.step(case.minibatches()[0])


def recorded_under_ddp() -> tuple[bool, list[float], dict[str, np.ndarray]]:
    """Norms and a gradient of this rank's half of some trajectories, with the gradient summed over ranks.

    Also whether no parameter has a ``grad`` afterwards.
    """
    model = DistributedDataParallel(make_model("gpt2"))
    recorder = GradientRecorder(model)
    with model.no_sync():
        norms, gradient = recorded(recorder, model, ddp_trajectories()[dist.get_rank() :: 2])
    for total in gradient.values():
        dist.all_reduce(total)
    untouched = all(p.grad is None for p in model.parameters())
    return untouched, norms, {name.removeprefix("module."): total.numpy() for name, total in gradient.items()}


def ddp_trajectories() -> list[Trajectory]:
    return [t for group in make_groups(make_model("gpt2"), ((1, 0, 0), (1, 0, 1))) for t in group.trajectories]


def recorded(
    recorder: GradientRecorder, model: Any, trajectories: Sequence[Trajectory]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Squared gradient norms of the trajectories' log-probabilities, and their gradient with some coefficients."""
    device = torch.device("cpu")
    batch = pack(trajectories, device)
    with recorder.record(batch.lengths_B, batch.trained_B, device=device) as recording:
        logits = trained_token_logits(model, batch)
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, batch.targets_K[:, None])
        recording.backward(logprobs, torch.ones_like(logprobs))
    coefficients = torch.tensor([t.grade.reward - 0.3 for t in trajectories])  # type: ignore[union-attr,operator]
    return recording.squared_norms().tolist(), dict(recording.kept_gradients(coefficients))
