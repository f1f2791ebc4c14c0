"""Runs that are diagnosed while they train or afterwards: the files, and that training never notices."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from toml_tables import write_tables
from xsalab.eval.diagnostics import diagnose, validation_rows
from xsalab.experiment import run as runs
from xsalab.experiment.design import Cell
from xsalab.experiment.diagnosing import diagnose_run, per_layer
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.mechanism import DiagnoseConfig, stored
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import load_run, run_cell
from xsalab.experiment.store import RunFolder
from xsalab.model.variant import VARIANTS
from xsalab.train import Hook, StepMetrics, TrainState

Numbers = Callable[[RunFolder], Mapping[str, Any]]
EVERY = {"every": 1, "rows": 2}
BF16 = {"train__dtype": "bfloat16", "model__width": 64}  # heads of 32: the C++ kernels' size, where they are there


def files(run: RunFolder) -> dict[str, bytes]:
    """What a diagnosed run has beside an ordinary one."""
    return {
        str(path.relative_to(run.path)): path.read_bytes()
        for kind in ("mechanism", "geometry")
        for path in sorted((run.path / kind).glob("*"))
    }


# ------------------------------------------------------------------------------------------- training never notices


@pytest.mark.parametrize("changes", [{}, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("arm", ["standard", "xsa"])
def test_a_run_with_diagnostics_is_the_run_without(arm: str, changes: Any, lab: Any, numbers_of: Numbers) -> None:
    """Losses, gradient norms, scores and weights to the bit, diagnosed before every step."""
    plain = lab("plain", eval__every=2, **changes).run(arm)
    watched = lab("watched", eval__every=2, diagnose=EVERY, **changes).run(arm)
    assert numbers_of(watched) == numbers_of(plain)
    name = "model.safetensors"
    assert (watched.path / name).read_bytes() == (plain.path / name).read_bytes()
    assert watched.read("fingerprint") == plain.read("fingerprint")  # so that it may be a partner of such a run
    assert set(files(watched)) == {
        *(f"mechanism/step-{step:09d}.parquet" for step in range(5)),
        *(f"geometry/step-{step:09d}.parquet" for step in range(4)),
    }
    assert watched.status["seconds"]["diagnostics"] > 0
    assert not files(plain)


class Stop(Exception):
    """Ends a run where a test wants it."""


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_stopped_run_ends_with_the_same_files(
    step: int, lab: Any, numbers_of: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between a step's diagnosis and its geometry, before, at and after a checkpoint: the same bytes."""
    whole = lab("whole", diagnose=EVERY).run("xsa")
    home = lab(diagnose=EVERY)

    class StopAt(Hook):
        def __init__(self, *_: Any) -> None: ...

        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            if metrics.step == step:
                raise Stop

    monkeypatch.setitem(runs.TRACKERS, "stop", StopAt)
    with pytest.raises(Stop):
        run_cell(dataclasses.replace(home.task("xsa"), trackers=("stop",)))
    assert f"geometry/step-{step:09d}.parquet" not in files(home.folder("xsa"))
    run = home.run("xsa")
    assert files(run) == files(whole)
    assert numbers_of(run) == numbers_of(whole)


def test_the_end_alone_is_diagnosed_without_every(lab: Any) -> None:
    """[diagnose] with every = 0: one file, of the weights that are kept."""
    run = lab(diagnose={"rows": 3}).run("xsa")
    assert list(files(run)) == ["mechanism/step-000000004.parquet"]
    model, corpus, config = load_run(run.path)
    found = diagnose(model, *validation_rows(corpus, config.eval, 32, 3))
    assert [{key: row[key] for key in found.rows[0]} for row in stored(run.path, "mechanism")] == found.rows
    assert {(row["step"], row["loss"], row["tokens"]) for row in stored(run.path, "mechanism")} == {
        (4, found.loss, 96)
    }  # fmt: skip


def test_every_second_step(lab: Any) -> None:
    """Before steps 0 and 2 and at the end; geometry of the updates 0 and 2 alone."""
    run = lab(diagnose={"every": 2, "rows": 1}).run()
    names = [name.removesuffix(".parquet").replace("step-00000000", "") for name in files(run)]
    assert names == ["mechanism/0", "mechanism/2", "mechanism/4", "geometry/0", "geometry/2"]


