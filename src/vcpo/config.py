"""The typed configuration of a run: YAML plus dotted overrides, checked in full before anything expensive.

Imports without torch and loads in well under a second. Options that TRL has too carry TRL's names. An unknown key is
an error that names the nearest valid one; old names have no aliases.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from vcpo.errors import UserError
from vcpo.method_config import MethodSection
from vcpo.methods.spec import MethodSpec
from vcpo.tasks.registry import task_params
from vcpo.tasks.rewards import split_reward
from vcpo.vllm_environment import DEFAULT_PYTHON
from vcpo.watchdog_config import WatchdogSection

NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, and values are not silently converted between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelInit(Section):
    """A small Qwen2-architecture model made from sizes, with a character tokenizer."""

    characters: str = Field("0123456789=", description="the tokenizer's alphabet, one token per character")
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 256
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 4
    max_position_embeddings: PositiveInt = 1024

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelInit:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError("hidden_size must be an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if len(set(self.characters)) != len(self.characters):
            raise ValueError("characters must not repeat")
        return self


class LoraSection(Section):
    """Low-rank adapters, trained in place of the model's own weights; the keys are PEFT's."""

    r: PositiveInt = Field(16, description="rank")
    lora_alpha: PositiveFloat = Field(32.0, description="what an adapter adds is scaled by lora_alpha / r")
    target_modules: str | list[str] = Field(
        "all-linear", description="names of layers, or a regular expression of them; all-linear: all but the output"
    )
    use_rslora: bool = Field(False, description="scale by lora_alpha / sqrt(r)")


class ModelSection(Section):
    """Where the model comes from: exactly one of ``path`` and ``init``."""

    path: str | None = Field(
        None, description="local directory or hub id of a transformers causal LM, or the directory of a LoRA adapter"
    )
    init: ModelInit | None = Field(None, description="make a small model instead of loading one")
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    lora: LoraSection | None = Field(None, description="train adapters; null: the weights (of an adapter, its own)")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of model.path (a directory or hub id) and model.init (sizes)")
        if self.lora is not None and self.path is None:
            raise ValueError("model.lora needs model.path: adapters are for a model that has learnt something")
        return self


class WarmStartSection(Section):
    """A supervised phase on generated demonstrations; 0 steps switches it off."""

    steps: NonNegativeInt = 0
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 1e-3
    noise: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="probability with which each answer token of a demonstration is replaced by a random one"
    )


class TaskSection(BaseModel):
    """The task by name, or ``module:Name`` / ``file.py:Name`` for a user's own; other keys are its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="after")
    def _params_fit(self) -> TaskSection:
        task_params(self.name, self.params)
        return self

    @property
    def params(self) -> dict[str, Any]:
        """The task's own options, as given."""
        return dict(self.model_extra or {})


class RewardSection(Section):
    """Rewards that are summed in place of the task's own (accuracy stays the task's)."""

    reward_funcs: list[str | dict[str, Any]] = Field(
        default_factory=list,
        description="`module:name` or `file.py:name`, each f(prompts, completions, **columns) -> list[float | None];"
        " task (the task's own reward), a grader by its name, overlong (a length penalty), or {name: ..., option: ...}",
    )
    reward_weights: list[float] | None = Field(None, description="one weight per reward; all 1 when omitted")
    processes: NonNegativeInt = Field(
        1,
        description="processes that grade, each with the task and the functions loaded; 0: in the run's own process,"
        " where a grader that hangs holds up the run and one that raises ends it",
    )
    timeout: float = Field(
        60.0,
        gt=0,
        le=1e6,
        description="seconds for the answers to one prompt, then the grading process is killed and replaced and what"
        " was not graded has no reward; not with processes=0",
    )
    max_memory: PositiveFloat | None = Field(
        4.0,
        description="GiB that a grading process may take for the answers to one prompt, beyond what it had when it was"
        " loaded; with more it is killed and replaced, as after the time-out; null: no limit (Linux only)",
    )
    max_failures: NonNegativeInt = Field(
        8,
        description="prompts in a row of which no answer could be graded, because grading failed; one more ends the"
        " run with the error",
    )

    @model_validator(mode="after")
    def _weights_fit(self) -> RewardSection:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries for {len(self.reward_funcs)} reward_funcs"
            )
        for reward in self.reward_funcs:
            split_reward(reward)
        return self

    @property
    def own_functions(self) -> list[str]:
        """The user's own functions among ``reward_funcs``, as written."""
        names = [split_reward(reward)[0] for reward in self.reward_funcs]
        return [name for name in names if ":" in name]


