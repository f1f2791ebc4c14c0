"""What a variant costs: step times in turns on one device, and the bytes that autograd keeps for backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ..data import Batch
from ..optim import Schedule
from ..train import TrainState, train_step

STAT = Path("/proc/stat")


def interleaved_step_times(
    states: Mapping[str, TrainState],
    batch_of: Callable[[int], Batch],
    *,
    rounds: int,
    warmup: int = 2,
    micro_rows: int = 0,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """Seconds of single training steps, two a round and state, in the order A B … B A.

    Going there and back within a round takes a steady drift of the machine out of every ratio. The first
    ``warmup`` steps of each state are not in the result: they hold allocation and compilation. All states
    train on the same batches.
    """
    names = list(states)
    schedule = Schedule("nanochat", warmup + 2 * rounds + 1, warmup=1)
    for name in names:
        for step in range(warmup):
            _timed(states[name], batch_of(step), schedule, micro_rows)
    times: dict[str, list[float]] = {name: [] for name in names}
    for done in range(rounds):
        for leg, order in enumerate((names, names[::-1])):
            batch = batch_of(warmup + 2 * done + leg)
            for name in order:
                times[name].append(_timed(states[name], batch, schedule, micro_rows))
        tick(done + 1, rounds)
    return times


def _timed(state: TrainState, batch: Batch, schedule: Schedule, micro_rows: int) -> float:
    cuda = state.model.head.weight.is_cuda
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    train_step(state, batch, schedule, micro_rows=micro_rows)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def saved_bytes(state: TrainState, batch: Batch, micro_rows: int = 0) -> int:
    """Bytes of the tensors that one forward pass keeps for backward; a storage counts once, parameters do not."""
    own = {parameter.untyped_storage().data_ptr() for parameter in state.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = micro_rows or len(batch.inputs)
    device = state.model.head.weight.device
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        nats = state.model.token_nats(batch.inputs[:rows].to(device), batch.targets[:rows].to(device))
    del nats
    return sum(kept.values())


def busy_share(seconds: float = 1.0) -> float | None:
    """Share of all cores' time that others use while this process waits; None where the system does not tell.

    Measured, not the load average: that one still holds our own runs of the minute before.
    """
    before = _core_times()
    if before is None:
        return None
    time.sleep(seconds)
    after = _core_times()
    assert after is not None, "the system told a moment ago"
    passed = sum(after) - sum(before)
    idle = sum(after[3:5]) - sum(before[3:5])  # idle, and waiting for a disk
    return 1 - idle / passed if passed else None


def _core_times() -> list[int] | None:
    """Clock ticks of all cores by use, as Linux counts them."""
    if not STAT.is_file():
        return None
    return [int(part) for part in STAT.read_text(encoding="ascii").splitlines()[0].split()[1:9]]


def median_of(times: Sequence[float]) -> float:
    """Median of positive seconds."""
    ordered = sorted(times)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
