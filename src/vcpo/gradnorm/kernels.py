"""Squared norms of many trajectories' outer-product gradients: by Gram matrices, or gradient by gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.uses import OuterUse, at_least_float32

TILE_ELEMENTS = 2**18  # of a single gradient that exist at one time: small enough to stay in a cache
BATCHED_ELEMENTS = 2**20  # of single gradients that one batched product makes
SMALL_ELEMENTS = 2**13  # single gradients up to this size are made many at a time: calls would cost more than they do

_RELATIVE_ERROR = {torch.float32: 1e-4, torch.float64: 1e-12}  # that a norm may have from rounding inside Gram products


@dataclass
class GramCache:
    """The Gram matrices of the latest rows: layers that read the same rows (q, k, v; gate, up) share them."""

    rows_RI: Tensor | None = None
    grams: list[Tensor] | None = None
    lengths_R: Tensor | None = None

    def has(self, rows_RI: Tensor) -> bool:
        """Whether these are the rows whose Gram matrices are kept."""
        known = self.rows_RI
        return (
            known is not None
            and known.data_ptr() == rows_RI.data_ptr()
            and known.shape == rows_RI.shape
            and known.stride() == rows_RI.stride()
            and known.dtype == rows_RI.dtype
        )

    def of(self, rows_RI: Tensor, layout: Rows) -> tuple[list[Tensor], Tensor]:
        """Gram matrices of each trajectory's rows, and the length of every row."""
        if not self.has(rows_RI):
            self.grams, self.lengths_R = gram_matrices(rows_RI, layout)
            self.rows_RI = rows_RI
        assert self.grams is not None
        assert self.lengths_R is not None
        return self.grams, self.lengths_R


def gram_matrices(rows_RI: Tensor, layout: Rows) -> tuple[list[Tensor], Tensor]:
    """The Gram matrix of each trajectory's rows, flattened, and the length of every row."""
    rows_RI = at_least_float32(rows_RI)
    if len(set(layout.lengths)) == 1:
        rows_BTI = rows_RI.unflatten(0, (len(layout.lengths), -1))
        grams = list(torch.bmm(rows_BTI, rows_BTI.transpose(1, 2)).flatten(1))
    else:
        grams = [torch.mm(rows, rows.t()).view(-1) for rows in rows_RI.split(layout.lengths)]
    return grams, torch.linalg.vector_norm(rows_RI, dim=1)


def gram_squared_norms(use: OuterUse, shared: GramCache) -> tuple[Tensor, list[int]]:
    """||L^T R||^2 = <L L^T, R R^T> per trajectory, without the gradient: (B,) float64, and where it is not trusted.

    Terms of both signs are summed, so that rounding is relative to (sum_t |l_t| |r_t|)^2, not to the result. Where a
    trajectory's token gradients nearly cancel, too few digits remain; the caller computes those another way.
    """
    left_grams, left_R = gram_matrices(use.left_RP, use.rows)
    right_grams, right_R = shared.of(use.right_RQ, use.rows)
    products = [torch.dot(a, b) for a, b in zip(left_grams, right_grams, strict=True)]
    squares_B = torch.stack(products).double()
    largest_B = use.rows.sums(left_R * right_R).double().square()
    epsilon = torch.finfo(left_R.dtype).eps
    doubtful_B = epsilon * largest_B > _RELATIVE_ERROR[left_R.dtype] * squares_B
    return squares_B, doubtful_B.nonzero()[:, 0].tolist()


def single_gradient_tiles(use: OuterUse, member: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
    """Every trajectory's gradient in consecutive parts: (trajectory's position, offset, flat part).

    A part is overwritten by the next one. Parts of all trajectories come before the next offset, so that what they are
    added to stays in the cache too.
    """
    left, right = at_least_float32(use.left_RP), at_least_float32(use.right_RQ)
    height, width = left.shape[1], right.shape[1]
    step = max(1, min(height, TILE_ELEMENTS // width))
    # equal tiles instead of full ones and a rest
    step = -(-height // -(-height // step))
    scratch = left.new_empty(step, width)
    parts = list(zip(left.split(use.rows.lengths), right.split(use.rows.lengths), strict=True))
    chosen = range(len(parts)) if member is None else [member]
    for begin in range(0, height, step):
        rows = min(step, height - begin)
        matrix = scratch[:rows]
        flat = matrix.view(-1)
        for index in chosen:
            own_left, own_right = parts[index]
            torch.mm(own_left[:, begin : begin + rows].t(), own_right, out=matrix)
            yield index, begin * width, flat
