"""The timeline: what is recorded, what survives a kill, how processes are joined, and whose time is whose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from run_cases import tiny_config
from vcpo.cli import app
from vcpo.errors import UserError
from vcpo.observe.timeline import DIRECTORY, Timeline, clear_timeline
from vcpo.observe.trace import Share, Trace, read_trace
from vcpo.pipeline.run import train


def spans(run_dir: Path, process: str = "learner") -> list[dict[str, Any]]:
    """Recorded spans in the order of writing."""
    return [event for event in read_trace(run_dir).events[process] if event["ph"] == "X"]


def span(kind: str, begin: float, end: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    """A span with times in seconds."""
    times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {"name": kind, "cat": kind, "ph": "X", **times, "pid": 1, "tid": thread, "args": args}


def names(process: str, *threads: str) -> list[dict[str, Any]]:
    """The events that name a process and its threads 1, 2, ..."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}}]
    return events + [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}}
        for number, name in enumerate(threads, start=1)
    ]


def step(number: int, at: float) -> dict[str, Any]:
    return {"name": "", "cat": "step", "ph": "i", "ts": at * 1e6, "pid": 1, "tid": 1, "args": {"step": number}}


def test_a_span_is_recorded_with_its_kind_arguments_and_times(tmp_path: Path) -> None:
    timeline = Timeline.open(tmp_path, "learner", 1)
    before = timeline.now()
    with timeline.span("training", groups=3):
        pass
    after = timeline.now()
    timeline.close()
    (recorded,) = spans(tmp_path)
    assert (recorded["cat"], recorded["args"], recorded["pid"]) == ("training", {"groups": 3}, os.getpid())
    assert before / 1000 <= recorded["ts"] <= recorded["ts"] + recorded["dur"] <= after / 1000


def test_a_span_that_an_exception_ends_is_recorded(tmp_path: Path) -> None:
    timeline = Timeline.open(tmp_path, "learner", 1)
    with pytest.raises(ValueError, match="wrong"), timeline.span("training"):
        raise ValueError("wrong")
    timeline.close()
    assert [recorded["cat"] for recorded in spans(tmp_path)] == ["training"]


def test_short_spans_of_one_title_become_one_that_sums_their_amounts(tmp_path: Path) -> None:
    timeline = Timeline.open(tmp_path, "sampler-0", 9)
    begin = timeline.now()
    for version, tokens in ((1, 4), (1, 3), (2, 2)):
        timeline.more("decode", begin, f"decode v{version}", {"prefill": 0.25}, tokens=tokens)
    with timeline.span("load weights"):
        pass
    timeline.more("decode", timeline.now(), "decode v2", tokens=1)
    timeline.close()
    assert [(each["name"], each["args"]) for each in spans(tmp_path, "sampler-0")] == [
        ("decode v1", {"times": 2, "tokens": 7, "seconds_of": {"prefill": 0.5}}),
        ("decode v2", {"times": 1, "tokens": 2, "seconds_of": {"prefill": 0.25}}),
        ("load weights", {}),
        ("decode v2", {"times": 1, "tokens": 1}),
    ]


def test_a_merged_span_ends_at_a_pause_and_after_a_tenth_of_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline.open(tmp_path, "sampler-0", 9)
    clock = iter([10_000_000, 11_000_000, 30_000_000, 150_000_000, 151_000_000])
    monkeypatch.setattr("vcpo.observe.timeline.time.monotonic_ns", lambda: next(clock))
    for begin in (0, 10_500_000, 29_000_000, 30_100_000, 150_100_000):
        timeline.more("decode", begin)
    monkeypatch.undo()
    timeline.close()
    found = [(each["ts"], each["dur"], each["args"]["times"]) for each in spans(tmp_path, "sampler-0")]
    assert found == [(0, 11_000, 2), (29_000, 121_000, 2), (150_100, 900, 1)]


