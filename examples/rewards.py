"""Reward functions in TRL's form: ``f(prompts, completions, **columns) -> list[float | None]``.

Name them in a recipe or on the command line, with weights if they should not count alike::

    vcpo train RECIPE.yaml \
        'reward.reward_funcs=[examples/rewards.py:correct, examples/rewards.py:boxed]' \
        'reward.reward_weights=[1.0, 0.1]'

Columns are the fields of the data rows, one list each; chat prompts come with chat completions. A function may be
``async``, and returns ``None`` for a response that it cannot score.
"""

from typing import Any

from vcpo.tasks.answers import final_number, parse_number


def correct(completions: list[Any], gold: list[str], **columns: Any) -> list[float]:
    """1 if the response's number (boxed, or the last one) is the right answer. ``gold`` comes with the task gsm8k."""
    return [
        float(final_number(_text(completion)) == parse_number(answer))
        for completion, answer in zip(completions, gold, strict=True)
    ]


def boxed(completions: list[Any], **columns: Any) -> list[float]:
    """1 if the response gives its answer in the form that the prompt asks for, right or wrong."""
    return [float("\\boxed{" in _text(completion)) for completion in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
