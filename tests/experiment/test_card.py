from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_runs import fake, fake_answers
from xsalab.experiment.card import experiment_card
from xsalab.experiment.design import Cell, expand
from xsalab.experiment.outcome import outcome
from xsalab.experiment.store import RunStore


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, dict]:
    """An experiment of finished runs with CORE, whose report was written."""
    experiment, store = fake(tmp_path_factory.mktemp("card"))
    for cell in expand(experiment):
        fake_answers(store, cell)
    content = outcome(experiment, store)
    (store.folder / "summary.json").write_text(json.dumps(content), encoding="utf-8")
    return store, content


def rows(card: str, head: str) -> list[list[str]]:
    """The cells of the Markdown table whose first heading is ``head``."""
    tables = [[line for line in block.splitlines() if line.startswith("| ")] for block in card.split("\n\n")]
    found = next(table for table in tables if table and table[0].startswith(f"| {head} |"))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[2:]]


def test_the_card_says_what_the_report_says(reported: tuple[RunStore, dict]) -> None:
    """Verdicts, levels and the run's own value are the outcome's; a bar in a name does not break a table."""
    store, content = reported
    run = store.run(Cell("base", "xsa", 3))
    card = experiment_card(run.path)
    assert content["headline"][0] in card
    assert f"arm xsa, seed 3, {content['metric']} {run.status['val_bpb']:.4f}" in card
    arms = rows(card, "arm")
    assert [row[0] for row in arms] == [content["arms"][level["arm"]] for level in content["levels"]]
    assert [row[1] for row in arms] == [f"{level['mean']:.4f}" for level in content["levels"]]
    verdicts = {row[0]: row[3] for row in rows(card, "contrast")}
    effects = {row["name"]: row["verdict"]["text"] for row in content["contrasts"] if "verdict" in row}
    assert effects.items() <= verdicts.items()
    assert "### CORE" in card
    assert content["benchmarks"][0]["contrasts"][0]["sentence"] in card


def test_a_fine_tuned_run_has_its_base_run_s_card(reported: tuple[RunStore, dict]) -> None:
    store, _ = reported
    folder = store.run(Cell("base", "xsa", 3)).path / "sft"
    folder.mkdir()
    (folder / "config.json").write_text('{"sft": {}}', encoding="utf-8")
    assert "arm xsa, seed 3" in experiment_card(folder)
    assert "then fine-tuned" in experiment_card(folder)


def test_without_a_report_there_is_no_card(reported: tuple[RunStore, dict], tmp_path: Path) -> None:
    run, summary = tmp_path / "runs" / "base.xsa.s3", tmp_path / "summary.json"
    run.mkdir(parents=True)
    assert experiment_card(run) == ""
    content = {name: value for name, value in reported[1].items() if name != "levels"}
    summary.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"summary\.json: has no 'levels'"):
        experiment_card(run)
