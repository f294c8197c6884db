"""Weights in shared memory reach another process bit for bit, at a small and constant cost in system resources."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vcpo.errors import UserError
from vcpo.pipeline.shared_weights import SharedWeights, weights_checksum

CONTEXT = multiprocessing.get_context("spawn")
DESCRIPTORS = Path("/proc/self/fd")


def make_model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 5) for _ in range(layers)))
    model.append(nn.Linear(5, 3).bfloat16())
    return model


def empty_copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in model.named_parameters()}


def read_and_answer(weights: SharedWeights, into: dict[str, Tensor], pipe: Connection) -> None:
    version, checksum = weights.read(into)
    pipe.send(
        (version, checksum, weights_checksum(into), {name: tensor.float().tolist() for name, tensor in into.items()})
    )


def test_another_process_reads_what_was_published() -> None:
    model = make_model()
    weights = SharedWeights(model, CONTEXT)
    weights.publish(model, 7)
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=read_and_answer, args=(weights, empty_copies(model), theirs))
    process.start()
    version, published, read, values = ours.recv()
    process.join()
    assert version == 7
    assert published == read == weights_checksum(dict(model.named_parameters()))
    assert values == {name: p.tolist() for name, p in model.named_parameters()}


def test_the_newest_version_is_read() -> None:
    model = make_model()
    weights = SharedWeights(model, CONTEXT)
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(version)
        weights.publish(model, version)
    copies = empty_copies(model)
    assert weights.read(copies)[0] == 2
    assert all(bool((tensor == 2).all()) for tensor in copies.values())


def test_versions_must_follow_each_other() -> None:
    model = make_model()
    weights = SharedWeights(model, CONTEXT)
    weights.publish(model, 3)
    with pytest.raises(ValueError, match="version 5 published after 3"):
        weights.publish(model, 5)


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


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc")
def test_file_descriptors_do_not_grow_with_the_number_of_parameters() -> None:
    before = len(os.listdir(DESCRIPTORS))
    weights = SharedWeights(make_model(layers=100), CONTEXT)
    assert len(os.listdir(DESCRIPTORS)) - before < 10
    assert weights.version == -1


def test_too_little_shared_memory_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: Tensor) -> Tensor:
        raise RuntimeError("unable to allocate shared memory(shm) for file: No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(UserError, match=r"GB of shared memory for the weights .*No space left on device"):
        SharedWeights(make_model(), CONTEXT)
