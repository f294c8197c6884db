from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vcpo.errors import UserError
from vcpo.models.attention import ATTENTION
from vcpo.models.small import character_tokenizer
from vcpo.records import GenerationRequest, ResponsePrefix, SamplingParams, StopReason, Trajectory
from vcpo.sampler import kv_cache
from vcpo.sampler.protocol import generate
from vcpo.sampler.torch_engine import TorchEngine

torch.set_num_threads(1)

VOCABULARY = 23
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 200,
    # large enough that the distributions are far from uniform and depend on what is attended to
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], tuple[type[PreTrainedModel], object]]] = {
    "qwen2-tied": lambda: (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2-untied": lambda: (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen2-sliding": lambda: (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral-sliding": lambda: (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=4)),
    "gemma3": lambda: (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
    ),
}


def make(family: str = "qwen2-tied", attn: str = ATTENTION, seed: int = 0) -> PreTrainedModel:
    model_class, config = FAMILIES[family]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class._from_config(config, attn_implementation=attn).eval()


def weights(seed: int, family: str = "qwen2-tied") -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in make(family, seed=seed).named_parameters()}


def make_requests(lengths: Sequence[int], seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [GenerationRequest(g, 0, rng.integers(0, VOCABULARY, n), seed=1000 + g) for g, n in enumerate(lengths)]


def engine_of(model: PreTrainedModel, params: SamplingParams, slots: int = 4, version: int = 0) -> TorchEngine:
    return TorchEngine(model, params, slots=slots, max_length=150, version=version)


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, trajectory: Trajectory, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the response by one whole forward pass of transformers' own attention, one trajectory alone."""
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids_T])
    logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(trajectory.prompt_ids) - 1 : -1]
    return logprobs.gather(1, torch.from_numpy(trajectory.response_ids_T)[:, None])[:, 0].numpy()


