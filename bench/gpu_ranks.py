"""The part of bench/gpu.py with several GPUs: a step of one run on all of them, against one GPU."""

from __future__ import annotations

import statistics
from dataclasses import asdict

from gpu_bench import SMOKE, Bench
from measure import ratio


def ranks(b: Bench) -> None:
    """d12 and d24 with the whole model on every GPU, d12 in slices as well; processes of their own, as torchrun's.

    Their packages are not stood in for: xsalab must be installed.
    """
    from ranks import measure

    for label, size, shard in (("d12", b.plan.d12, False), ("d12", b.plan.d12, True), ("d24", b.plan.d24, False)):
        if b.plan is SMOKE and (shard or label == "d24"):
            continue
        times, built = measure(
            size.depth, size.width, processes=b.processes, context=size.context, rows=size.rows,
            vocabulary=size.vocabulary, rounds=b.plan.rounds, shard=shard, device=b.device, micro=size.micro,
            compiled=b.compile,
        )  # fmt: skip
        faster = ratio(times["one"], times["many"])
        b.figures.setdefault("ranks", {})[f"{label}{', sharded' if shard else ''}"] = {
            "processes": b.processes, **built, "times": times, "faster": asdict(faster),
            "efficiency": faster.median / b.processes,
            "tokens_s": built["tokens"] / statistics.median(times["many"]),
        }  # fmt: skip
