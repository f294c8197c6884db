"""The ``method`` section: parts by name, by mapping and by option, a user's own, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from vcpo.config import RunConfig, load_config, parse_config
from vcpo.errors import UserError
from vcpo.methods.gradient_control import GRADIENT_CONTROLS, LimitAlignment
from vcpo.methods.masks import MASKS, SecondMoment, TokenBand
from vcpo.methods.penalties import PENALTIES, SquaredLogRatio
from vcpo.methods.spec import METHODS, MethodSpec
from vcpo.methods.weights import WEIGHTS, Band, Truncate

BASE: dict[str, Any] = {"model": {"init": {}}, "task": "sort"}

OWN_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from vcpo.methods.gradient_control import GradientControl
from vcpo.methods.masks import Mask
from vcpo.methods.spec import MethodSpec
from vcpo.methods.weights import Weight

@dataclass(frozen=True)
class Shrink(Weight):
    by: float = 0.5
    corners: tuple[float, ...] = (1.0, 2.0)

    def __call__(self, log_ratios, sign, statistic):
        return (self.by * log_ratios).exp()

@dataclass(frozen=True)
class Nothing(Mask):
    def drops(self, tokens, statistic):
        return tokens.log_ratios_N > 1e9

class NoDataclass(Weight):
    pass

@dataclass(frozen=True)
class Needs(Weight):
    by: float

METHOD = MethodSpec(weight=Shrink(0.25), baseline="none", scale_rewards="none")
NUMBER = 3
"""


def parsed(method: Any) -> RunConfig:
    return parse_config({**BASE, "method": method})


def spec_of(method: Any) -> MethodSpec:
    return parsed(method).method.spec


def problem_with(method: Any) -> str:
    with pytest.raises(UserError) as error:
        parsed(method)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def own_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    return str(path)


@pytest.mark.parametrize("name", METHODS)
def test_every_named_method_is_what_its_name_says_and_survives_being_written_down(name: str) -> None:
    config = parsed(name)
    assert config.method.spec == METHODS[name]
    plain = config.to_plain()
    again = parse_config(yaml.safe_load(yaml.safe_dump(plain)))
    assert again == config
    assert again.method.spec == METHODS[name]
    assert again.to_plain() == plain
    assert json.dumps(again.to_plain(), sort_keys=True) == json.dumps(plain, sort_keys=True)
    # written in full: what a name stands for may change, a run that is resumed may not
    assert set(plain["method"]) == {"name"} | set(MethodSpec.__dataclass_fields__)


def test_the_written_form_tells_methods_apart() -> None:
    seen = {json.dumps({**parsed(name).method.to_plain(), "name": ""}, sort_keys=True) for name in METHODS}
    assert len(seen) == len(set(METHODS.values())) == len(METHODS)


@pytest.mark.parametrize(
    ("kind", "known"),
    [("weight", WEIGHTS), ("mask", MASKS), ("penalty", PENALTIES), ("gradient_control", GRADIENT_CONTROLS)],
)
def test_every_part_can_be_chosen_by_its_name(kind: str, known: dict[str, type]) -> None:
    for name, part in known.items():
        for written in (name, {"name": name}):
            config = parsed({"name": "tis", kind: written})
            assert getattr(config.method.spec, kind) == part()
            assert parse_config(config.to_plain()) == config


def test_a_part_by_options_changes_only_those() -> None:
    assert spec_of({"name": "tis", "weight": {"cap": 2}}) == replace(METHODS["tis"], weight=Truncate(2))
    assert spec_of({"name": "tis", "weight": {"cap": None}}).weight == Truncate(None)
    assert spec_of({"name": "icepop", "weight": {"high": 4.0}}).weight == Band(0.5, 4.0)
    assert spec_of({"name": "m2po", "mask": {"budget": 0.1}}).mask == SecondMoment(0.1)
    assert spec_of({"name": "gac", "gradient_control": {"low": 0.2}}).gradient_control == LimitAlignment(0.2, 0.8)


