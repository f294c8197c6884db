"""What has become of a run's trajectories, for the terminal: ``vcpo ledger``."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vcpo.observe.ledger import FATES, LedgerSummary, NotTrained, State, fate_of

_BAR = 40
_MOST_LINES = 50
_MEANINGS = {
    State.PLANNED: "to be sampled again, after an interruption or a rollback",
    State.RUNNING: "asked for, and not yet graded",
    State.FINISHED: "graded, waiting for a minibatch",
}


def print_ledger(summary: LedgerSummary, console: Console, state: str | None = None) -> None:
    """Counts by fate and reason, the lags of what was trained, and what was not.

    state: a state or a fate; then only the groups in it are listed.
    """
    if state is None:
        _print_counts(summary, console)
        _print_lags(summary.lags, console)
    _print_groups(summary.only(state).not_trained, console)


def _print_counts(summary: LedgerSummary, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("fate")
    table.add_column("trajectories", justify="right")
    table.add_column("of which")
    for fate in FATES:
        total = summary.fates[fate]
        if not total and fate == "unrecorded":
            continue
        table.add_row(fate, f"{total:,}", "")
        for (state, reason), count in summary.counts.items():
            words = reason or _MEANINGS.get(state)
            if fate_of(state) == fate and words:
                table.add_row("", "", Text(f"{count:,} {words}"))
    table.add_section()
    table.add_row("planned", f"{summary.planned:,}", "the sum")
    console.print(table)


def _print_lags(lags: dict[int, int], console: Console) -> None:
    if not lags:
        return
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("lag", justify="right")
    table.add_column("trained", justify="right")
    table.add_column("")
    most = max(lags.values())
    for lag, count in lags.items():
        table.add_row(str(lag), f"{count:,}", "#" * max(1, round(_BAR * count / most)))
    console.print(table)


def _print_groups(groups: Sequence[NotTrained], console: Console) -> None:
    if not groups:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("group", "trajectories", "step"):
        table.add_column(name, justify="right")
    for name in ("problem", "state", "reason"):
        table.add_column(name, overflow="fold")
    for group in groups[:_MOST_LINES]:
        table.add_row(
            str(group.group),
            str(group.trajectories),
            "" if group.step is None else str(group.step),
            Text(group.problem or ""),
            group.state.value,
            Text(group.reason or ""),
        )
    console.print(table)
    if len(groups) > _MOST_LINES:
        console.print(f"and {len(groups) - _MOST_LINES} more groups; --json lists all of them")
