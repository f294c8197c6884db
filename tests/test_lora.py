"""LoRA: only adapters are trained, published and saved, and everything that is made of them agrees."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig

from run_cases import InterruptAfter, tiny_config
from vcpo.config import ModelSection, RunConfig, load_config
from vcpo.errors import UserError
from vcpo.models import lora
from vcpo.models.loading import load_model
from vcpo.models.lora import MergedParameters, has_adapter, load_adapter, save_adapter, save_merged, trained_parameters
from vcpo.models.sizes import ModelSizes
from vcpo.models.small import make_small_model
from vcpo.observe.metrics import FILE_NAME, read_metrics
from vcpo.pipeline.eval_subject import find_subject
from vcpo.pipeline.plan import plan_run
from vcpo.pipeline.replay import replay
from vcpo.pipeline.run import train
from vcpo.pipeline.standalone_eval import evaluate_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora") / "base"
    init = tiny_config(directory).model.init
    assert init is not None
    for part in make_small_model(init, 0):
        part.save_pretrained(directory)
    return directory


def adapted(base: Path, dtype: str = "float32", **options: Any) -> Any:
    """The model with adapters at random values: at first they add nothing."""
    section = {"path": str(base), "dtype": dtype, "device": "cpu", "lora": {"r": 3, **options}}
    model, _ = load_model(ModelSection.model_validate(section), seed=1)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def config_of(output_dir: Path, base: Path, *overrides: str, model: str = "lora: {r: 4}") -> RunConfig:
    return tiny_config(output_dir, f"model={{path: {base}, device: cpu, {model}}}", "method=vcpo", *overrides)


def logits(model: Any) -> Tensor:
    """Of some tokens, by plain transformers."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output: Tensor = model(input_ids=torch.arange(10)[None], use_cache=False).logits
    return output


def logits_in(directory: Path) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager"))


def rewards(directory: Path) -> list[float]:
    return [line["reward"] for line in read_metrics(directory / FILE_NAME) if line["kind"] == "train"]


def error_of(section: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        load_model(ModelSection.model_validate({"device": "cpu", **section}), seed=0)
    return str(caught.value)


def test_a_run_trains_the_adapters_and_nothing_else(base: Path, tmp_path: Path) -> None:
    directory = train(config_of(tmp_path / "run", base, "checkpoint.save_steps=3"))
    saved = load_file(directory / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name), "B starts at 0"
    assert sum(tensor.numel() for tensor in saved.values()) == sum(
        4 * (module.in_features + module.out_features)
        for name, module in AutoModelForCausalLM.from_pretrained(base).named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    )
    assert not (directory / "adapter" / "model.safetensors").exists()
    checkpoint = directory / "checkpoints" / "step-000003"
    assert not (checkpoint / "model" / "model.safetensors").exists()
    held = load_file(checkpoint / "state.safetensors")
    assert all("lora_" in name for name in held if name.startswith("learner.") and "/" in name)
    # what comes out: PEFT's own way to apply the adapter, and the model with it merged in
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), directory / "adapter"
    ).base_model.model
    torch.testing.assert_close(logits_in(directory / "model"), logits(theirs), rtol=0, atol=1e-5)
    assert (logits_in(directory / "model") - logits_in(base)).abs().max() > 1e-3


def test_samplers_are_given_the_adapters_and_decode_with_them(base: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, base, "runtime.name=local", "runtime.max_staleness=0", "training.learning_rate=0.1")
    directory = train(config)
    lines = [line for line in read_metrics(directory / FILE_NAME) if line["kind"] == "train"]
    assert all(line["served_version"] >= step for step, line in enumerate(lines))
    # sampled with the learner's own weights, after updates that change the policy
    assert all(line["ess"] > 0.999 for line in lines)
    assert len({line["reward"] for line in lines}) > 2


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(base: Path, tmp_path: Path) -> None:
    lag = ("runtime.max_staleness=2", "checkpoint.save_steps=2")
    whole = train(config_of(tmp_path / "whole", base, *lag))
    config = config_of(tmp_path / "halves", base, *lag)
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=InterruptAfter(4))
    halves = train(config, mode="resume")
    assert rewards(halves) == rewards(whole)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        expected = load_file(whole / file)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in load_file(halves / file).items())


def test_a_base_model_that_has_changed_is_not_gone_on_with(base: Path, tmp_path: Path) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    config = config_of(tmp_path / "run", own)
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=InterruptAfter(3))
    init = tiny_config(tmp_path).model.init
    assert init is not None
    make_small_model(init, 5)[0].save_pretrained(own)
    changed = "holds adapters of a base model whose weights have changed since"
    with pytest.raises(UserError, match=changed):
        train(config, mode="resume")
    with pytest.raises(UserError, match=changed):
        evaluate_model(find_subject(str(tmp_path / "run"), None), None)
    with pytest.raises(UserError, match=changed):
        replay(tmp_path / "run")
    shutil.rmtree(own)
    with pytest.raises(UserError, match=r"the adapter .* needs its base model: model.path .* does not exist"):
        train(config, mode="resume")