def test_geometry_is_of_the_update_that_was_made(lab: Any) -> None:
    """One step: the last weights less the first, by numpy; every matrix of a block, and nothing else."""
    home = lab(diagnose=EVERY, train__tokens=256)
    task = home.task("xsa")
    first = runs.fresh_state(task.config).model.state_dict()
    first = {name: tensor.clone() for name, tensor in first.items()}
    run = home.run("xsa")
    last, rows = load_file(run.path / "model.safetensors"), stored(run.path, "geometry")
    matrices = [name for name in last if name.startswith("blocks.") and last[name].ndim == 2]
    assert sorted(row["matrix"] for row in rows) == sorted(matrices)
    moved = 0
    for row in rows:
        before = first[row["matrix"]].double().numpy()
        update = last[row["matrix"]].double().numpy() - before
        values = np.linalg.svd(update, compute_uv=False)
        assert row["step"] == 0
        assert len(row["sketch"]) == 1024
        if not update.any():
            assert row["update_spread"] is None
            continue
        moved += 1
        assert row["update_spread"] == pytest.approx(values.std() / values.mean(), rel=1e-3)
        assert row["update_stable_rank"] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-3)
        if before.any():
            assert row["update_ratio"] == pytest.approx(np.linalg.norm(update) / np.linalg.norm(before), rel=1e-3)
        else:
            assert row["update_ratio"] is None
    assert moved >= 4


def test_a_model_trained_with_the_diagonal_masked_weighs_itself_nowhere(lab: Any) -> None:
    """Exactly 0 in every layer, head and range, before and after training; position 0 sees nothing and gives 0."""
    run = lab(arms__masked={"variant": "self-masked"}, diagnose=EVERY, train__tokens=256 * 8).run("masked")
    rows = stored(run.path, "mechanism")
    assert {row["step"] for row in rows} == set(range(9))
    assert {row["self_weight"] for row in rows} == {0.0}
    first = [row for row in rows if (row["start"], row["end"]) == (0, 1)]
    assert {row["norm_before"] for row in first} == {0.0}
    assert {row["logit"] for row in first} == {None}
    assert all(row["first_weight"] == pytest.approx(1) for row in rows if (row["start"], row["end"]) == (1, 2))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"every": -1}, "every = -1: steps, or 0 for the end alone"),
        ({"rows": 0}, "rows = 0: at least 1"),
        ({"row": 2}, "row"),
    ],
)
def test_a_table_that_cannot_be(table: dict[str, Any], words: str, write_experiment: Any) -> None:
    with pytest.raises(ValueError, match=words):
        load_experiment(write_experiment(diagnose=table))


def test_more_rows_than_the_text_fills_stop_the_run_before_it_trains(lab: Any, tmp_path: Path) -> None:
    """When the experiment begins, before any folder of a run is there."""
    with pytest.raises(ValueError, match=r"rows = 500: .* ask for 1 to \d+, or raise eval.max_bytes"):
        lab(diagnose={"rows": 500})
    assert not list(tmp_path.rglob("runs/*"))


# ------------------------------------------------------------------------------------------------------ the verb


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    """The folder of runs of a tiny experiment: standard and xsa, finished."""
    home = tmp_path_factory.mktemp("diagnosis")
    tables = {
        "name": "tiny", "seeds": [0],
        "data": {"source": str(corpus_folder), "validation_fraction": 0.4},
        "model": {"depth": 2, "width": 32, "heads": 2, "context": 32, "vocab_size": 300, "window_block": 8},
        "train": {"tokens": 1024, "batch_tokens": 256, "dtype": "float32"},
        "arms": {"standard": {}, "xsa": {"variant": "xsa"}},
        "controls": {"null": False, "twin": False, "timing": False},
    }  # fmt: skip
    experiment = load_experiment(write_tables(home / "tiny.toml", tables, {}))
    begin_experiment(experiment, home / "out")
    for task in tasks(experiment, home / "out"):
        assert run_cell(task) == "finished"
    return home / "out"


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A run's folder in a copy that a test may change."""
    out = shutil.copytree(trained, tmp_path / "out")
    return lambda arm: out / "experiments" / "tiny" / "runs" / Cell("base", arm, 0).name


