"""The families of models that people train, each at a tiny size: loading, prompts, sampling, updates, whole runs.

What is compared with is transformers' own forward pass over one whole sequence with eager attention: no packing, no
cache, none of our code; adapters are put into it by PEFT. Every test of updates and runs is made of all weights and of
adapters (which add something from the start: else half of their gradients were 0).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config, PreTrainedTokenizerBase

from family_cases import FAMILIES, GEMMA2_TEMPLATE, SLIDING_WINDOW, save_family, save_gemma3_for_images
from run_cases import InterruptAfter, assert_equal_weights, final_weights, timeless_metrics
from vcpo.config import ModelSection, RunConfig, TrainingSection, parse_config
from vcpo.errors import UserError
from vcpo.learner.learner import Learner
from vcpo.methods.spec import METHODS
from vcpo.models.attention import ATTENTION
from vcpo.models.loading import end_token_ids, load_model
from vcpo.models.lora import save_adapter, trained_parameters
from vcpo.observe.trajectories import load_minibatch, saved_steps
from vcpo.pipeline.run import train
from vcpo.records import GenerationRequest, Grade, Group, Message, Problem, SamplingParams, StopReason, Trajectory
from vcpo.sampler.protocol import generate
from vcpo.sampler.torch_engine import TorchEngine
from vcpo.tasks.prompts import encode_prompt

DTYPES = ("float32", "bfloat16")
TRAINED = ("full", "lora")

TEMPERATURE = 0.8
RESPONSE = 24
# of one token's log-probability. bfloat16 has 8 bits: logits of this size, around 4, are rounded to 0.03
LOGPROB_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
MEAN_TOLERANCE = {"float32": 1e-6, "bfloat16": 0.015}

SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is the answer? é"}
PROMPTS: list[str | list[Message]] = [[SYSTEM, USER], [USER], "The", "Then the other numbers are added, and"]

each_family = pytest.mark.parametrize("family", FAMILIES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_trained = pytest.mark.parametrize("trained", TRAINED)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a family's model, or of an adapter to it, made when it is first asked for. Only to be read."""
    home = tmp_path_factory.mktemp("families")

    @cache
    def directory(family: str, trained: str = "full") -> Path:
        path = home / f"{family}-{trained}"
        if trained == "full":
            save_family(family, path)
            return path
        options = {"path": str(directory(family)), "device": "cpu", "lora": {"r": 3}}
        model, _ = load_model(ModelSection.model_validate(options), seed=0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trained_parameters(model).values():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        path.mkdir()
        save_adapter(model, path)
        return path

    return directory


@dataclass(frozen=True)
class Sampled:
    """A model, what it has answered, and transformers' own model of the same weights. Only to be read."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    groups: list[Group]
    plain: Any

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@pytest.fixture(scope="module")
def sampled(directory_of: Callable[..., Path]) -> Callable[..., Sampled]:
    """Three answers to each prompt, decoded in five slots, with rewards that differ within each group."""

    @cache
    def sample(family: str, dtype: str, trained: str = "full") -> Sampled:
        model, tokenizer = load_model(section(directory_of(family, trained), dtype), seed=0)
        path = directory_of(family)
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        if trained == "lora":
            adapter = directory_of(family, trained)
            theirs = PeftModel.from_pretrained(plain, adapter, is_trainable=True, autocast_adapter_dtype=False)
            plain = theirs.base_model.model.eval()
        engine = engine_of(model, tokenizer)
        problems = [Problem(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
        requests = [
            GenerationRequest(g, i, encode_prompt(tokenizer, problem), seed=10 * g + i)
            for g, problem in enumerate(problems)
            for i in range(3)
        ]
        answers = generate(engine, requests)
        groups = []
        for g, problem in enumerate(problems):
            own = answers[3 * g : 3 * g + 3]
            graded = [replace(t, grade=Grade(float(reward))) for t, reward in zip(own, (0.0, 1.0, 0.4), strict=True)]
            groups.append(Group(g, problem, g + 1, graded))
        return Sampled(model, tokenizer, groups, plain)

    return sample


def section(path: Path, dtype: str = "float32", checkpointing: bool = False) -> ModelSection:
    return ModelSection(path=str(path), dtype=dtype, device="cpu", gradient_checkpointing=checkpointing)


def engine_of(model: Any, tokenizer: PreTrainedTokenizerBase, **params: Any) -> TorchEngine:
    given = {"max_tokens": RESPONSE, "temperature": TEMPERATURE, "stop_token_ids": end_token_ids(model, tokenizer)}
    return TorchEngine(model, SamplingParams(**given | params), slots=5, max_length=400, tokenizer=tokenizer)


def plain_logprobs(model: Any, trajectory: Trajectory) -> Tensor:
    """(T,) float64, with a graph, of one whole sequence through a model of transformers."""
    ids = torch.from_numpy(np.concatenate([trajectory.prompt_ids, trajectory.response_ids_T]))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / TEMPERATURE
    start = len(trajectory.prompt_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


def assert_close_logprobs(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], dtype: str) -> None:
    errors = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    assert errors.max() < LOGPROB_TOLERANCE[dtype]
    assert errors.mean() < MEAN_TOLERANCE[dtype]


# loading and prompts


@each_family
@each_dtype
def test_a_family_loads_with_all_of_its_end_tokens(directory_of: Callable[..., Path], family: str, dtype: str) -> None:
    model, tokenizer = load_model(section(directory_of(family), dtype), seed=0)
    case = FAMILIES[family]
    assert type(model) is case.model_class
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert all(b.dtype == torch.float32 for name, b in model.named_buffers() if name.endswith("inv_freq"))
    ends = end_token_ids(model, tokenizer)
    assert tokenizer.convert_ids_to_tokens(sorted(ends)) == sorted(case.ends, key=tokenizer.convert_tokens_to_ids)
    assert tokenizer.eos_token_id in ends
    rows = model.get_input_embeddings().weight.shape[0]
    assert (rows > len(tokenizer)) is case.is_padded


def test_the_families_differ_in_what_their_pad_token_is(directory_of: Callable[..., Path]) -> None:
    tokenizers = {family: AutoTokenizer.from_pretrained(directory_of(family)) for family in FAMILIES}
    is_end = {f: t.pad_token in FAMILIES[f].ends if t.pad_token else None for f, t in tokenizers.items()}
    assert is_end == {
        "qwen2": True,  # its only end token
        "qwen2.5": True,  # one of two
        "qwen3": True,
        "llama3.1": None,
        "llama3.2": None,
        "gemma3": False,
        "smollm2": True,
    }


@each_family
@pytest.mark.parametrize("has_system", [False, True])
def test_messages_become_the_templates_own_ids(
    directory_of: Callable[..., Path], family: str, has_system: bool
) -> None:
    case = FAMILIES[family]
    _, tokenizer = load_model(section(directory_of(family)), seed=0)
    messages = [SYSTEM, USER] if has_system else [USER]
    ids = encode_prompt(tokenizer, Problem("p", messages)).tolist()
    written = AutoTokenizer.from_pretrained(directory_of(family)).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ids == tokenizer(written, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == written
    assert ("Be brief." in written) is has_system
    assert "What is the answer? é" in written
    assert case.default_system in written or has_system
    assert written.endswith(("assistant\n", "<|end_header_id|>\n\n", "<start_of_turn>model\n"))
    assert [tokenizer.decode(i) for i in ids].count(case.bos) == (case.bos is not None)


@each_family
def test_plain_text_begins_with_one_bos_even_if_it_was_put_there_already(
    directory_of: Callable[..., Path], family: str
) -> None:
    _, tokenizer = load_model(section(directory_of(family)), seed=0)
    bos = FAMILIES[family].bos
    plain = tokenizer("The answer", add_special_tokens=False)["input_ids"]
    expected = plain if bos is None else [tokenizer.convert_tokens_to_ids(bos), *plain]
    assert encode_prompt(tokenizer, Problem("p", "The answer")).tolist() == expected
    assert encode_prompt(tokenizer, Problem("p", f"{bos or ''}The answer")).tolist() == expected
    # a template applied by whoever wrote the data
    written = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    ids = encode_prompt(tokenizer, Problem("p", written)).tolist()
    assert ids == encode_prompt(tokenizer, Problem("p", [USER])).tolist()


def test_a_template_without_a_system_role_refuses_it_by_name(directory_of: Callable[..., Path]) -> None:
    _, tokenizer = load_model(section(directory_of("gemma3")), seed=0)
    tokenizer.chat_template = GEMMA2_TEMPLATE
    encode_prompt(tokenizer, Problem("p", [USER]))
    with pytest.raises(UserError, match="'p' does not fit the tokenizer's chat template: System role not supported"):
        encode_prompt(tokenizer, Problem("p", [SYSTEM, USER]))


def test_variables_reach_the_template(directory_of: Callable[..., Path]) -> None:
    _, tokenizer = load_model(section(directory_of("qwen3")), seed=0)
    thinking = tokenizer.decode(encode_prompt(tokenizer, Problem("p", [USER])))
    silent = tokenizer.decode(encode_prompt(tokenizer, Problem("p", [USER]), SILENT))
    assert silent == f"{thinking}<think>\n\n</think>\n\n"
    # what belongs to us is not theirs to change
    assert tokenizer.decode(encode_prompt(tokenizer, Problem("p", [USER]), {"tokenize": False})) == thinking


@each_family
def test_an_open_answer_is_continued_without_a_mark_of_the_end(directory_of: Callable[..., Path], family: str) -> None:
    _, tokenizer = load_model(section(directory_of(family)), seed=0)
    begun: list[Message] = [USER, {"role": "assistant", "content": "The answer is"}]
    assert tokenizer.decode(encode_prompt(tokenizer, Problem("p", begun))).endswith("\nThe answer is")


def test_a_generation_configuration_that_transformers_only_warns_about_stops_no_checkpoint(
    directory_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Sampling settings without ``do_sample``, which many models come with, are saved as they came."""
    original = directory_of("llama3.2")
    published = tmp_path / "published"
    shutil.copytree(original, published)
    ids = json.loads((original / "generation_config.json").read_text())
    del ids["do_sample"]
    (published / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.6, "top_p": 0.9}))
    model, _ = load_model(section(published), seed=0)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert len(end_token_ids(again)) == 3
    assert again.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()


