"""A user's own trainer: what is run, what is read back, what is refused, and that nothing is left running."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from toml_tables import write_tables
from xsalab.experiment import command_run
from xsalab.experiment.command import CommandRun
from xsalab.experiment.command_run import CommandTask, Rows, run_command
from xsalab.experiment.design import Cell, Experiment, combinations, contrasts
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.outcome import outcome
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.store import RunFolder, RunStore
from xsalab.experiment.workers import run_tasks
from xsalab.stats import PairTable, mean_difference

# Every word adds to the loss. The seed and the sum decide the noise, so that arms differ and a twin does not.
TRAINER = """
import json, os, random, sys
from pathlib import Path
seed, out, words = sys.argv[1], Path(sys.argv[2]), [float(word) for word in sys.argv[3:]]
shift = sum(words) + float(os.environ.get("SHIFT", 0))
draw = random.Random(f"{seed} {shift}")
items = [1 + 0.2 * i + shift + 0.01 * draw.gauss(0, 1) + 0.1 * random.Random(seed).random() for i in range(4)]
final = sum(items) / 4
rows = [{"step": step, "loss": final + 2 - step, "lr": 0.1} for step in range(3)]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(out / "scores.jsonl").write_text("".join(json.dumps({"item": i, "value": v}) + "\\n" for i, v in enumerate(items)))
for row in rows:
    print(f"step {row['step']}/3 | loss: {row['loss']!r} | time: now")
"""
PATTERN = r"step (?P<step>\d+)/\d+ \| loss: (?P<loss>\S+)"
BASE: dict[str, Any] = {
    "engine": "command",
    "seeds": [0, 1, 2],
    "baseline": "plain",
    "primary": {"contrast": "worse - plain", "metric": "loss", "margin": 0.01},
    "command": {
        "run": ["{python}", "train.py", "{seed}", "{out}", "{options}"],
        "metrics": {"jsonl": "metrics.jsonl"},
    },
    "arms": {"plain": {"options": ["0"]}, "worse": {"options": ["0.5"]}},
    "controls": {"twin": False},
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes train.py and an experiment around it; changes by dotted name, ``__`` for the dots, None takes away."""

    def make(trainer: str = TRAINER, **changes: Any) -> Path:
        (tmp_path / "train.py").write_text(trainer, encoding="utf-8")
        return write_tables(tmp_path / "own.toml", BASE, changes)

    return make


def carry_out(path: Path, jobs: int = 1) -> tuple[Experiment, RunStore]:
    experiment = load_experiment(path)
    out = path.parent / "out"
    store, _ = begin_experiment(experiment, out)
    run_tasks(tasks(experiment, out), [()] * jobs, lambda cell, content: None)
    return experiment, store


def result(path: Path) -> dict[str, Any]:
    return outcome(*carry_out(path))


def first_task(path: Path) -> CommandTask:
    task = tasks(load_experiment(path), path.parent / "out")[0]
    assert isinstance(task, CommandTask)
    return task


def written(run: RunFolder, file: str, name: str) -> list[float]:
    """A column of what the trainer wrote to {out}, read without any code of ours."""
    lines = (run.path / "out" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)[name] for line in lines]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


# ------------------------------------------------------------------------------------------- the command line


def test_placeholders_options_and_environment_are_filled(write: Write, tmp_path: Path) -> None:
    """Every name in braces; options spliced at their place; the arm's variables over the command's."""
    path = write(
        command__run=["{python}", "{here}/train.py", "--seed={seed}", "{options}", "{run}", "{point}/{arm}", "{lr}"],
        command__env={"SEED": "{seed}", "WHERE": "{out}", "ON": True, "SHIFT": 1},
        command__values={"lr": 0.1},
        arms={"plain": {"options": ["-a", "x{lr}"]}, "worse": {"lr": 1e-5, "env": {"SHIFT": "{arm}"}}},
    )
    experiment = load_experiment(path)
    runs = {
        arm: experiment.command.resolve(experiment, Cell("base", arm, 2)).filled(f"base.{arm}.s2", Path("o"), tmp_path)
        for arm in ("plain", "worse")
        if experiment.command
    }
    start = [sys.executable, f"{tmp_path}/train.py", "--seed=2"]
    assert runs["plain"][0] == [*start, "-a", "x0.1", "base.plain.s2", "base/plain", "0.1"]
    assert runs["plain"][1] == {"SEED": "2", "WHERE": "o", "ON": "true", "SHIFT": "1"}
    assert runs["worse"][0] == [*start, "base.worse.s2", "base/worse", "1e-05"]
    assert runs["worse"][1]["SHIFT"] == "worse"


