"""The harness of the benchmarks: what is timed in which order, the interval, the verdict, what is printed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import measure
import pytest
import targets
from measure import Ratio, Result, emit, interleave, judge, not_judged, not_run, of_rounds, ratio, verdict

from xsalab.eval import throughput
from xsalab.stats import ratio_estimate

MUON = "optimizer step, against torch.optim.Muon"  # ≥ 3 with AMX
COPY = "exclude_self, against copy_ of the same bytes"  # ≤ 1.15 with AMX
SAVED = "bytes saved for backward with XSA, over without"  # counted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time stands still until it is moved on."""
    now = 0.0

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    return move


def test_sides_take_turns_there_and_back() -> None:
    """A B C C B A, after warm-up; two times a round and side."""
    order = ""

    def side(name: str) -> Callable[[], None]:
        def run() -> None:
            nonlocal order
            order += name

        return run

    times = interleave({name: side(name) for name in "ABC"}, rounds=2, warmup=1)
    assert order == "ABC" + "ABCCBA" * 2
    assert {name: len(values) for name, values in times.items()} == {"A": 4, "B": 4, "C": 4}


def test_warm_up_is_not_in_the_times_and_calls_share_them(clock: Callable[[float], None]) -> None:
    """The first call of 100 seconds is left out; the rest take 2 each, ten at a time."""
    done = 0

    def side() -> None:
        nonlocal done
        done += 1
        clock(100.0 if done == 1 else 2.0)

    assert interleave({"a": side}, rounds=2, warmup=1, calls=10)["a"] == [2.0] * 4
    assert done == 1 + 4 * 10


def test_a_steady_drift_cancels(clock: Callable[[float], None]) -> None:
    """A machine that gets slower call by call, by a tenth of a second: the same work is still as fast as itself."""
    done = 0

    def side() -> None:
        nonlocal done
        clock(1 + 0.1 * done)
        done += 1

    times = interleave({"a": side, "b": side}, rounds=7, warmup=0)
    found = ratio(times["b"], times["a"])
    assert (found.low, found.median, found.high) == pytest.approx((1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0, 0.0)),  # one round: its value, and no certainty at all
        ([5.0, 1.0, 2.0, 4.0, 3.0], (3.0, 1.0, 5.0, 15 / 16)),  # least to greatest: 1 − 2 / 2⁵, below 95 %
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3.5, 1.0, 6.0, 31 / 32)),  # 1 − 2 / 2⁶
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], (5.0, 2.0, 8.0, 1 - 2 * 10 / 512)),  # second to second last
    ],
)
def test_median_and_interval_by_hand(values: list[float], expected: tuple[float, ...]) -> None:
    """The interval lies between order statistics; how surely it holds the median is a sum of binomials."""
    found = of_rounds(values)
    assert (found.median, found.low, found.high, found.coverage) == pytest.approx(expected)
    assert found.rounds == len(values)


def test_a_ratio_pairs_the_two_times_of_a_round() -> None:
    """(1 + 3) / (1 + 1) = 2 and (6 + 2) / (1 + 1) = 4: of each round's sums."""
    found = ratio([1.0, 3.0, 6.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 3.0, 4.0))


@pytest.mark.parametrize("rounds", [1, 2, 5, 6, 16, 17, 50])
def test_the_interval_is_that_of_the_experiments(rounds: int) -> None:
    """The package's own, which needs scipy."""
    draw = random.Random(rounds)
    a, b = ([1 + draw.random() for _ in range(2 * rounds)] for _ in range(2))
    found, expected = ratio(b, a), ratio_estimate(a, b)
    assert (found.median, found.low, found.high, found.rounds) == pytest.approx(
        (expected.median, expected.low, expected.high, expected.n)
    )
    assert found.coverage == pytest.approx(expected.coverage)


@pytest.mark.parametrize(
    ("above", "below"), [([1.0], [1.0]), ([], []), ([1.0, 1.0], [1.0, 0.0]), ([1.0] * 4, [1.0] * 2)]
)
def test_times_that_are_no_rounds_are_refused(above: list[float], below: list[float]) -> None:
    """Odd numbers, none, unequal numbers, and a time of nothing."""
    with pytest.raises(ValueError, match="time"):
        ratio(above, below)


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        (MUON, 3.1, 3.4, "met"),
        (MUON, 2.0, 3.1, "met"),  # the interval straddles: not missed
        (MUON, 2.0, 2.9, "missed"),
        (COPY, 1.0, 1.1, "met"),
        (COPY, 1.1, 1.3, "met"),
        (COPY, 1.2, 1.3, "missed"),
    ],
)
def test_missed_is_what_misses_with_the_whole_interval(
    machine: str, name: str, low: float, high: float, expected: str
) -> None:
    """In both directions."""
    assert judge(name, Ratio((low + high) / 2, low, high, 10), unit="ms").verdict == expected


