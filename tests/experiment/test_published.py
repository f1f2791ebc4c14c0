"""The published figures stand beside ours where the sizes are the published ones, and nowhere else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEAD, TASKS, fake, fake_answers
from xsalab.experiment.design import Experiment, expand
from xsalab.experiment.outcome import outcome
from xsalab.experiment.published import SOURCE, STUDIES, published
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.store import RunStore
from xsalab.stats.core_error import CORE_TASKS

RECIPES = Path(__file__).parents[2] / "experiments"
ARMS = (
    "[arms.standard]\n[arms.half]\nvariant='xsa'\nalpha=0.5\n[arms.xsa]\nvariant='xsa'\n"
    "[controls]\ntwin=false\nnull=false\n"
)
WIDE = HEAD.replace("depth = 2", "depth = 12").replace("width = 64", "width = 768").replace("heads = 2", "heads = 12")


def rows_of(found: Any) -> dict[tuple[str, str], dict[str, Any]]:
    assert found is not None
    return {(row["study"], row["metric"]): row for row in found["rows"]}


@pytest.mark.parametrize("name", ["d12", "d24"])
def test_the_recipes_have_the_published_sizes(name: str) -> None:
    """A point is found by the depth, width and heads of its resolved configuration; the recipe names none."""
    experiment = load_experiment(RECIPES / f"{name}.toml")
    found = published(experiment, [], [])
    assert found is not None
    assert found["points"] == ["base"]
    assert {row["study"] for row in found["rows"]} == {name}
    assert all(row["ours"] is None for row in found["rows"])
    assert SOURCE in found["sources"]
    json.dumps(found, allow_nan=False)


def test_the_published_differences() -> None:
    """−0.0094 and +0.0013 of CORE, −0.32 % and −0.31 % of bpb, as published."""
    d12, d24 = STUDIES
    assert round(d12.figures["CORE"][1] - d12.figures["CORE"][0], 4) == -0.0094
    assert round(d24.figures["CORE"][1] - d24.figures["CORE"][0], 4) == 0.0013
    for study, share in ((d12, -0.32), (d24, -0.31)):
        standard, xsa = study.figures["bpb"]
        assert round(100 * (xsa - standard) / standard, 2) == share


def test_the_sentence_is_reckoned_from_item_counts() -> None:
    """Its standard error is the root of Σ p(1−p)/(n(1−b)²) over 22, at the accuracies that give that CORE."""
    found = published(load_experiment(RECIPES / "d12.toml"), [], [])
    assert found is not None
    core = (0.1602 + 0.1508) / 2
    total = 0.0
    for _, n, b in CORE_TASKS:
        p = b + core * (1 - b)
        total += p * (1 - p) / n / (1 - b) ** 2
    single = math.sqrt(total) / 22
    assert f"one model's CORE has a standard error of {single:.4f}" in found["sentence"]
    assert f"a difference of two models one of {single * math.sqrt(2):.4f}" in found["sentence"]
    assert "−0.0094" in found["sentence"]
    assert "one run an arm" in found["sentence"]
    d24 = published(load_experiment(RECIPES / "d24.toml"), [], [])
    assert d24 is not None
    assert "+0.0013 is 0.1 to 0.3 of these: the items' luck alone makes such a difference" in d24["sentence"]


def wide(folder: Path, arms: str = ARMS) -> tuple[Experiment, RunStore]:
    return fake(folder, WIDE + arms)


def test_ours_stands_beside_it(tmp_path: Path) -> None:
    """The contrast of XSA at α = 1, not that of another α, with its own estimate."""
    content = outcome(*wide(tmp_path))
    row = rows_of(content["published"])["d12", "bpb"]
    xsa = next(row for row in content["contrasts"] if row["name"] == "xsa - standard")
    assert row["ours"]["name"] == "xsa - standard"
    assert row["ours"]["estimate"] == xsa["estimate"]
    assert rows_of(content["published"])["d12", "CORE"]["ours"] is None


def test_a_benchmark_over_some_tasks_does_not_compare(tmp_path: Path) -> None:
    """CORE stands beside the published one where all 22 tasks were asked, and not where three were."""
    experiment, store = wide(tmp_path)
    for cell in expand(experiment):
        fake_answers(store, cell)
    assert rows_of(outcome(experiment, store)["published"])["d12", "CORE"]["ours"] is None
    bench = outcome(experiment, store)["benchmarks"][0]
    found = published(experiment, [], [{**bench, "partial": False}])
    assert rows_of(found)["d12", "CORE"]["ours"]["estimate"]["n"] == 6
    assert len(TASKS) < 22


@pytest.mark.parametrize(
    "arms",
    [
        "[arms.standard]\n[arms.xsa]\nvariant='xsa'\nlayers='last:1'\n",
        "[arms.standard]\n[arms.xsa]\nvariant='xsa'\nagainst='projected'\n",
        "[arms.standard]\noptim.kind='adamw'\n[arms.xsa]\nvariant='xsa'\noptim.kind='adamw'\n",
        "[arms.standard]\n[arms.xsa]\nvariant='xsa'\noptim.lr_scale=0.9\n",
    ],
)
def test_another_question_is_not_set_beside_it(tmp_path: Path, arms: str) -> None:
    """Other layers, another value, another optimizer or rate: ours is another comparison."""
    experiment, store = wide(tmp_path, arms + "[controls]\ntwin=false\nnull=false\n")
    assert rows_of(outcome(experiment, store)["published"])["d12", "bpb"]["ours"] is None


def test_other_sizes_have_nothing_published(tmp_path: Path) -> None:
    """Two layers, and twelve layers of another width."""
    assert outcome(*fake(tmp_path))["published"] is None
    path = tmp_path / "w.toml"
    path.write_text(WIDE.replace("width = 768", "width = 384") + ARMS, encoding="utf-8")
    assert published(load_experiment(path), [], []) is None
