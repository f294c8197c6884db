"""The real vLLM keeps the contract of engines, and its traps stay shut. Runs in vLLM's environment (make test-vllm)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_contract import (
    MAX_LENGTH,
    SLOTS,
    TOKENIZER,
    EngineContract,
    MakeEngine,
    finish,
    load,
    make_model,
    make_requests,
)
from vcpo import vllm_environment
from vcpo.errors import UserError
from vcpo.records import GenerationRequest, SamplingParams
from vcpo.sampler import vllm_engine
from vcpo.sampler.protocol import Engine
from vcpo.sampler.vllm_engine import VllmEngine
from vcpo.sampler.vllm_weights import learner_views

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "block_size": 32,
    "seed": 1,
}


@pytest.fixture(scope="module", autouse=True)
def packing() -> Iterator[Any]:
    """vLLM's own form of weights on the CPU, from before any engine was made."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment.variables(threads=1).items():
            patch.setenv(name, value)
        from vllm.model_executor.layers import utils

        yield utils.dispatch_cpu_unquantized_gemm


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of model configurations."""
    directory = tmp_path_factory.mktemp("models")
    for tied in (True, False):
        make_model(0, tied).config.save_pretrained(directory / str(tied))
    return directory


def maker(directory: Path) -> MakeEngine:
    def make(params: SamplingParams, tied: bool = True) -> Engine:
        return VllmEngine(str(directory / str(tied)), params, SLOTS, MAX_LENGTH, TOKENIZER, **OPTIONS)

    return make


def scheduler_of(engine: Engine) -> Any:
    assert isinstance(engine, VllmEngine)
    return engine._llm.engine_core.engine_core.scheduler


def watched(engine: Engine) -> list[Any]:
    """What vLLM gives the engine from now on."""
    assert isinstance(engine, VllmEngine)
    step, outputs = engine._llm.step, list[Any]()

    def watched_step() -> Any:
        new = step()
        outputs.extend(new)
        return new

    engine._llm.step = watched_step
    return outputs


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def make(self, directory: Path) -> MakeEngine:
        return maker(directory)


class TestTraps:
    """What vLLM does by itself, and what is therefore looked at."""

    @pytest.fixture
    def make(self, directory: Path) -> MakeEngine:
        return maker(directory)

    def test_packed_weights_are_refused_because_nothing_can_be_proven_of_them(
        self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, packing: Any
    ) -> None:
        """vLLM's own form for the CPU, in which a tied output layer also keeps its old weights."""
        from vllm.model_executor.layers import utils

        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packing)
        monkeypatch.setattr(vllm_engine, "keep_weights_readable", lambda: None)
        engine = make(SamplingParams(max_tokens=3))
        with pytest.raises(UserError, match=r"Qwen2ForCausalLM has no place for the parameter .* could not be proven"):
            load(engine, make_model(0), 0)

    def test_no_seed_reaches_vllm(self, make: MakeEngine) -> None:
        """One of a single request can end its engine."""
        engine = make(SamplingParams(max_tokens=9))
        load(engine, make_model(0), 0)
        engine.submit(make_requests(2))
        engine.step()
        (first, second) = scheduler_of(engine).requests.values()
        assert (first.sampling_params.seed, second.sampling_params.seed) == (None, None)

    def test_vllms_own_record_of_weight_versions_is_ours(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=9))
        outputs = watched(engine)
        load(engine, make_model(0), 0)
        engine.submit(make_requests(6))
        finished = []
        for version in range(1, 30):
            finished += engine.step()
            load(engine, make_model(version % 2), version, recompute=version % 3 == 0)
        spans = {o.request_id: o.outputs[0].weight_versions for o in outputs if o.finished}
        assert len(finished) == len(spans) == 6
        for t in finished:
            theirs = [int(span.version) for span in spans[str(t.group_id)] for _ in range(span.start, span.end)]
            assert theirs == t.versions_T.tolist()

    def test_prompts_are_cached_and_shared_within_a_version(self, make: MakeEngine) -> None:
        """The contract's test about cached prompts would otherwise test nothing."""
        engine = make(SamplingParams(max_tokens=2))
        prompt = np.random.default_rng(0).integers(2, 13, 50)
        outputs = watched(engine)
        for number, version in enumerate((0, 0, 1)):
            load(engine, make_model(0), version)
            engine.submit([GenerationRequest(number, 0, prompt, seed=0)])
            finish(engine)
        hits = [output.num_cached_tokens for output in outputs if output.finished]
        assert hits == [0, 32, 0]

    def test_an_installation_under_another_name_is_found(self) -> None:
        """``vllm serve`` wants the distribution to be called vllm; the engine in this process does not."""
        assert vllm_environment.examine(sys.executable).vllm == vllm_environment.TESTED

    def test_a_model_with_more_layers_of_other_kinds_is_refused_by_name(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=3))
        with pytest.raises(UserError, match=r"no place for the parameter extra\.weight of shape \(3,\)"):
            learner_views(engine._model, {"extra.weight": torch.Size([3])})  # type: ignore[attr-defined]

    def test_a_parameter_that_the_learner_lacks_is_refused_because_nobody_would_load_it(self, make: MakeEngine) -> None:
        engine = make(SamplingParams(max_tokens=3))
        shapes = {n: p.shape for n, p in make_model(0).named_parameters()}
        del shapes["model.norm.weight"]
        with pytest.raises(UserError, match=r"Qwen2ForCausalLM has the parameter model\.norm\.weight, which"):
            learner_views(engine._model, shapes)  # type: ignore[attr-defined]
