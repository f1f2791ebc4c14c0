"""All benchmarks one after another, and one table: what `make bench` prints.

    python bench/table.py [--nanochat DIR] [--out FILE.json] [--quick] [--only training kernels]

Each runs in a process of its own. Prints target, measured, ratio with its 95 % interval and verdict of every row, and
with --out writes all of it as one JSON file. Exit code 1 where a target of this machine is missed, that is where the
whole interval misses it, and 2 where a benchmark failed. Leave the machine alone meanwhile: about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Result, environment, table

from xsalab.files import make_folder, write_atomic

HERE = Path(__file__).parent
# Whether a peer's checkout is handed on, by program.
PROGRAMS = {
    "training": True, "kernels": False, "variants": False, "growth": False, "generation": True, "tokenizer": True,
    "startup": False,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a program said: its JSON value, or why there is none, and how long it took."""

    program: str
    content: dict[str, Any] | None
    failure: str
    seconds: float

    @property
    def rows(self) -> list[Result]:
        return [Result(**row) for row in self.content["results"]] if self.content else []


def run(program: Path, words: Sequence[str]) -> Outcome:
    """Runs it. Its stderr is ours, so that progress is seen."""
    begin = time.perf_counter()
    child = subprocess.run([sys.executable, str(program), *words], stdout=subprocess.PIPE, check=False)
    seconds, content, failure = time.perf_counter() - begin, None, ""
    if child.returncode:
        failure = f"ended with {child.returncode}"
    else:
        try:
            content = json.loads(child.stdout.decode("utf-8"))
        except ValueError as error:
            failure = f"printed no JSON value ({error})"
    return Outcome(program.stem, content, failure, seconds)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """2: a program failed. 1: a target is missed. 0: neither."""
    if any(outcome.failure for outcome in outcomes):
        return 2
    return int(any(row.verdict == "missed" for outcome in outcomes for row in outcome.rows))


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table, what failed, and how many rows there are of each verdict."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    failed = [f"{outcome.program}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    counts = {kind: sum(row.verdict.split(":")[0] == kind for row in rows) for kind in
              ("met", "missed", "not judged", "not run")}  # fmt: skip
    notes = [f"{row.name}: {row.note}" for row in rows if row.note]
    counted = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    return "\n".join([table(rows), "", *notes, *failed, counted])


def record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One JSON value of all."""
    programs = {
        outcome.program: {
            "seconds": outcome.seconds,
            "failure": outcome.failure,
            "others": outcome.content["others"] if outcome.content else None,
        }
        for outcome in outcomes
    }
    rows = [{"program": outcome.program, **vars(row)} for outcome in outcomes for row in outcome.rows]
    return {"environment": environment(), "programs": programs, "results": rows, "exit_code": exit_code(outcomes)}


def main(programs: dict[str, bool] = PROGRAMS, folder: Path = HERE) -> int:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", metavar="DIR", help="a checkout of nanochat, the peer; its rows need it")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where the whole result goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, the figures say nothing")
    parser.add_argument("--only", nargs="+", choices=list(programs), default=list(programs), help="which of them")
    given = parser.parse_args()
    if given.out:
        make_folder(given.out.parent)  # now: not after 20 minutes
    outcomes = []
    for name in given.only:
        words = ["--quick", "--rounds", "2"] if given.quick else []
        if given.nanochat and programs[name]:
            words += ["--nanochat", given.nanochat]
        print(f"— {name}.py", file=sys.stderr, flush=True)
        outcomes.append(run(folder / f"{name}.py", words))
    print(summary(outcomes))
    if given.out:
        write_atomic(given.out, json.dumps(record(outcomes), indent=1, ensure_ascii=False, allow_nan=False))
    return exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
