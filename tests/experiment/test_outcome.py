"""What is said of an experiment, against the same numbers worked out by hand from the runs' own metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_runs import ARMS, CROSSED, DOSES, HEAD, fake, fake_run, looked_at, timed
from xsalab.eval import ItemScore
from xsalab.experiment.design import Cell, Experiment, expand
from xsalab.experiment.outcome import outcome
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.stages import as_run, begin_looks, declare, plan_equal_time
from xsalab.experiment.store import RunStore
from xsalab.stats import equivalence_interval, look_levels


def points(values: str) -> str:
    return "".join(f"[[points]]\nname = 't{n}'\ntrain.tokens = {n}\n" for n in values.split())


def bpb(store: RunStore, experiment: Experiment, arm: str, point: str = "base") -> np.ndarray:
    """(S,) the metric of an arm's runs, as each run stored it."""
    return np.array([store.run(Cell(point, arm, seed)).status["val_bpb"] for seed in experiment.seeds])


def combined(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in content["combinations"] if row["name"] == name)


def test_main_effects_and_the_interaction_are_those_of_the_runs(tmp_path: Path) -> None:
    """Seed by seed from the runs' own bpb; and an effect that is planted under one optimizer alone is found there."""
    plant = {"xsa-muon": 0.0, "xsa-adamw": -0.05, "standard-adamw": 0.2}
    experiment, store = fake(tmp_path, HEAD + CROSSED, shift=lambda cell: plant.get(cell.arm, 0.0))
    content = outcome(experiment, store)
    value = {arm: bpb(store, experiment, arm) for arm in experiment.arms}
    muon, adamw = (value[f"xsa-{o}"] - value[f"standard-{o}"] for o in ("muon", "adamw"))
    interaction = combined(content, "(xsa - standard) x (adamw - muon)")
    assert interaction["differences"] == pytest.approx((adamw - muon).tolist(), abs=1e-12)
    assert combined(content, "xsa - standard")["differences"] == pytest.approx(((adamw + muon) / 2).tolist(), abs=1e-12)
    assert interaction["verdict"]["word"] == "better"
    assert interaction["sentence"].startswith("xsa − standard under adamw against the same under muon: Δ bpb −0.2")
    assert combined(content, "adamw - muon")["verdict"]["word"] == "worse"
    # relative to the mean of the cells that are subtracted
    level = (value["standard-adamw"] + value["xsa-muon"]).mean() / 2
    assert interaction["estimate"]["relative"] == pytest.approx((adamw - muon).mean() / level)


def test_a_trend_is_the_slope_of_every_seed(tmp_path: Path) -> None:
    """Against numpy's straight line, seed by seed; a gain that grows with each doubling is `better`."""
    gain = {"t204800": 0.0, "t409600": -0.02, "t819200": -0.04}
    experiment, store = fake(
        tmp_path,
        HEAD + ARMS + points("204800 409600 819200"),
        shift=lambda cell: gain[cell.point] if cell.arm == "xsa" else 0.0,
    )
    content = outcome(experiment, store)
    of = np.array([bpb(store, experiment, "xsa", p) - bpb(store, experiment, "standard", p) for p in gain])
    trend = combined(content, "xsa - standard over train.tokens")
    assert trend["differences"] == pytest.approx(np.polyfit([0, 1, 2], of, 1)[0].tolist(), abs=1e-12)
    assert trend["verdict"]["word"] == "better"
    assert "bpb for each doubling" in trend["sentence"]
    mean = combined(content, "xsa - standard over points")
    assert mean["differences"] == pytest.approx(of.mean(axis=0).tolist(), abs=1e-12)
    means = np.array([bpb(store, experiment, "standard", p).mean() for p in gain])
    relative = np.polyfit([0, 1, 2], of.mean(axis=1) / means, 1)[0]
    assert trend["relative_trend"]["mean"] == pytest.approx(relative, rel=1e-9)
    assert trend["relative_trend"]["low"] < relative < trend["relative_trend"]["high"]


def test_points_with_other_documents_meet_in_their_totals(tmp_path: Path) -> None:
    """Then nothing is known of the choice of text, and the interval is Student's over seeds."""
    experiment, store = fake(tmp_path, HEAD + ARMS + points("204800 409600"))
    for seed in experiment.seeds:
        for arm in ("standard", "xsa"):
            run = store.run(Cell("t409600", arm, seed))
            scores = run.scores()
            del scores["d0"]
            run.write_scores([ItemScore("bpb", item, *score) for item, score in scores.items()])
    trend = combined(outcome(experiment, store), "xsa - standard over train.tokens")
    assert trend["estimate"]["method"] == "t over seeds (one total)"
    assert trend["estimate"]["df"] == 5


