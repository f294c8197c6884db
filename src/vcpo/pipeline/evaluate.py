"""Accuracy and reward on held-out problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.config import EvalSection, SamplingSection
from vcpo.errors import UserError
from vcpo.pipeline.eval_metrics import logged_k, majority_correct, mean_correct, pass_at_k
from vcpo.pipeline.grading import Grading
from vcpo.pipeline.rollouts import StartedGroup
from vcpo.records import GenerationRequest, Group, SamplingParams, Trajectory
from vcpo.sampler.engines import make_engine
from vcpo.sampler.protocol import generate
from vcpo.tasks.environment import EnvironmentTask, tool_schemas
from vcpo.tasks.prompts import encode_prompt
from vcpo.tasks.protocol import AnsweringTask, Task

# group ids of evaluation, far from those of training, so that the two never share a sampling seed
_FIRST_GROUP_ID = 1 << 40


@dataclass(frozen=True)
class EvalResult:
    """Metrics of one evaluation and the graded groups behind them.

    answers: what every response of every group answers, for tasks that can tell (``AnsweringTask``).
    """

    metrics: dict[str, float]
    groups: list[Group]
    answers: list[list[str | None]] | None

    def per_problem(self) -> dict[str, list[float]]:
        """The values of every problem whose means are the metrics: accuracy, pass@k for all k, and maj@n."""
        correct = [[t.grade is not None and t.grade.correct for t in group.trajectories] for group in self.groups]
        n = len(correct[0])
        values = {"accuracy": [mean_correct(row) for row in correct]}
        for k in range(1, n + 1):
            values[f"pass_at_{k}"] = [pass_at_k(row, k) for row in correct]
        if self.answers is not None and n > 1:
            pairs = zip(self.answers, correct, strict=True)
            values[f"maj_at_{n}"] = [majority_correct(answers, row) for answers, row in pairs]
        return values


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
            template_kwargs=sampling.chat_template_kwargs,
        )
        self._seed = seed
        self._groups: list[StartedGroup] = []
        self._too_long = 0
        for number, problem in enumerate(task.eval_problems(section.num_problems)):
            prompt_ids = encode_prompt(tokenizer, problem, sampling.chat_template_kwargs, tool_schemas(task))
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

    @property
    def params(self) -> SamplingParams:
        """How responses are drawn."""
        return self._params

    def requests(self) -> list[GenerationRequest]:
        """All responses that are to be sampled, always the same ones."""
        size = self._section.num_generations
        return [request for group in self._groups for request in group.requests(size, self._seed)]

    def run(self, model: PreTrainedModel, progress: Any = None) -> EvalResult:
        """Sample and grade. ``progress`` is called with the number of responses finished and asked for."""
        engine = make_engine(
            self._task,
            model,
            self._params,
            slots=self._sampling.slots,
            max_length=self._sampling.max_prompt_length + self._params.max_tokens,
            tokenizer=self._tokenizer,
            in_rounds=True,  # for the same responses every time
        )
        return self.result(generate(engine, self.requests(), progress))

    def result(self, trajectories: Sequence[Trajectory]) -> EvalResult:
        """Grade the responses to ``requests``, which may come in any order."""
        members: dict[int, list[Trajectory]] = {group.id: [] for group in self._groups}
        for trajectory in trajectories:
            members[trajectory.group_id].append(trajectory)
        groups = self._grading.grade_all([(group, members[group.id]) for group in self._groups])
        answers, failed = self._answers(groups)
        result = EvalResult({}, groups, answers)
        result.metrics.update(self._metrics(groups, result.per_problem()))
        if answers is not None and failed:
            result.metrics["answers_failed"] = float(failed)
        return result

    def _answers(self, groups: Sequence[Group]) -> tuple[list[list[str | None]] | None, int]:
        """What each response answers, and for how many the task failed to tell."""
        if not isinstance(self._task, AnsweringTask):
            return None, 0
        failed = 0
        answers: list[list[str | None]] = []
        for group in groups:
            answers.append([])
            for trajectory in group.trajectories:
                try:
                    answers[-1].append(self._task.answer_of(group.problem, trajectory.text))
                except Exception:  # a user's code on hostile text; an answer that cannot be read has no vote
                    failed += 1
                    answers[-1].append(None)
        return answers, failed

    def _metrics(self, groups: list[Group], values: Mapping[str, list[float]]) -> dict[str, float]:
        grades = [t.grade for group in groups for t in group.trajectories if t.grade is not None]
        rewards = [g.reward for g in grades if g.reward is not None]
        lengths = [len(t.response_ids_T) for g in groups for t in g.trajectories]
        per_problem = np.array(values["accuracy"])
        n = self._section.num_generations
        chosen = [*(f"pass_at_{k}" for k in logged_k(n)), f"maj_at_{n}"]
        return {
            "accuracy": float(per_problem.mean()),
            # the spread over problems, which are the independent unit; their responses are not
            "accuracy_stderr": float(per_problem.std(ddof=1) / np.sqrt(len(per_problem))) if len(groups) > 1 else 0.0,
            **{name: float(np.mean(values[name])) for name in chosen if name in values},
            "reward": float(np.mean(rewards)) if rewards else float("nan"),
            "unscored": float(len(grades) - len(rewards)),
            "response_length": float(np.mean(lengths)),
            "length_limited_share": float(np.mean([t.stop_reason == "length" for g in groups for t in g.trajectories])),
            "problems": float(len(groups)),
            "problems_too_long": float(self._too_long),
        }
