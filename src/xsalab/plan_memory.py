"""MEMORY OF A RUN, before it is started: the model's own step on tensors without contents, every storage counted.

torch's fake tensors have shapes and storages and no numbers. Two steps of the real model and optimizer run on them:
forward, backward, the update. What is alive at a time is summed as storages come and go; the peak is the largest sum.
Not in it: the process itself (Python, PyTorch, a CUDA context, compiled code), buffers inside a kernel, what an
allocator keeps beside it, the batches.

The path counted is PyTorch's without compilation: the C++ and Triton kernels and torch.compile keep less. On a GPU
attention is counted as flash attention, whatever the window.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .config import digest, dump
from .experiment.building import compute_dtype, rates_of
from .experiment.design import RunConfig
from .model import GPT, head, native
from .optim import Hybrid
from .train.loop import DTYPES

aten = torch.ops.aten
MANY = 4096  # tokens a pass from which the head's largest block is full
_KNOWN: dict[str, Memory] = {}  # by what was counted: arms of equal models are counted once a process


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, of one run at a number of rows a pass.

    ``activations``: what one pass keeps for its backward. ``passes`` and ``update``: the largest sum of all that is
    alive, in the passes over the micro-batches and in the optimizer's update; they are not sums of the four before.
    """

    rows: int
    weights: int
    gradients: int
    state: int
    activations: int
    passes: int
    update: int

    @property
    def peak(self) -> int:
        return max(self.passes, self.update)


def memory_of(config: RunConfig, rows: int = 0) -> Memory:
    """Of one run on each of its devices; ``rows`` a pass, by default as configured.

    What a pass keeps is proportional to its rows, so many rows are reckoned from few.
    """
    train = config.train
    own = train.batch_rows(config.model.context) // train.processes  # of a batch, on one device
    rows = rows or train.micro_rows or own
    accumulates = rows < own
    plain = dataclasses.replace(train, tokens=1, micro_rows=0, processes=1, shard=False, permute_rows=False)
    optim = dataclasses.replace(config.optim, lr_scale=1.0)
    plain_config = dataclasses.replace(config, seed=0, train=plain, optim=optim)
    few = max(1, MANY // config.model.context)
    if rows <= 2 * few:
        return _divided(_known(plain_config, rows, accumulates), train.processes, train.shard)
    one, two = (_known(plain_config, count, accumulates) for count in (few, 2 * few))
    further = (rows - few) / few
    activations, passes = (
        round(getattr(one, name) + further * (getattr(two, name) - getattr(one, name)))
        for name in ("activations", "passes")
    )
    whole = dataclasses.replace(one, rows=rows, activations=activations, passes=passes)
    return _divided(whole, train.processes, train.shard)


def rows_that_fit(config: RunConfig, limit: float) -> int:
    """The most rows a pass whose peak stays within ``limit`` bytes, a divisor of a device's rows; 0 where none does."""
    own = config.train.batch_rows(config.model.context) // config.train.processes
    legal = [rows for rows in range(own, 0, -1) if own % rows == 0]
    return next((rows for rows in legal if memory_of(config, rows).peak <= limit), 0)


def _divided(whole: Memory, processes: int, shard: bool) -> Memory:
    """On one of several processes: the optimizer's state lies on the parameters' owners, sharded all three do."""
    if processes == 1:
        return whole
    weights, gradients = (
        (whole.weights // processes, whole.gradients // processes) if shard else (whole.weights, whole.gradients)
    )
    state = whole.state // processes
    less = whole.weights - weights + whole.gradients - gradients + whole.state - state
    return dataclasses.replace(
        whole, weights=weights, gradients=gradients, state=state,
        passes=whole.passes - less, update=whole.update - less,
    )  # fmt: skip


def _known(config: RunConfig, rows: int, accumulates: bool) -> Memory:
    key = digest([dump(config), rows, accumulates])
    if key not in _KNOWN:
        _KNOWN[key] = _counted(config, rows, accumulates)
    return _KNOWN[key]


def _counted(config: RunConfig, rows: int, accumulates: bool) -> Memory:
    dtype, context = DTYPES[compute_dtype(config)], config.model.context
    on_gpu = config.train.device == "cuda"
    shape = dataclasses.replace(config.model, window="L") if on_gpu else config.model
    with _head_of(config.train.device), FakeTensorMode(), _Alive() as alive, native.plain():
        model = GPT(shape, config.variant, dtype=dtype, kernel="sdpa" if on_gpu else config.train.attention)
        optimizer = Hybrid(model, config.optim, rates_of(config), dtype)
        weights = alive.bytes
        tokens, targets = (torch.zeros(rows, context, dtype=torch.int64) for _ in range(2))
        activations = passes = update = 0
        for _ in range(2):  # the first makes the optimizer's state
            optimizer.zero_grad(set_to_none=True)
            alive.peak = 0
            for _ in range(2 if accumulates else 1):
                before = alive.bytes
                nats = model.token_nats(tokens, targets).sum()
                activations = alive.bytes - before
                nats.backward()
                del nats
            passes, alive.peak = alive.peak, 0
            optimizer.step()
            update = alive.peak
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        state = sum(t.nbytes for t in optimizer.named_state().values())
    return Memory(rows, weights, gradients, state, activations, passes, update)


@contextmanager
def _head_of(device: str) -> Iterator[None]:
    """The output head works in a device's blocks, although its tensors are said to lie on the CPU."""
    kept = [(sizes, sizes["cpu"]) for sizes in (head.BLOCK_BYTES, head.CACHE_BYTES)]
    try:
        for sizes, _ in kept:
            sizes["cpu"] = sizes[device]
        yield
    finally:
        for sizes, before in kept:
            sizes["cpu"] = before


class _Alive(TorchDispatchMode):
    """``bytes`` of the storages that are alive now, and their largest sum since ``peak`` was set to 0.

    It answers what depends on a tensor's contents as training does: every target counts, every weight is equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return True
        if func is aten.nonzero.default:
            found = torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.int64)
        elif func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            found = args[0].flatten()
        else:
            found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return found

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self.bytes += size
        self._known[key] = weakref.ref(storage, self._forget(key, size))

    def _forget(self, key: int, size: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self.bytes -= size
            self._known.pop(key, None)

        return gone
