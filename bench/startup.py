"""From `xsalab run FILE` to its first training step: python bench/startup.py [--text DIR].

Depth 4 × 256, context 512, vocabulary 8,192, standard and XSA, one seed, everything else as it comes: so the runs train
side by side in processes of their own. The first run prepares the corpus and builds the kernels and is told alone; each
further one is a new experiment in the same folder, from the start of its process to the first row of any run's metrics.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Ratio, arguments, busy, emit, judge, parsed

NAME = "start to first step in seconds, second run"
PATIENCE = 1_800.0  # seconds for a first step, the first time
EXPERIMENT = """
name = "start"
seeds = [0]
baseline = "standard"
primary = {{ contrast = "xsa - standard", margin = 0.001 }}

[data]
source = {source}

[model]
depth = {depth}
width = {width}
heads = {heads}
context = {context}
vocab_size = {vocabulary}

[train]
batch_tokens = {batch}
tokens = {tokens}

[arms.standard]
variant = "standard"

[arms.xsa]
variant = "xsa"
alpha = 1.0
"""
FULL = {"depth": 4, "width": 256, "heads": 4, "context": 512, "vocabulary": 8_192, "batch": 8_192, "tokens": 8_192_000}
TINY = {"depth": 1, "width": 32, "heads": 1, "context": 64, "vocabulary": 512, "batch": 1_024, "tokens": 1_024_000}


def first_step(file: Path, out: Path, name: str) -> float:
    """Seconds to the first row of metrics. The experiment is stopped then, as by Ctrl-C. Raises SystemExit where it
    ends before, with what it said."""
    program = "from xsalab.cli import main; main()"
    words = ["run", str(file), "--out", str(out), "--set", f"name={name}"]
    begin = time.perf_counter()
    with (out.parent / "said").open("w+b") as said:
        child = subprocess.Popen([sys.executable, "-c", program, *words], stdout=said, stderr=said)
        try:
            while not _logged(out / "experiments" / name):
                if child.poll() is not None or time.perf_counter() - begin > PATIENCE:
                    said.seek(0)
                    raise SystemExit(f"no step was taken:\n{said.read().decode('utf-8', 'replace')}")
                time.sleep(0.005)
            return time.perf_counter() - begin
        finally:
            child.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
            child.wait()


def _logged(experiment: Path) -> bool:
    logs = experiment.glob("runs/*/metrics.jsonl")
    lines = (line for log in logs for line in log.read_bytes().split(b"\n")[:-1])
    return any("loss" in json.loads(line) for line in lines)


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument("--text", type=Path, metavar="DIR", help="data.source; left out: the standard library's text")
    given = parsed(parser)
    others = busy()
    source = json.dumps(str(given.text.resolve()) if given.text else "stdlib")
    with tempfile.TemporaryDirectory() as work:
        file = Path(work, "start.toml")
        file.write_text(EXPERIMENT.format(source=source, **(TINY if given.quick else FULL)), encoding="utf-8")
        first = first_step(file, Path(work, "out"), "start-0")
        print(f"first run: {first:.1f} s to the first step", file=sys.stderr, flush=True)
        times = [first_step(file, Path(work, "out"), f"start-{i}") for i in range(1, given.rounds + 1)]
    n = len(times)
    found = Ratio(statistics.median(times), min(times), max(times), n, 1 - 2 / 2**n)
    result = judge(NAME, found, unit="s", ours=found.median)
    emit([result], others, quick=given.quick, times=times, first=first)


if __name__ == "__main__":
    main()
