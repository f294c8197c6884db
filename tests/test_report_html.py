"""The HTML report: complete, self-contained, and safe against what models write."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from vcpo.errors import UserError
from vcpo.observe.alarms import AlarmLog, Culprit
from vcpo.observe.watchdog import Alarm
from vcpo.report.html import write_report

TRANSCRIPT = """# Step 10: 1 of 8 trajectories, from best to worst reward

## group 1 response 0

- reward 1, correct

Response:

    </pre><script>alert(1)</script><img src=x onerror=alert(1)>
    ## no heading
"""


def make_run(path: Path, steps: int = 3, **extra: Any) -> Path:
    path.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "time": 10.0, "kind": "eval", "accuracy": 0.125, "reward": 0.1}]
    for step in range(1, steps + 1):
        train = {"reward": 0.25, "ess": 0.5, "kl_k3": 1e-3, "grad_norm": 0.7, "lag_mean": 2.0, "lag_max": 4.0}
        lines.append({"step": step, "time": 10.0 + step, "kind": "train", **train, **extra})
    lines.append({"step": steps, "time": 99.0, "kind": "eval", "accuracy": 0.75, "reward": 0.7})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"seed": 3, "method": {"name": "vcpo"}, "task": {"name": "sort"}, "training": {"learning_rate": 2e-4}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    session = {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "command": ["vcpo", "train", "r.yaml"]}
    (path / "environment.json").write_text(json.dumps([session]))
    (path / "transcripts").mkdir()
    (path / "transcripts" / "step-000010.md").write_text(TRANSCRIPT)
    return path


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_report_has_numbers_curves_transcripts_and_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my-run")
    page = write_report([run], run / "report.html").read_text(encoding="utf-8")
    for text in (
        "my-run",
        "75.0%",
        "from 12.5%",
        "Effective sample size",
        "Gradient norm before clipping",
        "group 1 response 0",
        "vcpo train r.yaml",
        "torch 2.13.0",
        "learning_rate: 0.0002",
    ):
        assert text in page


def test_the_report_loads_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = write_report([run], run / "report.html").read_text(encoding="utf-8")
    for tag, attributes in Elements(page).found:
        assert tag not in {"script", "link", "iframe", "img", "object", "image"}
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_what_models_write_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>run</b> & $x$ _")
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<b>" not in page
    assert not any(name.startswith("on") for _, attributes in Elements(page).found for name in attributes)


def test_alarms_of_the_watchdog_are_told_with_who_was_behind_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "Alarms" not in write_report([run], tmp_path / "without.html").read_text()
    culprit = Culprit("group 4 response 1", 4, 1, "share of the weights", 0.8125)
    alarm = Alarm(2, "ess", "below", 0.1, 0.23, 3, 5, "ess 0.1 is below 0.23")
    log = AlarmLog(run, None)
    log.write(alarm, [culprit], action="rollback", back_to_step=1)
    log.write(alarm, [], action="warn", back_to_step=None)
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "ess 0.1 is below 0.23; share of the weights: group 4 response 1 (0.812); back to step 1" in page
    assert "ess 0.1 is below 0.23; warn" in page


def test_several_runs_share_one_page_under_names_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / place / "run") for place in ("a", "b")]
    page = write_report(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    assert "2 runs" in page
    assert "a/run" in page
    assert "b/run" in page


def test_ids_in_the_page_are_unique(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = write_report([run], run / "report.html").read_text(encoding="utf-8")
    ids = [attributes["id"] for _, attributes in Elements(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_non_finite_numbers_do_not_break_the_report(tmp_path: Path, value: str) -> None:
    run = make_run(tmp_path / "run", steps=60, grad_norm=value, kl_k3=value, reward=value)
    assert write_report([run], run / "report.html").is_file()


def test_a_run_that_has_just_begun_can_be_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "0 (0 skipped)" in page


def test_decades_get_a_logarithmic_axis_and_zeros_do_not_break_it(tmp_path: Path) -> None:
    from vcpo.report.curves import draw_runs
    from vcpo.report.runs import load_runs

    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        for step, norm in ((4, 0.0), (5, 50.0), (6, 1e-7)):
            file.write(json.dumps({"step": step, "time": 99.0, "kind": "train", "grad_norm": norm}) + "\n")
    scales = {axes.get_title(loc="left"): axes.get_yscale() for axes in draw_runs(load_runs([run])).axes}
    assert scales["Gradient norm before clipping"] == "log"
    assert scales["KL(sampler ‖ learner) per token"] == "linear"
    assert write_report([run], run / "report.html").is_file()


def test_a_directory_without_metrics_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        write_report([tmp_path], tmp_path / "report.html")


def test_a_running_mean_leaves_out_what_is_missing() -> None:
    from vcpo.report.figures import smooth

    assert smooth([1.0, 2.0, 6.0, math.nan, 4.0], 3).tolist() == [1.5, 3.0, 4.0, 5.0, 4.0]
    assert smooth([2.0], 5).tolist() == [2.0]
    assert math.isnan(smooth([math.nan], 1)[0])
