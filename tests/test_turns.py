"""Responses of several turns: what environments do, and how long they take, changes nothing about the sampling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from vcpo.errors import UserError
from vcpo.models.attention import ATTENTION
from vcpo.models.small import character_tokenizer
from vcpo.records import GenerationRequest, Grade, Problem, SamplingParams, StopReason, Trajectory
from vcpo.sampler.drawing import uniforms
from vcpo.sampler.engines import make_engine
from vcpo.sampler.environment_steps import EnvironmentSteps
from vcpo.sampler.protocol import Engine, generate
from vcpo.sampler.torch_engine import TorchEngine
from vcpo.sampler.turns import MAX_CHARACTERS, TurnEngine
from vcpo.tasks.environment import Observation, Turn, TurnRules

torch.set_num_threads(1)

CHARACTERS = "0123456789=?>abcdefgh"
END = 1
STOPS = ("?", "a", "bc", "5", "7")  # often enough written by a random model
TOKENIZER = character_tokenizer(CHARACTERS, 200)
LIMIT = 40
SECONDS = 20.0  # after which a test that waits for a thread fails


def make(seed: int = 0, attn: str = ATTENTION) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=200,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM._from_config(config, attn_implementation=attn).eval()


def echo(problem: Problem, turn: Turn) -> Observation:
    """What the tests' environments say unless told otherwise: different for every problem and turn."""
    return Observation(f"={problem.id}{turn.number}>", done=len(turn.text) > 12, reward=0.5)


@dataclass
class Scripted:
    """An environment that answers by a function, and says when it has been closed."""

    problem: Problem
    answer: Callable[[Problem, Turn], Any]
    closed: threading.Event

    def step(self, turn: Turn) -> Observation:
        assert not self.closed.is_set()
        return self.answer(self.problem, turn)  # type: ignore[no-any-return]

    def close(self) -> None:
        assert not self.closed.is_set()
        self.closed.set()


class ScriptedTask:
    """A task whose environments answer by ``answer``. made: what was made, by problem id."""

    def __init__(self, answer: Callable[[Problem, Turn], Any] = echo, **rules: Any) -> None:
        self.answer = answer
        self.turn_rules = TurnRules(**{"stop_strings": STOPS, "max_turns": 4, **rules})
        self.made: dict[str, Scripted] = {}

    def environment(self, problem: Problem, seed: int) -> Scripted:
        made = self.made[problem.id] = Scripted(problem, self.answer, threading.Event())
        return made

    def train_problem(self, position: int, seed: int) -> Problem:
        return Problem(str(position), "1=")

    def eval_problems(self, count: int) -> list[Problem]:
        return [Problem(f"e{i}", "1=") for i in range(count)]

    def grade(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Grade]:
        return [Grade(0.0) for _ in problems]


def requests_of(count: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(
            g, 0, rng.integers(2, len(TOKENIZER), 3 + g % 4), seed=70 + g, problem=Problem(str(g % 10), "")
        )
        for g in range(count)
    ]


def engine_of(task: Any, model: PreTrainedModel | None = None, slots: int = 3, in_rounds: bool = False) -> Engine:
    params = SamplingParams(max_tokens=LIMIT, stop_token_ids=(END,))
    return make_engine(task, model or make(), params, slots, 150, TOKENIZER, in_rounds=in_rounds)


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Trajectory]:
    return generate(engine, requests)


def assert_same(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.name == b.name
        assert a.response_ids_T.tolist() == b.response_ids_T.tolist()
        assert a.mask_T.tolist() == b.mask_T.tolist()
        np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=1e-5)
        assert (a.stop_reason, a.text, a.failure) == (b.stop_reason, b.text, b.failure)
        assert [replace(t, seconds=0.0) for t in a.turns] == [replace(t, seconds=0.0) for t in b.turns]


@torch.no_grad()
def next_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1].double().log_softmax(-1).numpy()


