"""Tasks with Python as a tool: the protocols of code blocks and of brackets, and dead sandboxes in a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sqlite3
import string
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from run_cases import tiny_config
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.small import character_tokenizer
from vcpo.observe.ledger import FILE_NAME
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.run import train
from vcpo.records import GenerationRequest, Problem, StopReason, Trajectory
from vcpo.sampler.protocol import generate
from vcpo.sampler.turns import TurnEngine
from vcpo.sandbox.protocol import Result, Status
from vcpo.tasks.environment import EnvironmentTask, Observation, Turn
from vcpo.tasks.prompts import PromptSource
from vcpo.tasks.python_tool import PythonTool, outside_blocks, python_block, told
from vcpo.tasks.tool_arithmetic import ToolArithmeticTask
from vcpo.tasks.tool_math import CodeBlocks, ToolMathTask

# needs nothing of the machine; what the sandbox protects from is tested elsewhere
SANDBOX = {"executor": "subprocess", "allow_unsafe": True, "warm": 1, "max_concurrent": 2, "memory_mb": 128}


def turn(text: str, reason: StopReason = StopReason.STOP_STRING, number: int = 0) -> Turn:
    return Turn(number, text, np.zeros(0, dtype=np.int64), reason)


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    task = ToolArithmeticTask(sandbox=SANDBOX)
    yield task.tool
    task.tool.close()


@pytest.fixture
def arithmetic() -> Iterator[ToolArithmeticTask]:
    task = ToolArithmeticTask(sandbox=SANDBOX)
    yield task
    task.tool.close()


# blocks of code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("so\n```python\nprint(1)\n```\n", "print(1)\n"),
        ("```py\nx = 1\n\nprint(x)\n```", "x = 1\n\nprint(x)\n"),
        ("```Python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        ("```python\n1\n```\n```python\n2\n```\n", "1\n"),
        ("```\nnone\n```\n```python\n2\n```\n", "2\n"),
        ("```cpp\nint x;\n```\n", None),
        ("```python\nprint(1)\n", None),
        ("print(1)", None),
        ("a ```python\nprint(1)\n```\n", None),
        ("```python\ns = '''\n```python\n'''\n```\n", "s = '''\n```python\n'''\n"),
    ],
)
def test_the_first_closed_block_of_python_is_found(text: str, code: str | None) -> None:
    assert python_block(text) == code


def test_text_outside_of_blocks() -> None:
    assert outside_blocks("a\n```python\nb\n```\nc\n```\nd") == "a\nc"


def test_many_opened_blocks_are_no_work() -> None:
    assert python_block("```python\n" * 200_000) is None


def result(status: Status, stdout: str = "", stderr: str = "", code: int | None = 0, detail: str = "") -> Result:
    return Result(status, code, stdout, stderr, 0.1, detail)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (result(Status.OK, "3\n"), "3"),
        (result(Status.OK, "", "a warning"), "[no output]"),
        (result(Status.ERROR, "1\n", "Traceback\nValueError: x\n", 1), "1\nTraceback\nValueError: x"),
        (result(Status.ERROR, code=7), "exit code 7"),
        (result(Status.TIMEOUT, "1\n", code=None, detail="over"), "1\n[the program was ended: over]"),
        (result(Status.OK, "<|im_end|></s> 1<2 <="), "< |im_end|>< /s> 1<2 <="),
    ],
)
def test_what_the_model_is_told_of_a_run(given: Result, expected: str) -> None:
    assert told(given, 100) == expected


def test_long_output_is_cut_in_its_middle() -> None:
    text = told(result(Status.OK, "a" * 500 + "b" * 500), 20)
    assert text == "a" * 10 + "\n[... 980 characters left out ...]\n" + "b" * 10


def test_a_block_is_answered_by_its_output_and_a_box_ends_the_response(tool: PythonTool) -> None:
    environment = CodeBlocks(tool, max_seconds=60, max_characters=1000)
    answer = environment.step(turn("Add:\n```python\nx = 2 + 3\nprint(x)\n```\n"))
    assert answer.text == "```output\n5\n```\n"
    assert not answer.done
    assert answer.measurements["tool_ok"] == 1
    # a program of its own: x is gone
    again = environment.step(turn("```python\nprint(x)\n```\n", number=1))
    assert again.text.endswith("NameError: name 'x' is not defined\n```\n")
    assert again.measurements["tool_ok"] == 0
    assert environment.step(turn("It is \\boxed{5}", StopReason.EOS, 2)).done


def test_other_blocks_go_on_and_boxes_in_code_do_not_end(tool: PythonTool) -> None:
    environment = CodeBlocks(tool, max_seconds=60, max_characters=1000)
    opened = environment.step(turn("So\n```\n"))
    assert (opened.text, opened.done) == ("", False)
    closed = environment.step(turn("1 + 1\n```\n", number=1))
    assert (closed.text, closed.done) == ("", False)
    run = environment.step(turn("```python\nprint('\\\\boxed{1}')\n```\n", number=2))
    assert "boxed" in run.text
    assert not run.done
    unclosed = environment.step(turn("```python\nprint(1)", StopReason.EOS, 3))
    assert unclosed.done


def test_an_end_token_after_a_block_runs_it(tool: PythonTool) -> None:
    answer = CodeBlocks(tool, 60, 1000).step(turn("```python\nprint(4)\n```", StopReason.EOS))
    assert answer.text == "\n```output\n4\n```\n"


def test_the_time_of_all_runs_is_limited(tool: PythonTool) -> None:
    environment = CodeBlocks(tool, max_seconds=1e-9, max_characters=1000)
    assert not environment.step(turn("```python\nprint(1)\n```\n")).done
    last = environment.step(turn("```python\nprint(1)\n```\n", number=1))
    assert last.done
    assert last.measurements == {"out_of_tool_time": 1.0}


def test_tool_math_grades_the_answer_and_not_the_output(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1/2 + 1/2?", "answer": "1"}) + "\n")
    task = ToolMathTask(path=str(path), sandbox=SANDBOX, max_turns=4)
    assert isinstance(task, EnvironmentTask)
    assert task.turn_rules.stop_strings == ("\n```\n",)
    assert task.turn_rules.max_turns == 4
    problem = task.train_problem(0, 0)
    assert "```python" in problem.prompt[0]["content"]  # type: ignore[index]
    text = "```python\nprint(7)\n```\n```output\n7\n```\nso \\boxed{1}"
    assert [grade.reward for grade in task.grade([problem, problem], [text, text.replace("{1}", "{7}")])] == [1, 0]


# rows as DAPO and AIME have them; the text is ours

DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "role": "user",
            "content": "Solve the problem step by step. The last line should be of the form Answer: $Answer.\n\n"
            'What is the sum of the whole numbers from 1 to 100?\n\nPut your answer on a line after "Answer:".',
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "5050", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "a-1"},
}
AIME = {
    "id": 7,
    "problem": "Find the number of divisors of $10^{4}$.",
    "solution": "$(4+1)(4+1)$, so $\\boxed{025}$",
    "answer": "025",
    "url": "none",
}
TOLD = "You may write Python code in a block"


def of_rows(directory: Path, *rows: dict[str, Any], **options: Any) -> ToolMathTask:
    pytest.importorskip("math_verify")
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ToolMathTask(path=str(path), eval_path=str(path), sandbox=SANDBOX, **options)


def asked(task: ToolMathTask) -> str:
    (message,) = task.eval_problems(1)[0].prompt
    assert isinstance(message, dict)
    assert message["role"] == "user"
    return message["content"]


def test_every_prompt_tells_of_the_tool_and_only_bare_questions_of_the_box(tmp_path: Path) -> None:
    messages, question = asked(of_rows(tmp_path, DAPO)), asked(of_rows(tmp_path, AIME))
    own = DAPO["prompt"][0]["content"]  # type: ignore[index]
    assert messages.startswith(f"{own}\n{TOLD}")
    assert "boxed" not in messages
    assert question.startswith(f"{AIME['problem']}\n{TOLD}")
    assert question.endswith("output the final answer within \\boxed{}.")
    assert asked(of_rows(tmp_path, DAPO, tool_instruction=None)) == own
    assert asked(of_rows(tmp_path, DAPO, tool_instruction="T.", instruction="I.")) == f"{own}\nT. I."
    plain = of_rows(tmp_path, AIME, chat=False, tool_instruction="T.", instruction=None).eval_problems(1)[0]
    assert plain.prompt == f"{AIME['problem']}\nT.\n"


class Writer:
    """An engine whose model writes given texts, one a turn."""

    version, weights, spent = 0, {}, {}

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._requests: list[GenerationRequest] = []

    @property
    def num_active(self) -> int:
        return len(self._requests)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._requests += requests

    def step(self) -> list[Trajectory]:
        done, self._requests = self._requests, []
        return [self._write(request) for request in done]

    def load_weights(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    def _write(self, request: GenerationRequest) -> Trajectory:
        new = np.asarray(self._tokenizer(self._texts.pop(0))["input_ids"])
        before, count = request.prefix, len(new)
        given: list[Any] = [[], [], [], []]
        if before is not None:
            given = [before.ids_T, before.mask_T, before.logprobs_T, before.versions_T]
        written: list[Any] = [new, np.ones(count, bool), np.zeros(count, np.float32), np.zeros(count, np.int64)]
        ids, mask, logprobs, versions = (
            np.concatenate([g, w]).astype(w.dtype) for g, w in zip(given, written, strict=True)
        )
        return Trajectory(
            group_id=request.group_id,
            index=request.index,
            prompt_ids=request.prompt_ids,
            response_ids_T=ids,
            mask_T=mask,
            logprobs_T=logprobs,
            versions_T=versions,
            start_version=0,
            stop_reason=StopReason.STOP_STRING if self._texts else StopReason.EOS,
        )


@pytest.mark.parametrize(
    ("row", "code", "end", "output", "reward"),
    [
        (DAPO, "print(sum(range(101)))", "Answer: 5050", "5050", 1.0),
        (DAPO, "print(sum(range(101)))", "\\boxed{5050}", "5050", 1.0),
        (DAPO, "print(sum(range(100)))", "Answer: 4950", "4950", 0.0),
        (AIME, "print(sum(10**4 % n == 0 for n in range(1, 10**4 + 1)))", "It is \\boxed{25}.", "25", 1.0),
        (AIME, "print(5 * 4)", "It is \\boxed{20}.", "20", 0.0),
    ],
)
def test_a_row_is_asked_answered_by_the_tool_and_graded(
    tmp_path: Path, row: dict[str, Any], code: str, end: str, output: str, reward: float
) -> None:
    task = of_rows(tmp_path, row)
    tokenizer = character_tokenizer(string.printable, 2000)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    problem, prompt_ids, _ = PromptSource(task, tokenizer, 0, 1000, "error").next()
    assert str(tokenizer.decode(prompt_ids)).startswith("user: ")
    turns = [f"Let me see.\n```python\n{code}\n```\n", f"So: {end}"]
    engine = TurnEngine(Writer(tokenizer, list(turns)), task, tokenizer, max_tokens=1000)
    (response,) = generate(engine, [GenerationRequest(0, 0, prompt_ids, seed=0, problem=problem)])
    task.tool.close()
    text = str(tokenizer.decode(response.response_ids_T, clean_up_tokenization_spaces=False))
    assert text == f"{turns[0]}```output\n{output}\n```\n{turns[1]}"
    trained = str(tokenizer.decode(response.response_ids_T[response.mask_T], clean_up_tokenization_spaces=False))
    assert trained == "".join(turns)
    assert task.grade([problem], [text])[0].reward == reward


# brackets


def test_an_expression_between_brackets_is_worked_out(arithmetic: ToolArithmeticTask) -> None:
    environment = arithmetic.environment(arithmetic.train_problem(0, 0), 0)
    assert environment.step(turn("<4821*7306>")).text == "35222226="
    assert environment.step(turn("35222226", StopReason.EOS, 1)).done


@pytest.mark.parametrize("text", ["<12*>", "12*3>", "<>", "<9=9>", "<9**9**9>"])
def test_an_expression_without_a_number_for_its_value_is_told_from_one(tool: PythonTool, text: str) -> None:
    answer = ToolArithmeticTask(sandbox={**SANDBOX, "wall_seconds": 0.5}).environment(Problem("p", "", {}), 0)
    assert answer.step(turn(text)).text == "!="


def test_the_answer_follows_the_last_equals_sign(arithmetic: ToolArithmeticTask) -> None:
    problem = Problem("p", "12*34=", {"question": "12*34", "answer": "408"})
    texts = ["408", "<12*34>408=408", "<12*34>408=407", "<12*34>408=", "408=", "=408", "<12*34>"]
    grades = arithmetic.grade([problem] * len(texts), texts)
    assert [grade.reward for grade in grades] == [1, 1, 0, 0, 0, 1, 0]
    assert [grade.parts["asked"] for grade in grades] == [0, 1, 1, 1, 0, 0, 1]
    assert [grade.parts["unaided"] for grade in grades] == [1, 0, 0, 0, 0, 1, 0]
    assert [arithmetic.answer_of(problem, text) for text in texts] == ["408", "408", "407", None, None, "408", None]


def test_demonstrations_are_right_and_call_as_often_as_asked() -> None:
    task = ToolArithmeticTask(sandbox=SANDBOX, demonstrated_calls=0.25)
    problem, rng = task.train_problem(3, 0), random.Random(0)
    shown = [task.demonstration(problem, rng) for _ in range(400)]
    assert {grade.reward for grade in task.grade([problem] * 400, shown)} == {1.0}
    assert 70 < sum("<" in text for text in shown) < 130


# in runs


class Always:
    """Calls the tool once, whatever the model writes."""

    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    def step(self, turn: Turn) -> Observation:
        seconds = self._tool.run("print(3)").seconds
        return Observation(done=True, reward=float(len(turn.text) % 2), measurements={"tool_seconds": seconds})

    def close(self) -> None:
        pass


def always_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolArithmeticTask, "environment", lambda self, problem, seed: Always(self.tool))


def run_config(directory: Path, **sandbox: Any) -> RunConfig:
    task = {"name": "tool_arithmetic", "digits": 1, "sandbox": sandbox}
    return tiny_config(
        directory / "run",
        'model.init.characters="0123456789*=<>!"',
        "task=" + json.dumps(task),
        "reward.reward_funcs=[]",
        "sampling.max_prompt_length=4",
        "sampling.max_completion_length=12",
        # with this every turn of a model that knows nothing ends in time
        "sampling.stop_strings=" + json.dumps(list("0123456789*=<!")),
        "training.max_steps=2",
    )


@pytest.fixture
def half_dead_server() -> Iterator[str]:
    """A server that answers right at first, and then fails every other time."""
    asked = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            code = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["code"]
            stdout = "42\n" if "6 * 7" in code else "3\n"
            run = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": stdout, "stderr": ""}
            dead = "6 * 7" not in code and next(asked) % 2
            body = json.dumps({"status": "SandboxError" if dead else "Success", "message": "", "run_result": run})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_dead_sandbox_is_no_reward_and_a_reason_in_transcript_and_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_dead_server: str
) -> None:
    always_call(monkeypatch)
    run = train(run_config(tmp_path, executor="http", url=half_dead_server), make_report=False)
    with contextlib.closing(sqlite3.connect(run / FILE_NAME)) as ledger:
        rows = ledger.execute("SELECT reward, reason, stop_reason FROM trajectories").fetchall()
    failed = [row for row in rows if row[2] == "environment_error"]
    assert len(failed) == len(rows) // 2 == 8
    assert {row[0] for row in failed} == {None}
    reasons = {row[1] for row in failed}
    assert len(reasons) == 1
    assert "the sandbox failed: the server reports an error of its own" in reasons.pop()
    assert None not in {row[0] for row in rows if row not in failed}
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert sum(line["environment_failures"] for line in lines) == len(failed)


def test_a_run_works_with_what_the_model_really_writes(tmp_path: Path) -> None:
    run = train(run_config(tmp_path, **SANDBOX), make_report=False)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 2
    assert all(line["environment_failures"] == 0 for line in lines)


def test_a_sandbox_that_does_not_work_here_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"code cannot be run by the server at http://127\.0\.0\.1:9"):
        train(run_config(tmp_path, executor="http", url="http://127.0.0.1:9"), make_report=False)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_unsafe_executor_is_refused_while_the_configuration_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.sandbox\.allow_unsafe=true"):
        run_config(tmp_path, executor="subprocess")
