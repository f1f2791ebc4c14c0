"""The command from outside: exit codes, what it prints, what it refuses, and that nothing is lost on the way."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from xsalab import cli, report
from xsalab.cli import console
from xsalab.data import Tokenizer
from xsalab.experiment import run as runs
from xsalab.experiment import timing
from xsalab.experiment.plugins import _import_plugin
from xsalab.experiment.store import RunFolder
from xsalab.files import folder_lock
from xsalab.model.variant import VARIANTS
from xsalab.train import checkpoint

VERBS = [
    "plan", "data", "check", "run", "train", "status", "report", "compare", "align", "calibrate", "sample", "chat",
    "chatcore",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(runs, "LOCK_WAIT", 0.1)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(xsalab: Any, out: Path, no_page: None) -> Callable[..., Any]:
    """`xsalab run FILE --out OUT --jobs 1 …`, without drawing the page."""
    return lambda path, *more: xsalab("run", path, "--out", out, "--jobs", 1, *more)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_folder(out: Path, cell: str = "base.standard.s0", name: str = "tiny") -> RunFolder:
    return RunFolder(out / "experiments" / name / "runs" / cell)


# ------------------------------------------------------------------------------------------------ helps


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_an_example(verb: str, xsalab: Any) -> None:
    ran = xsalab(verb, "--help")
    assert ran.code == 0
    assert f"Example: xsalab {verb} " in ran.out


def test_the_verbs_are_listed(xsalab: Any) -> None:
    ran = xsalab("--help")
    assert ran.code == 0
    assert all(f"  {verb} " in ran.out for verb in VERBS)


@pytest.mark.parametrize(
    "arguments", [("fly",), ("run",), ("run", "x.toml", "--bogus"), ("run", "x.toml", "--jobs", "-1")]
)
def test_a_wrong_command_ends_with_2(arguments: tuple[str, ...], xsalab: Any) -> None:
    ran = xsalab(*arguments)
    assert ran.code == 2
    assert "Traceback" not in ran.err


# ------------------------------------------------------------------------------------- the whole pipeline


@pytest.mark.slow
def test_the_whole_pipeline_on_a_cpu(xsalab: Any, write_experiment: Any, out: Path) -> None:
    """F176: data, run, status, report, train and sample of a tiny experiment, with every control and the real page."""
    path = write_experiment(
        seeds=[0, 1, 2], eval__every=2, arms__bf16={"variant": "xsa", "train.dtype": "bfloat16"},
        controls={"null": True, "twin": True, "timing": True, "positive": {"optim.lr_scale": 0.05}},
    )  # fmt: skip
    data = xsalab("data", path, "--out", out, "--json")
    assert data.code == 0
    (corpus,) = json.loads(data.out)
    assert corpus["overlap"] == 0
    assert corpus["rows"][0]["context"] == 32
    assert "rows of 32 tokens" in xsalab("data", path, "--out", out).out

    ran = xsalab("run", path, "--out", out, "--jobs", 1)
    assert ran.code == 0, ran.err
    assert "16 of 16 runs to do, 1 at a time" in ran.err
    page = out / "experiments" / "tiny" / "report.html"
    assert f"report: {page}" in ran.out.replace("\n", "")
    assert page.read_text(encoding="utf-8").startswith("<!")

    status = json.loads(xsalab("status", path, "--out", out, "--json").out)
    assert {row["state"] for row in status} == {"finished"}
    assert "16 finished" in xsalab("status", path, "--out", out).out

    said = json.loads(xsalab("report", path, "--out", out, "--json").out)
    assert said["twin"] is True
    assert {row["treatment"] for row in said["contrasts"]} == {"xsa", "bf16", "null", "positive"}
    assert [cost["arm"] for cost in said["costs"]["costs"]] == ["xsa", "bf16", timing.CONTROL]
    assert xsalab("report", path, "--out", out).code == 0

    before = snapshot(out / "experiments" / "tiny" / "runs")
    trained = xsalab("train", path, "--out", out, "--arm", "bf16", "--seed", 1, "--json")
    assert json.loads(trained.out)["state"] == "finished"
    folder = json.loads(trained.out)["folder"]
    for arguments in ((), ("the ", "--tokens", 5), ("", "--temperature", 0)):
        assert xsalab("sample", folder, *arguments).code == 0
    sampled = json.loads(xsalab("sample", folder, "the ", "--tokens", 5, "--seed", 3, "--json").out)
    assert sampled["prompt"] == "the "
    assert len(sampled["tokens"]) <= 5
    assert snapshot(out / "experiments" / "tiny" / "runs") == before


def test_json_is_one_value_and_everything_else_goes_to_stderr(run: Any, write_experiment: Any) -> None:
    ran = run(write_experiment(seeds=[0]), "--json")
    assert ran.code == 0
    said = json.loads(ran.out, parse_constant=pytest.fail)
    assert said["complete"]
    assert said["report"].endswith("report.html")


def test_a_finished_experiment_is_extended(run: Any, write_experiment: Any, out: Path) -> None:
    """A seed and an arm are added: the runs that are there keep their bytes and their times."""
    assert run(write_experiment(seeds=[0])).code == 0
    runs_folder = out / "experiments" / "tiny" / "runs"
    files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in runs_folder.rglob("*.*") if path.is_file()}
    longer = write_experiment(seeds=[0, 5], arms__half={"variant": "xsa", "alpha": 0.5})
    ran = run(longer, "--json")
    assert ran.code == 0
    assert "4 of 6 runs to do" in ran.err
    assert json.loads(ran.out)["complete"]
    for path, (time_, content) in files.items():
        assert (path.stat().st_mtime_ns, path.read_bytes()) == (time_, content), path


def test_a_whole_experiment_runs_no_step_again(
    run: Any, write_experiment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experiment(seeds=[0])
    assert run(path).code == 0
    monkeypatch.setattr(runs, "train", pytest.fail)
    ran = run(path)
    assert ran.code == 0
    assert "runs to do" not in ran.err


def test_tensorboard_files_are_written_when_asked(run: Any, write_experiment: Any, out: Path) -> None:
    pytest.importorskip("tensorboard")
    path = write_experiment(seeds=[0], arms__xsa=None)
    assert run(path, "--tensorboard").code == 0
    assert list((run_folder(out).path / "tensorboard").glob("events.*"))


def test_status_before_and_while(xsalab: Any, run: Any, write_experiment: Any, out: Path) -> None:
    """Before any run everything waits; what is half done says how far it is. Nothing is written."""
    path = write_experiment(seeds=[0])
    ran = xsalab("status", path, "--out", out)
    assert ran.code == 0
    assert "2 waiting" in ran.out
    assert not out.exists()
    assert xsalab("train", path, "--out", out, "--arm", "xsa", "--seed", 0).code == 0
    rows = {row["run"]: row for row in json.loads(xsalab("status", path, "--out", out, "--json").out)}
    assert rows["base.standard.s0"]["state"] == "waiting"
    assert (rows["base.xsa.s0"]["state"], rows["base.xsa.s0"]["step"]) == ("finished", 4)


def test_report_before_any_run_says_how_to_begin(xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment()
    xsalab("report", path, "--out", out).refused(str(out / "experiments" / "tiny"), "nothing was run yet", "xsalab run")


def test_report_of_a_half_done_experiment(xsalab: Any, write_experiment: Any, out: Path, no_page: None) -> None:
    path = write_experiment(seeds=[0])
    assert xsalab("train", path, "--out", out, "--arm", "xsa", "--seed", 0).code == 0
    ran = xsalab("report", path, "--out", out, "--json")
    assert ran.code == 0
    said = json.loads(ran.out)
    assert not said["complete"]
    assert any("not finished" in line for line in said["warnings"])


def test_report_writes_texts_and_figures_for_a_paper(run: Any, xsalab: Any, write_experiment: Any, out: Path) -> None:
    """--format adds a file beside the page and --figures a folder, both named on the last lines and in the JSON."""
    path = write_experiment(seeds=[0])
    run(path)
    folder = out / "experiments" / "tiny"
    ran = xsalab("report", path, "--out", out, "--format", "latex")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, f"text: {folder / 'report.tex'}")
    assert "\\begin{tabular}" in (folder / "report.tex").read_text(encoding="utf-8")
    assert not (folder / "report.md").exists()
    said = json.loads(
        xsalab("report", path, "--out", out, "--format", "md", "--figures", out / "figures", "--json").out
    )
    assert said["report"] == str(folder / "report.html")
    text, *figures = said["files"]
    assert text == str(folder / "report.md")
    assert sorted(figures) == sorted(str(file) for file in (out / "figures").iterdir())
    assert "(<../../figures/intervals.svg>)" in Path(text).read_text(encoding="utf-8")
    ran = xsalab("report", path, "--out", out)
    assert ran.out.splitlines()[-1] == f"report: {folder / 'report.html'}"


def test_report_refuses_another_format_and_a_file_for_the_figures(
    run: Any, xsalab: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format before anything is read; a figures folder that is a file, with the remedy."""
    path = write_experiment(seeds=[0])
    xsalab("report", path, "--out", out, "--format", "pdf").refused("--format pdf", "use one of html, md, latex")
    run(path)
    monkeypatch.setattr("xsalab.paper.paper_figures", lambda *_: [])
    xsalab("report", path, "--out", out, "--figures", path).refused("--figures", str(path), "choose another folder")


