"""What the stored diagnostics are turned into, against numbers reckoned by hand from the rows that were written."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from fake_runs import ARMS, HEAD, fake
from xsalab.experiment.design import Cell, Experiment, expand
from xsalab.experiment.mechanism_grids import MEASURES
from xsalab.experiment.mechanism_tables import mechanism_tables
from xsalab.experiment.outcome import outcome
from xsalab.experiment.store import RunStore, write_rows
from xsalab.optim.geometry import sketch

CONTEXT = 128
RANGES = [(0, CONTEXT), (0, 1), (1, 2), (2, CONTEXT)]
THREE = HEAD.replace("seeds = [0, 1, 2, 3, 4, 5]", "seeds = [0, 1, 2]")
Values = Callable[[Cell, int, int], Mapping[str, float | None]]  # of a cell, layer and head


def diagnosed(
    store: RunStore, cell: Cell, values: Values, *, step: int = 100, rows: int = 4, ranges: Any = RANGES
) -> Path:
    """Writes one diagnosis of 2 layers and 2 heads, 1 for what ``values`` does not say; the path.

    A range of positions from ``start`` on has ``start`` more than the whole context.
    """
    found: list[dict[str, Any]] = []
    for layer in range(2):
        for head in range(2):
            said = values(cell, layer, head)
            for index, (start, end) in enumerate(ranges):
                more = {name: said.get(name, 1.0) for name in ("uniform", *MEASURES) if name != "self_over_uniform"}
                if index:
                    more = {name: None if value is None else value + start for name, value in more.items()}
                place = {
                    "step": step,
                    "tokens": rows * CONTEXT,
                    "layer": layer,
                    "head": head,
                    "start": start,
                    "end": end,
                }
                found.append({**place, **more})
    path = store.run(cell).path / "mechanism" / f"step-{step:09d}.parquet"
    path.parent.mkdir(exist_ok=True)
    write_rows(path, found)
    return path


def updated(store: RunStore, cell: Cell, step: int, matrices: Mapping[str, Sequence[float]], **values: Any) -> None:
    """Writes what an update did: matrix -> sketch, and a number or null for each matrix by name."""
    path = store.run(cell).path / "geometry" / f"step-{step:09d}.parquet"
    path.parent.mkdir(exist_ok=True)
    names = ("stable_rank", "update_stable_rank", "update_spread", "update_ratio")
    rows = [
        {
            "step": step,
            "matrix": matrix,
            "sketch": list(row),
            **{name: values.get(name, [1.0] * 16)[i] for name in names},
        }
        for i, (matrix, row) in enumerate(matrices.items())
    ]
    write_rows(path, rows)


def same(cell: Cell, layer: int, head: int) -> Mapping[str, float | None]:
    return {}


def with_all(folder: Path, values: Values, toml: str = THREE + ARMS, **options: Any) -> tuple[Experiment, RunStore]:
    """An experiment whose runs are all diagnosed at their end."""
    experiment, store = fake(folder, toml, **options)
    for cell in expand(experiment):
        diagnosed(store, cell, values)
    return experiment, store


# Tables of an arm


def test_a_heat_map_is_the_mean_over_seeds_of_each_layer_and_head(tmp_path: Path) -> None:
    """against Python's own mean and standard deviation, head by head; nothing of it is averaged over heads."""

    def value(cell: Cell, layer: int, head: int) -> float:
        return 10 * layer + head + 0.1 * cell.seed**2

    experiment, store = with_all(tmp_path, lambda *at: {"entropy": value(*at)})
    (entry,) = mechanism_tables(experiment, store)
    assert (entry["layers"], entry["heads"], entry["context"], entry["steps"]) == (2, 2, CONTEXT, 100)
    found = entry["arms"]["xsa"]["final"]["entropy"]
    for layer in range(2):
        for head in range(2):
            seeds = [value(Cell("base", "xsa", seed), layer, head) for seed in (0, 1, 2)]
            assert found["mean"][layer][head] == pytest.approx(statistics.fmean(seeds))
            assert found["sd"][layer][head] == pytest.approx(statistics.stdev(seeds))


