"""A replay computes what the run computed, says what dominates it, and changes nothing of the run."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from run_cases import tiny_config
from vcpo.cli import app
from vcpo.errors import UserError
from vcpo.observe.metrics import read_metrics
from vcpo.observe.trajectories import load_minibatch, save_minibatch, saved_steps
from vcpo.pipeline.replay import choose, replay, variance_estimate
from vcpo.pipeline.run import train
from vcpo.records import Grade
from vcpo.report.replay import MethodReplay

CHANGES = ("runtime.max_staleness=2", "checkpoint.save_steps=3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 3 and 6, minibatches of steps 3, 4 and 6. Only to be read."""
    return train(tiny_config(tmp_path_factory.mktemp("replay") / "run", *CHANGES), make_report=False)


def quiet(_: str) -> None:
    pass


def metrics_of(run: Path, step: int) -> dict[str, Any]:
    return next(m for m in read_metrics(run / "metrics.jsonl") if m["kind"] == "train" and m["step"] == step)


def assert_as_trained(ours: MethodReplay, line: dict[str, Any]) -> None:
    assert ours.skipped is None
    assert ours.ess == pytest.approx(line["ess"], rel=1e-9)
    assert ours.ess < 0.999  # the responses are old, so that there is something to get wrong
    assert ours.ess_applied == pytest.approx(line["ess_applied"], rel=1e-9)
    assert ours.largest_weight_share == pytest.approx(line["max_weight_share"], rel=1e-9)
    assert ours.step_scale == pytest.approx(line["step_scale"], rel=1e-9)
    assert ours.baseline_mean == pytest.approx(line["baseline_mean"], rel=1e-6)
    assert ours.gradient_norm == pytest.approx(line["grad_norm"], rel=1e-5)


def test_the_runs_own_method_at_its_own_weights_gives_the_runs_own_numbers(run: Path) -> None:
    result = replay(run, note=quiet)
    assert (result.step, result.trained_at, result.version) == (4, 3, 3)
    (own,) = result.methods
    assert own.method == "run (vcpo)"
    assert_as_trained(own, metrics_of(run, 4))
    assert own.cosine == pytest.approx(1.0)


@pytest.mark.parametrize("method", ["tis_token", "m2po", "{name: tis, weight: {cap: 1.01}, scale_rewards: none}"])
def test_other_methods_do_so_too(tmp_path: Path, method: str) -> None:
    config = tiny_config(tmp_path / "run", *CHANGES, f"method={method}", "training.max_steps=4")
    run = train(config, make_report=False)
    (own,) = replay(run, step=4, note=quiet).methods
    assert_as_trained(own, metrics_of(run, 4))


def slow_gradients(run: Path, version: int, step: int, weighted: bool) -> tuple[list[Tensor], list[float]]:
    """Flat gradients of minus the objective of (w) A mean_t log pi / B, one trajectory at a time, and the weights."""
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step-{version:06d}" / "model").double()
    groups = load_minibatch(saved_steps(run)[step]).groups
    count = sum(len(group.trajectories) for group in groups)
    gradients, weights = [], []
    for group in groups:
        rewards = np.array([t.grade.reward for t in group.trajectories if t.grade is not None], dtype=np.float64)
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids_T])
            logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, len(trajectory.prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(trajectory.response_ids_T)[:, None])[:, 0]
            weights.append(math.exp(logprobs.sum().item() - trajectory.logprobs_T.astype(np.float64).sum()))
            weight = min(weights[-1], 8.0) if weighted else 1.0
            advantage = 0.0 if np.ptp(rewards) == 0 else (reward - rewards.mean()) / rewards.std()
            objective = -weight * advantage * logprobs.mean() / count
            parts = torch.autograd.grad(objective, list(model.parameters()))
            gradients.append(torch.cat([part.flatten() for part in parts]))
    return gradients, weights


