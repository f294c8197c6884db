"""The comparison table against numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from vcpo.errors import UserError
from vcpo.report.comparison import ComparisonTable, write_comparison
from vcpo.report.comparison_figure import _over_seeds


def make_run(path: Path, accuracies: list[float], ess: list[float], seconds: float = 60.0, skipped: int = 0) -> Path:
    path.mkdir(parents=True)
    lines = [
        {"step": 10 * i, "time": 0.0, "kind": "eval", "accuracy": accuracy} for i, accuracy in enumerate(accuracies)
    ]
    for step, value in enumerate(ess, start=1):
        numbers = {"ess": value, "kl_k3": 1e-3 * step, "grad_norm": 0.5, "skipped": float(step <= skipped)}
        lines.append({"step": step, "time": float(step), "kind": "train", **numbers})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    session = {"started": 100.0, "ended": 100.0 + seconds, "outcome": "finished"}
    (path / "environment.json").write_text(json.dumps([session]))
    return path


@pytest.fixture
def entries(tmp_path: Path) -> list[tuple[str, int, Path]]:
    return [
        ("vcpo", 1, make_run(tmp_path / "runs" / "a", [0.1, 0.6, 0.5], [0.9] * 5 + [0.4] * 10, seconds=50)),
        ("vcpo", 2, make_run(tmp_path / "runs" / "b", [0.1, 0.5, 0.7], [0.6] * 10, seconds=70, skipped=2)),
        ("tis", 1, make_run(tmp_path / "runs" / "c", [0.1, 0.5, 0.0], [0.02] * 10)),
    ]


def test_variants_are_summarised_over_their_seeds(entries: list[tuple[str, int, Path]]) -> None:
    vcpo, tis = ComparisonTable(entries).variants
    assert (vcpo.variant, vcpo.seeds, vcpo.collapsed) == ("vcpo", [1, 2], 0)
    assert vcpo.final_accuracy_mean == pytest.approx(0.6)
    assert vcpo.final_accuracy_sd == pytest.approx(math.sqrt(2 * 0.1**2))
    assert vcpo.best_accuracy_mean == pytest.approx(0.65)
    assert vcpo.final_ess_mean == pytest.approx(0.5)
    assert vcpo.seconds_mean == pytest.approx(60)
    assert (tis.collapsed, tis.final_accuracy_mean, tis.final_accuracy_sd) == (1, 0.0, None)


def test_the_files_hold_every_run_and_every_variant_and_no_path_of_the_machine(
    entries: list[tuple[str, int, Path]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    files = ComparisonTable(entries).write(out, command="vcpo compare recipe.yaml")
    names = ["results.csv", "ranking.csv", "results.json", "results.md", "comparison.png"]
    assert [path.name for path in files] == names
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"], row["collapsed"], row["skipped_steps"]) for row in rows] == [
        ("vcpo", "1", "False", "0"),
        ("vcpo", "2", "False", "2"),
        ("tis", "1", "True", "0"),
    ]
    assert [row["run_dir"] for row in rows] == ["../runs/a", "../runs/b", "../runs/c"]
    with (out / "ranking.csv").open(newline="") as file:
        ranking = list(csv.DictReader(file))
    assert [(row["rank"], row["variant"], row["seeds"], row["to_best_seeds"]) for row in ranking] == [
        ("1", "vcpo", "1 2", ""),
        ("1", "tis", "1", "1"),
    ]
    data = json.loads((out / "results.json").read_text())
    assert data["command"] == "vcpo compare recipe.yaml"
    assert data["ranking"]["score"] == "late_accuracy"
    assert [variant["variant"] for variant in data["variants"]] == ["vcpo", "tis"]
    assert data["variants"][0]["late_accuracy_low"] == pytest.approx(0.5)
    assert data["variants"][0]["late_accuracy_high"] == pytest.approx(0.7)
    assert data["variants"][1]["late_accuracy_low"] is None
    assert data["variants"][1]["to_best_mean"] == pytest.approx(-0.5)
    assert len(data["runs"]) == 3
    assert str(tmp_path) not in (out / "results.json").read_text()
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_one_markdown_table_holds_ranking_and_means(tmp_path: Path) -> None:
    entries = [
        (name, seed, make_run(tmp_path / f"{name}{seed}", [0.1, accuracy], [0.5]))
        for name, accuracies in {"tis": [0.5, 0.5, 0.04], "vcpo": [0.6, 0.65, 0.7], "same": [0.6, 0.7, 0.65]}.items()
        for seed, accuracy in enumerate(accuracies, start=1)
    ]
    # Wilson for 3 of 3: n / (n + z^2) = 3 / 6.8415; for 2 of 3: the roots of (2/3 - p)^2 = z^2 p (1 - p) / 3
    head, line, *rows = ComparisonTable(entries).markdown().splitlines()
    assert head == (
        "| rank | variant | late acc. | to the best | stable | collapsed | seeds | final acc. | best acc. | final ESS |"
    )
    assert line == "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    vcpo, same, tis = rows
    rest = "100% [44, 100] | 0/3 | 3 | 65.0% ± 5.0 | 65.0% | 0.500 |"
    assert vcpo == f"| 1= | `vcpo` | 65.0% [60.0, 70.0] | - | {rest}"
    assert same == f"| 1= | `same` | 65.0% [60.0, 70.0] | +0.0 [-5.0, +5.0] | {rest}"
    assert tis.startswith("| 3 | `tis` | 34.7% [4.0, 50.0] | -30.3 [-66.0, -10.0] | 67% [21, 94] | 1/3 |")
    assert tis.endswith("| 3 | 34.7% ± 26.6 | 36.7% | 0.500 |")


def test_the_printed_table_shows_collapses(entries: list[tuple[str, int, Path]], tmp_path: Path) -> None:
    output = io.StringIO()
    write_comparison(entries, tmp_path / "out", Console(file=output, width=120))
    shown = output.getvalue()
    assert "60.0% ± 14.1" in shown
    assert "60.0% [50.0, 70.0]" in shown
    assert "-50.0" in shown
    assert "0/2" in shown
    assert "1/1" in shown
    assert "comparison.png" in shown


def test_runs_without_evaluation_are_not_called_collapsed(tmp_path: Path) -> None:
    table = ComparisonTable([("sync", 1, make_run(tmp_path / "run", [], [0.9]))])
    assert table.runs[0].collapsed is None
    assert table.variants[0].final_accuracy_mean is None
    assert (table.variants[0].standing.rank, table.variants[0].stable_share) == (None, None)
    assert "| - | `sync` | - | - | - | - | 1 | - | - | 0.900 |" in table.markdown()
    table.write(tmp_path / "out")


def test_runs_that_failed_are_counted_beside_the_others_and_in_no_mean(
    entries: list[tuple[str, int, Path]], tmp_path: Path
) -> None:
    table = ComparisonTable(entries, failed=[("vcpo", 3), ("broken", 1), ("broken", 2)])
    vcpo, _, broken = table.variants
    assert (vcpo.seeds, vcpo.failed_seeds, vcpo.judged) == ([1, 2], [3], 2)
    assert (broken.variant, broken.seeds, broken.failed_seeds, broken.standing.rank) == ("broken", [], [1, 2], None)
    assert "| 2 (+1 failed) |" in table.markdown()
    assert "| - | `broken` | - | - | - | - | 0 (+2 failed) | - | - | - |" in table.markdown()
    table.write(tmp_path / "out")


def test_the_tables_can_be_read_in_eighty_columns(entries: list[tuple[str, int, Path]], tmp_path: Path) -> None:
    entries = [(variant.replace("tis", "tis-tuned-lr"), seed, run_dir) for variant, seed, run_dir in entries]
    entries += [("tis-tuned-lr", seed, make_run(tmp_path / str(seed), [0.1, 0.2], [0.5])) for seed in (2, 3)]
    output = io.StringIO()
    ComparisonTable(entries, failed=[("tis-tuned-lr", 4)]).print(Console(file=output, width=80))
    shown = output.getvalue()
    assert "…" not in shown
    assert shown.count(" tis-tuned-lr ") == 2
    for whole in ("[50.0, 70.0]", "[-50.0, -50.0]", "[34, 100]", "[21, 94]", "3 (+1 failed)"):
        assert whole in shown


def test_variants_are_listed_by_rank_and_drawn_in_the_order_given(entries: list[tuple[str, int, Path]]) -> None:
    table = ComparisonTable(entries[::-1])
    assert [row.variant for row in table.variants] == ["vcpo", "tis"]
    assert [run.variant for run in table.runs] == ["tis", "vcpo", "vcpo"]


def test_a_run_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        ComparisonTable([("sync", 1, tmp_path)])


def test_the_figure_shows_mean_and_range_of_the_runs_that_have_the_step() -> None:
    runs = [([1, 2, 3], [1.0, 4.0, math.nan]), ([1, 2], [3.0, 16.0])]
    assert _over_seeds(runs, log=False) == ([1, 2], [2.0, 10.0], [1.0, 4.0], [3.0, 16.0])
    steps, means, low, high = _over_seeds([([1], [0.0]), ([1], [4.0]), ([1], [16.0])], log=True)
    assert (steps, low, high) == ([1], [4.0], [16.0])
    assert means == pytest.approx([8.0])
