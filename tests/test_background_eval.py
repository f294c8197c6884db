"""Evaluations beside the training: of the right weights, without stopping it, and never its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from run_cases import InterruptAfter, gone_within, has_steps, start_vcpo, tiny_config, tiny_recipe, wait_until
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.loading import end_token_ids, load_model
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress
from vcpo.observe.summary import summarize
from vcpo.pipeline.background_eval import BackgroundEvaluation
from vcpo.pipeline.eval_subject import find_subject
from vcpo.pipeline.evaluate import Evaluator
from vcpo.pipeline.grading_pool import make_task_and_grading
from vcpo.pipeline.run import train
from vcpo.pipeline.standalone_eval import evaluate_model

# the task's answers wait for a file, in the thread of the evaluation alone
WAITING = """
import time
from pathlib import Path
from vcpo.tasks.sort import SortTask

class WaitingSort(SortTask):
    def answer_of(self, problem, completion):
        while not (Path(__file__).parent / "go").exists():
            time.sleep(0.01)
        return completion or None
"""
LOCAL = ("runtime.name=local", "eval.background=true", "eval.eval_steps=2", "eval.num_problems=6",
         "eval.num_generations=2", "checkpoint.save_steps=2", "checkpoint.save_total_limit=9")  # fmt: skip


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[str]:
    """The override that names a task whose evaluations end when the file ``go`` is there."""
    path = tmp_path / "waiting.py"
    path.write_text(WAITING)
    yield f"task={{name: '{path}:WaitingSort', digits: 4}}"
    (tmp_path / "go").touch()


class At(Progress):
    """A display that does something when a training step is logged, and remembers notes."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        super().__init__(6)
        self.notes: list[str] = []
        self._step, self._action = step, action

    def log(self, step: int, kind: Any, metrics: Mapping[str, float]) -> None:
        super().log(step, kind, metrics)
        if kind == "train" and step == self._step:
            self._action()

    def note(self, text: str) -> None:
        self.notes.append(text)


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """By step, without what depends on the clock."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
    timed = ("time", "step", "kind", "time_evaluation")
    return {line["step"]: {k: v for k, v in line.items() if k not in timed} for line in lines}


def evaluated_alone(run: Path, step: int) -> dict[str, float]:
    """The same evaluation in this process, of the checkpoint of the step."""
    return evaluate_model(find_subject(str(run / "checkpoints" / f"step-{step:06d}"), None), None).metrics


def evaluated_untrained(config: RunConfig) -> dict[str, float]:
    """The evaluation of the first step, in this process."""
    model, _ = load_model(config.model, config.seed)
    return evaluator_of(config).run(model).metrics


def evaluator_of(config: RunConfig) -> Evaluator:
    task, grading = make_task_and_grading(config)
    model, tokenizer = load_model(config.model, config.seed)
    ends = end_token_ids(model, tokenizer)
    return Evaluator(task, grading, tokenizer, config.eval, config.sampling, ends, config.seed)


@pytest.mark.slow
def test_the_training_goes_on_and_late_results_stand_at_their_step(tmp_path: Path, waiting: str) -> None:
    run = tmp_path / "run"
    progress = At(4, (tmp_path / "go").touch)
    train(tiny_config(run, *LOCAL, waiting, "logging.tensorboard=true"), progress=progress, make_report=False)
    raw = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    order = [(line["kind"], line["step"]) for line in raw]
    assert order.index(("eval", 0)) > order.index(("train", 4)), "the evaluation ended after the fourth step"
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == sorted(line["step"] for line in raw)
    assert lines[0]["kind"] == "eval"
    trains = {line["step"]: line for line in lines if line["kind"] == "train"}
    # those of steps 2 and 4 fell due while that of step 0 was running
    assert trains[3]["evaluations_skipped"] == 1
    assert sum("the evaluation of step 2 is skipped" in note for note in progress.notes) == 1
    accuracies = [line["accuracy"] for line in lines if line["kind"] == "eval"]
    assert summarize(run).eval_accuracies == accuracies
    # the weights are those of the step, whatever the training has made of them meanwhile
    assert evaluations(run)[0] == evaluated_untrained(tiny_config(run, *LOCAL))
    assert evaluations(run)[6] == evaluated_alone(run, 6)
    assert not (run / "evaluation").exists()
    assert tensorboard_steps(run) == sorted(evaluations(run))


def tensorboard_steps(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4, 5, 6]
    return sorted(event.step for event in events.Scalars("eval/accuracy"))


@pytest.mark.slow
def test_a_resumed_run_does_again_what_was_not_finished(tmp_path: Path, waiting: str) -> None:
    """Once in the middle of training, then when only evaluations are left to do."""
    run, go = tmp_path / "run", tmp_path / "go"
    words = [*LOCAL, waiting, "training.max_steps=4"]
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(run, *words), progress=InterruptAfter(3), make_report=False)
    assert [path.name for path in (run / "evaluation").glob("*")] == ["step-000000.safetensors"]
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(run, *words), mode="resume", progress=InterruptAfter(4), make_report=False)
    assert (run / "model").is_dir()
    assert evaluations(run) == {}
    go.touch()
    train(tiny_config(run, *words), mode="resume", progress=Progress(4), make_report=False)
    expected = {0: evaluated_untrained(tiny_config(run, *words)), 4: evaluated_alone(run, 4)}
    assert evaluations(run) == expected
    assert not (run / "evaluation").exists()


def test_lockstep_evaluates_between_its_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.background=true needs runtime=local"):
        tiny_config(tmp_path, "eval.background=true")


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    recipe = tiny_recipe(tmp_path / "recipe.yaml", *LOCAL, "task={name: 'waiting.py:WaitingSort', digits: 4}",
                         "training.max_steps=100000")  # fmt: skip
    process = start_vcpo("train", recipe, cwd=tmp_path)
    try:
        wait_until(has_steps(tmp_path / "run", 2), 60, "two steps", process)
        processes = psutil.Process(process.pid).children(recursive=True)
        assert len(processes) == 2, "a sampler and the evaluation"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert gone_within(processes, 20)
    assert (tmp_path / "run" / "evaluation" / "step-000000.safetensors").exists()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BackgroundEvaluation, list[str], Path]]:
    """An evaluation beside no training, with its notes and the run directory."""
    run, notes = tmp_path_factory.mktemp("run"), list[str]()
    config = tiny_config(run, *LOCAL, "runtime.hang_timeout=1.0")
    model, _ = load_model(config.model, config.seed)
    evaluation = BackgroundEvaluation(config, model, evaluator_of(config), run, notes.append)
    yield evaluation, notes, run
    evaluation.close()
    evaluation.close()


@pytest.fixture
def beside(process: tuple[BackgroundEvaluation, list[str], Path]) -> tuple[BackgroundEvaluation, list[str]]:
    """The same, with no notes yet; the process of the test before is used again."""
    evaluation, notes, _ = process
    notes.clear()
    return evaluation, notes


def process_of(evaluation: BackgroundEvaluation) -> psutil.Process:
    while evaluation._sampler is None:
        threading.Event().wait(0.01)
    return psutil.Process(evaluation._sampler.process.pid)


def result_of(evaluation: BackgroundEvaluation) -> tuple[int, dict[str, float]] | None:
    result = None
    while result is None and evaluation.running is not None:
        evaluation.wait()
        result = evaluation.take_result()
    return result


def test_a_process_that_dies_is_replaced_once(process: tuple[BackgroundEvaluation, list[str], Path]) -> None:
    evaluation, notes, run = process
    assert evaluation.start(3)
    process_of(evaluation).kill()
    found = result_of(evaluation)
    assert found is not None
    step, metrics = found
    assert step == 3
    assert metrics["problems"] == 6
    (note,) = notes
    assert note.startswith("the evaluation of step 3 failed, trying once more: the evaluation's process (pid ")
    assert (run / "evaluation" / "step-000003.safetensors").exists()
    evaluation.done(3)
    assert not (run / "evaluation").exists()


def test_one_that_dies_twice_is_given_up_and_the_next_is_evaluated(
    beside: tuple[BackgroundEvaluation, list[str]],
) -> None:
    evaluation, notes = beside
    evaluation.start(3)
    process_of(evaluation).kill()
    first = evaluation._sampler
    while evaluation._sampler in (first, None):
        evaluation.wait(0.01)
    process_of(evaluation).kill()
    assert result_of(evaluation) is None
    assert "failed, it has no metrics" in notes[-1]
    assert evaluation.metrics() == {"evaluations_skipped": 0, "evaluations_failed": 1}
    assert evaluation.start(4)
    found = result_of(evaluation)
    assert found is not None
    assert found[0] == 4
    evaluation.done(4)


def test_a_process_that_hangs_is_replaced(beside: tuple[BackgroundEvaluation, list[str]]) -> None:
    evaluation, notes = beside
    process_of(evaluation).suspend()
    evaluation.start(5)
    assert result_of(evaluation) is not None
    evaluation.done(5)
    assert "hung: it made no decoding step for" in notes[0]


def test_unreadable_weights_are_noted_and_forgotten(process: tuple[BackgroundEvaluation, list[str], Path]) -> None:
    evaluation, notes, run = process
    notes.clear()
    shutil.rmtree(run / "evaluation", ignore_errors=True)
    (run / "evaluation").mkdir()
    for name in ("step-000002.safetensors", "step-000004.safetensors", "step-000002.tmp"):
        (run / "evaluation" / name).write_bytes(b"torn")
    assert evaluation.unfinished(3) == 2
    evaluation.restart(2)
    assert evaluation.running is None
    assert "cannot be done again, its weights are unreadable" in notes[0]
    assert not (run / "evaluation").exists()


def test_weights_that_cannot_be_saved_cost_the_resumption_alone(
    process: tuple[BackgroundEvaluation, list[str], Path],
) -> None:
    evaluation, notes, run = process
    notes.clear()
    (run / "evaluation").write_text("in the way")
    evaluation.start(6)
    evaluation.wait_until_saved()
    assert result_of(evaluation) is not None
    assert "the weights of step 6 were not saved for evaluation" in notes[0]