def test_braces_that_are_no_placeholder_stay() -> None:
    """JSON, a format of the trainer's own, and a doubled name."""
    words = ('{"a": {"b": 1}}', "{{seed}}", "{0}", "{:.2f}", "{seed}{seed}")
    run = CommandRun(7, "a", "p", words, (), {}, {}, ".", None, "s", "", "loss")
    assert run.filled("r", Path("o"), Path("h"))[0] == ['{"a": {"b": 1}}', "{seed}", "{0}", "{:.2f}", "77"]


def test_factors_and_points_set_what_an_arm_sets(write: Write) -> None:
    """Options of crossed factors are all taken, the point's first; a value that is a number has a curve and a trend."""
    path = write(
        arms=None, baseline=None, primary__contrast="a-0_1 - a-0",
        command__run=["{python}", "train.py", "{seed}", "{out}", "{options}", "{a}", "{width}"],
        factors={"a": [0.0, 0.1], "x": {"off": {"options": ["1"]}, "on": {"options": ["2"], "env": {"X": 1}}},
                 "y": {"no": {"options": ["3"]}}},
        points=[{"name": "small", "options": ["9"], "width": 0.5}, {"name": "big", "width": 2}],
    )  # fmt: skip
    path.write_text(path.read_text().replace("a-0_1 - a-0", "a-0_1-off - a-0-off"))
    experiment = load_experiment(path)
    assert list(experiment.arms) == ["a-0-off", "a-0-on", "a-0_1-off", "a-0_1-on"]
    assert experiment.command is not None
    run = experiment.command.resolve(experiment, Cell("small", "a-0_1-on", 0))
    assert (run.options, run.values, run.env) == (("9", "2", "3"), {"width": 0.5, "a": 0.1}, {"X": "1"})
    names = [c.name for c in combinations(experiment)]
    assert "(a-0_1 - a-0) x (on - off)" in names
    assert "a-0_1-off - a-0-off over width" in names


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "engine": ({"engine": "shell"}, r"own.toml: engine = 'shell': use 'xsalab' or 'command'"),
    "no engine": ({"engine": None}, r'\[command\] is there, and engine is not "command"'),
    "section of ours": ({"model": {"depth": 2}}, r"unknown field model = .*of engine"),
    "a shell's line": (
        {"command__run": "python train.py {seed}"},
        r'no shell reads it; .*list of words, \["python", "train.py", "{seed}"\]',
    ),
    "no words": ({"command__run": []}, r"command: run = \[\]: write the program"),
    "unknown placeholder": (
        {"command__run": ["x", "{sed}", "{options}"]},
        r"arms.plain: command: {sed} is no placeholder; known: seed, arm",
    ),
    "options inside a word": (
        {"command__run": ["x", "--o={options}", "{seed}"]},
        r"run: '--o={options}': {options} becomes several words",
    ),
    "no place for options": (
        {"command__run": ["x", "{seed}"]},
        r"arms.plain: options = \['0'\]: command.run has no word \"{options}\"",
    ),
    "options as text": ({"arms__plain": {"options": "--a 1"}}, r"arms.plain: options = '--a 1': a list of words"),
    "a value without effect": ({"arms__worse": {"lr": 2}}, r"arms.worse: lr = 2 has no effect: no {lr}"),
    "a default without effect": ({"command__values": {"lr": 2}}, r"command.values.lr has no effect"),
    "a value of one arm alone": (
        {"command__run": ["x", "{seed}", "{lr}"], "arms": {"plain": {}, "worse": {"lr": 2}}},
        r"arms.plain: command: {lr} is no placeholder",
    ),
    "a taken name": ({"arms__worse": {"seed": 2}}, r"arms.worse: seed = 2: this name is taken"),
    "a table as value": ({"arms__worse": {"lr": {"a": 1}}}, r"arms.worse: lr = .*a text or a number"),
    "no seed": ({"command__run": ["x", "{options}"]}, r"nothing holds {seed}, so every run would be the same"),
    "no metrics": ({"command__metrics": None}, r"nothing says where the result is: set metrics, scores or both"),
    "two sources": ({"command__metrics": {"jsonl": "a", "pattern": "(?P<loss>x)"}}, r"give either jsonl.* or pattern"),
    "no group": ({"command__metrics": {"pattern": r"step (?P<step>\d+)"}}, r"names no metric"),
    "no expression": ({"command__metrics": {"pattern": "("}}, r"no regular expression"),
    "scores elsewhere": (
        {"command__scores": "/elsewhere/scores.jsonl"},
        r"command: scores = '/elsewhere/scores.jsonl': a file in {out}, which is each run's own",
    ),
    "scores above": ({"command__scores": "a/../../s.jsonl"}, r"scores = 'a/../../s.jsonl': a file in {out}"),
    "metrics above": ({"command__metrics": {"jsonl": "../m.jsonl"}}, r"jsonl = '../m.jsonl': a file in {out}"),
    "metrics on a drive": ({"command__metrics": {"jsonl": "C:\\m.jsonl"}}, r"jsonl = 'C:.*': a file in {out}"),
    "metrics as folder": ({"command__metrics": {"jsonl": "."}}, r"jsonl = '.': a file in {out}"),
    "unit": ({"command__unit": "bits"}, r"unit = 'bits': is that of scores"),
    "minutes": ({"command__minutes": -1}, r"minutes = -1.0: a time limit, or 0"),
    "unknown field": ({"command__fodler": "."}, r"unknown field fodler = '.'; did you mean 'folder'"),
    "no metric": ({"primary__metric": None}, r"primary.metric is missing: name the metric that decides"),
    "null as true": ({"controls__null": True}, r"null = True: only your trainer can be asked for it"),
    "timing": ({"controls__timing": True}, r"timing = True: step times of a command are not measured"),
    "contrast": ({"primary__contrast": "a - b"}, r"primary.contrast = 'a - b' is no contrast"),
    "layer study": ({"factors": {"layers": "first-k"}}, r"factors.layers = 'first-k': a list of values"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named_when_the_file_is_read(name: str, write: Write) -> None:
    """Not after hours of runs: file, field, value and remedy."""
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        load_experiment(write(**changes))


def test_a_missing_folder_and_a_missing_program_are_named(write: Write) -> None:
    with pytest.raises(ValueError, match=r"own.toml: command.folder = 'elsewhere': no folder .*elsewhere"):
        carry_out(write(command__folder="elsewhere"))
    with pytest.raises(ValueError, match=r"base.plain.s0: cannot start no-such-program: No such file"):
        carry_out(write(command__run=["no-such-program", "{seed}", "{options}"]))


# ------------------------------------------------------------------------------------------- what is read back


@pytest.mark.parametrize(
    "source", [{"jsonl": "metrics.jsonl"}, {"pattern": PATTERN}, {"pattern": ["loss", PATTERN][1:]}]
)
def test_the_last_value_of_the_metric_is_the_result(source: dict[str, Any], write: Write) -> None:
    """From JSON lines or from the output, the same; the interval is the plain t interval over seeds."""
    path = write(command__metrics=source)
    experiment, store = carry_out(path)
    values = {}
    for arm in ("plain", "worse"):
        for seed in (0, 1, 2):
            run = store.run(Cell("base", arm, seed))
            losses = written(run, "metrics", "loss")
            values[arm, seed] = losses[-1]
            assert run.status["value"] == losses[-1]
            assert [row["loss"] for row in run.metrics()] == losses
            assert (run.path / "log.txt").read_text().count("| time: now") == 3
    row = outcome(experiment, store)["contrasts"][0]
    worse, plain = ([values[arm, seed] for seed in (0, 1, 2)] for arm in ("worse", "plain"))
    low, high = stats.ttest_rel(worse, plain).confidence_interval(0.95)
    assert row["estimate"]["low"] == pytest.approx(low, rel=1e-9)
    assert row["estimate"]["high"] == pytest.approx(high, rel=1e-9)
    assert row["verdict"]["word"] == "worse"
    assert "Δ loss +0.5" in row["sentence"]
    assert "bpb" not in json.dumps(row, ensure_ascii=False)


def test_scores_of_items_give_the_two_way_interval(write: Write) -> None:
    """The estimate is that of the scores as the trainer wrote them; the run's value is their weighted mean."""
    path = write(command__scores="scores.jsonl", command__metrics=None)
    experiment, store = carry_out(path)
    sides = {
        arm: np.array([written(store.run(Cell("base", arm, seed)), "scores", "value") for seed in (0, 1, 2)])
        for arm in ("plain", "worse")
    }
    table = PairTable((0, 1, 2), ("0", "1", "2", "3"), sides["plain"], sides["worse"], np.ones(4), "loss", 1.0, "items")
    row = outcome(experiment, store)["contrasts"][0]
    expected = mean_difference(table)
    assert (row["estimate"]["low"], row["estimate"]["high"]) == pytest.approx((expected.low, expected.high))
    assert store.run(Cell("base", "worse", 1)).status["value"] == pytest.approx(sides["worse"][1].mean())
    assert row["estimate"]["item_word"] == "items"


def test_nats_over_bytes_are_told_as_bits(write: Write) -> None:
    """unit = "bits": Σ value / (ln 2 · Σ weight)."""
    trainer = TRAINER.replace('{"item": i, "value": v}', '{"item": i, "value": v, "weight": i + 1}')
    path = write(trainer, command__scores="scores.jsonl", command__unit="bits", seeds=[0])
    _, store = carry_out(path)
    run = store.run(Cell("base", "plain", 0))
    nats = sum(written(run, "scores", "value"))
    assert run.status["value"] == pytest.approx(nats / math.log(2) / (1 + 2 + 3 + 4))


def test_of_a_repeated_step_the_last_value_counts_and_it_is_said(write: Write) -> None:
    trainer = TRAINER.replace("for row in rows:", "for row in [*rows, {'step': 2, 'loss': 9.0}]:")
    found = result(write(trainer, command__metrics={"pattern": PATTERN}, seeds=[0]))
    assert {run["value"] for run in found["runs"]} == {9.0}
    assert any("a step's value came again 1 times: the last one counts" in line for line in found["warnings"])


def test_rows_without_a_step_take_the_one_before_or_their_number() -> None:
    rows = Rows("step")
    for row in ({"a": 1.0}, {"a": 2.0}):
        rows.add(row, "here")
    assert rows.table() == [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}]
    for row in ({"step": 5, "a": 3.0, "name": "x", "on": True}, {"b": 4.0}):
        rows.add(row, "here")
    assert rows.table()[-1] == {"step": 5, "a": 3.0, "b": 4.0}
    assert (rows.last, rows.repeated) == ({"a": 3.0, "b": 4.0}, 0)
    with pytest.raises(ValueError, match=r"there, line 3: step = 1.5 is no whole number from 0"):
        rows.add({"step": 1.5}, "there, line 3")