def test_what_dominates_is_what_single_gradients_say(run: Path) -> None:
    """Shares, norms, second moment and cosine against autograd through transformers' own model."""
    result = replay(run, ["tis", "grpo"], step=3, checkpoint="step-3", note=quiet)
    assert (result.trained_at, result.version) == (2, 3)
    tis, weights = slow_gradients(run, 3, 3, weighted=True)
    grpo, _ = slow_gradients(run, 3, 3, weighted=False)
    for ours, gradients in zip(result.methods, (tis, grpo), strict=True):
        total = torch.stack(gradients).sum(0)
        squares = np.array([float(g.square().sum()) for g in gradients])
        assert squares.sum() > 0
        names = [f"group {4 + i // 4} response {i % 4}" for i in range(8)]
        by_name = {part.name: part for part in ours.parts}
        for name, square, weight in zip(names, squares, weights, strict=True):
            assert by_name[name].norm == pytest.approx(math.sqrt(square), rel=1e-3, abs=1e-6)
            assert by_name[name].share == pytest.approx(square / squares.sum(), rel=1e-3, abs=1e-6)
            assert by_name[name].weight_share == pytest.approx(weight / sum(weights), rel=1e-4)
        ordered = sorted(squares / squares.sum(), reverse=True)
        assert [part.share for part in ours.parts] == pytest.approx(ordered, rel=1e-3, abs=1e-6)
        assert ours.top_1 == pytest.approx(ordered[0], rel=1e-3)
        assert ours.top_5 == pytest.approx(sum(ordered[:5]), rel=1e-3)
        assert ours.gradient_norm == pytest.approx(float(total.norm()), rel=1e-3)
        assert ours.second_moment == pytest.approx(squares.sum(), rel=1e-3)
        spread = float((torch.stack(gradients) - total / 8).square().sum()) / 7  # sample variance of one g_i
        assert ours.variance == pytest.approx(8 * spread, rel=1e-3)
        assert ours.noise == pytest.approx(8 * spread / float(total.square().sum()), rel=1e-3)
    one, other = torch.stack(tis).sum(0), torch.stack(grpo).sum(0)
    cosine = float(one @ other / one.norm() / other.norm())
    assert cosine < 0.99  # or there would be nothing to get wrong
    assert [m.cosine for m in result.methods] == pytest.approx([1.0, cosine], abs=1e-4)


def test_the_variance_of_two_numbers() -> None:
    # 1 and 3: the sample variance is 2, that of their sum twice as much; a lone one has none
    assert variance_estimate(1 + 9, 4.0**2, 2) == 4.0
    assert variance_estimate(1.0, 1.0, 1) is None


@pytest.mark.parametrize(
    ("steps", "versions", "step", "version", "chosen"),
    [
        ([3, 4, 6, 7], [3, 6], None, None, (7, 6)),  # the newest that fits exactly
        ([3, 4, 6], [3, 6], None, None, (4, 3)),
        ([6], [6], None, None, (6, 6)),
        ([3, 4, 6], [3, 6], 6, None, (6, 6)),
        ([5], [3, 5], None, None, (5, 3)),  # both one step off: rather the one that has not seen the minibatch
        ([3, 4, 6], [3, 6], None, 6, (6, 6)),
        ([3, 4, 6], [3, 6], 3, 6, (3, 6)),
    ],
)
def test_the_pair_that_fits_best(
    steps: list[int], versions: list[int], step: int | None, version: int | None, chosen: tuple[int, int]
) -> None:
    assert choose(steps, versions, step, version) == chosen


def test_variants_of_a_file_and_of_a_recipe(run: Path, tmp_path: Path) -> None:
    variants = {"short": {"method": "tis", "method.weight.cap": 0.5}, "long": {"method": {"name": "tis"}}}
    names, recipe = tmp_path / "variants.yaml", tmp_path / "recipe.yaml"
    names.write_text(yaml.safe_dump(variants, sort_keys=False))
    recipe.write_text(yaml.safe_dump({"task": "sort", "compare": {"variants": variants}}, sort_keys=False))
    everything = replay(run, recipe=names, note=quiet)
    assert [m.method for m in everything.methods] == ["run (vcpo)", "short", "long"]
    some = replay(run, ["long", "short", "tis"], recipe=recipe, note=quiet)
    assert [m.method for m in some.methods] == ["long", "short", "tis"]
    long, short, tis = some.methods
    assert dataclasses.replace(long, method="") == dataclasses.replace(tis, method="")
    assert max(part.weight or 0 for part in short.parts) == pytest.approx(0.5)
    names.write_text("short: tis\n")
    with pytest.raises(UserError, match="must map names of variants to overrides"):
        replay(run, recipe=names, note=quiet)


def digests(run: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}


def test_nothing_of_the_run_changes_and_the_order_of_methods_does_not_matter(run: Path) -> None:
    before = digests(run)
    one = replay(run, ["vcpo", "gac", "otb"], note=quiet)
    other = replay(run, ["otb", "vcpo", "gac"], note=quiet)
    assert digests(run) == before
    same = {m.method: dataclasses.replace(m, cosine=None) for m in one.methods}
    assert same == {m.method: dataclasses.replace(m, cosine=None) for m in other.methods}