def test_the_verb_writes_a_file_and_prints_a_table(finished: Any, xsalab: Any) -> None:
    """Two runs: a table and a path each; the columns in four lines of pyarrow, as the page says."""
    folders = [finished("standard"), finished("xsa")]
    ran = xsalab("diagnose", *folders)
    assert ran.code == 0, ran.err
    for folder in folders:
        path = folder / "mechanism" / "step-000000004.parquet"
        assert str(path) in ran.out
        table = pq.read_table(path)
        assert set(table["step"].to_pylist()) == {4}
        assert set(table["tokens"].to_pylist()) == {8 * 32}
        assert table.num_rows == 2 * 2 * (1 + 6)
    lines = [line.split() for line in ran.out.splitlines() if line[:6].strip() in ("0", "1")]
    assert len(lines) == 4
    assert [line[-2] for line in lines] == ["0.000", "0.000", "1.000", "1.000"]  # α
    assert [float(line[6]) > 5 for line in lines] == [False, False, True, True]  # removed, in per cent
    for word in ("cos", "energy", "removed", "self", "uniform", "first", "reach", "α", "dL/dα"):
        assert word in ran.out


def test_the_verb_s_json_is_the_means_over_heads(finished: Any, xsalab: Any) -> None:
    """One value; each number is the mean over a layer's heads of the whole context in the file, ∂L/∂α the sum."""
    folder = finished("xsa")
    ran = xsalab("diagnose", folder, "--rows", 3, "--json")
    assert ran.code == 0, ran.err
    (said,) = json.loads(ran.out, parse_constant=pytest.fail)
    rows = [row for row in stored(folder, "mechanism") if (row["start"], row["end"]) == (0, 32)]
    assert (said["run"], said["steps"], said["tokens"]) == (str(folder), 4, 96)
    assert said["loss"] == rows[0]["loss"]
    assert said["file"] == str(folder / "mechanism" / "step-000000004.parquet")
    for layer, entry in enumerate(said["layers"]):
        heads = [row for row in rows if row["layer"] == layer]
        assert len(heads) == 2
        assert entry["layer"] == layer
        for name in ("cos_before", "energy_before", "removed", "self_weight", "reach", "alpha"):
            assert entry[name] == pytest.approx(np.mean([row[name] for row in heads]), rel=1e-12)
        assert entry["alpha_gradient"] == pytest.approx(sum(row["alpha_gradient"] for row in heads), rel=1e-12)
        assert entry["logit"] == max(row["logit"] for row in heads)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "mechanism.md"


def test_the_page_names_every_column(lab: Any) -> None:
    """Of both files, and no other."""
    run = lab(diagnose={"every": 1, "rows": 1}, train__tokens=256).run("xsa")
    columns = {name for kind in ("mechanism", "geometry") for name in stored(run.path, kind)[0]}
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert columns - listed == {"step", "loss", "tokens", "layer", "head", "start", "end", "matrix"}
    assert listed <= columns


def test_the_page_s_lines_read_a_file(
    finished: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The four lines of pyarrow, on a run of another name and context, give a row a layer and head."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block
    folder = finished("xsa")
    diagnose_run(folder, 2)
    monkeypatch.chdir(folder.parents[3].parent)
    text = block[1].replace("quick/runs", "tiny/runs").replace("== 256", "== 32")
    exec(compile(text, str(PAGE), "exec"), {})
    rows = ast.literal_eval(capsys.readouterr().out)
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["step"] == 4 and row["removed"] > 0 for row in rows)


def test_a_second_diagnosis_replaces_the_first_and_says_so(finished: Any, xsalab: Any) -> None:
    """Of other rows than were there; the same rows again give the same bytes, without a word."""
    folder = finished("standard")
    assert "replaces" not in xsalab("diagnose", folder, "--rows", 2).err
    first = files(RunFolder(folder))
    assert "replaces" not in xsalab("diagnose", folder, "--rows", 2).err
    assert files(RunFolder(folder)) == first
    assert "replaces a diagnosis of 64 tokens at this step by one of 96" in xsalab("diagnose", folder, "--rows", 3).err
    assert {row["tokens"] for row in stored(folder, "mechanism")} == {96}


def test_the_verb_changes_nothing_else_of_a_run(finished: Any, xsalab: Any) -> None:
    folder = finished("xsa")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert xsalab("diagnose", folder, "--rows", 1).code == 0
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path.relative_to(folder).as_posix() for path in after.keys() - before.keys()} == {
        "mechanism/step-000000004.parquet"
    }
    assert all(after[path] == content for path, content in before.items())