CONSOLE = r"step (?P<step>\S+) \| loss: (?P<loss>\S+) \| tok/sec: (?P<speed>\S+)"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.5", 1.5), ("1.5,", 1.5), ("-2e-3", -0.002), (".5", 0.5), ("1,5", None), ("1_5", None), ("1,062", None)],
)
def test_a_number_with_a_comma_is_no_number(text: str, value: float | None, write: Write, tmp_path: Path) -> None:
    """1,5 may be 1.5 or 15: refused with the text. A comma that ends the number belongs to the sentence."""
    print_ = f"print('step 3 | loss: {text} | tok/sec: 1,062')"
    path = write(print_, command__metrics={"pattern": CONSOLE}, seeds=[0])
    if value is None:
        note = r"no number \(a comma may mean two things\), in" if "," in text else "no number, in"
        with pytest.raises(ValueError, match=rf"loss = '{text}' is {note} the line 'step 3 \| loss: {text}"):
            carry_out(path)
        return
    _, store = carry_out(path)
    run = store.run(Cell("base", "plain", 0))
    assert run.status["value"] == value
    assert run.metrics() == [{"step": 3, "loss": value}]  # the speed, which nobody asked for, is left out


def test_only_the_metric_that_is_asked_for_must_be_readable(write: Write) -> None:
    """nanochat's "tok/sec: 1,062" ends no run; a thousand steps with a separator are a thousand."""
    print_ = "print('step 999 | loss: 2.5 | tok/sec: 1,062')\nprint('step 1,000 | loss: 1.5 | tok/sec: 900')"
    _, store = carry_out(write(print_, command__metrics={"pattern": CONSOLE}, seeds=[0]))
    rows = store.run(Cell("base", "plain", 0)).metrics()
    assert rows == [{"step": 999, "loss": 2.5}, {"step": 1000, "loss": 1.5, "speed": 900.0}]


