"""The watchdog's rules, by hand: bounds, windows, references, cool-down, and which trajectories are named."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacing_cases import finished_group
from vcpo.config import load_config, parse_config
from vcpo.errors import UserError
from vcpo.observe.alarms import AlarmLog, culprits, read_alarms
from vcpo.observe.watchdog import Alarm, Rule, Watchdog
from vcpo.pipeline.staleness_control import StalenessControl
from vcpo.records import Grade, Group
from vcpo.watchdog_config import WatchdogSection

ROOT = Path(__file__).parents[1]
DEFAULTS = [Rule(metric, **rule.model_dump()) for metric, rule in WatchdogSection().rules.items()]


def alarm_steps(rule: Rule, values: list[float], reference_steps: int = 4) -> list[int]:
    """The steps, from 1, at which the rule raises an alarm."""
    dog = Watchdog([rule], reference_steps)
    return [step for step, value in enumerate(values, 1) if dog.observe(step, {rule.metric: value})]


def test_an_alarm_needs_count_of_the_last_window_values_outside() -> None:
    rule = Rule("ess", below=0.2, count=3, window=5, cooldown=100)
    assert alarm_steps(rule, [0.1, 0.9, 0.1, 0.9, 0.1]) == [5]
    assert alarm_steps(rule, [0.1, 0.9, 0.9, 0.1, 0.9, 0.1, 0.9, 0.9]) == []
    assert alarm_steps(rule, [0.2] * 20) == []  # at the bound is inside


def test_the_step_of_the_alarm_is_itself_outside() -> None:
    rule = Rule("kl", above=1.0, count=2, window=3, cooldown=1)
    # after the cool-down the window is empty: 2, 2 alarm; step 3 is silent; 0, 2, 2 alarm at the second 2
    assert alarm_steps(rule, [2.0, 2.0, 2.0, 0.0, 2.0, 2.0]) == [2, 6]


def test_after_an_alarm_the_rule_is_silent_and_then_needs_a_full_count_again() -> None:
    rule = Rule("kl", above=1.0, count=2, window=3, cooldown=4)
    # silent at 3 to 6, values at 7 and 8 fill the window
    assert alarm_steps(rule, [2.0] * 10) == [2, 8]


def test_nan_and_infinity_count_as_outside_and_a_missing_metric_counts_neither_way() -> None:
    assert alarm_steps(Rule("ess", below=0.2, count=2, window=2), [math.nan, math.nan]) == [2]
    assert alarm_steps(Rule("kl", above=0.2, count=2, window=2), [math.inf, math.nan]) == [2]
    dog = Watchdog([Rule("kl", above=0.2, count=2, window=2)], 4)
    assert [bool(dog.observe(step, m)) for step, m in enumerate([{"kl": 1.0}, {}, {"kl": 1.0}])] == [False, False, True]


def test_bounds_on_both_sides_are_counted_apart() -> None:
    rule = Rule("entropy", below=0.5, above=2.0, count=2, window=4)
    assert alarm_steps(rule, [0.1, 3.0, 1.0, 1.0]) == []
    assert alarm_steps(rule, [0.1, 3.0, 0.1, 1.0]) == [3]


def test_multiples_refer_to_the_median_of_the_first_values() -> None:
    rule = Rule("grad_norm", above=4.0, scale="median", count=1, window=1, cooldown=0)
    # the median of 1, 2, 3, 100 is 2.5, so the bound is 10; nothing is judged before it is known
    assert alarm_steps(rule, [1.0, 2.0, 3.0, 100.0, 10.0, 10.1]) == [6]
    (alarm,) = Watchdog([rule], 1).observe(1, {}) or [None]
    assert alarm is None


def test_deviations_are_robust_and_have_a_least_size() -> None:
    rule = Rule("reward", below=-3.0, scale="deviation", count=1, window=1, cooldown=0)
    # median 0.5; absolute deviations 0.1, 0, 0, 0.1, 9.5: median 0.1; the bound is 0.5 - 3 x 0.14826 = 0.0552
    assert alarm_steps(rule, [0.4, 0.5, 0.5, 0.6, 10.0, 0.06, 0.055], reference_steps=5) == [7]
    # equal values have no spread; a deviation is then 2% of the median: 0.5 - 3 x 0.01 = 0.47
    assert alarm_steps(rule, [0.5, 0.5, 0.5, 0.48, 0.46], reference_steps=3) == [5]


def test_a_median_that_is_not_positive_has_no_multiples() -> None:
    rule = Rule("grad_norm", below=0.5, above=2.0, scale="median", count=1, window=1)
    assert alarm_steps(rule, [0.0, 0.0, 0.0, 0.0, 5.0]) == []


def test_a_reference_takes_finite_values_only() -> None:
    rule = Rule("grad_norm", above=4.0, scale="median", count=1, window=1)
    assert alarm_steps(rule, [math.nan, 1.0, math.inf, 1.0, 3.9, 4.1], reference_steps=2) == [6]


def test_the_sentence_has_the_numbers() -> None:
    dog = Watchdog([Rule("grad_norm", above=4.0, scale="median", count=2, window=3)], 1)
    alarms = [alarm for step, v in enumerate([2.0, 9.0, 10.0], 1) for alarm in dog.observe(step, {"grad_norm": v})]
    assert alarms == [
        Alarm(
            3, "grad_norm", "above", 10.0, 8.0, 2, 2,
            "grad_norm was above 8 (4 x its first median) in 2 of the last 2 steps, now 10",
        )
    ]  # fmt: skip


def test_forgetting_empties_windows_and_cool_downs_but_keeps_the_reference() -> None:
    dog = Watchdog([Rule("grad_norm", above=2.0, scale="median", count=2, window=2, cooldown=50)], 1)
    heard = [bool(dog.observe(step, {"grad_norm": v})) for step, v in enumerate([1.0, 3.0, 3.0], 1)]
    assert heard == [False, False, True]
    dog.forget()
    assert [bool(dog.observe(step, {"grad_norm": 3.0})) for step in (4, 5)] == [False, True]


@pytest.mark.parametrize(("in_flight", "limits"), [(False, [0, 0, 3, 3]), (True, [0, 0, 0, 0, 0, 3, 3])])
def test_a_drain_holds_the_staleness_limit_at_0_for_its_steps_and_for_what_is_in_flight(
    in_flight: bool, limits: list[int]
) -> None:
    control = StalenessControl(3, None, in_flight)
    control.drain(2)
    seen = []
    for _ in limits:
        seen.append(control.limit)
        control.observe({"ess": 0.0})
        state = json.loads(json.dumps(control.state()))
        control = StalenessControl(3, None, in_flight)
        control.load_state(state)
    assert seen == limits


HEALTHY = {
    "ess": st.floats(0.23, 1.0),
    "max_weight_share": st.floats(0.0, 0.25),
    "kl": st.floats(-1.0, 0.11),
    "grad_norm": st.floats(0.0, 1e6),
    "entropy": st.floats(0.0, 10.0),
    "reward": st.floats(-100.0, 100.0),
    "response_length": st.floats(0.0, 1e5),
}


@given(st.fixed_dictionaries(HEALTHY), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_constant_healthy_metrics_never_raise_an_alarm(metrics: dict[str, float], reference_steps: int) -> None:
    dog = Watchdog(DEFAULTS, reference_steps)
    assert not any(dog.observe(step, metrics) for step in range(60))


@given(st.lists(st.sampled_from([0.1, 0.15, 0.5, 1.0, 4.0, math.nan]), max_size=40), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_the_state_continues_the_watch_through_json(values: list[float], cut: int) -> None:
    rules = [
        Rule("ess", below=0.2, count=2, window=3, cooldown=3),
        Rule("grad_norm", above=3.0, scale="median", count=1, window=2, cooldown=2),
    ]
    whole, first = Watchdog(rules, 3), Watchdog(rules, 3)
    resumed = Watchdog(rules, 3)
    for step, value in enumerate(values):
        if step == cut:
            resumed.load_state(json.loads(json.dumps(first.state())))
        dog = first if step < cut else resumed
        metrics = {"ess": value, "grad_norm": value}
        # compared as text, because NaN is not equal to itself
        assert str(dog.observe(step, metrics)) == str(whole.observe(step, metrics))
        if step < cut <= step + 1:
            resumed.load_state(first.state())


@dataclass
class Details:
    log_ratios_B: list[float]
    weights_B: list[float]
    advantages_B: list[float]
    squared_norms_B: list[float] | None = None


def groups_of(*rewards: list[float | None]) -> list[Group]:
    """Groups by the rewards of their responses; response i of each has i + 1 tokens."""
    groups = []
    for number, of_group in enumerate(rewards):
        group = finished_group(number, *[[0] * (i + 1) for i in range(len(of_group))])
        for trajectory, reward in zip(group.trajectories, of_group, strict=True):
            trajectory.grade = Grade(reward)
        groups.append(group)
    return groups


def named(metric: str, side: str, details: Details, groups: list[Group], most: int = 2) -> list[tuple[int, int, float]]:
    alarm = Alarm(1, metric, side, 0.0, 0.0, 1, 1, "")  # type: ignore[arg-type]
    return [(c.group, c.response, round(c.value, 6)) for c in culprits(alarm, groups, details, most)]


def test_the_responsible_trajectories_are_named_by_what_the_metric_is_made_of() -> None:
    groups = groups_of([1.0, 0.0], [0.5, None])
    # weights 1, 2, 5; the unscored response has the largest log-ratio and is no part of them
    details = Details([0.0, math.log(2), math.log(5), 9.0], [1.0, 2.0, 5.0, 8.0], [1.0, -2.0, 0.1, 0.0])
    assert named("ess", "below", details, groups) == [(1, 0, 0.625), (0, 1, 0.25)]
    assert named("max_weight_share", "above", details, groups, 1) == [(1, 0, 0.625)]
    assert named("kl", "above", details, groups, 1) == [(0, 0, 0.0)]
    assert named("grad_norm", "above", details, groups) == [(0, 1, 4.0), (0, 0, 1.0)]
    assert named("reward", "below", details, groups) == [(0, 1, 0.0), (1, 0, 0.5)]
    assert named("response_length", "above", details, groups, 1) == [(0, 1, 2.0)]
    assert named("response_length", "below", details, groups) == [(0, 0, 1.0), (1, 0, 1.0)]
    assert named("entropy", "below", details, groups) == []
    details.squared_norms_B = [100.0, 4.0, math.nan, math.nan]
    details.advantages_B[2] = 0.0
    assert named("grad_norm", "above", details, groups) == [(0, 0, 10.0), (0, 1, 8.0)]


def test_unusable_numbers_are_named_first() -> None:
    groups = groups_of([1.0, 0.0, 0.0])
    found = culprits(
        Alarm(1, "ess", "below", 0.0, 0.0, 1, 1, ""), groups, Details([0.0, math.nan, 1.0], [1.0] * 3, [0.0] * 3)
    )
    assert [c.response for c in found] == [1, 2, 0]
    assert named("ess", "below", Details([0.0, math.inf, 1.0], [1.0] * 3, [0.0] * 3), groups, 1) == [(0, 1, 1.0)]


def test_the_record_of_alarms_is_cut_where_a_run_resumes(tmp_path: Path) -> None:
    log = AlarmLog(tmp_path, None)
    assert read_alarms(tmp_path) == []
    for step in (3, 7):
        log.write(Alarm(step, "ess", "below", math.nan, 0.2, 3, 5, "low"), [], action="warn")
    with (tmp_path / "alarms.jsonl").open("a") as file:
        file.write('{"step": 9, "me')  # torn by a kill
    assert [(line["step"], line["value"], line["action"]) for line in read_alarms(tmp_path)] == [
        (3, "NaN", "warn"),
        (7, "NaN", "warn"),
    ]
    AlarmLog(tmp_path, 5)
    assert [line["step"] for line in read_alarms(tmp_path)] == [3]
    AlarmLog(tmp_path, None)
    assert not (tmp_path / "alarms.jsonl").exists()


BASE = ["model.path=x", "task=sort"]


def test_a_rule_keeps_what_is_not_given_and_null_switches_it_off() -> None:
    section = load_config(None, [*BASE, "watchdog.entropy.below=0.3", "watchdog.kl=null"]).watchdog
    assert section.entropy is not None
    assert (section.entropy.below, section.entropy.above, section.entropy.scale) == (0.3, 2.0, "median")
    assert section.kl is None
    assert "kl" not in section.rules


def test_the_section_survives_being_written_down_with_the_method_of_a_rollback() -> None:
    config = load_config(
        None, [*BASE, "watchdog.rollback.method=vcpo", "watchdog.rollback.method.step_size=linear_ess"]
    )
    again = parse_config(config.to_plain())
    assert again == config
    assert again.watchdog.rollback.method is not None
    assert again.watchdog.rollback.method.spec.step_size == "linear_ess"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["watchdog.ess.belo=1"], "unknown key watchdog.ess.belo; did you mean 'watchdog.ess.below'"),
        (["watchdog.ess.count=9"], "count 9 can never be reached in a window of 5"),
        (["watchdog.action=panic"], "must be 'warn', 'damp', 'drain', 'rollback' or 'stop'"),
        (["watchdog.rollback.method=vcp"], "unknown method 'vcp'; did you mean 'vcpo'"),
        (
            ["watchdog.enabled=true", "watchdog.action=rollback", "checkpoint.save_steps=0"],
            "watchdog.action=rollback needs checkpoints to go back to: give checkpoint.save_steps",
        ),
        (
            ["watchdog.rollback.method=rloo", "method=tis", "method.baseline=none", "sampling.num_generations=1"],
            r"watchdog.rollback.method.baseline=leave_one_out needs sampling.num_generations of 2 or more",
        ),
    ],
)
def test_mistakes_are_answered_with_a_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_config(None, [*BASE, *overrides])


def test_the_kept_results_are_those_of_the_default_rules() -> None:
    kept = json.loads((ROOT / "results/watchdog/detection.json").read_text(encoding="utf-8"))
    assert kept["rules"] == [asdict(rule) for rule in DEFAULTS]


def test_the_benchmark_measures_warning_from_the_first_alarm_to_the_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import watchdog

    # 0.4 is the best before 0.19; 0.2 is half of it and no fall
    accuracies = [(0, 0.3), (10, 0.4), (20, 0.2), (30, 0.19), (40, 0.5)]
    train = [{"step": step, "ess": 0.1 if step > 12 else 0.9} for step in range(1, 41)]
    config = load_config(None, BASE)
    run = watchdog.Run("tis", 1, "run", config, train, accuracies)
    found = watchdog.replay(run, [Rule("ess", below=0.2, count=3, window=5, cooldown=100)])
    assert (found.falls_at, found.first_alarm, found.warning, found.alarms) == (30, 15, 15, 1)
    assert found.lowest == pytest.approx(0.19 / 0.4)
    # the third smallest of the worst five values in a row is the bound that would just not have been crossed
    values = [0.9, 0.5, 0.9, 0.4, 0.3, 0.8, 0.9]
    run = watchdog.Run("vcpo", 1, "run", config, [{"ess": value} for value in values], [])
    assert watchdog.extreme([run], Rule("ess", below=0.2), upper=False) == 0.5
