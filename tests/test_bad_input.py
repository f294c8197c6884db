"""Bad input met while a run runs: every mistake is named, and what can be gone on with is counted."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vcpo.pipeline.run as run_module
from run_cases import REWARDS, tiny_config, tiny_recipe, train_steps
from vcpo.config import ModelSection
from vcpo.errors import UserError
from vcpo.learner.packing import PackedPlan
from vcpo.models.loading import load_model
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.checkpoint import find_damage, list_checkpoints
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory

OWN_REWARDS = """
def too_many(completions, **columns):
    return [0.0] * (len(completions) + 1)

def infinite(completions, **columns):
    return [float("inf")] * len(completions)

def words(completions, **columns):
    return ["good"] * len(completions)

def one_number(completions, **columns):
    return 1.0

def needs_answers(completions, solution):
    return [1.0] * len(completions)

def raises(completions, **columns):
    raise LookupError("the judge is out")

async def raises_later(completions, **columns):
    raise LookupError("the judge is out")
"""


def run_with(directory: Path, *overrides: str) -> Path:
    """A short run without a report."""
    return train(tiny_config(directory / "run", "training.max_steps=3", *overrides), make_report=False)


def train_lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


@pytest.fixture
def own_rewards(tmp_path: Path) -> Path:
    path = tmp_path / "judge.py"
    path.write_text(OWN_REWARDS)
    return path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("too_many", "returned 5 values for 4 completions"),
        ("infinite", "returned inf for completion 0; a value must be a finite number"),
        ("words", "returned 'good' for completion 0; a value must be a finite number"),
        ("one_number", "returned a value of type float; it must return a list"),
        ("needs_answers", "has a parameter 'solution', which is no column of this task's problems"),
    ],
)
def test_a_reward_function_that_answers_wrongly_is_named(
    tmp_path: Path, own_rewards: Path, name: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=f"reward function {name!r} {re.escape(sentence)}"):
        run_with(tmp_path, f"reward.reward_funcs=['{own_rewards}:{name}']")
    assert RunDirectory(tmp_path / "run").sessions()[-1]["outcome"] == "failed"


def test_nan_from_a_reward_function_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reward function 'not_a_number' returned nan for completion 0"):
        run_with(tmp_path, f"reward.reward_funcs=['{REWARDS}:not_a_number']")


def test_one_bad_function_of_several_is_the_one_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reward function 'one_too_few' returned 3 values for 4 completions"):
        run_with(tmp_path, f"reward.reward_funcs=['{REWARDS}:digit_mean', '{REWARDS}:one_too_few']")


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_an_exception_of_a_reward_function_stays_and_says_whose_it_is(
    tmp_path: Path, own_rewards: Path, name: str
) -> None:
    with pytest.raises(LookupError, match="the judge is out") as caught:
        run_with(tmp_path, f"reward.reward_funcs=['{own_rewards}:{name}']")
    assert caught.value.__notes__ == [f"raised by reward function {name!r}"]
    assert RunDirectory(tmp_path / "run").sessions()[-1]["outcome"] == "failed"


def test_unscored_responses_are_counted_and_training_goes_on(tmp_path: Path) -> None:
    run = run_with(tmp_path, f"reward.reward_funcs=['{REWARDS}:first_unscored']")
    lines = train_lines(run)
    assert [line["unscored"] for line in lines] == [2.0, 2.0, 2.0]  # one response of each of the two groups
    assert all(line["skipped"] == 0 and line["grad_norm"] > 0 for line in lines)


def test_a_run_in_which_nothing_is_scored_stops_with_the_reason(tmp_path: Path) -> None:
    overrides = ["training.max_steps=9", "training.max_skipped_steps=2"]
    with pytest.raises(RuntimeError, match=r"3 steps in a row were skipped; the last one: no trajectory has .* reward"):
        run_with(tmp_path, *overrides, f"reward.reward_funcs=['{REWARDS}:all_unscored']")
    lines = train_lines(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [1.0, 1.0]
    assert [line["unscored"] for line in lines] == [8.0, 8.0]


def prompts(path: Path, *texts: str) -> str:
    """The override that makes the prompts, without answers, a run's data."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return f"task={{name: dataset, path: {path}}}"


def test_nothing_that_could_reward_is_found_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(run_module, "load_model", no_model)
    with pytest.raises(UserError, match=r"no answers to grade with \(row rows.jsonl:[12]\).*task.answer_column"):
        run_with(tmp_path, prompts(tmp_path / "rows.jsonl", "12=", "34="), "reward.reward_funcs=[]")
    assert not (tmp_path / "run").exists()


def test_evaluation_without_held_out_rows_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation needs held-out rows: give task\.eval_path"):
        run_with(tmp_path, prompts(tmp_path / "rows.jsonl", "12="), "eval.eval_steps=1")
    assert not (tmp_path / "run").exists()


LONG = ("12=", "1234567=", "34=")


def test_long_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    run = run_with(tmp_path, prompts(tmp_path / "rows.jsonl", *LONG))
    last = train_lines(run)[-1]
    # six groups from epochs of two short prompts and a long one: the long one was passed two or three times
    assert last["prompts_skipped"] in (2.0, 3.0)
    assert last["prompts_truncated"] == 0


def test_long_prompts_are_truncated_and_counted(tmp_path: Path) -> None:
    run = run_with(tmp_path, prompts(tmp_path / "rows.jsonl", *LONG), "sampling.long_prompts=truncate")
    last = train_lines(run)[-1]
    assert (last["prompts_skipped"], last["prompts_truncated"]) == (0.0, 2.0)  # two whole epochs


