"""ONE RUN ON MANY DEVICES: how a step is divided among processes. Muon's work is done once, not once a process.

Alone          one process, one device
DataParallel   every process has the whole model; each parameter belongs to one of them, its owner, where its averaged
               gradient arrives, its moments live and its update is made; the new weights are sent to all
FullySharded   FSDP2 (torch's fully_shard): every process keeps a slice of the rows of each matrix and table. Tables are
               updated slice by slice; a matrix that Muon trains is updated whole by its owner, which keeps a whole copy

A batch is divided by rows, and gradients are added up before anything is made of them, so that clipping and the norm
are those of the whole batch. What is sent goes in portions of a few megabytes, while other portions are computed.
Sources: the division of Muon by matrices, Moonlight (arXiv 2502.16982) and nanochat; state by owner, ZeRO (1910.02054).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model import GPT
from ..optim import Hybrid
from ..optim.hybrid import assign_groups
from .ranks import ALONE, Ranks

PORTION = 2**22  # numbers at most that are sent as one, but for a larger parameter
PORTIONS = 4  # that an owner has at least, where its share is not tiny: so that sending and computing overlap
LEAST_PORTION = 2**15
ELEMENT_COST = 1000.0  # of an update of one number in floating-point operations: it is memory that it waits for
SLICED = ("matrix", "head", "embedding", "value_embedding")  # what FullySharded cuts into rows; the rest is small

MakeOptimizer = Callable[[Mapping[str, Tensor]], Hybrid]


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all of them, () in float32; 0 where there are none."""
    if not gradients:
        return torch.zeros(())
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).norm()


class Alone:
    """One process, one device: nothing is sent. The others do the same with more hands."""

    ranks: Ranks = ALONE

    def __init__(self, model: GPT) -> None:
        self.model = model

    def optimizer(self, make: MakeOptimizer) -> Hybrid:
        """The optimizer of what this process updates."""
        return make(dict(self.model.named_parameters()))

    def counted(self, targets: Tensor) -> int:
        """Targets of the whole batch that count; ``targets`` are this process's share, on the CPU."""
        return int(self.ranks.sum(np.array(int((targets >= 0).sum()))))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward of a micro-batch; ``last``: of the step."""
        loss.backward()

    def reduce(self, loss: Tensor) -> tuple[float, float]:
        """After the last backward: the loss of the whole batch, and the 2-norm of its gradient.

        loss () float64 is this process's part of it.
        """
        norm = global_norm(self._gradients())
        # one wait for the device, not two
        total, norm = torch.stack((loss, norm.double().to(loss.device))).tolist()
        return total, norm

    def scale(self, factor: float) -> None:
        """Multiplies the whole gradient: clipping."""
        torch._foreach_mul_(self._gradients(), factor)

    def step(self, optimizer: Hybrid) -> None:
        """One update."""
        optimizer.step()

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    # What a checkpoint holds: whole tensors by name, each written by one process, read by any number of them.

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole parameters, in every process, one after the other."""
        yield from self.model.named_parameters()

    def whole_weights(self) -> dict[str, Tensor]:
        """All weights and variant buffers in the first process; the others, which must call it too, may get {}."""
        return dict(self.model.state_dict())

    def own_weights(self) -> dict[str, Tensor]:
        """Those that this process writes."""
        return self.whole_weights()

    def own_state(self, optimizer: Hybrid) -> dict[str, Tensor]:
        """The optimizer's state that this process writes, whole, by "parameter:key"."""
        return optimizer.named_state()

    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Puts a whole weight into the model, converted to its dtype."""
        self.model.state_dict()[name].copy_(tensor)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of what a checkpoint of this model holds."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def load_state(self, optimizer: Hybrid, tensors: Mapping[str, Tensor]) -> None:
        """Puts back what ``own_state`` of all processes gave."""
        optimizer.load_named_state(tensors)


@dataclass(frozen=True, eq=False)
class Portion:
    """Parameters of one owner and dtype that are sent as one. ``names`` in the order of backward."""

    owner: int
    names: tuple[str, ...]
    size: int  # numbers


def update_cost(name: str, shape: tuple[int, ...], muon: bool) -> float:
    """Floating-point operations, roughly, of one parameter's update."""
    size = math.prod(shape)
    if not muon:
        return ELEMENT_COST * size
    short, long = sorted(shape)
    return ELEMENT_COST * size + 5 * (4 * short * short * long + 2 * short**3)


