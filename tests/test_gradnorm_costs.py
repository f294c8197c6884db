from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vcpo.gradnorm import costs
from vcpo.gradnorm.costs import LENGTHS, WIDTHS, CostModel, cost_model, measure

CPU = torch.device("cpu")
FILE = "gradient-costs.json"

measured_now = cost_model.__wrapped__  # what is behind the cache within the process


def flat(gram: float = 0.0, single: float = 0.0, combined: float = 0.0) -> CostModel:
    return CostModel([[gram] * len(WIDTHS)] * len(LENGTHS), [[single] * len(WIDTHS)] * len(LENGTHS), combined)


def cheap(monkeypatch: pytest.MonkeyPatch) -> list[CostModel]:
    """Measurements that take no time, and those that were made."""
    made: list[CostModel] = []

    def pretend(device: torch.device, dtype: torch.dtype) -> CostModel:
        made.append(flat(gram=float(len(made))))
        return made[-1]

    monkeypatch.setattr(costs, "measure", pretend)
    return made


def test_interpolation_by_hand() -> None:
    table = [[100.0 * row + 10.0 * column for column in range(len(WIDTHS))] for row in range(len(LENGTHS))]
    assert costs._interpolate(table, 8, 64, 1) == 0
    assert costs._interpolate(table, 16, 256, 1) == 110
    # the middle between 16 and 32, and between 256 and 1024, is their geometric mean
    assert costs._interpolate(table, 16 * 2**0.5, 64, 1) == pytest.approx(150)
    assert costs._interpolate(table, 8, 512, 1) == pytest.approx(15)
    assert costs._interpolate(table, 512, 1024, 1) == 620
    # outside of the table: the nearest entry, and beyond the longest the power of the length
    assert costs._interpolate(table, 1, 1, 1) == 0
    assert costs._interpolate(table, 16, 9999, 1) == 120
    assert costs._interpolate(table, 1024, 64, 1) == 2 * 600
    assert costs._interpolate(table, 1536, 64, 2) == 9 * 600


def test_choice_by_hand() -> None:
    # two trajectories of 10 rows, 100 x 50: gram 2 (100 + 50) g + 20 5000 c, single 2 5000 s
    assert flat(gram=1.0, single=0.04, combined=0.0).prefers_gram([10, 10], 100, 50, is_shared=False)
    assert not flat(gram=1.0, single=0.02, combined=0.0).prefers_gram([10, 10], 100, 50, is_shared=False)
    # the Gram matrices of the width are there already: 2 100 g
    assert flat(gram=1.0, single=0.025, combined=0.0).prefers_gram([10, 10], 100, 50, is_shared=True)
    assert not flat(gram=1.0, single=0.025, combined=0.0).prefers_gram([10, 10], 100, 50, is_shared=False)
    # the product of all rows
    assert flat(single=1.0, combined=0.09).prefers_gram([10, 10], 100, 50, is_shared=False)
    assert not flat(single=1.0, combined=0.11).prefers_gram([10, 10], 100, 50, is_shared=False)


def test_longer_trajectories_turn_to_single_gradients() -> None:
    """Gram work grows with the square of the length, single gradients with the length at most."""
    gram = [[1e-9 * length**2] * len(WIDTHS) for length in LENGTHS]
    single = [[1e-9 * length] * len(WIDTHS) for length in LENGTHS]
    model = CostModel(gram, single, 0.0)
    choices = [model.prefers_gram([length] * 4, 256, 256, False) for length in (4, 64, 120, 136, 600, 5000)]
    assert choices == [True, True, True, False, False, False]


def test_measured_costs_are_positive_and_have_the_tables_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LENGTHS", (2, 3))
    monkeypatch.setattr(costs, "WIDTHS", (4, 5, 6))
    model = measure(CPU, torch.float32)
    for table in (model.gram, model.single):
        assert [len(row) for row in table] == [3, 3]
        assert all(value > 0 for row in table for value in row)
    assert model.combined > 0


def test_global_random_state_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LENGTHS", (2,))
    before = torch.random.get_rng_state()
    measure(CPU, torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_measurement_is_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path / "made" / "on demand"))
    made = cheap(monkeypatch)
    first = measured_now(CPU, torch.float32, 1)
    assert measured_now(CPU, torch.float32, 1) == first
    assert len(made) == 1
    # other dtypes and numbers of threads have their own, beside the first
    others = [measured_now(CPU, torch.float64, 1), measured_now(CPU, torch.float32, 2)]
    assert others == made[1:]
    assert measured_now(CPU, torch.float32, 1) == first
    assert len(made) == 3
    assert [path.name for path in (tmp_path / "made" / "on demand").iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "\xff"])
def test_a_damaged_file_is_made_again(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path))
    made = cheap(monkeypatch)
    (tmp_path / FILE).write_bytes(content.encode("latin-1"))
    first = measured_now(CPU, torch.float32, 1)
    assert measured_now(CPU, torch.float32, 1) == first
    assert len(made) == 1


@pytest.mark.parametrize(
    "entry",
    [None, 3, {}, {"gram": []}, {"gram": [], "single": [], "combined": 0.0}, {"gram": 3, "single": 3, "combined": 0.0}],
)
def test_an_entry_of_another_form_is_made_again(entry: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path))
    made = cheap(monkeypatch)
    measured_now(CPU, torch.float32, 1)
    path = tmp_path / FILE
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), entry) | {"another": 1}))
    assert measured_now(CPU, torch.float32, 1) == made[1]
    assert json.loads(path.read_text())["another"] == 1


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cheap(monkeypatch)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path / "file" / "below"))
    assert measured_now(CPU, torch.float32, 1) == made[0]
    # a directory where the file should be
    monkeypatch.setenv("VCPO_CACHE", str(tmp_path))
    (tmp_path / FILE).mkdir()
    assert measured_now(CPU, torch.float32, 1) == made[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", FILE]


def test_within_a_process_the_choice_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cost_model(CPU, torch.float32, 1)
    made = cheap(monkeypatch)
    assert cost_model(CPU, torch.float32, 1) is first
    assert not made