def test_a_long_prompt_can_be_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'rows.jsonl:2' has a prompt of 8 tokens, over sampling.max_prompt_length"):
        run_with(tmp_path, prompts(tmp_path / "rows.jsonl", *LONG), "sampling.long_prompts=error")


def test_a_prompt_that_the_tokenizer_cannot_write_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'rows.jsonl:1': the tokenizer has no token for '\?'"):
        run_with(tmp_path, prompts(tmp_path / "rows.jsonl", "12?"))


def test_evaluation_problems_that_are_all_too_long(tmp_path: Path) -> None:
    overrides = ["eval.eval_steps=1", "sampling.max_prompt_length=4", "sampling.long_prompts=truncate"]
    with pytest.raises(UserError, match="no evaluation problem with a prompt of at most 4 tokens"):
        run_with(tmp_path, *overrides)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Every write beyond ``size`` bytes of a file fails, as on a full disk (Python ignores the signal of the limit)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# bytes between the sizes of the ledger, of the weights of a model that is this large, and of the learner's state
WEIGHTS_FAIL, STATE_FAILS = 80_000, 150_000
LARGER = "model.init.hidden_size=64"


@pytest.mark.parametrize("limit", [WEIGHTS_FAIL, STATE_FAILS])
def test_a_first_checkpoint_that_does_not_fit_leaves_nothing_and_says_so(tmp_path: Path, limit: int) -> None:
    with (
        pytest.raises(
            UserError, match=r"the checkpoint of step 1 could not be written .*there is no earlier checkpoint"
        ),
        largest_file(limit),
    ):
        run_with(tmp_path, "checkpoint.save_steps=1", LARGER)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert RunDirectory(tmp_path / "run").sessions()[-1]["outcome"] == "failed"


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (1_000, r"output_dir '.*run' cannot be written"),
        (4_000, r"the record of this run in '.*run' could not be written .*free space and start again"),
        (6_000, r"the ledger in '.*run' could not be written .*continue with --resume from the last checkpoint"),
    ],
)
def test_whatever_else_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, sentence: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["vcpo", "train", "long" * 1000])  # longer on disk than the configuration
    with pytest.raises(UserError, match=sentence), largest_file(limit):
        run_with(tmp_path, "training.max_steps=9")


def test_metrics_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "training.max_steps=1")
    run = train(config, make_report=False)
    shutil.rmtree(run / "checkpoints")  # so that the resumed run begins with new metrics
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    sentence = r"metrics in '.*run' could not be written .*continue with --resume from the last checkpoint"
    with pytest.raises(UserError, match=sentence):
        train(config, mode="resume", make_report=False)


def test_a_report_that_does_not_fit_leaves_a_finished_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", "training.max_steps=1")
    with (
        pytest.raises(
            UserError, match=r"report.html' could not be written .*the run is finished: .* vcpo report .*run$"
        ),
        largest_file(60_000),
    ):
        train(config)
    assert RunDirectory(tmp_path / "run").is_finished
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_full_disk_ends_the_command_with_the_last_intact_checkpoint(tmp_path: Path) -> None:
    changes = ("checkpoint.save_steps=1", LARGER)
    recipe = tiny_recipe(tmp_path / "tiny.yaml", "training.max_steps=2", *changes)
    run = train(tiny_config(tmp_path / "run", "training.max_steps=2", *changes), make_report=False)
    code = (
        "import resource, sys; from vcpo.cli import app;"
        f" resource.setrlimit(resource.RLIMIT_FSIZE, ({STATE_FAILS}, resource.RLIM_INFINITY)); app()"
    )
    arguments = ["train", str(recipe), "training.max_steps=4", "--resume"]
    failed = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert failed.returncode == 2, failed.stderr
    assert "Traceback" not in failed.stderr
    sentence = failed.stderr.splitlines()[-1]
    intact = run / "checkpoints" / "step-000002"
    assert sentence.startswith("error: the checkpoint of step 3 could not be written")
    assert sentence.endswith(f"the checkpoint {str(intact)!r} is intact: free space and continue with --resume")
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-000001", "step-000002"]
    assert find_damage(intact) is None

    # and with space again, the run goes on from there
    train(tiny_config(run, "training.max_steps=4", *changes), mode="resume", make_report=False)
    assert train_steps(run) == [1, 2, 3, 4]
    assert [find_damage(path) for path in list_checkpoints(run / "checkpoints")] == [None, None]


def test_a_final_model_needs_nothing_of_ours(finished_run: Path) -> None:
    path = finished_run / "model"
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model, our_tokenizer = load_model(ModelSection(path=str(path), device="cpu"), seed=0)
    assert tokenizer.get_vocab() == our_tokenizer.get_vocab()

    texts = ["4312=1234", "9=9", "007=007"]
    rows = [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]
    assert [tokenizer.decode(row) for row in rows] == texts
    lengths = [len(row) for row in rows]
    with torch.no_grad():
        ours = model(
            input_ids=torch.from_numpy(np.concatenate(rows))[None],
            position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
            attention_plan=PackedPlan(lengths, torch.device("cpu")),
            use_cache=False,
        ).logits[0]
        theirs = torch.cat([plain(input_ids=torch.from_numpy(row)[None]).logits[0] for row in rows])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert theirs.abs().max() > 0.01  # a model of zeros would agree, too
