"""One run, end to end: what it leaves, what it refuses, and how it goes on after a stop."""

from __future__ import annotations

import dataclasses
import errno
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from xsalab.eval.validation import evaluate
from xsalab.experiment import hooks, plugins, store
from xsalab.experiment import run as runs
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.outcome import outcome
from xsalab.experiment.pairing import twin_agrees
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import load_run, run_cell
from xsalab.experiment.store import RunFolder, write_rows
from xsalab.experiment.workers import portable, run_tasks
from xsalab.files import folder_lock
from xsalab.model.variant import VARIANTS
from xsalab.train import Hook, StepMetrics, TrainState, checkpoint

Numbers = Callable[[RunFolder], dict[str, Any]]


class Stop(Exception):
    """Ends a run where a test wants it."""


def stop_at(step: int) -> Any:
    """A tracker that ends the run after ``step`` has been made."""

    class StopAt(Hook):
        def __init__(self, *_: Any) -> None: ...

        def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
            if metrics.step == step:
                raise Stop

    return StopAt


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], None]:
    """Runs a task until ``step`` is done and stops it there, as an error would."""

    def until(task: Any, step: int) -> None:
        monkeypatch.setitem(runs.TRACKERS, "stop", stop_at(step))
        with pytest.raises(Stop):
            run_cell(dataclasses.replace(task, trackers=("stop",)))

    return until


# ------------------------------------------------------------------------------------------- what is left


def test_a_run_leaves_its_whole_record(lab: Any, numbers_of: Numbers) -> None:
    """F091: with eval.every = 0 the run ends with one evaluation, and everything else that a reader needs."""
    home = lab()
    run = home.run("xsa")
    assert sorted(path.name for path in run.path.iterdir() if path.name != ".lock") == [
        "config.json", "fingerprint.json", "metrics.parquet", "model.safetensors", "scores.parquet", "status.json",
    ]  # fmt: skip
    rows = run.metrics()
    assert [row["step"] for row in rows if "loss" in row] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "val_bpb" in row] == [4]
    assert {row["tokens"] for row in rows if "loss" in row} == {256}
    status = run.status
    assert (status["state"], status["step"], status["steps"], status["resumes"]) == ("finished", 4, 4, 0)
    assert status["val_bpb"] == rows[-1]["val_bpb"]
    assert set(status["seconds"]) == {"start", "training", "evaluation"}
    derived = run.read("config")["derived"]
    model = load_file(run.path / "model.safetensors")
    assert derived["parameters"]["total"] == sum(tensor.numel() for tensor in model.values())
    assert (derived["steps"], derived["dtype"], derived["layers"]) == (4, "float32", [0, 1])


def test_the_first_validation_is_of_the_first_weights(lab: Any) -> None:
    """val_bpb[s] belongs to the weights after s updates, s from 0 to N."""
    run = lab(eval__every=3).run()
    found = {row["step"]: row["val_bpb"] for row in run.metrics() if "val_bpb" in row}
    assert list(found) == [0, 3, 4]
    assert found[4] < found[0]


def test_the_stored_weights_give_the_stored_scores(lab: Any) -> None:
    """A finished run is loaded from its folder alone, and scores the documents as it did: α at its end included."""
    run = lab(arms__xsa__alpha={"from": 0.0, "to": 1.0}).run("xsa")
    model, corpus, config = load_run(run.path)
    assert {s.item: (s.value, s.weight) for s in evaluate(model, corpus, config.eval)} == run.scores()
    assert model.variants()[0].logged() == {"alpha": 1.0}


def test_seeds_differ_in_weights_and_in_order(lab: Any) -> None:
    """F051: another seed, other first weights and other batches; both are in the record."""
    home = lab()
    a, b = (home.run("standard", seed).read("fingerprint") for seed in (0, 1))
    assert (a["config"]["seed"], b["config"]["seed"]) == (0, 1)
    assert a["rows"] != b["rows"]
    drawn = [name for name in a["start"] if a["start"][name] != b["start"][name]]
    assert "embedding.weight" in drawn
    assert (a["corpus"], a["evaluation"]) == (b["corpus"], b["evaluation"])