def test_checkpointing_changes_the_memory_and_not_the_update(base: Path, tmp_path: Path) -> None:
    plain = train(config_of(tmp_path / "plain", base))
    less = train(config_of(tmp_path / "less", base, model="lora: {r: 4}, gradient_checkpointing: true"))
    for name, tensor in load_file(plain / "adapter/adapter_model.safetensors").items():
        other = load_file(less / "adapter/adapter_model.safetensors")[name]
        torch.testing.assert_close(other, tensor, rtol=0, atol=1e-5)


def test_a_run_may_begin_with_an_adapter_and_its_checkpoints_can_be_used(base: Path, tmp_path: Path) -> None:
    first = train(config_of(tmp_path / "first", base, "checkpoint.save_steps=3"))
    second = train(config_of(tmp_path / "second", first / "adapter", "training.max_steps=1", model="dtype: float32"))
    before, after = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (first, second))
    change = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    assert before.keys() == after.keys()
    assert 0 < change < 0.05
    # evaluated and replayed as what they are
    subject = find_subject(str(first / "checkpoints" / "step-000003"), None, ["eval.num_problems=4"])
    assert subject.config.model.path is not None
    assert has_adapter(load_model(subject.config.model, 0)[0])
    assert evaluate_model(subject, None).metrics["problems"] == 4
    step = first / "checkpoints" / "step-000003" / "model"
    shutil.rmtree(first / "checkpoints" / "step-000006")  # what is left of it is the final adapter
    assert [replay(first, checkpoint=name).weights for name in ("3", "final")] == [str(step), str(first / "adapter")]


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}], ids=str)
def test_merged_weights_are_those_of_a_plain_model_with_the_same_outputs(
    base: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    model = adapted(base, **options)
    plain = AutoModelForCausalLM.from_pretrained(base)
    merged = MergedParameters(model)
    assert {name: p.shape for name, p in merged.items()} == {name: p.shape for name, p in plain.named_parameters()}
    expected = logits(model)
    assert (expected - logits(plain)).abs().max() > 0.01
    plain.load_state_dict(dict(merged), strict=False)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)
    save_merged(model, tmp_path)
    torch.testing.assert_close(logits_in(tmp_path), expected, rtol=0, atol=1e-5)


