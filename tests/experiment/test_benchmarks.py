"""What is said of benchmarks, against the same numbers worked out from the answers that were written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fake_runs import ARMS, CROSSED, HEAD, TASKS, fake, fake_answers, fake_tuned
from xsalab.eval import TaskAnswers, centred_mean
from xsalab.experiment import benchmarks as module
from xsalab.experiment.answers import write_answers
from xsalab.experiment.benchmarks import benchmarks
from xsalab.experiment.design import Cell, Experiment, expand
from xsalab.experiment.outcome import outcome
from xsalab.experiment.store import RunFolder, RunStore

TWO = HEAD + ARMS
ONE_SEED = TWO.replace("seeds = [0, 1, 2, 3, 4, 5]", "seeds = [0]")
Given = dict[Cell, list[TaskAnswers]]


def answered(
    folder: Path, toml: str = TWO, gain: float = 0.15, where: str = "core", **options: Any
) -> tuple[Experiment, RunStore, Given]:
    """An experiment whose runs have all answered; ``gain``: of arms with xsa in their name."""
    experiment, store = fake(folder, toml)
    cells = [cell for cell in expand(experiment) if cell.arm != "twin"]
    return experiment, store, {
        cell: fake_answers(store, cell, where, gain=gain if "xsa" in cell.arm else 0.0, **options) for cell in cells
    }  # fmt: skip


def figures(given: Given, arm: str, point: str = "base") -> np.ndarray:
    return np.array([centred_mean(of) for cell, of in given.items() if (cell.point, cell.arm) == (point, arm)])


def only(experiment: Experiment, store: RunStore) -> dict[str, Any]:
    found = benchmarks(experiment, store)
    assert len(found) == 1
    json.dumps(found, allow_nan=False)
    return found[0]


def test_levels_and_differences_are_those_of_the_benchmark(tmp_path: Path) -> None:
    """Against the benchmark's own definition, run by run; a gain on every task is found, and higher is better."""
    experiment, store, given = answered(tmp_path)
    found = only(experiment, store)
    a, b = figures(given, "standard"), figures(given, "xsa")
    assert found["name"] == "CORE (3 of 22 tasks)"
    for level, values in zip(found["levels"], (a, b), strict=True):
        assert (level["n"], level["mean"], level["sd"]) == pytest.approx((6, values.mean(), values.std(ddof=1)))
    (row,) = found["contrasts"]
    assert row["differences"] == pytest.approx((b - a).tolist(), abs=1e-12)
    assert row["estimate"]["mean"] == pytest.approx((b - a).mean())
    assert row["estimate"]["method"] == "two-way t, seeds × items within tasks"
    assert row["estimate"]["items"] == sum(items for *_, items in TASKS.values())
    assert row["verdict"]["word"] == "better"
    assert row["sentence"].startswith("xsa against standard: a CORE (3 of 22 tasks) difference of +0.")
    assert " is beyond noise (95 % interval +0." in row["sentence"]
    assert found["margin"] == 0.01


def test_a_loss_on_every_task_is_worse(tmp_path: Path) -> None:
    experiment, store, _ = answered(tmp_path, gain=-0.25)
    (row,) = only(experiment, store)["contrasts"]
    assert row["verdict"]["word"] == "worse"


def test_each_task_has_its_accuracies_what_guessing_gives_and_mcnemar(tmp_path: Path) -> None:
    experiment, store, given = answered(tmp_path)
    found = only(experiment, store)
    (row,) = found["contrasts"]
    for number, (task, (baseline, chance, _, items)) in enumerate(sorted(TASKS.items())):
        told, compared = found["tasks"][number], row["tasks"][number]
        assert (told["task"], told["baseline"], told["chance"]) == (task, baseline, chance)
        assert told["item_count"] == items
        values = {
            arm: np.array([[score.value for score in answers.scores] for cell, of in given.items() if cell.arm == arm
                           for answers in of if answers.task == task])
            for arm in ("standard", "xsa")
        }  # fmt: skip
        for arm, right in values.items():
            assert told["arms"][arm]["mean"] == pytest.approx(right.mean())
            assert told["arms"][arm]["sd"] == pytest.approx(right.mean(axis=1).std(ddof=1))
        x = values["xsa"] - values["standard"]
        assert compared["mean"] == pytest.approx(x.mean())
        net = x.sum(axis=0)
        oracle = stats.binomtest(int((net > 0).sum()), int((net != 0).sum())).pvalue
        assert compared["mcnemar"]["p"] == pytest.approx(oracle)
        assert compared["mcnemar"]["treatment"] == (x > 0).sum()
        for seed, of in enumerate(compared["by_seed"]):
            wins, losses = int((x[seed] > 0).sum()), int((x[seed] < 0).sum())
            assert (of["treatment"], of["baseline"]) == (wins, losses)
            assert of["p"] == pytest.approx(stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1)