class TorchEngine(Section):
    """The engine of this package, in its environment."""

    name: Literal["torch"] = "torch"


class VllmEngine(Section):
    """vLLM, in an environment of its own (docs/vllm.md); ``runtime=local`` only."""

    name: Literal["vllm"]
    python: str = Field(DEFAULT_PYTHON, description="the interpreter of the environment in which vLLM is installed")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.4, description="share of a GPU's memory for a sampler, weights included; the learner needs the rest"
    )
    kv_cache_gb: PositiveFloat | None = Field(
        None, description="memory for keys and values; null: what gpu_memory_utilization leaves, without a GPU 1"
    )
    enforce_eager: bool | None = Field(None, description="run the model without compiling it; null: without a GPU")
    prefix_caching: bool = Field(True, description="responses that start at the same version share their prompt's keys")


Engine = Annotated[TorchEngine | VllmEngine, Field(discriminator="name")]


class SamplingSection(Section):
    """How training responses are sampled."""

    num_generations: PositiveInt = Field(8, description="responses per prompt (group size)")
    max_prompt_length: PositiveInt = 512
    max_completion_length: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    stop_strings: list[str] = Field(default_factory=list)
    long_prompts: Literal["skip", "truncate", "error"] = Field(
        "skip", description="what to do with a prompt over max_prompt_length; skipped and truncated ones are counted"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables for the chat template, such as enable_thinking of Qwen3"
    )
    slots: PositiveInt = Field(
        128, description="responses decoded at the same time by one sampler (lockstep decodes its whole minibatch)"
    )
    engine: Engine = TorchEngine()

    @property
    def merges_adapters(self) -> bool:
        """Whether the engine knows no adapters, so that it is given weights with them added in."""
        return self.engine.name == "vllm"

    @field_validator("engine", mode="before")
    @classmethod
    def _engine_shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _no_truncated_sampling(self) -> SamplingSection:
        if self.top_p < 1 or self.top_k > 0:
            raise ValueError(
                "training needs sampling.top_p=1 and sampling.top_k=0: truncated sampling biases every importance"
                " ratio by the probability mass it removes (evaluation may truncate: eval.top_p, eval.top_k)"
            )
        return self


class TrainingSection(Section):
    """The optimizer loop."""

    max_steps: PositiveInt = 100
    prompts_per_step: PositiveInt = Field(16, description="groups in one minibatch (one optimizer step)")
    learning_rate: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = 0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegativeFloat = 0.1
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    max_tokens_per_microbatch: PositiveInt | None = Field(
        None,
        description="tokens (prompts included) in one forward pass; one longer trajectory still fits alone;"
        " null: 16384 on a GPU, on the CPU what its caches can hold of a layer's activations",
    )
    gradient_norm_fallback: bool = Field(
        False, description="take norms one trajectory at a time if a layer has no rule, instead of refusing the model"
    )
    gradient_norm_mode: Literal["auto", "gram", "single"] = Field(
        "auto",
        description="how norms are made of a layer's rows; auto: what is quicker on this machine, layer by layer",
    )
    gradient_cosine: bool = Field(
        True, description="measure the cosine between consecutive gradients; keeps one more copy of the gradient"
    )
    max_skipped_steps: NonNegativeInt = Field(
        20, description="stop after this many consecutive steps with non-finite ratios or gradients"
    )


class BoundedPacing(Section):
    """Starts are paced so that nothing becomes too old, and nothing finished is discarded."""

    name: Literal["bounded"] = "bounded"


class DropStalePacing(Section):
    """Train on what is finished first; drop what has become older than the staleness limit."""

    name: Literal["drop_stale"] = "drop_stale"
    max_ahead: NonNegativeInt | None = Field(
        None,
        description="minibatches of groups started beyond the next one; null: as many as the staleness limit; with"
        " more, samplers that are quick enough produce what is then dropped",
    )