def test_merging_in_bfloat16_rounds_to_the_nearest(base: Path) -> None:
    model = adapted(base, "bfloat16")
    name = "model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    low, high = (getattr(layer, part)["default"].weight.double() for part in ("lora_A", "lora_B"))
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (high @ low)
    merged = MergedParameters(model)[f"{name}.weight"]
    assert merged.dtype == torch.bfloat16
    # half a unit in the last place, and the rounding of what the adapter adds
    assert ((merged.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-8 * (high @ low).abs() * 11).all()


def test_adapters_are_saved_as_peft_saves_them(base: Path, tmp_path: Path) -> None:
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["v_proj"]))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = load_model(ModelSection(path=str(base), device="cpu"), 0)
    load_adapter(ours, tmp_path / "theirs")
    torch.testing.assert_close(logits(ours), logits(theirs.base_model.model), rtol=0, atol=1e-6)
    (tmp_path / "ours").mkdir()
    save_adapter(ours, tmp_path / "ours")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_an_adapter_that_peft_has_saved_is_trained_on_from_wherever_its_base_is(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT marks what it saves as not to be trained, and names a base by the path that it was given."""
    shutil.copytree(base, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"])).save_pretrained("theirs")
    assert json.loads(Path("theirs/adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    run = train(config_of(tmp_path / "run", Path("theirs"), model="dtype: float32"))
    assert load_file(run / "adapter" / "adapter_model.safetensors")[
        "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    ].any()
    monkeypatch.chdir(tmp_path.parent)
    assert has_adapter(load_model(ModelSection(path=str(run / "adapter"), device="cpu"), 0)[0])


def test_a_sampler_does_not_put_the_adapters_on_another_model(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path that means something else where the run is resumed."""
    init = tiny_config(tmp_path).model.init
    assert init is not None
    for place, seed in (("here", 0), ("there", 5)):
        for part in make_small_model(init, seed):
            part.save_pretrained(tmp_path / place / "base")
    monkeypatch.chdir(tmp_path / "here")
    train(config_of(tmp_path / "run", Path("base"), "runtime.name=local"))
    monkeypatch.chdir(tmp_path / "there")
    longer = config_of(tmp_path / "run", Path("base"), "runtime.name=local", "training.max_steps=9")
    with pytest.raises(UserError, match="a sampler process finds at 'base' has other weights than the learner's"):
        train(longer, mode="resume")


def test_merging_keeps_buffers_that_are_saved(base: Path, tmp_path: Path) -> None:
    """The routers of some mixtures of experts have a bias that is no parameter."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    config = Glm4MoeConfig(vocab_size=len(tokenizer), **sizes, **experts, num_key_value_heads=2, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).copy_(torch.arange(4.0))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    save_merged(adapted(tmp_path / "base", target_modules=["q_proj"]), tmp_path / "merged")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").get_buffer(bias).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": "("}, "model.lora.target_modules = '(': "),
        ({"target_modules": ["q_proj", "nosuch"]}, "no layer is called 'nosuch'"),
        ({"target_modules": ["nothing"]}, r"model.lora.target_modules = ['nothing']: Target modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "includes the model's output layer"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "includes the model's embedding"),
    ],
    ids=str,
)
def test_layers_that_cannot_have_adapters_are_named(base: Path, options: dict[str, Any], message: str) -> None:
    assert message in error_of({"path": str(base), "lora": options})


def test_adapters_that_cannot_be_used_are_refused(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    directory = tmp_path / "adapter"
    directory.mkdir()
    save_adapter(model, directory)
    file = directory / "adapter_config.json"
    good = json.loads(file.read_text())
    assert "leave out model.lora, or merge" in error_of({"path": str(directory), "lora": {}})

    def with_config(**changes: Any) -> str:
        file.write_text(json.dumps({**good, **changes}))
        return error_of({"path": str(directory)})

    assert "does not name its base model" in with_config(base_model_name_or_path=None)
    assert "needs its base model: model.path '/nowhere' does not exist" in with_config(
        base_model_name_or_path="/nowhere"
    )
    for extra in ({"use_dora": True}, {"bias": "all"}, {"lora_bias": True}, {"modules_to_save": ["norm"]}):
        assert f"of a kind that is not supported (LoRA with {next(iter(extra))})" in with_config(**extra)
    assert "of a kind that is not supported (IA3)" in with_config(peft_type="IA3")
    assert "does not fit its base model" in with_config(r=2)
    assert "does not fit its base model" in with_config(target_modules=["q_proj"])
    assert "is one to another adapter" in with_config(base_model_name_or_path=str(directory))
    assert "(LoRA with layer_replication)" in with_config(layer_replication=[[0, 1]])
    file.write_text(json.dumps({**good, "r": 0}))
    with pytest.raises(UserError, match=r"cannot be read: adapter_config\.json"):
        ModelSizes.find(ModelSection(path=str(directory)))
    file.write_text("{")
    assert "cannot be read" in error_of({"path": str(directory)})
    file.write_text(json.dumps(good))
    (directory / "config.json").write_text("{}")
    assert "holds a model and an adapter" in error_of({"path": str(directory)})
    (directory / "config.json").unlink()
    (directory / "adapter_model.safetensors").write_bytes(b"damaged")
    assert "adapter_model.safetensors cannot be read" in error_of({"path": str(directory)})


def test_a_plan_counts_the_adapters(base: Path, tmp_path: Path) -> None:
    overrides = ["model.path=Qwen/Qwen2.5-7B", "model.lora={}"]
    plan = plan_run(load_config(Path("recipes/math/vcpo-k10.yaml"), overrides))
    # rank times input and output width of queries and output, keys and values, and three layers of the MLP
    trained = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert ("adapters", f"LoRA: {trained:,} parameters are trained") in plan.run
    bytes_of = {line.name: line.bytes for line in plan.memory[0].lines}
    assert bytes_of["adapters"] == 2 * trained
    assert bytes_of["AdamW moments"] == 8 * trained
    assert bytes_of["weights"] == 2 * 7615616512
    assert ("shared memory", 4 * trained, "2 a T: buffers from learner to samplers") in plan.host
    # of a saved adapter, too
    section = ModelSection.model_validate({"path": str(base), "lora": {"r": 3, "target_modules": ["q_proj", "v_proj"]}})
    model, _ = load_model(section, 0)
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter")
    own = ModelSizes.find(ModelSection(path=str(tmp_path / "adapter")))
    assert own.trained == sum(p.numel() for p in trained_parameters(model).values())


def test_a_missing_package_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None if name == "peft" else real(name))
    assert error_of({"path": str(base), "lora": {}}) == (
        "adapters (model.lora) need the package peft: pip install 'vcpo[lora]'"
    )


def test_a_model_made_from_sizes_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.lora needs model\.path"):
        tiny_config(tmp_path, "model.lora={}")
