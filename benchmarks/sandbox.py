"""How long a trivial call of the Python tool takes, with sandboxes ready and without, and how many calls a second.

    python benchmarks/sandbox.py --out results/sandbox
    python benchmarks/sandbox.py table results/sandbox

A call is ``print(1)``, from the moment the code is given until its result is there. ``warm``: one caller who always
finds a sandbox ready (the pause between calls, in which the pool makes the next one, is not counted). ``cold``: every
sandbox is started for its call. ``calls_per_second``: as many callers at once as ``--callers``, without pauses, so that
starting sandboxes is what limits. Elapsed times of the machine as it is: the load at the start is recorded.
"""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from harness.record import load_average, markdown_table, read_result, write_result

from vcpo.sandbox.options import SandboxOptions, make_executor
from vcpo.sandbox.protocol import Executor, Result, Status

BAR = 0.020  # seconds: the median of warm calls
CODE = "print(1)"
TIMES = ("warm_median", "warm_90th_percentile", "cold_median", "cold_90th_percentile")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def call(executor: Executor) -> float:
    """Seconds of one call. Raises RuntimeError when its result is another than it must be."""
    begin = time.perf_counter()
    result: Result = executor.run(CODE)
    seconds = time.perf_counter() - begin
    if result.status is not Status.OK or result.stdout != "1\n":
        raise RuntimeError(f"{CODE} ended with {result}")
    return seconds


def one_by_one(options: SandboxOptions, calls: int, pause: float) -> list[float]:
    """Seconds of each of some calls with a pause before each; the first one is left out."""
    executor = make_executor(options)
    try:
        seconds = []
        for _ in range(calls + 1):
            time.sleep(pause)
            seconds.append(call(executor))
        return seconds[1:]
    finally:
        executor.close()


def rate(options: SandboxOptions, calls: int, callers: int) -> float:
    """Calls per second of several callers without pauses."""
    executor = make_executor(options)
    left = threading.Semaphore(calls)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while left.acquire(blocking=False):
                call(executor)
        except BaseException as error:
            errors.append(error)

    try:
        call(executor)
        threads = [threading.Thread(target=work) for _ in range(callers)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
    finally:
        executor.close()
    if errors:
        raise errors[0]
    return calls / seconds


def measure(executor: str, calls: int, pause: float, callers: int) -> dict[str, Any]:
    """All numbers of one executor; times in seconds."""
    plain: dict[str, Any] = {"executor": executor, "allow_unsafe": True, "max_concurrent": callers, "memory_mb": 128}
    warm = one_by_one(SandboxOptions.model_validate({**plain, "warm": 2}), calls, pause)
    cold = one_by_one(SandboxOptions.model_validate({**plain, "warm": 0}), calls, 0.0)
    return {
        "executor": executor,
        "calls": calls,
        "callers": callers,
        "warm_median": statistics.median(warm),
        "warm_90th_percentile": statistics.quantiles(warm, n=10)[-1],
        "cold_median": statistics.median(cold),
        "cold_90th_percentile": statistics.quantiles(cold, n=10)[-1],
        "calls_per_second": rate(SandboxOptions.model_validate({**plain, "warm": callers}), calls, callers),
    }


def table_of(result: dict[str, Any]) -> str:
    """A row for each executor."""
    head = ["executor", "warm, ms", "90th percentile", "cold, ms", "90th percentile", "calls/s", "callers"]
    rows = [
        [
            row["executor"],
            *(f"{1000 * row[name]:.1f}" for name in TIMES),
            f"{row['calls_per_second']:.0f}",
            str(row["callers"]),
        ]
        for row in result["rows"]
    ]
    return markdown_table(head, rows)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="directory for sandbox.json and table.md")] = None,
    executors: Annotated[str, typer.Option(help="comma-separated: bubblewrap, subprocess")] = "bubblewrap,subprocess",
    calls: Annotated[int, typer.Option(min=2, help="calls for each number")] = 100,
    pause: Annotated[float, typer.Option(min=0.0, help="seconds before each warm call")] = 0.2,
    callers: Annotated[int, typer.Option(min=1, help="callers at once")] = 4,
) -> None:
    """Measure, print the table, and write it with the numbers; exits with 1 when a warm call is too slow."""
    if context.invoked_subcommand is not None:
        return
    load = load_average()
    rows = [measure(executor, calls, pause, callers) for executor in executors.split(",")]
    result = {"bar_seconds": BAR, "code": CODE, "pause": pause, "rows": rows}
    typer.echo(table_of(result), nl=False)
    if out is not None:
        write_result(out, "sandbox", result, load)
        (out / "table.md").write_text(table_of(result), encoding="utf-8")
    if rows[0]["warm_median"] > BAR:
        typer.echo(f"a warm call took {1000 * rows[0]['warm_median']:.1f} ms, more than {1000 * BAR:g} ms", err=True)
        raise typer.Exit(1)


@app.command()
def table(directory: Path) -> None:
    """Print the table of a finished measurement."""
    typer.echo(table_of(read_result(directory, "sandbox")), nl=False)


if __name__ == "__main__":
    app()