def assert_same(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.group_id, a.index) == (b.group_id, b.index)
        assert a.response_ids_T.tolist() == b.response_ids_T.tolist()
        np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=1e-5)
        assert a.stop_reason == b.stop_reason


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_plain_forward_pass(family: str) -> None:
    engine = engine_of(make(family), SamplingParams(max_tokens=20, temperature=1.3), slots=3)
    trajectories = generate(engine, make_requests([1, 7, 12, 2, 30, 7, 3]))
    reference = make(family, "sdpa")
    for trajectory in trajectories:
        assert len(trajectory.response_ids_T) == 20
        np.testing.assert_allclose(trajectory.logprobs_T, plain_logprobs(reference, trajectory, 1.3), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2-tied", "mistral-sliding"])
def test_greedy_decoding_equals_transformers_generate(family: str) -> None:
    engine = engine_of(make(family), SamplingParams(max_tokens=15, temperature=0.0), slots=2)
    reference = make(family, "sdpa")
    for trajectory in generate(engine, make_requests([4, 9, 6])):
        prompt = torch.from_numpy(trajectory.prompt_ids)[None]
        expected = reference.generate(
            prompt, do_sample=False, max_new_tokens=15, attention_mask=torch.ones_like(prompt)
        )
        assert trajectory.response_ids_T.tolist() == expected[0, prompt.shape[1] :].tolist()
        assert trajectory.logprobs_T.tolist() == [0.0] * 15


def test_refilled_slots_give_what_one_at_a_time_gives() -> None:
    params = SamplingParams(max_tokens=40, stop_token_ids=(3, 5))  # responses of very different lengths
    requests = make_requests([5, 1, 18, 9, 9, 70, 2, 11, 6, 4])
    together = generate(engine_of(make(), params, slots=3), requests)
    assert len({len(t.response_ids_T) for t in together}) > 3
    alone = [generate(engine_of(make(), params, slots=1), [request])[0] for request in requests]
    assert_same(together, alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_groups_of_similar_length_give_what_one_at_a_time_gives(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    params = SamplingParams(max_tokens=40, stop_token_ids=(3, 5))
    requests = make_requests([5, 1, 18, 9, 9, 70, 2, 66, 6, 4, 35, 90])
    alone = [generate(engine_of(make(family), params, slots=1), [request])[0] for request in requests]
    monkeypatch.setitem(kv_cache._GROUP_BYTES, "cpu", 1)
    made: list[int] = []
    group = kv_cache.row_groups
    monkeypatch.setattr(kv_cache, "row_groups", lambda *a: made.append(len(group(*a))) or group(*a))
    assert_same(generate(engine_of(make(family), params, slots=6), requests), alone)
    assert max(made) >= 2


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60), worth=st.floats(0, 1e5))
def test_row_groups_hold_every_row_once_and_spare_what_they_have_to(lengths: list[int], worth: float) -> None:
    lengths_B = np.array(lengths)
    groups = kv_cache.row_groups(lengths_B, worth)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    longest = [int(lengths_B[rows].max()) for rows in groups]
    assert longest == sorted(longest)
    for rows, own, following in zip(groups, longest, longest[1:], strict=False):
        assert len(rows) * (following - own) >= worth
    assert len(kv_cache.row_groups(lengths_B, np.inf)) == 1


def test_slots_that_become_free_are_refilled_together() -> None:
    starts: list[int] = []
    engine = engine_of(make(), SamplingParams(max_tokens=30, stop_token_ids=tuple(range(3, 20))), slots=16)
    prefill = engine._prefill
    engine._prefill = lambda rows, sequences: starts.append(len(rows)) or prefill(rows, sequences)  # type: ignore
    generate(engine, make_requests([4] * 60))
    assert sum(starts) == 60
    assert all(count >= 2 for count in starts[:-1])  # an eighth of the slots, until no more are waiting


def test_a_response_does_not_depend_on_what_else_is_in_the_batch() -> None:
    params = SamplingParams(max_tokens=25, stop_token_ids=(3,))
    request = make_requests([8])[0]
    others = [replace(r, group_id=r.group_id + 10) for r in make_requests([3, 50, 8, 20], seed=9)]
    [alone] = generate(engine_of(make(), params, slots=8), [request])
    for batch in ([request, *others], [*others, request], [*others[:2], request, *others[2:]]):
        [among] = [t for t in generate(engine_of(make(), params, slots=3), batch) if t.group_id == 0]
        assert_same([alone], [among])


def test_members_of_a_group_differ_by_their_seeds_and_repeat_by_them() -> None:
    prompt = make_requests([6])[0].prompt_ids
    requests = [GenerationRequest(0, i, prompt, seed=i) for i in range(4)]
    model = make()
    first = generate(engine_of(model, SamplingParams(max_tokens=30)), requests)
    assert len({tuple(t.response_ids_T) for t in first}) == 4
    assert_same(first, generate(engine_of(model, SamplingParams(max_tokens=30), slots=2), requests))


def test_prompts_that_exceed_one_prefill_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests([10, 3, 40, 12, 5, 9])
    expected = generate(engine_of(make(), SamplingParams(max_tokens=8), slots=6), requests)
    monkeypatch.setattr("vcpo.sampler.torch_engine.PREFILL_TOKENS", 20)
    assert_same(generate(engine_of(make(), SamplingParams(max_tokens=8), slots=6), requests), expected)


def test_tokens_are_counted_and_told_apart_by_version_when_weights_change_on_the_way() -> None:
    params = SamplingParams(max_tokens=12, stop_token_ids=(3,))
    requests = make_requests([4, 6, 9, 3, 5])
    engine = engine_of(make(), params, slots=2, version=7)
    engine.submit(requests)
    finished: list[Trajectory] = []
    steps = 0
    while engine.num_active:
        before = {id(t) for t in finished}
        finished += engine.step()
        steps += 1
        if steps % 3 == 0:
            engine.load_weights(weights(steps), engine.version + 1)
        assert engine.num_active == len(requests) - len(finished)
        assert before <= {id(t) for t in finished}
    assert sorted(t.group_id for t in finished) == [0, 1, 2, 3, 4]
    starts = {t.group_id: t.start_version for t in finished}
    assert starts[0] == starts[1] == 7
    assert max(starts.values()) > 7
    for t in finished:
        # the first token comes in the step in which the response starts; a new version after every third step
        assert t.versions_T[0] == t.start_version
        assert set(np.diff(t.versions_T).tolist()) <= {0, 1}
        assert all(count <= 3 for count in np.bincount(t.versions_T - 7))
        assert len(t.response_ids_T) == len(t.logprobs_T) == len(t.versions_T) == len(t.mask_T)
        assert t.mask_T.all()
    first = next(t for t in finished if t.group_id == 0)
    expected = [7 + i // 3 for i in range(len(first.versions_T))]
    assert first.versions_T.tolist() == expected


def swapped(recompute: bool, family: str) -> list[Trajectory]:
    engine = engine_of(make(family, seed=0), SamplingParams(max_tokens=16), slots=4)
    engine.submit(make_requests([4, 11, 1, 7]))
    for _ in range(6):
        engine.step()
    engine.load_weights(weights(1, family), version=1, recompute_kv_cache=recompute)
    finished: list[Trajectory] = []
    while engine.num_active:
        finished += engine.step()
    return sorted(finished, key=lambda t: t.group_id)


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen2-untied", "mistral-sliding"])
def test_recomputed_cache_gives_the_logprobs_of_the_new_weights(family: str) -> None:
    old, new = make(family, "sdpa", seed=0), make(family, "sdpa", seed=1)
    for t in swapped(recompute=True, family=family):
        assert t.versions_T.tolist() == [0] * 6 + [1] * 10
        np.testing.assert_allclose(t.logprobs_T[:6], plain_logprobs(old, t)[:6], atol=1e-5)
        np.testing.assert_allclose(t.logprobs_T[6:], plain_logprobs(new, t)[6:], atol=1e-5)


def test_kept_cache_mixes_old_keys_with_new_queries() -> None:
    old, new = make(attn="sdpa", seed=0), make(attn="sdpa", seed=1)
    for t in swapped(recompute=False, family="qwen2-tied"):
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids_T]))[None]
        # at the swap the newest drawn token is not in the cache yet: it enters it under the new weights
        split = len(t.prompt_ids) + 5
        with torch.no_grad():
            cache = old(input_ids=ids[:, :split], use_cache=True).past_key_values
            logits = new(input_ids=ids[:, split:], past_key_values=cache, use_cache=True).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(1, ids[0, split + 1 :, None])[:, 0]
        np.testing.assert_allclose(t.logprobs_T[6:], expected.numpy(), atol=1e-5)
        assert np.abs(t.logprobs_T[6:] - plain_logprobs(new, t)[6:]).max() > 1e-2


