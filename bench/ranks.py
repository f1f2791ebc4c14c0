"""One run on several processes: its throughput against one process with as many threads, and what it sends.

    python bench/ranks.py [--processes 2] [--depth 6 --width 384] [--shard] [--rounds 8]

On GPUs: python bench/gpu.py --processes 8. Both sides train the same model on the same global batch, a step in turns,
in processes that hold no core while the others work. Told beside it: the bytes handed to each kind of exchange.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from socket import socket
from typing import Any

from measure import arguments, busy, emit, interleave, judge, parsed, ratio
from states import CONTEXT, LARGE, ROWS, VOCABULARY
from worker import Worker


def group(stack: ExitStack, spec: Mapping[str, Any], processes: int, threads: int) -> list[Worker]:
    """So many workers that have found each other, closed with the stack."""
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)
    ]
    with ThreadPoolExecutor(processes) as pool:  # each is built when all are there
        workers = list(pool.map(lambda place: Worker(spec, threads=threads, environment=place), places))
    return [stack.enter_context(worker) for worker in workers]


def together(workers: list[Worker], pool: ThreadPoolExecutor) -> Callable[[], float]:
    """One step of all of them; returns the loss, which they agree in."""

    def step() -> float:
        (loss,) = {*pool.map(lambda worker: worker(), workers)}
        return loss

    return step


def measure(
    depth: int, width: int, *, processes: int, context: int, rows: int, vocabulary: int, rounds: int,
    shard: bool = False, device: str = "cpu", micro: int = 0, compiled: bool = False,
) -> tuple[dict[str, list[float]], dict[str, Any]]:  # fmt: skip
    """Seconds of a step of "one" and of "many", in turns, and what a step of the latter hands over, in bytes.

    On the CPU one process has as many threads as the others together, on GPUs one GPU. Raises ChildProcessError for a
    side that breaks down, ArithmeticError where they learn different things.
    """
    spec = {
        "side": "divided", "depth": depth, "width": width, "context": context, "rows": rows, "vocabulary": vocabulary,
        "device": device, "micro": micro,
    }  # fmt: skip
    with ExitStack() as stack, ThreadPoolExecutor(processes) as pool:
        (one,) = group(stack, {**spec, "compiled": compiled}, 1, processes if device == "cpu" else 1)
        many = group(stack, {**spec, "shard": shard, "compiled": compiled and not shard}, processes, 1)
        step = together(many, pool)
        first, second = one(), step()
        if abs(second - first) > 0.5:
            raise ArithmeticError(f"the two sides learn different things: loss {first:.4f} against {second:.4f}")
        label = f"{processes} processes{', sharded' if shard else ''}"
        times = interleave({"one": one, "many": step}, rounds, label=label)
        return times, {**many[0].built, "tokens": rows * context}


def main() -> None:
    """Measures and prints."""
    parser = arguments(__doc__ or "", rounds=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--depth", type=int, default=LARGE[0])
    parser.add_argument("--width", type=int, default=LARGE[1])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--shard", action="store_true", help="slices of the model (FSDP2) instead of the whole")
    given = parsed(parser)
    context, rows, vocabulary = (32, 4, 256) if given.quick else (given.context, given.rows, given.vocabulary)
    others = busy()
    try:
        times, sent = measure(
            given.depth, given.width, processes=given.processes, shard=given.shard, rounds=given.rounds,
            context=context, rows=rows, vocabulary=vocabulary,
        )  # fmt: skip
    except (ArithmeticError, ChildProcessError) as error:
        raise SystemExit(f"error: {error}") from None
    n, ms = given.processes, {side: 1e3 * statistics.median(spent) for side, spent in times.items()}
    name = f"{n} processes on {n} cores, against 1 with {n} threads{', sharded' if given.shard else ''}"
    row = judge(name, ratio(times["one"], times["many"]), unit="ms", ours=ms["many"], peer=ms["one"])
    emit([row], others, quick=given.quick, sent=sent)


if __name__ == "__main__":
    main()
