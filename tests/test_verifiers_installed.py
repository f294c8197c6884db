"""The task ``verifiers`` with the package: `make test-verifiers` installs it."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from run_cases import tiny_config
from vcpo.errors import UserError
from vcpo.models.small import character_tokenizer
from vcpo.observe.metrics import read_metrics
from vcpo.observe.progress import Progress
from vcpo.records import Problem, StopReason
from vcpo.tasks.environment import Observation, Turn
from vcpo.tasks.prompts import encode_prompt
from vcpo.tasks.verifiers_task import VerifiersTask

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed; make test-verifiers installs it"
)

CASES = f"{Path(__file__).with_name('verifiers_cases.py')}:Cases"
GUESS = f"{Path(__file__).parents[1] / 'examples' / 'guess.py'}:Guess"
CHARACTERS = "model.init.characters='0123456789:-?<>!not '"
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def task_of(*kinds: str, **options: Any) -> VerifiersTask:
    args = {"kinds": list(kinds) or ["single"], **options.pop("args", {})}
    return VerifiersTask(**{"environment": CASES, "args": args, "held_out": 10, "chat": False, **options})


def turn(text: str, number: int = 0, reason: StopReason = StopReason.EOS) -> Turn:
    return Turn(number, text, np.zeros(0, dtype=np.int64), reason)


@pytest.fixture
def played() -> Iterator[Any]:
    """Begins an episode of an evaluation problem; closes those that were begun."""
    made = []

    def begin(task: VerifiersTask, place: int = 3) -> Any:
        made.append(task.environment(task.eval_problems(place + 1)[place], 0))
        return made[-1]

    yield begin
    for environment in made:
        environment.close()


def test_one_turn_is_scored_by_every_function_of_the_rubric(played: Any) -> None:
    """Weights 2, -0.5 and 0; the asynchronous, the negative and the keyed function, and the metric."""
    observation = played(task_of()).step(turn("3"))
    assert observation == Observation(
        done=True,
        correct=True,
        reward=2.0 * 1 - 0.5 * 1,
        measurements={
            "reward/right": 1.0,
            "reward/long": 1.0,
            "reward/calm": 1.0,
            "reward/cut_off": 0.0,
            "metric/turns": 1.0,
        },
    )


def test_several_turns_are_one_conversation(played: Any) -> None:
    environment = played(task_of("talk"))
    assert environment.step(turn("8")) == Observation("not 8!")
    assert environment.step(turn("", 1)) == Observation("not !")
    last = environment.step(turn("3", 2))
    assert (last.done, last.reward, last.measurements["metric/turns"]) == (True, 2.0 - 0.5 * 2, 3.0)


def test_in_a_chat_the_observation_is_messages(played: Any) -> None:
    observation = played(task_of("talk", chat=True)).step(turn("8"))
    assert observation.messages == [{"role": "user", "content": "not 8"}, {"role": "user", "content": "!"}]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("raise", "TaskError.*ValueError: this cannot be judged"),
        ("infinite", "reward/long came to no finite number"),
        ("twice", "runs agent 'player' twice"),
        ("break", "the board is upset"),
        ("other opening", "other messages than the task's prompt"),
    ],
)
def test_what_cannot_be_scored_fails_with_the_reason(kind: str, sentence: str, played: Any) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        played(task_of(kind)).step(turn("8"))


def test_an_environment_that_rewrites_what_the_model_said_fails(played: Any) -> None:
    with pytest.raises(RuntimeError, match="what was sampled is not in it any more"):
        played(task_of("rewrite")).step(turn("8"))


def test_a_cut_off_turn_is_scored_as_such(played: Any) -> None:
    """By a single request, and where the environment would go on."""
    for kind in ("single", "talk"):
        observation = played(task_of(kind)).limit_reached(StopReason.LENGTH, turn("8", reason=StopReason.LENGTH))
        assert (observation.done, observation.reward) == (True, -0.5)
        assert observation.measurements["reward/cut_off"] == 1.0
        assert observation.measurements["metric/turns"] == 1.0


def test_an_observation_without_room_ends_the_episode_with_its_score(played: Any) -> None:
    environment = played(task_of("talk"))
    environment.step(turn("8"))
    observation = environment.limit_reached(StopReason.LENGTH, None)
    assert (observation.done, observation.reward, observation.measurements["metric/turns"]) == (True, -0.5, 1.0)


def test_the_turn_limit_and_stop_conditions_end_an_episode_with_its_score(played: Any) -> None:
    for task in (task_of("talk", max_turns=2), task_of("stop")):
        environment = played(task)
        environment.step(turn("8"))
        assert environment.step(turn("88", 1)).reward == -0.5 * 3


def test_closing_ends_a_step_that_waits_and_others_go_on_meanwhile(played: Any) -> None:
    task = task_of("hang", "single")
    hanging = task.environment(task.eval_problems(1)[0], 0)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(hanging.step, turn("1"))
        assert played(task, 1).step(turn("1")).reward == 1.5
        assert not step.done()
        hanging.close()
        with pytest.raises(RuntimeError, match="has ended"):
            step.result(timeout=60)
    episodes = task._episodes
    assert episodes is not None
    deadline = time.monotonic() + 60
    while episodes._open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not episodes._open, "the episode goes on although nobody listens"


def test_when_verifiers_exits_responses_fail_and_nobody_waits_for_it(played: Any) -> None:
    """As it does where it lacks a login: by SystemExit, which ends its event loop."""
    task = task_of("exit", "talk")
    waiting = played(task, 1)
    with ThreadPoolExecutor(1) as pool:
        assert waiting.step(turn("8")) == Observation("not 8!")
        with pytest.raises(RuntimeError, match="SystemExit: not logged in"):
            played(task, 0).step(turn("8"))
        with pytest.raises(RuntimeError, match="verifiers has ended"):
            pool.submit(waiting.step, turn("9", 1)).result(timeout=60)
    with pytest.raises(RuntimeError, match="verifiers has ended: SystemExit: not logged in"):
        played(task, 1)


def test_problems_have_the_tasks_messages_and_fields() -> None:
    system = {"system": "be brief"}
    problem = task_of(chat=True, args=system).eval_problems(4)[3]
    assert problem.prompt == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3?"}]
    assert problem.columns["answer"] == "3"
    assert task_of(args=system).eval_problems(4)[3].prompt == "be brief\n3?"
    json.dumps(problem.columns)


def test_other_tasks_in_the_sampler_than_in_the_learner_are_noticed() -> None:
    problem = task_of(args={"prompt": "another {i}"}).eval_problems(1)[0]
    with pytest.raises(RuntimeError, match="must always give the same"):
        task_of().environment(problem, 0)


def test_evaluation_has_a_taskset_of_its_own_or_the_first_tasks() -> None:
    own = task_of(eval_args={"prompt": "eval {i}", "tasks": 5})
    assert [p.prompt for p in own.eval_problems(9)] == [f"eval {i}" for i in range(5)]
    assert len({own.train_problem(i, 0).id for i in range(100)}) == 100
    held_out = task_of()
    assert [p.prompt for p in held_out.eval_problems(99)] == [f"{i}?" for i in range(10)]
    assert {held_out.train_problem(i, 0).prompt for i in range(90)} == {f"{i}?" for i in range(10, 100)}


def test_of_an_endless_taskset_the_first_tasks_are_read() -> None:
    task = task_of(environment=CASES.replace(":Cases", ":EndlessCases"), limit=150)
    assert len({task.train_problem(i, 0).id for i in range(140)}) == 140


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"environment": "no-such-package"}, "'no-such-package'.* not found"),
        ({"environment": "nowhere.py:Cases"}, "there is no file"),
        ({"environment": CASES.replace(":Cases", ":Kases")}, "has no 'Kases'; did you mean 'Cases'"),
        ({"environment": CASES.replace(":Cases", ":CaseTask")}, "exports no Taskset|no Taskset"),
        ({"args": {"kindz": ["single"]}}, "kindz"),
        ({"config": {"playr": {}}}, "playr"),
        ({"config": {"critic": {"model": None}}}, "player, critic have no model of their own"),
        ({"agent": "referee"}, "no agent 'referee'; set task.agent to one of player, critic"),
        ({"args": {"prompt": None}}, "task 0 has no prompt"),
        ({"args": {"tasks": 0}}, "has no tasks"),
        ({"held_out": 100}, "has 100 tasks, and the first task.held_out = 100"),
        ({"config": {"player": {"harness": {"id": "codex"}}}}, "harness 'codex'"),
    ],
)
def test_what_cannot_be_played_is_said_before_anything_else(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        task_of(**options)


def test_an_id_is_looked_up_as_verifiers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_game.py").write_text(Path(GUESS.rpartition(":")[0]).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    task = VerifiersTask(environment="somebody/my-game@1.0", chat=False)
    assert task.eval_problems(1)[0].prompt == "0000: 0-9?"


# -- runs ----------------------------------------------------------------------------------------------------------


def run_of(directory: Path, environment: str, *words: str, **options: Any) -> list[dict[str, Any]]:
    from vcpo.pipeline.run import train

    task = {"name": "verifiers", "environment": environment, "chat": False, "stop_strings": ["!"], **options}
    config = tiny_config(
        directory,
        f"task={json.dumps(task)}",
        "reward={processes: 1}",
        CHARACTERS,
        "sampling.max_prompt_length=20",
        "sampling.max_completion_length=48",
        "training.max_steps=2",
        "eval.eval_steps=2",
        "eval.num_problems=2",
        *words,
    )
    train(config, progress=Progress(2), make_report=False)
    return [line for line in read_metrics(directory / "metrics.jsonl") if line["kind"] == "train"]


RUBRIC = {"reward/right", "reward/long", "reward/calm", "reward/cut_off", "metric/turns"}


@pytest.mark.parametrize("kind", ["single", "talk"])
def test_a_run_has_the_rubric_in_its_metrics(kind: str, tmp_path: Path) -> None:
    for line in run_of(tmp_path, CASES, args={"kinds": [kind]}, max_turns=3):
        assert {f"environment/{name}" for name in RUBRIC} <= line.keys()
        assert line["environment_failures"] == line["unscored"] == 0
        expected = 2 * line["environment/reward/right"] - 0.5 * line["environment/reward/long"]
        assert line["reward"] == line["reward_parts/environment"] == pytest.approx(expected)
        assert line["turns"] == pytest.approx(line["environment/metric/turns"], abs=0.5)
        assert (line["turns"] > 1) == (line["given_tokens"] > 0) == (kind == "talk")


def test_a_run_with_sampler_processes(tmp_path: Path) -> None:
    lines = run_of(tmp_path, GUESS, "runtime={name: local, samplers: 1}", max_turns=3)
    assert all(line["environment/metric/guesses"] > 1 and line["unscored"] == 0 for line in lines)


def test_a_function_that_raises_takes_the_reward_and_says_why(tmp_path: Path) -> None:
    words = "training.max_steps=1", "eval.eval_steps=0", "training.prompts_per_step=6"
    (line,) = run_of(tmp_path, CASES, *words, args={"kinds": ["raise", "single"]})
    assert 0 < line["unscored"] == line["environment_failures"] < 24
    ledger = (tmp_path / "ledger.sqlite").read_bytes()
    assert b"this cannot be judged" in ledger


# -- chat ----------------------------------------------------------------------------------------------------------


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n", 200)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chat_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    from vcpo.models.attention import ATTENTION

    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()


def test_in_a_chat_sampled_tokens_stay_and_the_template_writes_what_follows() -> None:
    from vcpo.records import GenerationRequest, SamplingParams
    from vcpo.sampler.engines import make_engine
    from vcpo.sampler.protocol import generate

    tokenizer = chat_tokenizer()
    model = chat_model(tokenizer)
    task = task_of("talk", chat=True, stop_strings=["a", "b", "c", "d", "e"], max_turns=3)
    problem: Problem = task.eval_problems(1)[0]
    prompt = encode_prompt(tokenizer, problem)
    assert tokenizer.decode(prompt) == "[u]0?<eos>\n[a]"
    params = SamplingParams(max_tokens=180, stop_token_ids=(tokenizer.eos_token_id,))
    engine = make_engine(task, model, params, 4, 200, tokenizer)
    requests = [GenerationRequest(0, i, prompt, seed=i, problem=problem) for i in range(4)]
    for trajectory in generate(engine, requests):
        assert trajectory.failure is None
        for turn, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            said = trajectory.response_ids_T[turn.start : turn.end]
            given = trajectory.response_ids_T[turn.end : after.start]
            assert trajectory.mask_T[turn.start : turn.end].all()
            assert not trajectory.mask_T[turn.end : after.start].any()
            ended = "" if said[-1] == tokenizer.eos_token_id else "<eos>"
            text = tokenizer.decode(said, skip_special_tokens=True)
            assert tokenizer.decode(given) == f"{ended}\n[u]not {text.strip()}<eos>\n[u]!<eos>\n[a]"
        assert len(trajectory.turns) > 1


def test_a_run_in_chat(tmp_path: Path) -> None:
    """Two evaluations and two steps of a model that is loaded with its chat template."""
    tokenizer = chat_tokenizer()
    chat_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = f"model={tmp_path / 'model'}", "sampling.max_completion_length=80", "logging.transcript_steps=1"
    args = {"kinds": ["talk"], "system": "be brief"}
    options = {"args": args, "chat": True, "stop_strings": ["a", "b", "c"], "max_turns": 3}
    for line in run_of(tmp_path / "run", CASES, *words, "sampling.max_prompt_length=40", **options):
        assert {f"environment/{name}" for name in RUBRIC} <= line.keys()
        assert line["environment_failures"] == 0
        assert line["turns"] > 1
    transcripts = "".join(path.read_text() for path in (tmp_path / "run" / "transcripts").rglob("*.md"))
    assert "[s]be brief<eos>" in transcripts
    assert "[u]!<eos>" in transcripts


def test_many_episodes_at_a_time_do_not_wait_for_each_other(played: Any) -> None:
    task = task_of("talk")
    begin = time.monotonic()
    environments = [played(task) for _ in range(20)]
    assert all(environment.step(turn("8")) == Observation("not 8!") for environment in environments)
    assert all(environment.step(turn("3", 1)).done for environment in reversed(environments))
    assert time.monotonic() - begin < 60
