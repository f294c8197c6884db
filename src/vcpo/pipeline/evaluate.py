"""Accuracy and reward on held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.config import EvalSection, SamplingSection
from vcpo.errors import UserError
from vcpo.pipeline.grading import Grading
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import Group, SamplingParams
from vcpo.sampler.engines import make_engine
from vcpo.sampler.protocol import generate
from vcpo.tasks.environment import EnvironmentTask
from vcpo.tasks.prompts import encode_prompt
from vcpo.tasks.protocol import Task

# group ids of evaluation, far from those of training, so that the two never share a sampling seed
_FIRST_GROUP_ID = 1 << 40


@dataclass(frozen=True)
class EvalResult:
    """Metrics of one evaluation and the graded groups behind them."""

    metrics: dict[str, float]
    groups: list[Group]


class Evaluator:
    """Evaluates a model on always the same problems with always the same sampling seeds."""

    def __init__(
        self,
        task: Task,
        grading: Grading,
        tokenizer: PreTrainedTokenizerBase,
        section: EvalSection,
        sampling: SamplingSection,
        stop_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self._task = task
        self._grading = grading
        self._tokenizer = tokenizer
        self._section = section
        self._sampling = sampling
        self._params = SamplingParams(
            max_tokens=sampling.max_completion_length,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            stop_token_ids=tuple(stop_token_ids),
            stop_strings=tuple(sampling.stop_strings),
        )
        self._seed = seed
        self._groups: list[StartedGroup] = []
        self._too_long = 0
        for number, problem in enumerate(task.eval_problems(section.num_problems)):
            prompt_ids = encode_prompt(tokenizer, problem)
            if len(prompt_ids) > sampling.max_prompt_length:
                self._too_long += 1
                continue
            in_environments = isinstance(task, EnvironmentTask)
            self._groups.append(StartedGroup(_FIRST_GROUP_ID + number, problem, prompt_ids, 0, in_environments))
        if not self._groups:
            raise UserError(
                f"there is no evaluation problem with a prompt of at most {sampling.max_prompt_length} tokens"
                f" ({self._too_long} are longer): raise sampling.max_prompt_length, or give the task evaluation data"
            )

    def run(self, model: PreTrainedModel, progress: Any = None) -> EvalResult:
        """Sample and grade. ``progress`` is called with the number of responses finished and asked for."""
        section = self._section
        engine = make_engine(
            self._task,
            model,
            self._params,
            slots=self._sampling.slots,
            max_length=self._sampling.max_prompt_length + self._params.max_tokens,
            tokenizer=self._tokenizer,
            in_rounds=True,  # for the same responses every time
        )
        requests = [r for group in self._groups for r in group.requests(section.num_generations, self._seed)]
        trajectories = generate(engine, requests, progress)
        size = section.num_generations
        groups = self._grading.grade_all(
            [(group, trajectories[i * size : (i + 1) * size]) for i, group in enumerate(self._groups)]
        )
        return EvalResult(self._metrics(groups), groups)

    def _metrics(self, groups: list[Group]) -> dict[str, float]:
        grades = [t.grade for group in groups for t in group.trajectories if t.grade is not None]
        rewards = [g.reward for g in grades if g.reward is not None]
        correct = np.array([[t.grade is not None and t.grade.correct for t in g.trajectories] for g in groups])
        lengths = [len(t.response_ids_T) for g in groups for t in g.trajectories]
        per_problem = correct.mean(axis=1)
        return {
            "accuracy": float(per_problem.mean()),
            # the spread over problems, which are the independent unit; their responses are not
            "accuracy_stderr": float(per_problem.std(ddof=1) / np.sqrt(len(per_problem))) if len(groups) > 1 else 0.0,
            "reward": float(np.mean(rewards)) if rewards else float("nan"),
            "unscored": float(len(grades) - len(rewards)),
            "response_length": float(np.mean(lengths)),
            "length_limited_share": float(np.mean([t.stop_reason == "length" for g in groups for t in g.trajectories])),
            "problems": float(len(groups)),
            "problems_too_long": float(self._too_long),
        }
