"""Every planned trajectory has exactly one fate, in a ledger that agrees with the run whatever happens to either."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ledger_cases import MEMBERS, LedgerRun, continued, graded_group, rows_of, states_of
from pacing_cases import Saved, pacing_of
from reward_cases import digit_mean
from run_cases import REWARDS, InterruptAfter, has_steps, start_vcpo, tiny_config, tiny_recipe, wait_until
from vcpo.cli import app
from vcpo.errors import UserError
from vcpo.observe.ledger import State, read_ledger
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress
from vcpo.pipeline.fates import NOT_NEEDED, Fates, GroupFate, IllegalTransition
from vcpo.pipeline.ledger import LOST, Ledger, LedgerMismatch
from vcpo.pipeline.run import train

EVENTS: dict[str, Callable[[Fates], None]] = {
    "started": lambda fates: fates.started(0, "p"),
    "graded": lambda fates: fates.graded(graded_group(0)),
    "trained": lambda fates: fates.trained(1, [0], None),
    "skipped": lambda fates: fates.trained(1, [0], "NaN"),
    "dropped": lambda fates: fates.dropped(1, {0: "stale"}),
    "failed": lambda fates: fates.failed([0], "gone"),
    "given up": lambda fates: fates.given_up([0]),
}
# what may follow what, written down apart from the code
LEGAL = {
    (): {"started"},
    ("started",): {"graded", "failed", "given up"},
    ("started", "graded"): {"trained", "skipped", "dropped", "failed", "given up"},
    ("started", "given up"): {"started"},
    ("started", "graded", "given up"): {"started"},
    ("started", "failed"): set(),
    ("started", "graded", "trained"): set(),
    ("started", "graded", "skipped"): set(),
    ("started", "graded", "dropped"): set(),
}


@pytest.mark.parametrize("history", LEGAL, ids=lambda history: "-".join(history) or "nothing")
@pytest.mark.parametrize("event", EVENTS)
def test_only_the_transitions_of_the_diagram_are_possible(history: tuple[str, ...], event: str) -> None:
    fates = Fates()
    for earlier in history:
        EVENTS[earlier](fates)
    if event in LEGAL[history]:
        EVENTS[event](fates)
        return
    before = fates.take()
    with pytest.raises(IllegalTransition, match=r"^group 0 cannot be "):
        EVENTS[event](fates)
    assert fates.take() == {}  # and nothing of it is put on record
    fates.give_back(before)
    assert fates.take() == before


def test_a_group_that_an_interruption_has_undone_is_started_again_or_not_needed() -> None:
    fates = Fates([GroupFate(n, f"p{n}", State.PLANNED) for n in (4, 5)], next_group=4)
    with pytest.raises(IllegalTransition, match="group 3 cannot be running: it has ended before"):
        fates.started(3, "p3")
    with pytest.raises(IllegalTransition, match="group 4 cannot be finished: it is planned"):
        fates.graded(graded_group(4))
    fates.started(4, "p4")
    fates.not_needed(9)
    changed = fates.take()
    assert (changed[4].state, changed[5].state) == (State.RUNNING, State.FILTERED)
    assert (changed[5].reason, changed[5].step) == (NOT_NEEDED, 9)


def test_an_error_names_the_groups_that_it_costs() -> None:
    fates = Fates()
    for number in range(3):
        fates.started(number, "p")
    with pytest.raises(ZeroDivisionError), fates.failing("grading", [1]):
        raise ZeroDivisionError("no paper\nand more lines")
    assert fates.take()[1].reason == "grading: ZeroDivisionError: no paper"


def test_what_is_known_of_every_trajectory_is_in_its_row(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", MEMBERS)
    for number in range(5):
        ledger.fates.started(number, f"p{number}")
    for number in range(4):
        ledger.fates.graded(graded_group(number, (2, 3), (0.5, None)))
    ledger.fates.trained(5, [0], None)
    ledger.fates.trained(6, [1], "the gradient is not finite")
    ledger.fates.dropped(6, {2: "stale"})
    ledger.write()
    known = ((2, 0.5, 3, "eos"), (3, None, 3, "eos"))
    assert rows_of(tmp_path / "ledger.sqlite") == [
        (0, 0, "p0", "trained", None, 5, *known[0]),
        (0, 1, "p0", "trained", "no reward", 5, *known[1]),
        *((1, i, "p1", "filtered", "step skipped: the gradient is not finite", 6, *known[i]) for i in (0, 1)),
        *((2, i, "p2", "filtered", "stale", 6, *known[i]) for i in (0, 1)),
        *((3, i, "p3", "finished", None, None, *known[i]) for i in (0, 1)),
        *((4, i, "p4", "running", None, None, None, None, None, None) for i in (0, 1)),
    ]
    summary = read_ledger(tmp_path / "ledger.sqlite")
    assert summary.fates == {"trained": 2, "filtered": 4, "failed": 0, "in flight": 4, "unrecorded": 0}
    assert summary.planned == 10
    assert summary.lags == {1: 1, 2: 1}  # trained by step 5, that is with version 4; started at 2 and 3


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from([*EVENTS, "write", "reopen"])), max_size=80))
def test_counts_sum_after_any_events_in_any_order(events: list[tuple[int, str]]) -> None:
    """The model: a dictionary of histories. Events that are not legal must change nothing."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.sqlite"
        ledger = Ledger(path, MEMBERS)
        histories: dict[int, tuple[str, ...]] = {}
        for number, event in events:
            history = histories.get(number, ())
            if event == "write":
                ledger.write()
            elif event == "reopen":  # every group counts as done with by the checkpoint, or as not
                ledger.close()
                done = [n for n, h in histories.items() if h[-1] in ("trained", "skipped", "dropped")]
                ledger = Ledger(path, MEMBERS, 0, done)
                histories = {n: h if n in done else ("planned",) for n, h in histories.items()}
            elif event in (LEGAL[history] if history != ("planned",) else {"started"}):
                apply(ledger.fates, event, number)
                histories[number] = ("started",) if event == "started" else (*history, event)
            else:
                with pytest.raises(IllegalTransition):
                    apply(ledger.fates, event, number)
        ledger.check_sums()
        state = {
            "planned": "planned", "started": "running", "graded": "finished", "trained": "trained",
            "skipped": "filtered", "dropped": "filtered", "failed": "failed", "given up": "planned",
        }  # fmt: skip
        assert states_of(path) == {number: {state[history[-1]]} for number, history in histories.items()}
        summary = read_ledger(path)
        assert summary.planned == sum(summary.fates.values()) == MEMBERS * len(histories)
        ledger.close()


