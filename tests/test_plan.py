"""The plan: counts by hand, where the time comes from, what the seeds can see, and that it leaves no trace."""

# pyright: reportOptionalSubscript=false
from __future__ import annotations

import io
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from xsalab import plan as plans
from xsalab.experiment.design import Cell, Experiment, contrasts
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.pairing import pairs
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import run_cell
from xsalab.experiment.stages import as_run, begin_looks
from xsalab.experiment.store import RunStore
from xsalab.plan import Amount, plan, print_plan, seeds_for, smallest_effect
from xsalab.stats import mean_difference, minimum_detectable, sd_interval, seeds_needed
from xsalab.stats.looks import look_levels


@pytest.fixture
def planned(write_experiment: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The plan of a tiny experiment, without measuring unless asked to."""

    def make(*, measure: bool = False, effect: str = "", sd: str = "", **changes: Any) -> dict[str, Any]:
        experiment = load_experiment(write_experiment(**changes), known_variants=False)
        content = plan(experiment, store_of(experiment, tmp_path), measure=measure, effect=effect, sd=sd)
        json.dumps(content, allow_nan=False)
        return content

    return make


def store_of(experiment: Experiment, tmp_path: Path) -> RunStore:
    return RunStore.of(experiment, tmp_path / "out")


def carried_out(experiment: Experiment, out: Path, cells: int = 1000) -> RunStore:
    """The first cells of an experiment, run."""
    store, _ = begin_experiment(experiment, out)
    for task in tasks(experiment, out)[:cells]:
        run_cell(task)
    return store


def printed(content: dict[str, Any], width: int = 80) -> str:
    file = io.StringIO()
    print_plan(content, Console(file=file, width=width))
    return file.getvalue()


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# ---- counts


def test_runs_tokens_and_operations_by_hand(planned: Any) -> None:
    """2 seeds of 4 arms, one twin: 9 runs. 1,000 tokens are 4 steps of 256. FLOP = 3 · (2 · matrices + attention)."""
    controls = {"null": True, "positive": {"optim.lr_scale": 0.5}, "twin": True, "timing": False}
    content = planned(train__tokens=1000, controls=controls)
    assert content["runs"] == content["pending"] == 9
    assert content["states"] == {"waiting": 9}
    assert [(row["arm"], row["runs"]) for row in content["rows"]] == [
        ("standard", 2), ("xsa", 2), ("null", 2), ("positive", 2), ("twin", 1)
    ]  # fmt: skip
    row = content["rows"][0]
    assert (row["steps"], row["tokens"], row["finished"]) == (4, 1024, 0)
    assert content["tokens"] == 9 * 1024
    # Two layers of width 32: q, k, v, o, an MLP of 4 times the width, one value gate (12 → 2); head of 320 rows.
    matrices = 2 * (4 * 32 * 32 + 8 * 32 * 32) + 12 * 2 + 320 * 32
    # Queries see 8 + 1 keys in the short window, 32 + 1 in the last layer's.
    attention = 4 * 32 * (9 + 33)
    assert row["flops_per_token"] == 3 * (2 * matrices + attention)
    assert row["flops"] == row["flops_per_token"] * 1024
    assert content["flops"] == pytest.approx(sum(r["flops"] * r["runs"] for r in content["rows"]))


def test_memory_stands_beside_every_arm(planned: Any) -> None:
    """As plan_memory counts it; the terminal tells the largest. A run of this size is far below 100 MB."""
    content = planned()
    for row in content["rows"]:
        memory = row["memory"]
        assert memory["weights"] < memory["weights"] + memory["gradients"] < memory["peak"] < 1e8
        assert memory["gradients"] == 4 * row["parameters"]
    assert content["devices"] == []
    assert "of a run at its peak" in printed(content)


def test_gpus_have_a_table_with_hours_cost_and_rows(write_experiment: Any, tmp_path: Path) -> None:
    """The hours of what is left, by operations; the price as stated; rows a pass that divide the batch."""
    experiment = load_experiment(write_experiment(train__device="cuda", train__dtype="bfloat16"))
    store = store_of(experiment, tmp_path)
    content = plan(experiment, store, measure=False, prices={"H200": 4.0}, gpus=2)
    rows = {row["device"]: row for row in content["devices"]}
    hours = content["flops_pending"] / (0.4 * 989e12) / 3600
    assert rows["H200"]["device_hours"] == pytest.approx(hours)
    assert rows["H200"]["cost"] == pytest.approx(4 * hours)
    assert rows["H200"]["wall_hours"] == pytest.approx(hours / 2, rel=0.01)
    assert rows["RTX 4090"]["rows"] == {"base": 8}
    text = printed(content)
    assert "H200" in text
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert any("H100=2.5" in note for note in content["notes"])


def test_climbmix_is_downloaded_and_prepared(planned: Any) -> None:
    """Three shards and the one held out, 100 MB each; two bytes a token, once where pieces are trained from."""
    disk = planned(data__source="climbmix:0-2")["disk"]
    assert disk["downloads"] == 4e8
    assert disk["corpora"] == round(4 * 250e6 / 4.5 * 4)
    assert planned(data__source="climbmix:0-2", data__window=2)["disk"]["corpora"] == round(4 * 250e6 / 4.5 * 2)
    assert planned()["disk"]["corpora"] == 0


def test_points_have_rows_of_their_own(planned: Any) -> None:
    content = planned(points=[{"name": "short"}, {"name": "long", "train.tokens": 2048}])
    assert [(row["point"], row["arm"], row["steps"]) for row in content["rows"]] == [
        ("short", "standard", 4), ("short", "xsa", 4), ("long", "standard", 8), ("long", "xsa", 8)
    ]  # fmt: skip
    assert content["tokens"] == 2 * 2 * (1024 + 2048)
    assert "short" in printed(content)


def test_a_model_too_large_for_memory_is_planned(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is never filled: 100 GB of weights take no memory here. The time is extrapolated from a small one."""
    monkeypatch.setattr(plans, "busy_share", lambda: None)
    model = {"depth": 6, "width": 16384, "heads": 128, "context": 32, "vocab_size": 32768}
    content = planned(measure=True, model=model, arms={"standard": {}})
    (row,) = content["rows"]
    assert content["disk"]["weights"] == 2 * 4 * row["parameters"]
    assert row["parameters"] > 20e9
    assert row["extended"]
    assert row["seconds"] > 0
    assert "~: no time of its own" in printed(content)


# ---- time


def test_time_is_from_finished_runs_then_timing_then_measured(
    write_experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(write_experiment(controls={"null": True, "twin": False, "timing": False}))
    store = store_of(experiment, tmp_path)
    monkeypatch.setattr(plans, "busy_share", lambda: 0.5)
    measured = plan(experiment, store)
    assert "random tokens" in measured["time"]["source"]
    assert "other work held 50 % of the machine while steps were timed" in measured["notes"]
    assert all(row["seconds"] > 0 and not row["extended"] for row in measured["rows"])
    standard, _, null = measured["rows"]
    assert null["seconds"] == standard["seconds"]  # the null control's step is the baseline's: it is timed once

    monkeypatch.setattr(plans, "_measured", lambda *_: pytest.fail("measured although the time is stored"))
    stored = {"busy": True, "points": {"base": {"seconds": {"standard": [2.0, 1.0, 9.0], "xsa": [3.0, 3.0]}}}}
    monkeypatch.setattr(plans, "measured_costs", lambda *_: stored)
    timed = plan(experiment, store)
    assert "timing.json" in timed["time"]["source"]
    assert "the step times were taken while other work held a part of the machine" in timed["notes"]
    standard, xsa, null = timed["rows"]
    assert (standard["seconds"], xsa["seconds"]) == (4 * 2.0, 4 * 3.0)  # steps x median
    rate = (4 * 2.0 + 4 * 3.0) / (standard["flops"] + xsa["flops"])
    assert null["extended"]
    assert null["seconds"] == pytest.approx(rate * null["flops"])

    carried_out(experiment, tmp_path / "out", cells=1)
    seconds = sum(store.run(Cell("base", "standard", 0)).status["seconds"].values())
    finished = plan(experiment, store)
    assert "finished runs" in finished["time"]["source"]
    assert finished["rows"][0]["seconds"] == pytest.approx(seconds)
    assert finished["rows"][0]["finished"] == 1
    assert finished["rows"][2]["seconds"] == pytest.approx(seconds)  # the null control's operations are the same
    assert finished["pending"] == 5
    left = sum(row["seconds"] * (row["runs"] - row["finished"]) for row in finished["rows"])
    assert finished["time"]["wall_seconds"] == pytest.approx(left / finished["time"]["jobs"])

    monkeypatch.setattr(plans, "machine", lambda: "another")
    assert "timing.json" in plan(experiment, store)["time"]["source"]


def test_no_measure_leaves_the_time_out_and_says_so(planned: Any) -> None:
    content = planned()
    assert content["time"]["wall_seconds"] is None
    text = printed(content)
    assert "not known: nothing stored tells it, and --no-measure was given" in " ".join(text.split())


def test_another_device_is_not_timed(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    content = planned(measure=True, train__device="cuda")
    assert content["time"]["wall_seconds"] is None
    assert "no CUDA device" in content["time"]["source"]


def test_what_no_time_is_left_for_is_extrapolated_by_operations(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this clock the small model's step takes 2 s, and no larger one fits in 1 s: seconds = FLOP / its FLOP a s."""
    monkeypatch.setattr(plans, "busy_share", lambda: None)
    monkeypatch.setattr(plans, "_step_seconds", lambda config: 2.0)
    monkeypatch.setattr(plans, "SECONDS", 1.0)
    content = planned(measure=True, train__batch_tokens=65536, train__tokens=2 * 65536, arms={"standard": {}})
    (row,) = content["rows"]
    # Two layers of width 128, one value gate (12 -> 2), head of 1024 rows; 4 rows of 256 tokens.
    matrices = 2 * 12 * 128 * 128 + 12 * 2 + 1024 * 128
    attention = 4 * 128 * sum(plans.SMALL.window_of(layer) + 1 for layer in range(2))
    assert row["extended"]
    assert row["seconds"] == pytest.approx(2.0 * row["flops"] / (3 * (2 * matrices + attention) * 1024))


# ---- a user's own trainer, and looks


def command_experiment(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(
        "import json, random, sys\n"
        "value = float(sys.argv[2]) + random.Random(repr(sys.argv)).random()\n"
        "print(json.dumps(value))\n",
        encoding="utf-8",
    )
    path = tmp_path / "own.toml"
    path.write_text(
        """
        engine = "command"
        seeds = [0, 1, 2]
        baseline = "plain"
        primary = { contrast = "other - plain", metric = "loss" }
        command.run = ["{python}", "train.py", "{seed}", "{options}"]
        command.metrics.pattern = '(?P<loss>[0-9.]+)'
        arms.plain.options = ["5"]
        arms.other.options = ["6"]
        arms.third.options = ["7"]
        controls.twin = false
        """,
        encoding="utf-8",
    )
    return path


def test_a_command_has_time_and_spread_of_its_finished_runs_alone(tmp_path: Path, xsalab: Any) -> None:
    """Nobody here knows its steps: no tokens, no operations, and no step is timed."""
    path = command_experiment(tmp_path)
    before = json.loads(xsalab("plan", path, "--out", tmp_path / "out", "--json").out)
    assert before["runs"] == before["pending"] == 9
    assert before["tokens"] is before["flops"] is before["flops_pending"] is before["disk"] is None
    assert before["time"]["wall_seconds"] is None
    assert any("tokens, parameters, operations and files are not known" in note for note in before["notes"])
    experiment = load_experiment(path)
    store, _ = begin_experiment(experiment, tmp_path / "out")
    for task in tasks(experiment, tmp_path / "out"):
        if task.cell.arm != "third":
            run_cell(task)
    content = plan(experiment, store, effect="10%")
    plain, other, third = content["rows"]
    assert third["extended"]
    assert third["seconds"] == pytest.approx((plain["seconds"] + other["seconds"]) / 2)
    assert content["time"]["wall_seconds"] == pytest.approx(3 * third["seconds"])
    (spread,) = content["power"]["spreads"]
    values = [[store.run(Cell("base", arm, seed)).status["value"] for seed in range(3)] for arm in ("plain", "other")]
    assert spread["sd"] == pytest.approx(statistics.stdev(b - a for a, b in zip(*values, strict=True)))
    assert spread["levels"][0]["seeds"][0] == seeds_needed(spread["sd"], 0.1 * statistics.fmean(values[0]))
    text = printed(content)
    assert "paired differences in loss" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_sequential_experiment_is_planned_at_the_level_of_its_looks(write_experiment: Any, tmp_path: Path) -> None:
    experiment = load_experiment(write_experiment(primary={"contrast": "xsa - standard"}))
    store = store_of(experiment, tmp_path)
    store.folder.mkdir(parents=True)
    begin_looks(experiment, store, 6)
    experiment = as_run(experiment, store)
    content = plan(experiment, store, sd="0.01", measure=False)
    level = look_levels(experiment.looks).two_sided
    assert level < 0.05
    (spread,) = content["power"]["spreads"]
    smallest = minimum_detectable(0.01, len(experiment.seeds), alpha=level)
    assert spread["levels"][0]["smallest"] == [pytest.approx(smallest)]
    assert any(note.startswith("sequential: at most 6 seeds") for note in content["notes"])


# ---- no trace


@pytest.mark.slow
def test_nothing_is_trained_and_nothing_in_out_is_changed(
    write_experiment: Any, tmp_path: Path, xsalab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "busy_share", lambda: None)
    path, out = write_experiment(), tmp_path / "out"
    threads = torch.get_num_threads()
    assert xsalab("plan", path, "--out", out, "--set", f"train.threads={threads + 1}").code == 0
    assert torch.get_num_threads() == threads
    assert not out.exists()
    carried_out(load_experiment(path), out, cells=2)
    before, draws = snapshot(out), torch.get_rng_state()
    ran = xsalab("plan", path, "--out", out, "--json")
    assert snapshot(out) == before
    assert torch.equal(torch.get_rng_state(), draws)
    content = json.loads(ran.out)
    assert content["states"] == {"finished": 2, "waiting": 2}
    # Two runs left: their weights are as large as those of the two that are there, but for the file's head.
    there = sum(file.stat().st_size for file in out.rglob("model.safetensors"))
    assert content["disk"]["weights"] == pytest.approx(there, rel=0.1)


def test_a_plugin_is_not_run_and_its_arm_is_reckoned_as_the_baseline(
    write_experiment: Any, tmp_path: Path, xsalab: Any
) -> None:
    """The plan of somebody else's experiment runs none of their code."""
    (tmp_path / "mine.py").write_text("raise SystemExit('run')", encoding="utf-8")
    path = write_experiment(plugins=["mine.py"], arms__mine={"variant": "mine-own"})
    ran = xsalab("plan", path, "--out", tmp_path / "out", "--no-measure", "--json")
    content = json.loads(ran.out)
    assert any(note.startswith("mine: mine-own") and "reckoned as the baseline" in note for note in content["notes"])
    rows = {row["arm"]: row for row in content["rows"]}
    assert rows["mine"]["flops"] == rows["standard"]["flops"]


# ---- what can be seen


def test_an_unknown_spread_is_said(planned: Any) -> None:
    content = planned(seeds=[0, 1, 2, 3], effect="1%")
    assert content["power"]["spreads"] == []
    assert "is not known: run 3 seeds, or state --sd" in " ".join(printed(content).split())


def test_a_stated_spread_gives_what_the_statistics_give(planned: Any) -> None:
    power = planned(seeds=list(range(6)), sd="0.0005", effect="0.0004")["power"]
    (row,) = power["spreads"]
    assert row["levels"] == [
        {
            "level": 0.05,
            "smallest": [pytest.approx(minimum_detectable(0.0005, 6))],
            "seeds": [seeds_needed(0.0005, 0.0004)],
        }
    ]
    assert power["family"] == 1


def test_shares_of_an_unknown_baseline_work_together(planned: Any) -> None:
    """0.05 % and 0.04 % of whatever it is: as 0.0005 and 0.0004. Without --effect it is the margin of 0.1 %."""
    content = planned(seeds=list(range(6)), sd="0.05%", effect="0.04%")
    assert content["power"]["spreads"][0]["levels"][0]["seeds"] == [seeds_needed(0.0005, 0.0004)]
    assert "0.05 %" in printed(content)
    content = planned(seeds=list(range(6)), sd="0.05%")
    assert content["power"]["spreads"][0]["levels"][0]["seeds"] == [seeds_needed(0.0005, 0.001)]
    for sd, effect in (("0.0005", "0.04%"), ("0.05%", "0.0004")):
        content = planned(seeds=list(range(6)), sd=sd, effect=effect)
        assert content["power"]["spreads"][0]["levels"][0]["seeds"] == []
        assert "-: not known before pairs tell the baseline's value" in " ".join(printed(content).split())


def test_a_family_is_adjusted_by_its_size(planned: Any) -> None:
    """Three arms against the baseline: 5 % / 3 each, Holm's first step."""
    arms = {"standard": {}, "xsa": {"variant": "xsa"}, "half": {"variant": "xsa", "alpha": 0.5}, "slow": {}}
    power = planned(seeds=list(range(6)), arms=arms, sd="0.0005", effect="0.001")["power"]
    _, shared = power["spreads"][0]["levels"]
    assert power["family"] == 3
    assert shared["smallest"] == [pytest.approx(minimum_detectable(0.0005, 6, alpha=0.05 / 3))]
    assert shared["seeds"] == [seeds_needed(0.0005, 0.001, alpha=0.05 / 3)]


def test_finished_pairs_tell_the_spread_with_its_uncertainty(write_experiment: Any, tmp_path: Path) -> None:
    experiment = load_experiment(
        write_experiment(
            seeds=[0, 1, 2], train__tokens=256, controls={"null": True, "twin": False, "timing": False},
            primary={"contrast": "xsa - standard"},
        )
    )  # fmt: skip
    store = carried_out(experiment, tmp_path / "out")
    content = plan(experiment, store, effect="0.3%", sd="0.1%")
    effect, null, stated = content["power"]["spreads"]
    estimate = mean_difference(pairs(experiment, store, contrasts(experiment)[0]).table)  # pyright: ignore
    assert (effect["of"], effect["n"]) == ("xsa - standard", 3)
    assert effect["sd"] == pytest.approx(estimate.sd)

    def smallest(sd: float) -> float:
        return minimum_detectable(math.sqrt(sd**2 + 3 * estimate.document_error**2), 3)

    sds = (effect["sd"], *sd_interval(effect["sd"], 3))
    assert effect["levels"][0]["smallest"] == pytest.approx([smallest(sd) for sd in sds])
    wanted = 0.003 * estimate.baseline_mean
    assert effect["levels"][0]["seeds"][0] == seeds_for(effect["sd"], estimate.document_error, wanted)
    assert null["of"] == "null - standard"
    assert (stated["sd"], stated["relative"]) == (0.001, True)
    assert stated["levels"][0]["seeds"] == [seeds_needed(0.001, 0.003)]
    assert content["pending"] == 0
    assert content["time"]["wall_seconds"] == 0


def test_text_sets_a_floor_that_no_seed_lowers() -> None:
    """sd 0 and a document error of 1: as many seeds as you like find no less than z(0.975) + z(0.8)."""
    assert smallest_effect(0.0, 1.0, 1000) == pytest.approx(1.959964 + 0.841621, rel=0.01)
    assert seeds_for(0.1, 1.0, 2.0) is None
    assert seeds_for(0.1, 0.0, 0.2) == seeds_needed(0.1, 0.2)


def test_two_seeds_decide_nothing(planned: Any) -> None:
    content = planned(sd="0.01", effect="0.01")
    assert content["power"]["spreads"][0]["levels"][0]["smallest"] == []
    assert "nothing: fewer than 3 seeds" in printed(content)


@pytest.mark.parametrize("text", ["0", "-0.1", "nan", "inf", "little", "", "%", "0.3%%"])
def test_an_amount_is_a_positive_number(text: str) -> None:
    with pytest.raises(ValueError, match="--effect"):
        Amount.read(text, "--effect")


def test_amounts_with_and_without_percent() -> None:
    assert Amount.read("0.003", "--sd") == Amount(0.003, relative=False)
    share = Amount.read(" 0.3 % ", "--sd")
    assert (share.value, share.relative) == (pytest.approx(0.003), True)


def test_bad_options_are_one_message(write_experiment: Any, tmp_path: Path, xsalab: Any) -> None:
    for option, value in (("--effect", "nought"), ("--sd", "-1")):
        xsalab("plan", write_experiment(), "--out", tmp_path, "--no-measure", option, value).refused(option, "0.3%")


# ---- printing


def test_the_terminal_has_80_columns_of_ascii(planned: Any) -> None:
    arms = {f"a-rather-long-name-of-an-arm-{n}": {} for n in range(3)}
    points = [{"name": "the-first-point"}, {"name": "the-second-point"}]
    content = planned(seeds=list(range(4)), arms=arms, points=points, sd="0.01", effect="0.0123")
    text = printed(content)
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert re.search(r"stated +5 % +0.01 +0.0\d+ +\d+", text)
