"""The benchmark of the ledger's cost runs and says what it has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_cases import tiny_recipe

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_share_is_the_ledgers_time_over_that_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ledger_overhead

    result = ledger_overhead.measure(tiny_recipe(tmp_path / "r.yaml"), "lockstep", 4, ["seed=1"], tmp_path / "runs")
    assert (result["steps"], result["trajectories"]) == (4, 4 * 8)
    assert 0 < result["median_ledger_seconds_per_step"] <= result["largest_ledger_seconds_of_a_step"]
    # four steps' ledger over three steps' time
    assert result["share"] > result["median_ledger_seconds_per_step"] / (4 * result["median_step_seconds"]) / 10
    assert (tmp_path / "runs" / "lockstep" / "ledger.sqlite").stat().st_size == result["ledger_bytes"]
    assert json.dumps(result)
