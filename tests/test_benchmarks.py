"""The benchmark of the learner's step runs, and all its ways to the gradient agree."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


GRID = ("--sizes", "XS", "--tokens", "16", "--groups", "4", "--threads", "1", "--repeats", "2")


def measured(monkeypatch: pytest.MonkeyPatch, size: str, budget_seconds: float = 60.0) -> dict[str, Any]:
    """The variants' results of a tiny cell; the machine's speed, which takes longer than all of them, is left out."""
    from harness import measure
    from harness.cells import Cell

    monkeypatch.setattr(measure, "measured_peak", lambda device: 1e9)
    result: dict[str, Any] = measure.measure(Cell(size, 16, 4, 1), repeats=3, budget_seconds=budget_seconds)
    return result["variants"]


def test_a_measured_cell_is_kept_and_becomes_a_line_of_the_table(tmp_path: Path) -> None:
    import learner_step

    learner_step.measure_cell("XS", 16, 4, 1, "cpu", 2, 60.0, tmp_path)
    (path,) = (tmp_path / "cells").iterdir()
    measured_once = path.read_bytes()
    done = CliRunner().invoke(learner_step.app, [*GRID, "--out", str(tmp_path)])
    assert "kept" in done.stdout
    assert path.read_bytes() == measured_once

    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        table = {row["variant"]: row for row in csv.DictReader(file)}
    assert list(table) == ["plain", "ours", "one_at_a_time", "padded", "torch_func", "opacus"]
    assert float(table["plain"]["to_plain"]) == 1
    assert float(table["one_at_a_time"]["to_one_at_a_time"]) == 1
    assert "tied" in table["opacus"]["skipped"]
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["largest_gradient_deviation"] < 1e-4
    assert summary["largest_norm_deviation"] < 1e-3
    assert summary["worst"]["memory"]["cell"] == "XS-16tokens-group4-1threads-cpu"
    markdown = CliRunner().invoke(learner_step.app, ["table", str(tmp_path)]).stdout
    assert "| XS | 16 | 4 | 1 |" in markdown


@pytest.mark.slow
def test_the_command_measures_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "learner_step.py"), *GRID, "--out", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "plain 1.000" in done.stdout
    assert (tmp_path / "cells" / "XS-16tokens-group4-1threads-cpu.json").exists()


def test_every_way_to_the_gradient_agrees_on_a_model_that_opacus_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = measured(monkeypatch, "XS-neox")
    for name in ("plain", "ours", "one_at_a_time"):
        assert variants[name]["gradient_deviation"] < 1e-4
        assert len(variants[name]["seconds"]) == 3
    if importlib.util.find_spec("opacus") is None:
        assert "vcpo[bench]" in variants["opacus"]["skipped"]
    else:
        assert variants["opacus"]["norm_deviation"] < 1e-3


def test_a_wrong_gradient_or_norm_stops_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    from alternatives.padded import Padded
    from alternatives.torch_func import TorchFunc

    true_gradient, true_norms = Padded.gradient, TorchFunc.gradient

    def wrong_gradient(self: Padded) -> None:
        true_gradient(self)
        self._model.model.norm.weight.grad *= 1.01

    monkeypatch.setattr(Padded, "gradient", wrong_gradient)
    with pytest.raises(RuntimeError, match="the gradient of padded is off"):
        measured(monkeypatch, "XS")
    monkeypatch.setattr(Padded, "gradient", true_gradient)
    monkeypatch.setattr(TorchFunc, "gradient", lambda self: 1.01 * true_norms(self))
    with pytest.raises(RuntimeError, match="the norms of torch_func are off"):
        measured(monkeypatch, "XS")


def test_a_budget_that_is_too_small_leaves_the_slow_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = measured(monkeypatch, "XS", budget_seconds=0.0)
    assert len(variants["ours"]["seconds"]) == 2
    assert "0 s are allowed" in variants["torch_func"]["skipped"]
    assert "0 s are allowed" in variants["padded"]["skipped"]


def test_peak_memory_is_the_most_that_is_held_at_one_time() -> None:
    from harness.peak_memory import peak_bytes

    before = torch.empty(2**20)

    def allocate() -> None:
        nonlocal before
        four = torch.empty(2**20)
        eight = torch.empty(2**21)  # 12 MiB held
        del four, before  # what was there before counts as held
        one = torch.empty(2**18)
        three = torch.empty(3 * 2**18)  # 8 + 1 + 3 = 12 MiB
        two = torch.empty(2**19)  # 14 MiB: the peak
        del eight, one, three, two
        torch.empty(2**20)

    assert peak_bytes(allocate, "cpu") == 14 * 2**20


def test_operations_of_a_step_by_hand() -> None:
    from harness.cells import Cell
    from harness.flops import plain_step_flops
    from harness.workload import make_group, make_model

    cell = Cell("XS", 16, 2, 1)
    model = make_model(cell)
    trajectories = make_group(model, cell).trajectories
    totals = [len(t.prompt_ids) + len(t.response_ids_T) for t in trajectories]
    assert [len(t.prompt_ids) for t in trajectories] == [4, 4]
    assert all(8 <= total <= 16 for total in totals)
    # per layer: q and o 32 x 32, k and v 32 x 16, gate, up and down 32 x 64; head 32 x 128 on response tokens
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    products = 6 * weights * sum(totals) + 6 * 32 * 128 * (sum(totals) - 8)
    # per layer and pair of tokens that see each other (half of all): two products forward, four backward
    attention = 2 * sum(6 * 2 * 32 * total**2 / 2 for total in totals)
    assert plain_step_flops(model, cell, trajectories) == products + attention


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_no_variant_moves_the_weights_that_all_share() -> None:
    from harness.cells import Cell
    from harness.variants import make_variants
    from harness.workload import make_group, make_model

    cell = Cell("XS", 16, 4, 1)
    model = make_model(cell)
    weights = [p.clone() for p in model.parameters()]
    variants, _ = make_variants(model, cell, make_group(model, cell))
    for variant in variants.values():
        call = variant.run()
        assert call.seconds > 0
        assert (call.optimizer_seconds is None) == (variant.name not in ("plain", "ours"))
    for parameter, before in zip(model.parameters(), weights, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.detach(), before, rtol=0, atol=1e-20)
