"""What holds in every test: one thread, caches of the tests' own; and the small run that many tests share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

GRADIENT_COSTS = "gradient-costs.json"


@pytest.fixture(scope="session", autouse=True)
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of what is made once for all tests."""
    directory = tmp_path_factory.mktemp("session-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VCPO_CACHE", str(directory))
        yield directory


@pytest.fixture(autouse=True)
def _isolated(
    _session_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No test reads or fills the user's cache, or leaves another number of threads behind.

    Costs of gradient norms decide how sums are rounded. They are measured by the first test that needs them and are the
    same for all later ones, in this process and in those that tests start.
    """
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VCPO_CACHE", str(cache))
    own, shared = cache / GRADIENT_COSTS, _session_cache / GRADIENT_COSTS
    if shared.exists():
        shutil.copy(shared, own)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if own.exists():
        shutil.copy(own, shared)


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


@pytest.fixture(scope="module")
def exact_reference() -> Iterator[None]:
    """RMSNorm in float64 where the model is, so that rounding in transformers does not hide errors of ours."""
    from gradnorm_cases import float64_norms

    with float64_norms():
        yield