def test_more_steps_than_the_text_holds(lab: Any, few_texts: Path) -> None:
    """F055: the second pass begins by itself, in another order; all rows were seen before it."""
    home = lab(data__source=few_texts, data__validation_fraction=0.3, train__tokens=256 * 16)
    task = home.task()
    corpus = runs.open_corpus(task.config.data, 300, home.out)
    rows = corpus.rows(32)
    batch_of = runs.batches(task.config, rows)
    seen = torch.cat([batch_of(step).row_ids for step in range(task.config.train.steps)]).tolist()
    assert len(seen) > 2 * len(rows), "the trigger needs more than two passes"
    first, second = (seen[n * len(rows) : (n + 1) * len(rows)] for n in (0, 1))
    assert sorted(first) == sorted(second) == list(range(len(rows)))
    assert first != second
    assert home.run().state == "finished"


# ------------------------------------------------------------------------------------ stop and go on


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_stopped_run_goes_on_to_the_bit(step: int, lab: Any, stop: Any, numbers_of: Numbers) -> None:
    """F082, F132: stopped before, at and after a checkpoint; its record holds every step once."""
    whole = numbers_of(lab("whole", eval__every=1).run("xsa"))
    home = lab(eval__every=1)
    stop(home.task("xsa"), step)
    assert home.folder("xsa").status["state"] == "failed"
    run = home.run("xsa")
    assert numbers_of(run) == whole
    assert run.status["resumes"] == 1
    assert [row["step"] for row in run.metrics() if "loss" in row] == [0, 1, 2, 3]


def test_a_resume_in_the_second_epoch(lab: Any, stop: Any, few_texts: Path, numbers_of: Numbers) -> None:
    """F084: two resumes, both after the end of the data, change nothing."""
    changes = {
        "data__source": few_texts, "data__validation_fraction": 0.3, "train__tokens": 256 * 16,
        "train__checkpoint_steps": 3,
    }  # fmt: skip
    whole = numbers_of(lab("whole", **changes).run())
    home = lab(**changes)
    rows = runs.open_corpus(home.task().config.data, 300, home.out).rows(32)
    assert len(rows) < 8 * 9, "the trigger needs the end of the data before step 9"
    stop(home.task(), 9)
    stop(home.task(), 14)
    run = home.run()
    assert numbers_of(run) == whole
    assert run.status["resumes"] == 2


def test_a_checkpoint_without_an_evaluation(lab: Any, stop: Any, numbers_of: Numbers) -> None:
    """F090: saved more often than evaluated, and resumed before the first evaluation."""
    changes = {"train__checkpoint_steps": 1, "eval__every": 3}
    whole = numbers_of(lab("whole", **changes).run())
    home = lab(**changes)
    stop(home.task(), 1)
    assert numbers_of(home.run()) == whole


def test_an_evaluation_that_fails_loses_no_training(
    lab: Any, monkeypatch: pytest.MonkeyPatch, numbers_of: Numbers
) -> None:
    """F100: the last checkpoint is there before the evaluation begins, which is repeated from it."""
    whole = numbers_of(lab("whole").run())
    home = lab()

    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(runs, "evaluate", fails)
    with pytest.raises(MemoryError):
        home.run()
    run = home.folder()
    assert run.status["state"] == "failed"
    assert (run.path / "checkpoints" / "step-000000004").is_dir()
    monkeypatch.undo()
    calls = []
    monkeypatch.setattr(hooks, "save_checkpoint", lambda *_: calls.append(1))
    assert numbers_of(home.run()) == whole
    assert not calls, "nothing was trained again"


def test_killed_between_the_last_writes(lab: Any, monkeypatch: pytest.MonkeyPatch, numbers_of: Numbers) -> None:
    """Whichever of scores, weights, metrics and status was the last to be written, the restart ends the same."""
    whole = numbers_of(lab("whole", eval__every=2).run())
    for number, name in enumerate(("write_scores", "write_weights", "finish_metrics", "state_digest")):
        home = lab(f"cut{number}", eval__every=2)
        owner = RunFolder if hasattr(RunFolder, name) else runs
        plain = getattr(owner, name)

        def broken(*arguments: Any, plain: Any = plain) -> None:
            plain(*arguments)
            raise KeyboardInterrupt  # nothing of run_cell handles it, as nothing handles a kill

        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(KeyboardInterrupt):
            home.run()
        monkeypatch.undo()
        assert home.folder().state == "running"
        assert numbers_of(home.run()) == whole, name