def test_runs_that_did_not_finish_are_in_no_heat_map_and_named(tmp_path: Path) -> None:
    """a diverged run's numbers would be those of another moment; a run without its end is told as well."""
    state = {("xsa", 1): {"state": "diverged", "step": 50}}
    experiment, store = fake(tmp_path, THREE + ARMS, lambda cell: state.get((cell.arm, cell.seed), {}))
    for cell in expand(experiment):
        late = (cell.arm, cell.seed) != ("standard", 2)
        diagnosed(store, cell, lambda cell, *_: {"reach": cell.seed}, step=100 if late else 50)
    (entry,) = mechanism_tables(experiment, store)
    assert entry["left_out"] == ["base.standard.s2", "base.xsa.s1"]
    assert entry["arms"]["xsa"]["seeds"] == [0, 2]
    assert entry["arms"]["xsa"]["final"]["reach"]["mean"] == [[1.0, 1.0], [1.0, 1.0]]


def test_one_seed_has_no_standard_deviation_and_what_is_missing_is_null(tmp_path: Path) -> None:
    """a logit that no query has is null, alone and in every mean over it, and JSON takes the whole."""
    toml = THREE.replace("[0, 1, 2]", "[0]") + ARMS
    experiment, store = with_all(tmp_path, lambda c, layer, head: {"logit": None if layer == head == 1 else 2.0}, toml)
    (entry,) = mechanism_tables(experiment, store)
    arm = entry["arms"]["standard"]
    assert arm["final"]["logit"] == {"mean": [[2.0, 2.0], [2.0, None]], "sd": None}
    assert arm["curves"]["logit"]["values"] == [[None]]
    json.dumps(entry, allow_nan=False)


def test_self_weight_is_told_against_uniform_attention_by_position(tmp_path: Path) -> None:
    """the ratio of the two means of each range; a profile is the mean over layers and heads at the end."""
    experiment, store = with_all(tmp_path, lambda c, layer, head: {"self_weight": 3.0 + head, "uniform": 2.0})
    arm = mechanism_tables(experiment, store)[0]["arms"]["xsa"]
    assert arm["final"]["self_over_uniform"]["mean"] == [[1.5, 2.0], [1.5, 2.0]]
    assert arm["positions"]["ranges"] == [[0, 1], [1, 2], [2, CONTEXT]]
    by_hand = [(3 / 2 + 4 / 2) / 2, (4 / 3 + 5 / 3) / 2, (5 / 4 + 6 / 4) / 2]
    for seed in range(3):
        assert arm["positions"]["values"]["self_over_uniform"][seed] == pytest.approx(by_hand)
    assert "alpha" not in arm["positions"]["values"]  # it has no position


def test_curves_hold_the_seeds_of_equal_steps(tmp_path: Path) -> None:
    """one seed that was diagnosed at other steps is in the heat map, in no curve, and named."""
    experiment, store = with_all(tmp_path, lambda c, layer, head: {"alpha": layer + head + c.seed})
    for seed, step in ((0, 40), (1, 40), (2, 30)):
        diagnosed(store, Cell("base", "xsa", seed), lambda c, *_: {"alpha": -c.seed}, step=step)
    (entry,) = mechanism_tables(experiment, store)
    curve = entry["arms"]["xsa"]["curves"]["alpha"]
    assert curve == {"steps": [40, 100], "seeds": [0, 1], "values": [[0.0, 1.0], [-1.0, 2.0]]}
    assert entry["arms"]["xsa"]["seeds"] == [0, 1, 2]
    assert entry["left_out"] == ["base.xsa.s2"]


def test_geometry_is_the_mean_over_the_matrices_that_are_not_zero(tmp_path: Path) -> None:
    """a matrix that starts at zero has no stable rank; where no matrix has one there is none."""
    experiment, store = with_all(tmp_path, same)
    for cell in expand(experiment):
        updated(store, cell, 0, {"a": [1], "b": [1]}, stable_rank=[None, 4.0], update_ratio=[None, None])
        updated(store, cell, 50, {"a": [1], "b": [1]}, stable_rank=[2.0, 4.0 + cell.seed], update_ratio=[0.1, 0.3])
    found = mechanism_tables(experiment, store)[0]["arms"]["xsa"]["geometry"]
    assert found["stable_rank"] == {
        "steps": [0, 50],
        "seeds": [0, 1, 2],
        "values": [[4.0, 3.0], [4.0, 3.5], [4.0, 4.0]],
    }
    assert found["update_ratio"]["values"] == [[None, pytest.approx(0.2)]] * 3


