"""Python as a tool of environments: a sandbox that is made when it is first needed, and what the model is told."""

from __future__ import annotations

import atexit
import re
import threading

from vcpo.sandbox.options import SandboxOptions, check_sandbox, make_executor
from vcpo.sandbox.protocol import Executor, Result, Status, settled

_FENCE = re.compile(r"```[ \t]*(\w*)[ \t]*")
_STEP_SLACK = 60.0  # seconds that a step may wait for its place and for a sandbox to start, beyond its run
_TRACEBACK_LINES = 12


class PythonTool:
    """One for all environments of a task in one process. Methods may be called from any thread."""

    def __init__(self, options: SandboxOptions) -> None:
        """Tries the sandbox: raises UserError when code cannot be run here, with the reason and what to do."""
        check_sandbox(options)
        self._options = options
        self._lock = threading.Lock()
        self._executor: Executor | None = None

    @property
    def step_timeout(self) -> float:
        """Seconds after which a step that runs code once must be over."""
        return self._options.wall_seconds + _STEP_SLACK

    def run(self, code: str) -> Result:
        """Run a program. Raises SandboxFailed when nothing is known about it, so that nobody is punished for it."""
        with self._lock:
            if self._executor is None:
                self._executor = make_executor(self._options)
                atexit.register(self._executor.close)
            executor = self._executor
        return settled(executor.run(code))

    def close(self) -> None:
        """End all sandboxes."""
        with self._lock:
            if self._executor is not None:
                atexit.unregister(self._executor.close)
                self._executor.close()
                self._executor = None


def python_block(text: str) -> str | None:
    """The program in the first fenced block that is marked as Python and closed; ``None`` without one."""
    lines: list[str] = []
    language: str | None = None  # of the block that is open
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if fence is None or (language is not None and fence[1]):
            lines.append(line)
        elif language is None:
            language, lines = fence[1].lower(), []
        elif language in ("python", "py", "python3"):
            return "\n".join(lines) + "\n"
        else:
            language = None
    return None


def outside_blocks(text: str) -> str:
    """The text without its fenced blocks, an open one included."""
    kept: list[str] = []
    is_open = False
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if fence is not None and not (is_open and fence[1]):
            is_open = not is_open
        elif not is_open:
            kept.append(line)
    return "\n".join(kept)


def told(result: Result, max_characters: int) -> str:
    """What the model reads of a run: stdout, the end of a traceback, or the limit that was met.

    Cut in the middle when it is long. Names of special tokens are broken up: a program shall not write such tokens.
    """
    parts = [result.stdout.rstrip("\n")]
    if result.status is Status.ERROR:
        parts.append("\n".join(result.stderr.rstrip("\n").split("\n")[-_TRACEBACK_LINES:]))
        if not any(parts):
            parts.append(f"exit code {result.exit_code}")
    elif result.status is not Status.OK:
        parts.append(f"[the program was ended: {result.detail}]")
    text = "\n".join(part for part in parts if part) or "[no output]"
    return re.sub(r"<(?=[^ 0-9=])", "< ", shortened(text, max_characters))


def shortened(text: str, max_characters: int) -> str:
    """The text, without its middle when it is longer."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