@pytest.mark.parametrize("step", ["1,5", "1_5", "1.5", "-1", "x"])
def test_a_step_that_is_no_whole_number_is_named(step: str, write: Write) -> None:
    path = write(f"print('step {step} | loss: 2.5 | tok/sec: 1')", command__metrics={"pattern": CONSOLE}, seeds=[0])
    with pytest.raises(ValueError, match=f"step = '{step}' is no whole number from 0"):
        carry_out(path)


@pytest.mark.parametrize("text", ["1,5", "1_5", "1.5"])
def test_a_text_for_the_metric_is_refused_and_for_others_left_out(text: str, write: Write) -> None:
    """In JSON lines too: a value in quotes is no number, whatever it looks like."""
    trainer = TRAINER.replace('"lr": 0.1', f'"lr": "{text}"')
    _, store = carry_out(write(trainer, seeds=[0]))
    assert all("lr" not in row for row in store.run(Cell("base", "plain", 0)).metrics())
    with pytest.raises(ValueError, match=rf"metrics.jsonl, line 1: loss = '{text}' is no number.*without quotes"):
        carry_out(write(TRAINER.replace('"loss": final + 2 - step', f'"loss": "{text}"'), seeds=[0, 1]))


def test_a_command_that_ignores_its_seed_decides_nothing(write: Write) -> None:
    """Every seed gives one and the same loss, in both arms: no verdict, equal arms or not."""
    for shift in ("shift", "0"):
        trainer = TRAINER.replace("final = sum(items) / 4", f"final = 2.0 + {shift}")
        path = write(trainer, name=f"still-{shift}")
        row = result(path)["contrasts"][0]
        assert row["verdict"]["word"] == "not decidable"
        assert row["verdict"]["reason"] == "no spread: every seed gave the same result; are the seeds in use?"