class PacePacing(Section):
    """PACE: as ``drop_stale``, and reject the stalest groups when more than a target are waiting."""

    name: Literal["pace"] = "pace"
    max_ahead: NonNegativeInt | None = Field(None, description="as in drop_stale")
    target_occupancy: Annotated[float, Field(ge=1)] = Field(
        2.0, description="finished groups, in minibatches and with the next one, that may wait without a rejection"
    )
    smoothing: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="weight of the newest excess over the target in the reject rate"
    )
    sharpening: PositiveFloat = Field(4.0, description="exponent on the percentile of the prefix-forgetting score")


Pacing = Annotated[BoundedPacing | DropStalePacing | PacePacing, Field(discriminator="name")]


class _PacedRuntime(Section):
    """What every runtime knows about staleness."""

    target_ess: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="effective sample size to be held by lowering the staleness limit below max_staleness; null: fixed",
    )
    pacing: Pacing = BoundedPacing()

    @field_validator("pacing", mode="before")
    @classmethod
    def _pacing_shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class LockstepRuntime(_PacedRuntime):
    """One process and a virtual clock: exact lag schedules, bit-for-bit repeatable on the CPU."""

    name: Literal["lockstep"]
    max_staleness: NonNegativeInt = Field(0, description="largest policy lag k, in optimizer steps; 0 is synchronous")
    lag: Literal["fixed", "mixed", "in_flight"] = Field(
        "fixed",
        description="every response k steps old; uniformly 0..k per group; or from k to 0 over the response's tokens",
    )
    threads: NonNegativeInt = Field(1, description="CPU threads; 0 leaves torch's default")

    @model_validator(mode="after")
    def _has_no_pool(self) -> LockstepRuntime:
        if self.pacing.name != "bounded":
            raise ValueError(
                f"runtime.pacing={self.pacing.name} needs runtime=local: lockstep samples each minibatch when it is"
                " trained on, so no finished group ever waits and there is nothing to drop"
            )
        return self


class LocalRuntime(_PacedRuntime):
    """Sampler processes and a learner process on one machine, weights in shared memory."""

    name: Literal["local"]
    max_staleness: NonNegativeInt = 4
    in_flight_updates: bool = Field(
        True, description="swap weights between two decode steps; otherwise only when no response is being decoded"
    )
    recompute_kv_cache: bool = Field(
        False,
        description="rebuild the key/value cache after each swap; otherwise old entries stay (PipelineRL)",
    )
    samplers: PositiveInt = 1
    sampler_threads: PositiveInt = 1
    learner_threads: PositiveInt = 1
    max_restarts: NonNegativeInt = Field(
        4, description="samplers that may die in a row, without a finished response between, before the run ends"
    )
    hang_timeout: PositiveFloat = Field(
        120.0, description="seconds without a decoding step after which a sampler with work to do is replaced"
    )
    start_timeout: PositiveFloat = Field(900.0, description="seconds that a sampler may take to load its model")


Runtime = Annotated[LockstepRuntime | LocalRuntime, Field(discriminator="name")]


class EvalSection(Section):
    """Evaluation on held-out problems."""

    eval_steps: NonNegativeInt = Field(0, description="evaluate every so many steps and at both ends; 0 for never")
    num_problems: PositiveInt = 128
    num_generations: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    background: bool = Field(
        False,
        description="evaluate in a process of its own while the training goes on (runtime=local); an evaluation that"
        " falls due while another is running is skipped, except for the last",
    )


class CheckpointSection(Section):
    """When the state of a run is saved for ``--resume``."""

    save_steps: NonNegativeInt = Field(50, description="0 saves only at the end and on interruption")
    save_total_limit: PositiveInt = 2


