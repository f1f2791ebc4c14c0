"""Memory counted without a run against the same model run: what is kept, what is held, the peak of a process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from xsalab import plan_memory
from xsalab.data import Batch, DataConfig
from xsalab.eval.throughput import saved_bytes
from xsalab.eval.validation import EvalConfig
from xsalab.experiment.building import build_state
from xsalab.experiment.design import RunConfig
from xsalab.model import ModelConfig, VariantChoice, native
from xsalab.optim import OptimConfig
from xsalab.plan_memory import Memory, memory_of, rows_that_fit
from xsalab.train import TrainConfig, train_step

SMALL = ModelConfig(depth=3, width=64, heads=2, context=64, vocab_size=512, window_block=8)


def run_of(model: ModelConfig = SMALL, kind: str = "hybrid", variant: str = "standard", **train: Any) -> RunConfig:
    settings = TrainConfig(**{"batch_tokens": 8 * model.context, "dtype": "float32", **train})
    return RunConfig(0, DataConfig(), model, OptimConfig(kind=kind), settings, EvalConfig(), VariantChoice(variant))


def batch_of(run: RunConfig) -> Batch:
    rows = run.train.batch_rows(run.model.context)
    tokens = torch.randint(run.model.vocab_size, (rows, run.model.context + 1))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(rows))


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(variant="xsa", micro_rows=2),
        run_of(kind="adamw"),
        run_of(kind="muon"),
        run_of(attention="sdpa"),
        run_of(dtype="bfloat16"),
    ],
    ids=["hybrid", "xsa", "adamw", "muon", "sdpa", "bfloat16"],
)
def test_what_is_counted_is_what_a_run_holds(run: RunConfig) -> None:
    """Weights, gradients and optimizer state to the byte; what forward keeps, within 2 %."""
    counted = memory_of(run)
    with native.plain():
        state = build_state(run)
        kept = saved_bytes(state, batch_of(run), run.train.micro_rows)
        train_step(state, batch_of(run), run.optim.schedule_over(4), micro_rows=run.train.micro_rows)
    parameters = list(state.model.parameters())
    tables = sum(buffer.nbytes for buffer in state.model.buffers())
    assert counted.weights - sum(p.nbytes for p in parameters) == pytest.approx(tables, abs=64)
    assert counted.gradients == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    held = [value for of in state.optimizer.state.values() for value in of.values() if torch.is_tensor(value)]
    assert counted.state == sum(value.nbytes for value in held)
    # The head's gradients are made in forward and lie beside the saved tensors: of x, and of the matrix.
    rows = run.train.micro_rows or run.train.batch_rows(run.model.context)
    width = run.model.width
    made = rows * run.model.context * width * state.model.dtype.itemsize + 4 * width * run.model.vocab_rows
    assert counted.activations - made == pytest.approx(kept, rel=0.02)


def test_many_rows_are_reckoned_from_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 16,384 tokens, of which 4,096 and 8,192 are counted, against the count itself."""
    run = run_of(dataclasses.replace(SMALL, depth=2, context=1024, vocab_size=2048), batch_tokens=16 * 1024)
    many = memory_of(run)
    monkeypatch.setattr(plan_memory, "MANY", 1 << 20)
    counted = memory_of(run)
    assert many is not counted
    assert many.passes == pytest.approx(counted.passes, rel=1e-3)
    assert many.activations == pytest.approx(counted.activations, rel=1e-3)


def test_processes_share_the_state_and_shards_the_weights() -> None:
    alone = memory_of(run_of(micro_rows=2))
    divided = memory_of(run_of(micro_rows=2, processes=2))
    sharded = memory_of(run_of(micro_rows=2, processes=2, shard=True))
    assert (divided.weights, divided.state) == (alone.weights, alone.state // 2)
    assert (sharded.weights, sharded.gradients) == (alone.weights // 2, alone.gradients // 2)
    assert alone.peak > divided.peak > sharded.peak
    assert memory_of(run_of(processes=4)).rows == 2


def test_the_most_rows_that_fit_divide_the_batch() -> None:
    run = run_of(batch_tokens=24 * 64)
    peaks = {rows: memory_of(run, rows).peak for rows in (1, 2, 3, 4, 6, 8, 12)}
    assert rows_that_fit(run, peaks[6]) == 6
    assert rows_that_fit(run, peaks[6] - 1) == 4
    assert rows_that_fit(run, 1000) == 0
    assert rows_that_fit(run, 1e12) == 24


MEASURE = """
import json, sys
from test_plan_memory import batch_of, run_of
from xsalab.experiment.building import build_state
from xsalab.model import ModelConfig
from xsalab.train import train_step

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def steps(run):
    state = build_state(run)
    for _ in range(2):
        train_step(state, batch_of(run), run.optim.schedule_over(4))

steps(run_of())  # what PyTorch itself holds after its first step is the process's own
before = kilobytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
steps(run_of(ModelConfig(**json.loads(sys.argv[1])), batch_tokens=4096))
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a process is read from Linux's /proc")
def test_the_peak_is_that_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 15 %; large blocks go back to the system at once, as they do on a GPU's allocator."""
    shape: dict[str, Any] = {"depth": 3, "width": 128, "heads": 2, "context": 256, "vocab_size": 2048}
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("XSALAB_PLAIN", "1")
    monkeypatch.setenv("PYTHONPATH", "tests")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(shape)], capture_output=True, text=True, check=True
    )  # fmt: skip
    counted = memory_of(run_of(ModelConfig(**shape), batch_tokens=4096))
    assert counted.peak == pytest.approx(int(ran.stdout), rel=0.15)


def test_a_peak_is_the_larger_of_two() -> None:
    assert Memory(1, 0, 0, 0, 0, 5, 7).peak == 7
