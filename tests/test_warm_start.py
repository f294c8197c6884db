"""The warm start: cached by content, the same again from the cache, and clear about what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from run_cases import tiny_config
from vcpo.cache import cache_directory
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.loading import load_model
from vcpo.pipeline.warm_start import warm_start
from vcpo.records import Grade, Problem
from vcpo.tasks.protocol import Task
from vcpo.tasks.registry import make_task


class Fit:
    """One warm start: what was said, the losses, and the model afterwards."""

    def __init__(self, config: RunConfig, task: Task | None = None) -> None:
        self.notes: list[str] = []
        self.losses: list[float] = []
        self.model, tokenizer = load_model(config.model, config.seed)
        task = task or make_task(config.task.name, config.task.params)
        warm_start(self.model, tokenizer, task, config, self._report, self.notes.append)

    def _report(self, done: int, total: int, detail: str) -> None:
        self.losses.append(float(detail.removeprefix("loss ")))

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


class Undemonstrated:
    """A task without demonstrations."""

    def train_problem(self, position: int, seed: int) -> Problem:
        return Problem("p", "12=")

    def eval_problems(self, count: int) -> list[Problem]:
        return []

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        return [Grade(0.0) for _ in problems]


class Foreign(Undemonstrated):
    """A task whose answers have a character that the tokenizer lacks."""

    def demonstration(self, problem: Problem, rng: object) -> str:
        return "1+2"


def config_with(*overrides: str) -> RunConfig:
    return tiny_config(Path("unused"), "warm_start.steps=30", "warm_start.batch_size=16", *overrides)


def same(a: Fit, b: Fit) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.weights, b.weights, strict=True))


def test_the_loss_falls_and_a_second_run_takes_the_cached_result_bit_for_bit() -> None:
    first = Fit(config_with())
    assert len(first.losses) == 30
    assert np.mean(first.losses[-5:]) < np.mean(first.losses[:5])
    second = Fit(config_with("training.learning_rate=0.5", "method=tis"))  # concerns the run, not its warm start
    assert second.losses == []
    assert "from cache" in second.notes[0]
    assert same(first, second)


@pytest.mark.parametrize(
    "override", ["seed=1", "warm_start.noise=0.1", "task.digits=3", "model.init.hidden_size=32", "warm_start.steps=29"]
)
def test_what_changes_the_result_is_not_taken_from_the_cache(override: str) -> None:
    Fit(config_with())
    assert Fit(config_with(override)).losses != []


def test_a_damaged_cache_is_said_and_made_again() -> None:
    first = Fit(config_with())
    (path,) = (cache_directory() / "warm-start").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    second = Fit(config_with())
    assert "made again" in second.notes[0]
    assert same(first, second)


def test_a_task_without_demonstrations_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no demonstrations for a warm start: set warm_start\.steps=0"):
        Fit(config_with(), Undemonstrated())


def test_demonstrations_with_unknown_characters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'\+'"):
        Fit(config_with(), Foreign())


def test_a_cached_file_of_another_model_is_said_and_made_again() -> None:
    """Nothing of it may reach the model: the new warm start would begin from other weights."""
    first = Fit(config_with())
    (path,) = (cache_directory() / "warm-start").glob("*.safetensors")
    Fit(config_with("model.init.num_hidden_layers=2"))
    (other,) = set((cache_directory() / "warm-start").glob("*.safetensors")) - {path}
    path.write_bytes(other.read_bytes())
    second = Fit(config_with())
    assert "does not fit the model and is made again" in second.notes[0]
    assert same(first, second)


class Constant(Undemonstrated):
    """A task whose answers can change without its name or its options."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def demonstration(self, problem: Problem, rng: object) -> str:
        return self._answer


def test_other_demonstrations_of_a_task_of_the_same_name_are_not_taken_from_the_cache() -> None:
    assert Fit(config_with(), Constant("1")).losses != []
    assert Fit(config_with(), Constant("2")).losses != []
    assert Fit(config_with(), Constant("1")).losses == []


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path / "file"))
    fit = Fit(config_with())
    assert len(fit.losses) == 30
    assert "could not be cached" in fit.notes[0]


def test_the_global_random_state_does_not_matter() -> None:
    torch.manual_seed(1)
    first = Fit(config_with())
    next((cache_directory() / "warm-start").glob("*.safetensors")).unlink()
    torch.manual_seed(2)
    second = Fit(config_with())
    assert second.losses != []
    assert same(first, second)
