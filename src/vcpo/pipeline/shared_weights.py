"""Weights in shared memory: one writer (the learner), any number of readers (the samplers), no reader ever blocks.

Two buffers take turns: version v lies in buffer v mod 2. A reader copies the newest buffer and checks afterwards that
the writer has not moved on, in which case that buffer may be in the middle of being overwritten and it reads again.
There is no lock that a process could die with: the version is one aligned 64-bit word, written after its buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int64
from multiprocessing.context import SpawnContext

import torch
from torch import Tensor, nn


class SharedWeights:
    """Published parameters of a model. Passed to sampler processes as an argument of the process."""

    def __init__(self, model: nn.Module, context: SpawnContext) -> None:
        self._buffers = [
            {name: torch.empty_like(p, device="cpu").share_memory_() for name, p in model.named_parameters()}
            for _ in range(2)
        ]
        self._version: c_int64 = context.RawValue(c_int64, -1)

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return self._version.value

    def publish(self, model: nn.Module, version: int) -> None:
        """Copy the model's parameters into the older buffer, then announce them. Versions must increase by one."""
        previous = self.version
        if previous >= 0 and version != previous + 1:
            raise ValueError(f"version {version} published after {previous}")
        buffer = self._buffers[version % 2]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                buffer[name].copy_(parameter)
        self._version.value = version

    def read(self, into: Mapping[str, Tensor]) -> int:
        """Copy the newest complete version into the tensors of the same names; returns which one it was."""
        while True:
            version = self.version
            buffer = self._buffers[version % 2]
            with torch.no_grad():
                for name, tensor in into.items():
                    tensor.copy_(buffer[name])
            if self.version == version:
                return version
