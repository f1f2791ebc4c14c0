"""The targets of one H100 or H200, measured in under 6 minutes: python bench/gpu.py [--nanochat DIR] [--out FILE]

    python bench/gpu.py --nanochat ../nanochat --out gpu.json
    python bench/gpu.py --processes 8 --only ranks           one run on 8 GPUs against one GPU, whole and in slices
    python bench/gpu.py --device cpu --smoke           all parts at tiny sizes: shows that it works, figures say nothing

Needs this repository and what a CUDA image of PyTorch holds (torch 2.11 or newer): packages that xsalab imports and
that are not installed are stood in for, as nothing measured here calls them. Writes one JSON, anew after each part, so
that a run that is stopped leaves what it had. A part has a time by which it must be done; what did not fit stands in
"left_out" with the reason.

Training is the run that `xsalab run` makes: its model, its optimizer, its step, its compilation. FLOPs of the model are
6 for each weight of a matrix and token, and 12 · heads · head size · keys seen for attention, as nanochat counts them.
nanochat trains the same shapes with its own code, but for attention, which is ours: the same kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_bench import FULL, SMOKE, Bench
from gpu_kernels import attention, exclude, head, machine
from gpu_ranks import ranks
from gpu_standins import StandIns
from gpu_training import against_nanochat, d12, d24, optimizer
from measure import table

ROOT = Path(__file__).resolve().parent.parent

# Those with targets come first.
PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {  # reckoned seconds on an H100, compiling included
    "machine": (machine, 15),
    "exclude": (exclude, 15),
    "d12": (d12, 120),
    "nanochat": (against_nanochat, 80),
    "d24": (d24, 100),
    "optimizer": (optimizer, 10),
    "head": (head, 20),
    "attention": (attention, 40),
    "ranks": (ranks, 240),
}


class OutOfTime(Exception):
    """A part has had its time."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the body after so many seconds."""

    def ring(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(b: Bench, only: Sequence[str], write: Callable[[dict[str, Any]], None]) -> int:
    """All parts. 0: all that was judged is met; 1: something is missed, or broke."""
    left_out: dict[str, str] = {}
    spent: dict[str, float] = {}
    broke = False
    for name, (part, allowed) in PARTS.items():
        left, seconds = b.ends - time.monotonic(), allowed if b.plan is FULL else 100.0
        if only and name not in only:
            left_out[name] = "not asked for"
        elif name == "ranks" and b.processes == 1:
            left_out[name] = "needs --processes N"
        elif name == "nanochat" and b.nanochat is None:
            left_out[name] = "needs --nanochat DIR"
        elif left < seconds / 2:
            left_out[name] = f"{left:.0f} s were left, it takes up to {seconds:.0f}"
        else:
            print(f"{name}: up to {min(seconds, left):.0f} s", file=sys.stderr, flush=True)
            begin = time.monotonic()
            try:
                with deadline(min(1.5 * seconds, left)):
                    part(b)
            except OutOfTime:
                left_out[name] = f"stopped after {time.monotonic() - begin:.0f} s: its time was over"
            except Exception as error:  # told in the result; the other parts still run
                left_out[name] = f"broke: {type(error).__name__}: {str(error)[:500]}"
                broke = True
            spent[name] = round(time.monotonic() - begin, 1)
            if b.device == "cuda":
                torch.cuda.empty_cache()
        write(_content(b, left_out, spent))
    missed = any(row.verdict == "missed" for row in b.rows)
    return int(missed or broke)


def _content(b: Bench, left_out: dict[str, str], spent: dict[str, float]) -> dict[str, Any]:
    return {
        "program": "gpu.py",
        "environment": {
            "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
            "triton": _version("triton"), "compiled": b.compile, "smoke": b.plan is SMOKE,
            **({"device": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
               if b.device == "cuda" else {"device": "cpu"}),
        },
        "results": [asdict(row) for row in b.rows],
        "figures": b.figures,
        "left_out": left_out,
        "seconds": spent,
    }  # fmt: skip


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Measures and writes. Exit code 1 where a target is missed or a part broke, 2 for a mistake in the call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat, the peer")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="also one run on N GPUs, against one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes, else to stdout at the end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, nothing compiled: shows that it works")
    parser.add_argument("--seconds", type=float, help="for all of it (default 345)")
    parser.add_argument("--only", default="", metavar="PART,…", help=f"of {', '.join(PARTS)}")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if unknown := [name for name in only if name not in PARTS]:
        parser.error(f"--only {given.only}: {unknown[0]!r} is not one of {', '.join(PARTS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --smoke shows that the program works")
    if given.device == "cpu" and not given.smoke:
        parser.error("--device cpu needs --smoke: its sizes are a GPU's")
    if given.processes < 1 or (given.device == "cuda" and given.processes > torch.cuda.device_count()):
        parser.error(f"--processes {given.processes}: from 1 to the number of GPUs here")
    if given.nanochat is not None and not (given.nanochat / "nanochat" / "gpt.py").is_file():
        parser.error(f"--nanochat {given.nanochat}: no nanochat/gpt.py there; give a checkout of nanochat")
    stand_ins = StandIns()
    sys.meta_path.append(stand_ins)
    sys.path.insert(0, str(ROOT / "src"))
    plan = SMOKE if given.smoke else FULL
    os.environ["XSALAB_PLAIN"] = "1"  # kernels for CPUs are not built
    if given.smoke:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nanochat's optimizer asks for compilation
    ends = time.monotonic() + (given.seconds or plan.seconds + 240 * (given.processes > 1))
    b = Bench(plan, given.device, not given.smoke, given.nanochat, ends, given.processes)

    def write(content: dict[str, Any]) -> None:
        if given.out:
            text = json.dumps({**content, "stood_in_for": sorted(stand_ins.used)}, indent=1, ensure_ascii=False)
            beside = given.out.with_name(given.out.name + ".part")
            beside.write_text(text + "\n", encoding="utf-8")
            os.replace(beside, given.out)
        last.update(content)

    last: dict[str, Any] = {}
    code = run(b, only, write)
    print(table(b.rows), file=sys.stderr)
    for name, why in last["left_out"].items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    if not given.out:
        print(json.dumps(last, indent=1, ensure_ascii=False))
    return code


if __name__ == "__main__":
    sys.exit(main())