SCORES = 'open(out / "scores.jsonl", "a")'
OF_ITEMS = {"command__scores": "scores.jsonl"}


@pytest.mark.parametrize(
    ("change", "changes", "words"),
    [
        (
            "",
            {"primary__metric": "acc"},
            r"primary.metric = 'acc': the file metrics.jsonl in {out} gave no such value \(found: loss, lr\)",
        ),
        (
            "",
            {"command__metrics": {"pattern": "LOSS (?P<loss>x)"}},
            r"pattern .*LOSS.* gave no such value; it last wrote:\n.*step",
        ),
        ("", {"command__metrics": {"jsonl": "other.jsonl"}}, r"the file other.jsonl in {out} gave no such value"),
        ("", {"command__metrics": {"pattern": "time: (?P<loss>.*)"}}, r"loss = 'now' is no number, in the line"),
        ("", {"command__scores": "none.jsonl"}, r"none.jsonl: command.scores: no scores there"),
        ('open(out / "metrics.jsonl", "a").write("half")', {}, r"metrics.jsonl, line 4: no JSON"),
        (SCORES + '.write(\'{"item": 1, "value": 2}\')', OF_ITEMS, r"line 5: item 1 is there twice"),
        (SCORES + '.write(\'{"item": 9, "value": 2, "weight": 0}\')', OF_ITEMS, r"line 5: weight = 0: above 0"),
        (
            'sys.exit("out of cheese")',
            {},
            r"plain.s0: the command ended with exit code 1; it last wrote:\n.*\n.*\n    out of cheese\n.*log.txt",
        ),
    ],
)
def test_a_run_without_a_result_is_failed_and_says_why(
    change: str, changes: dict[str, Any], words: str, write: Write, tmp_path: Path
) -> None:
    """The cause, the last lines of the output, and where the rest is; nothing is pooled."""
    path = write(f"{TRAINER}\n{change}", **changes)
    with pytest.raises(ValueError, match=words):
        carry_out(path)
    assert RunFolder(tmp_path / "out/experiments/own/runs/base.plain.s0").state == "failed"


