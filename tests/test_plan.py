"""The plan of a run: arithmetic by hand, words, and every recipe of the repository."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from run_cases import tiny_config, tiny_recipe
from vcpo.cli import app
from vcpo.config import RunConfig, load_config, parse_config
from vcpo.errors import UserError
from vcpo.models.sizes import ModelSizes, UnknownModel
from vcpo.pipeline.compare import plan as plan_comparison
from vcpo.pipeline.plan import evaluated_steps, plan_run, saved_steps, variant_configs
from vcpo.report.plan import Plan

# files that only name variants for a comparison have no section of a recipe
RECIPES = sorted(
    path
    for path in Path("recipes").rglob("*.yaml")
    if RunConfig.model_fields.keys() & yaml.safe_load(path.read_text(encoding="utf-8")).keys()
)
PAPER = [path for path in RECIPES if path.parent.name in ("math", "countdown", "aime") or path.stem == "vcpo-k12"]


def dry_run(*arguments: object) -> Result:
    words = ["train", *(str(a) for a in arguments), "--dry-run"]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)


def numbers(plan: Plan) -> dict[str, str]:
    return {name: number for name, number, _ in plan.arithmetic}


def test_arithmetic_of_the_math_recipe_by_hand() -> None:
    plan = plan_run(load_config(Path("recipes/math/vcpo-k10.yaml")))
    assert numbers(plan) == {
        "trajectories per step": "512",  # 32 x 16
        "tokens per step": "1,572,864",  # 512 x (1024 + 2048)
        "passes per step": "256",  # two of 3072 tokens fit into 8192
        "groups in flight": "352",  # (10 + 1) x 32
        "responses in flight": "5,632",  # 352 x 16
        "steps": "400",
        "trajectories in all": "204,800",  # 400 x 512
        "evaluations": "41",  # 0, 10, ..., 400
        "checkpoints": "8",  # 50, 100, ..., 400
    }


@pytest.mark.parametrize(
    ("every", "last", "evaluated", "saved"),
    [
        (3, 7, [0, 3, 6, 7], [3, 6, 7]),
        (3, 6, [0, 3, 6], [3, 6]),
        (9, 7, [0, 7], [7]),
        (0, 7, [], [7]),
    ],
)
def test_evaluations_and_checkpoints_are_those_of_the_run_loop(
    tmp_path: Path, every: int, last: int, evaluated: list[int], saved: list[int]
) -> None:
    config = tiny_config(
        tmp_path, f"training.max_steps={last}", f"eval.eval_steps={every}", f"checkpoint.save_steps={every}"
    )
    assert evaluated_steps(config) == evaluated
    assert saved_steps(config) == saved


def test_fewer_groups_are_in_flight_when_the_run_is_shorter_than_the_lag(tmp_path: Path) -> None:
    # the pacer starts no group that would never be trained: 3 steps x 2 groups
    config = tiny_config(tmp_path, "runtime={name: local, max_staleness: 9}", "training.max_steps=3")
    assert numbers(plan_run(config))["groups in flight"] == "6"


def test_a_dropping_policy_may_start_more_groups_than_the_lag_allows(tmp_path: Path) -> None:
    runtime = "{name: local, max_staleness: 1, pacing: {name: drop_stale, max_ahead: 4}}"
    assert numbers(plan_run(tiny_config(tmp_path, f"runtime={runtime}")))["groups in flight"] == "10"  # (4 + 1) x 2


def test_a_watchdog_is_announced_with_what_it_costs_on_disk() -> None:
    recipe = Path("recipes/sort/lag16.yaml")
    assert "watchdog" not in dict(plan_run(load_config(recipe)).run)
    plan = plan_run(load_config(recipe, ["watchdog.enabled=true", "watchdog.action=rollback", "watchdog.kl=null"]))
    assert dict(plan.run)["watchdog"].startswith("rollback on an alarm of ess, max_weight_share, grad_norm")
    assert any("more than save_total_limit" in note for note in plan.notes)


def test_an_unknown_model_is_no_obstacle_to_the_arithmetic(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "model={path: nobody/no-such-model}")
    with pytest.raises(UnknownModel, match="nobody/no-such-model"):
        ModelSizes.find(config.model)
    plan = plan_run(config)
    assert numbers(plan)["trajectories per step"] == "8"
    assert plan.memory == ()
    assert plan.memory_unknown is not None


def test_methods_that_look_at_the_minibatch_first_are_said_to(tmp_path: Path) -> None:
    words = {name: text for name, _, text in plan_run(tiny_config(tmp_path, "method=otb")).arithmetic}
    assert "as many without gradient come first" in words["passes per step"]


def test_turns_and_where_code_is_run_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    aime = Path("recipes/aime/vcpo-k2.yaml")
    monkeypatch.setattr("shutil.which", lambda name: None)
    run = dict(plan_run(load_config(aime)).run)
    assert run["task"].startswith("tool_math; path dapo.jsonl (NOT there)")
    assert "sandbox" not in run["task"]
    assert run["turns"].startswith("up to 16 in a response")
    assert run["code of the model"] == (
        "run by bubblewrap (NOT there): in each sampler 16 programs at a time, each with at most 10 s and 512 MiB;"
        " 8 sandboxes kept ready with sympy loaded"
    )
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert "bubblewrap (there)" in dict(plan_run(load_config(aime)).run)["code of the model"]
    served = load_config(aime, ["task.sandbox={executor: http, url: 'http://box:8080'}"])
    assert "run by the server at http://box:8080 (not asked)" in dict(plan_run(served).run)["code of the model"]
    assert not {"turns", "code of the model"} & dict(plan_run(load_config(Path("recipes/quickstart.yaml"))).run).keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_every_recipe_plans_with_all_its_variants_without_network(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    config = load_config(recipe)
    plan = plan_run(config)
    assert set(variant_configs(config)) == set(config.compare.variants)
    assert plan.device_bytes > 0 or plan.memory_unknown


@pytest.mark.parametrize("recipe", PAPER, ids=str)
def test_recipes_of_the_paper_have_its_hyper_parameters(recipe: Path) -> None:
    config = load_config(recipe)
    groups, members, lag, prompt, response, every = {
        "gsm8k": (8, 8, 12, 2048, 2048, 10),
        "math": (32, 16, 10, 1024, 2048, 10),
        "countdown": (32, 16, 10, 1024, 2048, 10),
        "aime": (128, 16, 2, 4096, 12288, 5),
    }[recipe.parent.name]
    training, sampling = config.training, config.sampling
    assert (training.prompts_per_step, sampling.num_generations) == (groups, members)
    assert (config.runtime.max_staleness, config.eval.eval_steps) == (lag, every)
    assert (sampling.max_prompt_length, sampling.max_completion_length) == (prompt, response)
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (1e-6, 0.1, 1.0)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert (training.warmup_steps, training.lr_scheduler_type, sampling.temperature) == (0, "constant", 1.0)
    assert (config.eval.temperature, config.eval.top_p, config.eval.num_generations) == (0.8, 0.7, 3)
    assert config.task.params.get("max_turns") == (16 if recipe.parent.name == "aime" else None)
    assert config.method.spec.ess_on_policy == (0.55 if recipe.parent.name == "aime" else 1.0)
    assert {"sync", "tis", "tis+ess", "tis+opob", "vcpo"} <= set(config.compare.variants)


@pytest.mark.parametrize("recipe", PAPER, ids=str)
def test_the_planned_variants_are_those_that_a_comparison_runs(recipe: Path, tmp_path: Path) -> None:
    compared = {run.variant: run.config for run in plan_comparison(recipe, [], [0], {}, tmp_path)}
    planned = variant_configs(load_config(recipe))
    assert list(planned) == list(compared)
    for name, config in planned.items():
        same = compared[name].model_copy(update={"output_dir": config.output_dir})
        assert config == same, name


def test_the_ablations_change_what_their_names_say() -> None:
    variants = variant_configs(load_config(Path("recipes/gsm8k/vcpo-k12.yaml")))
    assert variants["sync"].runtime.max_staleness == 0
    assert variants["tis+ess"].method.spec.step_size == "sqrt_ess"
    assert variants["tis+opob"].method.spec.baseline == "opob"
    figure_9 = {(v.method.spec.step_size, v.method.spec.baseline) for v in (variants["vcpo"], variants["tis"])}
    assert figure_9 == {("sqrt_ess", "opob"), ("constant", "group_mean")}
    for kind in ("tis", "mis"):
        for level in ("sequence", "token", "geometric"):
            for cap in (2, 8):
                if (kind, level, cap) != ("tis", "sequence", 8):  # which is `tis` itself
                    spec = variants[f"{kind}-{level}-c{cap}"].method.spec
                    limit = spec.weight.cap if kind == "tis" else spec.weight.high
                    assert (spec.ratio_level, limit) == (level, cap)


def test_an_invalid_variant_is_named(tmp_path: Path) -> None:
    data = tiny_config(tmp_path).to_plain()
    data["compare"] = {"variants": {"odd": {"method": "vpco"}}}
    with pytest.raises(UserError, match=r"variant 'odd': .*unknown method 'vpco'"):
        plan_run(parse_config(data))


@pytest.mark.parametrize("mode", ["--resume", "--overwrite"])
def test_a_dry_run_is_of_a_new_run(tmp_path: Path, mode: str) -> None:
    result = dry_run(tiny_recipe(tmp_path / "r.yaml"), mode)
    assert result.exit_code == 2
    assert "--dry-run plans a new run" in result.stderr


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path / "r.yaml", "runtime=local", "eval.eval_steps=2")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    result = dry_run(recipe)
    assert result.exit_code == 0
    assert "Nothing was written" in result.stdout
    for words in (
        "One device for all",
        "A device for each process",
        "AdamW moments",
        "groups in flight",
        "shared memory",
        "One learner process",
    ):
        assert words in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_says_which_files_are_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    options = f"{{name: dataset, path: {tmp_path / 'train.jsonl'}, eval_path: {tmp_path / 'test.jsonl'}}}"
    run = dict(plan_run(tiny_config(tmp_path, f"task={options}", "reward.reward_funcs=[nowhere.py:f]")).run)
    assert f"path {tmp_path / 'train.jsonl'} (there)" in run["task"]
    assert f"eval_path {tmp_path / 'test.jsonl'} (NOT there)" in run["task"]
    assert run["reward"] == "nowhere.py:f (NOT there)"