def test_a_target_of_another_machine_judges_nothing(machine: str) -> None:
    """Without AMX no target of AMX is met or missed, and none of them is shown as if it were one."""
    row = judge(MUON, Ratio(1.0, 1.0, 1.0, 10), unit="ms", machine="plain")
    assert row.verdict == "not judged: stated for amx, this is plain"
    assert row.target is None


def test_our_own_floors_judge_avx512_alone_and_are_named_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor stands for no target of the project's, neither here nor with AMX."""
    monkeypatch.setitem(targets.FLOORS, MUON, 1.5)
    row = judge(MUON, Ratio(1.2, 1.1, 1.3, 10), unit="ms", machine="avx512-bf16")
    assert (row.target, row.verdict) == (1.5, "missed")
    assert "our own floor" in row.machine
    assert judge(MUON, Ratio(1.2, 1.1, 1.3, 10), unit="ms", machine="amx").target == 3.0
    assert judge(MUON, Ratio(1.2, 1.1, 1.3, 10), unit="ms", machine="plain").target is None


def test_every_floor_belongs_to_a_target() -> None:
    """A misspelt one would never be looked at."""
    assert set(targets.FLOORS) <= set(targets.STATED)


def test_a_name_without_target_is_refused(machine: str) -> None:
    """A benchmark cannot invent a row."""
    with pytest.raises(KeyError, match="no such row"):
        judge("no such row", Ratio(1.0, 1.0, 1.0), unit="ms")


def rows() -> list[Result]:
    return [
        judge(MUON, Ratio(1.0, 0.9, 1.1, 10), unit="ms", ours=2.0, peer=2.0),
        judge(SAVED, Ratio.exactly(1.0), unit="MB"),
        not_run("training 4 × 256, against nanochat float32", "needs --nanochat DIR"),
    ]


def test_a_busy_machine_judges_no_time_but_counts(machine: str) -> None:
    """Others at work do not change how many bytes are kept; what was not run stays so."""
    verdicts = [row.verdict for row in not_judged(rows(), "the machine is busy", timed_alone=True)]
    assert verdicts == ["not judged: the machine is busy", "met", "not run: needs --nanochat DIR"]


def printed(capsys: pytest.CaptureFixture[str], shares: tuple[float | None, float | None], **options: Any) -> Any:
    measure.busy = lambda: shares[1]  # undone by the fixture ``machine``
    emit(rows(), shares[0], **options)
    out, err = capsys.readouterr()
    return json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON")), err


@pytest.mark.parametrize("shares", [(0.5, 0.0), (0.0, 0.5), (None, 0.5)])
def test_others_before_or_after_make_it_busy(
    machine: str, capsys: pytest.CaptureFixture[str], shares: tuple[float | None, float | None]
) -> None:
    """Work that begins while we measure is seen at the end. The load is printed and stored."""
    content, err = printed(capsys, shares)
    assert [row["verdict"].split(":")[0] for row in content["results"]] == ["not judged", "met", "not run"]
    assert content["others"] == 0.5
    assert "others use 50%" in err


def test_a_quiet_machine_judges(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON value on stdout, for people a table on stderr; a tenth of the machine is quiet enough."""
    content, err = printed(capsys, (0.1, 0.0))
    assert [row["verdict"].split(":")[0] for row in content["results"]] == ["missed", "met", "not run"]
    assert content["environment"] == {"machine": "amx"}
    assert [Result(**row) for row in content["results"]] == rows()
    assert "≥ 3" in err
    assert "0.900 to 1.100" in err


def test_a_system_that_does_not_tell_is_said_so(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No load known is not no load."""
    content, err = printed(capsys, (None, None))
    assert content["others"] is None
    assert "not known" in err


def test_quick_sizes_judge_nothing(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even what was counted: the sizes are others."""
    content, _ = printed(capsys, (0.0, 0.0), quick=True)
    assert [row["verdict"].split(":")[0] for row in content["results"]] == ["not judged", "not judged", "not run"]


def test_busy_is_what_others_hold_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, by the function that experiments use."""
    monkeypatch.setattr(throughput, "busy_share", lambda: 0.25)
    assert measure.busy() == 0.25


def test_a_row_for_comparison_has_no_target_anywhere(machine: str) -> None:
    """Standard against standard: what the method makes of no difference."""
    row = judge("step time of standard, over standard", Ratio(1.0, 1.0, 1.0), unit="ms")
    assert row.verdict == "not judged: no target, it stands beside another row"


def test_a_verdict_needs_an_interval(machine: str) -> None:
    """A row that was not measured is neither met nor missed."""
    assert verdict(replace(rows()[0], low=None), "amx").startswith("not judged")


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--threads", "0"], ["--nanochat", "nowhere"]])
def test_arguments_that_make_no_sense_end_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """And say what is wrong."""
    monkeypatch.setattr("sys.argv", ["x.py", *words])
    with pytest.raises(SystemExit) as ended:
        measure.parsed(measure.arguments("", rounds=3, nanochat=True))
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
