"""Weights in shared memory: one writer (the learner), any number of readers (the samplers), no reader ever blocks.

Two buffers take turns: version v lies in buffer v mod 2. A reader copies the newest buffer and checks afterwards that
the writer has not moved on, in which case that buffer may be in the middle of being overwritten and it reads again.
There is no lock that a process could die with: the version is one aligned 64-bit word, written after its buffer.

With every version comes a checksum of the learner's own parameters. A sampler compares it with that of the tensors that
its engine decodes with, so weights that were not swapped, or not all of them, are found at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.context import SpawnContext

import torch
from torch import Tensor, nn

from vcpo.errors import UserError

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class _Place:
    """Where in a buffer a parameter lies."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size


class SharedWeights:
    """Published parameters of a model. Passed to sampler processes as an argument of the process.

    A buffer is one block for all parameters, because every block of shared memory costs each process a file descriptor.
    """

    def __init__(self, model: nn.Module, context: SpawnContext) -> None:
        """Raises UserError when the machine has too little shared memory for two copies of the parameters."""
        self._places: dict[str, _Place] = {}
        size = 0
        for name, p in model.named_parameters():
            self._places[name] = _Place(size, size + p.numel() * p.element_size(), p.dtype, p.shape)
            size = -(-self._places[name].stop // _ALIGNMENT) * _ALIGNMENT
        try:
            self._buffers: list[Tensor] = [torch.empty(size, dtype=torch.uint8).share_memory_() for _ in range(2)]
        except RuntimeError as error:
            raise UserError(
                f"the local runtime needs {2 * size / 1e9:.2f} GB of shared memory for the weights ({error}): enlarge"
                " it (in a container: docker run --shm-size=8g), or use runtime=lockstep"
            ) from error
        self._version: c_int64 = context.RawValue(c_int64, -1)
        self._checksums = context.RawArray(c_int64, 2)

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return self._version.value

    def publish(self, model: nn.Module, version: int) -> None:
        """Copy the model's parameters into the older buffer, then announce them. Versions must increase by one."""
        previous = self.version
        if previous >= 0 and version != previous + 1:
            raise ValueError(f"version {version} published after {previous}")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self._published(name, version).copy_(parameter)
        self._checksums[version % 2] = weights_checksum(dict(model.named_parameters()))
        self._version.value = version

    def read(self, into: Mapping[str, Tensor]) -> tuple[int, int]:
        """Copy the newest complete version into the tensors of the same names; which one it was, and its checksum."""
        while True:
            version = self.version
            with torch.no_grad():
                for name, tensor in into.items():
                    tensor.copy_(self._published(name, version))
            checksum = self._checksums[version % 2]
            if self.version == version:
                return version, checksum

    def _published(self, name: str, version: int) -> Tensor:
        """A parameter in the buffer of a version (a view)."""
        place = self._places[name]
        block: Tensor = self._buffers[version % 2]
        return block[place.start : place.stop].view(place.dtype).view(place.shape)


def weights_checksum(parameters: Mapping[str, Tensor]) -> int:
    """A 64-bit number that changes when any bit of any parameter does, or when two parameters are exchanged.

    The sum of each tensor's bits as integers, times an odd number of its own; in the order of the names, because two
    model objects may list theirs differently. Where values stand inside a tensor does not count: it costs one pass at
    the speed of memory, and copies that go wrong are old, torn or missing, not shuffled.
    """
    sums = [_sum_of_bits(parameters[name].detach()) for name in sorted(parameters)]
    factors = torch.arange(1, 2 * len(sums), 2)
    return int((torch.stack(sums).cpu() * factors).sum())


def _sum_of_bits(tensor: Tensor) -> Tensor:
    words = torch.int64 if tensor.numel() * tensor.element_size() % 8 == 0 else torch.uint8
    return tensor.contiguous().reshape(-1).view(words).sum(dtype=torch.int64)