def test_without_answers_nothing_is_said(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path, TWO)
    assert benchmarks(experiment, store) == []
    assert outcome(experiment, store)["benchmarks"] == []


def test_the_outcome_has_them(tmp_path: Path) -> None:
    experiment, store, _ = answered(tmp_path, ONE_SEED)
    assert outcome(experiment, store)["benchmarks"] == benchmarks(experiment, store)


def test_one_run_an_arm_is_an_interval_over_items_alone(tmp_path: Path) -> None:
    experiment, store, _ = answered(tmp_path, ONE_SEED)
    (row,) = only(experiment, store)["contrasts"]
    assert row["estimate"]["method"] == "t over items within tasks only (1 seed)"
    assert row["verdict"]["word"] == "not decidable"
    assert "one run an arm cannot tell it from the luck of a seed: not decidable" in row["sentence"]


def test_the_order_in_which_items_are_stored_does_not_matter(tmp_path: Path) -> None:
    """Runs are paired item by item, by name."""
    experiment, store, given = answered(tmp_path, ONE_SEED)
    before = benchmarks(experiment, store)
    cell = Cell("base", "xsa", 0)
    for task in given[cell]:
        write_answers(store.run(cell).path / "core", dataclasses.replace(task, scores=task.scores[::-1]), "k")
    after = benchmarks(experiment, store)
    one, two = (found[0]["contrasts"][0] for found in (before, after))
    assert [task["mcnemar"] for task in one["tasks"]] == [task["mcnemar"] for task in two["tasks"]]
    for end in ("low", "high", "df"):
        assert two["estimate"][end] == pytest.approx(one["estimate"][end], rel=1e-9)


# What must not be compared


@pytest.mark.parametrize("change", ["an item less", "another item", "another weight", "another key", "other baseline"])
def test_runs_that_were_asked_otherwise_are_refused(tmp_path: Path, change: str) -> None:
    """Named are both runs and the task. Skipping goes by the item, so an item that one run lacks is a fault."""
    experiment, store, given = answered(tmp_path, ONE_SEED)
    cell = Cell("base", "xsa", 0)
    task = given[cell][0]
    first = task.scores[0]
    scores = {
        "an item less": task.scores[1:],
        "another item": (dataclasses.replace(first, item="line 999"), *task.scores[1:]),
        "another weight": (dataclasses.replace(first, weight=3.0), *task.scores[1:]),
    }.get(change, task.scores)
    task = dataclasses.replace(task, scores=scores, baseline=0.5 if change == "other baseline" else task.baseline)
    write_answers(store.run(cell).path / "core", task, "other" if change == "another key" else "k")
    with pytest.raises(ValueError, match=r"base\.standard\.s0 and base\.xsa\.s0, CORE, arc_easy: .*[Aa]sk both"):
        benchmarks(experiment, store)


def test_a_declared_context_may_change_how_an_item_is_asked(tmp_path: Path) -> None:
    """The key holds the context; where an arm declares another one, that is the factor under test."""
    toml = ONE_SEED.replace("variant = 'xsa'", "model.context = 64")
    experiment, store, _ = answered(tmp_path, toml)
    fake_answers(store, Cell("base", "xsa", 0), key="asked in a shorter context")
    assert only(experiment, store)["contrasts"]


def test_points_may_be_asked_in_their_own_way(tmp_path: Path) -> None:
    """Another context is another key. What goes over points still meets item by item."""
    toml = TWO + "".join(f"[[points]]\nname = 'c{n}'\nmodel.context = {n}\n" for n in (64, 128))
    experiment, store = fake(tmp_path, toml)
    given = {cell: fake_answers(store, cell, key=cell.point, gain=0.1 * (cell.arm == "xsa"))
             for cell in expand(experiment)}  # fmt: skip
    found = only(experiment, store)
    mean = next(row for row in found["combinations"] if row["kind"] == "mean")
    by_hand = np.mean([figures(given, "xsa", p) - figures(given, "standard", p) for p in ("c64", "c128")], axis=0)
    assert mean["differences"] == pytest.approx(by_hand.tolist(), abs=1e-12)
    assert mean["estimate"]["method"] == "two-way t, seeds × items within tasks"
    trend = next(row for row in found["combinations"] if row["kind"] == "trend")
    assert "difference for each doubling of" in trend["sentence"]


# What is not there


