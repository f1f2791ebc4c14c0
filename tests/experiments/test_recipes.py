"""Every experiment that ships loads, and says of itself what is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from xsalab.cli import app
from xsalab.experiment.building import derived, scaling_parameters
from xsalab.experiment.design import Cell, RunConfig, expand, resolve
from xsalab.experiment.reading import load_experiment

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "experiments").glob("*.toml"))
H100 = 0.4 * 989e12  # operations a second that README.md reckons with


def power(value: float, digits: int) -> str:
    """ "7.60e8", as README.md writes it."""
    return re.sub(r"e\+0*", "e", f"{value:.{digits}e}")


def baseline_run(name: str) -> RunConfig:
    experiment = load_experiment(ROOT / "experiments" / f"{name}.toml")
    return resolve(experiment, Cell(experiment.points[0].name, experiment.baseline, experiment.seeds[0]))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_has_a_status(path: Path, tmp_path: Path) -> None:
    """Every cell resolves and every variant is built; no data is prepared."""
    experiment = load_experiment(path)
    result = CliRunner().invoke(app, ["status", str(path), "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["run"] for row in rows] == [cell.name for cell in expand(experiment)]
    assert {row["state"] for row in rows} == {"waiting"}
    assert path.read_text(encoding="utf-8").startswith("#"), "a recipe begins with what it answers and costs"


@pytest.mark.parametrize("name", ["d12", "d24"])
def test_the_published_sizes_train_on_12_tokens_a_scaling_parameter(name: str) -> None:
    run = baseline_run(name)
    assert run.train.tokens == 12 * scaling_parameters(run.model)
    assert run.model.head_size == 64


def test_the_original_setting_is_plain() -> None:
    run = baseline_run("original")
    model = run.model
    assert not any((model.value_embeddings, model.smear, model.backout, model.residual_scalars, model.qk_norm))
    assert model.soft_cap == 0
    assert all(model.is_full_window(layer) for layer in range(model.depth))
    assert (run.optim.kind, run.optim.schedule) == ("adamw", "cosine")


@pytest.mark.parametrize("name", ["original", "d12", "d24"])
def test_the_costs_in_the_readme_are_those_of_the_configuration(name: str) -> None:
    """README.md, "What a larger run costs", recomputed."""
    experiment = load_experiment(ROOT / "experiments" / f"{name}.toml")
    run, runs = baseline_run(name), len(expand(experiment))
    flops = derived(run)["flops_per_token"]
    each = flops * run.train.tokens
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}.toml`"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:6] == [
        str(runs), f"{run.train.tokens / 1e6:,.0f} M", power(flops, 2), power(each, 1), power(runs * each, 1)
    ]  # fmt: skip
    if run.train.device == "cuda":
        rounds = -(-runs // 8)
        hours = each / H100 / 3600
        assert cells[6:] == [f"{hours:.1f} h", f"{runs * hours:.0f}", f"{rounds * hours:.1f} h"]