def test_weights_updated_in_place_need_only_the_new_version() -> None:
    model = make(seed=0)
    engine = engine_of(model, SamplingParams(max_tokens=5))
    model.load_state_dict(make(seed=1).state_dict())
    engine.load_weights(None, version=4)
    for t in generate(engine, make_requests([3, 5])):
        assert t.start_version == 4
        np.testing.assert_allclose(t.logprobs_T, plain_logprobs(make(attn="sdpa", seed=1), t), atol=1e-5)


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = make()
    engine = engine_of(model, SamplingParams(max_tokens=5), version=2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    lacking = weights(1)
    del lacking["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing \['model\.norm\.weight'\]"):
        engine.load_weights(lacking, 3)
    with pytest.raises(ValueError, match=r"unknown \['extra'\]"):
        engine.load_weights({**weights(1), "extra": torch.zeros(1)}, 3)
    with pytest.raises(ValueError, match="has shape"):
        engine.load_weights({**weights(1), "model.norm.weight": torch.zeros(3)}, 3)
    assert engine.version == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_tied_weights_may_be_given_under_both_names() -> None:
    model = make("qwen2-tied")
    engine = engine_of(model, SamplingParams(max_tokens=5))
    engine.load_weights(make("qwen2-tied", seed=1).state_dict(), 1)
    assert torch.equal(model.lm_head.weight, weights(1)["model.embed_tokens.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_any_end_token_ends_a_response_and_belongs_to_it() -> None:
    params = SamplingParams(max_tokens=60, stop_token_ids=(3, 11))
    trajectories = generate(engine_of(make(), params, slots=5), make_requests(range(1, 21)))
    ended = [t for t in trajectories if t.stop_reason is StopReason.EOS]
    assert {int(t.response_ids_T[-1]) for t in ended} == {3, 11}
    for t in trajectories:
        assert not set(t.response_ids_T[:-1].tolist()) & {3, 11}
        assert t.stop_reason is StopReason.EOS or len(t.response_ids_T) == 60


def test_an_end_token_at_the_length_limit_counts_as_an_end() -> None:
    params = SamplingParams(max_tokens=1, stop_token_ids=tuple(range(VOCABULARY)))
    [t] = generate(engine_of(make(), params), make_requests([3]))
    assert t.stop_reason is StopReason.EOS


def test_text_is_the_response_without_its_end_token() -> None:
    tokenizer = character_tokenizer("0123456789=abcdefghij", 100)  # with pad and end: 23 tokens
    assert len(tokenizer) == VOCABULARY
    params = SamplingParams(max_tokens=30, stop_token_ids=(1,))
    engine = TorchEngine(make(), params, slots=4, max_length=100, tokenizer=tokenizer)
    for t in generate(engine, make_requests([3, 4, 5, 6])):
        shown = [i for i in t.response_ids_T.tolist() if i > 1]
        assert t.text == "".join("0123456789=abcdefghij"[i - 2] for i in shown)


def test_stop_strings_end_after_the_token_that_completes_them() -> None:
    tokenizer = character_tokenizer("01abcdefghijklmnopqrs", 100)
    model = make()
    free = TorchEngine(model, SamplingParams(max_tokens=40), 4, 100, tokenizer)
    requests = make_requests([3, 5, 4, 9, 2, 6])
    unstopped = generate(free, requests)
    # two characters that really occur, late, so that the window of decoded tokens has moved on
    stop = tokenizer.decode(unstopped[0].response_ids_T[30:32])
    stopped = generate(
        TorchEngine(model, SamplingParams(max_tokens=40, stop_strings=(stop, "never")), 4, 100, tokenizer), requests
    )
    assert stopped[0].stop_reason is StopReason.STOP_STRING
    for whole, cut in zip(unstopped, stopped, strict=True):
        text = tokenizer.decode(whole.response_ids_T)
        length = len(cut.response_ids_T)
        assert cut.response_ids_T.tolist() == whole.response_ids_T[:length].tolist()
        if cut.stop_reason is StopReason.STOP_STRING:
            assert tokenizer.decode(cut.response_ids_T).endswith(stop)
            assert stop not in tokenizer.decode(cut.response_ids_T[:-1])
        else:
            assert stop not in text
            assert length == 40


def test_prompt_and_response_over_the_limit_are_refused_at_submission() -> None:
    engine = TorchEngine(make(), SamplingParams(max_tokens=10), slots=2, max_length=30)
    fits, too_long = make_requests([20, 21])
    with pytest.raises(UserError, match="group 1 response 0: a prompt of 21 tokens and a response of up to 10"):
        engine.submit([fits, too_long])
    assert engine.num_active == 0
    assert len(generate(engine, [fits])[0].response_ids_T) == 10
    generous = TorchEngine(make(), SamplingParams(max_tokens=10), slots=2, max_length=10_000)
    with pytest.raises(UserError, match="limit of 200 tokens"):  # the model's own
        generous.submit(make_requests([191]))


@pytest.mark.parametrize(
    ("ids", "expected"), [([], "no tokens"), ([VOCABULARY], "outside the model's vocabulary"), ([-1], "outside")]
)
def test_impossible_prompts_are_refused(ids: list[int], expected: str) -> None:
    engine = engine_of(make(), SamplingParams(max_tokens=4))
    with pytest.raises(UserError, match=expected):
        engine.submit([GenerationRequest(0, 0, np.array(ids, dtype=np.int64), seed=0)])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_strings": ("x",)}, "need a tokenizer"),
        ({"stop_strings": ("",)}, "empty"),
    ],
)
def test_impossible_sampling_parameters_are_refused(values: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        engine_of(make(), SamplingParams(**{"max_tokens": 4, **values}))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_stop_the_engine_with_names(temperature: float) -> None:
    model = make()
    engine = engine_of(model, SamplingParams(max_tokens=8, temperature=temperature), version=5)
    engine.submit(make_requests([4, 4]))
    engine.step()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite: group 0 response 0, token 1, policy version 5"):
        engine.step()


def test_an_idle_engine_steps_to_nothing() -> None:
    engine = engine_of(make(), SamplingParams(max_tokens=4))
    engine.submit([])
    assert engine.step() == []
    assert generate(engine, []) == []


def test_sampling_neither_reads_nor_changes_the_global_random_state() -> None:
    torch.manual_seed(5)
    first = generate(engine_of(make(), SamplingParams(max_tokens=9)), make_requests([4]))
    state = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(state, torch.rand(2))
    assert_same(first, generate(engine_of(make(), SamplingParams(max_tokens=9)), make_requests([4])))


def test_sampling_leaves_the_model_trainable() -> None:
    model = make()
    engine = engine_of(model, SamplingParams(max_tokens=3))
    generate(engine, make_requests([4]))
    engine.load_weights(weights(1), 1)
    assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    assert model.model.norm.weight.grad is not None


def test_generate_reports_progress_and_wants_an_idle_engine() -> None:
    engine = engine_of(make(), SamplingParams(max_tokens=3), slots=2)
    calls: list[tuple[int, int]] = []
    requests = make_requests([4, 5, 6])
    assert [t.group_id for t in generate(engine, requests[::-1], lambda *n: calls.append(n))] == [2, 1, 0]
    assert calls == [(2, 3), (3, 3)]
    engine.submit(requests)
    with pytest.raises(RuntimeError, match="idle"):
        generate(engine, requests)


def prefix_of(trajectory: Trajectory, length: int) -> ResponsePrefix:
    """The first tokens of a response, as if it had been interrupted after them."""
    return ResponsePrefix(
        trajectory.response_ids_T[:length],
        trajectory.mask_T[:length],
        trajectory.logprobs_T[:length],
        trajectory.versions_T[:length],
        trajectory.start_version,
    )


def test_a_continued_response_is_what_it_would_have_been_without_the_break() -> None:
    params = SamplingParams(max_tokens=24, stop_token_ids=(3,))
    requests = make_requests([5, 1, 18, 9, 9, 70, 2])
    whole = generate(engine_of(make(), params), requests)
    cuts = [min(cut, len(t.response_ids_T) - 1) for cut, t in zip([1, 7, 0, 23, 12, 3, 5], whole, strict=True)]
    continued = [
        replace(r, prefix=prefix_of(t, cut)) for r, t, cut in zip(requests, whole, cuts, strict=True)
    ]  # some from an empty prefix, some beside each other with prefixes of other lengths
    engine = engine_of(make(), params, slots=3, version=4)
    for t, before, cut in zip(generate(engine, continued), whole, cuts, strict=True):
        assert_same([t], [before])
        assert t.start_version == 0
        assert t.versions_T.tolist() == [0] * cut + [4] * (len(t.versions_T) - cut)
        assert t.logprobs_T[:cut].tolist() == before.logprobs_T[:cut].tolist()


def test_given_tokens_are_attended_to_and_stay_as_they_were_given() -> None:
    [request] = make_requests([6])
    engine = engine_of(make(), SamplingParams(max_tokens=15))
    [before] = generate(engine, [replace(request, prefix=None)])
    prefix = prefix_of(before, 5)
    mask = np.array([True, True, False, False, False])
    given = replace(prefix, ids_T=np.array([*prefix.ids_T[:2], 20, 21, 22]), mask_T=mask, logprobs_T=np.zeros(5))
    [after] = generate(engine, [replace(request, prefix=given)])
    assert after.response_ids_T[:5].tolist() == given.ids_T.tolist()
    assert after.mask_T.tolist() == [True, True, False, False, False, *[True] * 10]
    np.testing.assert_allclose(after.logprobs_T[5:], plain_logprobs(make(attn="sdpa"), after)[5:], atol=1e-5)
    # the slot's next response does not inherit the mask
    [next_one] = generate(engine_of(make(), SamplingParams(max_tokens=15), slots=1), [request])
    assert next_one.mask_T.all()


def test_continuations_start_before_new_responses() -> None:
    [first, second, third] = make_requests([4, 4, 4])
    engine = engine_of(make(), SamplingParams(max_tokens=3), slots=1)
    engine.submit([first, second])
    [done] = [t for _ in range(3) for t in engine.step()]
    engine.submit([replace(third, prefix=prefix_of(done, 2))])
    assert engine.num_active == 2
    assert [t.group_id for t in engine.step()] == [2]  # one token was left
    assert [t.group_id for _ in range(3) for t in engine.step()] == [1]


def test_stop_strings_are_looked_for_after_the_prefix_only() -> None:
    tokenizer = character_tokenizer("01abcdefghijklmnopqrs", 100)
    [request] = make_requests([3])
    free = TorchEngine(make(), SamplingParams(max_tokens=30), 1, 100, tokenizer)
    [whole] = generate(free, [request])
    letters = tokenizer.decode(whole.response_ids_T)
    # a string that occurs early, and again later if at all; the break is in the middle of its first occurrence
    stop = letters[4:6]
    stopping = TorchEngine(make(), SamplingParams(max_tokens=30, stop_strings=(stop,)), 1, 100, tokenizer)
    for cut in (5, 6, 7):
        [t] = generate(stopping, [replace(request, prefix=prefix_of(whole, cut))])
        again = letters.find(stop, cut)
        assert len(t.response_ids_T) == (30 if again < 0 else again + len(stop))
        assert t.response_ids_T.tolist() == whole.response_ids_T[: len(t.response_ids_T)].tolist()


@pytest.mark.parametrize(
    ("length", "ids", "expected"),
    [
        (4, [2] * 4, "4 tokens cannot be continued within the limit of 4"),
        (2, [2, 99], "outside the model's vocabulary"),
    ],
)
def test_impossible_prefixes_are_refused(length: int, ids: list[int], expected: str) -> None:
    [request] = make_requests([3])
    prefix = ResponsePrefix(np.array(ids), np.ones(length, bool), np.zeros(length), np.zeros(length, int), 0)
    engine = engine_of(make(), SamplingParams(max_tokens=4))
    with pytest.raises(UserError, match=expected):
        engine.submit([request, replace(request, index=1, prefix=prefix)])
    assert engine.num_active == 0
    with pytest.raises(ValueError, match="differ in length"):
        engine.submit([replace(request, prefix=replace(prefix, mask_T=np.ones(1, bool)))])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_continued_response_survives_a_change_of_weights(recompute: bool) -> None:
    [request] = make_requests([6])
    params = SamplingParams(max_tokens=12)
    [old] = generate(engine_of(make(), params), [request])
    engine = engine_of(make(seed=1), params, version=1)
    engine.submit([replace(request, prefix=prefix_of(old, 5))])
    for _ in range(3):
        engine.step()
    engine.load_weights(weights(2), 2, recompute_kv_cache=recompute)
    finished: list[Trajectory] = []
    while engine.num_active:
        finished += engine.step()
    assert finished[0].versions_T.tolist() == [0] * 5 + [1] * 3 + [2] * 4
    # the whole prefix passes through the weights in force when the response is continued
    np.testing.assert_allclose(
        finished[0].logprobs_T[5:8], plain_logprobs(make(attn="sdpa", seed=1), finished[0])[5:8], atol=1e-5
    )
    if recompute:
        np.testing.assert_allclose(
            finished[0].logprobs_T[8:], plain_logprobs(make(attn="sdpa", seed=2), finished[0])[8:], atol=1e-5
        )