def apply(fates: Fates, event: str, number: int) -> None:
    match event:
        case "started":
            fates.started(number, f"p{number}")
        case "graded":
            fates.graded(graded_group(number))
        case "trained":
            fates.trained(1, [number], None)
        case "skipped":
            fates.trained(1, [number], "NaN")
        case "dropped":
            fates.dropped(1, {number: "stale"})
        case "given up":
            fates.given_up([number])
        case _:
            fates.failed([number], "gone")


@settings(deadline=None, max_examples=25)
@given(
    pacing=st.sampled_from(["bounded", "drop_stale", "pace"]),
    staleness=st.integers(0, 3),
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    ticks=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    save_every=st.integers(1, 4),
    kills=st.lists(st.integers(1, 11), max_size=3),
    lag=st.integers(0, 2),
)
def test_after_kills_at_any_points_the_ledger_is_that_of_the_run(
    pacing: str, staleness: int, tokens: list[int], ticks: list[int], save_every: int, kills: list[int], lag: int
) -> None:
    """Real pacing, starting and dropping on a virtual clock. A kill leaves the last checkpoint, whose step the ledger
    has passed, or (``lag``: after a power failure) is behind."""
    with TemporaryDirectory() as directory:
        path, last, begin = Path(directory) / "ledger.sqlite", 12, None
        unrecorded = False
        for stop in [*sorted(kills), last]:
            begun_at = 0 if begin is None else begin.version
            if stop <= begun_at:
                continue
            checkpoints: list[Saved] = [] if begin is None else [begin]
            run = LedgerRun(pacing_of(pacing), staleness, 2, last, tokens, ticks, slots=4, begin=begin, stop_after=stop)
            ledger = continued(path, run)
            loses = stop != last

            def on_step(run: LedgerRun, ledger: Ledger = ledger, stop: int = stop, loses: bool = loses) -> None:
                assert run.saved is not None
                if not loses or run.saved.version <= stop - lag:
                    ledger.write()
                    run.check(ledger)
                if run.saved.version % save_every == 0:
                    checkpoints.append(run.saved)  # noqa: B023 - used within this turn only

            run.on_step = on_step
            run.run()
            begin = checkpoints[-1] if checkpoints else None
            unrecorded |= loses and begin is not None and begin.version > stop - lag
            if not loses:
                ledger.fates.not_needed(last)
                run.check(ledger)
                ledger.close()
        summary = read_ledger(path)
        fates = summary.fates
        assert summary.planned == sum(fates.values())
        assert fates["in flight"] == fates["failed"] == 0
        assert (fates["unrecorded"] > 0) == unrecorded
        if not unrecorded:
            assert fates["trained"] == last * 2 * MEMBERS
        assert max(summary.lags, default=0) <= staleness