def slow_response(model: PreTrainedModel, request: GenerationRequest, max_turns: int) -> dict[str, Any]:
    """The same by hand: one whole forward pass of plain attention per token, turn after turn, in one loop."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    spans = []
    assert request.problem is not None
    while True:
        start, reason = len(ids), StopReason.LENGTH
        while len(ids) < LIMIT and reason is StopReason.LENGTH:
            distribution = next_logprobs(model, [*request.prompt_ids.tolist(), *ids])
            [u] = uniforms(np.array([request.seed], dtype=np.uint64), np.array([len(ids)]))
            token = int(np.searchsorted(np.exp(distribution).cumsum(), u, side="right"))
            ids.append(token)
            mask.append(True)
            logprobs.append(float(distribution[token]))
            if token == END:
                reason = StopReason.EOS
            elif any(stop in TOKENIZER.decode(ids[start:]) for stop in STOPS):
                reason = StopReason.STOP_STRING
        spans.append((start, len(ids)))
        if reason is StopReason.LENGTH:
            break
        text = TOKENIZER.decode(ids[start:], skip_special_tokens=True)
        answer = echo(request.problem, Turn(len(spans) - 1, text, np.array(ids[start:]), reason))
        if answer.done or len(spans) == max_turns:
            reason = StopReason.ENVIRONMENT if answer.done else StopReason.TURN_LIMIT
            break
        given = [CHARACTERS.index(c) + 2 for c in answer.text]
        if len(ids) + len(given) >= LIMIT:
            reason = StopReason.LENGTH
            break
        ids += given
        mask += [False] * len(given)
        logprobs += [0.0] * len(given)
    return {"ids": ids, "mask": mask, "logprobs": logprobs, "spans": spans, "reason": reason}


def test_a_response_is_what_sampling_it_turn_by_turn_gives() -> None:
    task = ScriptedTask()
    requests = requests_of(14)
    reference = make(attn="sdpa")
    reasons = set()
    for request, t in zip(requests, run(engine_of(task), requests), strict=True):
        slow = slow_response(reference, request, 4)
        assert t.response_ids_T.tolist() == slow["ids"]
        assert t.mask_T.tolist() == slow["mask"]
        np.testing.assert_allclose(t.logprobs_T, slow["logprobs"], atol=1e-5)
        assert [(turn.start, turn.end) for turn in t.turns] == slow["spans"]
        assert t.stop_reason is slow["reason"]
        # the reward of every turn that the environment has seen
        seen = len(t.turns) - (t.stop_reason is StopReason.LENGTH and len(t.response_ids_T) == LIMIT)
        assert [turn.reward for turn in t.turns] == [0.5] * seen + [None] * (len(t.turns) - seen)
        shown = [CHARACTERS[i - 2] for i in t.response_ids_T.tolist() if i > 1]
        assert t.text == "".join(shown)
        assert t.mask_T[-1]
        assert t.failure is None
        reasons.add(t.stop_reason)
    assert reasons >= {StopReason.ENVIRONMENT, StopReason.TURN_LIMIT}


def gated(task_of: Callable[[Callable[[Problem, Turn], Observation]], ScriptedTask]) -> tuple[ScriptedTask, Any, Any]:
    """A task whose environments wait for a gate of their problem; the gates; the problems that are waiting."""
    gates = {str(i): threading.Semaphore(0) for i in range(10)}
    arrived: dict[str, threading.Semaphore] = {str(i): threading.Semaphore(0) for i in range(10)}

    def answer(problem: Problem, turn: Turn) -> Observation:
        arrived[problem.id].release()
        assert gates[problem.id].acquire(timeout=SECONDS)
        return echo(problem, turn)

    return task_of(answer), gates, arrived


def test_neither_the_order_nor_the_number_of_environments_at_work_changes_anything() -> None:
    requests = requests_of(8)
    expected = run(engine_of(ScriptedTask(), slots=8), requests)
    assert max(len(t.turns) for t in expected) > 2
    assert_same(run(engine_of(ScriptedTask(max_concurrent=1), slots=2), requests), expected)
    assert_same(run(engine_of(ScriptedTask(), in_rounds=True), requests), expected)
    # the last one is always answered first
    task, gates, arrived = gated(ScriptedTask)
    engine = engine_of(task, slots=8)
    engine.submit(requests)
    finished: list[Trajectory] = []
    while engine.num_active:
        finished += engine.step()
        for number in sorted(gates, reverse=True):
            if arrived[number].acquire(blocking=False):
                gates[number].release()
                break
    assert_same(sorted(finished, key=lambda t: t.group_id), expected)


def test_a_slow_environment_keeps_nobody_else_waiting() -> None:
    task, gates, arrived = gated(ScriptedTask)
    slow, *others = requests_of(6)
    for _ in range(20):
        for request in others:
            gates[request.problem.id].release()  # type: ignore[union-attr]
    engine = engine_of(task, slots=1)  # the slow one must not keep its slot either
    engine.submit([slow, *others])
    finished: list[Trajectory] = []
    while engine.num_active > 1:
        finished += engine.step()
    assert sorted(t.group_id for t in finished) == [1, 2, 3, 4, 5]
    assert arrived["0"].acquire(timeout=SECONDS)
    # all that is left waits: steps return soon, with nothing, and lose nothing
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert engine.num_active == 1
    for _ in range(20):
        gates["0"].release()
    while engine.num_active:
        finished += engine.step()
    expected = run(engine_of(ScriptedTask()), [slow, *others])
    assert_same(sorted(finished, key=lambda t: t.group_id), expected)


def test_requests_that_come_while_everything_waits_are_decoded() -> None:
    task, gates, _ = gated(ScriptedTask)
    first, second = requests_of(2)
    for _ in range(20):
        gates["1"].release()
    engine = engine_of(task)
    engine.submit([first])
    for _ in range(30):
        assert engine.step() == []
    engine.submit([second])
    finished: list[Trajectory] = []
    while not finished:
        finished = engine.step()
    assert [t.group_id for t in finished] == [1]
    for _ in range(20):
        gates["0"].release()
    while engine.num_active:
        engine.step()


def first_turn_says(what: Callable[[], Any]) -> Callable[[Problem, Turn], Any]:
    """Problem 0 goes wrong; the others are answered as always."""
    return lambda problem, turn: what() if problem.id == "0" else echo(problem, turn)


def explode() -> Observation:
    raise LookupError("no such tool")


def leave() -> Observation:
    raise SystemExit(3)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (explode, r"the environment raised LookupError: no such tool \(.*test_turns.py, line \d+\)"),
    "exits": (leave, "the environment raised SystemExit: 3"),
    "nothing": (lambda: None, "returned a value of type NoneType, not an Observation"),
    "bytes": (lambda: Observation(b"1"), "a text of type bytes"),  # type: ignore[arg-type]
    "foreign": (lambda: Observation("1 é"), "the tokenizer has no token for ' ', 'é'"),
    "surrogate": (lambda: Observation("\ud800"), "the observation is not usable"),
    "huge": (lambda: Observation("1" * (MAX_CHARACTERS + 1)), "has 200001 characters"),
    "nan reward": (lambda: Observation("1", reward=float("nan")), "reward = nan, which is not a finite number"),
    "text reward": (lambda: Observation("1", reward="1"), "reward = '1', which is not"),  # type: ignore[arg-type]
    "measurement": (lambda: Observation("1", measurements={"rows": None}), "rows = None"),  # type: ignore[dict-item]
    "measurements": (lambda: Observation("1", measurements=[1]), "type list, not a mapping"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("what", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_an_environment_that_fails_ends_its_own_response_only(what: Callable[[], Any], sentence: str) -> None:
    requests = requests_of(5)
    expected = run(engine_of(ScriptedTask()), requests)
    assert expected[0].stop_reason is not StopReason.ENVIRONMENT_ERROR
    task = ScriptedTask(first_turn_says(what))
    failed, *others = run(engine_of(task), requests)
    assert_same(others, expected[1:])
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(failed.failure)
    [turn] = failed.turns
    assert (turn.start, turn.end, turn.reward) == (0, len(failed.response_ids_T), None)
    assert failed.response_ids_T.tolist() == expected[0].response_ids_T[: turn.end].tolist()
    assert task.made["0"].closed.wait(SECONDS)


def test_an_environment_that_cannot_be_made_ends_its_response() -> None:
    class Unmakeable(ScriptedTask):
        def environment(self, problem: Problem, seed: int) -> Scripted:
            if problem.id == "1":
                raise OSError("no sandbox")
            return super().environment(problem, seed)

    trajectories = run(engine_of(Unmakeable()), requests_of(3))
    assert [t.stop_reason is StopReason.ENVIRONMENT_ERROR for t in trajectories] == [False, True, False]
    assert "raised OSError: no sandbox" in str(trajectories[1].failure)


def test_an_environment_that_hangs_is_given_up_after_its_time_and_closed() -> None:
    now = [0.0]
    task, gates, arrived = gated(lambda answer: ScriptedTask(answer, step_timeout=10.0))
    inner = TorchEngine(make(), SamplingParams(LIMIT, stop_token_ids=(END,), stop_strings=STOPS), 2, 150, TOKENIZER)
    engine = TurnEngine(inner, task, TOKENIZER, LIMIT, clock=lambda: now[0])
    engine.submit(requests_of(1))
    while not arrived["0"].acquire(blocking=False):
        assert engine.step() == []
    now[0] = 10.0
    assert engine.step() == []
    now[0] = 10.5
    [failed] = engine.step()
    assert engine.num_active == 0
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert failed.failure == "the environment did not answer within 10 s"
    assert failed.turns[0].seconds == 10.5
    assert task.made["0"].closed.wait(SECONDS)
    # what it says in the end is nobody's any more
    gates["0"].release()
    other = requests_of(2)[1]
    for _ in range(20):
        gates["1"].release()
    assert_same(run(engine, [other]), run(engine_of(ScriptedTask()), [other]))


def test_too_many_hanging_environments_stop_the_engine() -> None:
    now = [0.0]
    steps = EnvironmentSteps(2, 1.0, clock=lambda: now[0])
    release = threading.Event()
    for number in range(5):
        steps.start((number, 0), lambda: release.wait(SECONDS))
    now[0] = 2.0
    assert [answer.key for answer in steps.answers()] == [(0, 0), (1, 0)]
    now[0] = 4.0
    with pytest.raises(RuntimeError, match="4 steps of environments hang since more than 1 s"):
        steps.answers()
    release.set()


def test_no_more_steps_run_at_a_time_than_allowed() -> None:
    lock, inside, most = threading.Lock(), [0], [0]
    both = threading.Barrier(2)

    def answer(problem: Problem, turn: Turn) -> Observation:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        if turn.number == 0:
            both.wait(SECONDS)  # two at a time must be possible
        with lock:
            inside[0] -= 1
        return Observation(done=True)

    trajectories = run(engine_of(ScriptedTask(answer, max_concurrent=2), slots=8), requests_of(8))
    assert {t.stop_reason for t in trajectories} == {StopReason.ENVIRONMENT}
    assert most[0] == 2


class LastWord(Scripted):
    """Says at a limit what it has been told there. told: reason and unfinished turn."""

    told: tuple[StopReason, Turn | None] | None = None

    def limit_reached(self, reason: StopReason, unfinished: Turn | None) -> Observation:
        self.told = reason, unfinished
        return Observation("unread", reward=2.0, measurements={"cut": float(unfinished is not None)}, correct=True)


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        ("=", {"stop_strings": ("?",), "max_turns": 9}, (StopReason.LENGTH, True)),
        ("abcdefgh" * 9, {}, (StopReason.LENGTH, False)),
        ("=", {"max_turns": 1}, (StopReason.TURN_LIMIT, False)),
    ],
    ids=["cut off", "no room", "turn limit"],
)
def test_at_a_limit_the_environment_has_the_last_word_and_sees_what_was_cut_off(
    text: str, rules: dict[str, Any], expected: Any
) -> None:
    def answer(problem: Problem, turn: Turn) -> Observation:
        return Observation(text, reward=0.5, correct=False)

    task = ScriptedTask(answer, ask_at_limits=True, **rules)
    made: dict[str, LastWord] = {}
    task.environment = lambda problem, seed: made.setdefault(  # type: ignore[method-assign, assignment]
        problem.id, LastWord(problem, task.answer, threading.Event())
    )
    trajectories = run(engine_of(task), requests_of(10))
    seen = set()
    for trajectory in trajectories:
        environment, last = made[str(trajectory.group_id % 10)], trajectory.turns[-1]
        assert trajectory.failure is None
        reason, unfinished = environment.told or (None, None)
        assert reason is trajectory.stop_reason
        cut_off = unfinished is not None
        seen.add((reason, cut_off))
        assert last.measurements == {"cut": float(cut_off)}
        assert last.correct is True
        assert last.reward == (2.0 if cut_off else 2.5)
        if unfinished is not None:
            assert unfinished.stop_reason is StopReason.LENGTH
            assert unfinished.number == len(trajectory.turns) - 1
            assert unfinished.token_ids.tolist() == trajectory.response_ids_T[last.start : last.end].tolist()
            assert unfinished.text == TOKENIZER.decode(unfinished.token_ids, skip_special_tokens=True)
    assert expected in seen


def test_answers_that_leave_no_room_end_the_response_at_its_length_limit() -> None:
    long = ScriptedTask(lambda problem, turn: Observation("1" * 30))
    for t in run(engine_of(long), requests_of(8)):
        assert t.stop_reason is StopReason.LENGTH
        assert len(t.response_ids_T) <= LIMIT
        assert t.mask_T[-1]
        if len(t.response_ids_T) < LIMIT:  # the answer itself did not fit, or left no room for one more token
            assert len(t.response_ids_T) + 30 >= LIMIT
        assert int((~t.mask_T).sum()) in (0, 30)


def test_an_answer_may_be_empty_and_a_response_may_end_in_its_first_turn() -> None:
    silent = ScriptedTask(lambda problem, turn: Observation(""), max_turns=2)
    for t in run(engine_of(silent), requests_of(6)):
        assert t.mask_T.all()
        assert len(t.turns) <= 2
    immediate = ScriptedTask(lambda problem, turn: Observation("ignored at the end", done=True, measurements={"n": 3}))
    for t in run(engine_of(immediate), requests_of(6)):
        assert t.mask_T.all()
        assert t.stop_reason in (StopReason.ENVIRONMENT, StopReason.LENGTH)
        if t.stop_reason is StopReason.ENVIRONMENT:
            assert t.turns[0].measurements == {"n": 3.0}


@pytest.mark.parametrize("recompute", [False, True])
def test_every_token_knows_the_weights_that_wrote_it(recompute: bool) -> None:
    task, gates, arrived = gated(lambda answer: ScriptedTask(lambda p, t: replace(answer(p, t), done=False)))
    engine = engine_of(task, make(0))
    [request] = requests_of(1)
    engine.submit([request])

    def swap() -> None:
        version = engine.version + 1
        new = {name: p.detach() for name, p in make(version).named_parameters()}
        engine.load_weights(new, version, recompute_kv_cache=recompute)

    finished: list[Trajectory] = []
    engine.step()
    swap()  # inside the first turn, after its first token
    while not arrived["0"].acquire(blocking=False):
        finished += engine.step()
    swap()
    swap()  # twice while the environment is at work
    for _ in range(20):
        gates["0"].release()
    while not finished:
        finished += engine.step()
    [t] = finished
    first, second = t.turns[:2]
    versions = t.versions_T.tolist()
    assert first.end > 1
    assert versions == [0] + [1] * (first.end - 1) + [3] * (len(versions) - first.end)
    assert second.start == first.end + 4  # "=00>"
    assert not t.mask_T[first.end : second.start].any()
    assert t.start_version == 0
    # keys and values before the wait are gone: what follows it is what the newest weights alone would say
    model = make(3, "sdpa")
    for i in np.flatnonzero(t.mask_T):
        if i >= second.start:
            ids = [*t.prompt_ids.tolist(), *t.response_ids_T[:i].tolist()]
            expected = next_logprobs(model, ids)[t.response_ids_T[i]]
            assert t.logprobs_T[i] == pytest.approx(expected, abs=1e-5)


def test_every_environment_that_was_made_is_closed_and_none_is_made_unasked() -> None:
    task = ScriptedTask()
    trajectories = run(engine_of(task), requests_of(10))
    for t in trajectories:
        if len(t.turns) == 1 and t.stop_reason is StopReason.LENGTH:
            assert str(t.group_id) not in task.made
        else:
            assert task.made[str(t.group_id)].closed.wait(SECONDS)


def test_stop_strings_of_the_run_end_turns_too() -> None:
    task = ScriptedTask(stop_strings=())
    params = SamplingParams(max_tokens=LIMIT, stop_strings=STOPS, stop_token_ids=(END,))
    engine = make_engine(task, make(), params, 3, 150, TOKENIZER)
    assert_same(run(engine, requests_of(5)), run(engine_of(ScriptedTask()), requests_of(5)))


def test_impossible_requests_are_refused_and_none_of_them_is_queued() -> None:
    engine = engine_of(ScriptedTask())
    good, other = requests_of(2)
    with pytest.raises(ValueError, match="group 1 response 0: the request lacks the problem"):
        engine.submit([good, replace(other, problem=None)])
    with pytest.raises(ValueError, match="group 0 response 0 has been submitted twice"):
        engine.submit([good, good])
    with pytest.raises(UserError, match="no tokens"):
        engine.submit([good, replace(other, prompt_ids=np.zeros(0, dtype=np.int64))])
    assert engine.num_active == 0
    assert engine.step() == []
    engine.submit([good])
    with pytest.raises(ValueError, match="submitted twice"):
        engine.submit([good])


def test_a_task_without_environments_gets_the_plain_engine() -> None:
    params = SamplingParams(max_tokens=5)
    assert isinstance(make_engine(None, make(), params, 2, 50, TOKENIZER), TorchEngine)
    assert isinstance(make_engine(object(), make(), params, 2, 50, TOKENIZER), TorchEngine)
