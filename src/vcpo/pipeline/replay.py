"""``vcpo replay``: what any method would make of a saved minibatch at the weights of a checkpoint, without sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vcpo.config import RunConfig
from vcpo.errors import UserError, suggest
from vcpo.learner.learner import Examination, Learner
from vcpo.methods.spec import METHODS
from vcpo.models.loading import load_model, saved_model
from vcpo.observe.trajectories import SavedMinibatch, load_minibatch, saved_steps
from vcpo.pipeline.checkpoint import check_base, find_damage, list_checkpoints, version_of
from vcpo.pipeline.run_directory import RunDirectory
from vcpo.pipeline.shared_weights import base_checksum
from vcpo.pipeline.variants import changed, read_variants
from vcpo.records import Trajectory
from vcpo.report.replay import MethodReplay, Replay, TrajectoryPart, finite

OWN = "run"
"""The name under which the run's own method, with all of its settings, takes part."""

_FINAL = "final"
_DEVICES = ("auto", "cpu", "cuda")
_MOMENT = "second_moment/"  # of the learner's metrics


@dataclass(frozen=True)
class Weights:
    """A model directory of a run and the policy version that it holds."""

    version: int
    model: Path
    checkpoint: Path | None  # None for the final model


def replay(
    run: Path,
    methods: Sequence[str] = (),
    step: int | None = None,
    checkpoint: str | None = None,
    recipe: Path | None = None,
    device: str | None = None,
    note: Callable[[str], None] = print,
) -> Replay:
    """Examine one saved minibatch of a run under several methods; nothing of the run is changed.

    methods: names of methods (also ``module:name``), of variants, or ``run`` for the run's own method as it was
        configured; that one, and all variants of ``recipe``, when empty. Of a variant only the sections ``method`` and
        ``training`` matter. The first one is what the others' gradients are compared with.
    recipe: a recipe with ``compare.variants``, or a file that maps names of variants to overrides; without it the
        variants are those of the run's own configuration.
    step, checkpoint: whose minibatch, and ``step-N``, ``N`` or ``final``. By default a pair of which the checkpoint
        trained on the minibatch, or else what comes closest.
    device: instead of the run's ``model.device``.

    Raises UserError for an unknown name, a run that holds no minibatch or no weights or not those asked for, and a
    damaged file.
    """
    if device not in (None, *_DEVICES):
        raise UserError(f"--device {device!r} must be auto, cpu or cuda")
    directory, config = RunDirectory.of_finished_or_running(run)
    configs = method_configs(config, methods, recipe)
    files, weights = saved_steps(run), _weights_of(directory)
    if not files:
        raise UserError(
            f"the run {str(run)!r} holds no trajectories: they are saved beside every checkpoint, and every"
            " logging.trajectory_steps steps"
        )
    if not weights:
        raise UserError(f"the run {str(run)!r} holds neither a checkpoint nor a final model")
    version = None if checkpoint is None else _version_named(checkpoint, weights, directory)
    if step is not None and step not in files:
        raise UserError(f"the run {str(run)!r} holds no trajectories of step {step}; there are {_listed(files)}")
    step, version = choose(list(files), list(weights), step, version)
    chosen = weights[version]
    if chosen.checkpoint is not None and (damage := find_damage(chosen.checkpoint)) is not None:
        raise UserError(f"checkpoint {str(chosen.checkpoint)!r} is damaged ({damage}); choose another --checkpoint")
    minibatch = load_minibatch(files[step])
    section = saved_model(config.model, chosen.model)
    model, _ = load_model(section.model_copy(update={"device": device}) if device else section, config.seed)
    if chosen.checkpoint is not None:
        check_base(chosen.checkpoint, base_checksum(model))
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    results = []
    reference: dict[str, Tensor] | None = None
    for name, its_config in configs.items():
        note(f"replaying {name}")
        examination = _examine(model, its_config, config.sampling.temperature, version, minibatch)
        reference = examination.gradient if reference is None else reference
        results.append(method_replay(name, its_config, minibatch, examination, reference))
        del examination  # a gradient is as large as the model
    return Replay(str(run), step, minibatch.version, version, str(chosen.model), results)


def method_configs(config: RunConfig, names: Sequence[str], recipe: Path | None) -> dict[str, RunConfig]:
    """The run's configuration with each method or variant put in, by name, in order. Raises UserError."""
    variants = config.compare.variants if recipe is None else read_variants(recipe)
    known: dict[str, dict[str, Any]] = {OWN: {}, **{name: {"method": name} for name in METHODS}, **variants}
    configs = {}
    for name in names or [OWN, *(variants if recipe is not None else ())]:
        if name not in known and ":" not in name:
            raise UserError(f"unknown method or variant {name!r}{suggest(name, known)}")
        configs[name] = changed(config.to_plain(), known.get(name, {"method": name}), f"variant {name!r}")
    return configs


def choose(steps: Sequence[int], versions: Sequence[int], step: int | None, version: int | None) -> tuple[int, int]:
    """The pair of step and version that is closest to "the version trained on the step's minibatch"; newest first.

    A step or a version that is given stays. A step s was trained at version s - 1. Of two pairs that are equally close,
    the one whose weights have not been trained on the minibatch yet is preferred.
    """
    pairs = [
        (s, v)
        for s in ([step] if step is not None else steps)
        for v in ([version] if version is not None else versions)
    ]
    return min(pairs, key=lambda pair: (abs(pair[1] - (pair[0] - 1)), pair[1] >= pair[0], -pair[0]))


