"""The estimate of a run's memory against what is really allocated, and against sizes known by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from run_cases import tiny_config
from vcpo.config import RunConfig, load_config
from vcpo.learner.forward import PolicyForward
from vcpo.learner.optimizer import MasterAdamW
from vcpo.learner.packing import pack
from vcpo.learner.parallel import DataParallel
from vcpo.models.loading import load_model
from vcpo.models.sizes import ModelSizes
from vcpo.pipeline.memory import activation_bytes, cache_bytes, device_memory, number_bytes
from vcpo.records import GenerationRequest, SamplingParams, StopReason, Trajectory
from vcpo.report.plan import MemoryLine, Plan, RoleMemory
from vcpo.sampler.protocol import generate
from vcpo.sampler.torch_engine import TorchEngine


def line(role: RoleMemory, name: str) -> MemoryLine:
    return next(line for line in role.lines if line.name == name)


def qwen2_parameters(vocabulary: int, hidden: int, inner: int, layers: int, keys: int, tied: bool) -> int:
    """Embedding, output layer if it is another matrix, and per layer q, k, v with biases, o, the MLP and two norms."""
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * keys + keys)
    return (1 if tied else 2) * vocabulary * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden


def test_built_in_sizes_are_the_published_ones() -> None:
    small = ModelSizes.find(load_config(Path("recipes/gsm8k/vcpo-k12.yaml")).model)
    assert small.parameters == qwen2_parameters(151936, 1536, 8960, 28, 256, tied=True) == 1_543_714_304
    large = ModelSizes.find(load_config(Path("recipes/math/vcpo-k10.yaml")).model)
    assert large.parameters == qwen2_parameters(152064, 3584, 18944, 28, 512, tied=False) == 7_615_616_512
    assert (large.query_width, large.key_width, large.positions) == (3584, 512, 131072)


def test_sizes_of_a_directory_are_those_of_its_model(finished_run: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, f"model={{path: {finished_run / 'model'}}}")
    model, _ = load_model(config.model, seed=0)
    assert ModelSizes.find(config.model).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradient_moments_and_masters_take_what_the_optimizer_allocates(tmp_path: Path, dtype: str) -> None:
    config = tiny_config(tmp_path, f"model.dtype={dtype}", "method=tis")
    model, _ = load_model(config.model, seed=0)
    optimizer = MasterAdamW(model, config.training, DataParallel())
    optimizer.begin()
    optimizer.finish()
    optimizer.align(None)
    gradient = sum(m.grad.nbytes for m in optimizer._masters if m.grad is not None)
    optimizer.step(1e-3)
    state = optimizer.tensors()
    real = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradient": gradient,
        "AdamW moments": sum(t.nbytes for name, t in state.items() if name.endswith(("exp_avg", "exp_avg_sq"))),
        "previous gradient": sum(t.nbytes for name, t in state.items() if name.endswith(".previous_gradient")),
        "float32 masters": sum(t.nbytes for name, t in state.items() if name.endswith(".master")),
    }
    (role,) = device_memory(config, ModelSizes.find(config.model))
    planned = {line.name: line.bytes for line in role.lines if line.is_exact}
    assert {name: planned.get(name, 0) for name in real} == real


def test_the_cache_takes_what_the_engine_allocates(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "sampling.max_completion_length=70")
    model, _ = load_model(config.model, seed=0)
    engine = TorchEngine(model, SamplingParams(max_tokens=70), slots=3, max_length=75)
    prompt = np.arange(2, 7)
    generate(engine, [GenerationRequest(0, index, prompt, seed=index) for index in range(2)])
    tensors = [*engine._cache._keys.values(), *engine._cache._values.values()]
    # 74 positions are used, in blocks of 64
    assert tensors[0].shape[:2] == (3, 128)
    assert cache_bytes(config, ModelSizes.find(config.model), slots=3) == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_close_to_what_autograd_keeps(tmp_path: Path, dtype: str) -> None:
    heads = "num_attention_heads: 4, num_key_value_heads: 2"
    sizes = f"{{hidden_size: 64, intermediate_size: 192, num_hidden_layers: 4, {heads}}}"
    config = tiny_config(tmp_path, f"model={{init: {sizes}, dtype: {dtype}}}")
    model, _ = load_model(config.model, seed=0)
    response = np.full(60, 3)
    trajectory = Trajectory(
        group_id=0,
        index=0,
        prompt_ids=np.arange(2, 6),
        response_ids_T=response,
        mask_T=np.ones(60, dtype=bool),
        logprobs_T=np.zeros(60, dtype=np.float32),
        versions_T=np.zeros(60, dtype=np.int64),
        stop_reason=StopReason.LENGTH,
        start_version=0,
    )
    batch = pack([trajectory, trajectory], torch.device("cpu"))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    forward = PolicyForward(model, torch.device("cpu"))
    held = []  # what is kept must stay alive, or its addresses would be used again
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or remember(t), lambda t: t):
        forward.rows(batch)
    expected = 128 * 4 * activation_bytes(ModelSizes.find(config.model), number_bytes(config.model))
    assert sum(kept.values()) == pytest.approx(expected, rel=0.15)


def test_norms_need_another_gradient_for_each_group_in_a_pass(tmp_path: Path) -> None:
    sizes = ModelSizes.find(tiny_config(tmp_path).model)
    (vcpo,) = device_memory(tiny_config(tmp_path, "method=vcpo", "training.gradient_norm_mode=single"), sizes)
    (tis,) = device_memory(tiny_config(tmp_path, "method=tis"), sizes)
    assert line(vcpo, "gradients for norms").bytes == 2 * 4 * sizes.parameters  # two groups, of a model so small
    assert "gradients for norms" not in {line.name for line in tis.lines}


def test_the_peak_of_a_role_is_its_largest_phase() -> None:
    lines = (
        MemoryLine("weights", 10, ("pass", "update"), ""),
        MemoryLine("activations", 5, ("pass",), ""),
        MemoryLine("temporaries", 7, ("update",), ""),
    )
    role = RoleMemory("learner", 1, lines)
    assert (role.largest_phase, role.peak) == ("update", 17)
    assert Plan((), (), (role, RoleMemory("sampler", 3, lines)), None, "", (), ()).device_bytes == 4 * 17


def test_the_previous_gradient_is_kept_only_where_something_looks_at_it(tmp_path: Path) -> None:
    sizes = ModelSizes.find(tiny_config(tmp_path).model)
    for overrides, is_kept in (
        (["training.gradient_cosine=true"], True),
        (["training.gradient_cosine=false"], False),
        (["training.gradient_cosine=false", "method=gac"], True),
    ):
        (role,) = device_memory(tiny_config(tmp_path, *overrides), sizes)
        assert ("previous gradient" in {line.name for line in role.lines}) == is_kept


def test_samplers_and_lockstep_snapshots_are_counted(tmp_path: Path) -> None:
    sizes = ModelSizes.find(tiny_config(tmp_path).model)
    learner, sampler = device_memory(tiny_config(tmp_path, "runtime={name: local, samplers: 3}"), sizes)
    assert (learner.processes, sampler.processes) == (1, 3)
    assert line(sampler, "weights").bytes == 4 * sizes.parameters
    (process,) = device_memory(tiny_config(tmp_path, "runtime={name: lockstep, max_staleness: 5}"), sizes)
    assert line(process, "earlier weights").bytes == 6 * 4 * sizes.parameters


def test_the_paper_size_does_not_fit_where_it_cannot() -> None:
    """AdamW alone holds 7.6e9 x (2 + 4 + 8 + 4) bytes, 137 GB, and the sums for norms as much as the gradient."""
    config: RunConfig = load_config(Path("recipes/math/vcpo-k10.yaml"))
    learner, _ = device_memory(config, ModelSizes.find(config.model))
    assert learner.of_phase("pass") > 7_615_616_512 * (2 + 4 + 8 + 4 + 4)


def test_an_evaluation_beside_the_training_has_memory_of_its_own(tmp_path: Path) -> None:
    words = ("runtime.name=local", "eval.eval_steps=2")
    config = tiny_config(tmp_path, *words)
    sizes = ModelSizes.find(config.model)
    learner, sampler = device_memory(config, sizes)
    assert line(learner, "key/value cache of evaluation")
    alone, _, evaluation = device_memory(tiny_config(tmp_path, *words, "eval.background=true"), sizes)
    assert not [each for each in alone.lines if "of evaluation" in each.name]
    assert (evaluation.role, evaluation.processes) == ("evaluation", 1)
    assert line(evaluation, "weights").bytes == line(sampler, "weights").bytes
    assert line(evaluation, "key/value cache of evaluation").bytes == line(sampler, "key/value cache").bytes
