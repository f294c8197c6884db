"""The benchmarks of speed run at a tiny size, and their arithmetic is right on numbers made by hand."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from vcpo.config import load_config
from vcpo.observe.trace import Trace
from vcpo.records import StopReason
from vcpo.tasks.environment import Turn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = (
    "model.init.hidden_size=16",
    "model.init.intermediate_size=32",
    "model.init.num_hidden_layers=1",
    "model.init.num_attention_heads=2",
    "model.init.num_key_value_heads=2",
    "training.prompts_per_step=2",
    "sampling.num_generations=2",
)


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # the recipes name their task by a path from the project's directory
    monkeypatch.chdir(BENCHMARKS.parent)


def events(process: str, *spans: tuple[str, float, float], marks: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    """Spans (kind, begin, end) of a process' main thread and ends of steps 1, 2, ..., in seconds."""
    recorded: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "MainThread"}},
    ]
    for kind, begin, end in spans:
        times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        recorded.append({"name": kind, "cat": kind, "ph": "X", **times, "pid": 1, "tid": 1, "args": {}})
    for step, at in enumerate(marks, start=1):
        mark = {"ts": at * 1e6, "pid": 1, "tid": 1, "args": {"step": step}}
        recorded.append({"name": "step", "cat": "step", "ph": "i", **mark})
    return recorded


def test_times_count_from_the_first_token_and_leave_out_what_is_idle() -> None:
    from harness.overlap import times

    learner = events(
        "learner",
        ("warm start", 0, 5),
        ("waiting for rollouts", 5, 14),
        ("training", 14, 17),
        ("publishing weights", 17, 18),
        ("waiting for rollouts", 18, 19),
        ("training", 19, 22),
        marks=(18.0, 22.0),
    )
    sampler = events(
        "sampler-0",
        ("loading", 6, 9),
        ("idle", 9, 9.5),
        ("loading weights", 9.5, 10),
        ("decoding", 10, 16),
        ("idle", 16, 17),
        ("waiting for environments", 17, 18),
        ("decoding", 18, 24),  # two seconds of it after the last step
    )
    found = times(Trace({"learner": learner, "sampler-0": sampler}))
    at = {1: 8.0, 2: 12.0}
    assert found == {"steps": 2, "begin": 10.0, "seconds": 12.0, "t_sample": 10.0, "t_train": 7.0, "at": at}


def test_perfect_overlap_needs_the_processors_that_sandboxes_take_too() -> None:
    from harness.overlap import needed

    run = {"t_sample": 3.0, "t_train": 4.0}
    assert needed(run) == 4.0
    assert needed({**run, "processor_seconds": 6.0, "cores": 2}) == 4.0
    assert needed({**run, "processor_seconds": 13.0, "cores": 2}) == 6.5


def test_processor_time_is_read_between_any_two_moments() -> None:
    from harness.processors import ProcessorTime, busy_seconds

    tick = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, waiting, interrupts, soft interrupts, stolen, guests (counted in user already)
    counts = [tick * seconds for seconds in (1, 2, 4, 100, 100, 8, 16, 100, 1, 0)]
    assert busy_seconds(f"cpu  {' '.join(map(str, counts))}\ncpu0 1 2 3") == 31.0
    now = [10.0]
    times = ProcessorTime(read=lambda: {10.0: 1.0, 12.0: 2.0, 16.0: 4.0}[now[0]], clock=lambda: now[0])
    times.close()
    del times._times[1:], times._seconds[1:]  # what the thread may have added
    for now[0] in (12.0, 16.0):
        times.sample()
    assert times.between(11.0, 15.0) == pytest.approx(3.5 - 1.5)
    assert times.between(0.0, 99.0) == pytest.approx(3.0)


