"""The tensors that vLLM decodes with, by the names that the learner gives them.

vLLM joins what is multiplied with the same input: the projections to queries, keys and values, and the two of a gated
MLP, are each one matrix, whose rows are those of the learner's one after the other. So each of the learner's parameters
is a slice of one of vLLM's, and its checksum can be taken of what is really decoded with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.errors import UserError


def keep_weights_readable() -> None:
    """Make vLLM multiply with its parameters themselves, on the CPU too; to be called before the model is made.

    For the CPU vLLM packs every weight into a form of its own and drops the parameter. What is decoded with can then
    not be read back, so no checksum could prove it; and the output layer of a model with tied embeddings keeps the old
    packed weights when new ones are loaded, without a word (0.32.0: log-probabilities off by a nat). Unpacked, decoding
    on the CPU takes more time (docs/vllm.md); elsewhere nothing changes.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def learner_views(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of the parameters of a vLLM model, one for each name and shape of the learner's.

    Raises UserError for a model that vLLM lays out in another way than described above, or that has parameters in vLLM
    that the learner's lacks.
    """
    own = dict(model.named_parameters())
    joined: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    place_of = {part: (whole, parts[:i]) for whole, parts in joined.items() for i, part in enumerate(parts)}
    views: dict[str, Tensor] = {}
    unseen = set(own)
    for name, shape in shapes.items():
        own_name, start = name, 0
        *path, module, kind = name.split(".")
        if name not in own and module in place_of:
            whole, before = place_of[module]
            own_name = ".".join([*path, whole, kind])
            start = sum(shapes[".".join([*path, part, kind])][0] for part in before)
        view = own.get(own_name)
        # there may be more rows: vLLM pads its vocabulary
        if view is None or view.shape[1:] != shape[1:] or view.shape[0] < start + shape[0]:
            raise UserError(
                f"sampling.engine=vllm cannot be used with this model: vLLM's {type(model).__name__} has no place for"
                f" the parameter {name} of shape {tuple(shape)}, so that it could not be proven which weights are"
                " decoded with; use sampling.engine=torch"
            )
        views[name] = view.detach()[start : start + shape[0]]
        unseen.discard(own_name)
    if unseen:
        raise UserError(
            f"sampling.engine=vllm cannot be used with this model: vLLM's {type(model).__name__} has the parameter"
            f" {min(unseen)}, which the learner's model has not; use sampling.engine=torch"
        )
    return views
