"""The lockstep runtime: exact lags, bit-for-bit repeatable, and with lag 0 the same as a plain synchronous loop."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from reward_cases import digit_mean
from run_cases import assert_equal_weights, final_weights, timeless_metrics, tiny_config
from vcpo.config import RunConfig
from vcpo.learner.learner import Learner
from vcpo.models.loading import end_token_ids, load_model
from vcpo.pipeline.grading_pool import make_task_and_grading
from vcpo.pipeline.lockstep import LockstepRollouts
from vcpo.pipeline.rollouts import GroupStarter
from vcpo.pipeline.run import train
from vcpo.pipeline.snapshots import SnapshotRing
from vcpo.records import GenerationRequest, Grade, Group, SamplingParams, Trajectory
from vcpo.sampler.protocol import generate
from vcpo.sampler.torch_engine import TorchEngine
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.sort import SortTask

LAGS = ["fixed", "mixed", "in_flight"]


@pytest.mark.parametrize("lag", LAGS)
def test_the_same_configuration_gives_the_same_bits(tmp_path: Path, lag: str) -> None:
    changes = (f"runtime.lag={lag}", "runtime.max_staleness=2")
    runs = [train(tiny_config(tmp_path / name, *changes), make_report=False) for name in "ab"]
    assert_equal_weights(final_weights(runs[0]), final_weights(runs[1]))
    assert timeless_metrics(runs[0]) == timeless_metrics(runs[1])
    # it is not equal because nothing happened
    other = train(tiny_config(tmp_path / "c", *changes, "seed=1"), make_report=False)
    assert any(not torch.equal(t, final_weights(other)[name]) for name, t in final_weights(runs[0]).items())


def trajectories_by_step(config: RunConfig, steps: int) -> list[list[Trajectory]]:
    """What the runtime samples in each step, while the weights change by a known amount between steps."""
    model, tokenizer = load_model(config.model, config.seed)
    task, grading = make_task_and_grading(config)
    sampling, runtime = config.sampling, config.runtime
    prompts = PromptSource(task, tokenizer, config.seed, sampling.max_prompt_length, "skip")
    params = SamplingParams(max_tokens=sampling.max_completion_length)  # no end token: every length is the limit
    ring = SnapshotRing(runtime.max_staleness + 1)
    rollouts = LockstepRollouts(config, model, params, tokenizer, GroupStarter(prompts), grading, ring)
    sampled = []
    for step in range(steps):
        rollouts.publish(step)
        groups = rollouts.minibatch(step)
        assert [group.id for group in groups] == [2 * step, 2 * step + 1]
        sampled.append([t for group in groups for t in group.trajectories])
    return sampled


@pytest.mark.parametrize("k", [0, 1, 3])
def test_fixed_lag_is_exactly_k_or_all_there_is(tmp_path: Path, k: int) -> None:
    config = tiny_config(tmp_path, f"runtime.max_staleness={k}")
    for step, trajectories in enumerate(trajectories_by_step(config, 6)):
        for t in trajectories:
            assert t.start_version == max(0, step - k)
            assert (t.versions_T == max(0, step - k)).all()


def test_mixed_lag_takes_every_value_up_to_k_one_per_group(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "runtime.max_staleness=3", "runtime.lag=mixed", "training.max_steps=40")
    lags = []
    for step, trajectories in enumerate(trajectories_by_step(config, 40)):
        assert len(trajectories) == 8
        for group in (trajectories[:4], trajectories[4:]):
            versions = {int(v) for t in group for v in t.versions_T}
            assert len(versions) == 1
            lag = step - versions.pop()
            assert 0 <= lag <= min(3, step)
            if step >= 3:
                lags.append(lag)
    assert set(lags) == {0, 1, 2, 3}
    # 74 draws of four equally likely values: 18.5 of each expected, 3.7 the standard deviation
    assert all(5 <= lags.count(lag) <= 32 for lag in range(4))


def test_in_flight_versions_rise_at_equal_intervals_from_k_behind(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "runtime.max_staleness=3", "runtime.lag=in_flight")
    by_hand = {  # six tokens; the swap to the current weights would come before a seventh
        0: [0, 0, 0, 0, 0, 0],
        1: [0, 0, 0, 0, 0, 0],
        2: [0, 0, 0, 1, 1, 1],
        3: [0, 0, 1, 1, 2, 2],
        4: [1, 1, 2, 2, 3, 3],
        5: [2, 2, 3, 3, 4, 4],
    }
    for step, trajectories in enumerate(trajectories_by_step(config, 6)):
        for t in trajectories:
            assert t.versions_T.tolist() == by_hand[step]
            assert t.start_version == by_hand[step][0]


def synchronous_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Reinforcement learning written down plainly: sample from the current weights, grade, update, repeat."""
    model, tokenizer = load_model(config.model, config.seed)
    learner = Learner(model, config.method.spec, config.training, config.sampling.temperature)
    task = SortTask(digits=4)
    prompts, responses = config.training.prompts_per_step, config.sampling.num_generations
    params = SamplingParams(
        max_tokens=config.sampling.max_completion_length, stop_token_ids=end_token_ids(model, tokenizer)
    )
    for step in range(config.training.max_steps):
        engine = TorchEngine(
            copy.deepcopy(model), params, slots=prompts * responses, max_length=11, tokenizer=tokenizer, version=step
        )
        groups = []
        for number in range(step * prompts, (step + 1) * prompts):
            problem = task.train_problem(number, config.seed)
            ids = np.array(tokenizer(problem.prompt)["input_ids"])
            groups.append((number, problem, ids))
        requests = []
        for number, _, ids in groups:
            for index in range(responses):
                words = np.random.SeedSequence([config.seed, number, index]).generate_state(1, np.uint64)
                requests.append(GenerationRequest(number, index, ids, int(words[0]) >> 1))
        trajectories = generate(engine, requests)
        for trajectory in trajectories:
            (reward,) = digit_mean([trajectory.text])
            trajectory.grade = Grade(reward=reward)
        learner.step(
            [
                Group(number, problem, number + 1, trajectories[i * responses : (i + 1) * responses])
                for i, (number, problem, _) in enumerate(groups)
            ]
        )
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    ("method", "lag"),
    [("vcpo", "fixed"), ("tis", "fixed"), ("grpo", "fixed"), ("vcpo", "mixed"), ("vcpo", "in_flight")],
)
def test_without_lag_it_equals_a_plain_synchronous_loop_bit_for_bit(tmp_path: Path, method: str, lag: str) -> None:
    config = tiny_config(tmp_path / "run", f"method={method}", f"runtime.lag={lag}", "runtime.max_staleness=0")
    assert_equal_weights(final_weights(train(config, make_report=False)), synchronous_weights(config))
