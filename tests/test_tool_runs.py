"""Runs with tools: a model that has learnt by heart to call one is trained on what it makes of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from run_cases import tiny_config, tiny_data
from tool_cases import END, call, chat_tokenizer
from vcpo.cli import app
from vcpo.errors import UserError
from vcpo.observe.metrics import read_metrics
from vcpo.observe.trajectories import load_minibatch, saved_steps
from vcpo.pipeline.run import train
from vcpo.records import StopReason, Trajectory
from vcpo.tasks.chat_turns import ChatTurns
from vcpo.tasks.dataset import DatasetTask
from vcpo.tasks.prompts import encode_prompt

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "tools.py")
ROWS = [{"prompt": "Guess my number.", "number": number, "largest": 9} for number in (4, 7)]
TOOLS = {"tools": [f"{EXAMPLE}:halfway"], "environment_factory": f"{EXAMPLE}:GuessTheNumber"}
GUESS = call("guess", '{"number": 4}')


def learnt(directory: Path, task: DatasetTask) -> None:
    """Save a tiny model that guesses 4 and says what it reads, as far as a few steps have taught it."""
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer()
    problem = task.train_problem(0, 0)
    prompt = encode_prompt(tokenizer, problem, None, task.tool_schemas).tolist()
    chat = ChatTurns(tokenizer, task.tool_schemas)
    conversations = []
    for said in ("right", "too low"):
        turns = [GUESS + END, chat.following([{"role": "tool", "content": said}], ended=True), "OK." + END]
        conversations.append([prompt, *(tokenizer(text)["input_ids"] for text in turns)])
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 10)
        for parts in conversations:
            ids = torch.tensor([[id for part in parts for id in part]])
            labels = ids.clone()
            labels[:, : len(parts[0])] = -100
            begin = len(parts[0]) + len(parts[1])
            labels[:, begin : begin + len(parts[2])] = -100
            (model(input_ids=ids, labels=labels).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def task_options(directory: Path) -> dict[str, Any]:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {"path": str(path), "eval_path": str(path), **TOOLS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A configuration's sections for the model and the example's tools."""
    directory = tmp_path_factory.mktemp("tools")
    options = task_options(directory)
    learnt(directory / "model", DatasetTask(**options))
    return {"model": {"path": str(directory / "model")}, "task": {"name": "dataset", **options}}


def changes(made: dict[str, Any], *more: str) -> list[str]:
    return [
        f"model={json.dumps(made['model'])}",
        f"task={json.dumps(made['task'])}",
        "reward.reward_funcs=[]",
        "sampling.max_prompt_length=1600",
        "sampling.max_completion_length=250",
        "training.max_steps=3",
        "training.learning_rate=0.001",
        "logging.trajectory_steps=1",
        "logging.transcript_steps=1",
        *more,
    ]


def trained(run: Path) -> list[Trajectory]:
    groups = [group for path in saved_steps(run).values() for group in load_minibatch(path).groups]
    return [trajectory for group in groups for trajectory in group.trajectories]


def check(run: Path) -> None:
    """The responses of a run have called the tool, and have the environment's reward."""
    tokenizer = chat_tokenizer()
    called, heard = 0, set()
    for trajectory in trained(run):
        assert trajectory.failure is None
        assert trajectory.grade is not None
        assert trajectory.grade.reward is not None
        text = tokenizer.decode(trajectory.response_ids_T)
        if text.startswith(GUESS + END):
            called += 1
            first, second, *_ = trajectory.turns
            said = tokenizer.decode(trajectory.response_ids_T[first.end : second.start])
            assert not trajectory.mask_T[first.end : second.start].any()
            right = "<tool_response>\nright\n</tool_response>" in said
            assert right or "<tool_response>\ntoo low\n</tool_response>" in said
            heard.add(right)
            if right and trajectory.stop_reason is StopReason.ENVIRONMENT:
                assert trajectory.grade.reward == 1.0
    assert called >= 6
    assert heard == {True, False}
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 3
    assert all(line["environment/tool_calls"] > 0 for line in lines)
    transcript = "".join(path.read_text() for path in (run / "transcripts").iterdir())
    assert '{"name": "guess", "arguments": {"number": 4}}' in transcript
    assert "Given:" in transcript
    assert ", tool_calls 1" in transcript


@pytest.mark.slow
def test_a_lockstep_run_calls_the_tools_of_the_example(tmp_path: Path, made: dict[str, Any]) -> None:
    recipe = tmp_path / "recipe.yaml"
    data = tiny_data(tmp_path / "run", *changes(made, "eval.eval_steps=3", "eval.num_problems=2"))
    recipe.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["train", str(recipe), "--no-report"])
    assert result.exit_code == 0, result.output
    check(tmp_path / "run")


@pytest.mark.slow
def test_a_sampler_process_calls_them_and_graders_load_them(tmp_path: Path, made: dict[str, Any]) -> None:
    local = ('runtime={"name": "local", "max_staleness": 1}', "reward.processes=1")
    check(train(tiny_config(tmp_path / "run", *changes(made, *local)), make_report=False))


def test_a_model_without_a_chat_template_is_refused_before_training(tmp_path: Path) -> None:
    made = {"model": {"init": {"max_position_embeddings": 2048}}, "task": {"name": "dataset", **task_options(tmp_path)}}
    config = tiny_config(tmp_path / "run", *changes(made))
    with pytest.raises(UserError, match="tools need a model with a chat template"):
        train(config, make_report=False)
    assert not (tmp_path / "run").exists()