class CopyAfter(Progress):
    """A display that copies the run directory when a step is logged, as a kill at that moment would leave it."""

    def __init__(self, run: Path, copies: Path) -> None:
        super().__init__(0)
        self._run, self._copies = run, copies

    def log(self, step: int, kind: Any, metrics: Mapping[str, float]) -> None:
        super().log(step, kind, metrics)
        shutil.copytree(self._run, self._copies / f"after-{step}")


def test_a_run_resumed_from_any_of_its_moments_has_the_ledger_of_the_uninterrupted_one(tmp_path: Path) -> None:
    changes = ("checkpoint.save_steps=2", "runtime.max_staleness=2", "runtime.lag=mixed")
    whole = tiny_config(tmp_path / "whole", *changes)
    train(whole, make_report=False, progress=CopyAfter(tmp_path / "whole", tmp_path))
    expected = rows_of(tmp_path / "whole" / "ledger.sqlite")
    assert len(expected) == 6 * 2 * 4
    assert not list((tmp_path / "whole").glob("ledger.sqlite-*"))  # one plain file is left
    for step in range(1, 7):
        copy = tmp_path / f"after-{step}"
        assert rows_of(copy / "ledger.sqlite") == expected[: step * 8]  # recovered from SQLite's companion files
        train(tiny_config(copy, *changes), mode="resume", make_report=False)
        assert rows_of(copy / "ledger.sqlite") == expected, step


def test_the_rewards_lags_and_lengths_of_the_ledger_are_those_of_the_metrics(finished_run: Path) -> None:
    rows = rows_of(finished_run / "ledger.sqlite")
    for line in read_metrics(finished_run / "metrics.jsonl"):
        if line["kind"] == "train":
            of_step = [row for row in rows if row[5] == line["step"]]
            assert sum(row[7] for row in of_step) / 8 == pytest.approx(line["reward"])
            assert max(line["step"] - 1 - row[6] for row in of_step) == line["lag_max"]
            assert 0 < line["time_ledger"] < line["time"]


def test_an_interrupted_lockstep_run_has_nothing_in_flight(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(tmp_path / "run"), make_report=False, progress=InterruptAfter(3))
    assert Counter(row[3] for row in rows_of(tmp_path / "run" / "ledger.sqlite")) == {"trained": 24}


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        ("first_unscored", {("trained", None): 36, ("trained", "no reward"): 12}),
        ("all_unscored", {("filtered", "step skipped: no trajectory has both a reward and a trained token"): 48}),
    ],
)
def test_unscored_trajectories_and_skipped_steps_are_told_apart(
    tmp_path: Path, function: str, counts: dict[tuple[str, str | None], int]
) -> None:
    run = train(
        tiny_config(tmp_path / "run", f"reward.reward_funcs=[{REWARDS}:{function}]", "training.max_skipped_steps=100"),
        make_report=False,
    )
    assert read_ledger(run / "ledger.sqlite").counts == {(State(s), reason): n for (s, reason), n in counts.items()}


_calls = 0


def fails_in_the_fifth_group(completions: list[str], **columns: Any) -> list[float]:
    """Once in this process."""
    global _calls
    _calls += 1
    if _calls == 5:
        raise ZeroDivisionError("the judge has no more paper")
    return digit_mean(completions)


def test_a_grader_that_raises_costs_its_group_and_the_resumed_run_gets_it_back(tmp_path: Path) -> None:
    changes = (f"reward.reward_funcs=[{__file__}:fails_in_the_fifth_group]", "checkpoint.save_steps=1")
    with pytest.raises(Exception, match="no more paper"):
        train(tiny_config(tmp_path / "run", *changes), make_report=False)
    path = tmp_path / "run" / "ledger.sqlite"
    summary = read_ledger(path)
    assert summary.fates == {"trained": 16, "filtered": 0, "failed": 4, "in flight": 4, "unrecorded": 0}
    (failed, running) = summary.not_trained
    assert (failed.group, failed.state, running.group, running.state) == (4, State.FAILED, 5, State.RUNNING)
    assert failed.reason is not None
    assert failed.reason.startswith("grading: ")
    assert "no more paper" in failed.reason
    train(tiny_config(tmp_path / "run", *changes), mode="resume", make_report=False)
    assert read_ledger(path).counts == {(State.TRAINED, None): 48}