@pytest.mark.parametrize("word", ["nan", "inf"])
def test_a_result_that_is_no_finite_number_is_diverged(word: str, write: Write) -> None:
    """The arm has that verdict, and no mean holds the run."""
    trainer = TRAINER.replace(
        "final = sum(items) / 4", f'final = float("{word}") if shift and seed == "1" else items[0]'
    )
    found = result(write(trainer))
    row = found["contrasts"][0]
    assert row["verdict"]["word"] == "diverged"
    assert row["seeds"] == [0, 2]
    json.dumps(found, allow_nan=False)


# ------------------------------------------------------------------------------------------- its life


def test_a_failed_run_starts_again_from_nothing_and_a_finished_one_does_not(write: Write, tmp_path: Path) -> None:
    """{out} is emptied and counts as resumed; the finished partner keeps every file as it is."""
    stop = tmp_path / "stop"
    stop.touch()
    path = write(
        f"{TRAINER}\nif shift and Path({str(stop)!r}).exists(): (out / 'left').touch(); sys.exit(3)", seeds=[0]
    )
    with pytest.raises(ValueError, match=r"base.worse.s0: the command ended with exit code 3"):
        carry_out(path)
    plain, worse = (tmp_path / f"out/experiments/own/runs/base.{arm}.s0" for arm in ("plain", "worse"))
    before = {file: file.stat().st_mtime_ns for file in plain.rglob("*") if file.name != ".lock"}
    assert (worse / "out" / "left").exists()
    stop.unlink()
    carry_out(path)
    assert not (worse / "out" / "left").exists()
    assert (RunFolder(worse).state, RunFolder(worse).status["resumes"]) == ("finished", 1)
    assert before == {file: file.stat().st_mtime_ns for file in plain.rglob("*") if file.name != ".lock"}


def test_a_trainer_whose_text_changed_has_no_partner(write: Write, tmp_path: Path) -> None:
    """Of files that the command names the content counts: a pair of two versions would compare the versions."""
    path = write(f"{TRAINER}\nif shift: sys.exit(3)", seeds=[0])
    with pytest.raises(ValueError, match="exit code 3"):
        carry_out(path)
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    with pytest.raises(ValueError, match=r"base.worse.s0 is no partner of base.plain.s0: plugins.train.py"):
        carry_out(path)


def test_a_finished_run_of_another_command_is_refused(write: Write) -> None:
    """As for our own engine: nothing is pooled that was not run so, and nothing is run again."""
    carry_out(write(seeds=[0]))
    with pytest.raises(
        ValueError, match=r"base.plain.s0: holds a run of another command: options: \['0'\] against \['1'\]"
    ):
        carry_out(write(seeds=[0], arms__plain={"options": ["1"]}))
    path = write(seeds=[0], command__metrics={"pattern": PATTERN})
    with pytest.raises(ValueError, match=r"holds a run of another configuration: command.metrics"):
        outcome(load_experiment(path), RunStore.of(load_experiment(path), path.parent / "out"))


