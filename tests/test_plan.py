"""The plan: counts by hand, where the time comes from, what the seeds can see, and that it leaves no trace."""

# pyright: reportOptionalSubscript=false
from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from xsalab import plan as plans
from xsalab.experiment.building import build_state
from xsalab.experiment.design import Cell, Experiment, contrasts, resolve
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.pairing import pairs
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import run_cell
from xsalab.experiment.store import RunStore
from xsalab.plan import Amount, makespan, plan, print_plan, seeds_for, sizes_of, smallest_effect
from xsalab.stats import mean_difference, minimum_detectable, sd_interval, seeds_needed
from xsalab.train.checkpoint import model_tensors


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
    assert row["scaling_parameters"] == matrices
    assert row["flops_per_token"] == 3 * (2 * matrices + attention)
    assert row["flops"] == row["flops_per_token"] * 1024
    assert content["flops"] == pytest.approx(sum(r["flops"] * r["runs"] for r in content["rows"]))


def test_points_have_rows_of_their_own(planned: Any) -> None:
    content = planned(points=[{"name": "short"}, {"name": "long", "train.tokens": 2048}])
    assert [(row["point"], row["arm"], row["steps"]) for row in content["rows"]] == [
        ("short", "standard", 4), ("short", "xsa", 4), ("long", "standard", 8), ("long", "xsa", 8)
    ]  # fmt: skip
    assert content["tokens"] == 2 * 2 * (1024 + 2048)
    assert "short" in printed(content)


