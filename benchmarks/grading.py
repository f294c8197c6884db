"""Graders against published solutions, and how many answers a second they grade.

    python benchmarks/grading.py check --data DIR --out results/grading
    python benchmarks/grading.py throughput --out results/grading

``check`` grades every solution of GSM8K's test rows, MATH-500 and AIME 2024 against its own answer, where it must have
reward 1, and against the answers of other problems, where it must have 0. DIR holds gsm8k_test.jsonl,
math500_test.jsonl and aime24_test.jsonl, which are public and not part of the repository; files that are not there are
left out, and said. It exits with 1 if there is an exception without a known reason.

``throughput`` sends answers, a share of them hostile, through grading processes as a run does, and through the same
graders in its own process. Elapsed times are those of the machine as it is: the load at the start is recorded.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from harness.grading_speed import CASES, measure
from harness.record import load_average, markdown_table, write_result
from harness.references import REFERENCES, check

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command("check")
def check_command(
    data: Annotated[Path, typer.Option(help="directory of the public files")],
    shuffles: Annotated[int, typer.Option(min=1, help="random orders of other problems' answers")] = 4,
    out: Annotated[Path, typer.Option(help="directory of the result")] = Path("results/grading"),
) -> None:
    """Grade published solutions, write OUT/reference.json and OUT/reference.md."""
    load = load_average()
    present = [reference for reference in REFERENCES if (data / reference.file).is_file()]
    absent = [reference.file for reference in REFERENCES if reference not in present]
    if absent:
        typer.echo(f"not in {data}, left out: {', '.join(absent)}")
    if not present:
        raise typer.Exit(2)
    results = [check(reference, data, shuffles) for reference in present]
    write_result(out, "reference", {"grader_packages": _versions(), "absent": absent, "files": results}, load)
    table = markdown_table(
        [
            "solutions of",
            "grader",
            "solutions",
            "grade 1 against their own answer",
            "pairs with other answers",
            "of them not 0",
        ],
        [
            [
                result["file"].removesuffix(".jsonl"),
                result["grader"],
                str(result["solutions"]),
                str(result["grade_1_against_their_own_answer"]),
                str(result["shuffled"]["pairs"] - result["shuffled"]["same_answer_by_chance"]),
                str(
                    len(result["shuffled"]["equal_answers_in_other_words"])
                    + len(result["shuffled"]["not_0_although_another_answer"])
                ),
            ]
            for result in results
        ],
    )
    (out / "reference.md").write_text(table, encoding="utf-8")
    typer.echo(table)
    for result in results:
        for case in result["exceptions"]:
            typer.echo(f"{result['file']}, row {case['row']}: {case['reason'] or case}")
        for pair in result["shuffled"]["equal_answers_in_other_words"]:
            typer.echo(f"{result['file']}: equal answers by chance: {pair[0]} and {pair[1]}")
        for case in result["shuffled"]["not_0_although_another_answer"]:
            typer.echo(f"{result['file']}: {case}")
    if any(result["unexpected"] for result in results):
        raise typer.Exit(1)


@app.command()
def throughput(
    answers: Annotated[int, typer.Option(min=1, help="answers of one repeat")] = 2000,
    hostile_share: Annotated[float, typer.Option(min=0, max=1, help="of the answers")] = 0.1,
    endless_share: Annotated[
        float, typer.Option(min=0, max=1, help="of the answers that never end, in their case")
    ] = 0.005,
    processes: Annotated[str, typer.Option(help="comma-separated numbers of grading processes")] = "1,2",
    repeats: Annotated[int, typer.Option(min=1, help="after one to warm up; the median counts")] = 3,
    timeout: Annotated[float, typer.Option(help="reward.timeout, in seconds")] = 1.0,
    out: Annotated[Path, typer.Option(help="directory of the result")] = Path("results/grading"),
) -> None:
    """Measure every grader, write OUT/throughput.json and OUT/throughput.md."""
    load = load_average()
    counts = [int(count) for count in processes.split(",")]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            share = endless_share if case.extra else hostile_share
            results.append(measure(case, answers, share, counts, repeats, timeout, Path(scratch)))
            typer.echo(results[-1])
    settings = {"grader_packages": _versions(), "processes": counts, "repeats": repeats, "timeout": timeout}
    write_result(out, "throughput", {**settings, "cases": results}, load)
    table = markdown_table(
        [
            "grader",
            "hostile",
            "in the run's own process",
            *(f"{count} process{'es' * (count > 1)}" for count in counts),
            "killed",
        ],
        [
            [
                result["case"],
                f"{100 * result['hostile_share']:g}%",
                _speed(result["in_process_per_second"]),
                *(f"{_speed(pool['per_second'])}{_ratio(pool['of_in_process'])}" for pool in result["pools"]),
                str(int(result["pools"][-1]["restarts_of_the_last_repeat"])),
            ]
            for result in results
        ],
    )
    (out / "throughput.md").write_text(table, encoding="utf-8")
    typer.echo(table)


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy", "regex")}


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}/s"


def _ratio(value: float | None) -> str:
    return "" if value is None else f" ({value:.2f}x)"


if __name__ == "__main__":
    app()
