"""What XSA on all layers costs a training step: time, bytes kept for backward, peak memory.

    python bench/variants.py [--rounds N] [--quick]

Steps of standard, XSA and standard once more take turns in one process, with kernels and in PyTorch alone; the second
standard shows what the method makes of no difference at all. 50 rounds are 100 steps of each. Peak memory is that of a
process an arm: what training adds to a process that has everything loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext

import torch
from measure import Ratio, Result, arguments, busy, emit, interleave, judge, not_run, parsed, ratio
from states import CONTEXT, SMALL, VOCABULARY, batch_of, config_of, stepper
from worker import Worker

from xsalab.eval.throughput import saved_bytes
from xsalab.model import native

ARMS = {"standard": "standard", "xsa": "xsa", "control": "standard"}
ROWS = 8
MEMORY_STEPS = 4
MILLION = 1e6


def timed(rounds: int, shape: dict[str, int], *, plain: bool) -> list[Result]:
    """The rows of one path; the states are built on it as well."""
    where = " in PyTorch" if plain else ""
    path = native.plain if plain else nullcontext
    configs = {arm: config_of(*SMALL, variant=variant, **shape) for arm, variant in ARMS.items()}
    with path():
        built = {arm: stepper(config) for arm, config in configs.items()}
        saved = {arm: saved_bytes(built[arm][0], batch_of(configs[arm], 0)) for arm in ("standard", "xsa")}

    def on_path(step: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            with path():
                return step()

        return run

    sides = {arm: on_path(step) for arm, (_, step) in built.items()}
    times = interleave(sides, rounds, warmup=2, label=f"step time{where}")
    medians = {arm: 1e3 * statistics.median(times[arm]) for arm in ARMS}
    results = []
    for arm, name in (("xsa", f"step time with XSA{where}, over without"),
                      ("control", f"step time of standard{where}, over standard")):  # fmt: skip
        found = ratio(times[arm], times["standard"])
        results.append(judge(name, found, unit="ms", ours=medians[arm], peer=medians["standard"]))
    name = f"bytes saved for backward with XSA{where}, over without"
    with_xsa, without = saved["xsa"] / MILLION, saved["standard"] / MILLION
    return [*results, judge(name, Ratio.exactly(with_xsa / without), unit="MB", ours=with_xsa, peer=without)]


def peaks(shape: dict[str, int]) -> Result:
    """Peak memory of both arms."""
    name, found = "peak memory with XSA, over without", {}
    for arm in ("standard", "xsa"):
        spec = {"side": "xsalab", "depth": SMALL[0], "width": SMALL[1], "variant": arm, **shape}
        with Worker(spec, threads=torch.get_num_threads()) as worker:
            for _ in range(MEMORY_STEPS):
                worker()
            found[arm] = worker.ask("memory")
    if None in found.values():
        return not_run(name, "this system does not tell a process's memory")
    with_xsa, without = found["xsa"] / MILLION, found["standard"] / MILLION
    return judge(name, Ratio.exactly(with_xsa / without), unit="MB", ours=with_xsa, peer=without)


def main() -> None:
    """Measures and prints."""
    given = parsed(arguments(__doc__ or "", rounds=50))
    native.load()
    others, results = busy(), []
    shape = {"context": CONTEXT, "rows": ROWS, "vocabulary": VOCABULARY}
    if given.quick:
        shape = {"context": 64, "rows": 2, "vocabulary": 256}
    for plain in (False, True):
        results += timed(given.rounds, shape, plain=plain)
    emit([*results, peaks(shape)], others, quick=given.quick)


if __name__ == "__main__":
    main()
