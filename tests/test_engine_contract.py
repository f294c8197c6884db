"""The torch engine keeps the contract of engines."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from engine_contract import MAX_LENGTH, SLOTS, TOKENIZER, EngineContract, MakeEngine, make_model
from vcpo.models.attention import ATTENTION
from vcpo.records import SamplingParams
from vcpo.sampler.protocol import Engine
from vcpo.sampler.torch_engine import TorchEngine


class TestTorchEngine(EngineContract):
    @pytest.fixture
    def make(self) -> MakeEngine:
        def make(params: SamplingParams, tied: bool = True) -> Engine:
            model: PreTrainedModel = make_model(seed=99, tied=tied, attn=ATTENTION).requires_grad_(False)
            return TorchEngine(model, params, SLOTS, MAX_LENGTH, TOKENIZER, version=-1)

        return make
