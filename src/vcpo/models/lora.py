"""LoRA adapters (PEFT) in a transformers model, whose own weights then stay as they are.

The adapters are put into the model itself, so that sampler and learner use it as they use any other. Only they are
trained, published to samplers and saved in checkpoints. An engine that knows no adapters is given *merged* weights:
those of the base model with the adapters added in.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from vcpo.errors import UserError

if TYPE_CHECKING:
    from vcpo.config import LoraSection

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # in PEFT's files, before the names that the model itself has
# what adapters may be configured with: everything else changes what they compute, or what belongs to them
_PLAIN = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}
_NAME = "default"  # of the adapter, in PEFT's modules
_MARKS = (f".lora_A.{_NAME}.", f".lora_B.{_NAME}.")


def check_installed() -> None:
    """Raises UserError when PEFT is missing."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("adapters (model.lora) need the package peft: pip install 'vcpo[lora]'")


def add_adapter(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Freeze the model and put new adapters into it, which do not change its outputs yet.

    seed: initialises them. Raises UserError when no layer has a name in ``target_modules``, or one of them is the
    embedding or the output layer.
    """
    check_installed()
    from peft import LoraConfig

    config = LoraConfig(
        r=section.r,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type]  # it divides; adapters with fractions exist
        target_modules=section.target_modules,
        exclude_modules=_beside_the_text_model(model) or None,
        use_rslora=section.use_rslora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config, f"model.lora.target_modules = {section.target_modules!r}")
    config.base_model_name_or_path = _absolute(str(model.name_or_path))


def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Freeze the model and put saved adapters into it.

    Raises UserError for adapters of another kind than plain LoRA, or of another model.
    """
    from peft import LoraConfig, PeftConfig

    name = f"the adapter {str(directory)!r}"
    try:
        config: Any = PeftConfig.from_pretrained(str(directory))
    except Exception as error:
        raise UserError(f"{name} cannot be read: {' '.join(str(error).split())[:300]}") from error
    kind = "" if config.peft_type == "LORA" else str(config.peft_type.value)
    plain = LoraConfig()
    for key, value in vars(config).items():
        if not kind and key not in _PLAIN and value not in (getattr(plain, key, None), None, False, "none", [], {}):
            kind = f"LoRA with {key}"
    if kind:
        raise UserError(f"{name} is of a kind that is not supported ({kind}): plain LoRA can be trained")
    config.inference_mode = False  # which PEFT saves as true, and which would freeze the adapters
    config.base_model_name_or_path = _absolute(str(config.base_model_name_or_path))
    # its dropout, if any, does nothing in a model in eval mode
    _inject(model, config, name)
    try:
        saved = load_file(directory / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{name}: {_WEIGHTS} cannot be read: {error}") from error
    own = {_PREFIX + _saved_name(parameter): p for parameter, p in trained_parameters(model).items()}
    if saved.keys() != own.keys() or any(saved[key].shape != p.shape for key, p in own.items()):
        other = sorted(saved.keys() ^ own.keys()) or ["of other shapes"]
        raise UserError(f"{name} does not fit its base model: {other[0]}")
    with torch.no_grad():
        for key, p in own.items():
            p.copy_(saved[key])


def save_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Write the adapters as PEFT does, for ``PeftModel.from_pretrained`` and ``load_adapter``."""
    config: Any = model.peft_config[_NAME]
    config.save_pretrained(str(directory))
    tensors = {
        _PREFIX + _saved_name(name): p.detach().cpu().contiguous() for name, p in trained_parameters(model).items()
    }
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})


def base_of(path: str) -> str | None:
    """The base model of a directory that holds an adapter, as the adapter names it; ``None`` for any other path.

    Raises UserError when the adapter does not say, names another adapter, or lies beside a model.
    """
    directory = Path(path).expanduser()
    file = directory / ADAPTER_CONFIG
    if not file.is_file():
        return None
    if (directory / "config.json").is_file():
        raise UserError(f"model.path {path!r} holds a model and an adapter: give each a directory of its own")
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"the adapter {path!r} cannot be read: {ADAPTER_CONFIG}: {error}") from None
    if not isinstance(base, str) or not base:
        raise UserError(f"the adapter {path!r} does not name its base model (base_model_name_or_path)")
    if (Path(base).expanduser() / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"the adapter {path!r} is one to another adapter, {base!r}: merge that into its base model first"
        )
    return base


def options_of(directory: str) -> LoraSection:
    """The options of a saved adapter."""
    from vcpo.config import LoraSection

    saved: dict[str, Any] = json.loads((Path(directory).expanduser() / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    given = {key: saved[key] for key in LoraSection.model_fields if saved.get(key) is not None}
    try:
        return LoraSection.model_validate(given)
    except ValueError as error:
        detail = " ".join(str(error).split())[:300]
        raise UserError(f"the adapter {directory!r} cannot be read: {ADAPTER_CONFIG}: {detail}") from error


def has_adapter(model: nn.Module) -> bool:
    """Whether there are adapters in the model."""
    return any(_is_adapter(name) for name, _ in model.named_parameters())


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What training changes, by name: the adapters of a model that has some, else all parameters.

    Whether they require gradients at the moment does not matter.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    return {name: p for name, p in parameters.items() if _is_adapter(name)} or parameters


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What training leaves as it is, by the names that the model without adapters has."""
    return {_plain(name): p for name, p in model.named_parameters() if not _is_adapter(name)}


class MergedParameters(Mapping[str, Tensor]):
    """The parameters of the model that has no adapters and the same outputs; each is made when it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._base = base_parameters(model)
        self._layers = {
            f"{_plain(name)}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")
        }

    def __getitem__(self, name: str) -> Tensor:
        """The weight, with what its adapter adds; rounded once, to the dtype of the base."""
        base, layer = self._base[name].detach(), self._layers.get(name)
        if layer is None:
            return base
        delta: Tensor = layer.get_delta_weight(_NAME)
        return (base.float() + delta.detach().float()).to(base.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def save_merged(model: PreTrainedModel, directory: Path) -> None:
    """Write a model without adapters and with the same outputs, in transformers format."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        plain: PreTrainedModel = make(model.config)
    buffers = {_plain(name): tensor for name, tensor in model.state_dict().items() if not _is_adapter(name)}
    plain.load_state_dict({**buffers, **MergedParameters(model)}, strict=False, assign=True)
    plain.tie_weights()
    lacking = [name for name, tensor in plain.state_dict().items() if tensor.is_meta]
    if lacking:
        raise RuntimeError(f"the merged model lacks {lacking[:3]}")
    plain.generation_config = model.generation_config
    plain.save_pretrained(directory)


def _beside_the_text_model(model: PreTrainedModel) -> list[str]:
    """The linear layers of towers for images or sound, which text does not reach."""
    if model.config.get_text_config() is model.config:
        return []
    text = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in text]


def _inject(model: PreTrainedModel, config: Any, what: str) -> None:
    """Put adapters in; the output layer is computed in chunks beside the model, and an embedding's has no norms."""
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(config, model, _NAME)
    except (ValueError, re.error) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:300]}") from error
    for end, of in (("embedding", model.get_input_embeddings()), ("output layer", model.get_output_embeddings())):
        if of is not None and any("lora_" in name for name, _ in of.named_parameters()):
            raise UserError(f"{what} includes the model's {end}, which cannot have an adapter here")
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    listed = config.target_modules if isinstance(config.target_modules, (list, set)) else ()
    for target in sorted(listed):
        if not any(name == target or name.endswith(f".{target}") for name in adapted):
            raise UserError(f"{what}: no layer is called {target!r}")


def _absolute(base: str) -> str:
    """A directory's path from anywhere; a hub id as it is."""
    directory = Path(base).expanduser()
    return str(directory.resolve()) if directory.is_dir() else base


def _saved_name(name: str) -> str:
    """A parameter's name in PEFT's files, which leave out the adapter's."""
    return name.replace(f".{_NAME}.", ".")


def _is_adapter(name: str) -> bool:
    return any(mark in name for mark in _MARKS)


def _plain(name: str) -> str:
    return name.replace(".base_layer", "")
