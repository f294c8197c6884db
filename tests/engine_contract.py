"""What every sampler engine has to do: tests that an engine's own test file runs by deriving from ``EngineContract``.

Everything is compared with one plain forward pass of transformers over a whole response, and never with another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from vcpo.errors import UserError
from vcpo.models.small import character_tokenizer
from vcpo.pipeline.shared_weights import weights_checksum
from vcpo.records import GenerationRequest, ResponsePrefix, SamplingParams, StopReason, Trajectory
from vcpo.sampler.protocol import Engine, generate

TOKENIZER = character_tokenizer("0123456789=", 200)
VOCABULARY = len(TOKENIZER)
MAX_LENGTH = 64
SLOTS = 4
ATOL = 2e-5


def make_model(seed: int, tied: bool = True, attn: str = "sdpa") -> Qwen2ForCausalLM:
    """A model whose distributions are far from uniform; the same for the same seed."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=200,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Qwen2ForCausalLM = Qwen2ForCausalLM._from_config(config, attn_implementation=attn)
        with torch.no_grad():  # biases are 0 otherwise
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.3)
    return model.eval()


class MakeEngine(Protocol):
    """tied: whether the engine's model has tied embeddings. It has no weights before ``load``."""

    def __call__(self, params: SamplingParams, tied: bool = True) -> Engine: ...


def load(engine: Engine, model: PreTrainedModel, version: int, recompute: bool = False) -> None:
    """As the sampler process does it."""
    engine.load_weights({n: p.detach() for n, p in model.named_parameters()}, version, recompute)


def make_requests(count: int, length: int = 5, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [GenerationRequest(g, 0, rng.integers(2, VOCABULARY, length), seed=g) for g in range(count)]


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, trajectory: Trajectory, temperature: float = 1.0) -> np.ndarray:
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids_T])
    logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(trajectory.prompt_ids) - 1 : -1]
    return logprobs.gather(1, torch.from_numpy(trajectory.response_ids_T)[:, None])[:, 0].numpy()


def finish(engine: Engine, limit: int = 500) -> list[Trajectory]:
    finished: list[Trajectory] = []
    for _ in range(limit):
        if not engine.num_active:
            return finished
        finished += engine.step()
    raise AssertionError(f"{engine.num_active} responses are not finished after {limit} steps")


def assert_well_formed(trajectories: Sequence[Trajectory]) -> None:
    for t in trajectories:
        length = len(t.response_ids_T)
        assert length > 0
        assert [a.dtype for a in (t.response_ids_T, t.mask_T, t.logprobs_T, t.versions_T)] == [
            np.dtype(kind) for kind in (np.int64, np.bool_, np.float32, np.int64)
        ]
        assert {len(a) for a in (t.mask_T, t.logprobs_T, t.versions_T)} == {length}
        assert (np.diff(t.versions_T) >= 0).all()
        assert (t.versions_T >= t.start_version).all()