def test_curves_of_learning_to_call_a_tool_are_kept_beside_the_tables(tmp_path: Path) -> None:
    import tool_learning

    run, comparison = tmp_path / "runs" / "vcpo-seed1", tmp_path
    run.mkdir(parents=True)
    trained = {"reward_parts/asked": 0.5, "reward_parts/unaided": 0.0, "ess": 0.912345, "lag_mean": 2.0}
    lines = [
        {"step": 0, "time": 0.0, "kind": "eval", "accuracy": 0.25},
        {"step": 1, "time": 1.0, "kind": "train", **trained},
        {"step": 2, "time": 2.0, "kind": "train", **trained, "reward_parts/asked": 0.75},
        {"step": 2, "time": 2.0, "kind": "eval", "accuracy": 0.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "environment.json").write_text(json.dumps([{"started": 0.0, "ended": 1.0, "outcome": "finished"}]))
    for name in tool_learning.TABLES:
        (comparison / name).write_text(name)
    facts = {"variant": "vcpo", "seed": 1, "run_dir": "runs/vcpo-seed1"}
    (comparison / "results.json").write_text(json.dumps({"runs": [facts]}))
    words = [str(comparison), "--out", str(tmp_path / "kept"), "--image", str(tmp_path / "figure.png")]
    assert CliRunner().invoke(tool_learning.app, words, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "kept" / "curves.csv").read_text().split() == [
        "variant,seed,step,accuracy,asked,unaided,ess,lag_mean",
        "vcpo,1,0,0.25,,,,",
        "vcpo,1,1,,0.5,0.0,0.9123,2.0",
        "vcpo,1,2,0.5,0.75,0.0,0.9123,2.0",
    ]
    assert (tmp_path / "kept" / "results.md").read_text() == "results.md"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_what_runs_of_a_real_model_have_logged_is_kept_and_drawn(tmp_path: Path) -> None:
    import real_model

    run = tmp_path / "run"
    run.mkdir()
    line = {"step": 1, "time": 1.0, "kind": "train", "reward": 0.5, "ess": 0.9, "kl_k3": 0.1, "grad_norm": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run / "config.yaml").write_text("seed: 0\n")
    session = {
        "started": 0.0,
        "ended": 1.0,
        "outcome": "finished",
        "command": ["/home/me/.venv/bin/vcpo", "train", "r.yaml"],
    }
    (run / "environment.json").write_text(json.dumps([session]))
    words = [f"all weights={run}", "--out", str(tmp_path / "kept"), "--image", str(tmp_path / "figure.png")]
    assert CliRunner().invoke(real_model.app, words, catch_exceptions=False).exit_code == 0
    kept = tmp_path / "kept" / "all-weights"
    assert (kept / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert json.loads((kept / "environment.json").read_text())[0]["command"] == ["vcpo", "train", "r.yaml"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_programs_of_the_slow_tool_wait_as_long_as_problem_and_seed_say() -> None:
    from harness.slow_tool import SlowToolTask

    sandbox = {"executor": "subprocess", "allow_unsafe": True, "warm": 1, "max_concurrent": 2}
    task = SlowToolTask(digits=2, min_wait=0.2, max_wait=0.4, sandbox=sandbox)
    problem = task.train_problem(0, 0)
    programs = [task.environment(problem, seed).program("12*34") for seed in (5, 5, 6)]
    assert programs[0] == programs[1] != programs[2]
    begin, wait, end = programs[0].split("\n")
    assert (begin, end) == ("import time", "print(12*34)")
    assert 0.2 <= float(wait.removeprefix("time.sleep(").removesuffix(")")) <= 0.4
    turn = Turn(0, "<12*34>", np.zeros(0, dtype=np.int64), StopReason.STOP_STRING)
    answer = task.environment(problem, 5).step(turn)
    task.tool.close()
    assert answer.text == "408="
    assert answer.measurements["tool_seconds"] >= 0.2


def test_the_time_to_an_accuracy_lies_between_the_evaluated_steps() -> None:
    from harness.overlap import time_to

    at = {10: 4.0, 20: 9.0}
    curve = {0: 0.2, 10: 0.4, 20: 0.8}
    assert time_to(curve, at, 0.3) == pytest.approx(2.0)
    assert time_to(curve, at, 0.6) == pytest.approx(6.5)
    assert time_to(curve, at, 0.8) == 9.0
    assert time_to(curve, at, 0.1) == 0.0
    assert time_to(curve, at, 0.9) is None


def result_of(mode: str, seed: int, seconds: float, t: tuple[float, float], accuracies: dict[str, float]) -> Any:
    """A run's result as it is read from its file."""
    at = {"1": seconds / 2, "2": seconds}
    facts = {"mode": mode, "seed": seed, "steps": 2, "seconds": seconds, "t_sample": t[0], "t_train": t[1]}
    return {**facts, "at": at, "accuracies": accuracies}


def with_processors(run: Any, seconds: float) -> Any:
    return {**run, "processor_seconds": seconds, "cores": 2}


def test_a_case_is_summarized_by_pairs_of_runs_with_one_seed() -> None:
    from async_speedup import judged

    runs = [
        result_of("sync", 1, 10.0, (4.0, 6.0), {"0": 0.0, "1": 0.5, "2": 0.8}),
        result_of("async", 1, 5.0, (3.0, 4.5), {"0": 0.0, "1": 0.38, "2": 0.8}),
        result_of("sync", 2, 12.0, (5.0, 6.0), {"0": 0.0, "1": 0.5, "2": 0.7}),
        result_of("async", 2, 5.0, (4.6, 4.0), {"0": 0.0, "1": 0.1, "2": 0.6}),
        result_of("sync", 3, 99.0, (5.0, 6.0), {"0": 0.0, "2": 0.7}),  # without its partner it does not count
    ]
    found = judged("uniform", runs)
    assert found["seeds"] == [1, 2]
    assert found["speedups"] == pytest.approx([2.0, 2.4])
    assert found["speedup"] == pytest.approx(2.2)
    assert found["bound_share"] == pytest.approx((4.5 + 4.6) / 2 / 5)
    assert found["speedup_bound"] == pytest.approx((10 / 4.5 + 12 / 4.6) / 2)
    assert found["accuracy_target"] == pytest.approx(0.95 * 0.75)
    assert found["reached"] == [[True, True], [False, False]]
    target = 0.95 * 0.75
    first, second = 5 + 5 * (target - 0.5) / 0.3, 2.5 + 2.5 * (target - 0.38) / 0.42
    assert found["speedup_to_accuracy"] == pytest.approx(first / second)
    assert found["accuracy_difference"] == pytest.approx(-0.05)
    assert found["accuracy_difference_stderr"] == pytest.approx(0.05)
    assert (found["seconds_sync"], found["t_sample_async"]) == pytest.approx((5.5, 1.9))
    assert found["accuracies_equal"]
    assert found["bars_met"]


def test_busy_processors_are_the_bound_where_they_were_measured() -> None:
    from async_speedup import _table, judged

    sync = with_processors(result_of("sync", 1, 10.0, (4.0, 5.0), {"0": 0.0, "2": 0.8}), 12.0)
    both = [sync, with_processors(result_of("async", 1, 6.0, (3.0, 3.5), {"0": 0.0, "2": 0.8}), 11.4)]
    found = judged("tool", both)
    assert (found["busy_sync"], found["busy_async"]) == pytest.approx((1.2, 1.9))
    assert found["bound_share"] == pytest.approx(5.7 / 6)
    assert found["bars_met"]
    old = judged(
        "uniform",
        [result_of("sync", 1, 9.0, (4.0, 5.0), {"2": 0.8}), result_of("async", 1, 5.0, (4.0, 5.0), {"2": 0.8})],
    )
    assert "busy_async" not in old
    table = _table({"uniform": old, "tool": found})
    assert "| share of it | processors busy | to the" in table
    assert "| 95% | 1.20, 1.90 | " in table
    assert "| 100% |  | " in table
    assert "processors" not in _table({"uniform": old})


def test_lower_accuracy_or_idle_processes_miss_the_bar() -> None:
    from async_speedup import judged

    sync = result_of("sync", 1, 10.0, (4.0, 6.0), {"0": 0.0, "2": 0.8})
    worse = result_of("async", 1, 5.0, (3.0, 4.9), {"0": 0.0, "2": 0.7})
    assert not judged("uniform", [sync, worse])["bars_met"]
    idle = result_of("async", 1, 5.0, (3.0, 4.4), {"0": 0.0, "2": 0.8})
    assert not judged("uniform", [sync, idle])["bars_met"]
    slow = result_of("async", 1, 6.0, (3.0, 5.9), {"0": 0.0, "2": 0.8})
    assert not judged("uniform", [sync, slow])["bars_met"]


@pytest.mark.slow
def test_a_tiny_job_is_timed_and_evaluated_and_its_result_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import async_speedup

    words = [*TINY, "training.max_steps=2", "warm_start.steps=1", "eval.num_problems=2", "checkpoint.save_steps=1"]
    found = async_speedup.measure("uniform", "async", 1, words, tmp_path, False)
    assert list(found["at"]) == list(found["accuracies"]) == ["1", "2"]
    assert 0 < found["t_sample"] < found["seconds"]
    assert 0 < found["t_train"] < found["seconds"]
    assert 0 < found["processor_seconds"] < 100 * found["seconds"]
    assert "begin" not in found
    assert {path.name for path in tmp_path.iterdir()} == {f"uniform-async-seed1.{end}" for end in ("json", "log")}
    monkeypatch.setattr(async_speedup, "train", lambda *_: pytest.fail("a finished run is not made again"))
    assert async_speedup.measure("uniform", "async", 1, words, tmp_path, False) == found
    with pytest.raises(typer.BadParameter, match="other overrides"):
        async_speedup.measure("uniform", "async", 1, [], tmp_path, False)


def test_results_become_a_table_and_the_exit_code_says_whether_the_bars_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import async_speedup

    def measured(case: str, mode: str, seed: int, *_: object) -> Any:
        seconds = {"sync": 12.0 + seed, "async": 6.0}[mode]
        return {"case": case, **result_of(mode, seed, seconds, (5.0, 5.9), {"1": 0.5, "2": 0.9})}

    monkeypatch.setattr(async_speedup, "measure", measured)
    arguments = ["--cases", "uniform,long_tailed", "--seeds", "1,2", "--out", str(tmp_path)]
    assert CliRunner().invoke(async_speedup.app, arguments).exit_code == 0
    table = CliRunner().invoke(async_speedup.app, ["table", str(tmp_path)]).stdout
    assert "| uniform | 6750 | 2500, 2950 | 3000 | 2500, 2950 | 2.25 (2.17 to 2.33) | 2.29 | 98% | 2.25 |" in table
    assert "| 90.0%, 90.0% | +0.0 points ± 0.0 |" in table
    assert "| long-tailed |" in table
    assert CliRunner().invoke(async_speedup.app, [*arguments, "--cases", "waiting"]).exit_code == 1


@pytest.mark.parametrize("case", ["uniform", "long_tailed", "waiting", "tool", "slow_tool"])
def test_the_jobs_of_the_speedup_are_valid_and_asynchronous(case: str) -> None:
    import async_speedup

    config = load_config(async_speedup.RECIPES / f"{case}.yaml")
    assert config.runtime.name == "local"
    assert config.runtime.max_staleness > 0
    assert (config.runtime.samplers, config.runtime.sampler_threads, config.runtime.learner_threads) == (1, 1, 1)
    assert not config.eval.eval_steps  # nothing is evaluated in the time that counts


def test_counting_is_answered_by_the_numbers_and_has_a_long_tail() -> None:
    from harness.counting import CountingTask

    task = CountingTask(longest=50)
    problem = task.eval_problems(1)[0]
    count, mark = int(str(problem.prompt)[:2]), str(problem.prompt)[2]
    answer = "".join(f"{number:02}{mark}" for number in reversed(range(1, count + 1)))
    assert [grade.reward for grade in task.grade([problem, problem], [answer, answer + mark])] == [1.0, 0.0]
    assert task.demonstration(problem, random.Random(0)) == answer
    counts = np.array([int(str(task.train_problem(i, 0).prompt)[:2]) for i in range(2000)])
    assert counts.min() == 2
    assert counts.max() == 50
    assert 0.15 < (counts >= 10).mean() < 0.25  # 2/10
    assert 0.02 < (counts == 50).mean() < 0.06  # 2/50


def test_lengths_to_sample_are_equal_or_long_tailed_and_prompts_tell_them() -> None:
    from sampling import Load, lengths, make_requests

    load = Load(requests=4000, group=8, prompt=4, mean=16, longest=100)
    assert set(lengths("uniform", load, 1)) == {16}
    drawn = lengths("long-tailed", load, 1)
    assert 13 < drawn.mean() < 19
    assert (drawn.min(), drawn.max()) == (1, 100)
    requests = make_requests("long-tailed", load, 128, 1)
    assert [int(request.prompt_ids[-1]) for request in requests] == (drawn + 1).tolist()
    assert np.array_equal(requests[0].prompt_ids[:-1], requests[7].prompt_ids[:-1])


def test_sampling_is_measured_with_equal_responses_on_both_sides(tmp_path: Path) -> None:
    import sampling

    options = "--sizes XS --requests 12 --group 4 --prompt 4 --mean 5 --longest 16 --slots 4 --batches 4,12 --rounds 2"
    done = CliRunner().invoke(sampling.app, [*options.split(), "--out", str(tmp_path)])
    assert not isinstance(done.exception, RuntimeError)  # which says that responses have other lengths
    uniform, tailed = json.loads((tmp_path / "sampling.json").read_text(encoding="utf-8"))["cells"]
    assert uniform["tokens"] == [60, 60]
    assert len(tailed["engine_seconds"]) == len(tailed["generate_seconds"]) == 2
    assert set(tailed["generate_seconds_by_batch"]) == {"4", "12"}
    assert "| XS, long-tailed |" in CliRunner().invoke(sampling.app, ["table", str(tmp_path)]).stdout


def test_rates_are_medians_over_rounds() -> None:
    from sampling import rates

    found = rates([100, 100, 100], [1.0, 2.0, 4.0], [3.0, 2.0, 16.0])
    assert found == {"engine_tokens_per_second": 50, "generate_tokens_per_second": 100 / 3, "ratio": 3.0}


def test_the_share_of_publishing_is_of_each_step_but_the_first() -> None:
    from weight_publication import shares

    learner = events(
        "learner", ("publishing weights", 9, 10), ("publishing weights", 18, 19), ("publishing weights", 38, 40),
        marks=(10.0, 20.0, 40.0),
    )  # fmt: skip
    sampler = events("sampler-0", ("loading weights", 10, 10.5), ("loading weights", 19.5, 20.5))
    found = shares(Trace({"learner": learner, "sampler-0": sampler}))
    assert found["step_seconds"] == [10.0, 20.0]
    assert found["published_seconds"] == [1.0, 2.0]
    assert found["loaded_seconds"] == [1.0, 0.5]
    assert (found["share_published"], found["share_loaded"]) == pytest.approx((0.1, 0.0625))
    assert (found["share"], found["largest_share"]) == pytest.approx(((0.2 + 0.125) / 2, 0.2))


@pytest.mark.slow
def test_the_publication_of_tiny_weights_is_measured() -> None:
    import weight_publication

    result = weight_publication.measure(3, [*TINY, "sampling.slots=4"])
    assert len(result["step_seconds"]) == 2
    assert 0 < result["share_published"] < result["share"] < 1
    assert result["responses_per_step"] == 4
    assert result["parameters"] < 10_000


def test_the_model_whose_publication_is_measured_has_30_million_parameters(tmp_path: Path) -> None:
    import weight_publication

    init = weight_publication.configure(2, [], tmp_path).model.init
    assert init is not None
    hidden, layers = init.hidden_size, init.num_hidden_layers
    attention = 4 * hidden * hidden + 3 * hidden
    matrices = attention + 3 * hidden * init.intermediate_size
    total = layers * (matrices + 2 * hidden) + hidden + hidden * (len(init.characters) + 2)
    assert total == pytest.approx(30e6, rel=0.05)