def strict(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def vcpo(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)


def test_the_command_shows_tables_and_writes_them(run: Path, tmp_path: Path) -> None:
    result = vcpo(run, "--methods", "vcpo, tis", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "minibatch of step 4 at version 3 (the weights that trained on it)" in result.stdout
    assert "tis: the trajectories that dominate" in result.stdout
    content = strict(tmp_path / "out" / "replay.json")
    assert [m["method"] for m in content["methods"]] == ["vcpo", "tis"]
    assert all(len(m["parts"]) == 8 for m in content["methods"])
    assert content["methods"][0]["second_moments"].keys() >= {"mean", "opob_paper"}
    with (tmp_path / "out" / "replay.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["vcpo", "tis"]
    assert float(rows[1]["cosine"]) == pytest.approx(content["methods"][1]["cosine"])
    later = vcpo(run, "--methods", "vcpo", "--step", 4, "--checkpoint", "final")
    assert "minibatch of step 4 at version 6 (3 steps after the weights that trained on it)" in later.stdout
    earlier = vcpo(run, "--methods", "vcpo", "--step", 6, "--checkpoint", 3)
    assert "at version 3 (2 steps before the weights that trained on it)" in earlier.stdout


def test_a_minibatch_that_no_method_can_use_gives_nulls_and_the_reason(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    groups = load_minibatch(saved_steps(copy)[4]).groups
    groups[0].trajectories[1].grade = Grade(math.nan)
    groups[0].trajectories[2].text = "[bold]\x1b[31m" + "9" * 99
    save_minibatch(copy, 4, groups)
    result = replay(copy, ["tis", "vcpo"], note=quiet)
    for method in result.methods:
        assert method.skipped == "the reward of group 6 response 1 is not a finite number"
        assert method.gradient_norm is method.cosine is method.noise is method.top_1 is None
    result.write(tmp_path / "out")
    parts = strict(tmp_path / "out" / "replay.json")["methods"][0]["parts"]
    assert [part["reward"] is None for part in parts] == [False, True, *[False] * 6]
    console = Console(width=200, record=True)
    result.print(console)
    assert "tis would skip this step: the reward of group 6 response 1" in console.export_text()


def test_nothing_dominates_where_all_rewards_are_equal(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    groups = load_minibatch(saved_steps(copy)[4]).groups
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.grade = Grade(1.0)
    save_minibatch(copy, 4, groups)
    console = Console(width=200, record=True)
    replay(copy, ["tis", "vcpo"], step=4, note=quiet).print(console)
    shown = console.export_text()
    assert "tis: no trajectory has a gradient" in shown
    assert "vcpo: no trajectory has a gradient" in shown
    assert "the trajectories that dominate" not in shown


def test_what_a_model_writes_cannot_colour_the_table(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    groups = load_minibatch(saved_steps(copy)[4]).groups
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.text = "[bold]1\n2\x1b[31m" + "9" * 99
    save_minibatch(copy, 4, groups)
    console = Console(width=200, record=True)
    replay(copy, ["tis"], note=quiet).print(console)
    shown = console.export_text()
    assert "[bold]1 2\\x1b[31m" + "9" * 46 + " " in shown
    assert "\x1b" not in shown


def damaged(run: Path) -> None:
    (run / "checkpoints" / "step-000003" / "model" / "config.json").write_text("{}")


def no_trajectories(run: Path) -> None:
    shutil.rmtree(run / "trajectories")


def no_weights(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "model")


def interrupted(run: Path) -> None:
    path = run / "environment.json"
    path.write_text(path.read_text().replace('"finished"', '"interrupted"'))


def unchanged(run: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "arguments", "sentence"),
    [
        (no_trajectories, [], "holds no trajectories: they are saved beside every checkpoint"),
        (no_weights, [], "holds neither a checkpoint nor a final model"),
        (damaged, [], "step-000003' is damaged (model/config.json does not match its checksum); choose another"),
        (unchanged, ["--methods", "tis,vpco"], "unknown method or variant 'vpco'; did you mean 'vcpo'?"),
        (unchanged, ["--methods", "no_such_module:spec"], "no_such_module"),
        (unchanged, ["--step", "5"], "holds no trajectories of step 5; there are step-3, step-4, step-6"),
        (unchanged, ["--checkpoint", "step-4"], "holds no checkpoint 'step-4'; there are step-3, step-6"),
        (unchanged, ["--checkpoint", "best"], "holds no checkpoint 'best'; there are step-3, step-6"),
        (interrupted, ["--checkpoint", "final"], "holds no checkpoint 'final'; there are step-3, step-6"),
        (unchanged, ["--recipe", "no.yaml"], "recipe 'no.yaml' does not exist"),
        (unchanged, ["--device", "tpu"], "--device 'tpu' must be auto, cpu or cuda"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, tmp_path: Path, change: Any, arguments: list[str], sentence: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    change(copy)
    result = vcpo(copy, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    assert "is not a run directory" in vcpo(tmp_path).stderr


def test_a_run_without_its_checkpoints_is_replayed_at_its_final_model(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    result = replay(copy, ["tis"], note=quiet)
    assert (result.step, result.version) == (6, 6)
    assert result.weights == str(copy / "model")
