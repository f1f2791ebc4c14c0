"""Training against nanochat, side by side: tokens a second, and model FLOPs against this machine's matrix products.

    python bench/training.py --nanochat DIR [--rounds N] [--quick]

Both train the same model (the count of parameters is compared) on the same batch of 16 × 512 tokens: nanochat compiled,
with its own optimizer, in float32 as it comes and again with NANOCHAT_DTYPE=bfloat16; ours as `xsalab run` does. A
process for each, one step in turns. The checkout's requirements must be importable (PYTHONPATH).

FLOPs of the model are 6 for each weight of a matrix and token, and 12 · heads · head size · context for attention, as
nanochat counts them (causality would halve the latter). The yardstick is the best of several bfloat16 or float32
at::mm, each right after another, timed in the same rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from measure import Ratio, Result, arguments, busy, emit, interleave, judge, not_run, parsed, ratio
from states import CONTEXT, HEAD, LARGE, ROWS, SMALL, VOCABULARY, config_of
from worker import Worker

from xsalab.experiment.building import derived
from xsalab.train.loop import DTYPES

MM = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 384, 1536), (8192, 1536, 384))  # m, k, n
MM_SECONDS = 0.2  # of a block
PEERS = ("float32", "bfloat16")


def best_mm(dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...]) -> tuple[Callable[[], None], float]:
    """A block of products of the fastest shape, one right after another, and its floating-point operations."""
    rates: dict[float, tuple[Callable[[], None], float]] = {}
    for m, k, n in shapes:
        a, b, out = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.empty(m, n, dtype=dtype)
        one = _block(a, b, out, 1)
        seconds = statistics.median(interleave({"mm": one}, rounds=2, warmup=1)["mm"])
        calls = max(1, round(MM_SECONDS / seconds))
        rates[2 * m * k * n / seconds] = _block(a, b, out, calls), 2.0 * m * k * n * calls
    return rates[max(rates)]


def _block(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    return run


def measure(
    size: tuple[int, int], checkout: Path | None, rounds: int, *, context: int = CONTEXT, rows: int = ROWS,
    vocabulary: int = VOCABULARY, mm: tuple[tuple[int, int, int], ...] = MM,
) -> list[Result]:  # fmt: skip
    """The rows of one model. Raises ValueError where the two models are not the same, ChildProcessError for a side
    that breaks down.
    """
    depth, width = size
    label, threads = f"{depth} × {width}", torch.get_num_threads()
    shape = {"depth": depth, "width": width, "context": context, "rows": rows, "vocabulary": vocabulary}
    config = config_of(depth, width, context=context, rows=rows, vocabulary=vocabulary)
    numbers = derived(config)
    with ExitStack() as stack:
        sides: dict[str, Worker] = {}
        sides["ours"] = stack.enter_context(Worker({"side": "xsalab", "variant": "standard", **shape}, threads=threads))
        for dtype in PEERS if checkout else ():
            spec = {"side": "nanochat", "checkout": str(checkout), "head": HEAD, **shape}
            sides[dtype] = stack.enter_context(Worker(spec, threads=threads, environment={"NANOCHAT_DTYPE": dtype}))
            theirs, ours = sides[dtype].built, sides["ours"].built
            if theirs["parameters"] != ours["parameters"] or dtype not in theirs["dtype"]:
                raise ValueError(f"{label}: not the same model: ours {ours}, nanochat's in {dtype} {theirs}")
        block, flops = best_mm(DTYPES[numbers["dtype"]], mm)
        times = interleave({**sides, "mm": block}, rounds, warmup=2, label=f"training {label}")
    tokens = rows * context
    speed = {name: tokens / statistics.median(times[name]) for name in sides}
    results: list[Result] = []
    for dtype in PEERS:
        name = f"training {label}, against nanochat {dtype}"
        if dtype not in sides:
            results.append(not_run(name, "needs --nanochat DIR"))
            continue
        found = ratio(times[dtype], times["ours"])
        results.append(judge(name, found, unit="tokens/s", ours=speed["ours"], peer=speed[dtype]))
    if size != SMALL:
        share = scaled(ratio(times["mm"], times["ours"]), numbers["flops_per_token"] * tokens / flops)
        reached = numbers["flops_per_token"] * speed["ours"] / 1e9
        peak = flops / statistics.median(times["mm"]) / 1e9
        name = f"model FLOPs {label}, share of the best at::mm"
        results.append(judge(name, share, unit="GFLOP/s", ours=reached, peer=peak))
    return results


def scaled(found: Ratio, factor: float) -> Ratio:
    """A ratio of times as one of rates, given how much more the numerator's side does."""
    return replace(found, median=found.median * factor, low=found.low * factor, high=found.high * factor)


def main() -> None:
    """Measures and prints."""
    given = parsed(arguments(__doc__ or "", rounds=6, nanochat=True))
    others, results = busy(), []
    tiny = {"context": 64, "rows": 2, "vocabulary": 256, "mm": ((64, 64, 64),)} if given.quick else {}
    try:
        for size in (SMALL, LARGE):
            results += measure(size, given.nanochat, given.rounds, **tiny)
    except (ValueError, ChildProcessError) as error:
        raise SystemExit(f"error: {error}") from None
    emit(results, others, quick=given.quick)


if __name__ == "__main__":
    main()
