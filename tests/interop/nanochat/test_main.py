"""python -m xsalab.interop.nanochat: what it asks for, and whole runs of a stand-in checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xsalab.interop.nanochat import __main__ as program


def run(checkout: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, from another folder; the checkout's files must not change."""
    before = {file: file.read_bytes() for file in checkout.rglob("*.py")}
    done = subprocess.run(
        [sys.executable, "-m", "xsalab.interop.nanochat", "--nanochat", str(checkout), *map(str, words)],
        capture_output=True, text=True, encoding="utf-8", cwd=checkout.parent,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert before == {file: file.read_bytes() for file in checkout.rglob("*") if file.is_file()}
    return done


@pytest.mark.slow
def test_a_run_is_logged_raw_over_the_whole_batch_and_goes_on_where_it_stopped(checkout: Path, tmp_path: Path) -> None:
    """F131, F121: by what the trainer itself printed of each micro-batch; evaluation at step s, s updates made."""
    log = Path("log.jsonl")  # of the folder where this is typed
    done = run(checkout, "--alpha", 0, "--log", log, "--", "scripts.base_train", "--depth=2", "--num-iterations=4")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / log).read_text(encoding="utf-8").splitlines()]
    micro: dict[int, list[float]] = {}
    for number, loss in re.findall(r"micro (\d+) (\S+)", done.stdout):
        micro.setdefault(int(number), []).append(float(loss))
    assert list(micro) == [0, 1, 2, 3]
    assert all(abs(parts[0] - parts[1]) > 0.01 for parts in micro.values()), "each alone would be another number"
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(number, pytest.approx(sum(parts) / 2, rel=1e-6)) for number, parts in micro.items()]
    printed = [(int(number), float(bpb)) for number, bpb in re.findall(r"bpb (\d+) (\S+)", done.stdout)]
    assert [(row["step"], row["val_bpb"]) for row in rows if "val_bpb" in row] == printed
    assert [number for number, _ in printed] == [0, 2, 4]
    assert [row for row in rows if "core" in row] == [{"step": 4, "core": 0.1, "core/copa": 0.1}]

    on = run(
        checkout, "--alpha", 0, "--log", log, "--", "scripts.base_train", "--num-iterations=3", "--resume-from-step=2"
    )
    assert on.returncode == 0, on.stderr
    again = [json.loads(line) for line in (tmp_path / log).read_text(encoding="utf-8").splitlines()]
    assert again[:3] == rows[:3]
    assert [(row["step"], *sorted(row.keys() - {"step"})) for row in again[3:]] == [
        (2, "val_bpb"), (2, "loss"), (3, "core", "core/copa"),
    ]  # fmt: skip


def test_a_mistake_about_the_model_is_one_line(checkout: Path) -> None:
    done = run(checkout, "--layers", "last:4", "--", "scripts.base_train", "--depth=3")
    assert done.returncode == 2
    assert "layers = 'last:4': this model has 3 layers; a count from 1 to 3 is valid" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what is to be run? Write it behind --"),
        (["scripts.base_train"], "unrecognized arguments: scripts.base_train"),
        (["--alpha", "x", "--", "scripts.base_train"], "argument --alpha: invalid"),
        (["--alpha", "1.5", "--", "scripts.base_train"], "alpha = 1.5: must be in [0, 1]"),
        (["--log", "x.jsonl", "--", "scripts.chat_sft"], "--log: only scripts.base_train is understood"),
        (["--", "scripts.nope"], "scripts.nope: no such script in "),
        (["--", "nope.base_train"], "nope.base_train: no such script in "),
        (["--", "scripts/base_train.py"], "write it as scripts.base_train, without .py"),
        (["--", ".base_train"], ".base_train: no such script in "),
        (["--", "nanochat"], "nanochat: no such script in "),
        (["--nanochat", "nowhere", "--", "scripts.base_train"], "nowhere: no nanochat checkout"),
    ],
)
def test_a_mistake_is_one_line(
    checkout: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["nanochat", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