def owners(costs: Mapping[str, float], world: int) -> dict[str, int]:
    """Parameter -> the process that updates it: the costliest first, each to the one with the least so far."""
    loads, found = [0.0] * world, dict[str, int]()
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owner = loads.index(min(loads))
        loads[owner] += costs[name]
        found[name] = owner
    return found


def backward_order(names: Iterable[str]) -> list[str]:
    """Parameters in about the order in which backward is done with them: the head, the last block, …, the embedding."""

    def place(name: str) -> float:
        if name.startswith("head."):
            return -math.inf
        layer = re.match(r"(?:blocks|value_embeddings)\.(\d+)\.", name)
        return -int(layer[1]) if layer else 1.0  # residual factors are used by every block

    return sorted(names, key=place)


def portions(sizes: Mapping[str, int], owner: Mapping[str, int], kinds: Mapping[str, Any], world: int) -> list[Portion]:
    """The parameters in portions, each of one owner and kind, in the order in which backward fills them."""
    share = sum(sizes.values()) / world
    limit = min(PORTION, max(LEAST_PORTION, round(share / PORTIONS)))
    filling: dict[tuple[int, Any], list[str]] = {}
    done: list[list[str]] = []
    for name in backward_order(sizes):
        key = owner[name], kinds[name]
        members = filling.get(key, [])
        if members and sum(sizes[m] for m in members) + sizes[name] > limit:
            done.append(filling.pop(key))
        filling.setdefault(key, []).append(name)
    done += filling.values()
    return [Portion(owner[names[0]], tuple(names), sum(sizes[n] for n in names)) for names in done]


