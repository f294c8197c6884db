"""Runs so small that a test can make several of them, and what tests want to know about them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from vcpo.config import RunConfig, parse_config, parse_override, set_dotted
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress

REWARDS = Path(__file__).parent / "reward_cases.py"

_TINY: dict[str, Any] = {
    "model": {
        "init": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    },
    "task": {"name": "sort", "digits": 4},
    # trusted, so no test pays for a process
    "reward": {"reward_funcs": [f"{REWARDS}:digit_mean"], "processes": 0},
    "sampling": {"num_generations": 4, "max_prompt_length": 5, "max_completion_length": 6, "slots": 8},
    "training": {"max_steps": 6, "prompts_per_step": 2, "learning_rate": 1e-2},
    "runtime": {"name": "lockstep"},
    "checkpoint": {"save_steps": 0},
    "logging": {"tensorboard": False, "transcript_steps": 0},
}


def tiny_data(output_dir: Path, *overrides: str) -> dict[str, Any]:
    """A configuration as plain data: a tiny model, the sort task, a reward with a gradient, six lockstep steps."""
    data: dict[str, Any] = yaml.safe_load(yaml.safe_dump(_TINY))
    data["output_dir"] = str(output_dir)
    for override in overrides:
        set_dotted(data, *parse_override(override))
    return data


def tiny_config(output_dir: Path, *overrides: str) -> RunConfig:
    """The same, validated. overrides: as on the command line, ``key.sub=value``."""
    return parse_config(tiny_data(output_dir, *overrides))


def tiny_recipe(path: Path, *overrides: str) -> Path:
    """The same as a recipe file; its run directory is ``run`` beside it."""
    path.write_text(yaml.safe_dump(tiny_data(path.parent / "run", *overrides)))
    return path


class InterruptAfter(Progress):
    """A display that presses Ctrl-C when a step is logged."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__(step)
        self._step = step
        self._number = number

    def log(self, step: int, kind: Any, metrics: Mapping[str, float]) -> None:
        super().log(step, kind, metrics)
        if kind == "train" and step == self._step:
            signal.raise_signal(self._number)


def final_weights(run: Path) -> dict[str, Tensor]:
    """The tensors of a run's final model."""
    return load_file(run / "model" / "model.safetensors")


def assert_equal_weights(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def timeless_metrics(run: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics without what depends on the clock; NaN as a string, so that equal is equal."""
    lines = read_metrics(run / "metrics.jsonl")
    timed = ("time", "tokens_per_second")
    return [
        {k: "NaN" if v != v else v for k, v in line.items() if k not in timed and not k.startswith("time_")}
        for line in lines
    ]


def train_steps(run: Path) -> list[int]:
    """The steps of the training lines in order."""
    return [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


def start_vcpo(*arguments: object, cwd: Path, new_session: bool = True) -> subprocess.Popen[str]:
    """``python -m vcpo ...`` in a process of its own; standard output and error come together."""
    environment = {**os.environ, "VCPO_CACHE": str(cwd / "cache"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "vcpo", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=new_session,
    )


def wait_until(condition: Callable[[], bool], seconds: float, what: str, process: subprocess.Popen[str]) -> None:
    """Poll until the condition holds. Fails when ``process`` ends before, or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            output = process.stdout.read() if process.stdout else ""
            raise AssertionError(f"the process ended with {process.returncode} before {what}:\n{output}")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def has_steps(run: Path, count: int) -> Callable[[], bool]:
    """A condition: so many training steps are in the metrics."""

    def check() -> bool:
        path = run / "metrics.jsonl"
        return path.exists() and path.read_bytes().count(b'"kind": "train"') >= count

    return check


def samplers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The sampler processes of a run."""
    return children_running("sampler_process", process.pid)


def children_running(module: str, pid: int | None = None) -> list[psutil.Process]:
    """The living processes that this one, or another, has started directly or not to run a module of ours."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile; a zombie has no command line either
            if module in " ".join(child.cmdline()):
                found.append(child)
    return found


def gone_within(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether all of them end by themselves in that time; zombies count as ended."""
    deadline = time.monotonic() + seconds
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
