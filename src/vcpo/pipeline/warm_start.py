"""A short supervised phase on generated demonstrations, so that a small new model is right sometimes.

Its result depends only on the model, the demonstrations, the phase's own options, the seed and the number of threads,
and is cached under their hash: runs that differ in method or staleness share one warm start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import vcpo
from vcpo.cache import cache_directory
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.learner.forward import trained_token_logits
from vcpo.learner.packing import pack
from vcpo.models.encoding import unknown_characters
from vcpo.pipeline.snapshots import assign
from vcpo.records import Problem, StopReason, Trajectory
from vcpo.tasks.prompts import encode_prompt
from vcpo.tasks.protocol import DemonstratedTask, Task

_HASHED_DEMONSTRATIONS = 32  # enough to notice that the code or the data of a user's task has changed
_WARM_UP = 20  # steps over which the learning rate rises; it then falls linearly to 0


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: RunConfig,
    report: Callable[[int, int, str], None],
    note: Callable[[str], None],
) -> None:
    """Train the model in place on noisy demonstrations, or take the cached result.

    report: called with steps done, steps in all, and the loss.
    Raises UserError when the task has no demonstrations, or ones that the tokenizer cannot represent.
    """
    if not isinstance(task, DemonstratedTask):
        raise UserError(
            f"task {config.task.name!r} has no demonstrations for a warm start: set warm_start.steps=0, or give the"
            " task a method demonstration(problem, rng) -> str"
        )
    path = cache_directory() / "warm-start" / f"{_content_hash(config, task)}.safetensors"
    cached = _read_cache(path, model, note)
    if cached is not None:
        assign(model, cached)
        note(f"warm start: from cache ({path})")
        return
    _fit(model, tokenizer, task, config, report)
    _store(path, {name: p.detach().cpu() for name, p in model.named_parameters()}, note)


def _read_cache(path: Path, model: PreTrainedModel, note: Callable[[str], None]) -> dict[str, torch.Tensor] | None:
    """The cached parameters; ``None`` when there are none, or the file is unreadable or not of this model."""
    if not os.path.exists(path):  # False also below a directory that may not be read, where Path.exists raises
        return None
    try:
        tensors = load_file(path, device=str(model.device))
    except (SafetensorError, OSError) as error:
        note(f"warm start: the cached file {path} cannot be read ({error}) and is made again")
        return None
    if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in model.named_parameters()}:
        note(f"warm start: the cached file {path} does not fit the model and is made again")
        return None
    return tensors


def _content_hash(config: RunConfig, task: DemonstratedTask) -> str:
    rng = random.Random(config.seed)
    problems = [_problem(task, position, config.seed) for position in range(_HASHED_DEMONSTRATIONS)]
    demonstrations = [(problem.prompt, task.demonstration(problem, rng)) for problem in problems]
    plain = config.to_plain()
    identity = {key: plain[key] for key in ("seed", "model", "task", "warm_start")}
    identity |= {"versions": [vcpo.__version__, torch.__version__], "threads": torch.get_num_threads()}
    identity["demonstrations"] = demonstrations
    if config.sampling.chat_template_kwargs:
        identity["chat_template_kwargs"] = config.sampling.chat_template_kwargs
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def _fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: DemonstratedTask,
    config: RunConfig,
    report: Callable[[int, int, str], None],
) -> None:
    section = config.warm_start
    rng = random.Random(config.seed)
    noise = np.random.default_rng(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=section.learning_rate)
    position = 0
    for step in range(section.steps):
        batch = [_demonstration(tokenizer, task, position + i, config, rng) for i in range(section.batch_size)]
        position += section.batch_size
        _corrupt(batch, section.noise, noise)
        rising, falling = (step + 1) / _WARM_UP, (section.steps - step) / section.steps
        optimizer.param_groups[0]["lr"] = section.learning_rate * min(1.0, rising, falling)
        packed = pack(batch, model.device)
        loss = F.cross_entropy(trained_token_logits(model, packed).float(), packed.targets_K)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step + 1, section.steps, f"loss {loss.item():.3f}")
    model.zero_grad(set_to_none=True)


def _demonstration(
    tokenizer: PreTrainedTokenizerBase, task: DemonstratedTask, position: int, config: RunConfig, rng: random.Random
) -> Trajectory:
    problem = _problem(task, position, config.seed)
    prompt_ids = encode_prompt(tokenizer, problem, config.sampling.chat_template_kwargs)
    text = task.demonstration(problem, rng)
    unknown = unknown_characters(tokenizer, text)
    if unknown:
        raise UserError(
            f"problem {problem.id!r}: the tokenizer has no token for {', '.join(map(repr, unknown))} in the"
            f" demonstration {text[:60]!r}; add what is missing to model.init.characters"
        )
    answer: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    response = np.array([*answer, tokenizer.eos_token_id], dtype=np.int64)
    return Trajectory(
        group_id=position,
        index=0,
        prompt_ids=prompt_ids,
        response_ids_T=response,
        mask_T=np.ones(len(response), dtype=np.bool_),
        logprobs_T=np.zeros(len(response), dtype=np.float32),
        versions_T=np.zeros(len(response), dtype=np.int64),
        stop_reason=StopReason.EOS,
        start_version=0,
    )


def _problem(task: Task, position: int, seed: int) -> Problem:
    # positions from the far end of the data, so that reinforcement learning meets other problems
    return task.train_problem((1 << 40) + position, seed)


def _corrupt(batch: list[Trajectory], probability: float, rng: np.random.Generator) -> None:
    """Replace answer tokens by random ones of those that occur in the batch's answers; the end token stays."""
    if not probability:
        return
    alphabet = np.unique(np.concatenate([t.response_ids_T[:-1] for t in batch]))
    for trajectory in batch:
        answer = trajectory.response_ids_T[:-1]
        wrong = rng.random(len(answer)) < probability
        answer[wrong] = rng.choice(alphabet, wrong.sum())


def _store(path: Path, tensors: dict[str, torch.Tensor], note: Callable[[str], None]) -> None:
    beside = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # two runs may make the same warm start at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside)
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        note(f"warm start: could not be cached in {path.parent} ({error}); the run goes on")
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
