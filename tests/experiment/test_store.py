"""A run's folder: rows that survive a kill, files that say when they are damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xsalab.eval import ItemScore
from xsalab.experiment.design import Cell
from xsalab.experiment.store import MetricsLog, RunFolder, RunStore, read_parquet, write_rows


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def log_steps(run: RunFolder, *steps: int) -> None:
    log = MetricsLog(run.path / "metrics.jsonl")
    for step in steps:
        log.write({"step": step, "loss": 1 / (step + 3), "tokens": 8})
    log.close()


def test_a_run_lies_in_the_folder_of_its_cell(tmp_path: Path) -> None:
    assert RunStore(tmp_path).run(Cell("d4", "xsa", 3)).path == tmp_path / "runs" / "d4.xsa.s3"


def test_a_run_that_is_not_there_waits(run: RunFolder) -> None:
    assert (run.state, run.read("config"), run.metrics()) == ("waiting", {}, [])


def test_rows_keep_every_digit(run: RunFolder) -> None:
    """From the live log to Parquet no number changes by a bit, and no row is invented."""
    log_steps(run, 0, 1, 2)
    before = run.metrics()
    assert [row["loss"] for row in before] == [1 / 3, 1 / 4, 1 / 5]
    run.finish_metrics()
    assert not (run.path / "metrics.jsonl").exists()
    assert run.metrics() == before


def test_columns_that_are_not_everywhere_are_absent(run: RunFolder) -> None:
    log = MetricsLog(run.path / "metrics.jsonl")
    log.write({"step": 0, "val_bpb": 2.0})
    log.write({"step": 0, "loss": 1.0, "tokens": 8})
    log.close()
    expected = [{"step": 0, "val_bpb": 2.0}, {"step": 0, "loss": 1.0, "tokens": 8}]
    assert run.metrics() == expected
    run.finish_metrics()
    assert run.metrics() == expected


def test_half_of_a_last_line_is_nothing(run: RunFolder) -> None:
    """A kill in the middle of a row: the row is left out, and the next one does not join its rest."""
    log_steps(run, 0, 1)
    with (run.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in run.metrics()] == [0, 1]
    run.cut_metrics(2)
    log_steps(run, 2)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]


def test_a_resume_cuts_the_record_back(run: RunFolder) -> None:
    """F132: a stop at 5 and a resume from 3: rows 3 and 4 are made again and stand once."""
    log_steps(run, 0, 1, 2, 3, 4)
    run.cut_metrics(3)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    log_steps(run, 3, 4, 5)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3, 4, 5]


def test_a_resume_after_the_log_was_turned_into_parquet(run: RunFolder) -> None:
    """Killed after the last row but before the status: the rows are taken back from Parquet, not lost."""
    log_steps(run, 0, 1, 2)
    before = run.metrics()
    run.finish_metrics()
    run.cut_metrics(3)
    assert run.metrics() == before
    assert not (run.path / "metrics.parquet").exists()


@pytest.mark.parametrize("steps", [(), (0, 2), (1, 2), (0, 1, 1, 2)], ids=str)
def test_a_record_that_is_not_whole_is_refused(steps: tuple[int, ...], run: RunFolder) -> None:
    log_steps(run, *steps)
    with pytest.raises(ValueError, match=rf"metrics.jsonl: holds {len(steps)} of the 3 steps .* delete .*again"):
        run.cut_metrics(3)


def test_a_number_that_is_not_finite_is_left_out(run: RunFolder) -> None:
    """F164: no NaN reaches a file or a page."""
    log = MetricsLog(run.path / "metrics.jsonl")
    log.write({"step": 0, "loss": math.nan, "grad_norm": math.inf, "tokens": 8})
    log.close()
    text = (run.path / "metrics.jsonl").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 0, "tokens": 8}


def test_every_row_is_on_its_way_at_once(run: RunFolder) -> None:
    """Nothing waits in a buffer of ours: what was written can be read before the log is closed."""
    log = MetricsLog(run.path / "metrics.jsonl")
    log.write({"step": 0, "tokens": 8})
    assert run.metrics() == [{"step": 0, "tokens": 8}]
    log.sync()
    log.close()


def test_scores_are_one_row_a_document(run: RunFolder) -> None:
    run.write_scores([ItemScore("bpb", "a:0", 1.5, 10.0), ItemScore("bpb", "a:1", 0.1 + 0.2, 3.0)])
    assert run.scores() == {"a:0": (1.5, 10.0), "a:1": (0.1 + 0.2, 3.0)}


@pytest.mark.parametrize("content", ["", "{", "\x00\x01"], ids=repr)
def test_a_damaged_json_file_is_named(content: str, run: RunFolder) -> None:
    (run.path / "status.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"status.json: damaged .* delete the run's folder to run it again"):
        _ = run.state


def test_a_damaged_table_is_named(run: RunFolder) -> None:
    path = run.path / "scores.parquet"
    write_rows(path, [{"item": "a"}])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"scores.parquet: not a whole Parquet file"):
        read_parquet(path)


def test_scores_that_are_missing_say_so(run: RunFolder) -> None:
    """Not the path alone: what is missing, and the remedy."""
    with pytest.raises(ValueError, match=r"scores.parquet: missing: .*score of each item; delete the run's folder"):
        run.scores()
    write_rows(run.path / "scores.parquet", [{"item": "a", "value": 1.0}])
    with pytest.raises(ValueError, match=r"scores.parquet: no column 'weight'; delete the run's folder"):
        run.scores()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"state": "finished"}, "a finished run without its value"),
        ({"state": "finished", "val_bpb": None}, "a finished run without its value"),
        ({"state": "done"}, "state = 'done'"),
        ({"state": ["finished"]}, r"state = \['finished'\]"),
    ],
    ids=str,
)
def test_a_status_that_is_not_whole_is_named(content: dict[str, Any], words: str, run: RunFolder) -> None:
    run.write("status", content)
    with pytest.raises(ValueError, match=rf"status.json: {words}; delete the run's folder to run it again"):
        _ = run.state


@pytest.mark.parametrize("value", ["val_bpb", "value"])
def test_a_finished_run_has_its_value_under_either_name(value: str, run: RunFolder) -> None:
    run.write("status", {"state": "finished", value: 2})
    assert run.status[value] == 2


WHOLE: dict[str, Any] = {
    "config": {"a": 1}, "start": {}, "plugins": {}, "environment": {}, "code": "c", "machine": "m",
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "missing"),
        ({}, "empty"),
        ({"config": 3}, "no table 'config'"),
        ({**WHOLE, "start": 3}, "no table 'start'"),
        ({key: value for key, value in WHOLE.items() if key != "machine"}, "no 'machine'"),
    ],
    ids=str,
)
def test_a_fingerprint_that_is_not_whole_is_named(content: Any, words: str, run: RunFolder) -> None:
    if content is not None:
        run.write("fingerprint", content)
    with pytest.raises(ValueError, match=rf"fingerprint.json: {words}; delete the run's folder to run it again"):
        run.fingerprint()
    run.write("fingerprint", WHOLE)
    assert run.fingerprint() == WHOLE
