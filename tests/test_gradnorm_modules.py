"""Any ``nn.Module`` of covered layers, on padded batches or packed rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradnorm_cases import (
    BATCH,
    TOKENS,
    WAYS,
    WIDTH,
    assert_exact,
    inputs_and_gradients,
    lookup,
    record_run,
    slow_rows,
)


class Shared(nn.Module):
    """One layer and one embedding, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(ids) + self.embedding(ids // 2))
        return self.linear(torch.tanh(self.linear(hidden)))  # type: ignore[no-any-return]


class TiedThreeTimes(nn.Module):
    """A weight that is a table, and a linear layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.head(self.embedding(ids % WIDTH))))  # type: ignore[no-any-return]


class TiedBackwards(nn.Module):
    """The lookup comes after the product, so that its gradient comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(9, WIDTH)
        self.second = nn.Embedding(9, WIDTH)
        self.product = nn.Linear(WIDTH, 9, bias=False)
        self.product.weight = self.second.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.product(self.first(ids)))[..., :WIDTH] * self.second(ids)  # type: ignore[no-any-return]


class PartlyUnused(nn.Module):
    """Outputs that nothing reads, of a layer that is used again and of a table that is tied; an input by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.embedding = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        self.table(ids)
        hidden = self.embedding(ids)
        self.linear(hidden)
        return self.head(input=self.linear(input=hidden))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """A norm over each head's part, as in Qwen3's attention; ``first``: of (batch, heads, tokens), as in Gemma 3's."""

    def __init__(self, heads: int = 3, first: bool = False) -> None:
        super().__init__()
        self.heads, self.first = heads, first
        self.inner = nn.Linear(WIDTH, 4 * heads)
        self.norm = nn.RMSNorm(4, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).unflatten(-1, (self.heads, 4))
        if self.first and x.dim() == 3:
            return self.norm(parts.transpose(1, 2)).transpose(1, 2).flatten(-2)  # type: ignore[no-any-return]
        return self.norm(parts).flatten(-2)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu in place": lambda: lookup(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 3, bias=False)),
    "layer norm": lambda: lookup(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3), nn.LayerNorm(3, bias=False)),
    "rms norm": lambda: lookup(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3), nn.RMSNorm(3, eps=1e-2)),
    "padding row": lambda: lookup(nn.Linear(WIDTH, 3), padding_idx=4),
    "frozen layer between": lambda: lookup(nn.Linear(WIDTH, 8).requires_grad_(False), nn.Linear(8, 3)),
    "shared": Shared,
    "tied three times": TiedThreeTimes,
    "tied backwards": TiedBackwards,
    "partly unused": PartlyUnused,
    "heads": lambda: lookup(Heads()),
    "one head": lambda: lookup(Heads(1)),
    "as many heads as tokens": lambda: lookup(Heads(TOKENS)),
    "as many heads as packed rows": lambda: lookup(Heads(BATCH * TOKENS)),
    "heads first": lambda: lookup(Heads(first=True)),
    "one head first": lambda: lookup(Heads(1, first=True)),
    "as many heads first": lambda: lookup(Heads(TOKENS, first=True)),
    "as many heads first as packed rows": lambda: lookup(Heads(BATCH * TOKENS, first=True)),
    "nested": lambda: lookup(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU(), nn.Linear(WIDTH, 2)))),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_padded_batch(name: str) -> None:
    model = make(name)
    ids, g = inputs_and_gradients(model)
    singles = slow_rows(model, ids, g, range(BATCH))
    for way in WAYS:
        assert_exact(model, record_run(model, [[TOKENS] * BATCH], lambda: (model(ids), g), way), singles, 1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("leading", [(), (1,)])
def test_packed_rows(name: str, leading: tuple[int, ...]) -> None:
    model = make(name)
    ids, g = inputs_and_gradients(model)
    ids, g = ids.flatten(), g.flatten(0, 1)
    lengths = [12, 1, 9, 8]
    ends = [sum(lengths[: i + 1]) for i in range(4)]
    singles = slow_rows(model, ids, g, [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)])
    for way in WAYS:
        result = record_run(model, [lengths], lambda: (model(ids.view(*leading, -1)), g.view(*leading, *g.shape)), way)
        assert_exact(model, result, singles, 1e-12)


@pytest.mark.parametrize("name", ["relu in place", "shared"])
def test_parts_of_a_model_may_be_frozen(name: str) -> None:
    model = make(name)
    ids, g = inputs_and_gradients(model)
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    singles = slow_rows(model, ids, g, range(BATCH))
    for way in WAYS:
        assert_exact(model, record_run(model, [[TOKENS] * BATCH], lambda: (model(ids), g), way), singles, 1e-12)


def test_passes_without_gradient_inside_a_recording_leave_no_trace() -> None:
    model = make("shared")
    ids, g = inputs_and_gradients(model)
    singles = slow_rows(model, ids, g, range(BATCH))

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = model(ids[:2])
        outputs = model(ids)
        with torch.no_grad():
            torch.testing.assert_close(model(ids[:2]), before)
        return outputs, g

    assert_exact(model, record_run(model, [[TOKENS] * BATCH], run), singles, 1e-12)
