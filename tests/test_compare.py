"""What two sets of runs say of each other, and above all what they do not."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import signal, stats

from xsalab.compare import compare, lines, read_side
from xsalab.stats import PairTable, mean_difference

A = (2.51, 2.48, 2.50, 2.47, 2.52)
B = (2.56, 2.55, 2.53, 2.57, 2.58)


@pytest.fixture
def logs(tmp_path: Path) -> Callable[..., str]:
    """A folder with one CSV for each final value: val_bpb falls to it at step ``last``."""

    def write(name: str, finals: Sequence[float], last: int = 40, seeds: bool = True, head: str = "") -> str:
        folder = tmp_path / name
        folder.mkdir()
        for i, final in enumerate(finals):
            rows = [f"{s},{final + (last - s) / 100!r}" for s in range(0, last + 1, 10)]
            stem = f"seed{i}" if seeds else f"run-{chr(97 + i)}"
            (folder / f"{stem}.csv").write_text(f"step,val_bpb{head}\n" + "\n".join(rows) + "\n")
        return str(folder)

    return write


def console(folder: Path, name: str, final: float, stop: int | None = None, batch: str = "4,096") -> str:
    """A log in the form of nanochat's console, of 20 steps."""
    steps = 20
    text = f"Vocab size: 2,048\nTotal batch size {batch} => gradient accumulation steps: 1\n"
    raw = np.linspace(7.0, final * 2, steps)
    losses = signal.lfilter([0.1], [1, -0.9], raw) / (1 - 0.9 ** np.arange(1.0, steps + 1))  # bias-corrected
    for s in range(steps if stop is None else stop):
        if s % 5 == 0:
            text += f"Step {s:05d} | Validation bpb: {final + (steps - s) / 50:.6f}\n"
        text += f"step {s:05d}/{steps:05d} ({100 * s / steps:.2f}%) | loss: {losses[s]:.6f} | lrm: 1.00\n"
    if stop is None:
        text += f"Step {steps:05d} | Validation bpb: {final:.6f}\n"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


CONFIG: dict[str, Any] = {
    "seed": 0,
    "data": {"source": "x"},
    "model": {"depth": 2, "vocab_size": 300, "context": 32},
    "optim": {"lr_scale": 1.0},
    "train": {"tokens": 1024, "batch_tokens": 256, "permute_rows": False, "threads": 1, "dtype": "float32"},
    "eval": {"stride": 0},
    "variant": {"name": "standard", "layers": "all", "options": {}},
}
WEIGHTS = {f"d{i}": 100.0 + 30 * i for i in range(12)}


