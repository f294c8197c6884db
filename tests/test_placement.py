"""Processes of a run and GPUs: by a rule on names, and what a sampler process is really started with."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from run_cases import tiny_config
from vcpo.pipeline import supervision
from vcpo.pipeline.placement import sampler_gpu, visible_gpus
from vcpo.pipeline.shared_weights import PublishedWeights
from vcpo.pipeline.supervision import Sampler
from vcpo.records import SamplingParams


@pytest.mark.parametrize(
    ("gpus", "placed"),
    [
        ([], [None, None]),
        (["0"], ["0", "0", "0"]),
        (["4", "5"], ["5", "5"]),
        (["0", "1", "2", "3"], ["1", "2", "3", "1"]),
        (["GPU-a", "GPU-b", "GPU-c"], ["GPU-b", "GPU-c", "GPU-b"]),
    ],
)
def test_the_learner_keeps_the_first_gpu_to_itself_where_there_are_more(
    gpus: list[str], placed: list[str | None]
) -> None:
    assert [sampler_gpu(index, gpus) for index in range(len(placed))] == placed


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [
        (None, 0, []),
        (None, 3, ["0", "1", "2"]),
        ("2,5", 2, ["2", "5"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("1,-1,2", 1, ["1"]),
        ("", 0, []),
    ],
)
def test_gpus_have_the_names_that_the_user_gave_them(
    variable: str | None, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


@pytest.mark.parametrize(("device", "expected"), [("auto", "7"), ("cpu", None)])
def test_a_sampler_process_sees_its_own_gpu_only(
    device: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "visible_gpus", lambda: ["3", "6", "7"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = tiny_config(tmp_path, "runtime.name=local", "runtime.samplers=2", f"model.device={device}")
    weights = PublishedWeights({"a": torch.zeros(1)})
    sampler = Sampler(1, config, SamplingParams(max_tokens=1, temperature=1.0), weights, 0)
    try:
        assert psutil.Process(sampler.process.pid).environ().get("CUDA_VISIBLE_DEVICES") == expected
    finally:
        sampler.close()