class EngineContract:
    """Derive from it and give a fixture ``make``."""

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_logprobs_are_those_of_the_sampled_distribution(self, make: MakeEngine, tied: bool) -> None:
        engine = make(SamplingParams(max_tokens=12, temperature=0.7), tied)
        model = make_model(0, tied)
        load(engine, model, 0)
        trajectories = generate(engine, make_requests(10))
        assert_well_formed(trajectories)
        for t in trajectories:
            assert (t.stop_reason, len(t.response_ids_T)) == (StopReason.LENGTH, 12)
            np.testing.assert_allclose(t.logprobs_T, plain_logprobs(model, t, 0.7), atol=ATOL)

    def test_tokens_are_drawn_as_often_as_their_probabilities_say(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=1))
        model = make_model(0)
        load(engine, model, 0)
        prompt = np.array([3, 4, 5])
        trajectories = generate(engine, [GenerationRequest(g, 0, prompt, seed=g) for g in range(600)])
        counts = np.bincount([t.response_ids_T[0] for t in trajectories], minlength=VOCABULARY)
        with torch.no_grad():
            expected = 600 * model(torch.from_numpy(prompt)[None]).logits[0, -1].double().softmax(-1).numpy()
        # a chi-squared value over 40 with 12 degrees of freedom has a probability below 1e-4
        assert ((counts - expected) ** 2 / expected).sum() < 40

    def test_more_requests_than_slots_are_all_answered_once(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=3))
        load(engine, make_model(0), 0)
        engine.submit(make_requests(11))
        assert engine.num_active == 11
        finished = finish(engine)
        assert sorted(t.group_id for t in finished) == list(range(11))
        for t, request in zip(sorted(finished, key=lambda t: t.group_id), make_requests(11), strict=True):
            assert t.prompt_ids.tolist() == request.prompt_ids.tolist()
        assert engine.step() == []

    def test_any_end_token_ends_a_response_and_belongs_to_it(self, make: MakeEngine) -> None:
        ends = (1, 5, 6, 7)
        engine = make(SamplingParams(max_tokens=40, stop_token_ids=ends))
        load(engine, make_model(0), 0)
        trajectories = generate(engine, make_requests(12))
        ended = [t for t in trajectories if t.stop_reason is StopReason.EOS]
        assert ended
        for t in ended:
            assert t.response_ids_T[-1] in ends
            assert not np.isin(t.response_ids_T[:-1], ends).any()
            assert t.text == TOKENIZER.decode(t.response_ids_T[:-1].tolist(), skip_special_tokens=True)

    def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=50, stop_strings=("3", "=5", "77")))
        load(engine, make_model(0), 0)
        trajectories = generate(engine, make_requests(12))
        stopped = [t for t in trajectories if t.stop_reason is StopReason.STOP_STRING]
        assert stopped
        for t in stopped:
            assert t.text.endswith(("3", "=5", "77"))
            assert not any(stop in t.text[:-1] for stop in ("3", "=5", "77"))
            np.testing.assert_allclose(t.logprobs_T, plain_logprobs(make_model(0), t), atol=ATOL)

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_recomputed_keys_give_the_logprobs_of_the_weights_in_force(self, make: MakeEngine, tied: bool) -> None:
        """Weights change at every step, with responses on the way: each token is tagged and scored by its own."""
        engine = make(SamplingParams(max_tokens=10), tied)
        models = [make_model(seed, tied) for seed in range(3)]
        load(engine, models[0], 0)
        engine.submit(make_requests(6))
        finished, version = [], 0
        while engine.num_active:
            finished += engine.step()
            version += 1
            load(engine, models[version % 3], version, recompute=True)
        assert len(finished) == 6
        assert_well_formed(finished)
        for t in finished:
            assert t.versions_T.tolist() == list(range(t.start_version, t.start_version + 10))
            by_model = np.stack([plain_logprobs(model, t) for model in models])
            expected = by_model[t.versions_T % 3, np.arange(10)]
            np.testing.assert_allclose(t.logprobs_T, expected, atol=ATOL)

    def test_kept_keys_are_a_mixture_that_no_single_model_recomputes(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=12))
        old, new = make_model(0), make_model(1)
        load(engine, old, 0)
        engine.submit(make_requests(SLOTS))
        for _ in range(4):
            engine.step()
        load(engine, new, 1)
        for t in finish(engine):
            before = t.versions_T == 0
            assert before.sum() == 4
            np.testing.assert_allclose(t.logprobs_T[before], plain_logprobs(old, t)[before], atol=ATOL)
            for model in (old, new):
                assert np.abs(t.logprobs_T - plain_logprobs(model, t))[~before].max() > 0.01

    @pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
    def test_a_prompt_that_was_cached_is_computed_anew_after_an_update(self, make: MakeEngine, recompute: bool) -> None:
        """Long enough for a whole block of a paged cache, decoded before, during and after the change of weights."""
        engine = make(SamplingParams(max_tokens=3))
        prompt = np.random.default_rng(0).integers(2, VOCABULARY, 50)
        for version in range(3):
            model = make_model(version)
            load(engine, model, version, recompute)
            engine.submit([GenerationRequest(version, i, prompt, seed=i) for i in range(2)])
            trajectories = finish(engine)
            assert len(trajectories) == 2
            for t in trajectories:
                np.testing.assert_allclose(t.logprobs_T, plain_logprobs(model, t), atol=ATOL)

    def test_what_waits_for_a_slot_starts_with_the_weights_then_in_force(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=4))
        old, new = make_model(0), make_model(1)
        load(engine, old, 0)
        prompt = np.random.default_rng(0).integers(2, VOCABULARY, 50)
        engine.submit([GenerationRequest(0, i, prompt, seed=i) for i in range(2 * SLOTS)])
        engine.step()
        load(engine, new, 1)
        finished = finish(engine)
        later = [t for t in finished if t.start_version == 1]
        assert len(later) == SLOTS
        for t in later:
            np.testing.assert_allclose(t.logprobs_T, plain_logprobs(new, t), atol=ATOL)

    def test_the_weights_in_use_are_shown_under_the_names_of_the_model(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=1))
        for version in range(2):
            model = make_model(version)
            load(engine, model, version)
            parameters = dict(model.named_parameters())
            assert engine.version == version
            assert engine.weights.keys() == parameters.keys()
            assert weights_checksum(engine.weights) == weights_checksum(parameters)
            for name, parameter in parameters.items():
                assert torch.equal(engine.weights[name], parameter)

    def test_a_response_is_continued_after_what_it_is_given(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=12))
        old, new = make_model(0), make_model(1)
        load(engine, old, 3)
        (first,) = generate(engine, make_requests(1))
        load(engine, new, 4)
        given = np.array([7, 8])
        prefix = ResponsePrefix(
            ids_T=np.concatenate([first.response_ids_T[:5], given]),
            mask_T=np.array([True] * 5 + [False] * 2),
            logprobs_T=np.concatenate([first.logprobs_T[:5], np.zeros(2, np.float32)]),
            versions_T=np.array([3] * 5 + [4] * 2),
            start_version=3,
        )
        (t,) = generate(engine, [GenerationRequest(0, 0, first.prompt_ids, seed=0, prefix=prefix)])
        assert_well_formed([t])
        assert t.response_ids_T[:7].tolist() == prefix.ids_T.tolist()
        assert t.mask_T.tolist() == [True] * 5 + [False] * 2 + [True] * 5
        assert t.versions_T.tolist() == [3] * 5 + [4] * 7
        assert (t.start_version, len(t.response_ids_T), t.stop_reason) == (3, 12, StopReason.LENGTH)
        np.testing.assert_array_equal(t.logprobs_T[:7], prefix.logprobs_T)
        np.testing.assert_allclose(t.logprobs_T[7:], plain_logprobs(new, t)[7:], atol=ATOL)

    def test_seeds_of_any_size_are_accepted(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=3))
        load(engine, make_model(0), 0)
        seeds = (0, 1, 1, 2**31, 2**32, 2**63 - 1)
        requests = [GenerationRequest(g, 0, np.array([3, 4]), seed=seed) for g, seed in enumerate(seeds)]
        assert len(generate(engine, requests)) == len(seeds)

    def test_logits_that_are_not_numbers_are_an_error_that_names_the_response(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=9))
        broken = make_model(0)
        with torch.no_grad():
            next(broken.parameters()).fill_(float("nan"))
        load(engine, broken, 7)
        engine.submit(make_requests(1))
        with pytest.raises(RuntimeError, match=r"not finite: group 0 response 0, token 0, policy version 7"):
            finish(engine)

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            ([], "the prompt has no tokens"),
            ([3] * 60, r"a prompt of 60 tokens and a response of up to 9 exceed the limit of 64 tokens"),
            ([3, VOCABULARY], "token ids outside the model's vocabulary"),
            ([-1], "token ids outside the model's vocabulary"),
        ],
    )
    def test_impossible_prompts_are_refused_and_nothing_is_queued(
        self, make: MakeEngine, ids: list[int], expected: str
    ) -> None:
        engine = make(SamplingParams(max_tokens=9))
        load(engine, make_model(0), 0)
        good = make_requests(1)
        with pytest.raises(UserError, match=expected):
            engine.submit([*good, GenerationRequest(1, 0, np.array(ids, dtype=np.int64), seed=0)])
        assert engine.num_active == 0
