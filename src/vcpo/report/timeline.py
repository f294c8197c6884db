"""Where the time of a run went, for the terminal: ``vcpo timeline``."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from vcpo.observe.trace import Share, Trace


def print_timeline(trace: Trace, console: Console) -> None:
    """Seconds and shares by process, thread and kind of work, from the end of the first step to that of the last."""
    begin, end = trace.window()
    whole = end - begin
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("process, thread")
    table.add_column("spends its time on")
    for name in ("times", "seconds", "share"):
        table.add_column(name, justify="right")

    def where(share: Share) -> str:
        main = share.thread in ("MainThread", "")
        return share.process if main else f"{share.process}, {share.thread}"

    for name, group in groupby(trace.shares(begin, end), key=where):
        rest, heading = whole, name
        for share in group:
            times = f"{share.times:,}" if share.times else ""
            table.add_row(heading, share.kind, times, f"{share.seconds:.2f}", f"{share.seconds / whole:.1%}")
            rest, heading = rest - share.seconds, ""
        table.add_row("", "not recorded", "", f"{rest:.2f}", f"{rest / whole:.1%}")
        table.add_section()
    steps = trace.steps()
    console.print(table)
    console.print(f"{whole:.2f} s, from the end of step {min(steps)} to that of step {max(steps)}", highlight=False)