class DataParallel(Alone):
    """Every process holds the whole model; gradients are added up at the owners, weights are sent from there."""

    def __init__(self, model: GPT, kind: str, ranks: Ranks) -> None:
        """kind: of the optimizer, "hybrid", "muon" or "adamw"."""
        super().__init__(model)
        self.ranks = ranks
        self.parameters = dict(model.named_parameters())
        groups = assign_groups(model)
        muon = {name: groups[name] == "matrix" and kind != "adamw" for name in groups}
        self.owner = owners(
            {name: update_cost(name, tuple(p.shape), muon[name]) for name, p in self.parameters.items()}, ranks.world
        )
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        kinds = {name: (muon[name], p.dtype) for name, p in self.parameters.items()}
        self.portions = portions(sizes, self.owner, kinds, ranks.world)
        self.sent: list[tuple[Portion, Tensor, dist.Work]] = []
        self.arrived: set[str] = set()
        self.last = False
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name))

    def backward(self, loss: Tensor, last: bool) -> None:
        self.last = last
        if last:
            self.sent, self.arrived = [], set()
        loss.backward()

    def _ready(self, name: str) -> None:
        """A gradient is complete. Portions leave in one order in all processes, whatever the order of the gradients."""
        if not self.last:
            return
        self.arrived.add(name)
        while len(self.sent) < len(self.portions) and self.arrived.issuperset(self.portions[len(self.sent)].names):
            self._send(self.portions[len(self.sent)])

    @torch.no_grad()
    def _send(self, portion: Portion) -> None:
        """Begins to add a portion's gradients up at its owner; a gradient that is missing here is zero."""
        members = [self.parameters[name] for name in portion.names]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        buffer = gradients[0].contiguous() if len(members) == 1 else torch.cat([g.reshape(-1) for g in gradients])
        work = dist.reduce(buffer, portion.owner, async_op=True)
        assert work is not None
        self.sent.append((portion, buffer, work))

    @torch.no_grad()
    def reduce(self, loss: Tensor) -> tuple[float, float]:
        had = torch.tensor([p.grad is not None for p in self.parameters.values()], dtype=torch.float64)
        for portion in self.portions[len(self.sent) :]:
            self._send(portion)
        for portion, buffer, work in self.sent:
            work.wait()
            for name, gradient in zip(portion.names, self._parts(portion, buffer), strict=True):
                self.parameters[name].grad = gradient if portion.owner == self.ranks.rank else None
        self.sent = []
        total, square = _told(loss, global_norm(self._gradients()), had, self.parameters.values())
        return total, math.sqrt(square) if math.isfinite(square) else square

    def _parts(self, portion: Portion, buffer: Tensor) -> Iterator[Tensor]:
        members = [self.parameters[name] for name in portion.names]
        pieces = buffer.reshape(-1).split([p.numel() for p in members])
        return (piece.view_as(p) for piece, p in zip(pieces, members, strict=True))

    @torch.no_grad()
    def step(self, optimizer: Hybrid) -> None:
        """Each owner updates its portions in turn; while one is computed, those before it are on their way."""
        waiting: list[tuple[Portion, Tensor, dist.Work]] = []
        for portion in (p for turn in _turns(self.portions, self.ranks.world) for p in turn if p is not None):
            members = [self.parameters[name] for name in portion.names]
            if portion.owner == self.ranks.rank:
                optimizer.step(only=members)
            if len(members) == 1:
                buffer = members[0].data
            elif portion.owner == self.ranks.rank:
                buffer = torch.cat([p.data.reshape(-1) for p in members])
            else:
                buffer = members[0].new_empty(portion.size)
            work = dist.broadcast(buffer, portion.owner, async_op=True)
            assert work is not None
            waiting.append((portion, buffer, work))
        for portion, buffer, work in waiting:
            work.wait()
            members = [self.parameters[name] for name in portion.names]
            if len(members) > 1 and portion.owner != self.ranks.rank:
                torch._foreach_copy_([p.data for p in members], list(self._parts(portion, buffer)))

    def own_weights(self) -> dict[str, Tensor]:
        """Parameters by owner; buffers are the first process's."""
        return {
            name: tensor for name, tensor in self.model.state_dict().items()
            if self.owner.get(name, 0) == self.ranks.rank
        }  # fmt: skip

    def load_state(self, optimizer: Hybrid, tensors: Mapping[str, Tensor]) -> None:
        optimizer.load_named_state(
            {key: t for key, t in tensors.items() if self.owner.get(key.rsplit(":", 1)[0], 0) == self.ranks.rank}
        )


def _told(loss: Tensor, norm: Tensor, had: Tensor, parameters: Iterable[nn.Parameter]) -> tuple[float, float]:
    """Sums over the processes, in one exchange: of the losses, and of the squared norms.

    had: 1 for each parameter that has a gradient here. One that has none anywhere keeps none, so that it does not move.
    """
    told = torch.cat((loss.reshape(1), norm.double().to(loss.device).square().reshape(1), had.to(loss.device)))
    dist.all_reduce(told)
    total, square, *present = told.tolist()
    for parameter, somewhere in zip(parameters, present, strict=True):
        if not somewhere:
            parameter.grad = None
    return total, square


def _turns(every: list[Portion], world: int) -> list[list[Portion | None]]:
    """The owners' portions in turns, one of each owner (None where it has no more), so that all compute at a time."""
    by_owner = [[portion for portion in every if portion.owner == rank] for rank in range(world)]
    return [list(turn) for turn in itertools.zip_longest(*by_owner)]


