"""What a run would do, as tables: the plan that ``vcpo train --dry-run`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# nominal memory in 10^9 bytes of accelerators that are common in 2026
_DEVICES = (24, 48, 80, 141, 192, 288)


@dataclass(frozen=True)
class MemoryLine:
    """One allocation of a process.

    phases: in which of its role's phases it exists. formula: how ``bytes`` was made.
    is_exact: whether ``bytes`` is what the program allocates, or an estimate.
    """

    name: str
    bytes: int
    phases: tuple[str, ...]
    formula: str
    is_exact: bool = False


@dataclass(frozen=True)
class RoleMemory:
    """The device memory of one kind of process, of which there are ``processes``."""

    role: str
    processes: int
    lines: tuple[MemoryLine, ...]

    def of_phase(self, phase: str) -> int:
        """Bytes of one process in a phase."""
        return sum(line.bytes for line in self.lines if phase in line.phases)

    @property
    def largest_phase(self) -> str:
        """The phase that needs the most memory; the earlier one of equals."""
        return max((phase for line in self.lines for phase in line.phases), key=self.of_phase)

    @property
    def peak(self) -> int:
        """Bytes of one process in its largest phase."""
        return self.of_phase(self.largest_phase)


@dataclass(frozen=True)
class Plan:
    """What would run.

    run: what it is, as (name, words). arithmetic: (name, number, how it is made).
    memory: empty when the model is unknown; ``memory_unknown`` then says why. letters: what formulas mean by theirs.
    host: main memory and disk beside the device, as (name, bytes, formula).
    notes: what to know before starting, one sentence each.
    """

    run: tuple[tuple[str, str], ...]
    arithmetic: tuple[tuple[str, str, str], ...]
    memory: tuple[RoleMemory, ...]
    memory_unknown: str | None
    letters: str
    host: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        """Memory of the device that all roles share, every process at its peak."""
        return sum(role.processes * role.peak for role in self.memory)


def print_plan(plan: Plan, console: Console) -> None:
    """Print the run, its arithmetic, its memory, and the notes."""
    _print_rows(console, "What would run", ("", ""), plan.run)
    _print_rows(console, "Arithmetic", ("", "number", "from"), plan.arithmetic, numbers=(1,))
    for role in plan.memory:
        _print_role(console, role)
    if plan.memory:
        console.print(Text(_total(plan), style="bold"))
        console.print(Text(plan.letters))
        console.print(
            "* exact: what the program allocates. The others are estimates, most of them upper bounds. The device's"
            " own context (about 0.5 GB per process on a GPU) and what its allocator cannot use again come on top."
        )
    else:
        console.print(Text(f"Memory: unknown. {plan.memory_unknown}", style="bold yellow"))
    if plan.host:
        rows = [(name, gigabytes(size), formula) for name, size, formula in plan.host]
        _print_rows(console, "\nBeside the device", ("", "GB", "from"), rows, numbers=(1,))
    console.print(Text("\nNotes", style="bold"))
    for note in plan.notes:
        console.print(Text(f"- {note}"))
    console.print("Nothing was written and nothing was started.")


def gigabytes(size: int) -> str:
    """Bytes in 10^9, with as many decimals as matter."""
    return f"{size / 1e9:,.1f}" if size >= 1e9 else f"{size / 1e9:.4f}"


def _total(plan: Plan) -> str:
    parts = " + ".join(
        (f"{role.processes} x " if role.processes > 1 else "") + f"{role.role} {gigabytes(role.peak)}"
        for role in plan.memory
    )
    needed = plan.device_bytes
    enough = next((size for size in _DEVICES if size * 1e9 >= needed), None)
    words = f"within a device of {enough} GB" if enough else f"more than any single device of up to {_DEVICES[-1]} GB"
    alone = ""
    if len(plan.memory) > 1:
        largest = max(plan.memory, key=lambda role: role.peak)
        alone = f" A device for each process: {gigabytes(largest.peak)} GB at most ({largest.role})."
    return f"One device for all: {gigabytes(needed)} GB ({parts}): {words}.{alone}"


def _print_role(console: Console, role: RoleMemory) -> None:
    phases = tuple(dict.fromkeys(phase for line in role.lines for phase in line.phases))
    rows = [
        (
            line.name + (" *" if line.is_exact else ""),
            gigabytes(line.bytes),
            "all" if set(line.phases) == set(phases) else ", ".join(line.phases),
            line.formula,
        )
        for line in role.lines
    ]
    totals = ", ".join(f"{phase} {gigabytes(role.of_phase(phase))}" for phase in phases)
    rows.append(("largest", gigabytes(role.peak), role.largest_phase, totals))
    title = f"Memory of {'each ' if role.processes > 1 else 'the '}{role.role}"
    _print_rows(console, title, ("", "GB", "while", "from"), rows, numbers=(1,))


def _print_rows(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Sequence[int] = (),
) -> None:
    named = any(columns)
    table = Table(box=box.SIMPLE_HEAD if named else box.SIMPLE, title=title, title_justify="left", show_header=named)
    for index, name in enumerate(columns):
        style = "bold" if index == 0 else None
        justify = "right" if index in numbers else "left"
        table.add_column(name, style=style, justify=justify, no_wrap=index in numbers, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
