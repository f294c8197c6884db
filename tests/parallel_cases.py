"""Two learner processes on this machine that run functions together, and the updates that their tests compare."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
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

from learner_cases import make_groups, make_model
from vcpo.config import TrainingSection
from vcpo.learner.learner import Learner, StepResult
from vcpo.learner.parallel import DataParallel, Replicated, Sharded
from vcpo.methods.spec import METHODS
from vcpo.records import Group

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
    spec: changes to the method. broken: of each step, trajectories whose sampler log-probabilities are NaN.
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

    def model(self) -> Any:
        model = make_model(self.family, self.tied, self.dtype)
        if self.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    def learner(self, kind: str) -> Learner:
        """kind: "one", "replicated" or "sharded"."""
        model = self.model()
        parallel: DataParallel | None = None
        if kind != "one":
            parallel = Replicated() if kind == "replicated" else Sharded(model)
        spec = replace(METHODS[self.method], **self.spec)
        training = TrainingSection.model_validate(
            {
                "learning_rate": 1e-2,
                "max_grad_norm": 0.05,
                "adam_epsilon": 1e-4,
                "max_tokens_per_microbatch": self.max_tokens,
                **self.options,
            }
        )
        return Learner(model, spec, training, 1.0, parallel)

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
    """weights: after the last step, whole, by name, the float32 masters among them."""

    weights: dict[str, np.ndarray]
    results: list[StepResult]


def outcome(case: Case, kind: str) -> Outcome:
    """Make the updates of a case in this process, as one of the ranks or alone."""
    learner = case.learner(kind)
    results = [learner.step(groups) for groups in case.minibatches()]
    return Outcome(whole_weights(learner), results)


def whole_weights(learner: Learner) -> dict[str, np.ndarray]:
    """The model's weights and what the optimizer keeps, gathered from all ranks."""
    tensors = dict(learner.model.named_parameters()) | learner.state()[1]
    return {name: whole(tensor).double().numpy() for name, tensor in tensors.items()}


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]
