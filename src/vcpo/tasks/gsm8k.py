"""Grade-school word problems (GSM8K): a question, and a worked solution that ends in ``#### 18``."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vcpo.records import Grade, Message, Problem
from vcpo.tasks.answers import final_number, parse_number
from vcpo.tasks.data import DataOptions, DataTask
from vcpo.tasks.rows import Table

GOLD_MARK = "####"


class GSM8KOptions(DataOptions):
    """Options of the task ``gsm8k``. The published data set is ``dataset_name: openai/gsm8k, dataset_config: main``."""

    dataset_test_split: str | None = Field(
        "test", description="the split that is evaluated on, unless eval_path is given"
    )
    question_column: str = Field("question", description="the column with the question")
    answer_column: str = Field(
        "answer", description="the column whose text after #### (or the whole of it) is the answer"
    )
    chat: bool = Field(True, description="chat messages for models with a chat template; false for plain text")
    system_prompt: str | None = Field(None, description="a system message, or the first line of a plain-text prompt")
    instruction: str = Field(
        "Reason step by step, and put the final answer within \\boxed{}.", description="what follows the question"
    )


class GSM8KTask(DataTask):
    """Reward 1 when the response's number equals the right answer's, else 0 (see ``answers.final_number``)."""

    Options = GSM8KOptions
    options: GSM8KOptions

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        """Compare numbers as exact fractions: ``18``, ``$18.00`` and ``36/2`` are the same answer."""
        return [_grade(problem, text) for problem, text in zip(problems, completions, strict=True)]

    def answer_of(self, problem: Problem, completion: str) -> str | None:
        """The number that is graded, as a fraction in lowest terms."""
        answer = final_number(completion)
        return None if answer is None else str(answer)

    def _problem(self, table: Table, index: int) -> Problem:
        options = self.options
        question = table.text(index, options.question_column)
        gold = table.text(index, options.answer_column).rpartition(GOLD_MARK)[2].strip()
        if parse_number(gold) is None:
            raise table.error(index, options.answer_column, f"has no single number as its answer, but {gold[:60]!r}")
        # the row's other columns stay available to reward functions; `gold` is the bare answer
        return Problem(table.name(index), self._prompt(question), {**table.rows[index], "gold": gold})

    def _prompt(self, question: str) -> str | list[Message]:
        options = self.options
        user = f"{question}\n{options.instruction}" if options.instruction else question
        if not options.chat:
            return "".join(f"{part}\n" for part in (options.system_prompt, user) if part)
        system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
        return [*system, {"role": "user", "content": user}]


def _grade(problem: Problem, completion: str) -> Grade:
    answer = final_number(completion)
    correct = answer is not None and answer == parse_number(problem.columns["gold"])
    return Grade(reward=float(correct), correct=correct)