def test_a_time_limit_ends_the_command_with_its_children(write: Write, tmp_path: Path) -> None:
    trainer = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[2] + "/pid", "w").write(str(child.pid))
print("began", flush=True)
time.sleep(60)
"""
    path = write(trainer, command__minutes=0.01)
    with pytest.raises(
        ValueError, match=r"took longer than command.minutes = 0.01 and was ended; it last wrote:\n    began"
    ):
        carry_out(path)
    assert gone(int((tmp_path / "out/experiments/own/runs/base.plain.s0/out/pid").read_text()))


def test_what_a_command_leaves_running_neither_stalls_nor_stays(write: Write, tmp_path: Path) -> None:
    """A child that holds the output open ends with the command: it does not come to its own end."""
    extra = """
import subprocess
child = subprocess.Popen(["sh", "-c", "sleep 20; touch " + str(out / "done")])
(out / "pid").write_text(str(child.pid))
"""
    carry_out(write(TRAINER + extra, seeds=[0], arms={"plain": {"options": ["0"]}}, primary__contrast=None))
    out = tmp_path / "out/experiments/own/runs/base.plain.s0/out"
    assert gone(int((out / "pid").read_text()))
    assert not (out / "done").exists()


@pytest.mark.slow
def test_a_command_ends_when_its_parent_is_killed(write: Write, tmp_path: Path) -> None:
    """SIGKILL of xsalab leaves no trainer behind, and the run starts again."""
    trainer = 'import os, sys, time\nopen(sys.argv[2] + "/pid", "w").write(str(os.getpid()))\ntime.sleep(60)'
    path = write(trainer, seeds=[0])
    words = ["run", str(path), "--out", str(tmp_path / "out")]
    parent = subprocess.Popen([sys.executable, "-c", "from xsalab.cli import main; main()", *words])
    pid = tmp_path / "out/experiments/own/runs/base.plain.s0/out/pid"
    end = time.monotonic() + 60
    while not (pid.is_file() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    child = int(pid.read_text())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(child, command_run.GRACE + 5)
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    assert run_command(first_task(path)) == "finished"


@pytest.mark.slow
def test_runs_side_by_side_say_the_same(write: Write, tmp_path: Path) -> None:
    path = write(seeds=[0, 1])
    experiment, store = carry_out(path, jobs=2)
    assert {run["state"] for run in outcome(experiment, store)["runs"]} == {"finished"}


# ------------------------------------------------------------------------------------------- what is said


def test_controls_are_the_baseline_with_what_they_write(write: Write) -> None:
    """null and positive are added to the baseline's options; the twin agrees to the bit; {arm} stays the baseline's."""
    path = write(
        command__env={"NAME": "{arm}"},
        controls={"null": {"env": {"UNUSED": 1}, "options": ["0"]}, "positive": {"options": ["2"]}, "twin": True},
    )
    experiment, store = carry_out(path)
    assert experiment.command is not None
    run = experiment.command.resolve(experiment, Cell("base", "positive", 0))
    assert (run.options, run.arm) == (("0", "2"), "plain")
    found = outcome(experiment, store)
    words = {row["kind"]: row["verdict"]["word"] for row in found["contrasts"]}
    assert words["positive"] == "worse"
    assert [row["estimate"]["mean"] for row in found["contrasts"] if row["kind"] == "null"] == [0.0]
    assert found["twin"] is True
    assert found["arms"]["positive"] == "positive (2)"


def test_a_twin_that_differs_is_said(write: Write) -> None:
    trainer = TRAINER.replace("0.01 * draw.gauss(0, 1)", "1e-12 * random.SystemRandom().random()")
    found = result(write(trainer, controls={"twin": True}, seeds=[0]))
    assert found["twin"] is False
    assert any("not deterministic" in line for line in found["warnings"])


@pytest.mark.parametrize(("lower", "word"), [(True, "worse"), (False, "better")])
def test_which_direction_is_better_is_the_files_word(lower: bool, word: str, write: Write, xsalab: Any) -> None:
    """An accuracy that rises is better, in the verdict, in the page's words and in its picture."""
    path = write(command__lower_is_better=lower)
    out = path.parent / "out"
    ran = xsalab("run", path, "--out", out)
    assert ran.code == 0, ran.err
    assert f", {word}" in ran.out
    assert "Δ loss ±" in ran.out
    assert "bpb" not in ran.out
    assert "time " not in ran.out.splitlines()[0]
    assert "not checked: the first weights" in ran.out
    page = (out / "experiments" / "own" / "report.html").read_text(encoding="utf-8")
    assert f"← lower: {'better' if lower else 'worse'}" in page
    assert f"{'higher' if word == 'worse' or not lower else 'lower'} loss than plain" in page
    assert "What the program could <b>not</b> check" in page
    assert "every parameter that both arms have starts bit-identical" not in page


