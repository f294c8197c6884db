"""Writes the ledger of a run, makes it agree with the checkpoint that a run resumes from, and checks its sums.

One connection in the learner's process writes, one transaction per optimizer step. The file is in SQLite's WAL mode: a
process that is killed loses at most the step in progress, readers never wait, and nothing waits for the disk except at
checkpoints (``sync``). The ledger follows the checkpoint, never the other way round: whatever the checkpoint does not
know has not happened, and a ledger that is lost costs its records but not the run.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from vcpo.errors import UserError
from vcpo.observe.ledger import SCHEMA, SCHEMA_VERSION, State
from vcpo.pipeline.fates import NOT_NEEDED, SKIPPED, Fates, GroupFate, Member

LOST = "its record was lost with an earlier ledger"

_COLUMNS = 13
_MOST_VALUES = 32_766  # SQLite's own default
_DONE_WITH = (State.TRAINED, State.FILTERED, State.FAILED, State.UNRECORDED)
_OS_ERRORS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}


class LedgerMismatch(AssertionError):
    """The ledger's counts are not those of the run. A defect of the program; the run's other files are not affected."""


class Ledger:
    """The open ledger of a running run.

    fates: told what happens; ``write`` puts it on record.
    """

    def __init__(
        self,
        path: Path,
        num_generations: int,
        next_group: int = 0,
        done: Collection[int] = (),
        note: Callable[[str], None] = print,
    ) -> None:
        """
        num_generations: trajectories per group.
        next_group, done: of the checkpoint from which the run continues (``DataProgress``): groups below
            ``next_group`` and those in ``done`` are done with. Whatever else the file holds is planned again. Groups
            that are done with and that the file does not know are entered as unrecorded.
        note: told, in one sentence, what is lost.

        Raises OSError when the disk is full or not writable, UserError when another process keeps writing the file.
        """
        begin = time.perf_counter()
        self._path = path
        self._num_generations = num_generations
        self._reported = 0.0
        with _disk_errors(path):
            self._connection = _open_or_replace(path, note)
            try:
                planned = self._follow_checkpoint(next_group, done, note)
            except BaseException:
                self._connection.close()
                raise
        self.fates = Fates(planned, next_group, done)
        self._seconds = time.perf_counter() - begin

    def write(self) -> None:
        """Put what has happened since the last call on record, in one transaction. Raises as the constructor does."""
        begin = time.perf_counter()
        changed = self.fates.take()
        try:
            if changed:
                with _disk_errors(self._path):
                    self._replace(changed.values())
        except BaseException:
            self.fates.give_back(changed)
            raise
        finally:
            self._seconds += time.perf_counter() - begin

    def sync(self) -> None:
        """Wait until what has been written is on the disk itself, so that a checkpoint is never ahead of its ledger."""
        begin = time.perf_counter()
        with _disk_errors(self._path):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._seconds += time.perf_counter() - begin

    def seconds(self) -> float:
        """Time that the ledger has taken since the last call: to write, and of the processor to note what happened."""
        total = self._seconds + self.fates.seconds
        since, self._reported = total - self._reported, total
        return since

    def check(self, next_group: int, done: Collection[int], next_number: int, trained_groups: int) -> None:
        """Assert that the ledger says what the run itself has counted.

        next_group, done: as in the constructor, now. next_number: groups below it have been started, or are done with.
        trained_groups: that have been a minibatch, of skipped steps or not.

        Raises LedgerMismatch otherwise. For a run that has ended in order: an error leaves groups between two states.
        """
        self.check_sums()
        done_with, in_minibatch, unrecorded = {*range(next_group), *done}, 0, 0
        found = set()
        rows = self._connection.execute("SELECT group_id, state, reason FROM trajectories WHERE member = 0")
        for number, text, reason in rows:
            found.add(number)
            state = State(text)
            if number in done_with:
                fits = state in _DONE_WITH and reason != NOT_NEEDED
            elif number < next_number:
                fits = state in (State.RUNNING, State.FINISHED, State.FAILED)
            else:
                fits = state is State.PLANNED or reason == NOT_NEEDED
            if not fits:
                where = "done with" if number in done_with else "in flight" if number < next_number else "not started"
                raise LedgerMismatch(f"the ledger has group {number} as {state}, but for the run it is {where}")
            unrecorded += state is State.UNRECORDED
            in_minibatch += state is State.TRAINED or (state is State.FILTERED and reason.startswith(SKIPPED))
        missing = {*range(next_number), *done_with} - found
        if missing:
            raise LedgerMismatch(f"the ledger lacks {len(missing)} groups, the first of them group {min(missing)}")
        if not in_minibatch <= trained_groups <= in_minibatch + unrecorded:
            raise LedgerMismatch(f"the ledger has {in_minibatch} groups as trained, but the run {trained_groups}")

    def check_sums(self) -> None:
        """Assert that every group is there with all its members in one state. Raises LedgerMismatch otherwise."""
        self.write()
        broken = self._connection.execute(
            "SELECT group_id, COUNT(*), COUNT(DISTINCT state) FROM trajectories GROUP BY group_id"
            " HAVING COUNT(*) != ? OR COUNT(DISTINCT state) != 1 LIMIT 1",
            (self._num_generations,),
        ).fetchone()
        if broken is not None:
            raise LedgerMismatch(
                f"the ledger has {broken[1]} trajectories in {broken[2]} states for group {broken[0]}, of which"
                f" {self._num_generations} were planned"
            )

    def close(self) -> None:
        """Write what is left and leave one plain file, without SQLite's companions. Raises as the constructor does."""
        try:
            self.write()
            with contextlib.suppress(sqlite3.OperationalError):  # somebody is reading: the companions stay
                self._connection.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._connection.close()

    def _follow_checkpoint(
        self, next_group: int, done: Collection[int], note: Callable[[str], None]
    ) -> list[GroupFate]:
        """Undo what the checkpoint does not know and enter what only the checkpoint knows; the groups planned again."""
        connection, done_with = self._connection, {*range(next_group), *done}
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            with _transaction(connection):
                connection.execute(SCHEMA)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        known: dict[int, tuple[str | None, bool]] = {
            number: (problem_id, states == 1 and count == self._num_generations and state in _DONE_WITH)
            for number, problem_id, state, states, count in connection.execute(
                "SELECT group_id, MAX(problem_id), MAX(state), COUNT(DISTINCT state), COUNT(*) FROM trajectories"
                " GROUP BY group_id"
            )
        }
        planned = [
            GroupFate(number, problem_id, State.PLANNED)
            for number, (problem_id, _) in known.items()
            if number not in done_with
        ]
        nothing = (None, False)
        lost = [
            GroupFate(number, known.get(number, nothing)[0], State.UNRECORDED, LOST)
            for number in sorted(done_with)
            if not known.get(number, nothing)[1]
        ]
        self._replace([*planned, *lost])
        if lost:
            note(
                f"the ledger has no record of {len(lost)} groups ({len(lost) * self._num_generations} trajectories)"
                " that the run is done with: they are counted as unrecorded"
            )
        return planned

    def _replace(self, fates: Iterable[GroupFate]) -> None:
        """Enter the rows of these groups in one transaction."""
        # Python's lock is let go in every statement, and with a busy collector thread it takes milliseconds to get it
        # back: hence one statement of many rows, which is a transaction by itself, as long as SQLite allows it
        rows = [row for fate in fates for row in self._rows(fate)]
        most = min(self._connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER), _MOST_VALUES) // _COLUMNS
        with contextlib.nullcontext() if len(rows) <= most else _transaction(self._connection):
            for first in range(0, len(rows), most):
                some = rows[first : first + most]
                marks = ", ".join([f"({', '.join('?' * _COLUMNS)})"] * len(some))
                values = [value for row in some for value in row]
                self._connection.execute(f"INSERT OR REPLACE INTO trajectories VALUES {marks}", values)

    def _rows(self, fate: GroupFate) -> Iterator[tuple[Any, ...]]:
        nobody = (None,) * self._num_generations
        members: tuple[Member | None, ...] = fate.members or nobody
        for index, member in enumerate(members):
            reason = fate.reason
            known: tuple[Any, ...] = (None, None, None, None)
            if member is not None:
                known = (member.start_version, member.reward, member.response_tokens, member.stop_reason)
                if fate.state is State.TRAINED:
                    reason = member.unscored
            yield (
                fate.number,
                index,
                fate.problem_id,
                fate.state.value,
                reason,
                fate.step,
                *known,
                fate.asked_at,
                fate.graded_at,
                fate.ended_at,
            )


