"""Competition mathematics with LaTeX answers: MATH, MATH-500, DAPO, AIME."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from vcpo.tasks.dataset import DatasetOptions, DatasetTask


class MathOptions(DatasetOptions):
    """Options of the task ``math``."""

    grader: str | dict[str, Any] | None = Field(
        "math", description="who compares (see the task dataset); math: math-verify on the last box"
    )
    instruction: str | None = Field(
        "Let's think step by step and output the final answer within \\boxed{}.",
        description="what follows the question; for prompts that are chat messages only if given",
    )
    chat: bool | None = Field(True, description="chat messages for models with a chat template; false for plain text")


class MathTask(DatasetTask):
    """Reward 1 when the response's last box is the right answer, else 0 (see ``graders.mathematics``).

    MATH's own rows have no answer column: their answer is the last ``\\boxed{...}`` of ``solution``.
    """

    Options: ClassVar[type[DatasetOptions]] = MathOptions
    PROMPT_COLUMNS = ("problem", "question", "prompt")
    ANSWER_COLUMNS = (*DatasetTask.ANSWER_COLUMNS, "solution")
