"""Tools and environments in TRL's form: prompts, calls, results, rewards, and what goes wrong in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from tool_cases import (
    END,
    HERMES,
    LLAMA,
    NO_TOOLS,
    ScriptedEngine,
    call,
    chat_tokenizer,
    choose,
    ended,
    multiply,
    temperature,
)
from vcpo.errors import UserError
from vcpo.plugins import load_object
from vcpo.records import GenerationRequest, Problem, SamplingParams, StopReason, Trajectory
from vcpo.sampler.engines import with_turns
from vcpo.sampler.protocol import generate
from vcpo.tasks.chat_turns import ChatTurns
from vcpo.tasks.dataset import DatasetTask
from vcpo.tasks.environment import EnvironmentTask, Observation, Turn, TurnRules
from vcpo.tasks.prompts import PromptSource, encode_prompt
from vcpo.tasks.registry import environment_task, make_task
from vcpo.tasks.toolbox import Toolbox, ToolOptions

FILE = str(Path(__file__).with_name("tool_cases.py"))
TOKENIZER = chat_tokenizer()


def tool(name: str) -> str:
    return f"{FILE}:{name}"


FUNCTIONS = [tool(name) for name in ("multiply", "temperature", "choose", "repeat", "forge", "fail")]
COUNTER = {"environment_factory": tool("Counter")}
Counter = load_object(tool("Counter"))  # the class that runs use: a file is loaded as a module of its own


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": "Go.", "target": target, "answer": str(target), "tags": ["a"]} for target in (3, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def respond(
    task: Any,
    script: Sequence[str],
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    max_tokens: int = 4000,
    **params: Any,
) -> Trajectory:
    """The response to the task's first problem in which the model writes these turns."""
    problem, prompt_ids, _ = PromptSource(task, tokenizer, 0, 4000, "error").next()
    request = GenerationRequest(0, 0, prompt_ids, 7, problem)
    settings = SamplingParams(max_tokens, stop_token_ids=(tokenizer.eos_token_id,), **params)
    engine = with_turns(task, lambda _: ScriptedEngine(tokenizer, script), settings, tokenizer, in_rounds=True)
    [trajectory] = generate(engine, [request])
    return trajectory


