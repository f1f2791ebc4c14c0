"""Runs a script of an unmodified nanochat checkout with XSA, another seed, and a log on our step convention.

    cd nanochat
    python -m xsalab.interop.nanochat --alpha 1 --layers all --log metrics.jsonl -- scripts.base_train --depth=4 …
    torchrun --nproc_per_node=8 -m xsalab.interop.nanochat --alpha 1 -- scripts.base_train --depth=12 …

Nothing in the checkout is changed. nanochat's checkpoints do not say that a model has XSA, so a file beside them does
(record.py). Start what reads them (scripts.base_eval, scripts.chat_sft, scripts.chat_cli …) in the same way, with the
same --alpha and --layers; others are refused.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...model import ModelConfig
from ..strengths import strengths
from .exclusion import NotThisModel, insert_exclusion
from .record import record_strengths
from .steps import watch_steps

TRAINER = "scripts.base_train"


def main() -> None:
    """Reads the words before ``--``, puts in what they ask, and runs the rest as ``python -m`` would.

    Exit code 2 and one line for a mistake in what was asked.
    """
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser, script = _parser(), words[cut + 1 :]
    args = parser.parse_args(words[:cut])
    checkout = args.nanochat.resolve()
    if not script:
        parser.error(f"what is to be run? Write it behind --, as in: -- {TRAINER} --depth=4")
    if not (checkout / "nanochat" / "flash_attention.py").is_file():
        parser.error(f"{checkout}: no nanochat checkout; run this in one, or give --nanochat DIR")
    if args.log and script[0] != TRAINER:
        parser.error(f"--log: only {TRAINER} is understood, not {script[0]}; leave --log out")
    log = args.log and args.log.resolve()
    os.chdir(checkout)
    sys.path[0] = str(checkout)
    sys.argv = script
    if not _is_script(script[0]):
        parser.error(f"{script[0]}: no such script in {checkout}; write it as {TRAINER}, without .py")
    try:
        strengths(args.alpha, "all", ModelConfig(depth=len(args.alpha) if isinstance(args.alpha, list) else 1))
        _without_wandb()
        insert_exclusion(args.alpha, args.layers)
        record_strengths(args.alpha, args.layers)
        if args.seed is not None:
            seed_with(args.seed)
        if log:
            watch_steps(log)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        runpy.run_module(script[0], run_name="__main__", alter_sys=True)
    except NotThisModel as error:
        parser.error(str(error))


def _is_script(name: str) -> bool:
    """Whether ``python -m`` would find it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):  # no such package above it, or a name that is a path
        return False
    return spec is not None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xsalab.interop.nanochat",
        usage="%(prog)s [options] -- SCRIPT [its options]",
        description="Runs a script of an unmodified nanochat checkout with XSA.",
        epilog=f"Example: python -m xsalab.interop.nanochat --alpha 1 --layers all -- {TRAINER} --depth=4",
    )
    parser.add_argument(
        "--alpha", type=_alpha, default=1.0, metavar="A", help="strength in [0, 1], or one a layer: 0,1,1"
    )
    parser.add_argument(
        "--layers", default="all", help="all, none, first:4, last:4, 0::2, 1,3,4, with-ve … (docs/xsa.md)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the seed of the weights, in the place of nanochat's 42")
    parser.add_argument("--log", type=Path, metavar="FILE", help="JSON lines: loss, val_bpb and CORE by step")
    parser.add_argument("--nanochat", type=Path, default=Path(), metavar="DIR", help="the checkout; else this folder")
    return parser


def _alpha(text: str) -> float | list[float]:
    numbers = [float(part) for part in text.split(",")]
    return numbers if len(numbers) > 1 else numbers[0]


def seed_with(seed: int) -> None:
    """nanochat sets its own seed, a number in its code, in ``compute_init``: ours is set right after."""
    common: Any = importlib.import_module("nanochat.common")
    original = common.compute_init

    @wraps(original)
    def compute_init(*args: Any, **named: Any) -> Any:
        found = original(*args, **named)
        torch.manual_seed(seed)
        return found

    common.compute_init = compute_init


def _without_wandb() -> None:
    """nanochat imports wandb, and with --run=dummy, its default, never uses it: an empty module will do."""
    if importlib.util.find_spec("wandb") is None:
        sys.modules["wandb"] = ModuleType("wandb")


if __name__ == "__main__":
    main()