def test_the_declared_family_alone_is_adjusted_and_judged(tmp_path: Path) -> None:
    """Holm over what was declared; what was not has an interval and no verdict."""
    declared = "(xsa - standard) x (adamw - muon)"
    family = f'[primary]\ncontrast = "{declared}"\nfamily = ["{declared}", "xsa-muon - standard-muon"]\n'
    experiment, store = fake(tmp_path, HEAD + family + CROSSED)
    content = outcome(experiment, store)
    assert content["family"] == ["xsa-muon - standard-muon", declared]
    rows = [*content["contrasts"], *content["combinations"]]
    judged = [row for row in rows if row["adjusted_p"] is not None]
    assert sorted(row["name"] for row in judged) == sorted(content["family"])
    raw, adjusted = (
        [row[key] if key == "adjusted_p" else row["estimate"]["p"] for row in judged] for key in ("p", "adjusted_p")
    )
    assert min(adjusted) == pytest.approx(min(1, 2 * min(raw)))
    outside = [row for row in rows if row["exploratory"]]
    assert len(outside) == 5
    assert not any("verdict" in row for row in outside)
    assert content["headline"][0].startswith("xsa − standard under adamw")


def test_controls_stay_outside_the_family(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path)
    content = outcome(experiment, store)
    assert content["family"] == ["xsa - standard", "half - standard"]
    assert [row["adjusted_p"] is None for row in content["contrasts"]] == [False, False, True, True]


# Looks


def test_a_plain_effect_is_decided_at_the_first_look(tmp_path: Path) -> None:
    experiment, _, content = looked_at(tmp_path, lambda cell: -0.1 * (cell.arm == "xsa"), 8)
    assert experiment.seeds == (7, 3, 0, 1)
    levels = look_levels((4, 6, 8))
    assert content["sequential"] == {
        "looks": [4, 6, 8], "at": 4, "two_sided": levels.two_sided, "one_sided": levels.one_sided,
    }  # fmt: skip
    row = content["contrasts"][0]
    assert row["verdict"]["word"] == "better"
    assert row["estimate"]["confidence"] == 1 - levels.two_sided
    assert "the look at 4 of at most 8 seeds" in content["headline"][0]


def test_no_effect_goes_on_to_the_cap_and_not_beyond(tmp_path: Path) -> None:
    """Noise alone, a margin far below it: all looks are taken, and the last says inconclusive."""
    experiment, _, content = looked_at(tmp_path, lambda cell: 0.0, 6)
    assert (experiment.seeds, experiment.looks) == ((7, 3, 0, 1, 2, 4), (4, 6))
    assert content["contrasts"][0]["verdict"]["word"] == "inconclusive"


def test_the_cap_is_declared_once(tmp_path: Path) -> None:
    """The boundaries hold for one schedule: another cap afterwards would be chosen with the result in view."""
    experiment, store, _ = looked_at(tmp_path, lambda cell: 0.0, 6)
    with pytest.raises(ValueError, match=r"--max-seeds 12: this experiment was begun with a cap of 6 seeds"):
        begin_looks(experiment, store, 12)


def test_looks_need_a_contrast_to_decide(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path)
    with pytest.raises(ValueError, match=r"primary.contrast is empty: --until-decided needs"):
        begin_looks(experiment, store, 8)


def test_seeds_that_changed_since_the_first_look_are_refused(tmp_path: Path) -> None:
    experiment, store, _ = looked_at(tmp_path, lambda cell: 0.0, 6)
    path = store.folder / "sequential.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "seeds": [1, 2, 3, 4, 5, 6]}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"the experiment began with \[1, 2, 3, 4, 5, 6\]; restore them"):
        as_run(experiment, store)


# Doses


