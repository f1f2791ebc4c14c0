"""What every benchmark shares: timing in turns, a ratio with its interval, a verdict, one JSON value.

    times = interleave({"ours": ours, "peer": peer}, rounds=20, warmup=2)
    found = ratio(times["peer"], times["ours"])  # how many times as fast as the peer
    results = [judge("optimizer step, against torch.optim.Muon", found, unit="ms", ours=1.0, peer=3.0)]
    emit(results, others)

``others`` is what ``busy()`` said before anything ran. Needs torch alone, apart from ``busy``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from targets import AMX, AVX512, PLAIN, target_of

BUSY = 0.1  # share of all cores' time that others hold, above which nothing that is timed is judged
CONFIDENCE = 0.95


def interleave(
    sides: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1, *, calls: int = 1, label: str = ""
) -> dict[str, list[float]]:
    """Seconds of a call of each side, two a round, in the order A B … B A: a steady drift cancels within a round.

    ``warmup`` calls of each come first and are not in the result. ``calls``: of each timing, for what takes well under
    a millisecond. A side that works on a GPU waits for it itself. ``label``: tells on stderr how long it will take.
    """
    names, spent = list(sides), 0.0
    for _ in range(warmup):
        begin = time.perf_counter()
        for name in names:
            sides[name]()
        spent = time.perf_counter() - begin  # the last one's: the first compiles
    if label and warmup:
        print(f"{label}: about {2 * rounds * calls * spent:.0f} s", file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in (*names, *names[::-1]):
            begin = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            times[name].append((time.perf_counter() - begin) / calls)
    return times


@dataclass(frozen=True)
class Ratio:
    """Median over rounds with an interval; ``coverage``: how surely it holds the median, whatever the distribution."""

    median: float
    low: float
    high: float
    rounds: int = 0
    coverage: float = 1.0

    @classmethod
    def exactly(cls, value: float) -> Ratio:
        """Of what was counted, not timed."""
        return cls(value, value, value)


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """How many times as long ``above`` takes as ``below``, both from ``interleave``: paired round by round.

    With a peer above and ours below it is how many times as fast we are. The 95 % interval of the median lies between
    two order statistics; below 6 rounds it reaches from the least to the greatest, and ``coverage`` says what that is
    worth. The same as xsalab.stats.ratio_estimate, which needs scipy; benchmarks run where only torch is. Raises
    ValueError where the times are not two a round and positive.
    """
    if len(above) != len(below) or not above or len(above) % 2:
        raise ValueError(f"times come two a round: got {len(above)} and {len(below)}")
    if not all(math.isfinite(x) and x > 0 for x in (*above, *below)):
        raise ValueError("a time must be positive and finite")
    return of_rounds([(above[i] + above[i + 1]) / (below[i] + below[i + 1]) for i in range(0, len(above), 2)])


def of_rounds(values: Sequence[float]) -> Ratio:
    """Median and interval of one value a round, as ``ratio`` has them."""
    each, n = sorted(values), len(values)
    # Ranks k and n + 1 − k leave the median out with probability 2 · P(Binomial(n, ½) < k).
    tails = [2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(n // 2 + 2)]
    rank = max(1, max(k for k, missed in enumerate(tails) if missed <= 1 - CONFIDENCE))
    return Ratio(statistics.median(each), each[rank - 1], each[n - rank], n, max(0.0, 1 - tails[rank]))


@dataclass(frozen=True)
class Result:
    """One row. ``ours`` and ``peer`` in ``unit``; ``ratio`` with ``low`` and ``high`` is what is judged.

    ``machine``: the kind that the target is stated for. ``verdict``: "met", "missed" (only where the whole interval
    misses), "not judged: …" or "not run: …". ``rounds``: 0 where it was counted and not timed.
    """

    name: str
    unit: str = ""
    ours: float | None = None
    peer: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    target: float | None = None
    direction: str = ">="
    machine: str = ""
    verdict: str = ""
    timed: bool = True
    rounds: int = 0
    note: str = ""


def judge(
    name: str, found: Ratio, *, unit: str, ours: float | None = None, peer: float | None = None,
    machine: str | None = None, note: str = "",
) -> Result:  # fmt: skip
    """The row of a target of targets.py. ``machine``: the kind of this one where it is not that of the processor."""
    kind = machine or machine_class()
    direction, target, stated_for, timed = target_of(name, kind)
    row = Result(
        name, unit, ours, peer, found.median, found.low, found.high, target, direction, stated_for,
        timed=timed, rounds=found.rounds, note=note,
    )  # fmt: skip
    return replace(row, verdict=verdict(row, kind))


def verdict(row: Result, kind: str) -> str:
    """Of a machine that is not busy."""
    if row.target is None or row.low is None or row.high is None:
        why = f"stated for {row.machine}, this is {kind}" if row.machine else "no target, it stands beside another row"
        return f"not judged: {why}"
    missed = row.high < row.target if row.direction == ">=" else row.low > row.target
    return "missed" if missed else "met"


def not_run(name: str, reason: str) -> Result:
    """The row of a target that could not be measured here."""
    direction, target, stated_for, timed = target_of(name, machine_class())
    return Result(
        name, target=target, direction=direction, machine=stated_for, verdict=f"not run: {reason}", timed=timed
    )


def busy() -> float | None:
    """Share of all cores' time that others use now; None where the system does not tell. Takes a second."""
    from xsalab.eval.throughput import busy_share

    return busy_share()


