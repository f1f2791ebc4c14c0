"""What nanochat's training computes, on our step convention, as JSON lines.

    {"step": 0, "val_bpb": 3.3}     the weights after ``step`` updates
    {"step": 0, "loss": 7.6}        raw, the mean over the whole global batch, before update ``step``
    {"step": 20, "core": 0.01, "core/copa": 0.1, …}

nanochat prints another loss: of the last micro-batch of the first rank alone, smoothed by an exponential average
(scripts/base_train.py, karpathy/nanochat 92d63d4). Here the losses are added that it gives to ``backward`` between two
updates. It divides each by the number of micro-batches, so that their sum is the mean of the batch; ranks are averaged.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...files import write_atomic


class StepLog:
    """The rows of one run, in a file that the first rank alone writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0  # updates made
        self.losses: list[Tensor] = []  # given to backward since the last update
        self.first = os.environ.get("RANK", "0") == "0"
        self.begun = False

    def begin(self, step: int = 0) -> None:
        """Empties the file; where the run goes on from ``step``, keeps the rows of the steps before it."""
        self.step, self.begun = step, True
        if not self.first:
            return
        kept = []
        if step and self.path.is_file():
            whole, _, _ = self.path.read_text(encoding="utf-8").rpartition("\n")  # the last line may have been cut off
            kept = [line for line in whole.splitlines() if json.loads(line)["step"] < step]
        write_atomic(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, values: Mapping[str, float]) -> None:
        """A row of this step. A loss that is NaN is written so: it ends a comparison, and must be seen."""
        if not self.begun:
            self.begin()
        if self.first:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")

    def updated(self) -> None:
        """The optimizer has made an update: the row of its loss."""
        if not self.losses:
            raise ValueError("an update without a loss given to backward: this checkout's loop is not understood")
        loss = torch.stack(self.losses).float().sum()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.write({"loss": loss.item()})
        self.losses.clear()
        self.step += 1


def watch_steps(path: Path) -> StepLog:
    """Logs what scripts.base_train does in this process from now on; called before it is imported.

    ValueError where this nanochat is built in another way, and in float16, whose gradient scaler skips updates.
    """
    names = ("nanochat.common", "nanochat.loss_eval", "nanochat.checkpoint_manager", "scripts.base_eval")
    common, loss_eval, checkpoints, base_eval = map(importlib.import_module, names)
    dtype: Any = common.COMPUTE_DTYPE
    if dtype == torch.float16:
        raise ValueError("NANOCHAT_DTYPE=float16: --log does not know which updates its scaler skips; use bfloat16")
    log = StepLog(path)
    _then(loss_eval, "evaluate_bpb", lambda bpb: log.write({"val_bpb": bpb}))
    _then(base_eval, "evaluate_core", lambda found: log.write(_core(found)))
    # base_train reads a checkpoint only to go on from it: (weights, optimizer, meta)
    _then(checkpoints, "load_checkpoint", lambda found: log.begin(found[2]["step"]))
    _watch_losses(log)
    return log


def _core(found: Mapping[str, Any]) -> dict[str, float]:
    """CORE and its parts, the tasks' accuracies centred: 0 by guessing, 1 all right."""
    return {
        "core": found["core_metric"],
        **{f"core/{task}": value for task, value in found["centered_results"].items()},
    }


def _then(module: Any, name: str, take: Callable[[Any], None]) -> None:
    """Has ``take`` see what a function of a module returns. Those who import it later get this one."""
    if not hasattr(module, name):
        raise ValueError(f"this nanochat is not understood: {module.__name__} has no {name}")
    original = getattr(module, name)

    @wraps(original)
    def watched(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        take(result)
        return result

    setattr(module, name, watched)


def _watch_losses(log: StepLog) -> None:
    backward = Tensor.backward

    @wraps(backward)
    def watched(self: Tensor, *args: Any, **named: Any) -> None:
        log.losses.append(self.detach())
        backward(self, *args, **named)

    Tensor.backward = watched
    register_optimizer_step_post_hook(lambda *_: log.updated())
