"""The key/value cache of a sampler's slots, as an attention plan.

The occupied slots are always the first ``n`` rows, so that decoding reads the cache as one view without gathering rows,
up to the longest of them. Where lengths differ much, that would be reading mostly nothing: rows of similar length are
then gathered into groups, each read up to its own longest row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

GROWTH = 64  # positions by which the cache grows
_SHORTEST_CLASS = 32  # positions; rows that are shorter are never worth a group of their own
# Bytes of one layer's keys and values that a group must spare to be worth its gathering and its attention call. The
# first is measured, on a CPU core; the second is not: it assumes eight kernels of 10 microseconds and 1 TB/s.
_GROUP_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass
class _RowGroup:
    """Rows that are attended to together. rows: their indices, or ``None`` for all. masks: by sliding window."""

    rows: Tensor | None
    positions: Tensor
    span: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def visible(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """(rows, 1, 1, span): 0 where a row's token sees a cache position, -inf elsewhere; made once for all layers."""
        mask = self.masks.get(sliding_window)
        if mask is None:
            cache_positions = torch.arange(self.span, device=self.positions.device)
            own = self.positions[:, None]
            hidden = cache_positions > own
            if sliding_window is not None:
                hidden |= cache_positions <= own - sliding_window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = self.masks[sliding_window] = mask[:, None, None]
        return mask


def row_groups(lengths_B: NDArray[np.int64], worth: float) -> list[NDArray[np.int64]]:
    """Rows in groups of similar length, shortest first: classes by powers of two, merged while that reads little more.

    worth: positions (rows times length) that a group of its own must spare.
    """
    classes_B = np.ceil(np.log2(np.maximum(lengths_B, _SHORTEST_CLASS))).astype(np.int64)
    present = np.unique(classes_B)
    groups, rows = [], np.empty(0, dtype=np.int64)
    for this, following in zip(present, [*present[1:], None], strict=True):
        rows = np.concatenate([rows, np.flatnonzero(classes_B == this)])
        if following is not None:
            longer = lengths_B[classes_B == following].max()
            if len(rows) * (longer - lengths_B[rows].max()) < worth:
                continue
        groups.append(rows)
        rows = np.empty(0, dtype=np.int64)
    return groups


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
        self._groups: list[_RowGroup] = []
        self._position_bytes = 0  # of one layer's keys and values
        self._masks: dict[int | None, Tensor] = {}

    def prefill(self, rows: Tensor, sources: Tensor, length: int) -> None:
        """The next forward pass holds whole sequences, padded on the right to ``length``, and starts cache rows anew.

        Cache row ``rows[i]`` gets the keys and values of batch row ``sources[i]``: equal prompts are computed once.
        """
        self._rows, self._sources = rows, sources
        self._masks = {}
        self._grow(length)

    def decode(self, positions_B: Tensor, host_positions_B: NDArray[np.int64]) -> None:
        """The next forward pass holds one token for each of the first ``B`` rows, at ``positions_B``.

        host_positions_B: the same numbers, known without asking the device.
        """
        self._rows = None
        self._own_rows = torch.arange(len(positions_B), device=positions_B.device)
        self._positions = positions_B
        lengths_B = host_positions_B + 1
        self._grow(int(lengths_B.max()))
        groups = []
        if self._position_bytes:
            worth = _GROUP_BYTES.get(positions_B.device.type, _GROUP_BYTES["cuda"]) / self._position_bytes
            groups = row_groups(lengths_B, worth)
        if len(groups) < 2:
            self._groups = [_RowGroup(None, positions_B, int(lengths_B.max()))]
            return
        self._groups = []
        for members in groups:
            rows = torch.from_numpy(members).to(positions_B.device)
            self._groups.append(_RowGroup(rows, positions_B[rows], int(lengths_B[members].max())))

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
        if len(self._groups) == 1:
            output = _attend_rows(
                self._groups[0], shared, keys[:count], values[:count], scaling, sliding_window, query.dtype
            )
        else:
            output = shared.new_empty(*shared.shape[:3], value.shape[-1])
            for group in self._groups:
                assert group.rows is not None
                own_keys = keys[:, : group.span].index_select(0, group.rows)
                own_values = values[:, : group.span].index_select(0, group.rows)
                output[group.rows] = _attend_rows(
                    group, shared[group.rows], own_keys, own_values, scaling, sliding_window, query.dtype
                )
        return output.reshape(count, 1, heads, value.shape[-1])

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
            stored = (self._keys[layer], self._values[layer])
            self._position_bytes = sum(tensor[0, 0].numel() * tensor.element_size() for tensor in stored)
        return self._keys[layer], self._values[layer]

    def _grow(self, length: int) -> None:
        if length <= self._capacity:
            return
        added = -(-length // GROWTH) * GROWTH - self._capacity
        self._capacity += added
        for tensors in (self._keys, self._values):
            for layer, tensor in tensors.items():
                tensors[layer] = F.pad(tensor, (0, 0, 0, 0, 0, added))


def _attend_rows(
    group: _RowGroup,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """One token of every row of a group over what the row has in the cache."""
    return F.scaled_dot_product_attention(
        query,
        keys[:, : group.span].transpose(1, 2),
        values[:, : group.span].transpose(1, 2),
        attn_mask=group.visible(sliding_window, dtype),
        scale=scaling,
    )
