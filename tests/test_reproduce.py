"""The command: figures share runs, what is there is judged, and kept files suffice to judge again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from reproduce_cases import read_results, seeds
from run_cases import tiny_data
from vcpo.cli import app
from vcpo.errors import UserError
from vcpo.reproduce import command
from vcpo.reproduce.catalogue import BASIC
from vcpo.reproduce.claims import Claim, Verdict, out_of_reach, survives
from vcpo.reproduce.document import refresh
from vcpo.reproduce.evidence import RunEvidence
from vcpo.reproduce.figure import Figure
from vcpo.reproduce.runs import RunStore, distinct, plan_figures
from vcpo.reproduce.write import claims_table, results_table, write_figure

RECIPES = Path("recipes/reproduce")
RESULTS = Path("results/reproduction")


def test_there_is_something_for_every_figure_and_table() -> None:
    names = [figure.name for figure in command.ALL]
    assert {f"fig{i}" for i in range(1, 15)} | {f"table{i}" for i in range(1, 6)} <= set(names)
    assert len(names) == len(set(names))
    for figure in command.ALL:
        assert figure.claims, figure.name
        assert len({claim.name for claim in figure.claims}) == len(figure.claims)


def test_every_variant_is_a_valid_configuration() -> None:
    cells = plan_figures(command.ALL, None, RECIPES, RunStore(Path("nowhere")))
    assert {cell.figure for cell in cells} == {figure.name for figure in command.ALL if figure.variants}


@pytest.mark.parametrize("figure", command.ALL, ids=lambda figure: figure.name)
def test_claims_speak_of_variants_that_the_figure_has(figure: Figure) -> None:
    results: dict[str, list[RunEvidence]] = {name: seeds(name, [0.5] * 3) for name in figure.variants}
    for claim in figure.claims:
        outcome = claim.judge(results)
        assert "runs are missing: `" not in outcome.finding, claim.name
        for path in re.findall(r"`(recipes/\S+)`", outcome.finding):
            assert Path(path).is_file()


def test_figures_that_ask_for_one_configuration_share_its_run(tmp_path: Path) -> None:
    first = Figure("a", "", "", (), recipe="sort.yaml", variants={"vcpo": {"method": "vcpo"}}, seeds=(1,))
    again = Figure("b", "", "", (), recipe="sort.yaml", variants={"both": {"runtime.max_staleness": 16}}, seeds=(1, 2))
    cells = plan_figures([first, again], None, RECIPES, RunStore(tmp_path))
    assert [(c.figure, c.variant, c.seed) for c in cells] == [("a", "vcpo", 1), ("b", "both", 1), ("b", "both", 2)]
    assert cells[0].run.directory == cells[1].run.directory != cells[2].run.directory
    assert len(distinct(cells)) == 2


def test_a_run_is_found_by_what_it_computed_whatever_its_name(tmp_path: Path) -> None:
    figure = Figure("a", "", "", (), recipe="sort.yaml", variants=BASIC, seeds=(1,))
    cells = plan_figures([figure], None, RECIPES, RunStore(tmp_path))
    for name, cell in zip(("one", "two", "three"), cells, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(cell.run.config.to_plain()))
    again = plan_figures([figure], None, RECIPES, RunStore(tmp_path))
    assert [cell.run.directory.name for cell in again] == ["one", "two", "three"]
    # another number of steps is another run; how often it is saved is not
    data = yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())
    data["checkpoint"]["save_steps"] = 7
    (tmp_path / "two" / "config.yaml").write_text(yaml.safe_dump(data))
    data["training"]["max_steps"] = 99
    (tmp_path / "three" / "config.yaml").write_text(yaml.safe_dump(data))
    names = [cell.run.directory.name for cell in plan_figures([figure], None, RECIPES, RunStore(tmp_path))]
    assert names[:2] == ["one", "two"]
    assert names[2] != "three"


def test_files_hold_enough_to_judge_again(tmp_path: Path) -> None:
    claims = (Claim("a", "it holds", survives("vcpo")), Claim("b", "it is fast", out_of_reach("needs GPUs"), ours=True))
    figure = Figure("a", "title", "what it shows", claims, variants={"vcpo": {"method": "vcpo"}})
    results = {"vcpo": seeds("vcpo", [0.5, 0.6, 0.7], collapsed=0, final_ess=None)}
    write_figure(figure, {}, results, tmp_path, "vcpo reproduce a")
    assert read_results(tmp_path / "a.json") == results
    content = json.loads((tmp_path / "a.json").read_text())
    assert [claim["verdict"] for claim in content["claims"]] == ["reproduced", "not testable here"]
    assert (tmp_path / "a.md").read_text() == (
        "| variant | seeds | late acc. | best acc. | collapsed | ESS (median) | step factor | truncated | masked |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| `vcpo` | 1-3 | 60.0% ± 10.0 | 55.0% | 0/3 | 0.500 | 0.700 | 2.0% | 0.0% |\n"
    )
    assert (
        "| it is fast (ours) | needs the paper's scale | needs GPUs; no full-scale recipe yet |"
        in (tmp_path / "a-claims.md").read_text()
    )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_verdicts_follow_from_kept_numbers(path: Path) -> None:
    (figure,) = command.choose([path.stem])
    results = read_results(path)
    outcomes = {claim.name: claim.judge(results) for claim in figure.claims}
    kept = json.loads(path.read_text(encoding="utf-8"))["claims"]
    assert {c["name"]: (Verdict(c["verdict"]), c["finding"]) for c in kept} == {
        name: (outcome.verdict, outcome.finding) for name, outcome in outcomes.items()
    }
    assert (RESULTS / f"{path.stem}-claims.md").read_text(encoding="utf-8") == claims_table(figure, outcomes)
    if results:
        assert (RESULTS / f"{path.stem}.md").read_text(encoding="utf-8") == results_table(results)


def test_a_document_gets_its_tables_from_files(tmp_path: Path) -> None:
    (tmp_path / "t.md").write_text("| new |\n| --- |\n")
    page = tmp_path / "page.md"
    page.write_text("Before\n\n<!-- table: t.md -->\n| old |\n| row |\n\nafter\n\n<!-- table: t.md -->\n")
    refresh(page, tmp_path)
    table = "<!-- table: t.md -->\n| new |\n| --- |\n"
    assert page.read_text() == f"Before\n\n{table}\nafter\n\n{table}"
    page.write_text("<!-- table: gone.md -->\n")
    with pytest.raises(UserError, match=r"gone\.md"):
        refresh(page, tmp_path)


def test_an_unknown_figure_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown figure or table 'fig99'"):
        command.choose(["fig99"])
    assert command.choose(["all"]) == list(command.ALL)
    assert [figure.name for figure in command.choose(["fig5", "fig2", "fig5"])] == ["fig5", "fig2"]


def test_without_a_name_the_figures_are_listed_with_their_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "--runs", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "fig5" in line)
    assert "15" in row  # three variants, five seeds
    assert "10m 00s" in row


@pytest.mark.slow
def test_the_command_makes_runs_once_judges_them_and_brings_a_page_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, runs, out = tmp_path / "recipes", tmp_path / "runs", tmp_path / "out"
    recipes.mkdir()
    data = tiny_data(tmp_path / "single", "training.max_steps=4", "eval.eval_steps=2", "eval.num_problems=8")
    del data["reward"]  # its path is relative to the tests
    (recipes / "sort.yaml").write_text(yaml.safe_dump(data))
    claims = (Claim("a", "nothing breaks", survives("vcpo", "sync")),)
    figure = Figure("tiny", "t", "p", claims, variants={k: BASIC[k] for k in ("vcpo", "sync")}, seeds=(1, 2))
    monkeypatch.setattr(command, "ALL", (figure,))
    page = tmp_path / "page.md"
    page.write_text(f"<!-- table: {out / 'tiny-claims.md'} -->\n")
    arguments = ["reproduce", "tiny", "--jobs", "2", "--recipes", str(recipes), "--runs", str(runs), "--out", str(out)]
    first = CliRunner().invoke(app, [*arguments, "--document", str(page)])
    assert first.exit_code == 0, first.output
    assert "4 runs, 0 finished before" in first.output
    assert {p.name for p in out.iterdir()} >= {"tiny.json", "tiny.csv", "tiny.md", "tiny-claims.md", "verdicts.md"}
    assert "**reproduced**" in page.read_text()
    again = CliRunner().invoke(app, arguments)
    assert "4 runs, 4 finished before" in again.output
    # judging needs no runs to be made: with one gone, the claim cannot be tested
    shutil.rmtree(next(runs.glob("*vcpo*seed1*/")))
    report = CliRunner().invoke(app, [*arguments, "--only-report"])
    assert report.exit_code == 0, report.output
    assert "runs are missing" in (out / "tiny-claims.md").read_text()