def run_folder(experiment: Path, arm: str, seed: int, shift: float = 0.0, steps: int = 4, **changes: Any) -> Path:
    """A finished run as xsalab leaves it. changes: fields of the fingerprint by dotted name, __ for the dots."""
    folder = experiment / "runs" / f"base.{arm}.s{seed}"
    folder.mkdir(parents=True)
    config = copy.deepcopy(CONFIG)
    config["seed"], config["variant"]["name"] = seed, arm
    fingerprint: dict[str, Any] = {
        "config": config, "start": {"w": f"start{seed}"}, "rows": f"rows{seed}", "corpus": "c", "evaluation": "e",
        "environment": {"torch": "2.9", "device": "cpu0", "threads": 1}, "code": "code", "machine": "m0", "plugins": {},
    }  # fmt: skip
    state = changes.pop("state", "finished")
    for name, value in changes.items():
        table = fingerprint
        *path, last = name.split("__")
        for part in path:
            table = table[part]
        table[last] = value
    draw = np.random.default_rng(seed)
    own, text = 0.004 * draw.standard_normal(), np.random.default_rng(99).normal(0, 0.05, len(WEIGHTS))
    private = np.random.default_rng([seed, len(arm)]).normal(0, 0.002, len(WEIGHTS))
    bpb = {item: 2.5 + own + shift + text[i] + private[i] for i, item in enumerate(WEIGHTS)}
    rows = [{"task": "bpb", "item": item, "value": bpb[item] * math.log(2) * w, "weight": w}
            for item, w in WEIGHTS.items()]  # fmt: skip
    total = sum(row["value"] for row in rows) / math.log(2) / sum(WEIGHTS.values())
    pq.write_table(pa.Table.from_pylist(rows), folder / "scores.parquet")
    metrics = [{"step": s, "loss": 6.0 - s / 10} for s in range(steps)] + [{"step": steps, "val_bpb": total}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for name, content in (
        ("config", {"config": config}),
        ("fingerprint", fingerprint),
        ("status", {"state": state, "steps": steps, "step": steps, "val_bpb": total}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    """Five seeds of standard and xsa, the latter 0.02 bpb lower."""
    for seed in range(5):
        run_folder(tmp_path / "lab", "standard", seed)
        run_folder(tmp_path / "lab", "xsa", seed, shift=-0.02)
    return tmp_path / "lab"


def has(content: Any, *words: str) -> bool:
    return any(all(word in text for word in words) for text in content["cannot_vouch"])


def only(content: Any) -> Any:
    (row,) = content["comparisons"]
    return row


# ---------------------------------------------------------------------------------------------- logs


def test_logs_with_seeds_are_paired_over_seeds(logs: Any) -> None:
    content = compare(logs("a", A), logs("b", B))
    row = only(content)
    expected = stats.ttest_rel(A, B).confidence_interval(0.95)
    assert row["paired"]
    assert row["seeds"] == [0, 1, 2, 3, 4]
    assert row["estimate"]["low"] == pytest.approx(expected.low)
    assert row["estimate"]["high"] == pytest.approx(expected.high)
    assert row["differences"] == pytest.approx([a - b for a, b in zip(A, B, strict=True)])
    assert row["sentence"] == "a against b: Δ val_bpb −0.062 ± 0.032 over 5 seeds, better"
    assert has(content, "seeds are those of the files' names")
    assert has(content, "no scores of single documents")
    assert has(content, "not stated by both sides", "machine", "shared first weights", "the order of the data")
    assert has(content, "how many steps were planned")


def test_logs_without_seeds_are_not_paired(logs: Any) -> None:
    content = compare(logs("a", A, seeds=False), logs("b", B, seeds=False))
    row = only(content)
    assert not row["paired"]
    interval = stats.ttest_ind(A, B, equal_var=False).confidence_interval(0.95)
    assert row["estimate"]["low"] == pytest.approx(interval.low)
    assert has(content, "not paired: a does not state its seeds")
    assert row["verdict"]["word"] == "better"


def test_a_higher_value_may_be_the_better_one(logs: Any) -> None:
    a, b = logs("a", A), logs("b", B)
    assert only(compare(a, b, lower_is_better=False))["verdict"]["word"] == "worse"
    assert only(compare(b, a, lower_is_better=False))["verdict"]["word"] == "better"


def test_one_run_a_side_decides_nothing(logs: Any) -> None:
    """F164: a difference, no interval over seeds, no p."""
    content = compare(logs("a", A[:1]), logs("b", B[:1]))
    row = only(content)
    assert row["verdict"]["word"] == "not decidable"
    assert row["estimate"]["mean"] == pytest.approx(A[0] - B[0])
    assert (row["estimate"]["low"], row["estimate"]["p"]) == (None, None)
    assert has(content, "one run of a")
    assert has(content, "one run of b")
    many = only(compare(logs("c", A[:1], seeds=False), logs("d", B, seeds=False)))
    assert (many["verdict"]["word"], many["estimate"]["low"]) == ("not decidable", None)


def test_unequal_lengths_are_compared_at_both_ends_and_at_the_last_common_step(logs: Any) -> None:
    content = compare(logs("a", A, last=60), logs("b", B, last=40))
    end, common = content["comparisons"]
    assert end["at"] == "the end of each run"
    assert end["treatment_values"] == pytest.approx(A)
    assert has(content, "runs of unequal length", "seed0.csv at step 60", "seed0.csv at step 40")
    assert common["step"] == 40
    assert common["treatment_values"] == pytest.approx([value + 0.2 for value in A])
    assert common["baseline_values"] == pytest.approx(B)
    assert (end["verdict"]["word"], common["verdict"]["word"]) == ("better", "worse")
    text = "\n".join(lines(content))
    assert "the end of each run: a against b" in text
    assert "step 40, the last common one: a against b" in text


def test_no_common_step_leaves_the_ends_alone(tmp_path: Path) -> None:
    for name, steps in (("a", (10, 20, 30)), ("b", (15, 25, 45))):
        (tmp_path / f"{name}.csv").write_text("step,val_bpb\n" + "".join(f"{s},2.5\n" for s in steps))
    content = compare(str(tmp_path / "a.csv"), str(tmp_path / "b.csv"))
    assert only(content)["step"] is None
    assert has(content, "runs of unequal length")


def test_a_console_that_stops_early_is_called_unfair(tmp_path: Path) -> None:
    a = console(tmp_path, "a.log", 2.5, stop=12)
    content = compare(a, console(tmp_path, "b.log", 2.4))
    assert has(content, "a.log: the last value is at step 10 of 20", "unfair")
    assert not has(content, "b.log: the last value")
    assert len(content["comparisons"]) == 2


def test_smoothed_losses_are_compared_unsmoothed(tmp_path: Path) -> None:
    content = compare(console(tmp_path, "a.log", 2.5), console(tmp_path, "b.log", 2.4), metric="loss")
    row = only(content)
    assert row["treatment_values"] == pytest.approx([5.0], abs=1e-4)
    assert row["baseline_values"] == pytest.approx([4.8], abs=1e-4)
    assert has(content, "a.log: train/loss was exponential average, β = 0.9", "un-smoothed")
    assert has(content, "a training loss is of one batch")


def test_a_loss_of_unknown_smoothing_is_said_to_be_one(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("step,loss\n" + "".join(f"{s},{5 - s / 10}\n" for s in range(9)))
    content = compare(str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), metric="loss")
    assert has(content, "loss: smoothing and step convention unknown")


def test_other_batches_and_vocabularies_are_listed_and_undo_a_pairing(tmp_path: Path) -> None:
    for name, batch in (("a", "4,096"), ("b", "8,192")):
        for seed in range(3):
            console(tmp_path / name, f"seed{seed}.log", 2.5 + seed / 100, batch=batch)
    content = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not only(content)["paired"]
    assert has(content, "not paired: the runs of seed 0 differ in batch_tokens: 4096 against 8192")
    assert has(content, "batch_tokens: 4096 against 8192")


def test_losses_per_token_of_two_vocabularies_are_no_measure(tmp_path: Path) -> None:
    a, b = console(tmp_path, "a.log", 2.5), console(tmp_path, "b.log", 2.4)
    Path(b).write_text(Path(b).read_text().replace("2,048", "4,096"))
    row = only(compare(a, b, metric="loss"))
    assert row["verdict"]["word"] == "not decidable"
    assert "vocabularies of 2048 and 4096" in row["verdict"]["reason"]


def test_a_run_that_ends_in_nan_diverged_and_is_in_no_mean(logs: Any) -> None:
    a, b = logs("a", A), logs("b", B)
    path = Path(a) / "seed2.csv"
    path.write_text(path.read_text() + "50,nan\n")
    content = compare(a, b)
    row = only(content)
    assert row["verdict"]["word"] == "diverged"
    assert row["verdict"]["diverged"] == (1, 5)
    assert row["seeds"] == [0, 1, 3, 4]
    assert "on condition that both runs finish" in row["sentence"]
    assert has(content, "seed2.csv diverged")
    swapped = compare(b, a)
    assert only(swapped)["verdict"]["word"] != "diverged"
    assert has(swapped, "seed2.csv diverged")


def test_a_nan_in_between_is_noted_and_no_divergence(logs: Any) -> None:
    a, b = logs("a", A), logs("b", B)
    path = Path(a) / "seed2.csv"
    path.write_text(path.read_text().replace("\n20,", "\n20,nan\n21,"))
    content = compare(a, b)
    assert only(content)["verdict"]["word"] == "better"
    assert has(content, "seed2.csv: val_bpb: 1 value not finite")


def test_a_baseline_that_all_diverged_leaves_nothing_to_compare_with(logs: Any) -> None:
    a, b = logs("a", A), logs("b", B)
    for path in Path(b).iterdir():
        path.write_text("step,val_bpb\n0,nan\n")
    row = only(compare(a, b))
    assert (row["verdict"]["word"], row["estimate"]) == ("not decidable", None)
    assert "every run of b diverged" in row["sentence"]
    assert only(compare(b, a))["verdict"]["word"] == "diverged"


def test_repeated_and_missing_steps_are_passed_on(logs: Any) -> None:
    """F132"""
    a, b = logs("a", A), logs("b", B)
    path = Path(a) / "seed0.csv"
    body = path.read_text()
    path.write_text(body + body.split("\n", 3)[3])
    missing = Path(a) / "seed1.csv"
    missing.write_text("\n".join(line for line in missing.read_text().split("\n") if not line.startswith("20,")))
    content = compare(a, b)
    assert has(content, "seed0.csv: goes back 1 time")
    assert has(content, "seed1.csv: val_bpb: 1 value of every 10 steps missing")
    assert only(content)["treatment_values"] == pytest.approx(A)


def test_two_configurations_on_one_side_are_refused(tmp_path: Path) -> None:
    """F167, of logs: what they say of themselves differs."""
    for seed, batch in enumerate(("4,096", "4,096", "8,192")):
        console(tmp_path / "a", f"seed{seed}.log", 2.5, batch=batch)
    with pytest.raises(ValueError, match=r"two configurations on one side: .*batch_tokens: 4096 against 8192"):
        read_side(str(tmp_path / "a"))


def test_one_seed_twice_is_refused(tmp_path: Path) -> None:
    for name in ("x_seed1.csv", "y_seed1.csv"):
        (tmp_path / name).write_text("step,val_bpb\n0,2.5\n")
    with pytest.raises(ValueError, match=r"one seed, several runs: x_seed1\.csv, y_seed1\.csv"):
        read_side(str(tmp_path))


def test_a_run_is_not_compared_with_itself(logs: Any) -> None:
    a = logs("a", A)
    with pytest.raises(ValueError, match="the same run on both sides"):
        compare(a, str(Path(a) / "seed0.csv"))


def test_runs_of_one_exported_table_are_chosen_by_name(tmp_path: Path) -> None:
    header = ",".join(f'"{name}-{i} - val/bpb"' for name in ("xsa", "std") for i in range(3))
    path = tmp_path / "wandb.csv"
    path.write_text(f'"Step",{header}\n0,3,3,3,3,3,3\n10,2.1,2.2,2.15,2.4,2.5,2.45\n')
    row = only(compare(f"{path}:xsa-*", f"{path}:std-*"))
    assert row["treatment_values"] == [2.1, 2.2, 2.15]
    assert row["verdict"]["word"] == "better"
    with pytest.raises(ValueError, match="no run called 'x'; it holds: xsa-0"):
        read_side(f"{path}:x")


# ---------------------------------------------------------------------------------------------- xsalab's runs


def test_runs_of_xsalab_are_compared_over_seeds_and_documents(arms: Path) -> None:
    content = compare(f"{arms}:xsa", f"{arms}:standard")
    row = only(content)
    assert row["estimate"]["method"].startswith("two-way t, seeds × documents")
    assert (row["estimate"]["n"], row["estimate"]["items"]) == (5, 12)
    assert row["estimate"]["mean"] == pytest.approx(-0.02, abs=0.004)
    assert row["verdict"]["word"] == "better"
    assert list(content["differs"]) == ["variant.name"]
    assert content["cannot_vouch"] == []
    ends = zip(row["treatment_values"], row["baseline_values"], strict=True)
    assert row["differences"] == pytest.approx([a - b for a, b in ends])


def test_folders_of_runs_do_as_well_as_an_experiments_arm(arms: Path, tmp_path: Path) -> None:
    for arm in ("xsa", "standard"):
        (tmp_path / arm).mkdir()
        for seed in range(5):
            (arms / "runs" / f"base.{arm}.s{seed}").rename(tmp_path / arm / f"{seed}")
    assert only(compare(str(tmp_path / "xsa"), str(tmp_path / "standard")))["estimate"]["items"] == 12


def test_one_run_of_xsalabs_shows_its_documents_and_decides_nothing(arms: Path) -> None:
    a, b = (str(arms / "runs" / f"base.{arm}.s0") for arm in ("xsa", "standard"))
    row = only(compare(a, b))
    assert row["verdict"]["word"] == "not decidable"
    assert "documents only" in row["sentence"]


def test_two_configurations_in_one_arm_are_refused(arms: Path) -> None:
    """F167: a run of other layers is not pooled."""
    path = arms / "runs" / "base.xsa.s3" / "fingerprint.json"
    path.write_text(path.read_text().replace('"layers": "all"', '"layers": "last:1"'))
    with pytest.raises(ValueError, match=r"two configurations.*variant\.layers: 'all' against 'last:1'"):
        compare(f"{arms}:xsa", f"{arms}:standard")
    with pytest.raises(ValueError, match="two configurations on one side"):
        read_side(str(arms / "runs"))


def test_another_text_of_a_plugin_in_one_arm_is_refused(tmp_path: Path) -> None:
    """F167"""
    for seed in range(3):
        run_folder(tmp_path / "lab", "mine", seed, plugins={"mine.py": "v2" if seed == 2 else "v1"})
    with pytest.raises(ValueError, match=r"two configurations on one side.*mine\.py"):
        read_side(f"{tmp_path / 'lab'}:mine")


def test_another_host_alone_is_flagged(tmp_path: Path) -> None:
    """F168: paired, and the baseline's rerun asked for."""
    for seed in range(3):
        run_folder(tmp_path / "lab", "standard", seed)
        run_folder(tmp_path / "lab", "xsa", seed, shift=-0.02, machine="m1")
    content = compare(f"{tmp_path / 'lab'}:xsa", f"{tmp_path / 'lab'}:standard")
    assert has(content, "another machine", "machine: m1 against m0", "run the baseline again", "no claim about time")
    assert only(content)["paired"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment__device": "gpu"}, "environment.device: 'gpu' against 'cpu0'"),
        ({"environment__torch": "3.0"}, "environment.torch: '3.0' against '2.9'"),
        ({"code": "other"}, "code: 'other' against 'code'"),
        ({"start": {"w": "other"}}, "start.w: 'other' against 'start0'"),
        ({"rows": "other"}, "rows: 'other' against 'rows0'"),
    ],
)
def test_what_is_no_pair_in_an_experiment_is_none_here(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """F169: software, device, first weights and batches must agree within a pair, or the runs are independent."""
    for seed in range(3):
        run_folder(tmp_path / "lab", "standard", seed)
        run_folder(tmp_path / "lab", "xsa", seed, shift=-0.02, **change)
    content = compare(f"{tmp_path / 'lab'}:xsa", f"{tmp_path / 'lab'}:standard")
    row = only(content)
    assert not row["paired"]
    assert row["estimate"]["method"] == "Welch t over seeds, not paired"
    assert has(content, f"not paired: the runs of seed 0 differ in {words}")


def test_other_seeds_on_each_side_are_no_pairs(tmp_path: Path) -> None:
    for seed in range(4):
        run_folder(tmp_path / "lab", "standard", seed)
        run_folder(tmp_path / "lab", "xsa", seed + 3, shift=-0.02)
    content = compare(f"{tmp_path / 'lab'}:xsa", f"{tmp_path / 'lab'}:standard")
    assert has(content, "not paired: 1 seed in common")
    assert list(content["differs"]) == ["variant.name"]


def test_other_validation_text_decides_nothing(tmp_path: Path) -> None:
    for seed in range(4):
        run_folder(tmp_path / "lab", "standard", seed)
        run_folder(tmp_path / "lab", "xsa", seed, shift=-0.02, evaluation="other")
    row = only(compare(f"{tmp_path / 'lab'}:xsa", f"{tmp_path / 'lab'}:standard"))
    assert row["verdict"]["word"] == "not decidable"
    assert "other validation text" in row["verdict"]["reason"]


def test_a_seed_without_partner_and_runs_that_wait_are_named(arms: Path) -> None:
    run_folder(arms, "standard", 5)
    run_folder(arms, "xsa", 6, state="running")
    content = compare(f"{arms}:xsa", f"{arms}:standard")
    assert only(content)["seeds"] == [0, 1, 2, 3, 4]
    assert has(content, "standard: seeds without a partner are left out: [5]")
    assert has(content, "left out, as not finished: base.xsa.s6")


def test_a_diverged_run_of_an_arm_is_its_verdict(arms: Path) -> None:
    run_folder(arms, "xsa", 5, state="diverged")
    run_folder(arms, "standard", 5)
    assert only(compare(f"{arms}:xsa", f"{arms}:standard"))["verdict"]["word"] == "diverged"


@pytest.mark.parametrize("rows", [[{"step": 0, "loss": 6.0}, {"step": 1, "diverged": True}], [{"step": 0}], []])
def test_a_run_that_diverged_before_its_first_validation_is_the_verdict(arms: Path, rows: list[Any]) -> None:
    """It has no val_bpb at all, and counts."""
    run_folder(arms, "standard", 5)
    path = run_folder(arms, "xsa", 5, state="diverged")
    (path / "scores.parquet").unlink()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = compare(f"{arms}:xsa", f"{arms}:standard")
    assert only(content)["verdict"]["word"] == "diverged"
    assert only(content)["verdict"]["diverged"] == (1, 6)
    assert only(content)["seeds"] == [0, 1, 2, 3, 4]
    assert has(content, "base.xsa.s5 diverged")


def test_a_fingerprint_that_is_not_whole_is_named(arms: Path) -> None:
    (arms / "runs" / "base.xsa.s3" / "fingerprint.json").write_text('{"config": 3}')
    with pytest.raises(ValueError, match=r"base.xsa.s3/fingerprint.json: no table 'config'; delete the run's folder"):
        compare(f"{arms}:xsa", f"{arms}:standard")


# ---------------------------------------------------------------------------------------------- a user's own trainer

ITEMS = {"easy": 1.0, "hard": 3.0, "odd": 2.0}


def command_folder(
    experiment: Path, arm: str, seed: int, *, scored: bool = True, logged: bool = True, state: str = "finished"
) -> tuple[float, list[float]]:
    """A run of engine = "command" as xsalab leaves it; returns its value and its scores, before their division."""
    folder = experiment / "runs" / f"base.{arm}.s{seed}"
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, len(arm)])
    scores = [w * (2 + 0.1 * seed + 0.01 * draw.normal() - 0.3 * (arm == "fast")) for w in ITEMS.values()]
    value = sum(scores) / sum(ITEMS.values())
    config = {"seed": seed, "arm": arm, "point": "base", "options": [arm], "env": {}, "command": {
        "run": ["x"], "folder": ".", "metrics": {}, "scores": "s.jsonl" * scored, "unit": "", "metric": "loss",
    }}  # fmt: skip
    fingerprint = {
        "config": config, "start": {}, "environment": {"device": "cpu0"}, "code": "the command's own", "machine": "m0",
        "plugins": {},
    }  # fmt: skip
    status: dict[str, Any] = {"state": state, "step": 2 if logged else 0}
    if state == "finished":
        status |= {"value": value, "weights": "w"}
        rows = zip(ITEMS.items(), scores, strict=True) if scored else [(("run", 1.0), value)]
        table = [{"task": "command", "item": item, "value": v, "weight": w} for (item, w), v in rows]
        pq.write_table(pa.Table.from_pylist(table), folder / "scores.parquet")
    log = [{"step": s, "loss": 9.0 if scored else value + 2 - s, "lr": 0.1} for s in range(3)] if logged else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    for name, content in (("config", {"config": config}), ("fingerprint", fingerprint), ("status", status)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return value, scores


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("scored", [True, False])
def test_runs_of_a_command_are_compared_by_their_results(tmp_path: Path, scored: bool, logged: bool) -> None:
    """Their final values, over seeds × items where they have scores, whatever was logged by step."""
    found = {arm: [command_folder(tmp_path / "lab", arm, seed, scored=scored, logged=logged) for seed in range(4)]
             for arm in ("fast", "plain")}  # fmt: skip
    content = compare(f"{tmp_path / 'lab'}:fast", f"{tmp_path / 'lab'}:plain", metric="loss")
    row = only(content)
    assert row["paired"]
    assert row["verdict"]["word"] == "better"
    assert row["treatment_values"] == pytest.approx([value for value, _ in found["fast"]])
    gaps = [a - b for (a, _), (b, _) in zip(found["fast"], found["plain"], strict=True)]
    assert row["differences"] == pytest.approx(gaps)
    assert row["estimate"]["items"] == (3 if scored else 1)
    if scored:
        plain, fast = (np.array([scores for _, scores in found[arm]]) for arm in ("plain", "fast"))
        sizes = np.array(list(ITEMS.values()))
        expected = mean_difference(PairTable((0, 1, 2, 3), tuple(ITEMS), plain, fast, sizes, "loss", 1.0, "items"))
        assert (row["estimate"]["low"], row["estimate"]["high"]) == pytest.approx((expected.low, expected.high))
        assert row["estimate"]["item_word"] == "items"
    for words in ("smoothing", "how many steps were planned", "training loss is of one batch"):
        assert not has(content, words)


def test_a_commands_metric_is_named_where_another_is_asked_for(tmp_path: Path) -> None:
    for arm in ("fast", "plain"):
        command_folder(tmp_path / "lab", arm, 0, logged=False)
    with pytest.raises(ValueError, match=r"no metric 'val_bpb'; it holds: loss; name one with --metric"):
        compare(f"{tmp_path / 'lab'}:fast", f"{tmp_path / 'lab'}:plain")


def test_commands_that_scored_other_items_decide_nothing(tmp_path: Path) -> None:
    for arm in ("fast", "plain"):
        for seed in range(4):
            command_folder(tmp_path / "lab", arm, seed)
    path = tmp_path / "lab" / "runs" / "base.fast.s2" / "scores.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)
    row = only(compare(f"{tmp_path / 'lab'}:fast", f"{tmp_path / 'lab'}:plain", metric="loss"))
    assert (row["verdict"]["word"], row["verdict"]["reason"]) == ("not decidable", "they were scored on other items")


@pytest.mark.parametrize("logged", [True, False])
def test_a_command_that_diverged_is_the_verdict(tmp_path: Path, logged: bool) -> None:
    for arm in ("fast", "plain"):
        for seed in range(4):
            lost = arm == "fast" and seed == 3
            command_folder(tmp_path / "lab", arm, seed, logged=logged, state="diverged" if lost else "finished")
    row = only(compare(f"{tmp_path / 'lab'}:fast", f"{tmp_path / 'lab'}:plain", metric="loss"))
    assert (row["verdict"]["word"], row["seeds"]) == ("diverged", [0, 1, 2])


# ---------------------------------------------------------------------------------------------- the verb


def test_the_verb_prints_table_sentence_and_list(logs: Any, xsalab: Any) -> None:
    a, b = logs("a", A), logs("b", B)
    ran = xsalab("compare", a, b)
    assert ran.code == 0
    assert "a against b: Δ val_bpb −0.062 ± 0.032 over 5 seeds, better" in ran.out
    assert "what this cannot vouch for:" in ran.out
    content = json.loads(xsalab("compare", a, b, "--json").out)
    assert content["comparisons"][0]["verdict"]["word"] == "better"


def test_no_output_holds_nan_or_a_p_of_zero(logs: Any, xsalab: Any) -> None:
    """F164: equal runs, single runs, all diverged."""
    folders = {
        "equal": logs("equal", [2.5] * 3), "same": logs("same", [2.5] * 3, seeds=False), "one": logs("one", [2.4]),
        "apart": logs("apart", [2.4] * 3), "broken": logs("broken", [math.nan] * 3),
    }  # fmt: skip
    for a in folders:
        for b in folders:
            if a != b:
                ran = xsalab("compare", folders[a], folders[b], "--json")
                content = json.loads(ran.out, parse_constant=lambda text: pytest.fail(text))
                estimate = content["comparisons"][0]["estimate"]
                assert estimate is None or estimate["p"] is None or estimate["p"] > 0
                shown = xsalab("compare", folders[a], folders[b]).out
                assert not re.search(r"\bnan\b|[pP] = 0\b", shown.replace("not_finite", ""))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.csv", b"", ("empty",)),
        ("binary.csv", b"\0\1\2", ("not a text file",)),
        ("nostep.csv", b"time,val_bpb\n1,2\n", ("no column or field of steps", "time, val_bpb")),
        ("nometric.csv", b"step,loss\n1,2\n", ("no metric 'val_bpb'", "loss")),
    ],
)
def test_bad_files_are_one_message(
    logs: Any, xsalab: Any, tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    xsalab("compare", tmp_path / name, logs("b", B)).refused(name, *words)


def test_bad_places_are_one_message(logs: Any, xsalab: Any, tmp_path: Path, arms: Path) -> None:
    b = logs("b", B)
    (tmp_path / "nothing").mkdir()
    xsalab("compare", tmp_path / "nothing", b).refused("no logs", "event files")
    xsalab("compare", tmp_path / "gone", b).refused("gone", "no such file or folder")
    xsalab("compare", arms, b).refused("two configurations on one side", "FOLDER:ARM")
    xsalab("compare", f"{arms}:other", b).refused("no run called 'other'", "base.standard, base.xsa")
    xsalab("compare", logs("a", A), b, "--margin", 2).refused("--margin 2")


def test_the_real_console_against_real_runs_decides_nothing(arms: Path, shared_data: Path) -> None:
    content = compare(f"{arms}:xsa", str(shared_data / "nanochat_d4" / "console.log"))
    row = content["comparisons"][0]
    assert row["verdict"]["word"] == "not decidable"
    assert row["baseline_values"] == [2.38998]
    for words in ("one run of console.log", "console.log does not state its seeds", "vocab_size: 300 against 2048"):
        assert has(content, words)
