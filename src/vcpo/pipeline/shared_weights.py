"""Weights in shared memory: one writer (the learner), any number of readers (the samplers), no reader ever blocks.

Two buffers take turns: version v lies in buffer v mod 2. A reader takes the newest buffer and checks afterwards that
the writer has not moved on, in which case that buffer may be in the middle of being overwritten and it reads again.
There is no lock that a process could die with: the version is one aligned 64-bit word, written after its buffer.

With every version comes a checksum of the learner's own parameters. A sampler compares it with that of the tensors that
its engine decodes with, so weights that were not swapped, or not all of them, are found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.errors import UserError
from vcpo.models.lora import MergedParameters, base_parameters, has_adapter, trained_parameters
from vcpo.pipeline.shared_memory import OwnedMemory, SharedMemory

_ALIGNMENT = 64  # bytes
_HEADER = 64  # bytes: the version, then the checksums of both buffers


@dataclass(frozen=True)
class _Place:
    """Where in a buffer a parameter lies."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightsLayout:
    """What is where in the memory of published weights; it can be sent to another process."""

    places: dict[str, _Place]
    buffer_size: int

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> WeightsLayout:
        """One buffer holds all of them."""
        places = {}
        size = 0
        for name, p in parameters.items():
            places[name] = _Place(size, size + p.numel() * p.element_size(), p.dtype, tuple(p.shape))
            size = -(-places[name].stop // _ALIGNMENT) * _ALIGNMENT
        return cls(places, size)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return _HEADER + 2 * self.buffer_size


class SharedWeights:
    """Published parameters of a model, as every process sees them."""

    def __init__(self, memory: SharedMemory, layout: WeightsLayout) -> None:
        """Published in memory that another process has created."""
        self.layout = layout
        self._memory = memory
        self._buffers: list[Tensor] = [
            torch.frombuffer(memory.buffer, dtype=torch.uint8, offset=start, count=layout.buffer_size)
            for start in (_HEADER, _HEADER + layout.buffer_size)
        ]
        self._version = c_int64.from_buffer(memory.buffer)
        self._checksums: Any = (c_int64 * 2).from_buffer(memory.buffer, 8)

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return self._version.value

    def read(self, load: Callable[[Mapping[str, Tensor], int], object]) -> tuple[int, int]:
        """Call ``load`` with the parameters by name and their version; that version, and its checksum.

        The tensors are the shared ones, so ``load`` copies. It is called again, with the next version, when the writer
        has been too quick: what it made of the first ones is then of no use.
        """
        while True:
            version = self.version
            load({name: self._published(name, version) for name in self.layout.places}, version)
            checksum = self._checksums[version % 2]
            if self.version == version:
                return version, checksum

    def _published(self, name: str, version: int) -> Tensor:
        """A parameter in the buffer of a version (a view)."""
        place = self.layout.places[name]
        block: Tensor = self._buffers[version % 2]
        return block[place.start : place.stop].view(place.dtype).view(place.shape)


class PublishedWeights(SharedWeights):
    """The writer's side. descriptor: to be passed to the sampler processes, which need ``layout`` as well."""

    def __init__(self, parameters: Mapping[str, Tensor], base: int | None = None) -> None:
        """parameters: with the names, shapes and types of what will be published. base: ``base_checksum``, if needed.

        Raises UserError when the machine has too little shared memory for two copies of them.
        """
        layout = WeightsLayout.of(parameters)
        try:
            memory = OwnedMemory(layout.size)
        except OSError as error:
            raise UserError(
                f"the local runtime needs {layout.size / 1e9:.2f} GB of shared memory for the weights ({error}):"
                " enlarge it (in a container: docker run --shm-size=8g), or use runtime=lockstep"
            ) from error
        super().__init__(memory, layout)
        self.descriptor = memory.descriptor
        self.base_checksum = base
        self._version.value = -1

    def publish(self, parameters: Mapping[str, Tensor], version: int) -> None:
        """Copy parameters into the older buffer, then announce them. Versions must increase by one."""
        previous = self.version
        if previous >= 0 and version != previous + 1:
            raise ValueError(f"version {version} published after {previous}")
        sums = []
        with torch.no_grad():
            for name in sorted(self.layout.places):
                parameter = parameters[name].detach()  # asked for once: it may be made then
                self._published(name, version).copy_(parameter)
                sums.append(_sum_of_bits(parameter))
        self._checksums[version % 2] = _combined(sums)
        self._version.value = version


def weights_checksum(parameters: Mapping[str, Tensor]) -> int:
    """A 64-bit number that changes when any bit of any parameter does, or when two parameters are exchanged.

    The sum of each tensor's bits as integers, times an odd number of its own; in the order of the names, because two
    model objects may list theirs differently. Where values stand inside a tensor does not count: it costs one pass at
    the speed of memory, and copies that go wrong are old, torn or missing, not shuffled.
    """
    return _combined([_sum_of_bits(parameters[name].detach()) for name in sorted(parameters)])


def published_of(model: nn.Module, merged: bool) -> tuple[Mapping[str, Tensor], int | None]:
    """What samplers are given of a model, and the checksum of what they must have of it already, if anything.

    merged: they know no adapters.
    """
    if merged and has_adapter(model):
        return MergedParameters(model), None
    return trained_parameters(model), base_checksum(model)


def base_checksum(model: nn.Module) -> int | None:
    """Of the weights under adapters, which are neither published nor in checkpoints; ``None`` without adapters."""
    return weights_checksum(base_parameters(model)) if has_adapter(model) else None


def _combined(sums: list[Tensor]) -> int:
    return int((torch.stack(sums).cpu() * torch.arange(1, 2 * len(sums), 2)).sum())


def _sum_of_bits(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().reshape(-1)
    whole = (bits.numel() * bits.element_size()) % 8 == 0
    if whole and bits.storage_offset() * bits.element_size() % 8:  # a slice that starts within a word
        bits = bits.clone()
    return bits.view(torch.int64 if whole else torch.uint8).sum(dtype=torch.int64)
