"""The engine of a task: one that decodes tokens, with environments between turns where the task has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.records import SamplingParams
from vcpo.sampler.protocol import Engine
from vcpo.sampler.torch_engine import TorchEngine
from vcpo.sampler.turns import TurnEngine
from vcpo.tasks.environment import EnvironmentTask, turn_rules


def make_engine(
    task: object,
    model: PreTrainedModel,
    params: SamplingParams,
    slots: int,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
    version: int = 0,
    in_rounds: bool = False,
) -> Engine:
    """A torch engine for requests of ``task``; the rest is as for ``TorchEngine`` and ``with_turns``."""

    def torch_engine(params: SamplingParams) -> Engine:
        return TorchEngine(model, params, slots, max_length, tokenizer, version)

    return with_turns(task, torch_engine, params, tokenizer, in_rounds)


def with_turns(
    task: object,
    decoder: Callable[[SamplingParams], Engine],
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    in_rounds: bool = False,
) -> Engine:
    """The engine that ``decoder`` makes, with turns around it if the task has environments.

    task: only whether it is an ``EnvironmentTask`` matters, and its environments and rules; anything else, ``None``
        included, has single turns. in_rounds: see ``TurnEngine``.
    """
    if not isinstance(task, EnvironmentTask):
        return decoder(params)
    stop_strings = dict.fromkeys([*params.stop_strings, *turn_rules(task).stop_strings])
    inner = decoder(replace(params, stop_strings=tuple(stop_strings)))
    return TurnEngine(inner, task, tokenizer, params.max_tokens, in_rounds, template_kwargs=params.template_kwargs)
