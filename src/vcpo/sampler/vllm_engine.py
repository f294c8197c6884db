"""vLLM as an engine: its scheduler, kernels and key/value cache; our requests, versions, stops and weights.

It runs vLLM's ``LLMEngine`` in this process, which has to be one of its own, in vLLM's environment
(``vcpo.pipeline.vllm_sampler``). Why this one of vLLM's interfaces, and not the asynchronous one or a server: its
``step`` is ours, so that

- weights are swapped between two steps by construction, without pausing anything, and every token has one version;
- a response that is complete (a stop string) ends before another token is drawn;
- nothing hangs in a queue between us and the scheduler, so what is being decoded is known.

Unlike the torch engine's, its responses are not a function of their seeds: vLLM draws for the whole batch from one
state, and its seeds of single requests are slow and have ended the engine. So a run that is resumed, and a response
that is tried again after a sampler has died, are sampled anew. What they are trained with is recorded all the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from vcpo.errors import UserError
from vcpo.records import GenerationRequest, ResponsePrefix, SamplingParams, StopReason, Trajectory
from vcpo.sampler.limits import Limits, check_params
from vcpo.sampler.stopping import StopStrings
from vcpo.sampler.vllm_weights import keep_weights_readable, learner_views

_NO_PREFIX = ResponsePrefix(
    ids_T=np.zeros(0, np.int64),
    mask_T=np.zeros(0, np.bool_),
    logprobs_T=np.zeros(0, np.float32),
    versions_T=np.zeros(0, np.int64),
    start_version=-1,
)


@dataclass
class _Response:
    """A response that vLLM is decoding: what it has drawn so far."""

    request: GenerationRequest
    start_version: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> ResponsePrefix:
        return self.request.prefix or _NO_PREFIX


class VllmEngine:
    """An ``Engine`` in this process, of which there can be one.

    model: directory or hub id; only its configuration is read. There are no weights before ``load_weights``.
    params, slots, max_length, tokenizer: as for ``TorchEngine``.
    options: arguments of vLLM's ``EngineArgs`` beside those that follow from the others.

    Raises UserError for a model that vLLM cannot decode here.
    """

    def __init__(
        self,
        model: str,
        params: SamplingParams,
        slots: int,
        max_length: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        version: int = -1,
        **options: Any,
    ) -> None:
        check_params(params, tokenizer)
        _check_text_model(model)
        keep_weights_readable()
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # the model's own must not change how is sampled
            max_model_len=max_length,
            max_num_seqs=slots,
            logprobs_mode="processed_logprobs",  # of the distribution that is drawn from, temperature included
            async_scheduling=False,  # a step in advance, a token would be drawn with weights that have been replaced
            **options,
        )
        config = arguments.create_engine_config()
        _check_head_size(config.model_config.get_head_size())
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._model = self._llm.apply_model(lambda model: model)[0]
        self._params = params
        self._tokenizer = tokenizer
        self._version = version
        self._slots = slots
        self._limits = Limits(self._llm.model_config.get_vocab_size(), max_length, params.max_tokens)
        self._waiting: deque[GenerationRequest] = deque()
        self._continued: deque[GenerationRequest] = deque()  # waiting as well; started before the others
        self._responses: dict[str, _Response] = {}
        self._started = 0
        self._views: dict[str, Tensor] = {}
        self._ends = frozenset(params.stop_token_ids)
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
        return len(self._responses) + len(self._waiting) + len(self._continued)

    @property
    def spent(self) -> Mapping[str, float]:
        """See ``Engine``. vLLM prefills and decodes in the same steps."""
        return {}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """See ``Engine``. Empty before weights have been loaded."""
        return self._views

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``Engine``. Raises UserError also for an empty prompt and for ids outside the model's vocabulary."""
        for request in requests:
            self._limits.check(request)
        self._continued.extend(request for request in requests if request.prefix is not None)
        self._waiting.extend(request for request in requests if request.prefix is None)

    def step(self) -> list[Trajectory]:
        """See ``Engine``; what is still being prefilled draws nothing.

        Raises RuntimeError for an answer of vLLM's that cannot be one: a log-probability that is not finite, an id
        that the model does not have.
        """
        while len(self._responses) < self._slots and (self._continued or self._waiting):
            self._start((self._continued or self._waiting).popleft())
        if not self._responses:
            return []
        finished = []
        for output in self._llm.step():
            response = self._responses[output.request_id]
            completion = output.outputs[0]
            reason = self._append(response, completion.token_ids, completion.logprobs)
            if reason is None and completion.finish_reason is not None:
                raise RuntimeError(
                    f"vLLM ended {response.request.name} after {len(response.ids)} tokens for another reason than ours:"
                    f" {completion.finish_reason}, {completion.stop_reason}"
                )
            if reason is not None:
                if completion.finish_reason is None:
                    self._llm.abort_request([output.request_id])
                del self._responses[output.request_id]
                finished.append(self._trajectory(response, reason))
        return finished

    @torch.no_grad()
    def load_weights(
        self, tensors: Mapping[str, Tensor] | None, version: int, recompute_kv_cache: bool = False
    ) -> None:
        """See ``Engine``; tensors must be given. Raises UserError for a model whose weights cannot be proven.

        What vLLM preempts for lack of memory it recomputes under the weights then in force.
        """
        if tensors is None:
            raise ValueError("vLLM's model is its own: weights have to be given")
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        self._views = learner_views(self._model, {name: tensor.shape for name, tensor in tensors.items()})
        self._version = version
        self._llm.set_weight_version(str(version))
        if recompute_kv_cache:
            self._llm.reset_prefix_cache(reset_running_requests=True)

    def _start(self, request: GenerationRequest) -> None:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        prefix = request.prefix
        given = [] if prefix is None else prefix.ids_T.tolist()
        params = VllmSamplingParams(
            max_tokens=self._params.max_tokens - len(given),
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            top_k=self._params.top_k,
            logprobs=0,  # of the drawn token alone
            stop_token_ids=list(self._params.stop_token_ids),
            ignore_eos=True,  # which ids end a response is said above
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # vLLM's prefix cache outlives an update. The salt keeps a response from starting on keys and values of weights
        # that are no longer in force; a reset is refused while anything is being decoded.
        prompt = TokensPrompt(prompt_token_ids=[*request.prompt_ids.tolist(), *given], cache_salt=str(self._version))
        start_version = self._version if prefix is None else prefix.start_version
        name = str(self._started)
        self._started += 1
        self._llm.add_request(name, prompt, params)
        self._responses[name] = _Response(request, start_version)

    def _append(self, response: _Response, ids: Sequence[int], logprobs: Any) -> StopReason | None:
        """Take the tokens of one step; why the response has ended, if it has."""
        reason = None
        for id, of_candidates in zip(ids, logprobs or [], strict=True):
            logprob = of_candidates[id].logprob if self._params.temperature else 0.0
            response.ids.append(id)
            response.logprobs.append(logprob)
            response.versions.append(self._version)
            if not (math.isfinite(logprob) and 0 <= id < self._limits.vocabulary):
                raise RuntimeError(
                    f"the model's logits are not finite: {response.request.name}, token"
                    f" {len(response.prefix.ids_T) + len(response.ids) - 1}, policy version {self._version}"
                    f" (id {id}, log-probability {logprob})"
                )
            reason = self._reason(response)
        return reason

    def _reason(self, response: _Response) -> StopReason | None:
        if response.ids[-1] in self._ends:
            return StopReason.EOS
        if self._stop_strings is not None and self._stop_strings.completed(response.ids):
            return StopReason.STOP_STRING
        if len(response.prefix.ids_T) + len(response.ids) >= self._params.max_tokens:
            return StopReason.LENGTH
        return None

    def _trajectory(self, response: _Response, reason: StopReason) -> Trajectory:
        request, prefix = response.request, response.prefix
        ids_T = np.concatenate([prefix.ids_T, np.asarray(response.ids, dtype=np.int64)])
        return Trajectory(
            group_id=request.group_id,
            index=request.index,
            prompt_ids=request.prompt_ids,
            response_ids_T=ids_T,
            mask_T=np.concatenate([prefix.mask_T, np.ones(len(response.ids), dtype=np.bool_)]),
            logprobs_T=np.concatenate([prefix.logprobs_T, np.asarray(response.logprobs, dtype=np.float32)]),
            versions_T=np.concatenate([prefix.versions_T, np.asarray(response.versions, dtype=np.int64)]),
            stop_reason=reason,
            start_version=response.start_version,
            text=self._text(ids_T[: -1 if reason is StopReason.EOS else None]),
        )

    def _text(self, ids_T: np.ndarray[Any, np.dtype[np.int64]]) -> str:
        if self._tokenizer is None:
            return ""
        decode = self._tokenizer.decode
        return str(decode(ids_T.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _check_text_model(model: str) -> None:
    config = AutoConfig.from_pretrained(model)
    if config.get_text_config() is not config:
        raise UserError(
            f"sampling.engine=vllm cannot be used with {model!r}, a model for more than text ({config.model_type});"
            " use sampling.engine=torch"
        )


def _check_head_size(size: int) -> None:
    """On the CPU vLLM has attention for some sizes of heads, and fails inside its kernel for others."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise UserError(
            f"sampling.engine=vllm cannot be used with this model on a CPU: its attention heads have {size} numbers,"
            f" and vLLM's attention there is made for {', '.join(map(str, sizes))}; use sampling.engine=torch"
        )
