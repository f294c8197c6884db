"""What a configuration would run, before anything is loaded, started or written: words, arithmetic, memory, limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vcpo.config import LocalRuntime, RunConfig
from vcpo.models.sizes import ModelSizes, UnknownModel
from vcpo.observe.formatting import count
from vcpo.pipeline.memory import (
    device_memory,
    host_memory,
    letters,
    longest_trajectory,
    microbatch_tokens,
    planned_device,
)
from vcpo.pipeline.pacer import Pacer
from vcpo.pipeline.variants import changed
from vcpo.plugins import load_object
from vcpo.report.plan import Plan
from vcpo.tasks.registry import BUILT_IN


def plan_run(config: RunConfig) -> Plan:
    """The plan of one run. Neither the data nor the network is needed, and no foreign code is executed.

    Raises UserError when a variant in ``compare.variants`` is not valid, naming it.
    """
    variants = variant_configs(config)
    try:
        sizes, unknown = ModelSizes.find(config.model), None
    except UnknownModel as error:
        sizes, unknown = None, str(error)
    return Plan(
        run=tuple(_words(config, sizes, variants)),
        arithmetic=tuple(_arithmetic(config, sizes)),
        memory=device_memory(config, sizes) if sizes else (),
        memory_unknown=unknown,
        letters=letters(config, sizes) if sizes else "",
        host=host_memory(config, sizes) if sizes else (),
        notes=tuple(_notes(config, sizes)),
    )


def variant_configs(config: RunConfig) -> dict[str, RunConfig]:
    """The configuration of every variant in ``compare.variants``. Raises UserError naming one that is not valid."""
    configs = {}
    for name, changes in config.compare.variants.items():
        data = {key: value for key, value in config.to_plain().items() if key != "compare"}
        configs[name] = changed(data, changes, f"variant {name!r}")
    return configs


def evaluated_steps(config: RunConfig) -> list[int]:
    """The steps after which a new run evaluates; 0 is before the first."""
    every, last = config.eval.eval_steps, config.training.max_steps
    return sorted({*range(0, last + 1, every), last}) if every else []


def saved_steps(config: RunConfig) -> list[int]:
    """The steps after which a checkpoint is written."""
    every, last = config.checkpoint.save_steps, config.training.max_steps
    return sorted({*(range(every, last + 1, every) if every else ()), last})


def _words(config: RunConfig, sizes: ModelSizes | None, variants: dict[str, RunConfig]) -> Iterator[tuple[str, str]]:
    model, sampling, training = config.model, config.sampling, config.training
    yield "task", "; ".join([config.task.name, *_sources(config.task.params)])
    yield from (("task code", _present(spec)) for spec in [config.task.name] if spec not in BUILT_IN and ":" in spec)
    yield from _environment(config)
    yield from (("reward", _present(spec)) for spec in config.reward.own_functions)
    name = model.path or "made from sizes"
    known = f"{count(sizes.parameters)} parameters ({sizes.source})" if sizes else "of unknown size"
    device = planned_device(model).type
    assumed = " (planned for; auto)" if model.device == "auto" else ""
    yield "model", f"{name}: {known}, {model.dtype} on {device}{assumed}"
    if sizes and sizes.trained != sizes.parameters:
        yield "adapters", f"LoRA: {count(sizes.trained)} parameters are trained"
    if config.warm_start.steps:
        yield "warm start", f"{config.warm_start.steps} supervised steps of {config.warm_start.batch_size}"
    yield "method", f"{config.method.name}: {_parts(config.method.to_plain())}"
    schedule = "" if training.lr_scheduler_type == "constant" else f", {training.lr_scheduler_type} decay"
    warmup = f", {training.warmup_steps} warm-up steps" if training.warmup_steps else ""
    yield (
        "optimizer",
        f"AdamW, learning rate {training.learning_rate:g}{warmup}{schedule}, betas ({training.adam_beta1:g},"
        f" {training.adam_beta2:g}), epsilon {training.adam_epsilon:g}, weight decay {training.weight_decay:g},"
        f" gradient clipped at {training.max_grad_norm:g}",
    )
    yield (
        "sampling",
        f"{sampling.num_generations} responses per prompt at temperature {sampling.temperature:g}, prompts up to"
        f" {sampling.max_prompt_length:,} and responses up to {sampling.max_completion_length:,} tokens",
    )
    yield "runtime", _runtime(config)
    if config.eval.eval_steps:
        chosen = config.eval
        yield (
            "evaluation",
            f"every {chosen.eval_steps} steps and at both ends: {chosen.num_problems:,} problems x"
            f" {chosen.num_generations} at temperature {chosen.temperature:g}, top-p {chosen.top_p:g}"
            + (", in a process beside the training" if chosen.background else ""),
        )
    if config.watchdog.enabled:
        yield "watchdog", f"{config.watchdog.action} on an alarm of {', '.join(config.watchdog.rules)}"
    directory = Path(config.output_dir)
    yield "output_dir", f"{config.output_dir} ({'is there already' if directory.exists() else 'new'})"
    if variants:
        seeds = config.compare.seeds
        yield (
            "vcpo compare",
            f"{len(variants)} variants x {len(seeds)} seeds = {len(variants) * len(seeds)} such runs, all valid:"
            f" {', '.join(variants)}",
        )


def _sources(params: dict[str, Any]) -> Iterator[str]:
    """Where a task's data would come from, and whether it is there."""
    for key, value in params.items():
        if key in ("path", "eval_path") and isinstance(value, str):
            yield f"{key} {value} ({'there' if Path(value).is_file() else 'NOT there'})"
        elif key == "dataset_name" and value is not None:
            yield f"data set {value} of the hub (not looked for)"
        elif value is not None and key != "sandbox":
            yield f"{key} {value}"


