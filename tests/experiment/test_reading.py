"""[smoke]: what --smoke puts in the place of a file's values, and a folder of its own for the trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xsalab.experiment.design import Cell, resolve
from xsalab.experiment.reading import load_experiment, read_tables

SMOKE: dict[str, Any] = {
    "seeds": [7], "train.tokens": 512, "controls.positive": {}, "points.long.train.tokens": 768,
    "points.long.depth": 1, "eval": {"max_bytes": 1000},
}  # fmt: skip


@pytest.fixture
def two_points(write_experiment: Any) -> Path:
    """A file with [smoke]: sections, a control, a field of a point written with dots, one of the model."""
    return write_experiment(
        points=[{"name": "short"}, {"name": "long", "train.tokens": 2048, "depth": 3}],
        controls={"null": False, "twin": False, "timing": False, "positive": {"optim.lr_scale": 0.5}},
        smoke=SMOKE,
    )


def test_without_the_option_the_table_plays_no_part(two_points: Path) -> None:
    experiment = load_experiment(two_points)
    assert (experiment.name, experiment.seeds) == ("tiny", (0, 1))
    assert resolve(experiment, Cell("long", "xsa", 0)).train.tokens == 2048
    assert "positive" in experiment.arms


def test_its_values_replace_the_files(two_points: Path) -> None:
    """Sections, points by name (dotted or not), a control that is emptied; what it does not name stays."""
    experiment = load_experiment(two_points, smoke=True)
    assert (experiment.name, experiment.seeds) == ("tiny-smoke", (7,))
    assert "positive" not in experiment.arms
    short, long = (resolve(experiment, Cell(point, "xsa", 7)) for point in ("short", "long"))
    assert (short.train.tokens, long.train.tokens) == (512, 768)
    assert (short.model.depth, long.model.depth) == (2, 1)
    assert short.eval.max_bytes == 1000
    assert short.train.batch_tokens == 256
    assert experiment.text.endswith("\n# with --smoke")


def test_set_comes_on_top_of_it(two_points: Path) -> None:
    experiment = load_experiment(two_points, ["train.tokens=256", "seeds=[1]"], smoke=True)
    assert experiment.seeds == (1,)
    assert resolve(experiment, Cell("short", "xsa", 1)).train.tokens == 256


def test_a_file_without_it_is_told_how_to_add_one(write_experiment: Any, xsalab: Any, tmp_path: Path) -> None:
    xsalab("plan", write_experiment(), "--smoke", "--out", tmp_path).refused("tiny.toml", "[smoke]", '"train.tokens"')


@pytest.mark.parametrize(
    ("smoke", "words"),
    [
        ({"train.tokns": 1}, ("train", "tokns", "tokens")),
        ({"points.none.depth": 1}, ("smoke.points.none.depth", "points.NAME.field")),
        ({"seeds.first": 1}, ("seeds",)),
    ],
)
def test_a_value_without_a_place_is_refused(write_experiment: Any, smoke: Any, words: tuple[str, ...]) -> None:
    path = write_experiment(smoke=smoke, points=[{"name": "only"}])
    with pytest.raises(ValueError) as caught:
        load_experiment(path, smoke=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_tables_are_read_the_same_way_for_plugins(two_points: Path) -> None:
    assert "smoke" not in read_tables(two_points)
    assert read_tables(two_points, smoke=True)["train"]["tokens"] == 512


@pytest.mark.slow
def test_a_trial_leaves_the_experiments_own_folder_alone(
    write_experiment: Any, xsalab: Any, no_page: None, tmp_path: Path
) -> None:
    path, out = write_experiment(smoke={"seeds": [0], "train.tokens": 256}), tmp_path / "out"
    assert xsalab("run", path, "--smoke", "--out", out, "--jobs", 1).code == 0
    assert [folder.name for folder in (out / "experiments").iterdir()] == ["tiny-smoke"]
    rows = json.loads(xsalab("status", path, "--smoke", "--out", out, "--json").out)
    assert [(row["run"], row["state"], row["steps"]) for row in rows] == [
        ("base.standard.s0", "finished", 1), ("base.xsa.s0", "finished", 1)
    ]  # fmt: skip
    assert {row["state"] for row in json.loads(xsalab("status", path, "--out", out, "--json").out)} == {"waiting"}
