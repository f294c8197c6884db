"""Which models leave their output layer to the learner, and that updates of the others are exact as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from gradnorm_cases import CPU, squared_norm
from learner_cases import SIZES, make_groups, make_model, randomised, slow_gradient, slow_update
from vcpo.config import TrainingSection
from vcpo.learner import head as head_module
from vcpo.learner.forward import PolicyForward
from vcpo.learner.learner import Learner
from vcpo.learner.packing import pack
from vcpo.methods.spec import METHODS
from vcpo.models.attention import ATTENTION


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def softcapped(cap: float, initial: bool = False) -> Any:
    config = Gemma2Config(
        **SIZES, final_logit_softcapping=cap, attn_logit_softcapping=None, sliding_window=64, query_pre_attn_scalar=4
    )
    if initial:
        torch.manual_seed(0)
        return Gemma2ForCausalLM._from_config(config, attn_implementation=ATTENTION)
    return randomised(Gemma2ForCausalLM, config)


def granite() -> Any:
    return randomised(GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=3.0))


def cohere() -> Any:
    return randomised(CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.25))


class WithoutChoice(nn.Module):
    """A model that computes all logits. ``has_head``: and that shows its output layer."""

    def __init__(self, has_head: bool) -> None:
        super().__init__()
        self.inner: Any = make_model("qwen3", tied=True)
        self.config = self.inner.config
        self.has_head = has_head

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head if self.has_head else None

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)

    def forward(self, input_ids: Tensor, use_cache: bool, position_ids: Any = None, attention_plan: Any = None) -> Any:
        return self.inner(
            input_ids=input_ids, position_ids=position_ids, attention_plan=attention_plan, use_cache=use_cache
        )


def test_models_that_change_their_logits_use_their_own_output_layer() -> None:
    assert PolicyForward(softcapped(2.0), CPU).head is None
    # where logits are small against the cap it shows least
    assert PolicyForward(softcapped(30.0, initial=True), CPU).head is None
    # a factor may as well be on the rows, if there is no bias
    for model in (granite(), cohere()):
        assert PolicyForward(model, CPU).head is model.get_output_embeddings()
    biased = granite()
    biased.lm_head.bias = nn.Parameter(torch.ones(11, dtype=torch.float64))
    assert PolicyForward(biased, CPU).head is None


def test_layouts_name_the_rows_that_layers_see() -> None:
    for model, is_choosing in ((make_model(), True), (WithoutChoice(True), True), (WithoutChoice(False), False)):
        groups = make_groups(make_model(), [[1, 0, 0]])
        batch = pack(groups[0].trajectories, CPU)
        layouts = PolicyForward(model, CPU).layouts(batch)
        assert layouts == [batch.lengths_B, batch.trained_B][: 1 + is_choosing]


UNUSUAL = {
    "capped": (lambda: softcapped(2.0), "vcpo"),
    "scaled": (granite, "vcpo"),
    # its norms have no rule
    "scaled, without norms": (cohere, "tis"),
    "all logits": (lambda: WithoutChoice(True), "vcpo"),
    "all logits, hidden output layer": (lambda: WithoutChoice(False), "vcpo"),
}


@pytest.mark.parametrize("family", UNUSUAL)
@pytest.mark.parametrize("chunk", [10_000, 33])
def test_unusual_output_layers_are_exact(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", chunk)
    make, method = UNUSUAL[family]
    model, spec = make(), METHODS[method]
    groups = make_groups(model, [[1, 0, 0], [0, 1]], temperature=0.7)
    gradient, ess = slow_update(model, groups, spec, 0.7)
    changed = copy.deepcopy(model)
    settings = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "adam_epsilon": 1e-4}
    result = Learner(changed, spec, TrainingSection.model_validate(settings), 0.7).step(groups)
    if method == "vcpo":
        norms = [squared_norm(slow_gradient(model, t, temperature=0.7)) for g in groups for t in g.trajectories]
        assert result.squared_norms_B == pytest.approx(norms, rel=1e-5)
    assert result.metrics["ess"] == pytest.approx(ess, rel=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(squared_norm(gradient) ** 0.5, rel=1e-5)

    slow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow.parameters(), lr=result.metrics["learning_rate"], weight_decay=0.1, eps=1e-4)
    for parameter, g in zip(slow.parameters(), gradient, strict=True):
        parameter.grad = -g
    optimizer.step()
    assert largest_difference(changed, model) > 1e-4
    assert largest_difference(changed, slow) < 1e-6