def test_killed_between_parquet_and_the_log(lab: Any, monkeypatch: pytest.MonkeyPatch, numbers_of: Numbers) -> None:
    """Both records of the metrics are there: the restart neither doubles nor loses a row."""
    whole = numbers_of(lab("whole").run())
    home = lab()

    def cut(path: Path, *_: Any, **__: Any) -> None:
        if path.name == "metrics.jsonl":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", cut)
    with pytest.raises(KeyboardInterrupt):
        home.run()
    monkeypatch.undo()
    assert (home.folder().path / "metrics.parquet").is_file()
    assert (home.folder().path / "metrics.jsonl").is_file()
    assert numbers_of(home.run()) == whole


def test_a_lost_record_is_not_continued(lab: Any, stop: Any) -> None:
    """Weights of step 2 without the record of steps 0 and 1 make no whole run: said, not hidden."""
    home = lab()
    stop(home.task(), 2)
    (home.folder().path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics.jsonl: holds 0 of the 2 steps .* delete .* to run it again"):
        home.run()


def test_what_a_kill_left_half_written_goes(lab: Any) -> None:
    home = lab()
    folder = home.folder().path
    folder.mkdir(parents=True)
    (folder / ".status.json.123.tmp").write_text("{", encoding="utf-8")
    (folder / "checkpoints" / ".step-000000002.123.tmp").mkdir(parents=True)
    home.run()
    assert sorted(path.name for path in folder.glob(".*")) == [".lock"]


def test_a_finished_run_is_not_touched(lab: Any) -> None:
    """F099: the same command again finds it finished; checkpoints that a kill left behind go."""
    home = lab()
    run = home.run()
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir()}
    (run.path / "checkpoints" / "step-000000002").mkdir(parents=True)
    assert run_cell(home.task()) == "finished"
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.path.iterdir()} == before


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "stopped"])
def test_a_folder_of_another_configuration_is_refused(ended: bool, lab: Any, stop: Any) -> None:
    """F099: another rate under the same name is refused with the field, both values and a remedy; nothing is lost."""
    home = lab()
    home.run() if ended else stop(home.task(), 2)
    before = {path: path.read_bytes() for path in home.folder().path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"another configuration: optim.lr_scale: 1.0 against 2.0\. .*another name"):
        lab(optim__lr_scale=2.0).run()
    assert {path: path.read_bytes() for path in home.folder().path.rglob("*") if path.is_file()} == before