def test_a_fine_tuned_run_is_measured_on_the_base_s_text(finished: Any, xsalab: Any, tmp_path: Path) -> None:
    """RUN/sft has its own weights and steps and its base's corpus; what was read is said."""
    folder, talks = finished("xsa"), tmp_path / "talks.jsonl"
    with talks.open("w", encoding="utf-8") as file:
        for number in range(80):
            turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"yes {number}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    tuned = xsalab("sft", folder, "--data", talks, "--set", "sft.steps=3", "--set", "sft.validation_fraction=0.1")
    assert tuned.code == 0, tuned.err
    ran = xsalab("diagnose", folder, folder / "sft", "--json")
    assert ran.code == 0, ran.err
    assert "measured on the base run's validation text" in ran.err
    base, after = json.loads(ran.out)
    assert (base["steps"], after["steps"]) == (4, 3)
    assert after["tokens"] == base["tokens"]
    assert after["layers"] != base["layers"]
    assert stored(folder / "sft", "mechanism")


def test_the_help_has_examples(xsalab: Any) -> None:
    ran = xsalab("diagnose", "--help")
    assert ran.code == 0
    assert ran.out.count("Example: xsalab diagnose ") == 2


def test_more_rows_than_a_run_s_text_fills(finished: Any, xsalab: Any) -> None:
    folder = finished("xsa")
    xsalab("diagnose", folder, "--rows", 500).refused(str(folder), "rows = 500", "ask for 1 to", "context, 32 tokens")
    assert xsalab("diagnose", folder, "--rows", 0).code == 2
    assert not files(RunFolder(folder))