def test_set_counts_for_every_verb(xsalab: Any, run: Any, write_experiment: Any, out: Path) -> None:
    """What was run with --set is reported with it, and not without: its numbers belong to another configuration."""
    path = write_experiment(seeds=[0, 1])
    sets = ("--set", "seeds=[0]", "--set", "train.tokens=512")
    assert run(path, *sets).code == 0
    assert "2 finished" in xsalab("status", path, "--out", out, *sets).out
    assert xsalab("report", path, "--out", out, *sets).code == 0
    xsalab("report", path, "--out", out).refused("another configuration", "train.tokens: 512 against 1024", "--set")


def test_train_of_a_run_that_does_not_exist(xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment()
    for arguments in (("xas", 0, "base"), ("xsa", 9, "base"), ("xsa", 0, "d4")):
        ran = xsalab(
            "train", path, "--out", out, "--arm", arguments[0], "--seed", arguments[1], "--point", arguments[2]
        )
        ran.refused("no such run; arms: standard, xsa; seeds: [0, 1]; points: base")


# ---------------------------------------------------------------------------------------------- plugins

PLUGIN = '''
import torch
from torch import nn
from xsalab import Variant, exclude_self, variant


@variant("mine")
class Mine(Variant):
    """Exclusion with a learned strength a head."""

    def __init__(self, site, start=0.0):
        super().__init__(site)
        self.strength = nn.Parameter(torch.full((site.heads,), float(start)))

    def forward(self, t, attend):
        y = attend(t.q, t.k, t.v)
        return exclude_self(y, t.v, self.strength.tanh())
'''
LEAK = """
from xsalab import Variant, variant


@variant("leak")
class Leak(Variant):
    def forward(self, t, attend):
        return attend(t.q, t.k, t.v).flip(1)
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Any:
    known = dict(VARIANTS)
    (tmp_path / "mine.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "leak.py").write_text(LEAK, encoding="utf-8")
    yield
    VARIANTS.clear()
    VARIANTS.update(known)
    _import_plugin.cache_clear()


@pytest.mark.slow
def test_a_variant_of_a_users_file_runs_in_workers(
    plugins: None, xsalab: Any, write_experiment: Any, out: Path, no_page: None
) -> None:
    """From 15 lines beside the TOML to a pair, in two processes; its path and hash are told before it runs."""
    path = write_experiment(
        seeds=[0], plugins=["mine.py"], arms__mine={"variant": "mine", "start": 0.5}, arms__xsa=None
    )
    ran = xsalab("run", path, "--out", out, "--jobs", 2, "--json")
    assert ran.code == 0, ran.err
    assert f"plugin {path.parent / 'mine.py'}, sha256 " in ran.err
    (row,) = json.loads(ran.out)["contrasts"]
    assert (row["treatment"], row["seeds"]) == ("mine", [0])
    assert run_folder(out, "base.mine.s0").read("config")["plugins"] == {"mine.py": PLUGIN}


def test_a_sample_of_a_plugins_run_tells_what_it_executes(
    plugins: None, xsalab: Any, write_experiment: Any, out: Path
) -> None:
    """The text comes from the run's folder, which may be anybody's: path and hash are printed first."""
    path = write_experiment(seeds=[0], plugins=["mine.py"], arms__mine={"variant": "mine"})
    assert xsalab("train", path, "--out", out, "--arm", "mine", "--seed", 0).code == 0
    (path.parent / "mine.py").unlink()
    ran = xsalab("sample", run_folder(out, "base.mine.s0").path, "--tokens", 2)
    assert ran.code == 0, ran.err
    assert "mine.py, sha256 " in ran.err


def test_status_and_report_run_no_plugin(plugins: None, xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment(plugins=["mine.py"], arms__mine={"variant": "mine"})
    (path.parent / "mine.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    assert xsalab("status", path, "--out", out).code == 0
    xsalab("report", path, "--out", out).refused("nothing was run yet")


def test_a_leaking_variant_is_refused_before_it_trains(
    plugins: None, run: Any, write_experiment: Any, out: Path
) -> None:
    """F008: the other arms' runs stay; the leaking one has no metrics."""
    path = write_experiment(seeds=[0], plugins=["leak.py"], arms__leak={"variant": "leak"})
    run(path).refused("variant 'leak' looks at future tokens")
    assert run_folder(out, "base.standard.s0").state == "finished"
    assert [entry.name for entry in run_folder(out, "base.leak.s0").path.iterdir()] == [".lock"]


def test_a_plugin_that_is_not_there(xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment(plugins=["none.py"])
    xsalab("run", path, "--out", out).refused(str(path), "plugins", "none.py", "No such file")
    for plugins, words in ((3, "plugins = 3"), ([3], "plugins = [3]")):
        xsalab("run", write_experiment(plugins=plugins), "--out", out).refused(words, "a list of Python files")


# ------------------------------------------------------------------------------------------- broken down


@pytest.mark.slow
def test_a_run_that_breaks_down(xsalab: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1; its arm's verdict is "diverged" with the count, its state is kept, the other arms are unaffected."""
    plain = runs.build_state

    def build(config: Any, ranks: Any) -> Any:
        state = plain(config, ranks)
        if config.optim.lr_scale == 9.0:  # as a rate far too high does, on larger models
            nats = state.model.token_nats
            state.model.token_nats = lambda tokens, targets: (
                nats(tokens, targets) * (float("nan") if state.step == 3 else 1.0)
            )
        return state

    monkeypatch.setattr(runs, "build_state", build)
    path = write_experiment(seeds=[0, 1, 2], arms__fast={"optim.lr_scale": 9.0})
    ran = xsalab("run", path, "--out", out, "--jobs", 1, "--json")
    assert ran.code == 1, ran.err
    said = json.loads(ran.out)
    assert said["complete"]
    verdicts = {row["treatment"]: row["verdict"]["word"] for row in said["contrasts"]}
    assert verdicts["fast"] == "diverged"
    assert verdicts["xsa"] != "diverged"
    fast = run_folder(out, "base.fast.s0")
    assert "step 3: loss nan" in fast.status["message"]
    assert (fast.path / "checkpoints" / "step-000000003" / "model.safetensors").is_file()
    ran = xsalab("train", path, "--out", out, "--arm", "fast", "--seed", 0)
    assert ran.code == 1
    assert "diverged" in xsalab("status", path, "--out", out).out


def test_a_rate_far_too_high_leaves_no_number_that_is_none(run: Any, write_experiment: Any) -> None:
    """F164: whether it breaks down or merely learns nothing, what is printed is JSON without NaN."""
    path = write_experiment(seeds=[0], arms__wild={"optim.lr_scale": 1e6}, train__tokens=256 * 8)
    ran = run(path, "--json")
    assert ran.code in (0, 1)
    json.loads(ran.out, parse_constant=pytest.fail)


# ---------------------------------------------------------------------------------------------- bad input


def test_a_file_that_is_none(xsalab: Any, tmp_path: Path, out: Path) -> None:
    """Missing, a folder, not TOML, not UTF-8: named, for every verb that reads one."""
    broken, latin = tmp_path / "broken.toml", tmp_path / "latin.toml"
    broken.write_text("seeds = [0,\n", encoding="utf-8")
    latin.write_bytes(b"name = '\xe9'")
    for verb in ("data", "run", "status", "report"):
        for path, words in (
            (tmp_path / "none.toml", "no such file"),
            (tmp_path, "is a folder"),
            (broken, "not TOML"),
            (latin, "not UTF-8"),
        ):
            xsalab(verb, path, "--out", out).refused(str(path), words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sedes": [0]}, "unknown field sedes = [0]; did you mean 'seeds'?"),
        ({"train__tokns": 1}, "train: unknown field tokns = 1; did you mean 'tokens'?"),
        ({"arms__xsa__alhpa": 1.0}, "arms.xsa: variant 'xsa' has no option 'alhpa'; did you mean 'alpha'?"),
        ({"arms__xsa__variant": "xas"}, "arms.xsa: variant = 'xas' is not known; did you mean 'xsa'?"),
        ({"arms__xsa__alpha": 1.5}, "arms.xsa: alpha = 1.5: must be in [0, 1]"),
        (
            {"arms__xsa__layers": "last:99"},
            "arms.xsa: layers = 'last:99': this model has 2 layers; a count from 1 to 2",
        ),
        ({"model__width": 33}, "width = 33 is not divisible by heads = 2: use width 32 or 34"),
        ({"train__batch_tokens": 1000}, "train.batch_tokens = 1000 is not a multiple of context = 32: use 992 or 1024"),
        ({"model__depth": "four"}, "model: depth = 'four': input should be a valid integer"),
        ({"seeds": [1.5]}, "seeds = [1.5]: a list of whole numbers"),
        ({"train__tokens": 3.7}, "train: tokens = 3.7: input should be a valid integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_in_the_file(
    changes: dict[str, Any], words: str, xsalab: Any, write_experiment: Any, out: Path
) -> None:
    path = write_experiment(**changes)
    xsalab("run", path, "--out", out).refused(str(path), words)
    assert not out.exists()


def test_a_mistake_in_set(xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment()
    for assignment, words in (
        ("train.tokns=3", "unknown field tokns = 3; did you mean 'tokens'?"),
        ("arms.xas.alpha=1", "--set arms.xas: no such arm"),
        ("tokens", "--set 'tokens': write it as section.field=value"),
    ):
        xsalab("run", path, "--out", out, "--set", assignment).refused(words)
    assert not out.exists()


def text_file(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def parquet_folder(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"text": [f"a text {n} " * 50 for n in range(9)]}), folder / f"shard_{number}.parquet")
    path = folder / "shard_0.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder


SOURCES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "missing folder": (lambda home: home / "none", ("data.source", "none", "no such file or folder")),
    "empty folder": (lambda home: text_file(home / "empty", ".hidden", b""), ("data.source", "the folder is empty")),
    "no text in it": (lambda home: text_file(home / "x", "a.png", b"x"), ("data.source", "none of its 1 files")),
    "truncated parquet": (lambda home: parquet_folder(home / "p"), ("shard_0.parquet", "not a complete Parquet file")),
    "invalid UTF-8": (
        lambda home: text_file(home / "u", "a.txt", b"fine\nnot \xff fine"), ("a.txt", "not UTF-8 at byte 9 (line 2)"),
    ),
    "damaged gzip": (
        lambda home: text_file(home / "g", "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9]),
        ("a.jsonl.gz", "damaged or cut off"),
    ),
    "not JSON": (lambda home: text_file(home / "j", "a.jsonl", b'{"text": "a"}\n{'), ("a.jsonl", "line 2 is not JSON")),
    "too small for validation": (
        lambda home: text_file(home / "s", "a.txt", b"one document"),
        ("data.source", "too small for validation", "data.validation"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_cannot_be_used(name: str, xsalab: Any, write_experiment: Any, tmp_path: Path, out: Path) -> None:
    """F059, F060: the file or field, what is wrong, and what would do; no half corpus is left behind."""
    make, words = SOURCES[name]
    path = write_experiment(data__source=make(tmp_path))
    xsalab("run", path, "--out", out).refused(*words)
    assert not list(out.glob("corpora/*/"))
    assert not list(out.glob("experiments/*/runs"))


def test_a_vocabulary_that_does_not_fit(xsalab: Any, write_experiment: Any, out: Path, tmp_path: Path) -> None:
    """F072: larger than the text allows, smaller than the bytes, or a tokenizer of another size."""
    xsalab("run", write_experiment(model__vocab_size=50_000), "--out", out).refused(
        "vocab_size = 50000", "the training text allows at most"
    )
    xsalab("run", write_experiment(model__vocab_size=100), "--out", out).refused("vocab_size = 100", "at least 266")
    other = tmp_path / "tokenizer.json"
    Tokenizer.train(["some words of a text " * 9], 270).save(other)
    xsalab("run", write_experiment(data__tokenizer=other), "--out", out).refused(
        "vocab_size = 300", str(other), "has 270 tokens; use that number"
    )
    other.write_text("{}", encoding="utf-8")
    xsalab("run", write_experiment(data__tokenizer=other), "--out", out).refused(str(other), "not a tokenizer.json")


def test_a_corpus_that_was_changed_is_refused(run: Any, write_experiment: Any, out: Path) -> None:
    """A tokenizer of another experiment copied into the prepared corpus: found by its hash, before anything trains."""
    assert run(write_experiment(seeds=[0], arms__xsa=None)).code == 0
    (folder,) = out.glob("corpora/*/")
    Tokenizer.train(["other words entirely " * 50], 270).save(folder / "tokenizer.json")
    run(write_experiment(seeds=[0, 1])).refused("tokenizer.json", "delete", "prepare again")


def test_a_batch_larger_than_the_corpus(xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment(train__batch_tokens=32_768)
    xsalab("run", path, "--out", out).refused(str(path), "train.batch_tokens = 32768", "rows", "more text")


# ------------------------------------------------------------------------------------------ folders, disks


def test_a_folder_of_another_configuration(run: Any, write_experiment: Any, out: Path) -> None:
    """F099: found before any new run trains, for a finished and for a stopped run; nothing is lost."""
    assert run(write_experiment(seeds=[0])).code == 0
    before = snapshot(out / "experiments" / "tiny" / "runs")
    other = write_experiment(seeds=[0, 1, 2], optim__lr_scale=2.0)
    run(other).refused("base.standard.s0", "another configuration", "optim.lr_scale: 1.0 against 2.0", "another name")
    assert snapshot(out / "experiments" / "tiny" / "runs") == before


def test_a_second_process_in_the_same_experiment(run: Any, xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment(seeds=[0])
    folder = out / "experiments" / "tiny"
    folder.mkdir(parents=True)
    with folder_lock(folder, "experiment"):
        run(path).refused(str(folder), "another process works on this experiment; wait for it or stop it")
        assert not (folder / "runs").exists()
        assert xsalab("status", path, "--out", out).code == 0  # looking is always possible
    assert run(path).code == 0


def test_a_file_where_a_folder_is_needed(run: Any, write_experiment: Any, out: Path) -> None:
    out.write_text("mine", encoding="utf-8")
    run(write_experiment()).refused(str(out))
    assert out.read_text(encoding="utf-8") == "mine"
    out.unlink()
    (out / "experiments").mkdir(parents=True)
    (out / "experiments" / "tiny").write_text("mine", encoding="utf-8")
    run(write_experiment()).refused("tiny", "a file stands where a folder is needed", "--out")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_nothing(
    code: int, run: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a read-only file system answers: the folder and the remedy are named, no half file is left."""

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint.os, "replace", refuse)
    run(write_experiment()).refused("experiment.toml", "cannot write here", "--out")
    assert [name for name in snapshot(out) if not name.endswith(".lock")] == []


def test_a_full_disk(run: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F174: needed and free bytes, exit code 2; with room again the same command finishes the rest."""
    plain, calls = checkpoint.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    path = write_experiment(seeds=[0], arms__xsa=None)
    run(path).refused("safetensors", "disk full: ", "bytes needed", "free; make room, and the same command continues")
    assert run_folder(out).status["state"] == "failed"
    assert run(path).code == 0
    assert run_folder(out).status["resumes"] == 1


def test_a_sample_of_what_is_no_run(xsalab: Any, tmp_path: Path) -> None:
    """A folder that is not there, and paths too short to be a run's."""
    for folder in (tmp_path / "none", Path("/"), tmp_path):
        xsalab("sample", folder).refused(str(folder), "no run here", "out/experiments/NAME/runs")


def test_a_sample_of_an_unfinished_run(xsalab: Any, write_experiment: Any, out: Path, monkeypatch: Any) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(runs, "evaluate", fails)
    path = write_experiment()
    with pytest.raises(MemoryError):
        xsalab("train", path, "--out", out, "--arm", "xsa", "--seed", 0)
    folder = run_folder(out, "base.xsa.s0").path
    xsalab("sample", folder).refused(str(folder), "not finished (failed)")


def test_a_damaged_record_is_named(run: Any, xsalab: Any, write_experiment: Any, out: Path) -> None:
    path = write_experiment(seeds=[0])
    assert run(path).code == 0
    target = run_folder(out).path
    for name, words in (
        ("scores.parquet", "not a whole Parquet file"),
        ("status.json", "damaged"),
        ("fingerprint.json", "damaged"),
    ):
        content = (target / name).read_bytes()
        (target / name).write_bytes(content[: len(content) // 2])
        xsalab("report", path, "--out", out).refused(name, words)
        (target / name).write_bytes(content)
    assert xsalab("report", path, "--out", out).code == 0


# ------------------------------------------------------------------------------------------------- main()


def test_a_fault_of_ours_keeps_its_traceback(
    xsalab: Any, write_experiment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any, **__: Any) -> None:
        raise TypeError("ours")

    monkeypatch.setattr(cli.experiments, "load", fault)
    with pytest.raises(TypeError, match="ours"):
        xsalab("status", write_experiment())


def test_a_mistake_shows_its_traceback_when_asked(xsalab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XSALAB_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no such file"):
        xsalab("status", tmp_path / "none.toml")


def test_an_error_of_the_system_names_its_file() -> None:
    assert cli.message(OSError(errno.ENOSPC, "disk full", "/a/b")) == "/a/b: disk full"
    assert cli.message(OSError("no network")) == "no network"
    assert cli.message(ValueError("x")) == "x"


def test_ctrl_c_ends_with_130_and_the_run_goes_on(
    xsalab: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT in the middle of training: one line, exit code 130; the same command continues."""
    path, before = write_experiment(), signal.getsignal(signal.SIGINT)

    class Interrupts(runs.Hook):
        def after_step(self, state: Any, metrics: Any) -> None:
            if metrics.step == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runs, "Report", lambda *_: Interrupts())
    arguments = ("train", path, "--out", out, "--arm", "xsa", "--seed", 0)
    ran = xsalab(*arguments)
    assert ran.code == 130
    assert ran.err.strip().endswith("interrupted; the same command continues where it stopped")
    assert "Traceback" not in ran.err
    assert signal.getsignal(signal.SIGINT) == before
    monkeypatch.undo()
    assert xsalab(*arguments).code == 0
    assert run_folder(out, "base.xsa.s0").status["resumes"] == 1


def test_a_warning_is_one_line(xsalab: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged checkpoint is passed over with a line, not with the source of the warning."""
    path = write_experiment(seeds=[0], train__checkpoint_steps=1)

    class Stops(runs.Hook):
        def after_step(self, state: Any, metrics: Any) -> None:
            if metrics.step == 2:
                raise ValueError("stopped")

    arguments = ("train", path, "--out", out, "--arm", "xsa", "--seed", 0)
    with monkeypatch.context() as patched:
        patched.setattr(runs, "Report", lambda *_: Stops())
        xsalab(*arguments).refused("stopped")
    folder = run_folder(out, "base.xsa.s0").path / "checkpoints" / "step-000000002"
    (folder / "model.safetensors").write_bytes(b"")
    ran = xsalab(*arguments)
    assert ran.code == 0
    assert "warning: " in ran.err
    assert "the checkpoint before it is used" in ran.err
    assert "warnings.warn" not in ran.err


def test_the_page_is_written_by_report(xsalab: Any, run: Any, write_experiment: Any, out: Path) -> None:
    """run and report hand the same experiment to the page."""
    seen = []
    path = write_experiment(seeds=[0])
    assert run(path).code == 0
    plain = report.write_report
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report, "write_report", lambda *a: (seen.append(a[0].name), plain(*a))[1])
        assert xsalab("report", path, "--out", out).code == 0
    assert seen == ["tiny"]


def test_a_progress_bar_on_a_terminal_has_an_eta(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(console, "notes", Console(stderr=True, force_terminal=True, width=120))
    with console.bar("training", 10) as update:
        update(4, "training xsa")
        time.sleep(0.2)
    assert "training xsa" in capsys.readouterr().err


def test_status_of_a_live_run_is_where_its_log_is(write_experiment: Any, xsalab: Any, out: Path) -> None:
    """status.json says where the process began; three logged steps later the run is at step 3."""
    path, folder = write_experiment(), run_folder(out)
    folder.path.mkdir(parents=True)
    folder.write("status", {"state": "running", "step": 0, "steps": 9})
    (folder.path / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "loss": 5.0}}\n' for s in range(3)))
    rows = json.loads(xsalab("status", str(path), "--out", str(out), "--json").out)
    row = next(row for row in rows if row["run"] == "base.standard.s0")
    assert (row["state"], row["step"]) == ("running", 3)
    assert all(isinstance(other["steps"], int) for other in rows), "known before a run begins"


# ------------------------------------------------------------------- seeds at looks, runs for equal time


@pytest.mark.slow
def test_seeds_are_added_at_looks_until_the_cap(xsalab: Any, run: Any, write_experiment: Any, out: Path) -> None:
    """Noise of two-step runs and a margin far below it: all looks are taken; every verb knows the seeds since."""
    path = write_experiment(
        primary={"contrast": "xsa - standard", "margin": 1e-9},
        train__tokens=512,
        arms__xsa={"variant": "xsa", "alpha": 1e-4},
    )
    ran = run(path, "--until-decided", "--max-seeds", 5)
    assert "the look at 4 of at most 5 seeds" in ran.err
    assert "8 of 8 runs to do" in ran.err
    said = json.loads(xsalab("report", path, "--out", out, "--json").out)
    assert said["sequential"]["looks"] == [4, 5]
    looked = said["sequential"]["at"]
    states = {row["run"]: row["state"] for row in json.loads(xsalab("status", path, "--out", out, "--json").out)}
    assert states == {f"base.{arm}.s{seed}": "finished" for seed in range(looked) for arm in ("standard", "xsa")}
    if looked == 5:
        assert "2 of 10 runs to do" in ran.err
    assert "(sequential: the look at" in " ".join(ran.out.split())
    run(path, "--until-decided", "--max-seeds", 9).refused("--max-seeds 9", "a cap of 5 seeds")
    again = run(path)
    assert "runs to do" not in again.err  # what was decided at looks stays decided at them
    assert "the look at" in again.err


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, ("--max-seeds", 6), ("--max-seeds 6", "the cap of --until-decided")),
        ({}, ("--until-decided",), ("primary.contrast is empty", "--until-decided needs the contrast")),
        (
            {"primary": {"contrast": "xsa - standard"}},
            ("--until-decided", "--max-seeds", 3),
            ("3", "the first look is at 4"),
        ),
        (
            {"primary": {"contrast": "xsa - standard"}, "seeds": list(range(7))},
            ("--until-decided", "--max-seeds", 6),
            ("more than the cap of 6", "raise --max-seeds"),
        ),
    ],
)
def test_looks_that_cannot_be_taken_are_refused(
    run: Any, write_experiment: Any, changes: dict[str, Any], arguments: tuple[Any, ...], words: tuple[str, ...]
) -> None:
    run(write_experiment(**changes), *arguments).refused(*words)


def test_a_look_that_is_complete_leaves_the_next_its_jobs(
    xsalab: Any, write_experiment: Any, out: Path, no_page: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs side by side follow from what is to do at each look: nothing to do at one is no choice for the next."""
    from xsalab.experiment import stages, workers

    asked: list[int] = []
    carry_out = workers.run_tasks

    def recorded(pending: Any, slots: Any, event: Any) -> Any:
        asked.append(len(slots))
        return carry_out(pending, slots[:1], event)

    monkeypatch.setattr(workers, "default_jobs", lambda threads, pending, *_: max(1, min(2, pending)))
    monkeypatch.setattr(workers, "run_tasks", recorded)
    monkeypatch.setattr(stages, "decided", lambda content: False)
    path = write_experiment(seeds=[0, 1, 2, 3], primary={"contrast": "xsa - standard"}, train__tokens=512)
    xsalab("run", path, "--out", out)
    xsalab("run", path, "--out", out, "--until-decided", "--max-seeds", 5)
    assert asked == [2, 2]


@pytest.mark.slow
def test_equal_time_runs_the_slower_arm_again(
    xsalab: Any, run: Any, write_experiment: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured here: which arm is slower is chance at this size; the further runs follow from what was measured."""
    monkeypatch.setattr(timing, "busy_share", lambda: 0.0)
    path = write_experiment(
        seeds=[0, 1, 2], controls={"timing": True, "null": False, "twin": False},
        equal_time={"rerun": True, "slope": True, "share": 0.75}, train__tokens=2048,
    )  # fmt: skip
    ran = run(path)
    assert ran.code == 0, ran.err
    stored = json.loads((out / "experiments" / "tiny" / "equal_time.json").read_text(encoding="utf-8"))
    (ratio,) = stored["ratios"]
    assert ratio["steps"] == max(1, round(8 / max(ratio["ratio"], 1 / ratio["ratio"])))
    finished = {row["run"].split(".")[1] for row in json.loads(xsalab("status", path, "--out", out, "--json").out)}
    assert finished == {"standard", "xsa", "standard@75", *stored["arms"]}
    said = json.loads(xsalab("report", path, "--out", out, "--json").out)
    assert said["complete"]
    (row,) = said["equal_time"]
    assert row["slope"]["share"] == 0.75
    assert "at equal time" in " ".join(ran.out.split())