def method_replay(
    name: str,
    config: RunConfig,
    minibatch: SavedMinibatch,
    examination: Examination,
    reference: dict[str, Tensor],
) -> MethodReplay:
    """The numbers of one method from what the learner has found out. reference: the gradient of the first method."""
    result, metrics = examination.result, examination.result.metrics
    rows = [(group.problem.id, trajectory) for group in minibatch.groups for trajectory in group.trajectories]
    trajectories = [trajectory for _, trajectory in rows]
    is_scored = [_is_scored(trajectory) for trajectory in trajectories]
    scored_B = torch.tensor(is_scored, dtype=torch.bool)
    ratio_shares_B = _shares_of_exp(torch.tensor(result.log_ratios_B, dtype=torch.float64), scored_B)
    gradient = examination.gradient
    square = _dot(gradient, gradient) if gradient else None
    # NaN: the trajectory has no gradient
    squares_B = torch.tensor(examination.applied_squared_norms_B, dtype=torch.float64).nan_to_num(0.0, math.inf)
    second_moment = float(squares_B.sum()) if gradient else None
    variance = None
    if second_moment is not None and square is not None:
        variance = variance_estimate(second_moment, square, sum(is_scored))
    shares_B = squares_B / squares_B.sum() if second_moment else torch.full_like(squares_B, torch.nan)
    parts = [
        TrajectoryPart(
            name=trajectory.name,
            problem=problem,
            reward=finite(trajectory.grade.reward) if trajectory.grade else None,
            log_ratio=finite(result.log_ratios_B[i]),
            weight=finite(result.weights_B[i]),
            weight_share=finite(float(ratio_shares_B[i])),
            advantage=finite(result.advantages_B[i]),
            norm=finite(math.sqrt(squares_B[i])) if gradient else None,
            share=finite(float(shares_B[i])),
            text=trajectory.text,
        )
        for i, (problem, trajectory) in enumerate(rows)
    ]
    parts.sort(key=lambda part: -1.0 if part.share is None else part.share, reverse=True)
    known = [part.share for part in parts if part.share is not None]
    return MethodReplay(
        method=name if name != OWN else f"{OWN} ({config.method.name})",
        skipped=result.skipped,
        ess=finite(metrics.get("ess")),
        ess_applied=finite(metrics.get("ess_applied")),
        largest_weight_share=finite(metrics.get("max_weight_share")),
        step_scale=finite(metrics.get("step_scale")),
        baseline_mean=finite(metrics.get("baseline_mean")),
        gradient_norm=None if square is None else finite(math.sqrt(square)),
        cosine=_cosine(gradient, reference),
        second_moment=finite(second_moment),
        variance=finite(variance),
        noise=finite(variance / square) if variance is not None and square else None,
        top_1=sum(known[:1]) if known else None,
        top_5=sum(known[:5]) if known else None,
        second_moments={
            name.removeprefix(_MOMENT): finite(value) for name, value in metrics.items() if name.startswith(_MOMENT)
        },
        parts=parts,
    )


def variance_estimate(second_moment: float, squared_norm: float, count: int) -> float | None:
    """B / (B - 1) (sum_i |g_i|^2 - |g|^2 / B): the summed variance of the components of g = sum_i g_i.

    It is unbiased for independent g_i of one distribution. ``None`` for fewer than two.
    """
    return count / (count - 1) * (second_moment - squared_norm / count) if count > 1 else None


def _examine(
    model: PreTrainedModel, config: RunConfig, temperature: float, version: int, minibatch: SavedMinibatch
) -> Examination:
    learner = Learner(model, config.method_spec, config.training, temperature)
    learner.version = version
    return learner.examine(minibatch.groups, norms=True)


def _weights_of(directory: RunDirectory) -> dict[int, Weights]:
    found = {}
    sessions = directory.sessions()
    if directory.is_finished and directory.final_model.is_dir():
        version = int(sessions[-1]["step"])
        adapter = directory.final_adapter
        found[version] = Weights(version, adapter if adapter.is_dir() else directory.final_model, None)
    for path in list_checkpoints(directory.checkpoints):
        found[version_of(path)] = Weights(version_of(path), path / "model", path)
    return dict(sorted(found.items()))


def _version_named(name: str, weights: dict[int, Weights], directory: RunDirectory) -> int:
    number = name.removeprefix("step-")
    if name == _FINAL and directory.is_finished:
        return max(weights)
    if number.isdecimal() and int(number) in weights:
        return int(number)
    raise UserError(f"the run {str(directory.path)!r} holds no checkpoint {name!r}; there are {_listed(weights)}")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(f"step-{number}" for number in numbers)


def _is_scored(trajectory: Trajectory) -> bool:
    return trajectory.grade is not None and trajectory.grade.reward is not None and bool(trajectory.mask_T.any())


def _shares_of_exp(log_ratios_B: Tensor, scored_B: Tensor) -> Tensor:
    return log_ratios_B.masked_fill(~scored_B, -torch.inf).softmax(0)


def _dot(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _cosine(gradient: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    if not gradient or not reference:
        return None
    lengths = (_dot(gradient, gradient) * _dot(reference, reference)) ** 0.5
    return finite(_dot(gradient, reference) / lengths) if lengths else None
