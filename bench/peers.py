"""CORE here and by nanochat's own evaluation: python bench/peers.py --nanochat DIR --checkpoint DIR --bundle DIR.

Same checkpoint, items, processor and threads, task by task in turns, in one process. Prints one JSON value: seconds of
both, their ratio, and the answers that differ with the margin between the best two options. nanochat reads its own
tokenizer with tiktoken; where that is not installed, it is handed ours. Times are only worth something on a machine
that does nothing else: what other work held is printed beside them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xsalab.eval.bundle import open_bundle, read_bundle
from xsalab.eval.core import CoreConfig, answer_task, kept_items
from xsalab.eval.throughput import busy_share
from xsalab.interop.nanochat import latest_step, read_checkpoint


class StandInTokenizer:
    """Our tokenizer under the names that nanochat's evaluation uses."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get_bos_token_id(self) -> int:
        return self.tokenizer.bos

    def __call__(self, texts: Sequence[str], prepend: int) -> list[list[int]]:
        return [[prepend, *ids] for ids in self.tokenizer.encode(texts)]


def peer(checkpoint: Path, tokenizer: Any) -> tuple[Any, Any]:
    """nanochat's model with the checkpoint's weights, and its tokenizer."""
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    step = latest_step(checkpoint)
    meta = json.loads((checkpoint / f"meta_{step:06d}.json").read_text(encoding="utf-8"))
    model = GPT(GPTConfig(**meta["model_config"]))
    model.init_weights()
    model.load_state_dict(torch.load(checkpoint / f"model_{step:06d}.pt", map_location="cpu", weights_only=True))
    if importlib.util.find_spec("tiktoken") and importlib.util.find_spec("rustbpe"):
        from nanochat.tokenizer import RustBPETokenizer  # pyright: ignore[reportMissingImports]

        with (checkpoint / "tokenizer.pkl").open("rb") as file:  # as nanochat does: the user named this file
            return model.eval(), RustBPETokenizer(pickle.load(file), "<|bos|>")
    return model.eval(), StandInTokenizer(tokenizer)


def answers_of_peer(model: Any, tokenizer: Any, path: Path, task: Any, items: int) -> tuple[list[float | None], float]:
    """1 right, 0 wrong, None where nanochat refuses the item; and seconds."""
    from nanochat.core_eval import evaluate_example  # pyright: ignore[reportMissingImports]

    data = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(1337).shuffle(data)
    data = data[: items or None]
    meta = {"task_type": task.kind, "num_fewshot": task.shots, "continuation_delimiter": task.delimiter}
    found: list[float | None] = []
    begin = time.perf_counter()
    for index in range(len(data)):
        try:
            found.append(float(evaluate_example(index, model, tokenizer, data, torch.device("cpu"), meta)))
        except AssertionError:
            found.append(None)
    return found, time.perf_counter() - begin


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="CORE against nanochat's own evaluation")
    parser.add_argument("--nanochat", type=Path, required=True, metavar="DIR", help="a checkout")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a nanochat checkpoint")
    parser.add_argument("--bundle", required=True, help="an evaluation bundle, a folder")
    parser.add_argument("--max-per-task", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", default=())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sys.path.insert(0, str(args.nanochat))
    others = busy_share()
    ours, tokenizer = read_checkpoint(args.checkpoint)
    theirs, their_tokenizer = peer(args.checkpoint, tokenizer)
    bundle = read_bundle(open_bundle(args.bundle, "", Path()), tuple(args.tasks))
    config = CoreConfig(max_per_task=args.max_per_task)
    rows, differing = [], []
    for turn, task in enumerate(bundle.tasks):

        def ask_peer(task: Any = task) -> tuple[list[float | None], float]:
            return answers_of_peer(theirs, their_tokenizer, Path(task.path), task, args.max_per_task)

        def ask_ours(task: Any = task) -> tuple[Any, float]:
            begin = time.perf_counter()
            return answer_task(ours, tokenizer, task, config), time.perf_counter() - begin

        if turn % 2:
            (want, peer_seconds), (answers, seconds) = ask_peer(), ask_ours()
        else:
            (answers, seconds), (want, peer_seconds) = ask_ours(), ask_peer()
        got = {score.item: score for score in answers.scores}
        for item, expected in zip(kept_items(task, args.max_per_task), want, strict=True):
            score = got[item.name]
            if expected is not None and score.value != expected:
                means = sorted(-s / n for s, n in zip(score.options, score.lengths, strict=True))
                margin = means[1] - means[0] if len(means) > 1 else None
                differing.append({"task": task.name, "item": item.name, "peer": expected, "margin_nats": margin})
        rows.append({"task": task.name, "seconds": seconds, "peer_seconds": peer_seconds, "refused": want.count(None)})
        print(f"{task.name}: {peer_seconds / seconds:.2f} times as fast", file=sys.stderr, flush=True)
    total, peer_total = (sum(row[key] for row in rows) for key in ("seconds", "peer_seconds"))
    content = {
        "threads": args.threads, "busy": others, "items": args.max_per_task, "seconds": total,
        "peer_seconds": peer_total, "ratio": peer_total / total, "differing": differing, "tasks": rows,
    }  # fmt: skip
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
