"""Every experiment that ships loads, and says of itself what is true."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from xsalab.cli import app
from xsalab.experiment.building import derived, reference_model, scaling_parameters
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


# What karpathy/nanochat at 92d63d4 prints of itself (scripts/base_train.py, on a CPU, its tokenizer and data replaced),
# with --head-dim=64 and --depth=12 --aspect-ratio=64, --depth=24 --aspect-ratio=42, all else its defaults. Schedules: a
# step -> rate factor, Muon's momentum, Muon's decay.
NANOCHAT: dict[str, dict[str, Any]] = {
    "d12": {
        "shape": (12, 768, 12, 2048, 32768), "embedding": 25_165_824, "value_embeddings": 150_994_944,
        "head": 25_165_824, "matrices": 84_935_520, "other": 50, "total": 286_262_162, "flops_per_token": 7.596986e8,
        "batch_tokens": 524_288, "steps": 2520, "tokens": 1_321_205_760,
        "lr": {"matrix": 0.02, "head": 0.008, "embedding": 0.3, "value_embedding": 0.15, "residual": 0.005, "x0": 0.5,
               "smear": 0.2},
        "schedule": {0: (0.025, 0.85, 0.28), 20: (0.525, None, None), 40: (1.0, None, None), 200: (None, 0.91, None),
                     400: (None, 0.97, None), 630: (1.0, 0.97, 0.23899494936611668),
                     1260: (0.7807692307692308, 0.9538461538461538, 0.14),
                     1890: (0.4153846153846154, 0.926923076923077, 0.04100505063388336),
                     2519: (0.05057997557997558, 0.900042735042735, 1.0879192154478191e-07)},
    },
    "d24": {
        "shape": (24, 1024, 16, 2048, 32768), "embedding": 33_554_432, "value_embeddings": 402_653_184,
        "head": 33_554_432, "matrices": 301_992_192, "other": 74, "total": 771_754_314, "flops_per_token": 2.277521e9,
        "batch_tokens": 1_048_576, "steps": 3840, "tokens": 4_026_531_840,
        "lr": {"matrix": 0.028284271247461905, "head": 0.009797958971132715, "embedding": 0.3674234614174767,
               "value_embedding": 0.18371173070873836, "residual": 0.007071067811865476, "x0": 0.7071067811865476,
               "smear": 0.2},
        "schedule": {0: (0.025, 0.85, 0.06434695499687272), 20: (0.525, None, None), 40: (1.0, None, None),
                     200: (None, 0.91, None), 400: (None, 0.97, None), 960: (1.0, 0.97, 0.05492356161193351),
                     1920: (0.7807692307692308, 0.9538461538461538, 0.03217347749843637),
                     2880: (0.4153846153846154, 0.926923076923077, 0.009423393384939213),
                     3839: (0.050380608974358976, 0.9000280448717949, 1.0767262012068389e-08)},
    },
}  # fmt: skip


def nanochats(name: str) -> RunConfig:
    """d12, d24, and the two points of the study, which are the same."""
    study, _, point = name.partition(".")
    experiment = load_experiment(ROOT / "experiments" / f"{study}.toml")
    return resolve(experiment, Cell(point or "base", "standard", experiment.seeds[0]))


@pytest.mark.parametrize("name", ["d12", "d24", "muon-study.d12", "muon-study.d24"])
def test_a_recipe_is_what_nanochat_prints_of_itself(name: str) -> None:
    """Shape, parameters by group, batch, steps, rates after scaling, decay, schedules: as printed."""
    printed, run = NANOCHAT[name.rpartition(".")[2]], nanochats(name)
    model, numbers = run.model, derived(run)
    assert (model.depth, model.width, model.heads, model.context, model.vocab_size) == printed["shape"]
    assert {key: count for key, count in numbers["parameters"].items() if key in printed} == {
        key: printed[key] for key in ("embedding", "value_embeddings", "head", "matrices", "other", "total")
    }
    assert (run.train.batch_tokens, run.train.steps, run.train.tokens) == (
        printed["batch_tokens"], printed["steps"], printed["tokens"]
    )  # fmt: skip
    # nanochat counts a window's earlier keys and not the query itself, and the smear gate's 24 weights.
    itself = 12 * model.width * model.depth - 6 * model.smear_channels
    assert numbers["flops_per_token"] - itself == pytest.approx(printed["flops_per_token"], rel=1e-6)
    assert {group: numbers["lr"][group] for group in printed["lr"]} == pytest.approx(printed["lr"])
    schedule = run.optim.schedule_over(run.train.steps)
    for step, values in printed["schedule"].items():
        ours = schedule.lr(step), schedule.momentum(step), numbers["matrix_weight_decay"] * schedule.weight_decay(step)
        assert [o for o, v in zip(ours, values, strict=True) if v is not None] == pytest.approx(
            [v for v in values if v is not None], rel=1e-9, abs=1e-15
        ), step


@pytest.mark.parametrize("name", ["d12", "d24"])
def test_batch_and_tokens_follow_nanochats_rules(name: str) -> None:
    """12 tokens a scaling parameter in whole batches; 2^19 (D / D_ref)^0.383, rounded in log2."""
    run = nanochats(name)
    budget = 12 * scaling_parameters(run.model)
    ratio = budget / (12 * scaling_parameters(reference_model(run.model)))
    batch = 2 ** round(math.log2(2**19 * ratio**0.383))
    assert (run.train.batch_tokens, run.train.tokens) == (batch, budget // batch * batch)
    assert run.model.head_size == 64


@pytest.mark.parametrize("name", ["d12", "d24", "muon-study"])
def test_a_trial_of_a_recipe_is_small_and_has_every_stage(name: str) -> None:
    """Width and depth of d12 and d24 are the recipe's own; nothing is downloaded."""
    path = ROOT / "experiments" / f"{name}.toml"
    full, trial = load_experiment(path), load_experiment(path, smoke=True)
    assert trial.name == f"{name}-smoke"
    assert full.downstream
    assert trial.downstream
    assert full.downstream.parts == trial.downstream.parts == ("core", "sft", "chatcore")
    for cell in expand(trial):
        run = resolve(trial, cell)
        whole = resolve(full, Cell(cell.point, cell.arm, full.seeds[0]))
        assert run.data.source == "stdlib"
        assert run.train.device == "cpu"
        assert run.train.steps <= 2
        if name != "muon-study":
            assert (run.model.depth, run.model.width, run.model.heads, run.model.vocab_size) == (
                whole.model.depth, whole.model.width, whole.model.heads, whole.model.vocab_size
            )  # fmt: skip
    core, chat = trial.downstream.core, trial.downstream.chatcore
    assert core
    assert Path(core.bundle).is_dir()
    assert chat
    assert Path(chat.data).is_dir()


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
