"""Weights in shared memory reach another process bit for bit, at a small and constant cost in system resources."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vcpo.errors import UserError
from vcpo.pipeline.shared_memory import OwnedMemory, SharedMemory
from vcpo.pipeline.shared_weights import PublishedWeights, SharedWeights, weights_checksum

DESCRIPTORS = Path("/proc/self/fd")
IN_MEMORY = Path("/dev/shm")


def make_model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 5) for _ in range(layers)))
    model.append(nn.Linear(5, 3).bfloat16())
    return model


def empty_copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in model.named_parameters()}


def copying(into: dict[str, Tensor]) -> Callable[[Mapping[str, Tensor], int], None]:
    def load(tensors: Mapping[str, Tensor], version: int) -> None:
        for name, tensor in tensors.items():
            into[name].copy_(tensor)

    return load


READER = """
import json, pickle, sys
from vcpo.pipeline.shared_memory import SharedMemory
from vcpo.pipeline.shared_weights import SharedWeights
layout = pickle.load(sys.stdin.buffer)
weights = SharedWeights(SharedMemory(int(sys.argv[1]), layout.size), layout)
read = {}
version, checksum = weights.read(lambda tensors, version: read.update({n: t.tolist() for n, t in tensors.items()}))
print(json.dumps([version, checksum, read]))
"""


def test_another_process_reads_what_was_published() -> None:
    model = make_model()
    weights = PublishedWeights(dict(model.named_parameters()))
    weights.publish(dict(model.named_parameters()), 7)
    command = [sys.executable, "-c", READER, str(weights.descriptor)]
    layout = pickle.dumps(weights.layout)
    said = subprocess.run(command, input=layout, capture_output=True, pass_fds=[weights.descriptor], check=True).stdout
    version, checksum, values = json.loads(said)
    assert version == 7
    assert checksum == weights_checksum(dict(model.named_parameters()))
    assert values == {name: p.tolist() for name, p in model.named_parameters()}


def test_a_buffer_that_is_overwritten_while_it_is_read_is_read_again() -> None:
    model = make_model()
    weights = PublishedWeights(dict(model.named_parameters()))
    reader = SharedWeights(SharedMemory(weights.descriptor, weights.layout.size), weights.layout)
    weights.publish(dict(model.named_parameters()), 0)
    seen: list[tuple[int, float]] = []

    def load(tensors: Mapping[str, Tensor], version: int) -> None:
        seen.append((version, tensors["0.bias"][0].item()))
        if version == 0:
            with torch.no_grad():
                model[0].bias.fill_(9)
            weights.publish(dict(model.named_parameters()), 1)

    assert reader.read(load)[0] == 1
    assert [version for version, _ in seen] == [0, 1]
    assert seen[1][1] == 9


@pytest.mark.skipif(not IN_MEMORY.is_dir(), reason="needs /dev/shm")
def test_shared_memory_never_has_a_name() -> None:
    before = set(os.listdir(IN_MEMORY))
    memory = OwnedMemory(4096)
    assert set(os.listdir(IN_MEMORY)) <= before
    assert bytes(memory.buffer[:]) == bytes(4096)


def test_the_newest_version_is_read() -> None:
    model = make_model()
    weights = PublishedWeights(dict(model.named_parameters()))
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(version)
        weights.publish(dict(model.named_parameters()), version)
    copies = empty_copies(model)
    assert weights.read(copying(copies))[0] == 2
    assert all(bool((tensor == 2).all()) for tensor in copies.values())


def test_versions_must_follow_each_other() -> None:
    model = make_model()
    weights = PublishedWeights(dict(model.named_parameters()))
    weights.publish(dict(model.named_parameters()), 3)
    with pytest.raises(ValueError, match="version 5 published after 3"):
        weights.publish(dict(model.named_parameters()), 5)


def test_the_checksum_tells_old_torn_missing_and_exchanged_weights() -> None:
    parameters = {name: p.detach().clone() for name, p in make_model(3).named_parameters()}
    right = weights_checksum(parameters)
    assert weights_checksum(dict(reversed(list(parameters.items())))) == right
    for name, tensor in parameters.items():
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[0] ^= 1  # one bit of one number
        assert weights_checksum({**parameters, name: changed}) != right
    exchanged = {**parameters, "0.weight": parameters["1.weight"], "1.weight": parameters["0.weight"]}
    assert weights_checksum(exchanged) != right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_does_not_depend_on_where_a_tensor_lies(dtype: torch.dtype) -> None:
    whole = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for start in range(5):
        part = whole[start : start + 4]
        assert weights_checksum({"a": part}) == weights_checksum({"a": part.clone()})


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc")
def test_file_descriptors_do_not_grow_with_the_number_of_parameters() -> None:
    before = len(os.listdir(DESCRIPTORS))
    weights = PublishedWeights(dict(make_model(layers=100).named_parameters()))
    assert len(os.listdir(DESCRIPTORS)) - before < 10
    assert weights.version == -1


def test_too_little_shared_memory_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"GB of shared memory for the weights .*No space left on device"):
        PublishedWeights(dict(make_model().named_parameters()))
