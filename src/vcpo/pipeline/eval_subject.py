"""What ``vcpo eval`` is to evaluate: a run, a checkpoint or any model, and the configuration that goes with it.

Loads no model, and no torch unless checkpoints have to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vcpo.config import RunConfig, parse_config, parse_override, read_recipe, set_dotted
from vcpo.errors import UserError
from vcpo.pipeline.run_directory import RunDirectory

PAPER_SAMPLING = {"temperature": 0.8, "top_p": 0.7, "num_generations": 3}
"""How the paper evaluates: mean@3 at temperature 0.8 and top-p 0.7. Used where neither a run nor a recipe says how."""


@dataclass(frozen=True)
class Subject:
    """config: with the model's directory or hub id as ``model.path``. step: whose weights, where that is known.

    checkpoint: that the model is part of, if any.
    """

    kind: Literal["run", "checkpoint", "model"]
    given: str
    step: int | None
    config: RunConfig
    checkpoint: Path | None = None

    def to_plain(self) -> dict[str, Any]:
        """For the record of an evaluation."""
        return {"kind": self.kind, "given": self.given, "path": self.config.model.path, "step": self.step}


def find_subject(
    given: str, recipe: Path | None, overrides: Sequence[str] = (), note: Callable[[str], None] = print
) -> Subject:
    """given: a run directory, a checkpoint of a run (``RUN/checkpoints/step-N``), a model directory or a hub id.

    A run brings its configuration along, and so does a checkpoint that lies in its run, unless a recipe is given.
    Elsewhere the configuration is the recipe's, if there is one, with ``PAPER_SAMPLING`` for what its ``eval`` section
    does not say. Overrides come last. note: told which checkpoint is taken for a run without a final model.

    Raises UserError for a run without any weights, a damaged checkpoint, a recipe beside a run, and whatever is wrong
    with the configuration.
    """
    path = Path(given)
    if (path / "config.yaml").is_file():
        if recipe is not None:
            raise UserError(f"the run {given!r} brings its own configuration: leave out the recipe {str(recipe)!r}")
        return _of_run(given, overrides, note)
    checkpoint = next((p for p in (path, path.parent) if _is_checkpoint(p) and (p / "model").is_dir()), None)
    if checkpoint is not None:
        return _of_checkpoint(given, checkpoint, recipe, overrides)
    return Subject("model", given, None, _configured(_from_recipe(recipe), given, overrides))


def _of_run(given: str, overrides: Sequence[str], note: Callable[[str], None]) -> Subject:
    directory, config = RunDirectory.of_finished_or_running(Path(given))
    step, model, checkpoint = None, directory.final_model, None
    if not model.is_dir():
        from vcpo.pipeline.checkpoint import latest_intact, version_of

        checkpoint = latest_intact(directory.checkpoints, note)
        if checkpoint is None:
            raise UserError(f"the run {given!r} has neither a final model nor an intact checkpoint yet")
        step, model = version_of(checkpoint), checkpoint / "model"
        note(f"{given} has no final model yet: evaluating its checkpoint of step {step}")
    return Subject("run", given, step, _configured(config.to_plain(), str(model), overrides), checkpoint)


def _of_checkpoint(given: str, checkpoint: Path, recipe: Path | None, overrides: Sequence[str]) -> Subject:
    from vcpo.pipeline.checkpoint import find_damage, version_of

    damage = find_damage(checkpoint)
    if damage is not None:
        raise UserError(f"checkpoint {str(checkpoint)!r} is damaged: {damage}")
    run = checkpoint.resolve().parent.parent
    if recipe is None and (run / "config.yaml").is_file():
        data = RunDirectory.of_finished_or_running(run)[1].to_plain()
    else:
        data = _from_recipe(recipe)
    config = _configured(data, str(checkpoint / "model"), overrides)
    return Subject("checkpoint", given, version_of(checkpoint), config, checkpoint)


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") and path.name.removeprefix("step-").isdecimal()


def _from_recipe(recipe: Path | None) -> dict[str, Any]:
    data = read_recipe(recipe) if recipe is not None else {}
    section = data.get("eval")
    if section is None or isinstance(section, dict):
        data["eval"] = {**PAPER_SAMPLING, **(section or {})}
    return data


def _configured(data: dict[str, Any], model: str, overrides: Sequence[str]) -> RunConfig:
    before = data.get("model")
    kept = {key: before[key] for key in ("dtype", "device") if key in before} if isinstance(before, dict) else {}
    data["model"] = {**kept, "path": model}
    data["warm_start"] = {}
    for override in overrides:
        set_dotted(data, *parse_override(override))
    return parse_config(data)