def test_a_damaged_ledger_is_moved_aside_and_the_run_goes_on_without_lying(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(4))
    path = tmp_path / "run" / "ledger.sqlite"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(UserError, match=r"the ledger '.*ledger.sqlite' cannot be read \(file is not a database\)"):
        read_ledger(path)
    capsys.readouterr()
    train(config, mode="resume", make_report=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "is damaged (file is not a database): it is now 'ledger.damaged', and a new one is begun" in said
    assert "no record of 8 groups (32 trajectories) that the run is done with: they are counted as unrecorded" in said
    assert path.with_name("ledger.damaged").read_bytes().startswith(b"not a database")
    summary = read_ledger(path)
    assert summary.planned == 48
    assert summary.counts == {(State.TRAINED, None): 16, (State.UNRECORDED, LOST): 32}


def test_a_page_that_is_torn_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, MEMBERS)
    for number in range(200):
        ledger.fates.started(number, "a name that fills the pages" * 3)
    ledger.close()
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)
    said: list[str] = []
    Ledger(path, MEMBERS, note=said.append).close()
    assert len(said) == 1
    assert "is damaged" in said[0]
    assert rows_of(path) == []
    assert path.with_name("ledger.damaged").exists()


def test_a_writer_that_another_one_holds_up_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, timeout=0, **options))
    ledger, other = (Ledger(tmp_path / "ledger.sqlite", MEMBERS) for _ in range(2))
    ledger._connection.execute("BEGIN IMMEDIATE")
    other.fates.started(0, "p")
    with pytest.raises(UserError, match=r"is being written by another process: is the run going on\?"):
        other.write()
    ledger._connection.execute("ROLLBACK")
    ledger.close()
    other.close()
    assert states_of(tmp_path / "ledger.sqlite") == {0: {"running"}}