def test_runs_without_answers_are_counted(tmp_path: Path) -> None:
    """And so are those that have not answered every task: neither is in a mean."""
    experiment, store, given = answered(tmp_path)
    for seed in (0, 1):
        for file in (store.run(Cell("base", "xsa", seed)).path / "core").iterdir():
            file.unlink()
    (store.run(Cell("base", "standard", 5)).path / "core" / "boolq.parquet").unlink()
    found = only(experiment, store)
    assert found["missing"] == [
        "finished runs without answers: xsa 2 of 6",
        "finished runs that have not answered all 3 tasks, left out: standard 1 of 6 (base.standard.s5: 2 tasks)",
    ]
    (row,) = found["contrasts"]
    assert row["seeds"] == [2, 3, 4]
    assert {level["arm"]: level["n"] for level in found["levels"]} == {"standard": 5, "xsa": 4}
    assert row["differences"] == pytest.approx((figures(given, "xsa") - figures(given, "standard"))[2:5].tolist())


def test_an_arm_without_any_answers_has_no_row_and_stays_in_the_family(tmp_path: Path) -> None:
    """Holm's family is every contrast of the benchmark: it does not shrink while answers are missing."""
    toml = TWO.replace("[controls]", "[arms.half]\nvariant = 'xsa'\nalpha = 0.5\n[controls]")
    experiment, store = fake(tmp_path, toml)
    for cell in expand(experiment):
        if cell.arm != "half":
            fake_answers(store, cell, gain=0.06 * (cell.arm == "xsa"))
    (row,) = only(experiment, store)["contrasts"]
    assert row["adjusted_p"] == pytest.approx(min(1.0, 2 * row["estimate"]["p"]))
    for cell in expand(experiment):
        if cell.arm == "half":
            fake_answers(store, cell)
    rows = only(experiment, store)["contrasts"]
    p = sorted(row["estimate"]["p"] for row in rows)
    assert sorted(row["adjusted_p"] for row in rows) == pytest.approx([min(1, 2 * p[0]), max(p[1], min(1, 2 * p[0]))])


def test_a_diverged_run_leaves_no_verdict_on_quality(tmp_path: Path) -> None:
    experiment, store = fake(
        tmp_path, TWO, change=lambda cell: {"state": "diverged"} if (cell.arm, cell.seed) == ("xsa", 1) else {}
    )
    for cell in expand(experiment):
        if store.run(cell).state == "finished":
            fake_answers(store, cell)
    (row,) = only(experiment, store)["contrasts"]
    assert row["verdict"]["word"] == "diverged"
    assert "on condition that both runs finish: 1 of 6 runs diverged" in row["sentence"]


def test_what_rules_touched_is_told_by_task(tmp_path: Path) -> None:
    experiment, store, _ = answered(tmp_path, counts={"cut": 2, "an end nobody foresaw": 1})
    fake_answers(store, Cell("base", "xsa", 3), gain=0.1, counts={"cut": 2, "tied": 4})
    counts = {count["rule"]: count["tasks"] for count in only(experiment, store)["counts"]}
    assert list(counts) == ["cut", "tied", "an end nobody foresaw"]
    assert counts["cut"] == {task: [2, 2] for task in TASKS}
    assert counts["tied"] == {task: [0, 4] for task in TASKS}


# Other contrasts, other benchmarks


def test_an_interaction_is_the_same_weighted_sum(tmp_path: Path) -> None:
    experiment, store, given = answered(tmp_path, HEAD + CROSSED, gain=0.1)
    found = only(experiment, store)
    row = next(row for row in found["combinations"] if row["kind"] == "interaction")
    adamw, muon = (figures(given, f"xsa-{o}") - figures(given, f"standard-{o}") for o in ("adamw", "muon"))
    assert row["differences"] == pytest.approx((adamw - muon).tolist(), abs=1e-12)
    assert row["sentence"].startswith("xsa − standard under adamw against the same under muon: a CORE (3 of 22 tasks)")
    assert "tasks" not in row


def test_what_is_outside_the_declared_family_has_no_verdict(tmp_path: Path) -> None:
    family = '[primary]\nfamily = ["(xsa - standard) x (adamw - muon)"]\n'
    experiment, store, _ = answered(tmp_path, HEAD + family + CROSSED)
    found = only(experiment, store)
    rows = [*found["contrasts"], *found["combinations"]]
    assert [row["kind"] for row in rows if "verdict" in row and row["kind"] != "null"] == ["interaction"]
    assert all(row["exploratory"] for row in rows if row["kind"] in ("effect", "main"))
    assert not any("verdict" in row for row in rows if row["exploratory"])


def test_benchmarks_are_told_in_order_and_any_more_is_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the base model, after fine-tuning, and one of the user's own under a name in the list."""
    monkeypatch.setattr(module, "BENCHMARKS", {**module.BENCHMARKS, "own": "house tasks"})
    experiment, store = fake(tmp_path, ONE_SEED)
    for cell in expand(experiment):
        for folder in ("own", "sft/chatcore", "core", "sft/core"):
            fake_answers(store, cell, folder)
    names = [found["name"] for found in benchmarks(experiment, store)]
    assert names == ["CORE (3 of 22 tasks)", "CORE after fine-tuning (3 of 22 tasks)",
                     "ChatCORE after fine-tuning (3 of 5 tasks)", "house tasks"]  # fmt: skip


