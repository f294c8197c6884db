"""Whether a token completed one of the stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_SLACK = 8  # tokens beside the stop string's own: what precedes it in its first token, split characters, empty tokens


class StopStrings:
    """Looks for stop strings in the decoded text, special tokens included by their names.

    Only the last tokens are decoded at each call; a match there is confirmed on the whole response, because the
    decoding of a few tokens can differ from their part of the decoding of all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # every token but a few carries a byte or more, so a string spans no more tokens than it has bytes
        self._window = max(len(string.encode()) for string in strings) + _SLACK

    def completed(self, response_ids: list[int]) -> bool:
        """Whether the response, whose earlier prefixes held no stop string, now holds one."""
        if not self._found(response_ids[-self._window :]):
            return False
        return len(response_ids) <= self._window or self._found(response_ids)

    def _found(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)