def test_a_curve_with_its_lowest_point_inside_is_found(tmp_path: Path) -> None:
    """Planted: Δ = 0.4 (α − 0.5)², lowest at 0.5, noise of 0.002 a run."""

    def planted(cell: Cell) -> float:
        return 0.4 * (float(cell.arm.removeprefix("alpha-").replace("_", ".")) - 0.5) ** 2

    experiment, store = fake(tmp_path, HEAD + DOSES, shift=planted)
    (row,) = outcome(experiment, store)["doses"]
    assert row["doses"] == [0, 0.25, 0.5, 0.75, 1]
    assert row["minimum"]["dose"] == pytest.approx(0.5, abs=0.03)
    assert [low < 0.5 < high for low, high in row["minimum"]["within"]] == [True]
    expected = bpb(store, experiment, "alpha-0_5") - bpb(store, experiment, "alpha-0")
    assert row["seed_values"][1] == pytest.approx(expected.tolist(), abs=1e-12)
    assert row["points"][2]["mean"] == pytest.approx(expected.mean())


def test_a_curve_goes_by_the_seeds_that_have_every_dose(tmp_path: Path) -> None:
    """One dose of seed 2 is missing and one of seed 4 diverged: said, and the others are fitted."""

    def change(cell: Cell) -> dict[str, Any]:
        state = {("alpha-0_5", 2): "waiting", ("alpha-1", 4): "diverged"}.get((cell.arm, cell.seed))
        return {"state": state} if state else {}

    experiment, store = fake(tmp_path, HEAD + DOSES, change)
    (row,) = outcome(experiment, store)["doses"]
    assert (row["seeds"], row["unfinished"], row["diverged"]) == ([0, 1, 3, 5], [2], [4])


@pytest.mark.parametrize("seeds", ["[0]", "[0, 1]"])
def test_few_seeds_have_a_curve_and_no_claim(tmp_path: Path, seeds: str) -> None:
    toml = (HEAD + DOSES).replace("[0, 1, 2, 3, 4, 5]", seeds)
    experiment, store = fake(tmp_path, toml)
    (row,) = outcome(experiment, store)["doses"]
    assert not row["minimum"]["decidable"]
    assert row["minimum"]["within"] == [[0.0, 1.0]]
    assert "NaN" not in json.dumps(row)


# Equal time


@pytest.mark.parametrize(
    ("ratio", "name", "steps"), [(1.25, "xsa@equal-time", 80), (0.8, "standard@equal-time-xsa", 80)]
)
def test_the_slower_arm_is_trained_again_with_fewer_steps(tmp_path: Path, ratio: float, name: str, steps: int) -> None:
    """Steps divided by the ratio, whichever arm is slower; the comparison is of complete runs, xsa − standard."""
    experiment, store = timed(tmp_path, ratio)
    assert experiment.arms[name].steps == {"base": steps}
    content = outcome(as_run(experiment, store), store)
    (row,) = [row for row in content["contrasts"] if row["kind"] == "equal time"]
    sides = {"xsa", "standard"} - {name.partition("@")[0]} | {name}
    assert {row["treatment"], row["baseline"]} == sides
    assert row["treatment"].startswith("xsa")
    expected = bpb(store, experiment, row["treatment"]) - bpb(store, experiment, row["baseline"])
    assert row["differences"] == pytest.approx(expected.tolist(), abs=1e-12)


def test_the_slope_turns_a_ratio_into_bits(tmp_path: Path) -> None:
    """By hand: 1/1.25 of the steps leaves out 20 of 100; the baseline lost b(90) − b(100) over 10 of them."""
    experiment, store = timed(tmp_path, 1.25)
    (row,) = outcome(experiment, store)["equal_time"]
    base, shorter, xsa = (bpb(store, experiment, arm) for arm in ("standard", "standard@90", "xsa"))
    assert row["slope"]["mean"] == pytest.approx((xsa - base + 2 * (shorter - base)).mean())
    assert row["slope"]["low"] < row["slope"]["mean"] < row["slope"]["high"]


def test_time_to_target_is_read_off_complete_runs(tmp_path: Path) -> None:
    """Every seed of each arm: interpolated between its own budgets, or a bound."""
    experiment, store = timed(tmp_path, 1.25)
    (row,) = outcome(experiment, store)["equal_time"]
    target = row["target"]
    assert target["target"] == pytest.approx(bpb(store, experiment, "standard").mean())
    assert target["treatment"]["budgets"] == [80, 100]
    assert target["treatment"]["seconds_per_step"] == 2.5
    for seconds, final in zip(target["baseline"]["seconds"], bpb(store, experiment, "standard"), strict=True):
        reached = final <= target["target"]
        assert (seconds["high"] is not None) == reached
        if not reached:
            assert seconds["low"] == 200.0


