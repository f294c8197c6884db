"""Rows with a question and an answer: which columns they are in, how the prompt is made of them, who grades.

The tasks ``gsm8k`` and ``math`` are this one with other defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from vcpo.errors import UserError
from vcpo.records import Grade, Message, Problem
from vcpo.tasks.data import DataOptions, DataTask
from vcpo.tasks.environment import Environment, TurnRules
from vcpo.tasks.graders.protocol import AnswerGrader
from vcpo.tasks.graders.registry import BUILT_IN, make_grader, source_grader, split_grader
from vcpo.tasks.rows import Table
from vcpo.tasks.toolbox import Toolbox, ToolOptions

GOLD = "gold"  # the problem's column with the right answer as the grader takes it
_VERL_ANSWER = "reward_model.ground_truth"
_SOURCE = "data_source"
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")


class DatasetOptions(DataOptions, ToolOptions):
    """Options of the task ``dataset``."""

    prompt_column: str | None = Field(
        None,
        description="the column with the prompt, text or chat messages; a.b for b inside a; null: found by its name",
    )
    answer_column: str | None = Field(
        None,
        description="the column with the right answer; a.b for b inside a; null: found by its name, and rows may all"
        " lack it when reward functions are used",
    )
    grader: str | dict[str, Any] | None = Field(
        None,
        description=f"who compares: {', '.join(BUILT_IN)}, file.py:Name, or {{name: ..., option: ...}}; null: by the"
        " rows' data_source where they have one, else exact",
    )
    template: str | None = Field(
        None, description="text of the prompt, with {column} where a column's value goes; a list becomes lines A. B. C."
    )
    instruction: str | None = Field(
        None, description="what follows the question; for prompts that are chat messages only if given"
    )
    system_prompt: str | None = Field(
        None,
        description="a system message, or the first line of a plain-text prompt; messages with one keep their own",
    )
    chat: bool | None = Field(
        None,
        description="true: text becomes a chat message; false: plain text in lines; null: as it is in the rows, and a"
        " chat message where there are tools",
    )

    @field_validator("grader")
    @classmethod
    def _is_a_grader(cls, grader: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        if grader is not None:
            split_grader(grader)
        return grader

    @model_validator(mode="after")
    def _tools_are_for_chats(self) -> DatasetOptions:
        if self.has_tools and self.chat is False:
            raise ValueError("task.tools and task.environment_factory need chat messages: leave out task.chat=false")
        return self


class DatasetTask(DataTask):
    """Reward 1 when the grader finds the response right, else 0 (or what the grader says).

    Columns are found by their names: ``PROMPT_COLUMNS`` and ``ANSWER_COLUMNS`` in that order, verl's
    ``reward_model.ground_truth`` first. Data without answers is for reward functions: responses then have no reward of
    the task (``None``). All columns of a row are kept for reward functions, and ``gold``, the answer that is graded by;
    a column called ``prompt`` that is the prompt comes as ``prompts``.

    With ``tools`` or an ``environment_factory`` responses are conversations with them. An environment with
    ``get_reward`` gives the reward; an answer then says whether a response is correct, and no more, unless a ``grader``
    is chosen.
    """

    Options: ClassVar[type[DatasetOptions]] = DatasetOptions
    PROMPT_COLUMNS: ClassVar[tuple[str, ...]] = ("prompt", "question", "problem")
    ANSWER_COLUMNS: ClassVar[tuple[str, ...]] = (_VERL_ANSWER, "answer")
    options: DatasetOptions
    environment: Callable[[Problem, int], Environment]  # only where there are tools
    turn_rules: TurnRules

    def __init__(self, **options: Any) -> None:
        """Raises UserError for wrong options, tools or data, and when a grader's package is missing."""
        self._graders: dict[str, AnswerGrader] = {}
        self._toolbox: Toolbox | None = None
        super().__init__(**options)
        if self.options.has_tools:
            self._take(Toolbox(self.options))

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as JSON schemas; see ``EnvironmentTask`` and ``Toolbox.schemas``."""
        return [] if self._toolbox is None else self._toolbox.schemas

    @property
    def rewarded_by_environment(self) -> bool:
        """Whether responses get their reward from an environment, so that answers are not needed."""
        return self._toolbox is not None and self._toolbox.rewards

    def train_problem(self, position: int, seed: int) -> Problem:
        """Rows in an order shuffled anew in each epoch, with what an environment adds to the prompt."""
        return self._opened(super().train_problem(position, seed))

    def eval_problems(self, count: int) -> list[Problem]:
        """The first rows of the evaluation data."""
        return [self._opened(problem) for problem in super().eval_problems(count)]

    @property
    def needs_time_limit(self) -> bool:
        """Whether a grader may work for ever on hostile text."""
        return any(getattr(grader, "needs_time_limit", False) for grader in self._graders.values())

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """One grade per response; no reward where there is no answer."""
        return [self._grade(problem, text) for problem, text in zip(problems, completions, strict=True)]

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """The answer as the row's grader reads it."""
        return self._grader(problem.columns.get(_SOURCE)).answer(completion)

    def _take(self, toolbox: Toolbox) -> None:
        if hasattr(type(self), "environment"):
            raise UserError(
                f"{type(self).__name__} has a tool of its own: take the task 'dataset' or 'math' for others"
            )
        self._toolbox = toolbox
        self.environment = lambda problem, seed: toolbox.environment(problem)
        self.turn_rules = toolbox.rules

    def _opened(self, problem: Problem) -> Problem:
        return problem if self._toolbox is None else self._toolbox.opened(problem)

    def _grade(self, problem: Problem, completion: str) -> Grade:
        gold = problem.columns.get(GOLD)
        if gold is None:
            return Grade(reward=None)
        grade = self._grader(problem.columns.get(_SOURCE)).grade(gold, completion)
        graded = not self.rewarded_by_environment or "grader" in self.options.model_fields_set
        return grade if graded else replace(grade, reward=None, parts={})

    def _problem(self, table: Table, index: int) -> Problem:
        prompt_column, answer_column = self._prompt_column(table), self._answer_column(table)
        prompt = self._prompt(table, index, prompt_column)
        columns = {
            name: value for name, value in table.rows[index].items() if name != "prompt" or name != prompt_column
        }
        if answer_column is not None:
            columns[GOLD] = self._gold(table, index, answer_column)
        return Problem(table.name(index), prompt, columns)

    def _gold(self, table: Table, index: int, column: str) -> Any:
        answer, source = table.value(index, column), table.rows[index].get(_SOURCE)
        if self.options.grader is None and source is not None and source_grader(source) is None:
            what = f"is {source!r}, for which there is no grader: set task.grader (to {', '.join(BUILT_IN)}, or"
            raise table.error(index, _SOURCE, f"{what} your own as file.py:Name)")
        try:
            return self._grader(source).gold(answer)
        except ValueError as error:
            raise table.error(index, column, str(error)) from None

    def _grader(self, source: Any) -> AnswerGrader:
        chosen = self.options.grader or source_grader(source) or "exact"
        key = str(chosen)
        if key not in self._graders:
            self._graders[key] = make_grader(chosen)
        return self._graders[key]

    def _prompt_column(self, table: Table) -> str | None:
        if self.options.prompt_column is not None or self.options.template is not None:
            return self.options.prompt_column
        found = next((name for name in self.PROMPT_COLUMNS if table.has(name)), None)
        if found is None:
            raise UserError(
                f"{table.source}, row {table.numbers[0]}: has no column {' or '.join(map(repr, self.PROMPT_COLUMNS))};"
                f" name the one with the prompt in task.prompt_column (there are: {', '.join(table.rows[0]) or 'none'})"
            )
        return found

    def _answer_column(self, table: Table) -> str | None:
        if self.options.answer_column is not None:
            return self.options.answer_column
        # one that the first row has is needed in every row
        return next((name for name in self.ANSWER_COLUMNS if table.has(name)), None)

    def _prompt(self, table: Table, index: int, column: str | None) -> str | list[Message]:
        options = self.options
        if options.template is not None:
            question: str | list[Message] = _filled(options.template, table, index)
        else:
            assert column is not None
            question = table.prompt(index, column)
        if not isinstance(question, str):
            if options.chat is False and "chat" in options.model_fields_set:
                raise table.error(index, str(column), "has chat messages, and task.chat=false needs text")
            return self._added_to(question, self._instruction(has_own=True))
        if options.chat or options.has_tools:
            return self._added_to([{"role": "user", "content": question}], self._instruction(has_own=False))
        parts = [part for part in (options.system_prompt, question, self._instruction(has_own=False)) if part]
        return "".join(f"{part}\n" for part in parts) if options.chat is False else "\n".join(parts)

    def _instruction(self, has_own: bool) -> str | None:
        """What follows the question. has_own: the row is chat messages, which say themselves what to do."""
        options = self.options
        return options.instruction if not has_own or "instruction" in options.model_fields_set else None

    def _added_to(self, messages: list[Message], instruction: str | None) -> list[Message]:
        """Messages with the system prompt, and with the instruction at the end of the user's last one."""
        options = self.options
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if instruction and last is not None:
            changed = {**messages[last], "content": f"{messages[last]['content']}\n{instruction}"}
            messages = [*messages[:last], changed, *messages[last + 1 :]]
        if options.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": options.system_prompt}, *messages]
        return messages


def _filled(template: str, table: Table, index: int) -> str:
    return _PLACE.sub(lambda match: _written(table.value(index, match[1])), template)


def _written(value: Any) -> str:
    """A value in a prompt; the choices of a question one per line, with their letters."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # ARC's form
        value = value["text"]
    if isinstance(value, list) and len(value) <= 26:
        return "\n".join(f"{chr(ord('A') + i)}. {item}" for i, item in enumerate(value))
    return str(value)
