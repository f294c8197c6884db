"""Live progress of a run: bars and a line of the numbers that matter; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from vcpo.observe.formatting import count, fixed, percent, seconds
from vcpo.observe.logger import Kind
from vcpo.observe.summary import summarize, summary_rows

_PLAIN_STEPS = 10
_PLAIN_SECONDS = 30.0
_PACE_WINDOW = 50  # steps over which the time left is extrapolated


class PhaseUpdate(Protocol):
    """Tells a phase how far it is."""

    def __call__(self, done: int, total: int | None = None, detail: str = "") -> None:
        """done: units finished so far, of ``total`` (the phase's own when ``None``). detail: for example the loss."""
        ...


class Progress:
    """The display of one run; a logger like any other, and a context manager that gives the terminal back.

    On a terminal a bar and a line of numbers are redrawn in place. Elsewhere (continuous integration, a pipe) one plain
    line is printed every 10 steps or 30 seconds, whichever comes first, and for the first and the last step.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: seconds from any origin; for tests."""
        self.console = console or Console()
        self._total = total_steps
        self._clock = clock
        self._train: Mapping[str, float] = {}
        self._eval: Mapping[str, float] = {}
        self._eval_step: int | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=_PACE_WINDOW + 1)
        self._plain_at: tuple[int, float] | None = None
        self._bars = Bars(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=self.console,
        )
        self._training: TaskID | None = None
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step or evaluation."""
        if kind == "eval":
            self._eval, self._eval_step = metrics, step
            if self._live is None:
                numbers = f"accuracy {percent(metrics.get('accuracy'))}  reward {fixed(metrics.get('reward'))}"
                self.note(f"eval at step {step}: {numbers}")
            return
        self._train = metrics
        self._times.append((step, self._clock()))
        if self._live is not None:
            if self._training is None:
                self._training = self._bars.add_task("training", total=self._total, detail="")
            self._bars.update(self._training, completed=step)
        elif self._plain_line_is_due(step):
            numbers = "  ".join(f"{name} {value}" for name, value in self._numbers())
            self.note(f"step {step}/{self._total}  {numbers}")

    @contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[PhaseUpdate]:
        """A bar of its own for a part of the run (warm start, evaluation), removed when it is over.

        total: the units of work; ``None`` when the updates tell. Its time does not count as pace of the steps.
        """
        bar = _PlainPhase(self, title, total) if self._live is None else _BarPhase(self._bars, title, total)
        started = self._clock()
        try:
            yield bar.show
        finally:
            elapsed = self._clock() - started
            bar.end(elapsed)
            self._times = deque(((step, at + elapsed) for step, at in self._times), maxlen=self._times.maxlen)

    def note(self, text: str) -> None:
        """Print a message above the display."""
        self.console.print(Text(text), soft_wrap=True)

    def summary(self, run_dir: Path, report: Path | None = None) -> None:
        """Close the display and print what the run in ``run_dir`` came to, and where its report is."""
        self.close()
        table = Table(title=Text(f"Run {run_dir}"), title_justify="left", box=box.ROUNDED, show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in summary_rows(summarize(run_dir)):
            table.add_row(name, value)
        if report is not None:
            table.add_row("report", Text(str(report)))
        self.console.print(table)

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen. Safe to call twice."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the latest steps; ``None`` before two steps are done."""
        if len(self._times) < 2:
            return None
        (first, started), (last, ended) = self._times[0], self._times[-1]
        return (ended - started) / (last - first) * (self._total - last) if last > first else None

    def _numbers(self) -> list[tuple[str, str]]:
        train = self._train
        numbers = [("reward", fixed(train.get("reward"))), ("train acc", percent(train.get("accuracy")))]
        if self._eval_step is not None:
            numbers.append(("eval acc", f"{percent(self._eval.get('accuracy'))} @{self._eval_step}"))
        return [
            *numbers,
            ("ESS", fixed(train.get("ess"))),
            ("lag", f"{count(train.get('lag_mean'))} (max {count(train.get('lag_max'))})"),
            ("tokens/s", count(train.get("tokens_per_second"))),
            ("left", seconds(self.seconds_left)),
        ]

    def _render(self) -> RenderableType:
        if not self._train:
            return self._bars
        numbers = self._numbers()
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
        for name, _ in numbers:
            table.add_column(name, no_wrap=True)
        table.add_row(*(value for _, value in numbers))
        return Group(self._bars, table)

    def _plain_line_is_due(self, step: int) -> bool:
        now = self._clock()
        if self._plain_at is not None and step != self._total:
            last_step, last_time = self._plain_at
            if step - last_step < _PLAIN_STEPS and now - last_time < _PLAIN_SECONDS:
                return False
        self._plain_at = (step, now)
        return True


class _BarPhase:
    """A phase as a bar."""

    def __init__(self, bars: Bars, title: str, total: int | None) -> None:
        self._bars = bars
        self._task = bars.add_task(title, total=total, detail="")

    def show(self, done: int, total: int | None = None, detail: str = "") -> None:
        self._bars.update(self._task, completed=done, total=total, detail=detail)

    def end(self, elapsed: float) -> None:
        self._bars.remove_task(self._task)


class _PlainPhase:
    """A phase as a line now and then, and one at its end."""

    def __init__(self, progress: Progress, title: str, total: int | None) -> None:
        self._progress = progress
        self._title = title
        self._done, self._total, self._detail = 0, total, ""
        self._last = progress._clock()

    def show(self, done: int, total: int | None = None, detail: str = "") -> None:
        self._done, self._total, self._detail = done, total or self._total, detail
        now = self._progress._clock()
        if now - self._last >= _PLAIN_SECONDS:
            self._last = now
            self._progress.note(self._line(""))

    def end(self, elapsed: float) -> None:
        self._progress.note(self._line(f" in {seconds(elapsed)}"))

    def _line(self, when: str) -> str:
        total = "" if self._total is None else f"/{self._total}"
        return f"{self._title}: {self._done}{total}{when}  {self._detail}".rstrip()
