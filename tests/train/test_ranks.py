"""What the processes of a run say to each other, and what happens where one of them fails."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import talking

from processes import together
from xsalab.train.ranks import ALONE

WORLD = 3
PROGRAM = Path(__file__).with_name("talking.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What each of three processes found."""
    folder = tmp_path_factory.mktemp("talking")
    ended = together([PROGRAM, folder], WORLD)
    assert [code for code, _ in ended] == [0] * WORLD, ended
    return json.loads(ended[0][1].splitlines()[-1]), folder


@pytest.mark.slow
def test_sums_and_texts_are_the_same_everywhere(told: tuple[list[dict[str, Any]], Path]) -> None:
    for found in told[0]:
        assert found["sum"] == [4.5, 3.0]
        assert found["counts"] == [3, 3 * 2**40]
        assert found["texts"] == ["", "α", "αα"]
        assert found["each"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["lead"] == ["first", 0]


@pytest.mark.slow
def test_one_that_fails_is_told_to_all(told: tuple[list[dict[str, Any]], Path]) -> None:
    """Its own error where it failed; nobody waits for ever, and what comes after still works."""
    for name, failing in (("first fails", 0), ("second fails", 1)):
        for rank, found in enumerate(told[0]):
            kind, text = found[name]
            assert kind == ("ValueError" if rank == failing else "Elsewhere")
            assert f"trouble in {failing}" in text
            assert (f"process {failing} of 3 failed" in text) == (rank != failing)


@pytest.mark.slow
def test_other_code_is_refused(told: tuple[list[dict[str, Any]], Path]) -> None:
    """The process and the field are named; the machine's name may differ."""
    for rank, found in enumerate(told[0]):
        assert found["agree"] == ["no error", ""]
        kind, text = found["differ"]
        assert kind == ("Elsewhere" if rank else "ValueError")
        assert "process 1 of 3 differs from process 0: code: 'a' against 'b'" in text


@pytest.mark.slow
def test_prompts_are_scored_once_and_alike(told: tuple[list[dict[str, Any]], Path]) -> None:
    """F111: also where there are fewer prompts than processes."""
    expected = talking.scores(ALONE)
    for found in told[0]:
        for mine, theirs in zip(found["scores"], expected, strict=True):
            assert mine == [pytest.approx(theirs[0], rel=1e-5), *theirs[1:]]
        assert found["one score"] == [[pytest.approx(expected[0][0], rel=1e-5), *expected[0][1:]]]


@pytest.mark.slow
def test_a_full_disk_of_one_keeps_the_last_good_checkpoint(told: tuple[list[dict[str, Any]], Path]) -> None:
    """F174: no half set is left, whoever could not write."""
    for rank, found in enumerate(told[0]):
        kind, text = found["full disk"]
        assert kind == ("OSError" if rank == 1 else "Elsewhere")
        assert "disk full" in text
    assert [path.name for path in (told[1] / "full").iterdir()] == ["step-000000000"]


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ((code, output),) = together(["-c", MEET], 1, port=port)
    assert code == 3, output
    assert f"cannot meet at 127.0.0.1:{port}" in output
    assert "torchrun --standalone" in output


# One of two, of which the other never comes: the first cannot open the port.
MEET = """
import os, sys
os.environ["WORLD_SIZE"] = "2"
from xsalab.train.ranks import joined
try:
    with joined("cpu"):
        pass
except ValueError as error:
    print(error)
    sys.exit(3)
"""


def test_alone_nothing_is_sent() -> None:
    """F038, F113: without torchrun there is no process group to make, wait for or destroy."""
    assert ALONE.texts("a") == ["a"]
    assert ALONE.each(lambda: 7) == [7]
    assert ALONE.lead(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        ALONE.lead(lambda: 1 // 0)