def test_one_seed_and_one_arm_decide_nothing(write: Write) -> None:
    found = result(write(seeds=[0]))
    assert found["contrasts"][0]["verdict"]["word"] == "not decidable"
    assert found["contrasts"][0]["estimate"]["low"] is None
    json.dumps(found, allow_nan=False)
    alone = load_experiment(write(seeds=[0], arms__worse=None, primary__contrast=None))
    assert contrasts(alone) == []


def test_a_margin_that_is_a_share_of_nothing_is_refused(write: Write) -> None:
    """A baseline of 0 has no shares: the message asks for a margin in units of the metric, which then holds."""
    trainer = TRAINER.replace("final = sum(items) / 4", "final = shift + (0.1 * draw.random() if shift else 0)")
    path = write(trainer)
    with pytest.raises(
        ValueError, match=r"a share of the baseline's loss, which is 0; give the margin in units of loss"
    ):
        result(path)
    row = result(write(trainer, primary={**BASE["primary"], "absolute": True, "margin": 2.0}))["contrasts"][0]
    assert (row["margin"], row["verdict"]["text"]) == (2.0, "worse, below the margin")
    assert row["estimate"]["relative"] is None


def test_a_factor_of_numbers_has_a_curve(write: Write) -> None:
    path = write(
        arms=None, baseline=None, primary__contrast=None, factors={"lr": [0.0, 0.1, 0.2]},
        command__run=["{python}", "train.py", "{seed}", "{out}", "{lr}"],
    )  # fmt: skip
    dose = result(path)["doses"][0]
    assert (dose["factor"], dose["arms"]) == ("lr", ["lr-0", "lr-0_1", "lr-0_2"])
    assert [point["mean"] for point in dose["points"]][-1] == pytest.approx(0.2, abs=0.05)


@pytest.mark.slow
def test_the_verbs_know_a_command(write: Write, xsalab: Any, no_page: None) -> None:
    """status and train work, data and check have nothing to do, and --until-decided stops at the first look."""
    path = write(seeds=[0])
    out = path.parent / "out"
    assert "nothing to prepare" in xsalab("data", path, "--out", out).out
    assert "nothing to check" in xsalab("check", path).out
    assert json.loads(xsalab("status", path, "--out", out, "--json").out)[0]["state"] == "waiting"
    ran = xsalab("train", path, "--arm", "worse", "--seed", 0, "--out", out)
    assert ran.out.strip().endswith("base.worse.s0")
    states = [row["state"] for row in json.loads(xsalab("status", path, "--out", out, "--json").out)]
    assert states == ["waiting", "finished"]
    assert xsalab("status", path, "--out", out).out.strip().endswith("1 waiting, 1 finished")
    xsalab("run", path, "--out", out, "--tensorboard").refused("--tensorboard: a command logs by its own means")
    ran = xsalab("run", path, "--out", out, "--until-decided", "--max-seeds", 6)
    assert "sequential: the look at 4 of at most 6 seeds" in ran.out