@pytest.mark.parametrize("kind", ["hybrid", "muon", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_are_those_of_a_real_model_and_optimizer(write_experiment: Any, kind: str, dtype: str) -> None:
    path = write_experiment(optim__kind=kind, train__dtype=dtype, arms={"xsa": {"variant": "xsa"}})
    config = resolve(experiment := load_experiment(path), Cell("base", "xsa", experiment.seeds[0]))
    state = build_state(config)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.set_step(config.optim.schedule_over(4), 0)
    state.optimizer.step()
    sizes = sizes_of(config)

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert sizes.weights == size(model_tensors(state).values())
    assert sizes.gradients == size(parameter.grad for parameter in state.model.parameters())
    assert sizes.optimizer == size(state.optimizer.named_state().values())


def test_a_model_too_large_for_memory_is_planned(planned: Any) -> None:
    """The model is never filled: 100 GB of weights take no memory here."""
    content = planned(model={"depth": 24, "width": 8192, "heads": 64, "context": 32, "vocab_size": 32768})
    assert content["memory"]["weights"] > 60e9
    assert content["memory"]["run"] > 3 * content["memory"]["weights"]
    assert content["memory"]["activations"] is None


# ---- time


def test_makespan_by_hand() -> None:
    """Two workers, runs of 3, 2, 2 and 1 s: one has 3 + 1, the other 2 + 2."""
    assert makespan([3, 2, 2, 1], 2) == 4
    assert makespan([3, 2, 2, 1], 1) == 8
    assert makespan([], 3) == 0


def test_time_is_from_finished_runs_then_timing_then_measured(
    write_experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(write_experiment(controls={"null": True, "twin": False, "timing": False}))
    store = store_of(experiment, tmp_path)
    monkeypatch.setattr(plans, "busy_share", lambda: 0.5)
    measured = plan(experiment, store)
    assert "random tokens" in measured["time"]["source"]
    assert "other work held 50 % of the machine while this was measured" in measured["notes"]
    assert all(row["seconds"] > 0 for row in measured["rows"])
    assert measured["memory"]["activations"] > 0

    monkeypatch.setattr(plans, "_measured", lambda *_: pytest.fail("measured although the time is stored"))
    monkeypatch.setattr(
        plans,
        "measured_costs",
        lambda *_: {
            "costs": [{"point": "base", "arm": "xsa", "saved_bytes": 5000}],
            "points": {
                "base": {"baseline_saved_bytes": 4000, "seconds": {"standard": [2.0, 1.0, 9.0], "xsa": [3.0, 3.0]}}
            },
        },
    )
    timed = plan(experiment, store)
    assert "timing.json" in timed["time"]["source"]
    assert [row["seconds"] for row in timed["rows"]][:2] == [4 * 2.0, 4 * 3.0]  # steps × median
    assert timed["memory"]["activations"] == 5000
    assert any("by operations, from other arms: null" in note for note in timed["notes"])

    carried_out(experiment, tmp_path / "out", cells=1)
    spent = store.run(Cell("base", "standard", 0)).status["seconds"]
    finished = plan(experiment, store)
    assert "finished runs" in finished["time"]["source"]
    seconds = sum(spent.values())
    assert finished["rows"][0]["seconds"] == pytest.approx(seconds)
    assert finished["rows"][0]["finished"] == 1
    assert finished["rows"][2]["seconds"] == pytest.approx(seconds)  # the null control's operations are the same
    assert finished["pending"] == 5
    pending = [row["seconds"] * (row["runs"] - row["finished"]) for row in finished["rows"]]
    assert finished["time"]["run_seconds"] == pytest.approx(sum(pending))
    assert finished["time"]["wall_seconds"] <= finished["time"]["run_seconds"]

    monkeypatch.setattr(plans, "machine", lambda: "another")
    elsewhere = plan(experiment, store)
    assert "timing.json" in elsewhere["time"]["source"]


def test_no_measure_leaves_the_time_out_and_says_so(planned: Any) -> None:
    content = planned()
    assert content["time"]["wall_seconds"] is None
    assert any("--no-measure" in note for note in content["notes"])
    assert "time    not known" in printed(content)


def test_another_device_is_not_timed(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    content = planned(measure=True, train__device="cuda")
    assert content["time"]["jobs"] is None
    assert content["time"]["wall_seconds"] is None
    assert any("no CUDA device" in note for note in content["notes"])


def test_a_step_that_takes_too_long_is_extended_from_a_part_of_it(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the whole step does not fit, fewer rows, then fewer layers are timed, and the plan says so."""
    monkeypatch.setattr(plans, "busy_share", lambda: None)
    monkeypatch.setattr(plans, "_matrix_speed", lambda device: 8e8)
    monkeypatch.setattr(plans, "_forward_backward", lambda state, batch: 1000.0)  # so slow that no more is tried
    changes = {"train__batch_tokens": 65536, "train__tokens": 2 * 65536, "arms": {"standard": {}}}
    content = planned(measure=True, **changes)
    assert any("an extrapolation, by operations, from 32 of the 2048 rows of a batch" in n for n in content["notes"])
    assert content["rows"][0]["seconds"] == pytest.approx(2 * 1000.0 * 2048 / 32)
    monkeypatch.setattr(plans, "LARGEST", 10)
    content = planned(measure=True, **changes)
    assert content["time"]["wall_seconds"] is None
    assert any(note.startswith("no time: not even a small part") for note in content["notes"])
    monkeypatch.setattr(plans, "LARGEST", 60_000)  # room for two layers, not for six
    content = planned(measure=True, model__depth=6, **changes)
    assert any("through 2 of 6 layers" in note for note in content["notes"])
    assert content["memory"]["activations"] is None


# ---- no trace


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
    assert content["disk"]["packed_rows"] == sum(
        file.stat().st_size for file in (out / "corpora").glob("*/rows-32.bin")
    )


def test_a_plugin_is_not_run_and_its_arm_is_reckoned_as_the_baseline(
    write_experiment: Any, tmp_path: Path, xsalab: Any
) -> None:
    """The plan of somebody else's experiment runs none of their code."""
    (tmp_path / "mine.py").write_text("raise SystemExit('run')", encoding="utf-8")
    path = write_experiment(plugins=["mine.py"], arms__mine={"variant": "mine-own"})
    ran = xsalab("plan", path, "--out", tmp_path / "out", "--no-measure", "--json")
    content = json.loads(ran.out)
    assert any("reckoned as the baseline: mine (mine-own)" in note for note in content["notes"])
    rows = {row["arm"]: row for row in content["rows"]}
    assert rows["mine"]["flops"] == rows["standard"]["flops"]


# ---- what can be seen


def test_an_unknown_spread_is_said_with_the_one_that_would_do(planned: Any) -> None:
    content = planned(seeds=[0, 1, 2, 3], effect="1%")
    power = content["power"]
    assert power["spreads"] == []
    assert minimum_detectable(power["sd_for_margin"], 4) == pytest.approx(0.001)
    assert minimum_detectable(power["sd_for_effect"], 4) == pytest.approx(0.01)
    text = " ".join(printed(content).split())
    assert "is not known: run 3 seeds, or state --sd" in text
    assert "4 seeds see the margin of 0.1 % where that sd is at most" in text


def test_a_stated_spread_gives_what_the_statistics_give(planned: Any) -> None:
    power = planned(seeds=list(range(6)), sd="0.0005", effect="0.0004")["power"]
    (row,) = power["spreads"]
    assert row["alone"]["smallest"] == [pytest.approx(minimum_detectable(0.0005, 6))]
    assert row["alone"]["seeds"] == [seeds_needed(0.0005, 0.0004)]
    assert power["family"] == 1


def test_shares_of_an_unknown_baseline_work_together(planned: Any) -> None:
    """0.05 % and 0.04 % of whatever it is: as 0.0005 and 0.0004."""
    content = planned(seeds=list(range(6)), sd="0.05%", effect="0.04%")
    assert content["power"]["spreads"][0]["alone"]["seeds"] == [seeds_needed(0.0005, 0.0004)]
    assert "0.05 %" in printed(content)
    for sd, effect in (("0.0005", "0.04%"), ("0.05%", "0.0004")):
        with pytest.raises(ValueError, match="write both with % or both without"):
            planned(seeds=list(range(6)), sd=sd, effect=effect)


def test_a_family_is_adjusted_by_its_size(planned: Any) -> None:
    """Three arms against the baseline: 5 % / 3 each, Holm's first step."""
    arms = {"standard": {}, "xsa": {"variant": "xsa"}, "half": {"variant": "xsa", "alpha": 0.5}, "slow": {}}
    power = planned(seeds=list(range(6)), arms=arms, sd="0.0005", effect="0.001")["power"]
    (row,) = power["spreads"]
    assert power["family"] == 3
    assert row["family"]["smallest"] == [pytest.approx(minimum_detectable(0.0005, 6, alpha=0.05 / 3))]
    assert row["family"]["seeds"] == [seeds_needed(0.0005, 0.001, alpha=0.05 / 3)]
    assert row["family"]["smallest"] > row["alone"]["smallest"]


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
    assert effect["sds"][1:] == pytest.approx(sd_interval(effect["sd"], 3))
    assert effect["effect"] == pytest.approx(0.003 * estimate.baseline_mean)
    both = math.sqrt(effect["sd"] ** 2 + 3 * estimate.document_error**2)
    assert effect["alone"]["smallest"][0] == pytest.approx(minimum_detectable(both, 3))
    assert null["of"] == "null control"
    assert stated["sd"] == pytest.approx(0.001 * estimate.baseline_mean)
    assert content["pending"] == 0
    assert content["time"]["wall_seconds"] == 0


def test_text_sets_a_floor_that_no_seed_lowers() -> None:
    """sd 0 and a document error of 1: as many seeds as you like find no less than z(0.975) + z(0.8)."""
    assert smallest_effect(0.0, 1.0, 1000) == pytest.approx(1.959964 + 0.841621, rel=0.01)
    assert seeds_for(0.1, 1.0, 2.0) is None
    assert seeds_for(0.1, 0.0, 0.2) == seeds_needed(0.1, 0.2)


def test_two_seeds_decide_nothing(planned: Any) -> None:
    content = planned(sd="0.01", effect="0.01")
    assert content["power"]["spreads"][0]["alone"]["smallest"] == []
    assert "2 seeds decide nothing: plan at least 3" in printed(content)


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
    assert re.search(r"stated +0.01 +0.0\d+ +0.0\d+ +\d+ +\d+", text)