# sampling


@each_family
@each_dtype
@torch.no_grad()
def test_recorded_logprobs_are_those_of_a_plain_forward_pass(
    sampled: Callable[..., Sampled], family: str, dtype: str
) -> None:
    case = sampled(family, dtype)
    assert len({len(t.prompt_ids) for t in case.trajectories}) == len(PROMPTS)
    assert max(len(t.response_ids_T) for t in case.trajectories) == RESPONSE > 3 * SLIDING_WINDOW
    theirs = [plain_logprobs(case.plain, t).numpy() for t in case.trajectories]
    assert_close_logprobs([t.logprobs_T for t in case.trajectories], theirs, dtype)


@torch.no_grad()
def test_the_sliding_window_and_both_rotary_bases_matter_to_these_logprobs(
    sampled: Callable[..., Sampled], directory_of: Callable[..., Path]
) -> None:
    """Or the agreement above would show nothing about them."""
    case = sampled("gemma3", "float32")
    rope = case.plain.config.rope_parameters
    for changes in (
        {"sliding_window": 4 * SLIDING_WINDOW},
        {"rope_parameters": {**rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
        {"rope_parameters": {**rope, "full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"query_pre_attn_scalar": 8},
    ):
        other = AutoModelForCausalLM.from_pretrained(directory_of("gemma3"), attn_implementation="eager", **changes)
        errors = [np.abs(t.logprobs_T - plain_logprobs(other, t).numpy()).max() for t in case.trajectories]
        assert max(errors) > 0.01, changes


@each_family
@torch.no_grad()
def test_bfloat16_is_no_further_from_exact_than_transformers_is(sampled: Callable[..., Sampled], family: str) -> None:
    case = sampled(family, "bfloat16")
    exact_model = copy.deepcopy(case.plain).float()
    ours, theirs = [], []
    for t in case.trajectories:
        exact = plain_logprobs(exact_model, t).numpy()
        ours.append(t.logprobs_T - exact)
        theirs.append(plain_logprobs(case.plain, t).numpy() - exact)
    assert np.abs(np.concatenate(ours)).mean() < 1.25 * np.abs(np.concatenate(theirs)).mean()


@each_family
def test_ids_without_a_token_are_sampled_recorded_and_have_no_text(
    sampled: Callable[..., Sampled], family: str
) -> None:
    case = sampled(family, "float32")
    known = len(case.tokenizer)
    foreign = [int(i) for t in case.trajectories for i in t.response_ids_T if i >= known]
    assert bool(foreign) is FAMILIES[family].is_padded
    for t in case.trajectories:
        ids = t.response_ids_T[: -1 if t.stop_reason is StopReason.EOS else None]
        own = [i for i in ids.tolist() if i < known]
        assert t.text == case.tokenizer.decode(own, skip_special_tokens=True)
        assert isinstance(case.tokenizer.decode(t.response_ids_T, skip_special_tokens=False), str)


def test_no_sequence_is_so_long_that_rotary_frequencies_depend_on_the_batch() -> None:
    """Phi-3 with ``longrope``: beyond the original length, one long sequence would change all others of its pass."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        rope_parameters=rope,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = copy.deepcopy(plain)
    model.set_attn_implementation(ATTENTION)
    engine = TorchEngine(model, SamplingParams(max_tokens=26, temperature=TEMPERATURE), slots=2, max_length=200)
    requests = [GenerationRequest(0, i, np.arange(1, 6 + i), seed=i) for i in range(2)]
    for t in generate(engine, requests):
        assert_close_logprobs([t.logprobs_T], [plain_logprobs(plain, t).detach().numpy()], "float32")
    with pytest.raises(UserError, match="exceed the limit of 32 tokens"):
        engine.submit([GenerationRequest(0, 2, np.arange(1, 8), seed=2)])


# updates


def made_learner(path: Path, dtype: str, checkpointing: bool = False, learning_rate: float = 1e-3) -> Learner:
    """As a run makes it."""
    model, _ = load_model(section(path, dtype, checkpointing), seed=0)
    if checkpointing:
        model.activation_checkpointing_enable()
    training = TrainingSection(learning_rate=learning_rate, weight_decay=0.0, max_tokens_per_microbatch=400)
    return Learner(model, METHODS["vcpo"], training, TEMPERATURE)


@pytest.fixture(scope="module")
def examined(directory_of: Callable[..., Path], sampled: Callable[..., Sampled]) -> Callable[[str, str, str], Any]:
    """What VCPO makes of the sampled groups, without checkpointing."""

    @cache
    def examine(family: str, dtype: str, trained: str) -> Any:
        return made_learner(directory_of(family, trained), dtype).examine(sampled(family, dtype, trained).groups)

    return examine


@each_family
@each_dtype
@each_trained
def test_the_packed_learner_agrees_with_the_sampler(
    sampled: Callable[..., Sampled],
    examined: Callable[[str, str, str], Any],
    family: str,
    dtype: str,
    trained: str,
) -> None:
    result = examined(family, dtype, trained).result
    ratios = np.array(result.log_ratios_B) / [
        len(t.response_ids_T) for t in sampled(family, dtype, trained).trajectories
    ]
    assert np.abs(ratios).max() < MEAN_TOLERANCE[dtype] * (1 if dtype == "float32" else 2)
    assert result.metrics["ess"] > {"float32": 0.9999, "bfloat16": 0.9}[dtype]


@each_family
@each_dtype
@each_trained
def test_gradient_norms_are_those_of_one_backward_pass_each(
    sampled: Callable[..., Sampled],
    examined: Callable[[str, str, str], Any],
    family: str,
    dtype: str,
    trained: str,
) -> None:
    case = sampled(family, dtype, trained)
    exact = copy.deepcopy(case.plain).float()
    parameters = [p for p in exact.parameters() if p.requires_grad]
    expected = []
    for t in case.trajectories:
        single = torch.autograd.grad(plain_logprobs(exact, t).sum(), parameters)
        expected.append(sum(float(g.double().square().sum()) for g in single))
    ours = examined(family, dtype, trained).result.squared_norms_B
    assert ours == pytest.approx(expected, rel={"float32": 1e-4, "bfloat16": 0.1}[dtype])
    assert max(expected) > 2 * min(expected)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of two gradients, relative to the first."""
    assert one.keys() == other.keys()
    apart = sum(float((g - other[name]).double().square().sum()) for name, g in one.items())
    return (apart / sum(float(g.double().square().sum()) for g in one.values())) ** 0.5


@each_family
@each_dtype
@each_trained
def test_gradient_checkpointing_changes_nothing_but_rounding(
    directory_of: Callable[..., Path],
    sampled: Callable[..., Sampled],
    examined: Callable[[str, str, str], Any],
    family: str,
    dtype: str,
    trained: str,
) -> None:
    plain = examined(family, dtype, trained)
    learner = made_learner(directory_of(family, trained), dtype, checkpointing=True)
    calls = []
    learner.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = learner.examine(sampled(family, dtype, trained).groups)
    assert len(calls) % 2 == 0  # computed, and computed again
    assert len(calls) >= 2
    assert distance(plain.gradient, checkpointed.gradient) < {"float32": 1e-5, "bfloat16": 0.02}[dtype]
    assert checkpointed.result.squared_norms_B == pytest.approx(
        plain.result.squared_norms_B, rel={"float32": 1e-4, "bfloat16": 0.02}[dtype]
    )


@each_family
@each_dtype
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@each_trained
def test_a_step_trains_and_the_sampler_follows(
    directory_of: Callable[..., Path],
    sampled: Callable[..., Sampled],
    family: str,
    dtype: str,
    checkpointing: bool,
    trained: str,
) -> None:
    case = sampled(family, dtype, trained)
    learner = made_learner(directory_of(family, trained), dtype, checkpointing, learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters() if p.requires_grad}
    result = learner.step(case.groups)
    assert result.skipped is None
    after = dict(learner.model.named_parameters())
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    # the same object samples, as in lockstep
    engine = engine_of(learner.model, case.tokenizer)
    request = GenerationRequest(0, 0, case.trajectories[0].prompt_ids, seed=5)
    [t] = generate(engine, [request])
    plain = copy.deepcopy(case.plain)
    plain.load_state_dict(learner.model.state_dict())
    with torch.no_grad():
        assert_close_logprobs([t.logprobs_T], [plain_logprobs(plain, t).numpy()], dtype)
        assert np.abs(t.logprobs_T - plain_logprobs(case.plain, t).numpy()).max() > 0.1


def test_the_towers_of_a_model_for_images_stay_as_they_are(sampled: Callable[..., Sampled], tmp_path: Path) -> None:
    """Gemma 3 from 4B on: text reaches the language model alone, and weight decay must not reach further."""
    case = sampled("gemma3", "float32")
    save_gemma3_for_images(tmp_path / "model", case.plain.config, case.tokenizer)
    model, tokenizer = load_model(section(tmp_path / "model"), seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(model, METHODS["vcpo"], TrainingSection(learning_rate=1e-2, weight_decay=0.1), TEMPERATURE)
    [t, *_] = generate(engine_of(model, tokenizer), [GenerationRequest(0, 0, case.trajectories[0].prompt_ids, seed=1)])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    with torch.no_grad():
        assert_close_logprobs([t.logprobs_T], [plain_logprobs(plain, t).numpy()], "float32")
    result = learner.step(case.groups)
    assert result.skipped is None
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("model.language_model.")}


# what was sampled is what is trained


@each_family
def test_a_response_is_trained_as_the_ids_that_it_has_and_not_as_its_text(
    directory_of: Callable[..., Path], sampled: Callable[..., Sampled], family: str
) -> None:
    case = sampled(family, "float32")
    text = " the answer is there"
    merged = case.tokenizer(text, add_special_tokens=False)["input_ids"]
    split = [id for c in text for id in case.tokenizer(c, add_special_tokens=False)["input_ids"]]
    assert case.tokenizer.decode(split) == case.tokenizer.decode(merged) == text
    assert len(split) > len(merged)
    ways = [split, merged, [*merged[:2], *split[-6:]]]
    trajectories = []
    for index, ids in enumerate(ways):
        length = len(ids)
        given = replace(
            case.trajectories[0],
            index=index,
            response_ids_T=np.array(ids),
            mask_T=np.ones(length, dtype=bool),
            logprobs_T=np.zeros(length, dtype=np.float32),
            versions_T=np.zeros(length, dtype=np.int64),
            text=text,
            grade=Grade(float(index == 1)),
        )
        trajectories.append(given)
    with torch.no_grad():
        expected = [float(plain_logprobs(case.plain, t).sum()) for t in trajectories]
    learner = made_learner(directory_of(family), "float32")
    result = learner.examine([Group(0, Problem("p", ""), 1, trajectories)]).result
    assert result.log_ratios_B == pytest.approx(expected, abs=1e-4)
    assert abs(expected[0] - expected[1]) > 1


# whole runs


LOCAL = {"llama3.2": "bfloat16", "gemma3": "float32"}  # by dtype; the other families run in lockstep
QUESTION = "What is the answer?"
SILENT = {"enable_thinking": False}  # only Qwen3's template knows it


def run_config(directory: Path, model: Path, runtime: dict[str, Any] | None = None, **model_options: Any) -> RunConfig:
    """Three steps on a chat message with a system prompt."""
    data = directory.parent / "rows.jsonl"
    data.write_text(json.dumps({"prompt": QUESTION, "answer": "3"}))
    rewards = Path(__file__).parent / "family_cases.py"
    plain: dict[str, Any] = {
        "output_dir": str(directory),
        "model": {"path": str(model), "device": "cpu", **model_options},
        "task": {
            "name": "dataset",
            "path": str(data),
            "eval_path": str(data),
            "chat": True,
            "system_prompt": "Be brief.",
        },
        "eval": {"eval_steps": 3, "num_problems": 1},
        "reward": {"reward_funcs": [f"{rewards}:even_characters"], "processes": 0},
        "sampling": {
            "num_generations": 4,
            "max_prompt_length": 200,
            "max_completion_length": 12,
            "chat_template_kwargs": SILENT,
        },
        "training": {"max_steps": 3, "prompts_per_step": 2, "learning_rate": 1e-2, "weight_decay": 0.0},
        "runtime": runtime or {"name": "lockstep", "max_staleness": 1},
        "checkpoint": {"save_steps": 2},
        "logging": {"tensorboard": False, "transcript_steps": 1, "trajectory_steps": 1},
    }
    return parse_config(plain)


@pytest.fixture
def encoded_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that a tokenizer is given."""
    texts: list[str] = []

    def watch(name: str) -> None:
        original = getattr(PreTrainedTokenizerBase, name)

        def recorded(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
            texts.extend([text] if isinstance(text, str) else text)
            return original(self, text, *arguments, **options)

        monkeypatch.setattr(PreTrainedTokenizerBase, name, recorded)

    watch("__call__")
    watch("encode")
    return texts


def trained_on(run: Path) -> list[Trajectory]:
    """Every trajectory of the three steps."""
    minibatches = [load_minibatch(path) for path in saved_steps(run).values()]
    assert [minibatch.step for minibatch in minibatches] == [1, 2, 3]
    return [t for minibatch in minibatches for group in minibatch.groups for t in group.trajectories]


def train_metrics(run: Path) -> list[dict[str, Any]]:
    return [line for line in timeless_metrics(run) if line["kind"] == "train"]


def check_finished(run: Path, model: Path, family: str) -> None:
    """The final model is one like that which the run began with, and the responses ended as they should."""
    trained, original = (AutoModelForCausalLM.from_pretrained(path) for path in (run / "model", model))
    tokenizer, theirs = (AutoTokenizer.from_pretrained(path) for path in (run / "model", model))
    assert type(trained) is FAMILIES[family].model_class
    assert any(not torch.equal(p, q) for p, q in zip(trained.parameters(), original.parameters(), strict=True))
    assert tokenizer.chat_template == theirs.chat_template
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer.special_tokens_map == theirs.special_tokens_map
    assert trained.generation_config.to_diff_dict() == original.generation_config.to_diff_dict()
    ends = end_token_ids(trained, tokenizer)
    assert ends == end_token_ids(original, theirs)
    for t in trained_on(run):
        assert not set(t.response_ids_T[:-1].tolist()) & set(ends)
        assert (t.stop_reason is StopReason.EOS) is (int(t.response_ids_T[-1]) in ends)
        messages = [SYSTEM, {"role": "user", "content": QUESTION}]
        assert t.prompt_ids.tolist() == encode_prompt(theirs, Problem("p", messages), SILENT).tolist()
    for step in (1, 2, 3):
        assert "Be brief." in (run / "transcripts" / f"step-{step:06d}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LOCAL])
@each_trained
def test_a_run_in_bfloat16_with_checkpointing_goes_on_as_if_it_had_not_stopped(
    directory_of: Callable[..., Path], tmp_path: Path, encoded_texts: list[str], family: str, trained: str
) -> None:
    model = directory_of(family)
    options = {"dtype": "bfloat16", "gradient_checkpointing": True}
    run = train(run_config(tmp_path / "run", directory_of(family, trained), **options), make_report=False)
    check_finished(run, model, family)
    # nothing but prompts was ever turned into ids
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert set(encoded_texts) == {tokenizer.decode(trained_on(run)[0].prompt_ids)}
    # at step 1 nothing is stale
    assert train_metrics(run)[0]["ess"] > 0.95
    config = run_config(tmp_path / "stopped", directory_of(family, trained), **options)
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(2))
    again = train(config, "resume", make_report=False)
    assert timeless_metrics(again) == timeless_metrics(run)
    assert_equal_weights(final_weights(again), final_weights(run))


@pytest.mark.parametrize(("family", "dtype"), LOCAL.items())
@each_trained
def test_a_run_with_a_sampler_process(
    directory_of: Callable[..., Path], tmp_path: Path, family: str, dtype: str, trained: str
) -> None:
    model = directory_of(family)
    config = run_config(
        tmp_path / "run", directory_of(family, trained), runtime={"name": "local", "max_staleness": 1}, dtype=dtype
    )
    run = train(config, make_report=False)
    check_finished(run, model, family)
    assert train_metrics(run)[0]["ess"] > {"float32": 0.9999, "bfloat16": 0.95}[dtype]
