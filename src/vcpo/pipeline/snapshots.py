"""The last k+1 versions of the weights, from which the lockstep runtime samples at any lag."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vcpo.errors import UserError
from vcpo.models.lora import trained_parameters


class SnapshotRing:
    """Copies of a model's trained parameters by policy version; the oldest one is dropped when ``size`` are held."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_version: dict[int, dict[str, Tensor]] = {}

    def add(self, model: nn.Module, version: int) -> None:
        """Copy the model's trained parameters as ``version``."""
        self._by_version[version] = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
        for old in sorted(self._by_version)[: -self._size]:
            del self._by_version[old]

    def get(self, version: int) -> Mapping[str, Tensor]:
        """The parameters of ``version``, by name."""
        return self._by_version[version]

    def clear(self) -> None:
        """Forget every version: none of them is to be sampled from again."""
        self._by_version = {}

    @property
    def oldest(self) -> int:
        """The lowest version that is held."""
        return min(self._by_version)

    def state(self) -> dict[str, Tensor]:
        """Every held tensor under the key ``version/name``."""
        return {f"{v}/{name}": t for v, tensors in self._by_version.items() for name, t in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor], needed: range) -> None:
        """Restore what ``state`` returned. Raises UserError if a version in ``needed`` is not there."""
        self._by_version = {}
        for key, tensor in state.items():
            version, _, name = key.partition("/")
            self._by_version.setdefault(int(version), {})[name] = tensor
        missing = [v for v in needed if v not in self._by_version]
        if missing:
            raise UserError(
                f"the checkpoint lacks the weights of versions {missing[0]}..{missing[-1]} that a lag of"
                f" {self._size - 1} needs: resume with the runtime and max_staleness of the interrupted run"
            )


def assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names, which are all that training changes."""
    with torch.no_grad():
        for name, parameter in trained_parameters(model).items():
            parameter.copy_(tensors[name])
