"""The bank of real runs for `xsalab calibrate`: python bench/bank.py FILE.toml [--out OUT] TABLE.parquet

Turns the finished runs of an experiment into one compact table, a row for each run and document. The bank that ships
with the package: `xsalab run experiments/bank.toml`, then
`python bench/bank.py experiments/bank.toml src/xsalab/bank.parquet`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from xsalab.calibrate import collect, read_bank
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.store import RunStore
from xsalab.files import write_atomic

LARGEST = 2_000_000  # bytes; it is part of the package


def main() -> None:
    """Reads, writes, and says what is in it."""
    parser = argparse.ArgumentParser(description="Turns the finished runs of an experiment into a bank.")
    parser.add_argument("experiment", type=Path, metavar="FILE.toml")
    parser.add_argument("table", type=Path, metavar="TABLE.parquet")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the experiment was run")
    given = parser.parse_args()
    experiment = load_experiment(given.experiment)
    table = collect(experiment, RunStore.of(experiment, given.out))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=19)
    content = sink.getvalue().to_pybytes()
    if len(content) > LARGEST:
        raise SystemExit(f"{len(content):,} bytes: over {LARGEST:,}; fewer validation documents (eval.max_bytes)")
    write_atomic(given.table, content)
    bank = read_bank(table)
    for (point, arm), runs in bank.nats.items():
        print(f"{point}, {arm}: {len(runs)} runs × {len(bank.size[point])} documents")
    print(f"{given.table}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
