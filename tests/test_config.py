"""Configuration: what is accepted, what is refused, and with which sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vcpo.config import ModelSection, load_config, parse_config, set_dotted
from vcpo.errors import UserError
from vcpo.methods.weights import Truncate

BASE: dict[str, Any] = {"model": {"init": {}}, "task": "sort"}


def problem_with(**changes: Any) -> str:
    """The sentence with which a changed base configuration is refused."""
    with pytest.raises(UserError) as error:
        parse_config({**BASE, **changes})
    return str(error.value)


def test_effective_configuration_loads_back_to_an_equal_one() -> None:
    config = parse_config({**BASE, "method": {"name": "tis", "weight": {"cap": 2.0}}, "runtime": "lockstep"})
    assert parse_config(config.to_plain()) == config


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trainig": {}}, "unknown key trainig; did you mean 'training'?"),
        ({"training": {"max_step": 3}}, "unknown key training.max_step; did you mean 'training.max_steps'?"),
        ({"learning_rate": 1e-6}, "unknown key learning_rate; did you mean 'training.learning_rate'?"),
        ({"task": "srot"}, "unknown task 'srot'; did you mean 'sort'?"),
        ({"method": "vpco"}, "unknown method 'vpco'; did you mean 'vcpo'?"),
        ({"method": {"name": "tis", "wait": "band"}}, "unknown key method.wait; did you mean 'weight'?"),
        ({"runtime": "locl"}, "unknown runtime 'locl'; allowed: 'lockstep', 'local'"),
        ({"runtime": {"name": "local", "lag": "fixed"}}, "unknown key runtime.lag"),
        ({"training": {"max_steps": "many"}}, "training.max_steps = 'many' must be a valid integer"),
        ({"training": {"max_steps": 0}}, "training.max_steps = 0 must be greater than 0"),
        ({"training": {"learning_rate": -1.0}}, "training.learning_rate = -1.0 must be greater than 0"),
        ({"method": {"name": "tis", "baseline": "mean"}}, "must be 'none', 'group_mean', 'leave_one_out',"),
        ({"model": {}}, "exactly one of model.path"),
        ({"model": {"path": "x", "init": {}}}, "exactly one of model.path"),
        ({"sampling": {"top_p": 0.9}}, "training needs sampling.top_p=1"),
        ({"sampling": {"num_generations": 1}}, "needs sampling.num_generations of 2 or more"),
        ({"model": "some/model", "warm_start": {"steps": 3}}, "warm_start.steps needs model.init"),
        ({"model": {"init": {"max_position_embeddings": 16}}}, "exceeds model.init.max_position_embeddings = 16"),
        ({"reward": {"reward_funcs": ["mine.py"]}}, "must be written module:name or file.py:name"),
    ],
)
def test_mistakes_are_named_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    message = problem_with(**changes)
    assert sentence in message
    assert "\n" not in message


def test_required_sections_are_named() -> None:
    with pytest.raises(UserError, match="model is required; task is required"):
        parse_config({})


def test_overrides_reach_into_sections_and_shorthands(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: some/model\ntask: sort\nmethod: {name: vcpo, weight: {cap: 4.0}}\n")
    config = load_config(recipe, ["model.dtype=bfloat16", "training.learning_rate=2e-4", "task.digits=5"])
    assert config.model.path == "some/model"
    assert config.model.dtype == "bfloat16"
    assert config.training.learning_rate == 2e-4
    assert config.task.params == {"digits": 5}
    # another model is another path: how it is loaded stays
    assert load_config(recipe, ["model.dtype=bfloat16", "model=other"]).model == config.model.model_copy(
        update={"path": "other"}
    )
    made = {**BASE, "model": {"init": {"hidden_size": 16}, "dtype": "bfloat16"}}
    set_dotted(made, "model", "other")
    assert parse_config(made).model == ModelSection(path="other", dtype="bfloat16")
    # another method starts from its own parts, not from overrides of the one that it replaces
    assert load_config(recipe, ["method=tis"]).method.spec.weight == Truncate(8.0)
    assert load_config(recipe, ["method.step_size=constant"]).method.spec.baseline == "opob"


def test_switching_the_runtime_keeps_the_staleness_bound() -> None:
    data: dict[str, Any] = {**BASE, "runtime": {"name": "local", "max_staleness": 16, "samplers": 2}}
    set_dotted(data, "runtime", "lockstep")
    runtime = parse_config(data).runtime
    assert (runtime.name, runtime.max_staleness) == ("lockstep", 16)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: [", "is not valid YAML"),
        ("- 1", "must be a mapping of sections"),
        ("seed: 1\nseed: 2", "key 'seed' appears twice"),
    ],
)
def test_unreadable_recipes_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_config(recipe)


def test_a_missing_recipe_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(UserError, match=r"does not exist; did you mean .*quickstart.yaml"):
        load_config(tmp_path / "quickstrat.yaml")


@pytest.mark.parametrize("override", ["seed", "=3", "seed=[", "seed.x=1"])
def test_malformed_overrides_are_refused(override: str) -> None:
    with pytest.raises(UserError):
        load_config(None, ["model.path=m", "task=sort", "seed=1", override])


@pytest.mark.parametrize(
    "recipe", sorted(set(Path("recipes").rglob("*.yaml")) - set(Path("recipes").rglob("*.variants.yaml"))), ids=str
)
def test_every_recipe_in_the_repository_is_valid(recipe: Path) -> None:
    load_config(recipe)