def test_another_part_starts_from_its_own_defaults() -> None:
    assert spec_of({"name": "tis_token", "weight": {"name": "truncate"}}).weight == Truncate(8.0)
    assert spec_of({"name": "icepop", "weight": {"name": "band", "high": 3.0}}).weight == Band(0.0, 3.0)
    assert spec_of({"name": "tis", "mask": "token_band", "penalty": "squared_log_ratio"}) == replace(
        METHODS["tis"], mask=TokenBand(), penalty=SquaredLogRatio()
    )


def test_parts_are_changed_from_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: m\ntask: sort\nmethod: tis\n")

    def spec(*overrides: str) -> MethodSpec:
        return load_config(recipe, overrides).method.spec

    assert spec("method.weight.cap=2") == replace(METHODS["tis"], weight=Truncate(2.0))
    assert spec("method.weight=band", "method.weight.high=4").weight == Band(0.0, 4.0)
    assert spec("method=m2po", "method.mask.budget=0.1").mask == SecondMoment(0.1)
    assert spec("method=m2po", "method.mask=null") == replace(METHODS["m2po"], mask=None)
    assert spec("method=copc", "method.residual_band=[0.5, 2]").residual_band == (0.5, 2)
    assert spec("method=copc", "method.residual_band=null").residual_band is None
    assert spec("method.reward_kl=0.01", "method.opob_leave_one_out=true").reward_kl == 0.01


def test_constant_length_is_the_runs_unless_it_is_given() -> None:
    assert parsed("dr_grpo").method_spec.constant_length == 256
    assert parsed({"name": "dr_grpo", "constant_length": 77}).method_spec.constant_length == 77
    config = parse_config({**BASE, "method": "dr_grpo", "sampling": {"max_completion_length": 31}})
    assert config.method_spec.constant_length == 31


def test_a_users_own_part_from_a_file(own_file: str) -> None:
    config = parsed({"name": "tis", "weight": {"name": f"{own_file}:Shrink", "by": 0.1}, "mask": f"{own_file}:Nothing"})
    weight: Any = config.method.spec.weight
    assert (type(weight).__name__, weight.by) == ("Shrink", 0.1)
    assert type(config.method.spec.mask).__name__ == "Nothing"
    plain = config.to_plain()
    assert plain["method"]["weight"] == {"name": f"{own_file}:Shrink", "by": 0.1, "corners": [1.0, 2.0]}
    assert parse_config(yaml.safe_load(yaml.safe_dump(plain))) == config


def test_a_users_own_method_from_a_file(own_file: str) -> None:
    config = parsed({"name": f"{own_file}:METHOD", "weight": {"by": 0.75}})
    assert config.method.spec.baseline == "none"
    assert config.method.spec.weight.by == 0.75  # type: ignore[attr-defined]
    assert parse_config(yaml.safe_load(yaml.safe_dump(config.to_plain()))) == config