@pytest.mark.parametrize("groups", [500, 1500], ids=["one-statement", "several-statements"])
def test_what_could_not_be_written_is_written_with_the_next_step(tmp_path: Path, groups: int) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", MEMBERS)
    pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    # SQLite's own full disk, when nearly everything is written
    ledger._connection.execute(f"PRAGMA max_page_count = {pages + groups // 100}")
    for number in range(groups):
        ledger.fates.started(number, f"p{number}")
    with pytest.raises(OSError, match=r"database or disk is full: '.*ledger.sqlite'"):
        ledger.write()
    assert rows_of(tmp_path / "ledger.sqlite") == []
    ledger._connection.execute("PRAGMA max_page_count = 1000000")
    ledger.fates.graded(graded_group(0))
    ledger.check_sums()
    assert states_of(tmp_path / "ledger.sqlite") == {0: {"finished"}} | {n: {"running"} for n in range(1, groups)}
    ledger.close()


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ((2, [], 4, 2), None),
        ((3, [], 4, 2), "has group 2 as finished, but for the run it is done with"),
        ((1, [], 4, 2), "has group 1 as trained, but for the run it is in flight"),
        ((2, [], 3, 2), "has group 3 as running, but for the run it is not started"),
        ((2, [], 6, 2), "lacks 2 groups, the first of them group 4"),
        ((2, [], 4, 3), "has 2 groups as trained, but the run 3"),
    ],
)
def test_a_ledger_that_differs_from_the_run_in_anything_ends_it_with_an_error(
    tmp_path: Path, numbers: tuple[int, list[int], int, int], sentence: str | None
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", MEMBERS)
    for number in range(4):
        ledger.fates.started(number, "p")
    for number in range(3):
        ledger.fates.graded(graded_group(number))
    ledger.fates.trained(1, [0, 1], None)
    if sentence is None:
        ledger.check(*numbers)
    else:
        with pytest.raises(LedgerMismatch, match=sentence):
            ledger.check(*numbers)
    ledger.close()


def test_a_row_that_is_missing_is_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", MEMBERS)
    ledger.fates.started(0, "p")
    ledger.write()
    ledger._connection.execute("DELETE FROM trajectories WHERE member = 1")
    with pytest.raises(LedgerMismatch, match="has 1 trajectories in 1 states for group 0, of which 2 were planned"):
        ledger.check_sums()
    ledger.close()


def test_the_file_itself_refuses_a_fate_without_its_reason_or_step(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", MEMBERS)
    for state in ("trained", "filtered", "failed", "unrecorded", "lost"):
        with pytest.raises(sqlite3.IntegrityError):
            ledger._connection.execute(f"INSERT INTO trajectories (group_id, member, state) VALUES (0, 0, '{state}')")
    ledger.close()


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """The directory of a run in progress, whose ledger is open: two groups trained, one dropped, two in flight."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tiny_config(tmp_path).to_plain()))
    ledger = Ledger(tmp_path / "ledger.sqlite", MEMBERS)
    for number in range(6):
        ledger.fates.started(number, f"p{number}")
    for number in range(4):
        ledger.fates.graded(graded_group(number))
    ledger.fates.trained(1, [0, 1], None)
    ledger.fates.dropped(2, {2: "stale"})
    ledger.fates.failed([4], "sampling: SamplerDied: [gone]")
    ledger.write()
    return tmp_path


def run_command(*words: object) -> str:
    done = CliRunner().invoke(app, ["ledger", *map(str, words)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_accounts_for_a_running_run(running: Path) -> None:
    lines = [line.split() for line in run_command(running).splitlines()]
    for expected in (
        "trained 4", "filtered 2", "2 stale", "failed 2", "2 sampling: SamplerDied: [gone]", "in flight 4",
        "2 graded, waiting for a minibatch", "2 asked for, and not yet graded", "planned 12 the sum",
        f"0 4 {'#' * 40}", "2 2 2 p2 filtered stale", "4 2 p4 failed sampling: SamplerDied: [gone]",
    ):  # fmt: skip
        assert expected.split() in lines, expected


def test_the_command_lists_one_state_and_speaks_json(running: Path) -> None:
    listed = run_command(running, "--state", "failed")
    assert "p4" in listed
    assert "p2" not in listed
    assert "planned" not in listed
    data = json.loads(run_command(running, "--json"))
    assert data["planned"] == sum(data["fates"].values()) == sum(line["trajectories"] for line in data["counts"]) == 12
    assert data["lags"] == {"0": 4}
    assert [(o["group"], o["state"]) for o in data["not_trained"]] == [
        (2, "filtered"),
        (3, "finished"),
        (4, "failed"),
        (5, "running"),
    ]
    in_flight = json.loads(run_command(running, "--json", "--state", "in flight"))
    assert [other["group"] for other in in_flight["not_trained"]] == [3, 5]


def test_the_command_says_what_is_wrong(tmp_path: Path, running: Path) -> None:
    for words, sentence in (
        ((running, "--state", "flying"), "'flying' is no state of trajectories that are not trained"),
        ((tmp_path / "nowhere",), "is not a run directory"),
    ):
        done = CliRunner().invoke(app, ["ledger", *map(str, words)], env={"COLUMNS": "500"})
        assert done.exit_code == 2
        assert sentence in done.output
    (running / "ledger.sqlite").rename(running / "elsewhere")
    done = CliRunner().invoke(app, ["ledger", str(running)])
    assert done.exit_code == 2
    assert "has no ledger (ledger.sqlite): no step of this run has been recorded" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("pacing", ["bounded", "{name: drop_stale, max_ahead: 4}"], ids=["bounded", "drop_stale"])
def test_a_local_run_killed_at_once_and_resumed_accounts_for_everything(tmp_path: Path, pacing: str) -> None:
    run = tmp_path / "run"
    changes = (
        "training.max_steps=100000", "runtime=local", "runtime.max_staleness=1", f"runtime.pacing={pacing}",
        "checkpoint.save_steps=3",
    )  # fmt: skip
    process = start_vcpo("train", tiny_recipe(tmp_path / "r.yaml", *changes), cwd=tmp_path)
    wait_until(has_steps(run, 5), 180, "five steps", process)
    process.kill()  # SIGKILL, in the middle of whatever it does
    process.communicate()
    left = read_ledger(run / "ledger.sqlite")
    assert left.planned == sum(left.fates.values())
    assert left.fates["trained"] >= 5 * 2 * 4
    steps = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")) + 4
    train(tiny_config(run, *changes, f"training.max_steps={steps}"), mode="resume", make_report=False)
    summary = read_ledger(run / "ledger.sqlite")
    assert summary.fates["trained"] == steps * 2 * 4
    assert summary.fates["in flight"] == summary.fates["failed"] == summary.fates["unrecorded"] == 0
    assert summary.planned == sum(summary.fates.values())
    assert max(summary.lags) <= 1