def given(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> list[str]:
    """What the model has been given between its turns."""
    turns = trajectory.turns
    spans = [(turn.end, following.start) for turn, following in pairwise(turns)]
    assert not any(trajectory.mask_T[begin:end].any() for begin, end in spans)
    assert all(trajectory.mask_T[turn.start : turn.end].all() for turn in turns)
    return [tokenizer.decode(trajectory.response_ids_T[begin:end]) for begin, end in spans]


def results(trajectory: Trajectory) -> list[str]:
    """What the tools have said, in the Hermes shape."""
    text = "".join(given(trajectory))
    return [part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


def test_prompts_show_the_tools_as_the_chat_template_does(rows: str) -> None:
    for options in ({"tools": FUNCTIONS[:3]}, {"tools": FUNCTIONS[:3], **COUNTER}):
        task = make_task("dataset", {"path": rows, **options})
        problem, ids, _ = PromptSource(task, TOKENIZER, 0, 4000, "error").next()
        # functions in their order, then methods by name, as TRL shows them
        methods = [Counter.increment, Counter.look] if "environment_factory" in options else []
        content = "Go. Count to 3." if methods else "Go."
        expected = TOKENIZER.apply_chat_template(
            [{"role": "user", "content": content}],
            tools=[multiply, temperature, choose, *methods],
            add_generation_prompt=True,
        )["input_ids"]
        assert ids.tolist() == expected
        assert problem.prompt == [{"role": "user", "content": content}]


@pytest.mark.parametrize("template", [HERMES, LLAMA])
def test_what_is_given_is_what_the_chat_template_writes_after_an_answer(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    messages = [{"role": "tool", "name": "a", "content": "4"}, {"role": "tool", "name": "b", "content": "5"}]
    history = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Well."}]
    schemas = Toolbox(ToolOptions(tools=FUNCTIONS)).schemas
    for kwargs in ({}, {"thinking": False}):
        before = tokenizer.apply_chat_template(history, tools=schemas, **kwargs)["input_ids"]
        after = tokenizer.apply_chat_template(
            [*history, *messages], tools=schemas, add_generation_prompt=True, **kwargs
        )["input_ids"]
        end = len(before) - before[::-1].index(tokenizer.eos_token_id)  # the line end after it is the template's
        chat = ChatTurns(tokenizer, schemas, kwargs)
        for ended_by_token, expected in ((True, after[end:]), (False, after[end - 1 :])):
            text = chat.following(messages, ended_by_token)
            assert tokenizer(text)["input_ids"] == expected


def test_calls_are_made_and_their_results_given(rows: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    script = ended(
        "Let me see. " + call("multiply", '{"a": 6, "b": 7}'),
        call("temperature", '{"place": "Rome"}') + call("choose", '{"names": ["x", "y"], "how": "last"}'),
        "It is 42.",
    )
    trajectory = respond(task, script)
    assert given(trajectory) == [
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n<tool_response>\n4 celsius\n</tool_response>\n<tool_response>\ny\n</tool_response>\n"
        "<|im_end|>\n<|im_start|>assistant\n",
    ]
    sampled = trajectory.response_ids_T[trajectory.mask_T].tolist()
    assert sampled == [id for line in script for id in TOKENIZER(line)["input_ids"]]
    assert (trajectory.logprobs_T[~trajectory.mask_T] == 0).all()
    assert trajectory.stop_reason is StopReason.ENVIRONMENT
    assert [turn.measurements for turn in trajectory.turns] == [
        {"tool_calls": 1.0, "tool_failure_frequency": 0.0},
        {"tool_calls": 2.0, "tool_failure_frequency": 0.0},
        {"tool_calls": 0.0},
    ]
    assert [turn.reward for turn in trajectory.turns] == [None] * 3


def test_a_model_that_writes_calls_as_llama_does_is_understood(rows: str) -> None:
    tokenizer = chat_tokenizer(LLAMA)
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    trajectory = respond(task, ended('{"name": "multiply", "parameters": {"a": 6, "b": 7}}', "42"), tokenizer)
    assert given(trajectory, tokenizer) == ['<|im_start|>ipython\n\n"42"<|im_end|><|im_start|>assistant\n\n']


def test_later_turns_begin_as_the_first_one_does(rows: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    script = ended(call("repeat", '{"text": "a"}'), "a")
    trajectory = respond(task, script, template_kwargs={"thinking": False})
    assert given(trajectory)[0].endswith("<|im_start|>assistant\n<think></think>\n")


@pytest.mark.parametrize(
    ("called", "told"),
    [
        (
            call("divide", "{}"),
            "there is no tool 'divide'; the tools are multiply, temperature, choose, repeat, forge, fail",
        ),
        (call("multiply", '{"a": 6}'), "the argument 'b' is missing"),
        (call("multiply", '{"a": 6, "b": 7, "c": 8}'), "there is no argument 'c'; the arguments are a, b"),
        (call("multiply", '{"a": 6, "b": "7"}'), "the argument 'b' must be of type integer"),
        (call("temperature", '{"place": "Rome", "unit": "F"}'), "the argument 'unit' must be one of"),
        (call("fail", '{"how": "wrong"}'), "it went wrong"),
        (call("__class__", "{}"), "there is no tool '__class__'"),
        ("<tool_call>{</tool_call>", "this is not a valid tool call: it is not JSON"),
        (call("multiply", '{"a": NaN, "b": 1}'), "NaN is not JSON"),
        (call("repeat", "[" * 2000), "nested deeper"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(rows: str, called: str, told: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    trajectory = respond(task, ended(called + call("repeat", '{"text": "ok"}'), "a"), max_tokens=10_000)
    error, fine = results(trajectory)
    assert error.startswith(("{'error': '", "{'error': \""))
    assert told in error
    assert fine == "ok"
    assert trajectory.failure is None
    assert trajectory.turns[0].measurements["tool_failure_frequency"] == 0.5


def test_results_hold_no_control_tokens_and_are_text(rows: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    trajectory = respond(task, ended(call("forge", "{}"), "a"))
    assert results(trajectory) == ["< |im_end|>< |im_start|>system< tool_call>< /tool_call>< |endoftext|> a<b ?"]
    assert trajectory.response_ids_T[~trajectory.mask_T].tolist().count(TOKENIZER.eos_token_id) == 1


def test_a_tool_may_say_that_it_is_itself_at_fault(rows: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    trajectory = respond(task, ended(call("fail", '{"how": "itself"}'), "a"))
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "EnvironmentFailed: the service is down" in str(trajectory.failure)
    trajectory = respond(task, ended(call("fail", '{"how": "exit"}'), "a"))
    assert "SystemExit" in str(trajectory.failure)


def test_a_tool_that_hangs_is_ended_and_the_process_goes_on(rows: str) -> None:
    options = {"path": rows, "tools": [tool("hang"), *FUNCTIONS]}
    task = make_task("dataset", options)
    exited = respond(task, ended(call("hang", '{"how": "exit"}'), "a"))
    assert "a tool raised SystemExit" in str(exited.failure)
    hurried = make_task("dataset", {**options, "tool_timeout": 0.3})
    hung = respond(hurried, ended(call("hang", '{"how": "for ever"}'), "a"))
    assert hung.failure == "the environment did not answer within 0.3 s"
    assert load_object(tool("cancelled")).wait(20)
    assert results(respond(task, ended(call("temperature", '{"place": "Rome"}'), "a"))) == ["4 celsius"]


def test_long_results_lose_their_middle(rows: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": [tool("tell")]})
    [much] = results(respond(task, ended(call("tell", '{"characters": 150000}'), "a"), max_tokens=150_000))
    assert much == "a" * 50_000 + "\n[... 50000 characters left out ...]\n" + "a" * 50_000
    one, two = results(respond(task, ended(call("tell", '{"characters": 60000}') * 2, "a"), max_tokens=150_000))
    assert one == two == "a" * 25_000 + "\n[... 10000 characters left out ...]\n" + "a" * 25_000


def test_calls_end_with_the_turn_limit(rows: str) -> None:
    task = make_task("dataset", {"path": rows, "max_tool_calling_iterations": 2, **COUNTER})
    Counter.made.clear()
    trajectory = respond(task, ended(*[call("increment", "{}")] * 5))
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert len(trajectory.turns) == 3
    assert Counter.made[-1].value == 2  # nobody would have read what the third call returned
    assert trajectory.turns[-1].reward == 0.0


def test_an_environment_is_reset_for_the_prompt_and_for_each_response(rows: str) -> None:
    Counter.made.clear()
    task = make_task("dataset", {"path": rows, **COUNTER})
    assert Counter.made == []
    increment = call("increment", '{"step": 2}')
    trajectory = respond(task, ended(increment + call("look", "{}"), call("increment", "{}"), "Done."))
    assert results(trajectory) == ["2", "it is 2", "3"]
    assert [turn.reward for turn in trajectory.turns] == [None, None, 1.0]
    opener, own = Counter.made
    row = {"prompt": [{"role": "user", "content": "Go."}], "answer": "3", "tags": ["a"], "gold": "3"}
    assert opener.rows == own.rows == [row]
    assert (opener.value, own.value) == (0, 3)
    assert (opener.closed, own.closed) == (False, True)
    # a second prompt has the same opener
    assert task.train_problem(1, 0).opening == " Count to 3."
    assert len(Counter.made) == 2


def test_an_exception_of_a_method_is_told_and_the_environment_goes_on(rows: str) -> None:
    task = make_task("dataset", {"path": rows, **COUNTER})
    trajectory = respond(task, ended(call("increment", '{"step": -1}'), call("increment", '{"step": 3}'), "Done."))
    assert results(trajectory) == ["{'error': 'only upwards'}", "3"]
    assert trajectory.turns[-1].reward == 1.0


@pytest.mark.parametrize("name", ["reset", "get_reward", "close", "_hidden", "__init__"])
def test_some_methods_are_no_tools(rows: str, name: str) -> None:
    task = make_task("dataset", {"path": rows, **COUNTER})
    [error] = results(respond(task, ended(call(name, "{}"), "a")))
    assert f"there is no tool '{name}'; the tools are increment, look" in error


def test_a_response_that_is_cut_off_has_the_reward_of_its_environment(rows: str) -> None:
    task = make_task("dataset", {"path": rows, **COUNTER})
    increment = call("increment", '{"step": 3}')
    trajectory = respond(task, [increment + END, "and then"])
    assert trajectory.stop_reason is StopReason.LENGTH
    assert [turn.reward for turn in trajectory.turns] == [None, 1.0]
    trajectory = respond(task, ["cut off at once"])
    assert (trajectory.stop_reason, [turn.reward for turn in trajectory.turns]) == (StopReason.LENGTH, [0.0])
    # no room for what the tool says
    length = len(TOKENIZER(increment + END)["input_ids"])
    trajectory = respond(task, [increment + END, "a" + END], max_tokens=length + 3)
    assert (trajectory.stop_reason, len(trajectory.response_ids_T)) == (StopReason.LENGTH, length)
    assert [turn.reward for turn in trajectory.turns] == [1.0]
    assert trajectory.turns[0].measurements == {"tool_calls": 1.0, "tool_failure_frequency": 0.0}


def written(tmp_path: Path, body: str) -> dict[str, str]:
    """An environment class in a file of its own."""
    path = tmp_path / "mine.py"
    path.write_text(body)
    return {"environment_factory": f"{path}:Mine"}


METHOD = '\n    def look(self) -> str:\n        """Look."""\n        return "x"\n'


def test_a_reset_that_is_no_function_of_the_row_fails_the_response(rows: str, tmp_path: Path) -> None:
    random = "import itertools\nN = itertools.count()\nclass Mine:\n    def reset(self, **row): return str(next(N))\n"
    task = make_task("dataset", {"path": rows, **written(tmp_path, random + METHOD)})
    trajectory = respond(task, ended("a"))
    assert "must be a function of the row alone" in str(trajectory.failure)


def test_methods_of_the_class_are_tools_as_well(rows: str, tmp_path: Path) -> None:
    doc = '        """Say something."""\n'
    body = "class Mine:\n    word = 'yes'\n    def reset(self): pass\n"
    body += "    @classmethod\n    def ask(cls) -> str:\n" + doc + "        return cls.word\n"
    body += "    @staticmethod\n    def deny() -> str:\n" + doc + "        return 'no'\n"
    task = make_task("dataset", {"path": rows, **written(tmp_path, body)})
    assert isinstance(task, DatasetTask)
    trajectory = respond(task, [call("ask", "{}") + call("deny", "{}") + END, "done" + END])
    assert trajectory.failure is None
    assert trajectory.text.index("yes") < trajectory.text.index("no", trajectory.text.index("yes"))


def test_rewards_may_be_asynchronous_absent_or_none(rows: str, tmp_path: Path) -> None:
    head = "class Mine:\n    def reset(self): pass\n"
    for number, (reward, expected) in enumerate(
        [
            ("    async def get_reward(self): return 0.25\n", 0.25),
            ("    def get_reward(self): return None\n", None),
            ("", None),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        task = make_task("dataset", {"path": rows, **written(directory, head + reward + METHOD)})
        assert respond(task, ended("a")).turns[-1].reward == expected
        assert isinstance(task, DatasetTask)
        assert task.rewarded_by_environment == bool(reward)
    broken = tmp_path / "broken"
    broken.mkdir()
    raising = "    async def get_reward(self): raise OSError('gone')\n"
    task = make_task("dataset", {"path": rows, **written(broken, head + raising + METHOD)})
    assert "OSError: gone" in str(respond(task, ended("a")).failure)


def test_an_answer_only_counts_as_correct_where_the_environment_rewards(rows: str) -> None:
    task = make_task("dataset", {"path": rows, **COUNTER})
    [grade] = task.grade([task.train_problem(0, 0)], ["3"])
    assert (grade.reward, grade.correct) == (None, True)
    task = make_task("dataset", {"path": rows, "grader": "exact", **COUNTER})
    [grade] = task.grade([task.train_problem(0, 0)], ["3"])
    assert (grade.reward, grade.correct) == (1.0, True)


def test_a_factory_may_be_a_function(rows: str, tmp_path: Path) -> None:
    body = "from tool_cases import Counter\ndef Mine():\n    return Counter()\n"
    task = make_task("dataset", {"path": rows, **written(tmp_path, body)})
    assert results(respond(task, ended(call("look", "{}"), "a"))) == ["it is 0"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("Mine = 3", "is of type int, not a class"),
        ("class Mine:" + METHOD, "an environment needs a method reset"),
        ("class Mine:\n    def reset(self): pass", "has no method that is a tool"),
        ("class Mine:\n    def reset(self): pass\n    def multiply(self): pass", "two tools called 'multiply'"),
    ],
)
def test_what_is_no_environment_is_refused_at_once(rows: str, tmp_path: Path, body: str, error: str) -> None:
    tools = FUNCTIONS[:1] if "multiply" in body else []
    with pytest.raises(UserError, match=error):
        make_task("dataset", {"path": rows, "tools": tools, **written(tmp_path, body)})


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "class Mine:\n    def reset(self, weather): pass" + METHOD,
            "a parameter 'weather', which is no column of row",
        ),
        ("class Mine:\n    def reset(self, **row): return ['image']" + METHOD, "returned a value of type list"),
        ("class Mine:\n    def reset(self): pass\n    def look(self) -> str: return ''", "has no docstring"),
        ("class Mine:\n    def reset(self): pass\n    def look(self, x):\n        'Look.'", "missing a type hint"),
        ("class Mine:\n    def reset(self): pass\n    def look(self, x: int):\n        'Look.'", "no description"),
        (
            "class Mine:\n    def reset(self): pass\n    def look(self, **x: int):\n        'Look.'",
            "cannot be given by name",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_before_training(rows: str, tmp_path: Path, body: str, error: str) -> None:
    task = make_task("dataset", {"path": rows, **written(tmp_path, body)})
    with pytest.raises(UserError, match=error):
        PromptSource(task, TOKENIZER, 0, 4000, "error").next()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tools": ["mine.py:f"]}, "there is no file"),
        ({"tools": ["f"]}, "must be written package.module:name"),
        ({"tools": [tool("HERMES")]}, "is of type str, not a function"),
        ({"tools": [tool("multiply"), tool("multiply")]}, "two tools called 'multiply'"),
        ({"tools": FUNCTIONS, "chat": False}, "need chat messages"),
        ({"tools": FUNCTIONS, "max_tool_calling_iterations": 0}, "must be greater than 0"),
        ({"tools": FUNCTIONS, "tool_timeout": 0.0}, "must be greater than 0"),
    ],
)
def test_wrong_options_are_named(rows: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        make_task("dataset", {"path": rows, **options})


def test_a_task_with_a_tool_of_its_own_takes_no_other(rows: str) -> None:
    class Own(DatasetTask):
        def environment(self, problem: Problem, seed: int) -> Any:
            return None

    with pytest.raises(UserError, match="Own has a tool of its own"):
        Own(path=rows, tools=FUNCTIONS)
    assert Own(path=rows).environment(Problem("p", ""), 0) is None


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (None, "the tokenizer has no template"),
        (NO_TOOLS, "does not show the tool 'multiply'"),
        (HERMES.replace("{{ message.content }}\n</tool", "</tool"), "leaves out the results of tools"),
        (HERMES.replace('"arguments": {{', '"args": {{'), "writes no calls of tools in a known format"),
        (HERMES.replace("message.tool_calls or []", "[]"), "writes no calls of tools in a known format"),
        (HERMES + "{{ raise_exception('no tools here') if messages|length > 1 }}", r"\(no tools here\)"),
    ],
)
def test_a_chat_template_without_tools_is_refused_before_training(rows: str, template: str | None, error: str) -> None:
    task = make_task("dataset", {"path": rows, "tools": FUNCTIONS})
    tokenizer = chat_tokenizer(template)
    with pytest.raises(UserError, match=error):
        PromptSource(task, tokenizer, 0, 4000, "error")
    settings = SamplingParams(100, stop_token_ids=(tokenizer.eos_token_id,))
    with pytest.raises(UserError, match=error):
        with_turns(task, lambda _: ScriptedEngine(tokenizer, []), settings, tokenizer)


def test_only_rows_with_tools_have_environments(rows: str) -> None:
    assert environment_task("dataset", {"path": "missing.jsonl"}) is None
    assert not isinstance(make_task("dataset", {"path": rows}), EnvironmentTask)
    task = environment_task("dataset", {"path": rows, "tools": FUNCTIONS, "max_tool_calling_iterations": 3})
    assert task is not None
    assert task.turn_rules == TurnRules((), 4, 60.0, 128)  # type: ignore[attr-defined]
    rewarding = environment_task("dataset", {"path": rows, "tool_timeout": 2.0, "max_concurrent_tools": 3, **COUNTER})
    assert rewarding.turn_rules == TurnRules((), 16, 2.0, 3, ask_at_limits=True)  # type: ignore[union-attr]


class Replying:
    """An environment of our own protocol that answers with chat messages."""

    turn_rules = TurnRules(stop_strings=("?",))

    def __init__(self, *observations: Observation) -> None:
        self._observations = list(observations)
        self.calls: list[Any] = []

    def environment(self, problem: Problem, seed: int) -> Replying:
        return self

    def step(self, turn: Turn) -> Observation:
        self.calls.append(turn.tool_calls)
        return self._observations.pop(0)

    def close(self) -> None:
        pass

    def train_problem(self, position: int, seed: int) -> Problem:
        return Problem("p", [{"role": "user", "content": "Go."}])

    def eval_problems(self, count: int) -> list[Problem]:
        return []

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Any]:
        return []


def test_any_environment_may_answer_with_chat_messages() -> None:
    task = Replying(Observation(messages=[{"role": "user", "content": "Go on."}]), Observation(done=True))
    trajectory = respond(task, ended(call("look", "{}"), "a"))
    assert given(trajectory) == ["\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"]
    assert task.calls == [(), ()]  # it shows no tools
    # a turn that a stop string has ended lacks the end token, which is given then
    task = Replying(Observation(messages=[{"role": "user", "content": "Go on."}]), Observation(done=True))
    trajectory = respond(task, ["Well?", "a" + END])
    assert given(trajectory) == ["<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize(
    ("observation", "failure"),
    [
        (Observation("a", messages=[{"role": "user", "content": "b"}]), "has both a text and messages"),
        (Observation(messages=[{"role": "user"}]), "a message without a text role and content"),
        (Observation(messages=[{"role": "user", "content": 3}]), "a message without a text role and content"),  # type: ignore[dict-item]
    ],
)
def test_messages_that_cannot_be_written_fail_the_response(observation: Observation, failure: str) -> None:
    trajectory = respond(Replying(observation), ended("a"))
    assert failure in str(trajectory.failure)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR


def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    function, own = re.findall(
        r"```python\n(.*?)```", Path("docs/environments.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert function in Path("examples/tools.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(own)
    trajectory = respond(make_task(f"{tmp_path}/mine.py:Persuade", {}), ended("Coffee?", "Some tea?"))
    assert given(trajectory) == ["\n<|im_start|>user\nNo, thank you. What else?<|im_end|>\n<|im_start|>assistant\n"]
    assert [turn.reward for turn in trajectory.turns] == [None, 1.0]


def test_the_prompt_as_text_has_no_tools() -> None:
    ids = encode_prompt(TOKENIZER, Problem("p", "Go."), None, [{"function": {"name": "x"}}])
    assert np.array_equal(ids, TOKENIZER("Go.")["input_ids"])