def test_what_is_no_finished_run(finished: Any, xsalab: Any, tmp_path: Path) -> None:
    """No run, one that goes on, one that diverged, a command's: each is named, with exit code 2."""
    xsalab("diagnose", tmp_path / "none").refused(str(tmp_path / "none"), "no run here")
    folder = finished("xsa")
    run = RunFolder(folder)
    (folder / "model.safetensors").unlink()
    run.write("status", {"state": "running", "steps": 4, "step": 2})
    xsalab("diagnose", folder).refused(str(folder), "not finished (running); its weights are written when it ends")
    run.write("status", {"state": "diverged", "steps": 4, "step": 2})
    xsalab("diagnose", folder).refused(str(folder), "not finished (diverged); it diverged and has no weights")
    content = run.read("config")
    run.write("config", {**content, "config": {**content["config"], "command": {}}})
    xsalab("diagnose", folder).refused(str(folder), "a command's run")
    assert not files(run)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_run_that_breaks_down_diverges_as_it_does_without_diagnostics(
    bad: float, lab: Any, xsalab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are not finite, or nearly, after a step: None is stored, never NaN; the verb then refuses."""

    class Breaks(Hook):
        def __init__(self, *_: Any) -> None: ...

        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            if metrics.step == 1:
                with torch.no_grad():
                    state.model.blocks[0].attention.w_v.weight.fill_(bad)  # pyright: ignore

    monkeypatch.setitem(runs.TRACKERS, "breaks", Breaks)
    for home in (lab("plain"), lab(diagnose=EVERY)):
        run_cell(dataclasses.replace(home.task("standard"), trackers=("breaks",)))
    run = home.folder("standard")
    plain = RunFolder(run.path.parents[2] / "plain" / "runs" / run.path.name)
    assert run.state == plain.state == "diverged"
    assert run.status["message"] == plain.status["message"]
    for kind in ("mechanism", "geometry"):
        for row in stored(run.path, kind):
            assert all(math.isfinite(n) for n in row.values() if isinstance(n, float))
    before = files(run)
    assert "mechanism/step-000000002.parquet" in before
    xsalab("diagnose", run.path).refused(str(run.path), "diverged")
    assert files(run) == before


SILENT = """
from xsalab.model import QKV, Variant, variant

@variant("silent")
class Silent(Variant):
    def forward(self, t, attend):
        return t.q
"""


@pytest.fixture
def no_silent() -> Iterator[None]:
    yield
    VARIANTS.pop("silent", None)


def test_a_variant_without_attention_is_named_with_its_run(
    no_silent: None, write_experiment: Any, tmp_path: Path, xsalab: Any
) -> None:
    """A plugin: whose code runs is told first; the message names folder and variant."""
    path = write_experiment(seeds=[0], plugins=["silent.py"], arms__silent={"variant": "silent"})
    (path.parent / "silent.py").write_text(SILENT, encoding="utf-8")
    assert xsalab("train", path, "--out", tmp_path / "out", "--arm", "silent", "--seed", 0).code == 0
    folder = tmp_path / "out" / "experiments" / "tiny" / "runs" / "base.silent.s0"
    ran = xsalab("diagnose", folder, "--rows", 2)
    ran.refused(str(folder), "variant 'silent' never calls attend: it has no attention to diagnose")
    assert "silent.py, sha256 " in ran.err


def test_layers_are_summed_up_over_heads_by_hand() -> None:
    """A head without a logit is left out of the largest; a layer with a head that has no number has no mean."""
    from xsalab.eval.diagnostics import Mechanism

    common = dict.fromkeys(
        ("cos_before", "cos_after", "energy_before", "energy_after", "removed", "uniform", "first_weight", "reach"), 0.5
    )
    rows: list[dict[str, Any]] = [
        {
            "layer": layer, "start": 0, "end": 2, "self_weight": weight, "alpha": alpha, "alpha_gradient": slope,
            "logit": logit, **common,
        }
        for layer, weight, alpha, slope, logit in (
            (0, 0.2, 1.0, 0.5, None), (0, 0.4, 0.0, -0.2, 3.0), (1, 0.1, 0.3, 0.1, None), (2, None, 0.3, 0.1, 1.0),
            (2, 0.5, 0.3, 0.1, 1.0),
        )
    ]  # fmt: skip
    part = {**rows[0], "end": 1, "self_weight": 9.0, "alpha": None, "alpha_gradient": None, "logit": 9.0}
    first, second, third = per_layer(Mechanism(1.0, 2, [*rows, part]))
    assert (first["self_weight"], first["alpha"], first["logit"]) == (pytest.approx(0.3), 0.5, 3.0)
    assert first["alpha_gradient"] == pytest.approx(0.3)
    assert (second["layer"], second["logit"], second["alpha"]) == (1, None, 0.3)
    assert (third["self_weight"], third["alpha"]) == (None, 0.3)


def test_the_default_rows_are_those_of_the_table(finished: Any) -> None:
    """The verb, the function and [diagnose] read as many."""
    found = diagnose_run(finished("standard"))
    assert found.found.tokens == DiagnoseConfig().rows * 32


def test_all_folders_are_looked_at_before_the_first_is_measured(finished: Any, xsalab: Any) -> None:
    """A wrong folder at the end of the list must not leave the first one's file written without a word."""
    good, bad = finished("standard"), finished("xsa")
    (bad / "model.safetensors").unlink()
    xsalab("diagnose", good, bad, "--rows", 2).refused(str(bad), "its weights are written when it ends")
    assert not (good / "mechanism").exists()
    xsalab("diagnose", good, good / "config.json").refused("config.json", "no run here, no folder")


def test_rows_are_those_of_the_run_or_of_one_beside_it(finished: Any) -> None:
    """So that runs can stand beside one another without an option."""
    first, second = finished("standard"), finished("xsa")
    assert diagnose_run(first, rows=3).found.tokens == 3 * 32
    assert diagnose_run(first).found.tokens == 3 * 32
    assert diagnose_run(second).found.tokens == 3 * 32


@pytest.mark.parametrize("every", [0, 2])
def test_a_variant_that_cannot_be_measured_is_told_before_it_trains(
    every: int, no_silent: None, write_experiment: Any, tmp_path: Path, xsalab: Any
) -> None:
    """Not at the end of a run, which it would lose."""
    path = write_experiment(
        seeds=[0],
        plugins=[f"silent{every}.py"],
        arms__silent={"variant": "silent"},
        diagnose={"every": every, "rows": 2},
    )
    (path.parent / f"silent{every}.py").write_text(f"# {every}\n{SILENT}", encoding="utf-8")
    ran = xsalab("train", path, "--out", tmp_path / "out", "--arm", "silent", "--seed", 0)
    ran.refused("variant 'silent' never calls attend")
    run = RunFolder(tmp_path / "out" / "experiments" / "tiny" / "runs" / "base.silent.s0")
    assert not run.metrics(), "no step was made"
