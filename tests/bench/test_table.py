"""All benchmarks in one table: exit codes, what is handed on, what is written. The programs here are stand-ins."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import table
from measure import Result

MET = Result("fast", "ms", 1.0, 3.0, 3.0, 2.9, 3.1, 2.0, ">=", "amx", "met", note="how it is counted")
MISSED = Result("slow", "ms", 3.0, 1.0, 0.3, 0.2, 0.4, 2.0, ">=", "amx", "missed")
BUSY = Result("busy", "ms", 3.0, 1.0, 0.3, 0.2, 0.4, 2.0, ">=", "amx", "not judged: the machine is busy")
NOT_RUN = Result("peer", target=2.0, machine="amx", verdict="not run: needs --nanochat DIR")


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "environment", lambda: {"machine": "amx"})


def program(folder: Path, name: str, *rows: Result, code: str = "") -> None:
    """One that prints these rows and what it was called with; or ``code``."""
    content = {"results": [asdict(row) for row in rows], "others": 0.0}
    text = f"import json, sys\ncontent = json.loads({json.dumps(json.dumps(content))})\n"
    text += "open(sys.argv[0] + '.words', 'w').write(' '.join(sys.argv[1:]))\n"
    (folder / f"{name}.py").write_text(text + (code or "print(json.dumps(content))"), encoding="utf-8")


def carry_out(monkeypatch: pytest.MonkeyPatch, folder: Path, programs: dict[str, bool], *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["table.py", *words])
    return table.main(programs, folder)


@pytest.mark.parametrize(("rows", "expected"), [((MET, BUSY, NOT_RUN), 0), ((MET, MISSED), 1), ((), 0)])
def test_the_exit_code_says_whether_a_target_is_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: tuple[Result, ...], expected: int
) -> None:
    """What could not be judged or run is no miss."""
    program(tmp_path, "one", *rows)
    program(tmp_path, "two", MET)
    assert carry_out(monkeypatch, tmp_path, {"one": False, "two": False}) == expected


@pytest.mark.parametrize("code", ["raise ValueError('broken')", "print('no JSON')", "sys.exit(1)"])
def test_a_benchmark_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    """The rest is printed, the failure is named, and the exit code is another."""
    program(tmp_path, "broken", code=code)
    program(tmp_path, "well", MISSED)
    assert carry_out(monkeypatch, tmp_path, {"broken": False, "well": False}) == 2
    shown = capfd.readouterr().out
    assert "broken: " in shown
    assert "slow" in shown


def test_the_table_shows_every_row_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Target, measured, ratio, interval, verdict; rows that need a peer say so; and how many there are of each."""
    program(tmp_path, "one", MET, MISSED, BUSY, NOT_RUN)
    carry_out(monkeypatch, tmp_path, {"one": True})
    lines = {line.split("  ")[0]: line for line in capfd.readouterr().out.splitlines()}
    assert " ".join(lines["fast"].split()) == "fast ≥ 2 1 ms 3 ms 3.000 2.900 to 3.100 met"
    assert "not run: needs --nanochat DIR" in lines["peer"]
    assert "1 met, 1 missed, 1 not judged, 1 not run" in lines
    assert "fast: how it is counted" in lines


def test_one_json_value_is_written_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every row with its program, and the verdict of all."""
    program(tmp_path, "one", MET)
    program(tmp_path, "two", MISSED, NOT_RUN)
    out = tmp_path / "found" / "result.json"
    carry_out(monkeypatch, tmp_path, {"one": False, "two": False}, "--out", str(out))
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert content["exit_code"] == 1
    assert content["results"] == [
        {"program": name, **asdict(row)} for name, row in (("one", MET), ("two", MISSED), ("two", NOT_RUN))
    ]
    assert set(content["programs"]) == {"one", "two"}


def test_the_checkout_goes_to_those_that_have_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others do not know the option; --quick is for all, and --only leaves out."""
    for name in ("peer", "alone", "left"):
        program(tmp_path, name, MET)
    programs = {"peer": True, "alone": False, "left": False}
    carry_out(monkeypatch, tmp_path, programs, "--nanochat", "DIR", "--quick", "--only", "peer", "alone")
    words = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.words")}
    assert words == {"peer.py.words": "--quick --rounds 2 --nanochat DIR", "alone.py.words": "--quick --rounds 2"}


def test_every_program_is_there() -> None:
    """The table runs what the folder holds."""
    assert [name for name in table.PROGRAMS if not (table.HERE / f"{name}.py").is_file()] == []
