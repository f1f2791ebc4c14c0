"""XSA in an unmodified nanochat checkout: python bench/nanochat_lab.py --nanochat DIR [what `xsalab run` takes].

Once, beside the runs: writes this interpreter's standard library as text shards, the last one for validation, and has
nanochat train its tokenizer on them. Then carries out examples/nanochat/experiment.toml in the checkout, in which
nothing is changed. The interpreter that runs this must have xsalab and what nanochat imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from xsalab import cli
from xsalab.data.sources import DataConfig, open_source
from xsalab.files import make_folder

EXPERIMENT = Path(__file__).parent.parent / "examples" / "nanochat" / "experiment.toml"
NEEDED = ("rustbpe", "tiktoken", "requests", "filelock", "pyarrow", "yaml", "jinja2")  # imported by base_train
VOCABULARY = 1024
ROW_GROUP = 256  # documents


def prepare(checkout: Path, base: Path) -> None:
    """Text in nanochat's layout and its own tokenizer, once. OSError or CalledProcessError where it fails."""
    shards = base / "base_data_climbmix"
    if not (base / "tokenizer" / "token_bytes.pt").is_file():
        make_folder(shards)
        source = open_source(DataConfig())
        for number, side in enumerate(("train", "validation")):
            texts = [document.text for document in source.documents(side, Counter())]
            pq.write_table(pa.table({"text": texts}), shards / f"shard_{number:05d}.parquet", row_group_size=ROW_GROUP)
        words = [sys.executable, "-m", "scripts.tok_train", f"--vocab-size={VOCABULARY}", "--max-chars=8000000"]
        subprocess.run(words, cwd=checkout, env={**os.environ, "NANOCHAT_BASE_DIR": str(base)}, check=True)


def main() -> None:
    """Prepares and runs. Exit code 2 where something is missing."""
    parser = argparse.ArgumentParser(description="XSA in an unmodified nanochat checkout")
    parser.add_argument("--nanochat", type=Path, required=True, metavar="DIR", help="the checkout")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args, rest = parser.parse_known_args()
    checkout, base = args.nanochat.resolve(), (args.out / "nanochat-base").resolve()
    if not (checkout / "scripts" / "base_train.py").is_file():
        parser.error(f"--nanochat {args.nanochat}: no scripts/base_train.py there; give a nanochat checkout")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"nanochat needs {', '.join(missing)}: install them beside xsalab, or xsalab beside nanochat")
    prepare(checkout, base)
    settings = [f"--set=command.folder={checkout}", f"--set=command.values.base={base}", "--out", str(args.out)]
    sys.argv = ["xsalab", "run", str(EXPERIMENT), *settings, *rest]
    cli.main()


if __name__ == "__main__":
    main()
