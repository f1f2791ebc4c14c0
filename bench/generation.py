"""Cached generation against nanochat's engine: tokens a second, one row and 16, depth 6 × 384, full sampling.

    python bench/generation.py --nanochat DIR [--rounds N] [--quick]

Both continue the same prompt of 32 tokens at temperature 1, with random weights of the same shape: nanochat's
Engine.generate in float32 as it comes, and in a second process with NANOCHAT_DTYPE=bfloat16; ours as `xsalab sample`
does, in bfloat16, and in float32 beside it. What a generation prepares is part of its time, on both sides. The
checkout's requirements must be importable (PYTHONPATH).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Ratio, Result, arguments, busy, emit, interleave, judge, not_run, parsed, ratio
from states import CONTEXT, HEAD, LARGE, VOCABULARY

from xsalab.eval.generate import generate_batch
from xsalab.model import GPT, ModelConfig, init_weights

BATCHES, PROMPT, TOKENS = (1, 16), 32, 96
PEERS = ("float32", "bfloat16")
STD = 0.02  # of what starts as zeros, and of the head: else all tokens are equally likely


class NoSpecials:
    """A tokenizer without the tokens that nanochat's engine ends at."""

    def encode_special(self, name: str) -> int:
        return -1

    def get_bos_token_id(self) -> int:
        return -1


def filled(model: Any) -> Any:
    """Weights away from zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, STD)
    return model.eval()


def peer(checkout: Path, config: ModelConfig, prompt: list[int], tokens: int) -> Callable[[int], int]:
    """Generates for so many rows with nanochat's engine; tells how many tokens."""
    sys.path.insert(0, str(checkout))
    from nanochat.engine import Engine  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPT as PeerGPT  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPTConfig  # pyright: ignore[reportMissingImports]

    model = PeerGPT(
        GPTConfig(
            sequence_len=config.context, vocab_size=config.vocab_size, n_layer=config.depth, n_head=config.heads,
            n_kv_head=config.groups, n_embd=config.width, window_pattern=config.window,
        )
    )  # fmt: skip
    model.init_weights()
    engine = Engine(filled(model), NoSpecials())
    return lambda rows: sum(len(column) for column, _ in engine.generate(prompt, rows, tokens, 1.0, seed=1))


def ours(config: ModelConfig, dtype: torch.dtype, prompt: list[int], tokens: int) -> Callable[[int], int]:
    """The same with ours."""
    model = GPT(config, dtype=dtype)
    init_weights(model, 0)
    filled(model)

    def run(rows: int) -> int:
        options: dict[str, Any] = {"tokens": tokens, "temperature": 1.0, "seeds": range(rows), "batch_rows": rows}
        return sum(len(new) for new in generate_batch(model, [prompt] * rows, **options))

    return run


def times_of(checkout: Path, rounds: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Seconds by batch and side, in this process, with nanochat's dtype as the environment says."""
    depth, width = (2, 64) if quick else LARGE
    vocabulary, tokens = (256, 8) if quick else (VOCABULARY, TOKENS)
    config = ModelConfig(
        depth=depth, width=width, heads=width // HEAD, context=CONTEXT, vocab_size=vocabulary, window="L"
    )
    prompt = list(range(PROMPT))
    made = {
        "peer": peer(checkout, config, prompt, tokens),
        "bfloat16": ours(config, torch.bfloat16, prompt, tokens),
        "float32": ours(config, torch.float32, prompt, tokens),
    }
    found = {}
    for rows in BATCHES:

        def check(run: Callable[[int], int], rows: int = rows) -> None:
            if (count := run(rows)) != rows * tokens:
                raise ValueError(f"{count} tokens instead of {rows * tokens}: not the same work")

        sides = {name: lambda run=run: check(run) for name, run in made.items()}
        found[str(rows)] = interleave(sides, rounds, warmup=2, label=f"generation at batch {rows}")
    return found


def rows_of(found: dict[str, dict[str, dict[str, list[float]]]], tokens: int) -> list[Result]:
    """found: by nanochat's dtype, batch and side. The target is against nanochat as it comes."""
    results = []
    for rows in BATCHES:
        asked = {dtype: found[dtype][str(rows)] for dtype in PEERS}

        def against(dtype: str, own: str, asked: Any = asked) -> Ratio:
            return ratio(asked[dtype]["peer"], asked[dtype][own])

        def speed(dtype: str, side: str, rows: int = rows, asked: Any = asked) -> float:
            return rows * tokens / statistics.median(asked[dtype][side])

        others = "; ".join(
            f"ours in {own} over nanochat in {dtype}: {against(dtype, own).median:.2f} "
            f"({against(dtype, own).low:.2f} to {against(dtype, own).high:.2f})"
            for dtype, own in (("bfloat16", "bfloat16"), ("float32", "float32"))
        )
        note = f"ours in bfloat16 over nanochat's float32 is the ratio; {others}"
        name, own, theirs = (
            f"generation at batch {rows}, against nanochat",
            speed("float32", "bfloat16"),
            speed("float32", "peer"),
        )
        results.append(judge(name, against("float32", "bfloat16"), unit="tokens/s", ours=own, peer=theirs, note=note))
    return results


def main() -> None:
    """Measures and prints. A child measures for each of nanochat's dtypes, which it reads when it is imported."""
    parser = arguments(__doc__ or "", rounds=6, nanochat=True)
    parser.add_argument("--child", action="store_true", help="for this program itself: times alone, in this process")
    given = parsed(parser)
    if given.child:
        print(json.dumps(times_of(given.nanochat, given.rounds, given.quick)))
        return
    others = busy()
    if given.nanochat is None:
        emit(
            [not_run(f"generation at batch {rows}, against nanochat", "needs --nanochat DIR") for rows in BATCHES],
            others,
        )
        return
    found = {}
    for dtype in PEERS:
        environment = {**os.environ, "NANOCHAT_DTYPE": dtype}
        words = [sys.executable, __file__, *sys.argv[1:], "--child"]
        child = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=False)
        if child.returncode:
            raise SystemExit(f"error: nanochat in {dtype}: the child ended with {child.returncode}")
        found[dtype] = json.loads(child.stdout.decode("utf-8").splitlines()[-1])
    emit(rows_of(found, 8 if given.quick else TOKENS), others, quick=given.quick, times=found)


if __name__ == "__main__":
    main()
