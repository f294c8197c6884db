"""Small models and hand-made trajectories for the tests of the learner, and one update computed the slow way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vcpo.methods.spec import MethodSpec
from vcpo.methods.weights import Truncate
from vcpo.models.attention import ATTENTION
from vcpo.records import Grade, Group, Problem, StopReason, Trajectory

VOCABULARY = 11

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}

FAMILIES = ("qwen2", "qwen3", "llama", "gemma", "gpt2", "smollm")

PLAIN_ATTENTION = "plain"


def _plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention over one sequence, all in the inputs' dtype; transformers' own takes softmax in float32."""
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    is_hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (scaling * query @ key.transpose(-1, -2)).masked_fill(is_hidden, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register(PLAIN_ATTENTION, _plain_attention)


def make_model(
    family: str = "qwen2",
    tied: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    attn: str = ATTENTION,
    vocabulary: int = VOCABULARY,
) -> PreTrainedModel:
    """A tiny model whose norm weights and biases are not at their initial values, where wrong rules look right."""
    classes: dict[str, tuple[Any, Any]] = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "gemma": (GemmaConfig, GemmaForCausalLM),
        "gpt2": (GPT2Config, GPT2LMHeadModel),
        "smollm": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = classes[family]
    if family == "gpt2":
        config = config_class(
            vocab_size=vocabulary,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=64,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
        )
    else:
        # SmolLM: an odd number of heads, three to a key/value head
        odd = {
            "hidden_size": 18,
            "intermediate_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 6,
        }
        sizes = SIZES | odd if family == "smollm" else SIZES
        config = config_class(**sizes | {"vocab_size": vocabulary}, tie_word_embeddings=tied)
    return randomised(model_class, config, dtype, seed, attn)


def randomised(
    model_class: Any, config: Any, dtype: torch.dtype = torch.float64, seed: int = 0, attn: str = ATTENTION
) -> PreTrainedModel:
    """A model whose parameters are not at their initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class._from_config(config, attn_implementation=attn, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def make_trajectory(
    rng: np.random.Generator,
    group: int,
    index: int,
    reward: float | None,
    prompt: int = 4,
    response: int = 5,
    given: Sequence[int] = (),
    drift: float = 0.3,
    model: PreTrainedModel | None = None,
    temperature: float = 1.0,
) -> Trajectory:
    """A response of random tokens. ``drift``: spread of the token log-ratios under ``model``.

    Without a model the sampler's log-probabilities are arbitrary. Tokens at positions ``given`` are not trained.
    """
    prompt_ids = rng.integers(2, VOCABULARY, prompt)
    response_ids = rng.integers(2, VOCABULARY, response)
    mask = np.ones(response, dtype=bool)
    mask[list(given)] = False
    noise = rng.normal(0, drift, response)
    if model is None:
        logprobs = -rng.uniform(0.5, 4.0, response)
    else:
        logprobs = slow_logprobs(model, prompt_ids, response_ids, temperature).detach().double().numpy() - noise
    return Trajectory(
        group_id=group,
        index=index,
        prompt_ids=prompt_ids,
        response_ids_T=response_ids,
        mask_T=mask,
        logprobs_T=logprobs.astype(np.float32),
        versions_T=np.zeros(response, dtype=np.int64),
        stop_reason=StopReason.EOS,
        start_version=0,
        grade=Grade(reward, bool(reward)),
    )


def make_groups(
    model: PreTrainedModel,
    rewards: Sequence[Sequence[float | None]],
    seed: int = 0,
    drift: float = 0.3,
    temperature: float = 1.0,
    given: bool = True,
) -> list[Group]:
    """One group per list of rewards, with prompts and responses of many lengths (a length of 1 among them)."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, group_rewards in enumerate(rewards):
        prompt = int(rng.integers(1, 7))
        trajectories = []
        for index, reward in enumerate(group_rewards):
            response = 1 if index == 0 else int(rng.integers(2, 12))
            masked = [1] if given and response > 3 and index % 2 else []
            trajectories.append(
                make_trajectory(rng, 7 + number, index, reward, prompt, response, masked, drift, model, temperature)
            )
        groups.append(Group(7 + number, Problem(str(number), ""), number + 1, trajectories))
    return groups


def slow_logprobs(
    model: PreTrainedModel, prompt_ids: np.ndarray, response_ids: np.ndarray, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of a response by one unpacked forward pass through plain attention."""
    ids = torch.tensor([[*prompt_ids.tolist(), *response_ids.tolist()]])
    implementation = model.config._attn_implementation
    model.set_attn_implementation(PLAIN_ATTENTION)
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(implementation)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    start = len(prompt_ids)
    return torch.stack([logprobs[start + t - 1, ids[0, start + t]] for t in range(len(response_ids))])


def slow_gradient(
    model: PreTrainedModel,
    trajectory: Trajectory,
    token_weights: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Gradient of sum_t u_t log pi_t over the trained tokens, by autograd on that trajectory alone."""
    logprobs = slow_logprobs(model, trajectory.prompt_ids, trajectory.response_ids_T, temperature)
    logprobs = logprobs[torch.from_numpy(trajectory.mask_T)]
    if token_weights is not None:
        logprobs = logprobs * torch.tensor(token_weights, dtype=logprobs.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(logprobs.sum(), parameters, allow_unused=True, materialize_grads=True))


def slow_update(
    model: PreTrainedModel, groups: Sequence[Group], spec: MethodSpec, temperature: float = 1.0
) -> tuple[list[Tensor], float]:
    """The gradient of the objective and the ESS of a minibatch, trajectory by trajectory, in plain Python floats."""
    entries = []
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.grade is None or trajectory.grade.reward is None or not trajectory.mask_T.any():
                continue
            with torch.no_grad():
                logprobs = slow_logprobs(model, trajectory.prompt_ids, trajectory.response_ids_T, temperature)
            ratios = [
                float(new) - float(old)
                for new, old, trained in zip(logprobs, trajectory.logprobs_T, trajectory.mask_T, strict=True)
                if trained
            ]
            entries.append(_Entry(group.id, trajectory, float(trajectory.grade.reward), ratios))
    count, tokens = len(entries), sum(len(e.ratios) for e in entries)
    assert isinstance(spec.weight, Truncate)
    cap = math.inf if spec.weight.cap is None else spec.weight.cap
    for e in entries:
        length = len(e.ratios)
        e.raw = {"sequence": math.exp(sum(e.ratios)), "geometric": math.exp(sum(e.ratios) / length)}.get(
            spec.ratio_level, 1.0
        )
        e.weight = min(e.raw, cap)
        token_weights = [min(math.exp(x), cap) for x in e.ratios] if spec.ratio_level == "token" else [1.0] * length
        e.gradient = slow_gradient(model, e.trajectory, token_weights, temperature)
        e.norm = sum(float((g**2).sum()) for g in e.gradient)
        e.factor = {"trajectory_mean": 1 / (count * length), "token_mean": 1 / tokens, "trajectory_sum": 1 / count}[
            spec.loss_aggregation
        ]
        mates = [o.reward for o in entries if o.group == e.group]
        mean = sum(mates) / len(mates)
        std = math.sqrt(sum((r - mean) ** 2 for r in mates) / len(mates))
        e.scale = std if spec.scale_rewards == "group" else 1.0
        e.equal = max(mates) == min(mates)
    for e in entries:
        mates = [o for o in entries if o.group == e.group]
        if spec.baseline == "none":
            baseline = 0.0
        elif spec.baseline == "group_mean":
            baseline = sum(o.reward for o in mates) / len(mates)
        elif spec.baseline == "leave_one_out":
            others = [o.reward for o in mates if o is not e]
            baseline = sum(others) / len(others) if others else e.reward
        else:
            sharing = mates if spec.opob_scope == "group" else [o for o in entries if not o.equal]
            if spec.opob_scope == "minibatch" and spec.scale_rewards == "none":
                sharing = entries
            weigh = {
                "paper": lambda o: o.raw**2 * o.norm,
                "applied": lambda o: (o.weight * o.factor / o.scale) ** 2 * o.norm if o.scale else 0.0,
                "reference": lambda o: o.raw**2 * o.weight**2 * o.norm,
            }[spec.opob_weighting]
            total = sum(weigh(o) for o in sharing)
            baseline = sum(weigh(o) * o.reward for o in sharing) / total if total else 0.0
        e.coefficient = 0.0
        centred_within_group = spec.baseline != "none" and spec.opob_scope == "group"
        if not (e.equal and (centred_within_group or spec.scale_rewards == "group")):
            e.coefficient = e.weight * e.factor * (e.reward - baseline) / e.scale
    gradient = [
        sum((e.coefficient * e.gradient[i] for e in entries), torch.zeros_like(p))
        for i, p in enumerate(p for p in model.parameters() if p.requires_grad)
    ]
    weights = [math.exp(sum(e.ratios)) for e in entries]
    return gradient, sum(weights) ** 2 / sum(w**2 for w in weights) / count


class _Entry:
    raw: float
    weight: float
    gradient: list[Tensor]
    norm: float
    factor: float
    scale: float
    equal: bool
    coefficient: float

    def __init__(self, group: int, trajectory: Trajectory, reward: float, ratios: list[float]) -> None:
        self.group = group
        self.trajectory = trajectory
        self.reward = reward
        self.ratios = ratios
