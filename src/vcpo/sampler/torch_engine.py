"""The embedded engine: continuous batching over a slot cache, on any supported transformers model.

Every step feeds the newest token of each occupied slot and draws the next one. A new request's prompt, all but its last
token, is run through the model first; so is all of a response that is continued, and everything decoded so far when the
cache is recomputed for new weights. One step is therefore the only place where tokens are drawn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.models.attention import ATTENTION
from vcpo.models.loading import position_limit
from vcpo.models.lora import trained_parameters
from vcpo.records import GenerationRequest, SamplingParams, StopReason, Trajectory
from vcpo.sampler.drawing import draw, uniforms
from vcpo.sampler.kv_cache import SlotCache
from vcpo.sampler.limits import Limits, check_params
from vcpo.sampler.slots import SlotTable
from vcpo.sampler.stopping import StopStrings

REFILL_SHARE = 1 / 8
PREFILL_TOKENS = 8192  # padded tokens in one forward pass over prompts; one longer prompt still passes alone


class TorchEngine:
    """An ``Engine`` in this process.

    model: loaded with the ``vcpo`` attention implementation. It is used, not copied: whoever else changes its
        parameters calls ``load_weights(None, version)`` afterwards.
    params: how tokens are drawn. Responses end with one of ``params.stop_token_ids`` (see ``end_token_ids``), which is
        part of the response, with the token that completes a stop string, or at ``max_tokens``. Ids that pad the
        vocabulary beyond the tokenizer are drawn if the model gives them probability, as the learner's log-probs
        count them too.
    slots: responses decoded at the same time.
    max_length: limit of prompt plus response, in tokens; the model's own limit holds as well.
    tokenizer: makes ``Trajectory.text``, which stays empty without one; stop strings need it.

    A response depends on the weights, its prompt and its seed, not on what else is decoded beside it (up to the
    rounding of floating-point sums, which can differ with the size of a batch).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        params: SamplingParams,
        slots: int,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        version: int = 0,
    ) -> None:
        check_params(params, tokenizer)
        if model.config._attn_implementation != ATTENTION:
            raise ValueError(f"the engine needs a model loaded with attn_implementation={ATTENTION!r}")
        self._model = model
        self._params = params
        self._tokenizer = tokenizer
        self._version = version
        embedding: Any = model.get_input_embeddings()
        vocabulary = int(embedding.weight.shape[0])
        own_limit = position_limit(model.config)
        self._limits = Limits(vocabulary, min(max_length, own_limit or max_length), params.max_tokens)
        self._cache = SlotCache(slots)
        self._table = SlotTable.empty(slots, params.max_tokens)
        self._slots = slots
        self._prefill_seconds = 0.0
        self._waiting: deque[GenerationRequest] = deque()
        self._continued: deque[GenerationRequest] = deque()  # waiting as well; started before the others
        self._is_end_V = np.zeros(max([vocabulary, *(id + 1 for id in params.stop_token_ids)]), dtype=np.bool_)
        self._is_end_V[list(params.stop_token_ids)] = True
        self._stop_strings = None
        if params.stop_strings and tokenizer is not None:
            self._stop_strings = StopStrings(tokenizer, params.stop_strings)

    @property
    def version(self) -> int:
        """See ``Engine``."""
        return self._version

    @property
    def num_active(self) -> int:
        """See ``Engine``."""
        return self._table.count + len(self._waiting) + len(self._continued)

    @property
    def spent(self) -> Mapping[str, float]:
        """See ``Engine``. On a GPU, whose work goes on after the call, the time that it took to ask for it."""
        return {"prefill": self._prefill_seconds}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """See ``Engine``: of a model with adapters, those."""
        return trained_parameters(self._model)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``Engine``. Raises UserError also for an empty prompt and for ids outside the model's vocabulary."""
        for request in requests:
            self._limits.check(request)
        self._continued.extend(request for request in requests if request.prefix is not None)
        self._waiting.extend(request for request in requests if request.prefix is None)

    @torch.inference_mode()
    def step(self) -> list[Trajectory]:
        """See ``Engine``. Raises RuntimeError when the model's logits are not finite."""
        self._refill()
        table = self._table
        if not table.count:
            return []
        positions_B = table.positions
        logits_BV = self._forward(table.pending_S[: table.count], positions_B)
        drawn_B = uniforms(table.seeds_S[: table.count], table.lengths_S[: table.count])
        ids, logprobs = draw(logits_BV, self._to_device(drawn_B), self._params)
        ids_B, logprobs_B = ids.cpu().numpy(), logprobs.cpu().numpy()
        self._check_finite(logprobs_B)
        table.append(ids_B, logprobs_B, self._version)
        return self._finish(ids_B)

    @torch.no_grad()
    def load_weights(
        self, tensors: Mapping[str, Tensor] | None, version: int, recompute_kv_cache: bool = False
    ) -> None:
        """See ``Engine``. Raises ValueError, changing nothing, when names or shapes are not those of the model."""
        if tensors is not None:
            self._assign(tensors)
        self._version = version
        if recompute_kv_cache:
            rows = range(self._table.count)
            with torch.inference_mode():
                self._prefill(rows, [self._table.cached_tokens(row) for row in rows])

    def _refill(self) -> None:
        """Start waiting requests. Where not all of them fit, wait until a share of the slots is free.

        Every start is one more forward pass: one for each slot that becomes free would nearly double their number.
        """
        free, waiting = self._slots - self._table.count, len(self._waiting) + len(self._continued)
        number = min(free, waiting)
        if number and (number == waiting or free >= self._slots * REFILL_SHARE):
            begin = time.perf_counter()
            requests = [(self._continued or self._waiting).popleft() for _ in range(number)]
            rows = self._table.add(requests, self._version)
            self._prefill(rows, [self._table.cached_tokens(row) for row in rows])
            self._prefill_seconds += time.perf_counter() - begin

    def _prefill(self, rows: Sequence[int], sequences: Sequence[NDArray[np.int64]]) -> None:
        """Compute the cache of ``rows`` from their sequences; equal sequences once."""
        rows_of: dict[bytes, list[int]] = {}
        distinct: dict[bytes, NDArray[np.int64]] = {}
        for row, sequence in zip(rows, sequences, strict=True):
            if len(sequence):
                key = sequence.tobytes()
                rows_of.setdefault(key, []).append(row)
                distinct[key] = sequence
        batch: list[bytes] = []
        for key in sorted(distinct, key=lambda k: len(distinct[k])):
            if batch and (len(batch) + 1) * len(distinct[key]) > PREFILL_TOKENS:
                self._prefill_batch([distinct[k] for k in batch], [rows_of[k] for k in batch])
                batch = []
            batch.append(key)
        if batch:
            self._prefill_batch([distinct[k] for k in batch], [rows_of[k] for k in batch])

    def _prefill_batch(self, sequences: list[NDArray[np.int64]], rows: list[list[int]]) -> None:
        length = len(sequences[-1])  # they come in order of length
        tokens = np.zeros((len(sequences), length), dtype=np.int64)
        for i, sequence in enumerate(sequences):
            tokens[i, : len(sequence)] = sequence
        targets = np.array([row for its_rows in rows for row in its_rows])
        sources = np.repeat(np.arange(len(rows)), [len(its_rows) for its_rows in rows])
        self._cache.prefill(self._to_device(targets), self._to_device(sources), length)
        # the base model, without the output layer: nothing is drawn here
        self._model.base_model(
            input_ids=self._to_device(tokens),
            position_ids=self._to_device(np.arange(length)[None]),
            use_cache=False,
            attention_plan=self._cache,
        )

    def _forward(self, ids_B: NDArray[np.int64], positions_B: NDArray[np.int64]) -> Tensor:
        positions = self._to_device(positions_B)
        self._cache.decode(positions, positions_B)
        output = self._model(
            input_ids=self._to_device(ids_B)[:, None],
            position_ids=positions[:, None],
            use_cache=False,
            attention_plan=self._cache,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _finish(self, ids_B: NDArray[np.int64]) -> list[Trajectory]:
        """Take the slots that are done out of the table."""
        table = self._table
        ended_B = self._is_end_V[ids_B]
        done_B = ended_B | (table.lengths_S[: table.count] >= self._params.max_tokens)
        stopped_B = np.zeros_like(done_B)
        if self._stop_strings is not None:
            for row in np.flatnonzero(~ended_B).tolist():
                stopped_B[row] = self._stop_strings.completed(table.drawn(row).tolist())
            done_B |= stopped_B
        rows = np.flatnonzero(done_B)
        if not len(rows):
            return []
        texts = self._texts([table.response(row)[: -1 if ended_B[row] else None] for row in rows.tolist()])
        finished = []
        for row, text in zip(rows.tolist(), texts, strict=True):
            reason = StopReason.LENGTH
            if ended_B[row]:
                reason = StopReason.EOS
            elif stopped_B[row]:
                reason = StopReason.STOP_STRING
            finished.append(table.trajectory(row, reason, text))
        targets, sources = table.remove(rows)
        if len(targets):
            self._cache.move(self._to_device(targets), self._to_device(sources))
        return finished

    def _texts(self, responses: list[NDArray[np.int64]]) -> list[str]:
        if self._tokenizer is None:
            return [""] * len(responses)
        return self._tokenizer.batch_decode(
            [ids.tolist() for ids in responses], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _assign(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = trained_parameters(self._model)
        # tied parameters have a second name, under which they may be given too
        every_name = dict(self._model.named_parameters(remove_duplicate=False))
        missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - every_name.keys())
        if missing or unknown:
            raise ValueError(f"weights do not fit the sampler's model: missing {missing[:3]}, unknown {unknown[:3]}")
        for name, tensor in tensors.items():
            if tensor.shape != every_name[name].shape:
                raise ValueError(
                    f"weights do not fit the sampler's model: {name} has shape {tuple(tensor.shape)},"
                    f" expected {tuple(every_name[name].shape)}"
                )
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])

    def _check_finite(self, logprobs_B: NDArray[np.float32]) -> None:
        bad = np.flatnonzero(~np.isfinite(logprobs_B))
        if len(bad):
            request = self._table.requests_S[bad[0]]
            raise RuntimeError(
                f"the model's logits are not finite: {request.name}, token"
                f" {self._table.lengths_S[bad[0]]}, policy version {self._version} ({len(bad)} of"
                f" {self._table.count} responses)"
            )

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)