def test_the_twin_is_left_out(tmp_path: Path) -> None:
    """it is the baseline again."""
    experiment, store = with_all(tmp_path, same, THREE + ARMS.replace("twin = false", "twin = true"))
    (entry,) = mechanism_tables(experiment, store)
    assert list(entry["arms"]) == ["standard", "xsa"]
    assert entry["left_out"] == []


def test_an_experiment_without_diagnostics_says_nothing(tmp_path: Path) -> None:
    """an empty list, and outcome has the key."""
    experiment, store = fake(tmp_path, THREE + ARMS)
    assert outcome(experiment, store)["mechanism"] == []


# What cannot stand beside one another


def test_a_run_that_read_other_rows_is_left_out_and_named(tmp_path: Path) -> None:
    """One diagnosed again costs itself alone; where most of a point read so many rows, the others are left out."""
    experiment, store = with_all(tmp_path, same)
    diagnosed(store, Cell("base", "xsa", 1), same, rows=8)
    (entry,) = mechanism_tables(experiment, store)
    assert (entry["left_out"], entry["rows"]) == (["base.xsa.s1"], 4)
    assert entry["arms"]["xsa"]["seeds"] == [0, 2]
    assert entry["arms"]["standard"]["seeds"] == [0, 1, 2]
    for arm in ("standard", "xsa"):
        for seed in (0, 2):
            diagnosed(store, Cell("base", arm, seed), same, rows=8)
    (entry,) = mechanism_tables(experiment, store)
    assert entry["rows"] == 8
    assert "base.standard.s1" in entry["left_out"]
    assert entry["arms"]["xsa"]["seeds"] == [0, 1, 2]


def test_a_run_of_another_length_is_left_out_and_named(tmp_path: Path) -> None:
    """an arm's ends must be one moment."""
    experiment, store = with_all(tmp_path, same)
    run = store.run(Cell("base", "standard", 2))
    run.write("status", {**run.status, "steps": 90})
    diagnosed(store, Cell("base", "standard", 2), same, step=90)
    (entry,) = mechanism_tables(experiment, store)
    assert entry["left_out"] == ["base.standard.s2"]
    assert entry["arms"]["standard"]["seeds"] == [0, 1]


def test_a_run_measured_on_two_kinds_of_rows_is_left_out(tmp_path: Path) -> None:
    """Its curve over training would be of two things."""
    experiment, store = with_all(tmp_path, same)
    diagnosed(store, Cell("base", "xsa", 0), same, step=50, rows=8)
    (entry,) = mechanism_tables(experiment, store)
    assert "base.xsa.s0" in entry["left_out"]


def test_a_diagnosis_with_a_row_too_few_is_named(tmp_path: Path) -> None:
    """the last head lacks its last range."""
    experiment, store = with_all(tmp_path, same)
    path = diagnosed(store, Cell("base", "xsa", 0), same)
    write_rows(path, pq.read_table(path).to_pylist()[:-1])
    with pytest.raises(ValueError, match=rf"{path}: 15 rows are not one for each"):
        mechanism_tables(experiment, store)


# Cosines


def test_cosines_are_those_of_the_sketches(tmp_path: Path) -> None:
    """angles by hand; a matrix that did not move or that one side lacks does not count; the null is marked."""
    experiment, store = with_all(tmp_path, same, THREE + ARMS.replace("null = false", ""))
    for cell in expand(experiment):
        other = {"a": [0, 2, 0], "b": [1, 1, 0], "still": [1, 0, 0], "only": [1, 1, 1]}
        mine = {"b": [3, 0, 0], "a": [0, -1, 0], "still": [0, 0, 0]}
        updated(store, cell, 0, mine if cell.arm == "xsa" else other)
        updated(store, cell, 50, {"a": [0, 0, 1], "b": [1, 0, 0], "still": [1, 2, 3]})
        updated(store, cell, 60 if cell.arm == "xsa" else 70, other)
    first, null = mechanism_tables(experiment, store)[0]["cosines"]
    assert (first["arm"], first["baseline"], first["kind"]) == ("xsa", "standard", "effect")
    assert (first["steps"], first["seeds"], first["matrices"]) == ([0, 50], [0, 1, 2], 3)
    assert first["values"] == [pytest.approx([(-1 + math.sqrt(0.5)) / 2, 1.0])] * 3
    assert (null["arm"], null["kind"]) == ("null", "null")
    assert null["values"] == [pytest.approx([1.0, 1.0, 1.0])] * 3
    assert "rounding" in null["words"]
    assert "0.031 for a matrix and 0.018 for the mean" in first["words"]