def test_what_is_written_of_a_users_own_method_loads_in_another_process(own_file: str, tmp_path: Path) -> None:
    """As a sampler process, a resumed run or a comparison does."""
    for number, method in enumerate([f"{own_file}:METHOD", {"name": "tis", "weight": f"{own_file}:Shrink"}]):
        plain = parsed(method).to_plain()
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(plain))
        script = (
            "import sys, pathlib, yaml; from vcpo.config import load_config;"
            "print(yaml.safe_dump(load_config(pathlib.Path(sys.argv[1])).to_plain()))"
        )
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert yaml.safe_load(done.stdout) == plain


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("vpco", "unknown method 'vpco'; did you mean 'vcpo'?"),
        ({"name": "tis", "wieght": "band"}, "unknown key method.wieght; did you mean 'weight'?"),
        ({"name": "tis", "spec": {}}, "unknown key method.spec"),
        ({"name": ["tis"]}, "unknown method ['tis']"),
        ({"name": 3}, "unknown method 3"),
        ({"name": "tis", "weight": "bandd"}, "unknown method.weight 'bandd'; did you mean 'band'?"),
        ({"name": "tis", "weight": {"name": ["band"]}}, "unknown method.weight ['band']"),
        (
            {"name": "tis", "weight": {"name": "band", "hihg": 3}},
            "unknown key method.weight.hihg; did you mean 'high'?",
        ),
        ({"name": "tis", "weight": {"name": "taper_negatives", "low": 3}}, "it has no options"),
        ({"name": "tis", "weight": {"high": 3}}, "unknown key method.weight.high; allowed: cap"),
        ({"name": "tis", "weight": {"cap": "two"}}, "method.weight.cap = 'two' must be a valid number"),
        ({"name": "tis", "weight": {"cap": True}}, "method.weight.cap = True must be"),
        ({"name": "tis", "weight": {"cap": -1}}, "method.weight: cap must be positive, or null for no truncation"),
        ({"name": "tis", "weight": {"cap": float("nan")}}, "method.weight: cap must be positive"),
        ({"name": "tis", "weight": None}, "for no weight: method.ratio_level=none"),
        ({"name": "grpo", "weight": {"cap": 2}}, "method.weight has no effect on grpo, which has no ratios"),
        ({"name": "tis", "learning_rate_factor": float("nan")}, "learning_rate_factor must be positive"),
        ({"name": "tis", "reward_kl": float("inf")}, "reward_kl not negative, all finite"),
        ({"name": "tis", "weight": 3}, "method.weight must be a name or a mapping with a name, not 3"),
        ({"name": "tis", "mask": {"low": 1}}, "method.mask.name is required; allowed: token_band"),
        ({"name": "tis", "mask": {"name": "token_band", "low": 3.0}}, "method.mask: low and high must satisfy"),
        ({"name": "tis", "penalty": "l2"}, "unknown method.penalty 'l2'"),
        ({"name": "gac", "gradient_control": {"low": 0}}, "0 < low <= high <= 1"),
        ({"name": "tis", "baseline": "mean"}, "method.baseline = 'mean' must be"),
        ({"name": "tis", "opob_leave_one_out": "yes"}, "method.opob_leave_one_out = 'yes' must be a valid boolean"),
        ({"name": "tis", "residual_band": [2.0, 1.0]}, "residual_band must be (low, high) with 0 < low <= high"),
        ({"name": "tis", "residual_band": [1.0]}, "method.residual_band = [1.0]"),
        ({"name": "tis", "constant_length": 0}, "constant_length must be at least 1"),
        ({"name": "tis", "ess_on_policy": 0}, "ess_on_policy must be in (0, 1]"),
        (
            {"name": "vcpo", "weight": "ppo_clip"},
            "baseline opob needs a weight and a mask that do not look at the sign",
        ),
        ({"name": "vcpo", "mask": "second_moment"}, "baseline opob needs a weight and a mask"),
        ({"name": "vcpo", "penalty": "squared_log_ratio"}, "baseline opob cannot be combined with a penalty"),
        ({"name": "tis", "weight": "nowhere.py:Shrink"}, "there is no file"),
    ],
)
def test_mistakes_are_named_in_one_sentence(method: Any, sentence: str) -> None:
    assert sentence in problem_with(method)


def test_own_objects_of_the_wrong_kind_are_refused(own_file: str) -> None:
    assert "is a int, not a MethodSpec" in problem_with(f"{own_file}:NUMBER")
    wrong = problem_with({"name": "tis", "weight": f"{own_file}:Nothing"})
    assert "must be a dataclass derived from vcpo.methods.weights.Weight" in wrong
    assert "must be a dataclass derived from" in problem_with({"name": "tis", "weight": f"{own_file}:NoDataclass"})
    assert "missing 1 required positional argument: 'by'" in problem_with({"weight": f"{own_file}:Needs"})
    assert "has no 'Shrnik'; did you mean 'Shrink'?" in problem_with({"name": "tis", "weight": f"{own_file}:Shrnik"})
    assert "unknown key method.weight.bye" in problem_with(
        {"name": "tis", "weight": {"name": f"{own_file}:Shrink", "bye": 1}}
    )


def test_baselines_within_a_group_need_a_group() -> None:
    for name in ("rloo", "otb", "vcpo"):
        with pytest.raises(UserError, match=r"needs sampling\.num_generations of 2 or more"):
            parse_config({**BASE, "method": name, "sampling": {"num_generations": 1}})
