"""What holds in every test: one thread, a cache of its own, and short names for the small run that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or fills the user's cache of warm starts, or leaves another number of threads behind."""
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path_factory.mktemp("cache")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished lockstep run with evaluations, checkpoints and transcripts. Only to be read."""
    # these import transformers, which most test files need not wait for
    from run_cases import tiny_config
    from vcpo.pipeline.run import train

    directory = tmp_path_factory.mktemp("finished") / "run"
    config = tiny_config(
        directory,
        "eval.eval_steps=3",
        "eval.num_problems=6",
        "checkpoint.save_steps=3",
        "logging.transcript_steps=2",
        "logging.tensorboard=true",
    )
    return train(config)