def test_a_whole_benchmark_has_its_plain_name(tmp_path: Path) -> None:
    tasks = {f"task {i}": (0.0, 0.0, 0.5, 12) for i in range(5)}
    experiment, store, _ = answered(tmp_path, ONE_SEED, where="chatcore", tasks=tasks)
    found = only(experiment, store)
    assert (found["name"], found["partial"]) == ("ChatCORE", False)


def test_the_held_out_loss_of_fine_tuning_is_one_more_metric(tmp_path: Path) -> None:
    """Lower is better, conversations are its items; its margin is a share."""
    experiment, store = fake(tmp_path, TWO)
    for cell in expand(experiment):
        fake_tuned(store, cell, shift=-0.02 * (cell.arm == "xsa"))
    found = only(experiment, store)
    (row,) = found["contrasts"]
    values = {}
    for arm in ("standard", "xsa"):
        runs = [store.run(Cell("base", arm, seed)).path / "sft" for seed in experiment.seeds]
        scores = [type(store.run(Cell("base", arm, 0)))(run).scores() for run in runs]
        values[arm] = np.array([sum(v for v, _ in s.values()) / np.log(2) / sum(w for _, w in s.values())
                                for s in scores])  # fmt: skip
    assert row["differences"] == pytest.approx((values["xsa"] - values["standard"]).tolist(), abs=1e-12)
    assert (found["name"], found["item_count"], found["tasks"]) == ("chat bpb", 30, [])
    assert row["verdict"]["word"] == "better"
    assert row["sentence"].startswith("xsa against standard: Δ chat bpb −0.0")
    assert row["estimate"]["method"] == "two-way t, seeds × conversations"


def test_partners_must_be_fine_tuned_alike(tmp_path: Path) -> None:
    """In other steps the one learns more: no pair, and both are named with what differs."""
    experiment, store = fake(tmp_path, ONE_SEED)
    for cell in expand(experiment):
        fake_tuned(store, cell, sft={"steps": 9} if cell.arm == "xsa" else None)
    with pytest.raises(ValueError, match=r"base\.standard\.s0 and base\.xsa\.s0 were not .* alike: sft\.steps: 5"):
        benchmarks(experiment, store)


@pytest.mark.parametrize("what", ["corpus", "evaluation", "steps"])
@pytest.mark.parametrize("arms", [("standard", "xsa"), ("xsa",)])
def test_seeds_must_be_fine_tuned_alike(tmp_path: Path, what: str, arms: tuple[str, ...]) -> None:
    """Both arms of a seed on other conversations agree within the seed, and must not be pooled with the other seeds;
    nor may one arm's, where the arms have no seed in common. Batches that differ by the seed are no fault."""
    experiment, store = fake(tmp_path, TWO)
    for cell in expand(experiment):
        if len(arms) == 2 or (cell.arm == "xsa") == (cell.seed > 2):
            fake_tuned(store, cell)
            tuned = RunFolder(store.run(cell).path / "sft")
            tuned.write("fingerprint", {**tuned.fingerprint(), "rows": f"of seed {cell.seed}"})
    benchmarks(experiment, store)
    for arm in arms:
        tuned = RunFolder(store.run(Cell("base", arm, 3)).path / "sft")
        content = tuned.fingerprint()
        if what == "steps":
            content["config"]["sft"]["steps"] = 9
        tuned.write("fingerprint", content if what == "steps" else {**content, what: "other"})
    message = (
        rf"base\.standard\.s\d and base\.{arms[0]}\.s3 were not .* alike: (sft\.)?{what}: .* Delete RUN/sft of the"
    )
    with pytest.raises(ValueError, match=message):
        benchmarks(experiment, store)


def test_a_fine_tuning_that_diverged_is_no_missing_answer(tmp_path: Path) -> None:
    experiment, store = fake(tmp_path, TWO)
    for cell in expand(experiment):
        fake_tuned(store, cell, state="diverged" if (cell.arm, cell.seed) == ("xsa", 2) else "finished")
    found = only(experiment, store)
    assert found["missing"] == []
    (row,) = found["contrasts"]
    assert row["verdict"]["word"] == "diverged"
    assert row["seeds"] == [0, 1, 3, 4, 5]
    for cell in expand(experiment):
        fake_answers(store, cell)
        if (cell.arm, cell.seed) != ("xsa", 2):
            fake_answers(store, cell, "sft/chatcore")
    words = {told["name"]: told["contrasts"][0]["verdict"]["word"] for told in benchmarks(experiment, store)}
    base, tuned, _ = words.values()
    assert (base != "diverged", tuned) == (True, "diverged")