class _Sending:
    """An exchange of every process with every other, on its way. It holds what is sent until that has arrived."""

    def __init__(self, sent: Tensor, to: list[int], of: list[int]) -> None:
        """sent (Σ to,): numbers for each process; ``of`` each so many are expected."""
        self.sent, self.buffer = sent, sent.new_empty(sum(of))
        work = dist.all_to_all_single(self.buffer, sent, of, to, async_op=True)
        assert work is not None
        self.work = work

    def received(self) -> Tensor:
        """(Σ of,), when it is there."""
        self.work.wait()
        return self.buffer


class FullySharded(Alone):
    """Weights, gradients and moments in slices of rows; the small parameters whole everywhere.

    FSDP2 collects a block's slices before it is used and adds gradients up into slices, in every micro-batch: it keeps
    no whole gradient. A matrix of Muon's has a whole copy at its owner, where its slices' gradients are put together
    and from where the new rows are sent back.
    """

    def __init__(self, model: GPT, kind: str, ranks: Ranks, device: str) -> None:
        """kind: of the optimizer. device: "cpu" or "cuda", where the slices go; the model may still lie on the CPU."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        super().__init__(model)
        self.ranks = ranks
        # token_nats returns a view; nothing here writes into it
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        groups = assign_groups(model)
        small = {name for name, role in groups.items() if role not in SLICED}
        ignored = {parameter for name, parameter in model.named_parameters() if name in small}
        for parameter in ignored:
            parameter.data = parameter.data.to(device)
        for buffers in (module._buffers for module in model.modules()):
            buffers.update({name: None if b is None else b.to(device) for name, b in buffers.items()})
        mesh = init_device_mesh(device, (ranks.world,))
        # The root too gives its slices back after each forward: where it keeps them, its default, an evaluation leaves
        # the next step a gradient that holds the one before (torch 2.13).
        for module in (model.embedding, *model.value_embeddings.values(), *model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        register_fsdp_forward_method(model, "token_nats")
        self.parameters = dict(model.named_parameters())
        self.small = [name for name in self.parameters if name in small]
        self.sliced = [name for name in self.parameters if name not in small]
        # lists, not sets: all processes must go through them in one order
        self.muon = [name for name in self.sliced if groups[name] == "matrix" and kind != "adamw"]
        costs = {n: update_cost(n, tuple(self.parameters[n].shape), n in self.muon) for n in self.sliced}
        self.owner = owners({n: costs[n] for n in self.muon}, ranks.world)
        self.owner |= owners({n: costs[n] for n in self.sliced if n not in self.muon}, ranks.world)
        sizes = {name: self.parameters[name].numel() for name in self.muon}
        every = portions(sizes, self.owner, dict.fromkeys(sizes), ranks.world)
        # in each round one portion of every owner
        self.rounds = [[p.names if p else () for p in turn] for turn in _turns(every, ranks.world)]
        self.pieces: dict[str, Tensor] = {name: self.parameters[name] for name in self.small}
        for name in self.sliced:
            whole = self.parameters[name].full_tensor() if name in self.muon else None  # pyright: ignore
            local = self._slice(name) if whole is None else whole.detach().clone()
            if local.numel() and (whole is None or self.owner[name] == ranks.rank):
                self.pieces[name] = nn.Parameter(local, requires_grad=False)

    def optimizer(self, make: MakeOptimizer) -> Hybrid:
        return make(self.pieces)

    def backward(self, loss: Tensor, last: bool) -> None:
        """FSDP2 takes the mean over processes of slices' gradients; the loss is part of a sum."""
        (loss * self.ranks.world).backward()

    def _slice(self, name: str) -> Tensor:
        """This process's rows of a parameter, in place."""
        return self.parameters[name].to_local().detach()  # pyright: ignore

    def _rows(self, name: str, rank: int) -> tuple[int, int]:
        """Which rows a process holds: torch's own division, in slices of ⌈rows / world⌉."""
        rows = self.parameters[name].shape[0]
        share = -(-rows // self.ranks.world)
        return min(rank * share, rows), min((rank + 1) * share, rows)

    def _elements(self, names: Iterable[str], rank: int) -> int:
        return sum(
            (end - start) * self.parameters[name].shape[1]
            for name in names for start, end in [self._rows(name, rank)]
        )  # fmt: skip

    def _gradient_slice(self, name: str) -> Tensor | None:
        gradient = self.parameters[name].grad
        return None if gradient is None else gradient.to_local()  # pyright: ignore[reportAttributeAccessIssue]

    def _gradients(self) -> list[Tensor]:
        sliced = [self._gradient_slice(name) for name in self.sliced]
        return [g for g in (*sliced, *(self.parameters[n].grad for n in self.small)) if g is not None and g.numel()]

    @torch.no_grad()
    def reduce(self, loss: Tensor) -> tuple[float, float]:
        small = [self.parameters[name] for name in self.small]
        had = torch.tensor([p.grad is not None for p in self.parameters.values()], dtype=torch.float64)
        if small:
            buffer = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).float().reshape(-1) for p in small])
            dist.all_reduce(buffer)
            for parameter, part in zip(small, buffer.split([p.numel() for p in small]), strict=True):
                parameter.grad = (part / self.ranks.world).view_as(parameter).to(parameter.dtype)
        slices = [g for name in self.sliced if (g := self._gradient_slice(name)) is not None and g.numel()]
        total, square = _told(loss, global_norm(slices), had, self.parameters.values())
        small_norm = float(global_norm([p.grad for p in small if p.grad is not None]))
        square += small_norm**2
        return total, math.sqrt(square) if math.isfinite(square) else square

    @torch.no_grad()
    def step(self, optimizer: Hybrid) -> None:
        """Slices and small parameters while the first matrices are on their way; then matrices, round by round."""
        coming = self._collect(0) if self.rounds else None
        here = [name for name in self.pieces if name not in self.muon]
        for name in here:
            if name not in self.small:
                self.pieces[name].grad = self._gradient_slice(name)
        optimizer.step(only=[self.pieces[name] for name in here])
        leaving: list[_Sending] = []
        for turn, by_owner in enumerate(self.rounds):
            assert coming is not None
            arriving, coming = coming, self._collect(turn + 1) if turn + 1 < len(self.rounds) else None
            gradients = arriving.received()
            own = by_owner[self.ranks.rank]
            for name, gradient in self._put_together(own, gradients):
                self.pieces[name].grad = gradient if self.parameters[name].grad is not None else None
            optimizer.step(only=[self.pieces[name] for name in own])
            leaving.append(self._send_back(turn))
        for by_owner, sending in zip(self.rounds, leaving, strict=True):
            parts = sending.received().split([self._elements(names, self.ranks.rank) for names in by_owner])
            for names, part in zip(by_owner, parts, strict=True):
                slices = [self._slice(name) for name in names]
                for local, values in zip(slices, part.split([s.numel() for s in slices]), strict=True):
                    local.copy_(values.view_as(local))
        for name in self.pieces:
            if name not in self.small:
                self.pieces[name].grad = None

    def _collect(self, turn: int) -> _Sending:
        """Begins to send this process's slices of gradients to their owners, and to receive those of its own."""
        me, by_owner = self.ranks.rank, self.rounds[turn]
        slices = [
            torch.zeros_like(self._slice(name)) if (gradient := self._gradient_slice(name)) is None else gradient
            for names in by_owner for name in names
        ]  # fmt: skip
        return _Sending(
            torch.cat([part.reshape(-1) for part in slices]),
            to=[self._elements(names, me) for names in by_owner],
            of=[self._elements(by_owner[me], rank) for rank in range(self.ranks.world)],
        )

    def _put_together(self, names: tuple[str, ...], received: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Whole gradients out of the slices of all processes, which come process by process."""
        by_rank = received.split([self._elements(names, rank) for rank in range(self.ranks.world)])
        parts = [part.split([self._elements([name], rank) for name in names]) for rank, part in enumerate(by_rank)]
        for place, name in enumerate(names):
            yield name, torch.cat([part[place] for part in parts]).view(self.parameters[name].shape)

    def _send_back(self, turn: int) -> _Sending:
        """Begins to send the new rows of this process's matrices to those that hold them."""
        me, by_owner = self.ranks.rank, self.rounds[turn]
        rows = [
            self.pieces[name][slice(*self._rows(name, rank))].reshape(-1)
            for rank in range(self.ranks.world) for name in by_owner[me]
        ]  # fmt: skip
        return _Sending(
            torch.cat(rows) if rows else torch.empty(0, device=self.model.cos.device),
            to=[self._elements(by_owner[me], rank) for rank in range(self.ranks.world)],
            of=[self._elements(names, me) for names in by_owner],
        )

    # Checkpoints

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, parameter.full_tensor() if name in self.owner else parameter  # pyright: ignore

    def _whole(self, keep: Callable[[str], bool]) -> dict[str, Tensor]:
        """Weights and buffers, put together one after the other in all processes; kept on the CPU where ``keep``."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            whole = tensor.full_tensor() if name in self.owner else tensor
            if keep(name):
                found[name] = whole.cpu()
        return found

    def whole_weights(self) -> dict[str, Tensor]:
        return self._whole(lambda name: self.ranks.first)

    def own_weights(self) -> dict[str, Tensor]:
        return self._whole(lambda name: self.owner.get(name, 0) == self.ranks.rank)

    def own_state(self, optimizer: Hybrid) -> dict[str, Tensor]:
        from torch.distributed.tensor import DTensor, Shard

        state = optimizer.named_state()
        found = {
            key: t for key, t in state.items()
            if (name := key.rsplit(":", 1)[0]) in self.muon or (name in self.small and self.ranks.first)
        }  # fmt: skip
        # A process without rows of a table has no moments of it, but takes part in putting them together.
        tables = [key for key in state if (name := key.rsplit(":", 1)[0]) in self.owner and name not in self.muon]
        steps = {key: int(state[key]) for key in tables if key.endswith(":steps")}
        said = [json.loads(text) for text in self.ranks.texts(json.dumps([tables, steps]))]
        everywhere = sorted({key for keys, _ in said for key in keys})
        counts: dict[str, int] = {key: count for _, counted in said for key, count in counted.items()}
        for key in everywhere:
            name = key.rsplit(":", 1)[0]
            if key in counts:
                whole = torch.as_tensor(counts[key])
            else:
                parameter = self.parameters[name]
                local = state[key] if key in state else self._slice(name).new_empty(0, parameter.shape[1]).float()
                whole = DTensor.from_local(
                    local, parameter.device_mesh, [Shard(0)], run_check=False,  # pyright: ignore
                    shape=parameter.shape, stride=parameter.stride(),
                ).full_tensor()  # fmt: skip
            if self.owner[name] == self.ranks.rank:
                found[key] = whole.cpu()
        return found

    def load_weight(self, name: str, tensor: Tensor) -> None:
        if name not in self.owner:
            super().load_weight(name, tensor)
            return
        self._slice(name).copy_(tensor[slice(*self._rows(name, self.ranks.rank))])
        if name in self.muon and name in self.pieces:
            self.pieces[name].data.copy_(tensor)

    def load_state(self, optimizer: Hybrid, tensors: Mapping[str, Tensor]) -> None:
        own: dict[str, Tensor] = {}
        for key in tensors:
            name, what = key.rsplit(":", 1)
            if name in self.parameters and name not in self.pieces:
                continue  # another process's
            whole = tensors[key]
            cut = name in self.owner and name not in self.muon and what != "steps"
            own[key] = whole[slice(*self._rows(name, self.ranks.rank))] if cut else whole
        optimizer.load_named_state(own)
