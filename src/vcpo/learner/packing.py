"""Many trajectories in one row without padding: token layout, attention, and the cut into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vcpo.records import Trajectory

# a trajectory shares a padded attention batch with a longer one if it fills at least this part of it
_BUCKET_FILL = 0.75
_SMALL_RUN = 512  # tokens from which matrix products run at about full speed
_GPU_TOKENS = 16384
_CACHED_ELEMENTS = (
    2**19
)  # of a hidden state: with more, a CPU's caches lose a layer's activations between its operations


def default_microbatch(hidden_size: int, device: torch.device) -> int:
    """Tokens of one forward pass where nobody has chosen."""
    if device.type != "cpu":
        return _GPU_TOKENS
    return min(max(_CACHED_ELEMENTS // hidden_size, 2 * _SMALL_RUN), _GPU_TOKENS)


def microbatches(
    lengths: Sequence[int], max_tokens: int, groups: Sequence[int] | None = None, most_groups: int = 1
) -> list[list[int]]:
    """Cut trajectories, in order, into runs of at most ``max_tokens`` tokens; a longer trajectory is alone in its run.

    lengths: tokens of each trajectory, prompt included. Returns the indices of each run.
    groups: of each trajectory; then a run that has ``most_groups`` of them and is not small ends with the latest, and a
        group is not spread over runs if it fits into one.
    """
    runs: list[list[int]] = []
    room = begun = 0
    for index, length in enumerate(lengths):
        if not runs or length > room:
            fresh = True
        elif groups is not None and groups[index] != groups[index - 1]:
            whole = sum(
                other for other, group in zip(lengths[index:], groups[index:], strict=True) if group == groups[index]
            )
            enough = begun >= most_groups and max_tokens - room >= _SMALL_RUN
            fresh = enough or room < whole <= max_tokens
        else:
            fresh = False
        if fresh:
            runs.append([])
            room, begun = max_tokens, 0
        if groups is not None and (fresh or groups[index] != groups[index - 1]):
            begun += 1
        runs[-1].append(index)
        room -= length
    return runs


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Cut trajectories, in order, into ``size`` shares of about the same number of tokens."""
    ends = np.cumsum(lengths)
    middles = ends - np.asarray(lengths) / 2
    owner = np.minimum(middles * size // max(ends[-1], 1), size - 1) if len(lengths) else ends
    return [np.flatnonzero(owner == rank).tolist() for rank in range(size)]


@dataclass(frozen=True)
class PackedBatch:
    """Trajectories laid end to end in one row. ``_N`` counts tokens of the row, ``_K`` trained tokens.

    input_ids_1N, position_ids_1N: the row; positions restart at 0 with each trajectory.
    plan: the attention of the row.
    predictors_K: index in the row of the token whose output predicts each trained token.
    targets_K: the trained tokens. Given response tokens (mask False) have neither predictor nor target.
    lengths_B, trained_B: tokens in the row and trained tokens of each trajectory.
    """

    input_ids_1N: Tensor
    position_ids_1N: Tensor
    plan: PackedPlan
    predictors_K: Tensor
    targets_K: Tensor
    lengths_B: tuple[int, ...]
    trained_B: tuple[int, ...]


def pack(trajectories: Sequence[Trajectory], device: torch.device) -> PackedBatch:
    """Lay out trajectories for one forward pass. Every trajectory needs a prompt of at least one token."""
    ids, positions, predictors, targets = [], [], [], []
    start = 0
    for trajectory in trajectories:
        prompt = len(trajectory.prompt_ids)
        if prompt == 0:
            raise ValueError(f"{trajectory.name} has an empty prompt: nothing predicts its first token")
        length = prompt + len(trajectory.response_ids_T)
        ids += [trajectory.prompt_ids, trajectory.response_ids_T]
        positions.append(np.arange(length))
        trained = np.flatnonzero(trajectory.mask_T)
        predictors.append(start + prompt - 1 + trained)
        targets.append(trajectory.response_ids_T[trained])
        start += length
    lengths = tuple(len(part) for part in positions)

    def row(parts: list[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return PackedBatch(
        input_ids_1N=row(ids)[None],
        position_ids_1N=row(positions)[None],
        plan=PackedPlan(lengths, device),
        predictors_K=row(predictors),
        targets_K=row(targets),
        lengths_B=lengths,
        trained_B=tuple(len(part) for part in targets),
    )


@dataclass(frozen=True)
class _Bucket:
    rows: int
    width: int
    masks: dict[int, Tensor] = field(default_factory=dict)


class PackedPlan:
    """Causal attention within each of the consecutive stretches of one row (an ``AttentionPlan``).

    Stretches of similar length share one padded batch, so memory is linear in the row's length but for the attention
    itself, and a long stretch does not pad all others.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """lengths: tokens of each stretch; their sum is the length of the row."""
        starts = np.cumsum([0, *lengths])
        order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: -lengths[i])
        grouped: list[list[int]] = []
        for index in order:
            if grouped and lengths[index] >= _BUCKET_FILL * lengths[grouped[-1][0]]:
                grouped[-1].append(index)
            else:
                grouped.append([index])
        self._buckets = [_Bucket(len(members), lengths[members[0]]) for members in grouped]
        # cell -> token and token -> cell, where the cells are the padded batches' positions, one batch after another
        token_of_cell = np.zeros(sum(b.rows * b.width for b in self._buckets), dtype=np.int64)
        cell_of_token = np.zeros(int(starts[-1]), dtype=np.int64)
        cell = 0
        for members, bucket in zip(grouped, self._buckets, strict=True):
            for index in members:
                tokens = np.arange(starts[index], starts[index + 1])
                # padding repeats the stretch's last token: no real query sees it, and its output is dropped
                token_of_cell[cell : cell + bucket.width] = tokens[-1]
                token_of_cell[cell : cell + len(tokens)] = tokens
                cell_of_token[tokens] = cell + np.arange(len(tokens))
                cell += bucket.width
        self._token_of_cell = torch.from_numpy(token_of_cell).to(device)
        self._cell_of_token = torch.from_numpy(cell_of_token).to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See ``AttentionPlan``."""
        query_C, key_C, value_C = (self._to_cells(states) for states in (query, key, value))
        outputs_C = []
        begin = 0
        for bucket in self._buckets:
            end = begin + bucket.rows * bucket.width
            queries, keys, values = (_batched(cells[begin:end], bucket) for cells in (query_C, key_C, value_C))
            mask = self._band(bucket, sliding_window)
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs_C.append(attended.transpose(1, 2).flatten(0, 1))
            begin = end
        scatter: Any = _Scatter.apply
        tokens: Tensor = scatter(torch.cat(outputs_C), self._cell_of_token)
        return tokens[None]

    def _to_cells(self, states: Tensor) -> Tensor:
        """(1, heads, tokens, head_dim) to (cells, heads, head_dim)."""
        gather: Any = _Gather.apply
        cells: Tensor = gather(states[0].transpose(0, 1), self._token_of_cell, self._cell_of_token)
        return cells

    def _band(self, bucket: _Bucket, sliding_window: int | None) -> Tensor | None:
        if sliding_window is None or sliding_window >= bucket.width:
            return None
        if sliding_window not in bucket.masks:
            positions = torch.arange(bucket.width, device=self._token_of_cell.device)
            distance = positions[:, None] - positions[None, :]
            bucket.masks[sliding_window] = (distance >= 0) & (distance < sliding_window)
        return bucket.masks[sliding_window]


def _batched(cells: Tensor, bucket: _Bucket) -> Tensor:
    """(cells, heads, head_dim) to (rows, heads, width, head_dim)."""
    return cells.view(bucket.rows, bucket.width, *cells.shape[1:]).transpose(1, 2)


class _Gather(torch.autograd.Function):
    """Rows by index, where each row has exactly one cell whose gradient is not 0: its backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, token_of_cell: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.cell_of_token = cell_of_token
        return states.index_select(0, token_of_cell)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.cell_of_token), None, None


class _Scatter(torch.autograd.Function):
    """The inverse of ``_Gather``: drops the padding cells, which get gradient 0."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, cell_of_token: Tensor) -> Tensor:
        ctx.cell_of_token = cell_of_token
        ctx.count = len(cells)
        return cells.index_select(0, cell_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        cells = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return cells.index_copy_(0, ctx.cell_of_token, gradient), None
