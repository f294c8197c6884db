"""Competition mathematics with a Python interpreter: the model writes code, reads what it prints, and goes on.

The first closed block of Python ends a turn::

    ```python
    print(sum(range(101)))
    ```

The block is run, what it writes comes back as a block marked ``output``, and the model continues. Every block is a
program of its own: nothing is kept from one to the next. A boxed answer outside of blocks, or an end token without a
block, ends the response.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from vcpo.records import Problem, StopReason
from vcpo.sandbox.options import SandboxOptions
from vcpo.sandbox.protocol import Status
from vcpo.tasks.answers import last_box
from vcpo.tasks.competition import MathOptions, MathTask
from vcpo.tasks.dataset import DatasetOptions
from vcpo.tasks.environment import Observation, Turn, TurnRules
from vcpo.tasks.python_tool import PythonTool, outside_blocks, python_block, told

CLOSED_BLOCK = "\n```\n"


class ToolMathOptions(MathOptions):
    """Options of the task ``tool_math``: those of ``math``, and the tool's."""

    tool_instruction: str | None = Field(
        "You may write Python code in a block that starts with ```python and ends with ```; it is run as a program of"
        " its own, and you are given what it prints.",
        description="what tells the model of the tool, before the instruction; for chat messages, too, because rows"
        " made without a tool do not tell of it; null where they do",
    )
    max_turns: PositiveInt = Field(16, description="turns of the model; one fewer than this can be answered by a run")
    max_tool_seconds: float = Field(
        120.0, gt=0, description="seconds of all runs of one response, after which no further one is made"
    )
    max_tool_characters: PositiveInt = Field(
        4000, description="what is shown of one run at most; its middle is left out"
    )
    sandbox: SandboxOptions = Field(default_factory=SandboxOptions, description="where the code is run (docs/tools.md)")


class ToolMathTask(MathTask):
    """As ``math``, in turns. The grader sees the whole response, outputs included."""

    Options: ClassVar[type[DatasetOptions]] = ToolMathOptions
    options: ToolMathOptions

    def __init__(self, **options: Any) -> None:
        """Raises UserError as ``math`` does, and when code cannot be run here."""
        super().__init__(**options)
        self.tool = PythonTool(self.options.sandbox)
        self.turn_rules = TurnRules(
            (CLOSED_BLOCK,), self.options.max_turns, self.tool.step_timeout, self.options.sandbox.max_concurrent
        )

    def _instruction(self, has_own: bool) -> str | None:
        parts = [self.options.tool_instruction, super()._instruction(has_own)]
        return " ".join(part for part in parts if part) or None

    def environment(self, problem: Problem, seed: int) -> CodeBlocks:
        """Runs what the model writes in blocks of Python."""
        return CodeBlocks(self.tool, self.options.max_tool_seconds, self.options.max_tool_characters)


class CodeBlocks:
    """Answers each turn's first closed block of Python by what it writes."""

    def __init__(self, tool: PythonTool, max_seconds: float, max_characters: int) -> None:
        self._tool = tool
        self._seconds_left = max_seconds
        self._max_characters = max_characters
        self._unread = ""  # what the model has written since the last answer to a block

    def step(self, turn: Turn) -> Observation:
        """Run a block; or end the response, or let it go on when the fence was that of another block."""
        self._unread += turn.text
        if last_box(outside_blocks(self._unread)) is not None:
            return Observation(done=True)
        code = python_block(self._unread)
        if code is None:
            return Observation(done=turn.stop_reason is StopReason.EOS)
        if self._seconds_left <= 0:
            return Observation(done=True, measurements={"out_of_tool_time": 1.0})
        result = self._tool.run(code)
        self._seconds_left -= result.seconds
        newline = "" if self._unread.endswith("\n") else "\n"
        self._unread = ""
        return Observation(
            f"{newline}```output\n{told(result, self._max_characters)}\n```\n",
            measurements={"tool_seconds": result.seconds, "tool_ok": float(result.status is Status.OK)},
        )

    def close(self) -> None:
        """Nothing: a run ends by its own limits."""
