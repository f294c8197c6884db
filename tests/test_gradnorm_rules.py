"""The registry of layer rules, what is refused by name, and the state in which a recording leaves a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradnorm_cases import (
    BATCH,
    TOKENS,
    WAYS,
    WIDTH,
    Way,
    assert_exact,
    assert_untouched,
    inputs_and_gradients,
    lookup,
    record_run,
    slow_rows,
)
from vcpo.errors import UserError
from vcpo.gradnorm import rules
from vcpo.gradnorm.recorder import GradientRecorder
from vcpo.gradnorm.rows import Rows
from vcpo.gradnorm.rules import Uses, find_rule, layer_rule
from vcpo.gradnorm.uses import VectorUse, at_least_float32


class Gain(nn.Module):
    """A user's layer: y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def test_a_user_adds_a_rule_for_his_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", list(rules._RULES))
    model = lookup(Gain(), nn.Linear(WIDTH, 3)).double()
    with pytest.raises(UserError, match=r"parameter '1\.gain' is in a layer of type Gain"):
        GradientRecorder(model)

    @layer_rule(lambda module: type(module) is Gain)
    def gain_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
        yield "gain", VectorUse(rows.sums(at_least_float32(g * x)), rows)

    ids, g = inputs_and_gradients(model)
    singles = slow_rows(model, ids, g, range(BATCH))
    for way in WAYS:
        assert_exact(model, record_run(model, [[TOKENS] * BATCH], lambda: (model(ids), g), way), singles, 1e-12)


def test_the_latest_rule_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", list(rules._RULES))

    @layer_rule(lambda module: isinstance(module, nn.Linear))
    def my_rule(module: Any, x: Tensor, g: Tensor, rows: Rows) -> Uses:
        return rules.linear_rule(module, x, g, rows)

    assert find_rule(nn.Linear(2, 2)) is my_rule


def test_trainable_parameter_without_a_rule_is_named_unless_frozen() -> None:
    model = lookup(Gain())
    with pytest.raises(UserError, match=r"parameter '1\.gain' is in a layer of type Gain"):
        GradientRecorder(model)
    model[1].gain.requires_grad_(False)  # type: ignore[index]
    GradientRecorder(model)


class ShiftedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


class CentredNorm(nn.Module):
    """Has the parameter and the epsilon of an RMSNorm, but is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def test_layer_that_computes_something_else_has_no_rule() -> None:
    assert find_rule(nn.Linear(2, 2)) is not None
    assert find_rule(ShiftedLinear(2, 2)) is None
    assert find_rule(CentredNorm()) is None
    assert find_rule(nn.Embedding(2, 2, max_norm=1.0)) is None
    assert find_rule(nn.Embedding(2, 2, scale_grad_by_freq=True)) is None
    assert find_rule(nn.Conv1d(2, 2, 1)) is None


def test_reparametrised_layer_is_named() -> None:
    model = lookup(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3)))
    with pytest.raises(UserError, match=r"parametrizations\.weight\.original"):
        GradientRecorder(model)


class UsedOutside(nn.Module):
    """Reads a layer's weight besides calling the layer."""

    def __init__(self, is_called: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.linear = nn.Linear(WIDTH, 3)
        self.is_called = is_called

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        outputs = F.linear(hidden, self.linear.weight)
        return outputs + self.linear(hidden) if self.is_called else outputs


@pytest.mark.parametrize(
    ("is_called", "message"),
    [
        (True, "parameter 'linear.weight' is used outside of its layer's forward"),
        (False, r"'linear\.weight' could not"),
    ],
)
def test_parameter_used_outside_of_its_layer_is_named(is_called: bool, message: str) -> None:
    model = UsedOutside(is_called).double()
    ids, g = inputs_and_gradients(model)
    with pytest.raises(UserError, match=message):
        record_run(model, [[TOKENS] * BATCH], lambda: (model(ids), g))
    assert_untouched(model)
    assert all(p.grad is None for p in model.parameters())


def test_layer_that_sees_other_rows_is_named() -> None:
    model = lookup(nn.Flatten(0), nn.Unflatten(0, (-1, 3)), nn.Linear(3, 3)).double()
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    with pytest.raises(UserError, match="layer '3' was called on 70 rows"):
        record_run(model, [[TOKENS] * BATCH], lambda: (model(ids), torch.ones(70, 3)))
    assert_untouched(model)


class TokensFirst(nn.Module):
    """Turns a batch around before its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embedding(ids).transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


def test_layer_that_sees_tokens_before_trajectories_is_named() -> None:
    model = TokensFirst().double()
    ids, g = inputs_and_gradients(model)
    with pytest.raises(UserError, match="layer 'linear' was called on 30 rows, which are not"):
        record_run(model, [[TOKENS] * BATCH], lambda: (model(ids), g))


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def raise_error(*_: Any) -> None:
    raise ValueError("from a forward")


@pytest.mark.parametrize("failure", [None, raise_interrupt, raise_error])
@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_the_model_is_left_as_it_was(
    failure: Callable[..., None] | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookup(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)).double()
    ids, g = inputs_and_gradients(model)
    before = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]

    def run() -> tuple[Tensor, Tensor]:
        if failure is None:
            return model(ids), g
        layer: Any = model[3]  # type: ignore[index]
        if place == "inside":
            monkeypatch.setattr(F, "linear", failure)
            model(ids)
        register = layer.register_forward_pre_hook if place == "before" else layer.register_forward_hook
        handle = register(failure)
        try:
            model(ids)
        finally:
            handle.remove()
        raise AssertionError

    if failure is None:
        record_run(model, [[TOKENS] * BATCH], run, Way("single", True))
    else:
        with pytest.raises((KeyboardInterrupt, ValueError)):
            record_run(model, [[TOKENS] * BATCH], run)
    assert_untouched(model)
    assert all(p.grad is before[name] for name, p in model.named_parameters())