def _open_or_replace(path: Path, note: Callable[[str], None]) -> sqlite3.Connection:
    """The existing ledger, or a new one where there is none or it is damaged; a damaged one is moved aside."""
    connection, damage = _open(path)
    if damage is None:
        return connection
    connection.close()
    aside = _free_name(path.with_suffix(".damaged"))
    path.rename(aside)
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink(missing_ok=True)
    note(f"the ledger {str(path)!r} is damaged ({damage}): it is now {aside.name!r}, and a new one is begun")
    return _open(path)[0]


def _open(path: Path) -> tuple[sqlite3.Connection, str | None]:
    """A connection, and what is wrong with the file, or ``None``. Raises what is wrong with the disk."""
    connection = sqlite3.connect(path, isolation_level=None)  # transactions are begun and ended by hand
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError as error:
        return connection, str(error)
    if verdict != "ok":
        return connection, str(verdict)
    return connection, None if version in (0, SCHEMA_VERSION) else f"its format is {version}, not {SCHEMA_VERSION}"


def _free_name(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """SQLite's words for a full or unwritable disk as the OSError that the rest of the program knows."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = error.sqlite_errorcode & 0xFF  # the rest of the number says in which operation
        if code == sqlite3.SQLITE_BUSY:
            raise UserError(
                f"the ledger {str(path)!r} is being written by another process: is the run going on?"
            ) from error
        if code not in _OS_ERRORS:
            raise
        raise OSError(_OS_ERRORS[code], f"{error}: {str(path)!r}") from error