def machine_class() -> str:
    """ "amx", "avx512-bf16" or "plain": the instructions that the kernels use here."""
    from xsalab.model import native

    native.load()
    return {"AMX": AMX, "AVX512-BF16": AVX512}.get(native.instructions(), PLAIN)


def environment() -> dict[str, Any]:
    """What the figures belong to."""
    from xsalab.model import native

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": machine_class(),
        "instructions": native.instructions(),
        "kernels": native.reason() or "used",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def not_judged(results: Sequence[Result], why: str, *, timed_alone: bool = False) -> list[Result]:
    """The rows without verdict, but for those that were not run. ``timed_alone``: counts keep theirs."""
    return [
        replace(row, verdict=f"not judged: {why}") if row.ratio is not None and (row.timed or not timed_alone) else row
        for row in results
    ]


def emit(results: Sequence[Result], others: float | None, *, quick: bool = False, **more: Any) -> None:
    """A table on stderr, one JSON value on stdout. ``others``: ``busy()`` before the first measurement.

    What others hold is measured again now: work that began in between counts as well, and no time is judged then.
    ``quick``: sizes that say nothing of the targets.
    """
    shares = (others, busy())
    rows = list(results)
    if max((share for share in shares if share is not None), default=0.0) > BUSY:
        rows = not_judged(rows, "the machine is busy", timed_alone=True)
    if quick:
        rows = not_judged(rows, "--quick measures tiny sizes")
    held = max((share for share in shares if share is not None), default=None)
    if held is None:
        print("what others use of this machine is not known", file=sys.stderr)
    elif held > BUSY:
        print(
            f"others use {held:.0%} of this machine: no time is judged; run it again when it is idle", file=sys.stderr
        )
    print(table(rows), file=sys.stderr, flush=True)
    content = {
        "program": Path(sys.argv[0]).name, "environment": environment(), "others": held,
        "results": [asdict(row) for row in rows], **more,
    }  # fmt: skip
    print(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False), flush=True)


def table(rows: Sequence[Result]) -> str:
    """The rows as text, one a line."""
    head = ("what", "target", "ours", "peer", "ratio", "95 % interval", "verdict")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _cells(row: Result) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.4g} {row.unit}".rstrip()

    target = "" if row.target is None else f"{'≥' if row.direction == '>=' else '≤'} {row.target:g}"
    found = "" if row.ratio is None else f"{row.ratio:.3f}"
    interval = "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
    return row.name, target, shown(row.ours), shown(row.peer), found, interval, row.verdict


def arguments(doc: str, rounds: int, *, nanochat: bool = False) -> argparse.ArgumentParser:
    """What all benchmarks take; ``doc`` is the program's docstring, which holds its example."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of A B … B A (default {rounds})")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, the figures say nothing")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default 2")
    if nanochat:
        parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat, the peer")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, threads set. Ends with exit code 2 for what makes no sense."""
    given = parser.parse_args()
    if given.rounds < 1 or given.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    checkout = getattr(given, "nanochat", None)
    if checkout is not None and not (checkout / "nanochat" / "gpt.py").is_file():
        parser.error(f"--nanochat {checkout}: no nanochat/gpt.py there; give a checkout of nanochat")
    torch.set_num_threads(given.threads)
    return given