def _environment(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Turns and tool of a built-in task that has them."""
    if config.task.name not in BUILT_IN:
        return
    options = load_object(BUILT_IN[config.task.name]).Options.model_validate(config.task.params)
    turns, sandbox = getattr(options, "max_turns", None), getattr(options, "sandbox", None)
    if turns is not None:
        yield "turns", f"up to {turns} in a response; what comes in between counts for its length"
    if sandbox is not None:
        yield "code of the model", f"run by {sandbox.in_words()}"


def _present(spec: str) -> str:
    source = spec.rpartition(":")[0]
    if not source.endswith(".py"):
        return f"{spec} (a module, not looked for)"
    return f"{spec} ({'there' if Path(source).is_file() else 'NOT there'})"


def _parts(plain: dict[str, Any], prefix: str = "") -> str:
    """``ratio_level sequence, weight.cap 8, ...``: every part that is set."""
    words = []
    for key, value in plain.items():
        if isinstance(value, dict):
            words.append(_parts(value, f"{prefix}{key}."))
        elif value not in (None, False) and (prefix or key != "name"):
            words.append(f"{prefix}{key} {value:g}" if isinstance(value, float) else f"{prefix}{key} {value}")
    return ", ".join(word for word in words if word)


def _runtime(config: RunConfig) -> str:
    runtime = config.runtime
    lag = f"policy lag at most {runtime.max_staleness} steps" if runtime.max_staleness else "synchronous (lag 0)"
    if runtime.target_ess is not None:
        lag += f", lowered to hold an effective sample size of {runtime.target_ess:g}"
    if runtime.name == "lockstep":
        return f"lockstep: one process, {lag}, schedule {runtime.lag}"
    if runtime.pacing.name != "bounded":
        lag += f", pacing {runtime.pacing.name}"
    samplers = "1 sampler process" if runtime.samplers == 1 else f"{runtime.samplers} sampler processes"
    when = "between two tokens" if runtime.in_flight_updates else "when no response is being decoded"
    cache = "recomputed" if runtime.recompute_kv_cache else "kept"
    return f"local: {samplers} beside the learner, {lag}; new weights come in {when}, the key/value cache is {cache}"


def _arithmetic(config: RunConfig, sizes: ModelSizes | None) -> Iterator[tuple[str, str, str]]:
    sampling, training = config.sampling, config.training
    prompts, members, steps = training.prompts_per_step, sampling.num_generations, training.max_steps
    trajectories, longest = prompts * members, longest_trajectory(config)
    yield "trajectories per step", count(trajectories), f"{prompts} prompts x {members} responses"
    yield (
        "tokens per step",
        count(trajectories * longest),
        f"at most; {trajectories:,} x ({sampling.max_prompt_length:,} + {sampling.max_completion_length:,}),"
        f" of which {trajectories * sampling.max_completion_length:,} are trained",
    )
    limit = microbatch_tokens(config, sizes)
    if limit is not None:
        each = max(1, limit // longest)
        words = f"at most; {limit:,} tokens hold {each} of {longest:,}"
        if limit < longest:
            words = f"at most; a trajectory of {longest:,} tokens is longer than the {limit:,} of a pass and goes alone"
        if config.method.spec.needs_preview:
            words += "; as many without gradient come first, because the method must know all of the minibatch"
        yield "passes per step", count(-(-trajectories // each)), words
    yield from _in_flight(config)
    yield "steps", count(steps), "training.max_steps"
    yield "trajectories in all", count(steps * trajectories), f"of {steps * prompts:,} prompts"
    evaluations = len(evaluated_steps(config))
    problems, samples = config.eval.num_problems, config.eval.num_generations
    if evaluations:
        words = f"one before the first step; {problems:,} x {samples} = {problems * samples:,} responses each"
    else:
        words = "eval.eval_steps is 0"
    yield "evaluations", count(evaluations), words
    yield "checkpoints", count(len(saved_steps(config))), f"of which {config.checkpoint.save_total_limit} are kept"


def _ahead(runtime: LocalRuntime) -> int:
    """Minibatches of groups that may be started beyond the next one."""
    ahead = None if runtime.pacing.name == "bounded" else runtime.pacing.max_ahead
    return runtime.max_staleness if ahead is None else ahead


def _in_flight(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    runtime, sampling, training = config.runtime, config.sampling, config.training
    prompts = training.prompts_per_step
    if runtime.name == "lockstep":
        yield "groups in flight", count(prompts), "the minibatch that is sampled right before its step"
        return
    groups = Pacer(_ahead(runtime), prompts).started_limit(0, training.max_steps)
    name = "max_staleness" if runtime.pacing.name == "bounded" else "max_ahead"
    words = f"at most; ({name} {_ahead(runtime)} + 1) x {prompts} groups per minibatch"
    yield "groups in flight", count(groups), words
    responses, slots = groups * sampling.num_generations, runtime.samplers * sampling.slots
    yield (
        "responses in flight",
        count(responses),
        f"of which {min(slots, responses):,} are decoded at a time ({runtime.samplers} x {sampling.slots} slots)",
    )


def _notes(config: RunConfig, sizes: ModelSizes | None) -> Iterator[str]:
    longest = longest_trajectory(config)
    if sizes and sizes.positions and longest > sizes.positions:
        yield (
            f"The model takes {sizes.positions:,} positions, fewer than the {longest:,} tokens that the limits on"
            " prompt and response allow: a prompt without room for max_completion_length would end the run."
        )
    runtime = config.runtime
    if runtime.name == "local":
        responses = (_ahead(runtime) + 1) * config.training.prompts_per_step * config.sampling.num_generations
        if runtime.samplers * config.sampling.slots > responses:
            yield f"Only {responses:,} responses can be in flight: lower sampling.slots, which cost cache memory."
        yield "One learner process: gradient and optimizer state are not split over devices in this version."
        yield "With several GPUs the learner has the first and samplers have the others in turn; one GPU is shared."
    else:
        yield "One process on one device: sampling and training take turns, so a lag costs accuracy and saves no time."
    if config.sampling.engine.name == "torch":
        yield "Responses are decoded by the embedded torch engine; vLLM is quicker (sampling.engine=vllm)."
    if config.watchdog.rolls_back:
        yield "The watchdog keeps as many checkpoints as a rollback needs, which can be more than save_total_limit."
    if not config.reward.processes and any(":" in name for name in [config.task.name, *config.reward.own_functions]):
        yield "Your own graders run in the learner's process (reward.processes=0): one that hangs holds up the run."