class LoggingSection(Section):
    """What a run writes while it trains."""

    tensorboard: bool = True
    report_to: list[str] = Field(
        default_factory=list,
        description="experiment trackers: wandb, trackio, mlflow, or `module:Name` / `file.py:Name` for your own",
    )
    project: str = Field("vcpo", min_length=1, description="the trackers' project (MLflow: experiment)")
    run_name: str | None = Field(None, description="the trackers' name of the run; null: the run directory's name")
    transcript_steps: NonNegativeInt = Field(10, description="write sample transcripts every so many steps; 0 for none")
    transcripts_per_step: PositiveInt = 4
    trajectory_steps: NonNegativeInt = Field(
        0,
        description="keep the minibatch of every so many steps for vcpo replay; those beside checkpoints always are",
    )
    timeline_steps: NonNegativeInt = Field(
        0, description="record what every process does during the first so many steps, for vcpo timeline; 0: not at all"
    )


class CompareSection(Section):
    """Default contents of ``vcpo compare``: named variants of this recipe, each a set of dotted overrides."""

    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: list[int] = Field(default_factory=lambda: [1, 2, 3])


class RunConfig(Section):
    """Everything that determines a run."""

    output_dir: str = Field("runs/vcpo", description="the run directory")
    seed: NonNegativeInt = 0
    model: ModelSection
    task: TaskSection
    reward: RewardSection = RewardSection()
    warm_start: WarmStartSection = WarmStartSection()
    sampling: SamplingSection = SamplingSection()
    method: MethodSection = Field(default_factory=lambda: MethodSection.model_validate({"name": "vcpo"}))
    training: TrainingSection = TrainingSection()
    runtime: Runtime = LocalRuntime(name="local")
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    watchdog: WatchdogSection = WatchdogSection()
    compare: CompareSection = CompareSection()

    @field_validator("model", mode="before")
    @classmethod
    def _model_shorthand(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("task", "method", "runtime", mode="before")
    @classmethod
    def _name_shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _combination_fits(self) -> RunConfig:
        if self.eval.background and self.runtime.name != "local":
            raise ValueError(
                "eval.background=true needs runtime=local: lockstep does one thing after the other in one process,"
                " which is what makes it repeatable"
            )
        watchdog = self.watchdog
        for key, method in (("method", self.method), ("watchdog.rollback.method", watchdog.rollback.method)):
            baseline = None if method is None else method.spec.baseline
            if baseline in ("leave_one_out", "token_optimal", "opob") and self.sampling.num_generations < 2:
                raise ValueError(f"{key}.baseline={baseline} needs sampling.num_generations of 2 or more")
        if watchdog.rolls_back and not self.checkpoint.save_steps:
            raise ValueError("watchdog.action=rollback needs checkpoints to go back to: give checkpoint.save_steps")
        if self.sampling.engine.name == "vllm" and self.runtime.name != "local":
            raise ValueError(
                "sampling.engine=vllm needs runtime=local: lockstep repeats a run bit for bit, which vLLM does not"
            )
        if self.warm_start.steps and self.model.init is None:
            raise ValueError("warm_start.steps needs model.init: a pre-trained model (model.path) is trained as it is")
        longest = self.sampling.max_prompt_length + self.sampling.max_completion_length
        if self.model.init and longest > self.model.init.max_position_embeddings:
            raise ValueError(
                f"sampling.max_prompt_length + sampling.max_completion_length = {longest} exceeds"
                f" model.init.max_position_embeddings = {self.model.init.max_position_embeddings}"
            )
        return self

    @property
    def method_spec(self) -> MethodSpec:
        """The method, with what it takes from the rest of the configuration."""
        return self.spec_of(self.method)

    def spec_of(self, method: MethodSection) -> MethodSpec:
        """Any method in place of the run's."""
        spec = method.spec
        return replace(spec, constant_length=spec.constant_length or self.sampling.max_completion_length)

    def to_plain(self) -> dict[str, Any]:
        """The effective configuration as plain data that loads back to an equal configuration."""
        data = self.model_dump(mode="json")
        data["method"] = self.method.to_plain()
        data["watchdog"] = self.watchdog.to_plain()
        return data


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, apply ``key.sub=value`` overrides (values are YAML) and validate.

    Raises UserError with one sentence for anything that is wrong.
    """
    data: dict[str, Any] = {}
    if recipe is not None:
        data = read_recipe(recipe)
    for override in overrides:
        set_dotted(data, *parse_override(override))
    return parse_config(data, source=str(recipe) if recipe else "configuration")


def parse_override(override: str) -> tuple[str, Any]:
    """Key and value of ``key.sub=value``, whose value is YAML. Raises UserError when it is not of that form."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r} must be written key.sub=value")
    try:
        return key, yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML ({_first_line(error)})") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """The raw contents of a recipe file."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise UserError(f"recipe {str(path)!r} does not exist{_nearest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {str(path)!r} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"recipe {str(path)!r} is not valid YAML: {_first_line(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"recipe {str(path)!r} must be a mapping of sections, not a {type(data).__name__}")
    return data


def set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    """Set ``data["a"]["b"] = value`` for key ``a.b``; a shorthand string on the way becomes its section."""
    if not isinstance(key, str):
        raise UserError(f"the override {key!r} must be a dotted key, like training.learning_rate")
    *parents, last = key.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if isinstance(child, str):
            child = {"path" if parent == "model" else "name": child}
        elif child is None:
            child = {}
        elif not isinstance(child, dict):
            raise UserError(f"override {key!r}: {parent!r} is a value, not a section")
        else:
            child = dict(child)
        node[parent] = child
        node = child
    keeps_name = not parents and last in ("task", "method", "runtime", "model")
    if keeps_name and isinstance(value, str) and isinstance(node.get(last), dict):
        # `method=tis` over a section: another name starts from that name's defaults; `model=DIR` is another path only
        kept = {key: given for key, given in node[last].items() if last == "model" and key != "init"}
        value = {**kept, "path" if last == "model" else "name": value}
        if last == "runtime" and node[last].get("max_staleness") is not None:
            value["max_staleness"] = node[last]["max_staleness"]
    node[last] = value


def parse_config(data: dict[str, Any], source: str = "configuration") -> RunConfig:
    """Validate plain data. Raises UserError naming every key that is wrong, in one line each."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        sentences = dict.fromkeys(_sentence(dict(e)) for e in error.errors())
        raise UserError(f"{source}: " + "; ".join(sentences)) from None


def valid_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration section and its subsections."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for section in _sections_in(info.annotation):
            yield from valid_keys(section, f"{prefix}{name}.")


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _sections_in(inner)


def _sentence(error: dict[str, Any]) -> str:
    # discriminated unions put the chosen tag into the location; it is no part of the key
    parts = [str(part) for part in error["loc"]]
    if len(parts) > 1 and parts[0] == "runtime":
        parts = ["runtime", *parts[2:]]
    if len(parts) > 2 and parts[:2] == ["runtime", "pacing"]:
        parts = ["runtime", "pacing", *parts[3:]]
    if parts[:2] == ["method", "spec"]:
        parts.remove("spec")
    key = ".".join(parts)
    kind, given = error["type"], error.get("input")
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        keys = list(valid_keys())
        # a key that is right but for its section: the section that users most often leave out comes first
        same_leaf = sorted((k for k in keys if k.rsplit(".", 1)[-1] == parts[-1]), key=lambda k: "training" not in k)
        near = same_leaf[:1] or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
        if near:
            return f"unknown key {key}; did you mean {near[0]!r}?"
        siblings = [k for k in keys if k.rpartition(".")[0] == key.rpartition(".")[0]]
        return f"unknown key {key}; allowed: {', '.join(siblings)}"
    if kind == "missing":
        return f"{key} is required"
    if kind == "union_tag_invalid":
        return f"unknown {key} {context['tag']!r}; allowed: {context['expected_tags']}"
    if kind == "union_tag_not_found":
        names = "bounded, drop_stale, pace" if parts[-1] == "pacing" else "lockstep, local"
        return f"{key}.name is required; allowed: {names}"
    if kind == "value_error":
        message = str(context["error"])
        return message if not key or key in message else f"{key}: {message}"
    message = error["msg"].replace("Input should be", "must be")
    return f"{key} = {given!r} {message}"


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no directory {str(path.parent)!r})"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key and reads 1e-6 as a number, as people who write learning rates expect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} appears twice (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _add_float_rule() -> None:
    import re

    pattern = re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    _Loader.add_implicit_resolver("tag:yaml.org,2002:float", pattern, list("-+0123456789."))


_add_float_rule()
