"""The benchmarks' own parts: the peers compute what ours computes, sizes are as told, growth by hand, tiny runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import growth
import kernels
import pytest
import states
import torch
import training
import variants
from measure import Ratio
from worker import Worker

from xsalab.model.head import token_nats

TINY = {"context": 32, "rows": 2, "vocabulary": 128}


def test_the_plain_loss_of_the_peer_is_ours() -> None:
    """Same mean nats and gradients in float32: what is compared is the same work."""
    x, weight = torch.randn(2, 5, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    targets = torch.randint(64, (2, 5))
    ours = token_nats(x, weight, targets, kernels.CAP, 64).mean()
    theirs = kernels.plain_loss(x, weight, targets)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(
        torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(theirs, (x, weight)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_the_matrices_are_those_of_a_model() -> None:
    """12 layers of width 384 have 12 · (4 + 4 + 4) · 384² weights, six matrices a layer."""
    model = kernels.Matrices(12, 384)
    assert sum(p.numel() for p in model.parameters()) == 12 * 12 * 384**2
    assert len(list(model.parameters())) == 72
    assert all(name.startswith("blocks.") for name, _ in model.named_parameters())


def test_the_optimizers_make_the_same_update(machine: str) -> None:
    """The row beside the times: plain Muon moves the weights as torch's does, but for rounding."""
    rows = kernels.optimizer(1, quick=True)
    assert len(rows) == 4
    assert rows[-1].ratio is not None
    assert rows[-1].ratio < 0.05


def test_growth_over_linear_by_hand() -> None:
    """1 at a + b · n for any a; above it where the last doubling costs more: 18 for 16 on the line 4, 8."""
    assert growth.over_linear(5 + 2, 5 + 4, 5 + 8) == pytest.approx(1.0)
    assert growth.over_linear(4, 8, 18) == pytest.approx(18 / 16)


def test_each_round_takes_the_mean_of_both_times() -> None:
    """Two rounds: means 2 and 4, then 3 and 9."""
    times = {"a": [1.0, 3.0, 3.0, 3.0], "b": [4.0, 4.0, 10.0, 8.0]}
    found = growth.each_round(times, lambda a, b: b / a, ["a", "b"])
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 2.5, 3.0))


def test_a_rate_is_a_ratio_of_times_and_work() -> None:
    """Twice the time of a block that does a quarter of the work: 2 · 4 = 8 times the block's rate."""
    found = training.scaled(Ratio(2.0, 1.0, 3.0, 9), 4.0)
    assert (found.median, found.low, found.high, found.rounds) == (8.0, 4.0, 12.0, 9)


def test_steps_repeat_and_their_batches_differ() -> None:
    """Two states of one configuration make the same losses: both sides of a ratio do the same work."""
    config = states.config_of(1, 64, context=16, rows=2, vocabulary=64)
    first, second = (states.stepper(config)[1] for _ in range(2))
    losses = [first() for _ in range(2)]
    assert losses == [second() for _ in range(2)]
    assert not torch.equal(states.batch_of(config, 0).inputs, states.batch_of(config, 1).inputs)
    assert config.model.window == "L"


@pytest.mark.parametrize("plain", [False, True])
def test_a_tiny_run_of_the_variants_has_its_rows(machine: str, monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    """Time, control and bytes, each under a name that has a place among the targets."""
    monkeypatch.setattr(variants, "SMALL", (1, 64))
    time, control, saved = variants.timed(1, TINY, plain=plain)
    assert (time.unit, control.unit, saved.unit) == ("ms", "ms", "MB")
    assert saved.ours is not None
    assert saved.ours > 0
    assert time.name != control.name


def test_a_tiny_run_of_growth_has_its_rows(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context doubles twice at the same tokens; the note tells attention's share."""
    monkeypatch.setattr(growth, "SMALL", (1, 64))
    row = growth.with_context(1, 128, (16, 64), 64)
    assert "at 16" in row.note
    assert "at 64" in row.note


def test_memory_is_that_of_this_process() -> None:
    """64 MB that are written to are seen at the peak."""
    found = kernels.beyond(lambda: torch.zeros(64 << 18).add_(1).sum(), 0)
    if found is None:
        pytest.skip("this system does not tell a process's memory")
    peak, now = states.peak_memory(), states.resident_memory()
    assert peak is not None
    assert now is not None
    assert peak >= now > 0


@pytest.mark.slow
def test_kernels_run_alone_and_print_one_json_value() -> None:
    """As a user calls it, in PyTorch, with tiny sizes, of which nothing is judged."""
    words = [sys.executable, str(Path(kernels.__file__)), "--quick", "--rounds", "1", "--threads", "1"]
    child = subprocess.run(
        [*words, "--only", "exclude", "optimizer"], capture_output=True, text=True, encoding="utf-8", check=False,
        env={**os.environ, "XSALAB_PLAIN": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    content = json.loads(child.stdout)
    assert content["environment"]["machine"] == "plain"
    assert len(content["results"]) == 5
    assert all(row["verdict"].startswith("not judged") for row in content["results"])


CHECKOUT = {
    "__init__.py": "",
    "common.py": "import os, torch\nCOMPUTE_DTYPE = getattr(torch, os.environ['NANOCHAT_DTYPE'])\n",
    "gpt.py": """
from dataclasses import dataclass
import torch
from torch import nn
@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
    def init_weights(self):
        nn.init.zeros_(self.table.weight)
        print("a checkout prints what it likes")
    def setup_optimizer(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def forward(self, inputs, targets):
        x = self.table(inputs)
        return nn.functional.cross_entropy((x @ self.table.weight.T).flatten(0, 1), targets.flatten())
""",
}


@pytest.mark.slow
def test_a_peer_works_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Built with its own variables, it steps when asked: ln 128 = 4.852 nats from weights of 0. What it prints is no
    answer, and why it ended is told.
    """
    (tmp_path / "nanochat").mkdir()
    for name, text in CHECKOUT.items():
        (tmp_path / "nanochat" / name).write_text(text, encoding="utf-8")
    spec = {"side": "nanochat", "checkout": str(tmp_path), "depth": 1, "width": 64, "head": 64, **TINY}
    own = {"NANOCHAT_DTYPE": "bfloat16", "TORCHDYNAMO_DISABLE": "1", "XSALAB_PLAIN": "1"}
    with Worker(spec, threads=1, environment=own) as worker:
        assert worker.built == {"parameters": 128 * 64, "dtype": "torch.bfloat16"}
        assert worker() == pytest.approx(4.852, abs=1e-3)
        assert isinstance(worker.ask("memory"), int)
        worker.process.kill()
        with pytest.raises(ChildProcessError, match="ended with -9"):
            worker()
