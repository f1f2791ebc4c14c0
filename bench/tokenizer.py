"""Text to tokens and to packed rows, here and by nanochat: python bench/tokenizer.py --nanochat DIR [--text DIR].

Both read the same documents with a vocabulary of the same size, on the same cores, in turns. Tokenizing alone: batches
of documents to ids, as nanochat's loader and our preparation encode them. Tokenizing and packing: of nanochat its
loader until all documents are encoded, a thousand of them still unpacked; of ours all of `xsalab data` but the training
of the tokenizer: both sides, their index and hashes, rows and their digest, written and synced. The checkout's
requirements must be importable (PYTHONPATH). Without --text it is the standard library's own text, which is no English.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from measure import Ratio, arguments, busy, emit, interleave, judge, not_run, parsed, ratio

from xsalab.data import DataConfig, Tokenizer, prepare
from xsalab.data.corpus import encode_batch
from xsalab.data.sources import open_source
from xsalab.data.storage import batched, threaded

NAME = "tokenizing and packing, against nanochat"
VOCABULARY, CONTEXT, ROWS = 8_192, 512, 16
DOCUMENTS, HELD_OUT = 4_096, 64
GROUP = 1_024  # documents of a row group, as in ClimbMix


def read_documents(text: Path | None, count: int) -> list[str]:
    """The first training documents of a folder of shards, or of the standard library."""
    config = DataConfig(source=str(text) if text else "stdlib")
    documents = open_source(config).documents("train", Counter())
    return [document.text for document in itertools.islice(documents, count)]


def write_shards(folder: Path, texts: Sequence[str]) -> list[str]:
    """Two shards in ClimbMix's layout, the second of them held out."""
    folder.mkdir()
    paths = []
    for number, part in enumerate((texts[:-HELD_OUT], texts[-HELD_OUT:])):
        paths.append(str(folder / f"shard_{number:05d}.parquet"))
        pq.write_table(pa.table({"text": pa.array(part, pa.string())}), paths[-1], row_group_size=GROUP)
    return paths


def peer_of(
    checkout: Path, texts: Sequence[str], paths: list[str], vocabulary: int
) -> tuple[Callable[[], int], Callable[[], int]]:
    """nanochat's tokenizing alone, and its loader; each returns the number of tokens."""
    sys.path.insert(0, str(checkout))
    from nanochat import dataloader  # pyright: ignore[reportMissingImports]
    from nanochat.tokenizer import RustBPETokenizer  # pyright: ignore[reportMissingImports]

    logging.getLogger("rustbpe").setLevel(logging.WARNING)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(texts), vocabulary)
    bos, encode = tokenizer.get_bos_token_id(), tokenizer.encode
    training = list(texts[:-HELD_OUT])
    dataloader.list_parquet_files = lambda **options: paths
    counted = [0, 0]  # documents, tokens

    def alone() -> int:
        parts = (training[i : i + 128] for i in range(0, len(training), 128))
        return sum(len(ids) - 1 for part in parts for ids in encode(part, prepend=bos, num_threads=4))

    def counting(texts: list[str], **options: Any) -> list[list[int]]:
        found = encode(texts, **options)
        counted[0] += len(texts)
        counted[1] += sum(map(len, found)) - len(texts)
        return found

    def packing() -> int:
        counted[:] = 0, 0
        tokenizer.encode = counting
        loader = dataloader.tokenizing_distributed_data_loader_bos_bestfit(
            tokenizer, ROWS, CONTEXT, "train", device="cpu"
        )
        while counted[0] < len(training):
            next(loader)
        tokenizer.encode = encode
        return counted[1]

    return alone, packing


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__ or "", rounds=8, nanochat=True)
    parser.add_argument("--text", type=Path, metavar="DIR", help="a folder of Parquet shards with a column `text`")
    given = parsed(parser)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    others = busy()
    count, vocabulary = (512, 1_024) if given.quick else (DOCUMENTS + HELD_OUT, VOCABULARY)
    texts = read_documents(given.text, count)
    training = texts[:-HELD_OUT]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        paths = write_shards(folder / "shards", texts)
        tokenizer = Tokenizer.train(texts, vocabulary)
        tokenizer.save(folder / "tokenizer.json")
        config = DataConfig(source=str(folder / "shards"), tokenizer=str(folder / "tokenizer.json"))
        homes = itertools.count()

        def alone() -> int:
            return sum(
                len(tokens)
                for _, tokens in threaded(lambda part: encode_batch(tokenizer, part, "uint16"), batched(training, 256))
            )

        def packing() -> int:
            corpus = prepare(config, vocabulary, folder / f"home-{next(homes)}")
            corpus.rows(CONTEXT)
            return corpus.manifest["train"]["tokens"]

        ours = {"alone": alone, "packing": packing}
        theirs: dict[str, Callable[[], int]] = {}
        if given.nanochat:
            theirs = dict(zip(ours, peer_of(given.nanochat, texts, paths, vocabulary), strict=True))
        figures: dict[str, Any] = {"documents": len(training), "bytes": sum(len(text.encode()) for text in training)}
        found: dict[str, Ratio] = {}
        for kind, side in ours.items():
            sides = {"ours": side, **({"nanochat": theirs[kind]} if theirs else {})}
            tokens = {name: call() for name, call in sides.items()}
            times = interleave(sides, given.rounds, label=f"tokenizing, {kind}")
            # by the token: nanochat's loader stops where it has read enough, not at a document
            each = {name: [seconds / tokens[name] for seconds in times[name]] for name in sides}
            figures |= {f"{kind}, {name}, tokens/s": 1 / statistics.median(each[name]) for name in sides}
            if theirs:
                found[kind] = ratio(each["nanochat"], each["ours"])
    text = "English text is asked for with --text" if given.text is None else ""
    if not theirs:
        emit([not_run(NAME, "needs --nanochat DIR")], others, quick=given.quick, figures=figures)
        return
    both = (figures[f"packing, {name}, tokens/s"] for name in ("ours", "nanochat"))
    result = judge(NAME, found["packing"], unit="tokens/s", **dict(zip(("ours", "peer"), both, strict=True)), note=text)
    emit([result], others, quick=given.quick, figures=figures, alone=vars(found["alone"]))


if __name__ == "__main__":
    main()
