"""MEMORY OF A RUN, before it is started: the model's own step on tensors without contents, every storage counted.

Tensors of torch's device "meta" have shapes and storages and no numbers. A step of the real model and optimizer runs on
them: forward, backward, the update. What is alive at a time is summed as storages come and go; the peak is the largest
sum. Not in it: the process itself (Python, PyTorch, a CUDA context, compiled code), buffers inside a kernel, what an
allocator keeps beside it, the batches.

The path counted is PyTorch's without compilation: the C++ and Triton kernels and torch.compile keep less. Attention
keeps q, k, v, its output and a number a head and position, as flash attention does; on a GPU whatever the window.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .config import digest, dump
from .experiment.building import compute_dtype, rates_of
from .experiment.design import RunConfig
from .model import GPT, head
from .optim import Hybrid
from .optim.muon import STACK_ENTRIES
from .train.loop import DTYPES

aten = torch.ops.aten
MANY = 4096  # tokens a pass, at least, and the head's largest block is full: from there on all grows with the rows


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


_KNOWN: dict[str, Memory] = {}  # by what was counted: arms of equal models are counted once a process


def memory_of(config: RunConfig, rows: int = 0) -> Memory:
    """Of one run on each of its devices; ``rows`` a pass, by default as configured.

    What a pass keeps is proportional to its rows, so many rows are reckoned from few.
    """
    own = _rows_of_a_device(config)
    rows = rows or config.train.micro_rows or own
    return _divided(_at(config, rows, accumulates=rows < own), config.train.processes, config.train.shard)


def rows_that_fit(config: RunConfig, limit: float) -> int:
    """The most rows a pass whose peak stays within ``limit`` bytes, a divisor of a device's rows; 0 where none does."""
    own, train = _rows_of_a_device(config), config.train
    legal = [rows for rows in range(own, 0, -1) if own % rows == 0]
    peaks = (_divided(_at(config, rows, accumulates=own > 1), train.processes, train.shard).peak for rows in legal)
    return next((rows for rows, peak in zip(legal, peaks, strict=True) if peak <= limit), 0)


def _rows_of_a_device(config: RunConfig) -> int:
    return config.train.batch_rows(config.model.context) // config.train.processes


def _at(config: RunConfig, rows: int, accumulates: bool) -> Memory:
    """On one device alone. ``accumulates``: a pass finds the gradients of the passes before it."""
    plain = dataclasses.replace(
        config.train, tokens=1, batch_tokens=config.model.context, micro_rows=0, processes=1, shard=False,
        permute_rows=False,
    )  # fmt: skip
    alike = dataclasses.replace(config, seed=0, train=plain, optim=dataclasses.replace(config.optim, lr_scale=1.0))
    row = config.model.vocab_size * DTYPES[compute_dtype(config)].itemsize  # bytes of a token's logits
    few = max(1, max(MANY, head.BLOCK_BYTES[config.train.device] // row) // config.model.context)
    if rows <= 2 * few:
        return _known(alike, rows, accumulates)
    one, two = (_known(alike, count, accumulates) for count in (few, 2 * few))
    further = (rows - few) / few
    activations, passes = (
        round(getattr(one, name) + further * (getattr(two, name) - getattr(one, name)))
        for name in ("activations", "passes")
    )
    return dataclasses.replace(one, rows=rows, activations=activations, passes=passes)


def _divided(whole: Memory, processes: int, shard: bool) -> Memory:
    """On one of several processes: the optimizer's state lies on the parameters' owners, sharded all three do.

    What a sharded run gathers for the layer at work is not counted.
    """
    parts = {name: getattr(whole, name) for name in ("weights", "gradients", "state")}
    own = {name: of // processes if shard or name == "state" else of for name, of in parts.items()}
    less = sum(parts.values()) - sum(own.values())
    return dataclasses.replace(whole, passes=whole.passes - less, update=whole.update - less, **own)


def _known(config: RunConfig, rows: int, accumulates: bool) -> Memory:
    key = digest([dump(config), rows, accumulates])
    if key not in _KNOWN:
        _KNOWN[key] = _counted(config, rows, accumulates)
    return _KNOWN[key]


def _counted(config: RunConfig, rows: int, accumulates: bool) -> Memory:
    dtype, device = DTYPES[compute_dtype(config)], config.train.device
    kernel = config.train.attention
    shape = config.model
    if device == "cuda" and kernel == "auto":  # its kernels for windows keep what those without keep
        kernel, shape = "sdpa", dataclasses.replace(shape, window="L")
    rates = rates_of(config)
    with _head_of(device), torch.device("meta"), _Attention(), _Alive() as alive:
        model = GPT(shape, config.variant, dtype=dtype, kernel=kernel)
        optimizer = Hybrid(model, config.optim, rates, dtype)
        parameters = list(model.parameters())
        weights = alive.bytes
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        gradients = alive.bytes - weights
        optimizer.step()
        state = alive.bytes - weights - gradients
        alive.peak = 0
        optimizer.step(only=parameters if device == "cuda" else _one_stack(parameters))
        update = alive.peak
        if not accumulates:
            optimizer.zero_grad(set_to_none=True)
        tokens, targets = torch.empty(2, rows, config.model.context, dtype=torch.int64).unbind()
        before, alive.peak = alive.bytes, 0
        nats = model.token_nats(tokens, targets).sum()
        activations = alive.bytes - before
        nats.backward()
    return Memory(rows, weights, gradients, state, activations, alive.peak, update)


def _one_stack(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The matrices that Muon takes at one time on a CPU (``muon.stacks``), of every shape; all other parameters."""
    left: dict[torch.Size, int] = {}
    found = []
    for parameter in parameters:
        room = left.setdefault(parameter.shape, max(1, STACK_ENTRIES // parameter.numel()))
        if room or parameter.dim() != 2:
            found.append(parameter)
            left[parameter.shape] = room - 1
    return found


@contextmanager
def _head_of(device: str) -> Iterator[None]:
    """The output head works in the blocks of the device that is meant."""
    sizes = (head.BLOCK_BYTES, head.CACHE_BYTES)
    try:
        for of in sizes:
            of["meta"] = of[device]
        yield
    finally:
        for of in sizes:
            of.pop("meta", None)


class _Attention(TorchFunctionMode):
    """In the place of torch's attention: on tensors without contents it would write out the scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _Flash.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class _Alive(TorchDispatchMode):
    """``bytes`` of the storages that are alive now, and their largest sum since ``peak`` was set to 0.

    It answers what depends on a tensor's contents as training does: every target counts, every weight is equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to tell the compiler so would import it: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return True
        if func is aten._fused_adamw_.default:  # all in place
            return None
        if func is aten.nonzero.default:
            found = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            found = args[0].new_empty(args[0].numel())
        else:
            found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return found

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes()
            self.bytes += size
            self._known[key] = weakref.ref(storage, self._forget(key, size))

    def _forget(self, key: int, size: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self.bytes -= size
            self._known.pop(key, None)

        return gone