def test_the_error_that_is_told_is_the_sketches_own(tmp_path: Path) -> None:
    """matrices with a cosine of 0.6 by construction, sketched; within four of the errors that the words tell."""
    experiment, store = with_all(tmp_path, same)
    for cell in expand(experiment):
        generator = torch.Generator().manual_seed(cell.seed)  # a pair draws the same two
        drawn: dict[str, list[float]] = {}
        for index in range(16):
            a, b = (torch.randn(40, 60, generator=generator) for _ in range(2))
            a, b = a / a.norm(), b - (a * b).sum() / a.square().sum() * a
            update = a if cell.arm == "standard" else 0.6 * a + 0.8 * b / b.norm()
            drawn[f"m{index}"] = sketch(f"m{index}", update).tolist()
        updated(store, cell, 0, drawn)
    (found,) = mechanism_tables(experiment, store)[0]["cosines"]
    assert "0.0078 for the mean" in found["words"]
    for (value,) in found["values"]:
        assert value == pytest.approx(0.6, abs=4 * 0.0078)


# Sentences


def test_sentences_say_levels_and_how_many_seeds_agree(tmp_path: Path) -> None:
    """one seed in three goes the other way; the level is the mean over layers, heads and seeds."""

    def values(cell: Cell, layer: int, head: int) -> dict[str, float]:
        if cell.arm == "standard":
            return {"cos_before": 0.2, "cos_after": 0.2, "self_weight": 0.24, "uniform": 0.1}
        before = 0.1 if cell.seed == 1 else 0.4
        return {"cos_before": before, "cos_after": -1e-7, "self_weight": 0.16 + 0.04 * head, "uniform": 0.1}

    experiment, store = with_all(tmp_path, values)
    text = mechanism_tables(experiment, store)[0]["sentences"][0]
    assert text.startswith(
        "xsa against standard, mean over layers and heads: the cosine of output and own value is 0.30 before the "
        "exclusion (standard: 0.20, higher in 2 of 3 seeds) and 0.00 after; a token's weight on itself is 1.80 × "
        "uniform (standard: 2.40 ×, lower in 3 of 3 seeds); its weight on the first token is 1.000 (standard: 1.000, "
        "equal in 3 seeds); "
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_layer_is_named_where_every_seed_agrees_in_its_sum_over_heads(tmp_path: Path, alpha: float) -> None:
    """the sum over heads decides, not a head; a layer in which one seed differs is told as such."""

    def falls(cell: Cell, layer: int, head: int) -> dict[str, float]:
        lone = 0.2 if cell.seed == 2 else -0.2
        return {"alpha": alpha, "alpha_gradient": (0.1, -0.3)[head] if layer == 0 else lone}

    experiment, store = with_all(tmp_path, falls)
    where = "α = 0" if alpha == 0 else "the α in use"
    assert mechanism_tables(experiment, store)[0]["sentences"][1] == (
        f"standard: at {where} the loss would fall first by removing more of the own value in layer 0 (∂L/∂α < 0 in 3 "
        "of 3 seeds); in layer 1 the seeds do not agree in the sign of ∂L/∂α"
    )


def test_a_layer_in_which_the_loss_would_rise_is_told(tmp_path: Path) -> None:
    """beside one in which it would fall, and alone."""
    sides = {0: -1.0, 1: 2.0}
    experiment, store = with_all(tmp_path, lambda c, layer, head: {"alpha": 0.0, "alpha_gradient": sides[layer]})
    assert mechanism_tables(experiment, store)[0]["sentences"][1].endswith(
        "fall first by removing more of the own value in layer 0 (∂L/∂α < 0 in 3 of 3 seeds) and would rise in layer 1 "
        "(∂L/∂α > 0 in 3 of 3 seeds)"
    )
    sides[0] = 1.0
    for cell in expand(experiment):
        diagnosed(store, cell, lambda c, layer, head: {"alpha": 0.0, "alpha_gradient": sides[layer]})
    assert (
        "would rise by removing more of the own value in layers 0, 1"
        in (mechanism_tables(experiment, store)[0]["sentences"][1])
    )


# The prediction

STUDY = """
[arms.standard]
variant = "standard"
[factors]
attention = { xsa = { variant = "xsa", alpha = 0.5 } }
layers = "leave-one-out"
[controls]
twin = false
null = false
"""
GRADIENT = [[0.01, 0.03], [-0.10, -0.02]]  # of each layer and head, for seed 0
ARM_LAYERS = {"all": (0, 1), "but-0": (1,), "but-1": (0,)}


def study(folder: Path, measured: Callable[[str], float], alpha: float = 0.0) -> tuple[Experiment, RunStore]:
    """A layer study whose Δ of every arm is what ``measured`` says, at every seed."""

    def values(cell: Cell, layer: int, head: int) -> dict[str, float]:
        return {"alpha": alpha, "alpha_gradient": GRADIENT[layer][head] * (1 + cell.seed)}

    experiment, store = with_all(folder, values, THREE + STUDY)
    for cell in expand(experiment):
        run = store.run(cell)
        delta = 0.0 if cell.arm == "standard" else measured(cell.arm)
        run.write("status", {**run.status, "val_bpb": 2.0 + 0.1 * cell.seed + delta})
    return experiment, store


def test_a_layer_study_stands_beside_its_prediction(tmp_path: Path) -> None:
    """∂L/∂α summed over the arm's layers and heads, times α, mean over seeds, by hand; both correlations."""
    by_hand = {arm: 0.5 * 2 * sum(sum(GRADIENT[layer]) for layer in layers) for arm, layers in ARM_LAYERS.items()}
    measured = {"all": -0.010, "but-0": -0.012, "but-1": 0.002}
    (entry,) = mechanism_tables(*study(tmp_path, lambda arm: measured[arm]))
    found = entry["prediction"]
    assert found["n"] == 3
    for row in found["rows"]:
        assert row["predicted"] == pytest.approx(by_hand[row["arm"]])
        assert row["measured"] == pytest.approx(measured[row["arm"]])
    assert [row["arm"] for row in found["rows"]] == list(ARM_LAYERS)
    a, b = ([side[arm] for arm in ARM_LAYERS] for side in (by_hand, measured))
    assert found["pearson"] == pytest.approx(statistics.correlation(a, b))
    assert found["spearman"] == pytest.approx(1.0)
    assert "3 arms; a correlation over so few says little" in found["words"]
    json.dumps(entry, allow_nan=False)


def test_a_correlation_with_what_does_not_vary_is_null(tmp_path: Path) -> None:
    """no NaN, and no warning of scipy's."""
    found = mechanism_tables(*study(tmp_path, lambda arm: 0.0))[0]["prediction"]
    assert (found["pearson"], found["spearman"]) == (None, None)


def test_a_baseline_with_exclusion_predicts_nothing(tmp_path: Path) -> None:
    """the slope at another α is not that at 0."""
    assert mechanism_tables(*study(tmp_path, lambda arm: 0.0, alpha=0.5))[0]["prediction"] is None


MORE = """
[arms.standard]
[arms.one]
variant = "xsa"
layers = "first:1"
[arms.two]
variant = "xsa"
layers = "last:1"
[arms.three]
variant = "xsa"
{}
[controls]
twin = false
null = false
"""


@pytest.mark.parametrize(
    ("third", "there"),
    [
        ("", True), ('layers = "0:1"', False), ("alpha = 0.5", False), ("optim.lr_scale = 0.5", False),
        ('against = "projected"', False), ('alpha = { learned = "tanh" }', False),
    ],
)  # fmt: skip
def test_only_arms_that_differ_in_their_layers_alone_are_a_layer_study(tmp_path: Path, third: str, there: bool) -> None:
    """three selections of layers, of one fixed α, under the baseline's other settings; fewer are none."""
    experiment, store = with_all(tmp_path, lambda *_: {"alpha": 0.0}, THREE + MORE.format(third))
    assert (mechanism_tables(experiment, store)[0]["prediction"] is not None) == there


@pytest.mark.parametrize("options", ['against = "projected"', 'alpha = { learned = "tanh", start = 0.0 }'])
def test_a_study_of_another_exclusion_has_no_prediction(tmp_path: Path, options: str) -> None:
    """∂L/∂α of a standard model is about the mixed value and a step in a fixed α."""
    toml = MORE.format("").replace('variant = "xsa"', f'variant = "xsa"\n{options}')
    experiment, store = with_all(tmp_path, lambda *_: {"alpha": 0.0}, THREE + toml)
    assert mechanism_tables(experiment, store)[0]["prediction"] is None