def test_a_second_process_in_the_same_folder(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LOCK_WAIT", 0.1)
    home = lab()
    home.folder().path.mkdir(parents=True)
    with (
        folder_lock(home.folder().path, "run"),
        pytest.raises(ValueError, match="another process works on this run; wait for it"),
    ):
        home.run()
    assert [path.name for path in home.folder().path.iterdir()] == [".lock"]
    assert home.run().state == "finished"


def test_a_start_under_other_conditions_is_not_continued(lab: Any, stop: Any) -> None:
    """F169: another version of torch between two halves of a run: refused, and named."""
    home = lab()
    stop(home.task(), 2)
    edit(home.folder(), "fingerprint", "environment", "torch", "1.13.0")
    with pytest.raises(ValueError, match=r"began under other conditions: environment.torch: '.*' against '1.13.0'"):
        home.run()


def edit(run: RunFolder, file: str, *keys_and_value: Any) -> None:
    *keys, last, value = keys_and_value
    content = run.read(file)
    place = content
    for key in keys:
        place = place[key]
    place[last] = value
    run.write(file, content)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("start", "embedding.weight"), "0", "start.embedding.weight"),  # F048
        (("rows",), "0", "rows"),
        (("corpus",), "0", "corpus"),
        (("evaluation",), "0", "evaluation"),
        (("config", "optim", "lr_scale"), 3.0, "config|optim.lr_scale"),
        (("config", "seed"), 7, "seed"),
        (("environment", "threads"), 2, "environment.threads"),
        (("environment", "torch"), "1.13.0", "environment.torch"),  # F169
        (("code",), "0", "code"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_a_partner_that_does_not_match_is_refused(keys: tuple[str, ...], value: Any, words: str, lab: Any) -> None:
    """F048, F169: whatever differs besides the declared factors stops the run before it trains, by name."""
    home = lab()
    edit(home.run("standard"), "fingerprint", *keys, value)
    with pytest.raises(
        ValueError, match=rf"base.xsa.s0 is no partner of base.standard.s0: ({words}): .*declared factors"
    ):
        home.run("xsa")
    assert [path.name for path in home.folder("xsa").path.iterdir()] == [".lock"]


def test_a_partner_of_another_host_is_taken_and_told(lab: Any) -> None:
    """F168: the same software and device on another host may be a partner; the outcome says so."""
    home = lab()
    edit(home.run("standard"), "fingerprint", "machine", "other")
    home.run("xsa")
    said = outcome(home.experiment, home.store)
    assert any("different machines" in line for line in said["warnings"])


def test_what_an_arm_declares_may_differ(lab: Any) -> None:
    """A declared batch size changes the rows, a declared depth the parameters, a declared dtype the start."""
    home = lab(
        arms__batch={"train.batch_tokens": 512},
        arms__deep={"model": {"depth": 3}},
        arms__bf16={"train.dtype": "bfloat16"},
    )
    for arm in ("standard", "batch", "deep", "bf16"):
        assert home.run(arm).state == "finished"


LEAK = '''
from xsalab import Variant, variant

@variant("leak")
class Leak(Variant):
    """Adds the mean over all positions, later ones included."""

    def forward(self, t, attend):
        y = attend(t.q, t.k, t.v)
        return y + y.mean(1, keepdim=True)
'''

DOUBLE = '''
from xsalab import Variant, variant

@variant("double")
class Double(Variant):
    """Attention, twice as strong."""

    def forward(self, t, attend):
        return 2 * attend(t.q, t.k, t.v)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    """Writes a plugin beside the experiment and imports it, as the command does."""
    known = dict(VARIANTS)

    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        runs.import_plugins([(name, text)])
        return name

    yield write
    VARIANTS.clear()
    VARIANTS.update(known)
    plugins._import_plugin.cache_clear()


def test_a_variant_that_sees_the_future_is_refused(lab: Any, plugin: Any) -> None:
    """F008: before it trains, and before its folder holds anything."""
    home = lab(plugins=[plugin(LEAK)], arms__leak={"variant": "leak"})
    with pytest.raises(ValueError, match="variant 'leak' looks at future tokens"):
        home.run("leak")
    assert [path.name for path in home.folder("leak").path.iterdir()] == [".lock"]


def test_a_plugin_added_later_leaves_the_other_arms_alone(lab: Any, plugin: Any) -> None:
    """An arm with a variant from a new file pairs with a baseline that ran before that file was named."""
    lab().run("standard")
    home = lab(plugins=[plugin(DOUBLE)], arms__double={"variant": "double"})
    run = home.run("double")
    assert run.state == "finished"
    assert list(run.read("fingerprint")["plugins"]) == ["mine.py"]
    assert run.read("config")["plugins"] == {"mine.py": DOUBLE}


def test_a_changed_plugin_is_not_reported_as_the_old_one(lab: Any, plugin: Any) -> None:
    """The runs are finished: asked again with another text, they are refused and not taken for its results."""
    home = lab(plugins=[plugin(DOUBLE)], arms__double={"variant": "double"})
    home.run("double")
    plugin(DOUBLE.replace("2 *", "3 *"))
    with pytest.raises(ValueError, match=r"trained with another text of plugin mine.py"):
        home.run("double")
    home.run("standard")  # no variant of the plugin: nothing to it


CHANCE = """
import torch
from torch import nn
from xsalab.model import Variant, variant

@variant("chance")
class Chance(Variant):
    def __init__(self, site):
        super().__init__(site)
        self.gate = nn.Linear(site.width, 1, bias=False)

    def forward(self, t, attend):
        return attend(t.q, t.k, t.v) * self.gate(t.x.float()).sigmoid().unsqueeze(-1).to(t.x.dtype)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHANCE, "starts .*gate.weight with random or unset numbers"),
        (CHANCE.replace("nn.Linear(site.width, 1, bias=False)", "torch.rand").replace(
            "self.gate(t.x.float())", "self.gate(t.x.shape[:2] + (1,))"), "other logits for the same tokens"),
        (CHANCE.replace("nn.Linear(site.width, 1, bias=False)", "None").replace(
            "self.gate(t.x.float())", "t.x[..., :3]"), "fails: RuntimeError"),
    ],
    ids=["random start", "random forward", "wrong shape"],
)  # fmt: skip
def test_a_variant_of_chance_or_of_another_shape_is_refused(text: str, words: str, lab: Any, plugin: Any) -> None:
    home = lab(plugins=[plugin(text)], arms__chance={"variant": "chance"})
    with pytest.raises(ValueError, match=words):
        home.run("chance")


def test_arms_may_differ_in_the_start_of_their_own_parameters(lab: Any) -> None:
    """Two learned strengths: the start of α belongs to the variant, a factor of every pair."""
    arms = {f"arms__{name}": {"variant": "xsa", "alpha": {"learned": "tanh", "start": start}}
            for name, start in (("low", 0.0), ("high", 0.5))}  # fmt: skip
    home = lab(seeds=[0], controls__null=False, controls__twin=False, **arms)
    home.run_all()
    assert {row["state"] for row in outcome(home.experiment, home.store)["runs"]} == {"finished"}


def test_a_changed_plugin_is_no_resume(lab: Any, plugin: Any, stop: Any) -> None:
    home = lab(plugins=[plugin(DOUBLE)], arms__double={"variant": "double"})
    stop(home.task("double"), 2)
    plugin(DOUBLE.replace("2 *", "3 *"))
    with pytest.raises(ValueError, match=r"trained with another text of plugin mine.py"):
        home.run("double")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:", "plugin mine.py, line .*SyntaxError"),
        ("\n\n1 / 0\n", "plugin mine.py, line 3: ZeroDivisionError: division by zero"),
        (
            "from xsalab import variant\nvariant('No Name')",
            "plugin mine.py, line 2: ValueError: variant name 'No Name'",
        ),
    ],
    ids=["syntax", "error", "name"],
)
def test_a_broken_plugin_is_named_with_its_line(text: str, words: str, plugin: Any) -> None:
    with pytest.raises(ValueError, match=words):
        plugin(text)


def test_a_missing_plugin_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"e.toml: plugins: .*none.py: No such file"):
        plugins.read_plugins(tmp_path / "e.toml", ["none.py"])
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(ValueError, match=r"latin.py: not UTF-8 \(byte 2\)"):
        plugins.read_plugins(tmp_path / "e.toml", ["latin.py"])


def test_a_gpu_that_is_not_there(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F176: asked for and missing, it is named; nothing falls back in silence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"train.device = 'cuda': torch finds no CUDA device here; use 'cpu'"):
        lab(train__device="cuda").run()


def test_a_run_of_a_gpu_is_sampled_on_a_cpu(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F104, F176: the weights of a run on another device are loaded where there is none."""
    run = lab().run()
    edit(run, "config", "config", "train", "device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_run(run.path)[0].head.weight.device.type == "cpu"


# ------------------------------------------------------------------------------------------- broken down


BURST = '''
import torch
from xsalab import Variant, variant

@variant("burst")
class Burst(Variant):
    """Attention, until half of the run is done."""

    def __init__(self, site):
        super().__init__(site)
        self.register_buffer("scale", torch.ones(()))

    def set_progress(self, fraction):
        self.scale.fill_(float("inf") if 0.4 < fraction < 1 else 1.0)

    def forward(self, t, attend):
        return attend(t.q, t.k, t.v) * self.scale
'''


def burst(lab: Any, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(runs, "check_causality_once", lambda *_: None)  # it would find what is not finite
    return lab(plugins=[plugin(BURST)], arms__burst={"variant": "burst"})


def test_a_run_that_breaks_down_is_kept(lab: Any, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked with step and message, its state kept as it was before that step, its record whole; not run again."""
    home = burst(lab, plugin, monkeypatch)
    run = home.run("burst")
    status = run.status
    assert (status["state"], status["step"]) == ("diverged", 2)
    assert re.match(r"step 2: loss (nan|inf), gradient norm (nan|inf): not finite, stopped", status["message"])
    kept = json.loads((run.path / "checkpoints" / "step-000000002" / "state.json").read_text(encoding="utf-8"))
    assert kept["step"] == 2
    assert kept["diverged"] == status["message"]
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["diverged"]
    assert "loss" not in rows[2]
    assert not (run.path / "metrics.jsonl").exists()
    assert home.run("burst").status == status
    assert home.run("standard").state == "finished"


@pytest.mark.parametrize("last", ["log", "checkpoint"])
def test_killed_while_it_marks_a_breakdown(last: str, lab: Any, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the log's row, the kept state and the status: the restart breaks down at the same step, once."""
    home = burst(lab, plugin, monkeypatch)

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    if last == "log":
        monkeypatch.setattr(runs.Diverged, "__str__", cut)
    else:
        monkeypatch.setattr(runs, "_diverged", cut)
    with pytest.raises(KeyboardInterrupt):
        home.run("burst")
    assert home.folder("burst").state == "running"
    monkeypatch.undo()
    monkeypatch.setattr(runs, "check_causality_once", lambda *_: None)
    run = home.run("burst")
    assert run.state == "diverged"
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]


def test_a_validation_that_is_not_finite_is_a_breakdown(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F075: nothing that is not a number becomes a score."""
    plain = runs.evaluate

    def broken(*arguments: Any) -> list[Any]:
        return [dataclasses.replace(score, value=float("nan")) for score in plain(*arguments)]

    monkeypatch.setattr(runs, "evaluate", broken)
    run = lab().run()
    assert (run.state, run.status["message"]) == ("diverged", "step 4: the validation loss is not finite")
    assert not (run.path / "scores.parquet").exists()
    assert "val_bpb" not in run.metrics()[-1]


def test_a_full_disk_at_a_checkpoint(lab: Any, monkeypatch: pytest.MonkeyPatch, numbers_of: Numbers) -> None:
    """F174: the run fails with needed and free bytes, its last good checkpoint stays, and it goes on from there."""
    whole = numbers_of(lab("whole", train__checkpoint_steps=1).run())
    home, plain, calls = lab(train__checkpoint_steps=1), checkpoint.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"disk full: [\d,]+ bytes needed, [\d,]+ free; make room"):
        home.run()
    run = home.folder()
    assert run.status["state"] == "failed"
    assert "disk full" in run.status["message"]
    kept = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert kept == ["step-000000001", "step-000000002"]
    monkeypatch.undo()
    assert numbers_of(home.run()) == whole


def test_a_full_disk_at_the_log(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F174: the log of the metrics names itself, and the first error is the one that is told."""
    home = lab()

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    plain = store.MetricsLog

    class Log(plain):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.file.close()
            self.file = Full()

    monkeypatch.setattr(store, "MetricsLog", Log)
    with pytest.raises(OSError, match="disk full") as raised:
        home.run()
    assert raised.value.filename.endswith("metrics.jsonl")


# ---------------------------------------------------------------------------------------- the experiment


def test_the_null_control_sees_the_same_sets_of_rows(lab: Any) -> None:
    """It differs from the baseline in one field, train.permute_rows, and in the order inside each batch alone."""
    home = lab(controls__null=True)
    plain, null = home.task("standard"), home.task("null")
    assert runs.config_differences(runs.dump(plain.config), runs.dump(null.config)) == {
        "train.permute_rows": (False, True)
    }
    rows = runs.open_corpus(plain.config.data, 300, home.out).rows(32)
    a, b = (runs.batches(task.config, rows) for task in (plain, null))
    moved = 0
    for step in range(8):
        ids = a(step).row_ids.tolist(), b(step).row_ids.tolist()
        assert sorted(ids[0]) == sorted(ids[1])
        moved += ids[0] != ids[1]
    assert moved == 8
    one, other = home.run("standard"), home.run("null")
    assert one.read("fingerprint")["rows"] == other.read("fingerprint")["rows"]
    losses = [[row["loss"] for row in run.metrics() if "loss" in row] for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_twin_agrees_and_is_found_out(lab: Any) -> None:
    """One cell run twice agrees to the bit; one changed loss and it does not."""
    home = lab(controls__twin=True, seeds=[3])
    assert twin_agrees(home.experiment, home.store) is None
    home.run("standard", 3)
    twin = home.run("twin", 3)
    assert twin_agrees(home.experiment, home.store) is True
    rows = twin.metrics()
    rows[1]["loss"] += 1e-9
    write_rows(twin.path / "metrics.parquet", rows)
    assert twin_agrees(home.experiment, home.store) is False


def test_the_positive_control_declares_its_factor(lab: Any) -> None:
    home = lab(controls__positive={"optim.lr_scale": 0.1})
    assert home.experiment.arms["positive"].factors == ("variant", "optim.lr_scale")
    assert home.task("positive").config.optim.lr_scale == 0.1
    home.run("standard")
    assert home.run("positive").state == "finished"


@pytest.mark.slow
def test_two_workers_give_the_bits_of_one(lab: Any, numbers_of: Numbers) -> None:
    """Two slots and one agree to the bit; every cell tells its start and its end."""
    one, two = lab("one"), lab("two")
    one.run_all()
    told: list[tuple[str, str]] = []
    states = run_tasks(
        tasks(two.experiment, two.out), [(), ()], lambda cell, content: told.append((cell.name, content["kind"]))
    )
    assert set(states.values()) == {"finished"}
    assert len(states) == 4
    for cell in states:
        assert numbers_of(one.store.run(cell)) == numbers_of(two.store.run(cell)), cell.name
        assert [kind for name, kind in told if name == cell.name and kind != "step"] == ["start", "end"]


@pytest.mark.slow
def test_a_mistake_in_a_worker_reaches_the_user(lab: Any) -> None:
    """A ValueError of a worker process is the parent's, with its words; what is there stays."""
    home = lab()
    edit(home.run("standard"), "fingerprint", "rows", "0")
    pending = [home.task("xsa"), home.task("standard", 1)]
    with pytest.raises(ValueError, match=r"base.xsa.s0 is no partner of base.standard.s0: rows"):
        run_tasks(pending, [(), ()], lambda cell, content: None)
    assert home.folder("standard").state == "finished"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("no"), ValueError, "^no$"),
        (OSError(errno.ENOSPC, "disk full", "/a/b"), OSError, "disk full: '/a/b'"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), ValueError, "bad"),
        (TypeError("ours"), RuntimeError, "TypeError: ours"),
    ],
    ids=["value", "disk", "unicode", "ours"],
)
def test_an_error_travels_to_the_parent(error: Exception, kind: type, words: str) -> None:
    """A user's mistake keeps its kind and its file; a fault of ours brings its traceback."""
    with pytest.raises(kind, match=words):
        raise pickle.loads(pickle.dumps(portable(error)))


def test_a_batch_larger_than_the_corpus_is_refused_at_once(lab: Any) -> None:
    with pytest.raises(ValueError, match=r"tiny.toml: train.batch_tokens = 32768: batch_rows = 1024: the corpus packs"):
        lab(train__batch_tokens=32768)


def test_an_evaluation_of_nothing_is_refused_at_once(lab: Any) -> None:
    """F105: rows as nanochat packs them, and too little text for one: an error before anything trains."""
    with pytest.raises(ValueError, match=r"eval.packing = 'nanochat': .* fill no row of 1025 tokens"):
        lab(eval__packing="nanochat", eval__max_bytes=1, model__context=1024, train__batch_tokens=1024)


def test_two_corpora_in_one_experiment(lab: Any, tmp_path: Path, corpus_folder: Path) -> None:
    """Points with other data, vocabulary and context: each corpus is prepared for the cells that use it."""
    home = lab(
        points=[
            {"name": "base"},
            {"name": "fine", "vocab_size": 310, "context": 16},
            {"name": "short", "data.validation_fraction": 0.3, "context": 64},
        ]
    )
    stored = json.loads((home.store.folder / "corpora.json").read_text(encoding="utf-8"))
    assert [entry["contexts"] for entry in stored] == [[32], [16], [64]]
    for point in ("base", "fine", "short"):
        assert home.run(point=point).state == "finished"


def test_what_was_set_on_the_command_line_is_kept(write_experiment: Any, tmp_path: Path) -> None:
    """The stored TOML ends with what --set changed, so that the experiment can be run again."""
    path = write_experiment()
    experiment = load_experiment(path, ["train.tokens=512"])
    begin_experiment(experiment, tmp_path / "out")
    stored = (tmp_path / "out" / "experiments" / "tiny" / "experiment.toml").read_text(encoding="utf-8")
    assert stored == path.read_text(encoding="utf-8") + "\n# with --set 'train.tokens=512'"
    assert load_experiment(tmp_path / "out" / "experiments" / "tiny" / "experiment.toml").name == "tiny"
