"""The ``watchdog`` section of a configuration: which metrics are watched, within which bounds, and what an alarm does.

The default bounds come from the healthy runs of one seed (docs/watchdog.md).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vcpo.method_config import MethodSection

_WATCHED = ("ess", "max_weight_share", "kl", "grad_norm", "entropy", "reward", "response_length")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WatchRule(_Section):
    """When a metric is out of its range; a ``null`` bound is no bound (``vcpo.observe.watchdog``)."""

    below: float | None = None
    above: float | None = None
    scale: Literal["value", "median", "deviation"] = Field(
        "value",
        description="the bounds' unit: the metric's, or multiples of, or robust deviations from its first median",
    )
    count: PositiveInt = Field(3, description="alarm when so many of the last `window` steps are outside")
    window: PositiveInt = 5
    cooldown: NonNegativeInt = Field(10, description="steps without an alarm of the same rule after one")

    @model_validator(mode="after")
    def _can_alarm(self) -> WatchRule:
        if self.count > self.window:
            raise ValueError(f"count {self.count} can never be reached in a window of {self.window}")
        return self


class WatchRollback(_Section):
    """What ``watchdog.action=rollback`` goes back to, and how it goes on."""

    method: MethodSection | None = Field(None, description="the method from then on, as in `method`; null: the same")
    max_rollbacks: PositiveInt = 3
    then: Literal["warn", "stop"] = Field("warn", description="what an alarm does when all rollbacks have been used")
    healthy_after: PositiveInt = Field(
        10, description="a checkpoint counts as healthy when no alarm came within so many steps after it"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _method_shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class WatchdogSection(_Section):
    """Rules that notice a run going wrong, and what is done about it. A rule that is ``null`` is not applied."""

    enabled: bool = False
    action: Literal["warn", "damp", "drain", "rollback", "stop"] = "warn"
    reference_steps: PositiveInt = Field(10, description="a metric's first steps, whose median relative rules refer to")
    ess: WatchRule | None = WatchRule(below=0.23)
    max_weight_share: WatchRule | None = WatchRule(above=0.25)
    kl: WatchRule | None = WatchRule(above=0.11)
    grad_norm: WatchRule | None = WatchRule(below=0.01, above=7.0, scale="median")
    entropy: WatchRule | None = WatchRule(below=0.1, above=2.0, scale="median")
    reward: WatchRule | None = WatchRule(below=-3.0, scale="deviation")
    response_length: WatchRule | None = WatchRule(below=0.5, above=2.0, scale="median")
    damp_factor: Annotated[float, Field(gt=0, lt=1)] = Field(0.3, description="action=damp: times the learning rate")
    damp_steps: PositiveInt = Field(10, description="action=damp: for so many steps")
    drain_steps: PositiveInt = Field(5, description="action=drain: train so many steps on fresh responses only")
    rollback: WatchRollback = WatchRollback()

    @field_validator(*_WATCHED, mode="before")
    @classmethod
    def _keeps_what_is_not_given(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        default = cls.model_fields[str(info.field_name)].default
        return {**default.model_dump(), **value}

    @property
    def rules(self) -> dict[str, WatchRule]:
        """The rules that are applied, by metric."""
        found = {metric: getattr(self, metric) for metric in _WATCHED}
        return {metric: rule for metric, rule in found.items() if rule is not None}

    @property
    def rolls_back(self) -> bool:
        """Whether checkpoints are needed for more than resuming."""
        return self.enabled and self.action == "rollback"

    def to_plain(self) -> dict[str, Any]:
        """Plain data in the form that is accepted as input."""
        data = self.model_dump(mode="json")
        if self.rollback.method is not None:
            data["rollback"]["method"] = self.rollback.method.to_plain()
        return data
