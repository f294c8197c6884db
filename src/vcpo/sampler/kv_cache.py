"""The key/value cache of a sampler's slots, as an attention plan.

The occupied slots are always the first ``n`` rows, so that decoding reads the cache as one view without gathering rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GROWTH = 64  # positions by which the cache grows


class SlotCache:
    """Keys and values of every layer, (slots, positions, key/value heads, head dimension), grown as needed.

    Fulfils ``AttentionPlan``. Before each forward pass, ``prefill`` or ``decode`` says which rows its tokens belong to.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._capacity = 0
        self._rows: Tensor | None = None
        self._sources: Tensor | None = None
        self._own_rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._span = 0
        self._masks: dict[int | None, Tensor] = {}

    def prefill(self, rows: Tensor, sources: Tensor, length: int) -> None:
        """The next forward pass holds whole sequences, padded on the right to ``length``, and starts cache rows anew.

        Cache row ``rows[i]`` gets the keys and values of batch row ``sources[i]``: equal prompts are computed once.
        """
        self._rows, self._sources = rows, sources
        self._masks = {}
        self._grow(length)

    def decode(self, positions_B: Tensor, longest: int) -> None:
        """The next forward pass holds one token for each of the first ``B`` rows, at ``positions_B``.

        longest: the largest of the positions, known without asking the device.
        """
        self._rows = None
        self._own_rows = torch.arange(len(positions_B), device=positions_B.device)
        self._positions = positions_B
        self._span = longest + 1
        self._masks = {}
        self._grow(self._span)

    def move(self, targets: Tensor, sources: Tensor) -> None:
        """Copy rows ``sources`` over rows ``targets``; the two do not overlap."""
        for tensors in (self._keys, self._values):
            for tensor in tensors.values():
                tensor[targets] = tensor[sources]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See ``AttentionPlan``."""
        keys, values = self._storage(layer, key, value)
        if self._rows is None:
            return self._attend_decode(keys, values, query, key, value, scaling, sliding_window)
        length = key.shape[2]
        # positions of padding are written too: masked until a decoded token overwrites them
        keys[self._rows, :length] = key[self._sources].transpose(1, 2)
        values[self._rows, :length] = value[self._sources].transpose(1, 2)
        grouped = query.shape[1] != key.shape[1]
        if sliding_window is None or sliding_window >= length:
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
            )
        else:
            mask = self._band(length, sliding_window, query.device)
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
            )
        return output.transpose(1, 2)

    def _attend_decode(
        self,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> Tensor:
        count, heads, _, head_dim = query.shape
        keys[self._own_rows, self._positions] = key[:, :, 0]
        values[self._own_rows, self._positions] = value[:, :, 0]
        # the query heads that share a key/value head stand where tokens would: no repeated keys and values
        shared = query.reshape(count, key.shape[1], heads // key.shape[1], head_dim)
        output = F.scaled_dot_product_attention(
            shared,
            keys[:count, : self._span].transpose(1, 2),
            values[:count, : self._span].transpose(1, 2),
            attn_mask=self._visible(sliding_window, query.dtype),
            scale=scaling,
        )
        return output.reshape(count, 1, heads, value.shape[-1])

    def _visible(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """(rows, 1, 1, span): 0 where a row's token sees a cache position, -inf elsewhere; made once for all layers."""
        mask = self._masks.get(sliding_window)
        if mask is None:
            cache_positions = torch.arange(self._span, device=self._positions.device)
            own = self._positions[:, None]
            hidden = cache_positions > own
            if sliding_window is not None:
                hidden |= cache_positions <= own - sliding_window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = self._masks[sliding_window] = mask[:, None, None]
        return mask

    def _band(self, length: int, sliding_window: int, device: torch.device) -> Tensor:
        mask = self._masks.get(sliding_window)
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - sliding_window)
            self._masks[sliding_window] = mask
        return mask

    def _storage(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._keys:
            for tensors, new in ((self._keys, key), (self._values, value)):
                # zeros, because positions never written take part in products under the mask
                tensors[layer] = new.new_zeros(self._slots, self._capacity, new.shape[1], new.shape[-1])
        return self._keys[layer], self._values[layer]

    def _grow(self, length: int) -> None:
        if length <= self._capacity:
            return
        added = -(-length // GROWTH) * GROWTH - self._capacity
        self._capacity += added
        for tensors in (self._keys, self._values):
            for layer, tensor in tensors.items():
                tensors[layer] = F.pad(tensor, (0, 0, 0, 0, 0, added))