def test_no_run_follows_from_a_busy_machines_times(tmp_path: Path) -> None:
    experiment, store = timed(tmp_path, 1.25, others=0.5)
    assert not [arm for arm in experiment.arms.values() if arm.against]
    assert not (store.folder / "equal_time.json").exists()


def test_a_later_measurement_changes_no_run(tmp_path: Path) -> None:
    """The ratio is taken once: resuming an experiment must not ask for other runs."""
    experiment, store = timed(tmp_path, 1.25)
    costs = json.loads((store.folder / "timing.json").read_text(encoding="utf-8"))
    costs["costs"][0]["ratio"] = 1.5
    assert plan_equal_time(experiment, store, costs).arms["xsa@equal-time"].steps == {"base": 80}


def test_equivalence_is_tested_with_the_interval_for_skewed_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict asks ``equivalence_interval``, at the level of the look where there is one."""
    from xsalab.experiment import judging as module

    asked: list[float] = []

    def interval(pairs: Any, *, level: float) -> Any:
        asked.append(level)
        return equivalence_interval(pairs, level=level)

    monkeypatch.setattr(module, "equivalence_interval", interval)
    experiment, store = fake(tmp_path)
    outcome(experiment, store)
    assert asked == [0.05] * 4


# What a reader must be told


def test_a_diverged_baseline_leaves_no_verdict_on_quality(tmp_path: Path) -> None:
    """The mean over the pairs that are left flatters whoever diverged, on either side."""
    experiment, store = fake(
        tmp_path, change=lambda cell: {"state": "diverged"} if (cell.arm, cell.seed) == ("standard", 1) else {}
    )
    row = outcome(experiment, store)["contrasts"][0]
    assert row["verdict"]["word"] == "diverged"
    assert row["verdict"]["reason"].startswith("1 of 6 runs of standard diverged")
    assert "on condition that both runs finish" in row["sentence"]


def test_the_family_does_not_shrink_when_an_arm_is_lost(tmp_path: Path) -> None:
    """Two contrasts were declared: the one that is left pays for both."""
    experiment, store = fake(tmp_path, change=lambda cell: {"state": "diverged"} if cell.arm == "half" else {})
    first, second, *_ = outcome(experiment, store)["contrasts"]
    assert second["verdict"]["word"] == "diverged"
    assert first["adjusted_p"] == pytest.approx(min(1, 2 * first["estimate"]["p"]))


def declared(folder: Path, before: str, after: str) -> dict[str, Any]:
    """The outcome after the text ``before`` of the file, with which the runs began, was turned into ``after``."""
    experiment, store = fake(folder, change=lambda cell: {"state": "waiting"})
    declare(experiment, store)
    for cell in expand(experiment):
        fake_run(experiment, store, cell, {"state": "finished", "step": 9, "steps": 9, "resumes": 0})
    text = experiment.path.read_text(encoding="utf-8")
    assert before in text
    experiment.path.write_text(text.replace(before, after, 1), encoding="utf-8")
    changed = load_experiment(experiment.path)
    declare(changed, store)  # changes nothing any more
    return outcome(changed, store)


def test_a_contrast_that_is_declared_after_the_runs_is_told(tmp_path: Path) -> None:
    said = declared(tmp_path, "[model]", '[primary]\ncontrast = "half - standard"\nmargin = 0.5\n[model]')
    assert said["changed"] == {"primary.contrast": ["", "half - standard"], "primary.margin": [0.001, 0.5]}
    assert "primary.margin = 0.5 was not declared before the runs: they began with 0.001" in said["warnings"]


def test_a_seed_that_is_taken_out_after_the_runs_is_told(tmp_path: Path) -> None:
    said = declared(tmp_path, "seeds = [0, 1, 2, 3, 4, 5]", "seeds = [0, 1, 3, 4, 5]")
    assert said["left_out"] == [f"base.{arm}.s2" for arm in ("half", "null", "positive", "standard", "xsa")]
    assert any(
        "5 runs are there that the file no longer names, and are left out: base.half.s2" in w for w in said["warnings"]
    )


def test_looks_that_are_declared_after_runs_are_told(tmp_path: Path) -> None:
    toml = HEAD + '[primary]\ncontrast = "xsa - standard"\n' + ARMS
    written, store = fake(tmp_path, toml)
    experiment = begin_looks(written, store, 8)
    said = outcome(experiment, store)
    assert any("the looks were declared when 12 runs had ended" in warning for warning in said["warnings"])


def test_a_curve_of_a_sequential_experiment_is_as_wide_as_its_look(tmp_path: Path) -> None:
    toml = HEAD + '[primary]\ncontrast = "alpha-1 - alpha-0"\n' + DOSES
    written, store = fake(tmp_path, toml)
    fixed = outcome(written, store)["doses"][0]["points"][2]
    looked = outcome(begin_looks(written, store, 6), store)
    assert looked["doses"][0]["points"][2]["confidence"] == looked["confidence"] > fixed["confidence"]


def test_an_arm_that_is_added_later_has_its_rerun_too(tmp_path: Path) -> None:
    experiment, store = timed(tmp_path, 1.25)
    costs = json.loads((store.folder / "timing.json").read_text(encoding="utf-8"))
    text = experiment.path.read_text(encoding="utf-8").replace(
        "[controls]", "[arms.late]\nvariant = 'xsa'\nalpha = 0.5\n[controls]"
    )
    experiment.path.write_text(text, encoding="utf-8")
    costs["costs"].append({**costs["costs"][0], "arm": "late", "ratio": 2.0})
    arms = plan_equal_time(as_run(load_experiment(experiment.path), store), store, costs).arms
    assert arms["late@equal-time"].steps == {"base": 50}
    assert arms["xsa@equal-time"].steps == {"base": 80}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sequential", "{"), ("sequential", "[]"), ("sequential", '{"looks": [4], "seeds": [0, 1, 2, 3]}'),
        ("sequential", '{"looks": [], "seeds": [], "reached": 0}'),
        ("sequential", '{"looks": [4, 6], "seeds": [0, 1, 2, 3, 4, 5], "reached": 5}'),
        ("equal_time", "[]"), ("equal_time", '{"ratios": 3}'),
        ("equal_time", '{"arms": {"a": {"of": "xsa", "against": "standard", "steps": "x"}}}'),
    ],
)  # fmt: skip
def test_a_damaged_record_is_named(tmp_path: Path, file: str, content: str) -> None:
    experiment, store = fake(tmp_path)
    (store.folder / f"{file}.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{file}.json: damaged"):
        as_run(experiment, store)


def test_a_primary_interaction_at_several_points_names_the_point(tmp_path: Path) -> None:
    primary = '[primary]\ncontrast = "(xsa - standard) x (adamw - muon)"\n'
    experiment, store = fake(tmp_path, HEAD + primary + CROSSED + points("204800 409600"))
    assert [line.partition(":")[0] for line in outcome(experiment, store)["headline"]] == ["t204800", "t409600"]


def test_a_family_without_a_primary_contrast_has_a_headline(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path, HEAD + '[primary]\nfamily = ["(xsa - standard) x (adamw - muon)"]\n' + CROSSED)
    assert outcome(experiment, store)["headline"][0].startswith("xsa − standard under adamw")


def test_many_contrasts_that_lack_runs_are_told_in_one_line(tmp_path: Path) -> None:
    """Two lines of an experiment under way are read, forty are not; the count stays."""
    for name in ("few", "many"):
        (tmp_path / name).mkdir()
    few, store = fake(tmp_path / "few", change=lambda cell: {"state": "waiting"} if cell.seed == 5 else {})
    lines = [line for line in outcome(few, store)["warnings"] if "not finished" in line]
    assert len(lines) > 1
    assert any("seeds [5]" in line for line in lines)
    toml = HEAD + CROSSED + points("256 512 1024")
    many, store = fake(tmp_path / "many", toml, change=lambda cell: {"state": "waiting"} if cell.seed == 3 else {})
    content = outcome(many, store)
    lacking = [row for row in (*content["contrasts"], *content["combinations"]) if row["unfinished"]]
    assert len(lacking) > 8
    assert f"{len(lacking)} contrasts lack runs" in next(w for w in content["warnings"] if "lack runs" in w)
    assert not [line for line in content["warnings"] if "are not finished" in line and "contrasts lack" not in line]


def test_a_learned_strength_is_told_in_words(tmp_path: Path) -> None:
    learned = 'alpha = { learned = "tanh", per = "head", start = 0.0 }'
    experiment, store = fake(tmp_path, HEAD + '[arms.standard]\n[arms.xsa]\nvariant = "xsa"\n' + learned + "\n")
    assert outcome(experiment, store)["arms"]["xsa"] == (
        "xsa (α = (learned = tanh, per = head, start = 0), all layers)"
    )
