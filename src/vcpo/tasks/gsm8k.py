"""Grade-school word problems (GSM8K): a question, and a worked solution that ends in ``#### 18``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from vcpo.tasks.dataset import DatasetOptions, DatasetTask


class GSM8KOptions(DatasetOptions):
    """Options of the task ``gsm8k``. The published data set is ``dataset_name: openai/gsm8k, dataset_config: main``."""

    dataset_test_split: str | None = Field(
        "test", description="the split that is evaluated on, unless eval_path is given"
    )
    grader: str | dict[str, Any] | None = Field(
        "number", description="who compares (see the task dataset); number: the last or the boxed number"
    )
    instruction: str | None = Field(
        "Reason step by step, and put the final answer within \\boxed{}.",
        description="what follows the question; for prompts that are chat messages only if given",
    )
    chat: bool | None = Field(True, description="chat messages for models with a chat template; false for plain text")


class GSM8KTask(DatasetTask):
    """Reward 1 when the response's number equals the right answer's, else 0 (see ``answers.final_number``)."""

    Options: ClassVar[type[DatasetOptions]] = GSM8KOptions
    PROMPT_COLUMNS = ("question", "problem", "prompt")