def test_threads_have_tracks_of_their_own_and_lose_nothing(tmp_path: Path) -> None:
    timeline = Timeline.open(tmp_path, "learner", 1)

    def record() -> None:
        for _ in range(200):
            with timeline.span("grading"):
                timeline.more("part", timeline.now())

    threads = [threading.Thread(target=record, name=f"thread {number}") for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    recorded = spans(tmp_path)
    by_thread = {each["tid"]: 0 for each in recorded}
    for each in recorded:
        by_thread[each["tid"]] += each["cat"] == "grading"
    assert len(recorded) == 1200
    assert sorted(by_thread.values()) == [200, 200, 200]


def test_nothing_is_recorded_beyond_the_last_step_nor_when_it_is_off(tmp_path: Path) -> None:
    timeline = Timeline.open(tmp_path, "learner", 7)
    for number in (6, 7, 8):
        timeline.step_is(number)
        timeline.counter("waiting", number)
    assert not timeline.is_on
    assert list(read_trace(tmp_path).steps()) == [6, 7]
    off = Timeline.off()
    with off.span("training"):
        off.more("decode", off.now())
    off.counter("waiting", 1)
    off.step_is(1)
    off.close()
    assert os.listdir(tmp_path) == [DIRECTORY]


def test_a_killed_process_leaves_what_it_has_written_and_its_successor_goes_on(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from vcpo.observe import timeline
timeline._FLUSH_AFTER = 0
record = timeline.Timeline.open(Path({str(tmp_path)!r}), "sampler-0", 9)
with record.span("decode"):
    pass
os.write(os.open({str(tmp_path / DIRECTORY / "sampler-0.jsonl")!r}, os.O_WRONLY | os.O_APPEND), b'{{"name": "torn')
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    successor = Timeline.open(tmp_path, "sampler-0", 9)
    with successor.span("prefill"):
        pass
    successor.close()
    assert [each["cat"] for each in spans(tmp_path, "sampler-0")] == ["decode", "prefill"]
    clear_timeline(tmp_path)
    assert not (tmp_path / DIRECTORY).exists()


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).write_text("in the way", encoding="utf-8")
    timeline = Timeline.open(tmp_path, "learner", 1)
    assert not timeline.is_on
    with timeline.span("training"):
        pass
    timeline.close()


def test_time_within_a_span_belongs_to_the_inner_one_and_parts_to_their_kind() -> None:
    events = [
        *names("learner", "MainThread", "vcpo-collector"),
        span("waiting", 0, 10),  # 10 - 4 - 1 = 5
        span("sampling", 2, 6),  # 4 - 1 = 3
        span("grading", 5, 6),  # 1
        span("grading", 7, 8),  # 1
        span("decode", 10, 14, times=8, seconds_of={"prefill": 1.5}),  # 4 - 1.5
        span("grading", 3, 5, thread=2),
    ]
    assert Trace({"learner": events}).shares(0, 20) == [
        Share("learner", "MainThread", "waiting", 1, 5.0),
        Share("learner", "MainThread", "sampling", 1, 3.0),
        Share("learner", "MainThread", "decode", 8, 2.5),
        Share("learner", "MainThread", "grading", 2, 2.0),
        Share("learner", "MainThread", "prefill", 0, 1.5),
        Share("learner", "vcpo-collector", "grading", 1, 2.0),
    ]


def test_a_span_counts_with_the_part_that_lies_in_the_window() -> None:
    events = [
        *names("learner", "MainThread"),
        step(1, 4.0),
        step(2, 9.0),
        span("waiting", 0, 2),
        span("decode", 2, 6, times=4, seconds_of={"prefill": 1.0}),
        span("training", 6, 12),
    ]
    trace = Trace({"learner": events})
    assert trace.window() == (4.0, 9.0)
    assert trace.window(skip=0) == (0.0, 9.0)
    assert {share.kind: (share.times, share.seconds) for share in trace.shares(4.0, 9.0)} == {
        "decode": (2, 1.5),
        "prefill": (0, 0.5),
        "training": (0, 3.0),
    }
    with pytest.raises(UserError, match="holds 2 optimizer steps, of which the first 2 are left out"):
        trace.window(skip=2)


def test_the_chrome_trace_begins_at_0_and_lists_the_learner_first(tmp_path: Path) -> None:
    for process in ("sampler-0", "learner"):
        timeline = Timeline.open(tmp_path, process, 1)
        with timeline.span("work"):
            pass
        timeline.counter("waiting", 2.0)
        timeline.close()
    trace = read_trace(tmp_path)
    assert list(trace.events) == ["learner", "sampler-0"]
    events = trace.to_chrome()["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0
    order = [event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"]
    assert order == [0, 1]
    assert all({"name", "ph", "pid"} <= event.keys() for event in events)
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"value": 2.0}] * 2


def test_a_run_records_its_first_steps_and_the_command_shows_them(tmp_path: Path) -> None:
    changes = ("logging.timeline_steps=3", "training.max_steps=4", "eval.eval_steps=2", "eval.num_problems=2")
    run = train(tiny_config(tmp_path / "run", *changes), make_report=False)
    assert list(read_trace(run).steps()) == [1, 2, 3]
    answer = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["timeline", str(run)], catch_exceptions=False)
    assert answer.exit_code == 0
    for kind in ("training", "sampling", "grading", "publishing weights", "ledger", "evaluation", "not recorded"):
        assert kind in answer.stdout
    assert "from the end of step 1 to that of step 3" in answer.stdout
    trace = json.loads((run / DIRECTORY / "trace.json").read_text(encoding="utf-8"))
    assert {event["cat"] for event in trace["traceEvents"] if "cat" in event} >= {"training", "sampling"}


def test_the_sampler_says_what_it_decodes_and_when_it_has_nothing_to_do(tmp_path: Path) -> None:
    changes = ("runtime=local", "logging.timeline_steps=3", "training.max_steps=3", "reward.processes=0")
    run = train(tiny_config(tmp_path / "run", *changes), make_report=False)
    recorded = spans(run, "sampler-0")
    assert {each["cat"] for each in recorded} >= {"loading", "idle", "loading weights", "decoding"}
    decoding = [each["args"] for each in recorded if each["cat"] == "decoding"]
    assert sum(args["responses"] for args in decoding) >= 3 * 2 * 4  # every response takes at least one step
    assert all(sum(args.get("seconds_of", {}).values()) > 0 for args in decoding[:1])  # the prompts' tokens
    steps = [event for event in read_trace(run).events["sampler-0"] if event.get("cat") == "step"]
    assert steps[0]["args"] == {"step": 0}  # the weights that it began with


def test_a_resumed_run_records_anew(tmp_path: Path) -> None:
    changes = ("logging.timeline_steps=2", "training.max_steps=3")
    train(tiny_config(tmp_path / "run", *changes), make_report=False)
    longer = tiny_config(tmp_path / "run", "logging.timeline_steps=2", "training.max_steps=6")
    run = train(longer, mode="resume", make_report=False)
    assert list(read_trace(run).steps()) == [4, 5]


def test_a_run_without_a_timeline_is_refused_with_the_option_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no timeline: .* logging\.timeline_steps=N"):
        read_trace(tmp_path)
