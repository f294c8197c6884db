"""``tool_arithmetic`` with programs that take their time: each waits in its sandbox before it prints.

As a program does that asks a database, a service or a larger machine: it takes wall-clock time and next to no
processor time. Everything else is real: the sandbox, its start, what the model writes and what it gets back.
"""

from __future__ import annotations

import random
from typing import Any

from pydantic import NonNegativeFloat

from vcpo.records import Problem
from vcpo.tasks.options import options_or_user_error
from vcpo.tasks.python_tool import PythonTool
from vcpo.tasks.tool_arithmetic import Calculations, ToolArithmeticOptions, ToolArithmeticTask


class SlowToolOptions(ToolArithmeticOptions):
    """Options of the task, and the seconds that a program waits: uniform between the two."""

    min_wait: NonNegativeFloat = 0.2
    max_wait: NonNegativeFloat = 2.0


class SlowToolTask(ToolArithmeticTask):
    """How long a program waits is a function of problem and seed."""

    Options = SlowToolOptions

    def __init__(self, **options: Any) -> None:
        slow = options_or_user_error(SlowToolOptions, options)
        super().__init__(**{key: value for key, value in options.items() if key not in ("min_wait", "max_wait")})
        self._waits = slow.min_wait, slow.max_wait

    def environment(self, problem: Problem, seed: int) -> Calculations:
        """Runs what the model writes between brackets, after a wait."""
        return SlowCalculations(self.tool, random.Random(f"{problem.id}/{seed}").uniform(*self._waits))


class SlowCalculations(Calculations):
    """seconds: that each program waits."""

    def __init__(self, tool: PythonTool, seconds: float) -> None:
        super().__init__(tool)
        self._seconds = seconds

    def program(self, expression: str) -> str:
        """As usual, after the wait."""
        return f"import time\ntime.sleep({self._seconds:.3f})\n{super().program(expression)}"
