"""What an engine refuses before it decodes anything: sampling parameters and requests that cannot be served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from vcpo.errors import UserError
from vcpo.records import GenerationRequest, ResponsePrefix, SamplingParams


@dataclass(frozen=True)
class Limits:
    """vocabulary: number of token ids of the model. max_length: of prompt and response. max_tokens: of a response."""

    vocabulary: int
    max_length: int
    max_tokens: int

    def check(self, request: GenerationRequest) -> None:
        """Raises UserError for a request that does not fit, ValueError for one that contradicts itself."""
        name, ids = request.name, request.prompt_ids
        if not len(ids):
            raise UserError(f"{name}: the prompt has no tokens; a response needs at least one to follow")
        if self._is_foreign(ids):
            raise UserError(f"{name}: the prompt holds token ids outside the model's vocabulary of {self.vocabulary}")
        if request.prefix is not None:
            self._check_prefix(name, request.prefix)
        if len(ids) + self.max_tokens > self.max_length:
            raise UserError(
                f"{name}: a prompt of {len(ids)} tokens and a response of up to {self.max_tokens} exceed the"
                f" limit of {self.max_length} tokens; shorten the prompt or lower max_completion_length"
            )

    def _check_prefix(self, name: str, prefix: ResponsePrefix) -> None:
        length = len(prefix.ids_T)
        if any(len(array) != length for array in (prefix.mask_T, prefix.logprobs_T, prefix.versions_T)):
            raise ValueError(f"{name}: the arrays of the response to be continued differ in length")
        if length >= self.max_tokens:
            raise UserError(
                f"{name}: a response of {length} tokens cannot be continued within the limit of"
                f" {self.max_tokens}; raise max_completion_length"
            )
        if length and self._is_foreign(prefix.ids_T):
            raise UserError(f"{name}: the response holds token ids outside the model's vocabulary of {self.vocabulary}")

    def _is_foreign(self, ids: NDArray[np.int64]) -> bool:
        return bool(ids.min() < 0 or ids.max() >= self.vocabulary)


def check_params(params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises UserError for parameters that no engine can sample with. tokenizer: that the engine has, if any."""
    if params.max_tokens < 1:
        raise UserError(f"max_tokens is {params.max_tokens}; it must be at least 1")
    if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= 0):
        raise UserError(
            f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k} cannot be sampled with:"
            " temperature must be 0 or more, top_p in (0, 1], top_k 0 (off) or more"
        )
    if "" in params.stop_strings:
        raise UserError("a stop string is empty; remove it")
    if params.stop_strings and tokenizer is None:
        raise UserError("stop strings need a tokenizer to decode the responses with")
