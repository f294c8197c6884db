"""What language models are trained with besides: adapters, frozen parts, coarse dtypes, activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from gradnorm_cases import (
    CPU,
    FEW_WAYS,
    WAYS,
    Way,
    assert_exact,
    in_float64,
    record_policy,
    record_run,
    some_trajectories,
    squared_norm,
    trained_logprobs,
)
from learner_cases import FAMILIES, make_model, slow_gradient
from vcpo.errors import UserError
from vcpo.gradnorm.recorder import GradientRecorder
from vcpo.learner.packing import pack

pytestmark = pytest.mark.usefixtures("exact_reference")


def with_adapters(tied: bool, **options: Any) -> Any:
    """A Llama with LoRA adapters at random values: B is 0 at first, and so would be half of the gradients."""
    torch.manual_seed(0)
    model = get_peft_model(make_model("llama", tied), LoraConfig(r=3, lora_alpha=8, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.double()
                assert "lora" in name or "modules_to_save" in name
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "output layer": {"target_modules": ["down_proj", "lm_head"]},
    "with biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "with a trained norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.filterwarnings("ignore:.*merging LoRA weights")
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_adapters_have_norms_over_their_own_parameters(name: str, is_wrapped: bool) -> None:
    model = with_adapters(tied=False, **ADAPTERS[name])
    assert 0 < sum(p.requires_grad for p in model.parameters()) < 40
    trained = model if is_wrapped else model.get_base_model()
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    for way in WAYS:
        assert_exact(trained, record_policy(trained, trajectories, way=way), singles, 1e-12)


def test_adapter_of_an_embedding_is_named_as_not_covered() -> None:
    model = with_adapters(tied=False, target_modules=["embed_tokens"])
    with pytest.raises(UserError, match=r"lora_embedding_A\.default' is in a layer of type ParameterDict"):
        GradientRecorder(model)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_frozen_parameters_are_no_part_of_the_norm(way: Way) -> None:
    model = make_model("gpt2", tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "lm_head" in name)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    result = record_policy(model, trajectories, way=way)
    assert_exact(model, result, singles, 1e-12)
    assert all("mlp" in name or "lm_head" in name for name in result[1])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_padding_row_of_a_tied_embedding_gets_no_gradient_as_in_torch(way: Way) -> None:
    model = make_model("gpt2", tied=True)
    model.get_input_embeddings().padding_idx = 3
    trajectories = some_trajectories(model)
    assert any(3 in t.prompt_ids for t in trajectories)
    singles = [slow_gradient(model, t) for t in trajectories]
    assert_exact(model, record_policy(model, trajectories, way=way), singles, 1e-12)


def checkpointed(model: Any) -> Any:
    """Layers that recompute in the backward pass; they do so only in training mode."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_is_exact(family: str) -> None:
    model = make_model(family)
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    model = checkpointed(model)
    runs = []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    next(m for m in layer.modules() if list(m.parameters(recurse=False))).register_forward_pre_hook(
        lambda *_: runs.append(1)
    )
    for way in FEW_WAYS:
        runs.clear()
        assert_exact(model, record_policy(model, trajectories, way=way), singles, 1e-12)
        assert len(runs) == 2


def test_checkpointed_adapters_are_exact() -> None:
    """Nothing before the first adapter requires a gradient."""
    model = with_adapters(tied=True, target_modules=["q_proj", "up_proj"])
    trajectories = some_trajectories(model)
    singles = [slow_gradient(model, t) for t in trajectories]
    checkpointed(model.get_base_model())
    for way in WAYS:
        assert_exact(model, record_policy(model, trajectories, way=way), singles, 1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rows_are_summed_in_float32(family: str) -> None:
    model = make_model(family, dtype=torch.bfloat16)
    trajectories = some_trajectories(model)
    exact = [squared_norm(slow_gradient(in_float64(model), t)) for t in trajectories]
    for way in FEW_WAYS:
        recording, combined, _ = record_policy(model, trajectories, way=way)
        assert recording.squared_norms().tolist() == pytest.approx(exact, rel=0.1)
        assert all(g.dtype == torch.float32 for g in combined.values())


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(backward_inside: bool) -> None:
    model = make_model("qwen3", dtype=torch.float32)
    trajectories = some_trajectories(model)
    batch = pack(trajectories, CPU)
    exact = [squared_norm(slow_gradient(in_float64(model), t)) for t in trajectories]
    for way in WAYS:

        def run() -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = trained_logprobs(model, batch)
            assert logprobs.dtype == torch.float32
            return logprobs, torch.ones_like(logprobs)

        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            recording, combined, _ = record_run(model, [batch.lengths_B, batch.trained_B], run, way)
        assert recording.squared_norms().tolist() == pytest.approx(exact, rel=0.1)
        assert all(g.dtype == torch.float32 for g in combined.values())


def test_a_long_trajectory_is_summed_in_float32_inside_autocast() -> None:
    """4003 ones have a sum with more digits than bfloat16."""
    layer = torch.nn.Linear(4, 4)
    x, g = torch.ones(2, 4003, 4)
    for way in WAYS:
        with torch.autocast("cpu", torch.bfloat16):
            recording, combined, coefficients = record_run(layer, [[4003]], lambda: (layer(x), g), way)
        assert recording.squared_norms().tolist() == pytest.approx([20 * 4003.0**2], rel=1e-6)
        assert combined["weight"].flatten().tolist() == pytest.approx([coefficients[0] * 4003] * 16, rel=1e-6)


def test_nothing_is_left_of_recomputed_layers() -> None:
    model = checkpointed(make_model("smollm"))
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    record_policy(model, some_trajectories(model), way=Way("gram", True))
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == hooks
    assert not any(set(m._parameters) & set(m.__dict__) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
