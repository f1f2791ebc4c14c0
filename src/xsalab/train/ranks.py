"""The processes that train one run together: who there is, and what they say to each other beside the model's numbers.

Started by torchrun, which sets RANK, WORLD_SIZE and the address where they meet. Texts travel as bytes of tensors, so
that nothing is unpickled. What one of them cannot do, all of them are told and stop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..peers import Elsewhere, Lost, launched

T = TypeVar("T")
# what gloo says of a peer that has ended
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "Socket closed")
PATIENCE = timedelta(minutes=30)  # how long a process waits for one that lives; one that died is noticed at once


@dataclass(frozen=True)
class Ranks:
    """``rank`` of ``world`` processes; alone where nothing was started by torchrun."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over the processes of an array of one shape and dtype (float64 or int64), the same everywhere."""
        if self.world == 1:
            return values
        tensor = torch.from_numpy(np.array(values))
        dist.all_reduce(tensor)
        return tensor.numpy()

    def texts(self, text: str) -> list[str]:
        """The text of every process, by rank."""
        if self.world == 1:
            return [text]
        data = text.encode()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes)
        own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        every = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(every, own)
        return [bytes(t[:size].numpy()).decode() for t, size in zip(every, sizes.tolist(), strict=True)]

    def each(self, work: Callable[[], T]) -> list[T]:
        """What every process's ``work`` returns, a JSON value, by rank.

        An error of one is raised there; the others raise Elsewhere with its message, and none waits for it.
        """
        if self.world == 1:
            return [work()]
        fault: Exception | None = None
        own: dict[str, Any] = {}
        try:
            own = {"done": work()}
        except Exception as error:
            fault, own = error, {"failed": f"{type(error).__name__}: {error}"}
        said = [json.loads(text) for text in self.texts(json.dumps(own))]
        if fault is not None:
            raise fault
        for rank, other in enumerate(said):
            if "failed" in other:
                raise Elsewhere(f"process {rank} of {self.world} failed: {other['failed']}")
        return [other["done"] for other in said]

    def lead(self, work: Callable[[], T]) -> T:
        """What ``work`` returns in the first process, which alone does it; the others wait for it."""
        return self.each(lambda: work() if self.first else None)[0]  # pyright: ignore[reportReturnType]


ALONE = Ranks()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """This process among those that torchrun started, until the block ends; ``ALONE`` where there are none.

    device: "cpu" or "cuda"; on a GPU that of LOCAL_RANK is the current one. Raises ValueError where they cannot meet.
    """
    if launched() == 1:
        yield ALONE
        return
    if device == "cuda":
        local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= found:
            raise ValueError(f"process {local} of this machine has no GPU of its own: there are {found}")
        torch.cuda.set_device(local)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=PATIENCE))
        # torchrun keeps its store when it starts the processes again: addresses of those before must not be found there
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        # What is said about numbers of the model goes from GPU to GPU, all else between processors.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:  # torch's are RuntimeErrors of several kinds
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        first = str(error).splitlines()[0][:200]
        raise ValueError(
            f"the processes cannot meet at {where}: {first}. Is the port in use, or the first machine not reached? "
            "torchrun --standalone takes a free port; --master-port names another"
        ) from None
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in GONE):
            first = str(error).splitlines()[0][:200]
            raise Lost(f"another process is gone, and this one stops; its own error says why ({first})") from None
        raise
    dist.destroy_process_group()  # after an error it might wait for a process that is gone
