"""One side of a benchmark in a process of its own, which works only when asked: so that sides that cannot live in one
process, as their settings are read at import, still take turns.

    python bench/worker.py SPEC

SPEC is a JSON object: ``side`` names a builder of ``SIDES``, the rest are its arguments. The child answers on stdout:
first what it built, then one line for each line that it is given: "step" makes one training step and tells its loss,
"memory" tells how many bytes training has added at its peak. In between it waits, and holds no core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from states import STEPS, batch_of, config_of, peak_memory, random_tokens, resident_memory, stepper

from xsalab.data import Batch
from xsalab.experiment.building import build_state
from xsalab.model import count_parameters, native
from xsalab.train import train_step
from xsalab.train.ranks import joined

Built = tuple[Callable[[], float], dict[str, Any]]  # one step, and what is to be told of the model


class Worker:
    """A child that has built its side. Called, it makes one step and returns the loss."""

    def __init__(self, spec: Mapping[str, Any], *, threads: int, environment: Mapping[str, str] | None = None) -> None:
        """Starts the child and waits until it has built its side. ``environment``: variables of its own."""
        self.spec = spec
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (__exit__ closes)
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({**spec, "threads": threads})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, encoding="utf-8",
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.built: dict[str, Any] = self._read()

    def __call__(self) -> float:
        return self.ask("step")

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None, "opened above"
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: reading its answer says why
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None, "opened above"
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        last = [text.strip() for text in self.errors.read().splitlines() if text.strip()][-1:]
        raise ChildProcessError(f"{self.spec}: ended with {self.process.returncode}: {' '.join(last)}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None, "opened above"
        assert self.process.stdout is not None, "opened above"
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


def nanochat(checkout: str, depth: int, width: int, *, context: int, rows: int, vocabulary: int, head: int) -> Built:
    """nanochat's model, optimizer and step as its training script has them; float32 or what NANOCHAT_DTYPE says."""
    sys.path.insert(0, checkout)
    from nanochat.common import COMPUTE_DTYPE  # pyright: ignore[reportMissingImports]
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    heads = width // head
    shape = GPTConfig(
        sequence_len=context, vocab_size=vocabulary, n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=width,
        window_pattern="L",
    )  # fmt: skip
    model = GPT(shape)
    model.init_weights()
    optimizer = model.setup_optimizer()
    compiled = torch.compile(model, dynamic=False)
    done = 0

    def step() -> float:
        nonlocal done
        loss = compiled(*random_tokens(rows, context, vocabulary, done))
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        done += 1
        return loss.item()

    return step, {"parameters": sum(p.numel() for p in model.parameters()), "dtype": str(COMPUTE_DTYPE)}


def ours(depth: int, width: int, *, variant: str, context: int, rows: int, vocabulary: int) -> Built:
    """Our model and step as `xsalab run` has them."""
    config = config_of(depth, width, variant=variant, context=context, rows=rows, vocabulary=vocabulary)
    state, step = stepper(config)
    return step, {"parameters": count_parameters(state.model).total, "dtype": str(state.model.dtype)}


def divided(
    depth: int, width: int, *, context: int, rows: int, vocabulary: int, shard: bool = False, device: str = "cpu",
    micro: int = 0, compiled: bool = False,
) -> Built:  # fmt: skip
    """Our step divided among processes, of which this is one (RANK, WORLD_SIZE, …); with what a step sends."""
    ranks = ExitStack().enter_context(joined(device))  # until the process ends
    config = config_of(depth, width, context=context, rows=rows, vocabulary=vocabulary)
    train = replace(config.train, processes=ranks.world, shard=shard, device=device, compile=compiled)
    state = build_state(replace(config, train=train), ranks)
    schedule = config.optim.schedule_over(STEPS)
    share, sent = rows // ranks.world, Counter[str]()
    mine = slice(ranks.rank * share, (ranks.rank + 1) * share)

    def step() -> float:
        whole = batch_of(config, state.step)
        batch = Batch(whole.inputs[mine], whole.targets[mine], whole.row_ids[mine])
        loss = train_step(state, batch, schedule, micro_rows=micro).loss
        if device == "cuda":
            torch.cuda.synchronize()
        return loss

    if ranks.world > 1:
        with _counting(sent):
            step()
    parameters = sum(tensor.numel() for _, tensor in state.division.whole_parameters())
    return step, {"parameters": parameters, "dtype": str(state.model.dtype), "bytes": dict(sent)}


@contextmanager
def _counting(sent: Counter[str]) -> Iterator[None]:
    """Counts the bytes handed to each kind of exchange of ours while the block runs; what FSDP2 sends is its own."""
    kinds = (
        "reduce",
        "broadcast",
        "all_reduce",
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    )
    before = {kind: getattr(dist, kind) for kind in kinds}

    def counted(kind: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *others: Any, **named: Any) -> Any:
            sent[kind] += tensor.numel() * tensor.element_size()
            return before[kind](tensor, *others, **named)

        return call

    for kind in kinds:
        setattr(dist, kind, counted(kind))
    try:
        yield
    finally:
        for kind in kinds:
            setattr(dist, kind, before[kind])


SIDES: dict[str, Callable[..., Built]] = {"nanochat": nanochat, "xsalab": ours, "divided": divided}


def main() -> None:
    """The child's part. stdout is for answers alone: what libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec.pop("threads"))
    native.load()
    batch_of(config_of(1, 64, context=32, rows=1), 0)  # all that is loaded late is loaded now
    before = resident_memory()
    step, told = SIDES[spec.pop("side")](**spec)
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "memory":
            peak = peak_memory()
            answer: Any = None if peak is None or before is None else peak - before
        else:
            answer = step()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
