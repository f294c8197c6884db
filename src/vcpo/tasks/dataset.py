"""Any rows with a prompt column, graded by exact match with an answer column or by the user's reward functions."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vcpo.records import Grade, Problem
from vcpo.tasks.data import DataOptions, DataTask
from vcpo.tasks.rows import Table


class DatasetOptions(DataOptions):
    """Options of the task ``dataset``."""

    prompt_column: str = Field("prompt", description="text, or a list of chat messages")
    answer_column: str = Field(
        "answer", description="the right answer, compared exactly; rows may lack it when reward functions are used"
    )


class DatasetTask(DataTask):
    """Reward 1 when the response equals the answer (outer whitespace aside), else 0.

    Data without the answer column is for reward functions: responses then have no reward of the task (``None``).
    Every column except the prompt is kept for graders and reward functions.
    """

    Options = DatasetOptions
    options: DatasetOptions

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Exact match, where there is an answer."""
        return [self._grade(problem, text) for problem, text in zip(problems, completions, strict=True)]

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """The whole response without its outer white space, if that leaves anything."""
        return completion.strip() or None

    def _grade(self, problem: Problem, completion: str) -> Grade:
        answer = problem.columns.get(self.options.answer_column)
        if answer is None:
            return Grade(reward=None)
        correct = completion.strip() == str(answer).strip()
        return Grade(reward=float(correct), correct=correct)

    def _problem(self, table: Table, index: int) -> Problem:
        options = self.options
        prompt = table.prompt(index, options.prompt_column)
        # an answer column that was named, or that the first row has, is needed in every row
        if "answer_column" in options.model_fields_set or table.has(options.answer_column):
            table.value(index, options.answer_column)
        columns = {name: value for name, value in table.rows[index].items() if name != options.prompt_column}
        return Problem(table.name(index), prompt, columns)
