"""One process of several that train one model: python divided.py FOLDER, with RANK, WORLD_SIZE, … in the environment.

For every case it starts from the checkpoint that one process wrote, makes five steps, and the first process writes what
came of them: FOLDER/<case>-<world>.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from xsalab.data import Batch
from xsalab.model import GPT, ModelConfig, VariantChoice, init_weights
from xsalab.optim import Hybrid, OptimConfig, Schedule
from xsalab.optim.hybrid import GROUPS, Rates
from xsalab.train import TrainState, train_step
from xsalab.train.checkpoint import load_checkpoint, save_checkpoint
from xsalab.train.distributed import Alone, DataParallel, FullySharded
from xsalab.train.ranks import ALONE, Ranks, joined

# Nothing divides evenly: 1,001 rows of tables (F045), 3 matrices of most shapes (F037), 3 layers.
CONFIG = ModelConfig(
    depth=3, width=36, heads=3, context=16, vocab_size=1001, vocab_multiple=1, window_block=4,
    value_gate_channels=5, smear_channels=7,
)  # fmt: skip
SCHEDULE = Schedule("nanochat", steps=12, warmup=2)
RATES = Rates(dict.fromkeys(GROUPS, 0.01), 0.1)
CASES = {  # name -> (optimizer, sharded, rows a forward pass, clip)
    "parallel": ("hybrid", False, 1, 0.05),
    "plain-muon": ("muon", False, 0, 0.0),
    "adamw": ("adamw", False, 0, 0.05),
    "sharded": ("hybrid", True, 1, 0.05),
    "sharded-adamw": ("adamw", True, 0, 0.0),
}
STEPS = 5


def state_of(kind: str, shard: bool, ranks: Ranks = ALONE) -> TrainState:
    model = GPT(CONFIG, VariantChoice("xsa", options={"alpha": {"learned": "tanh", "per": "head", "start": 0.5}}))
    init_weights(model, 0)
    # bigger weights where everything starts at zero, so that the first gradients reach every parameter
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
    model.blocks[1].attention.w_q.weight.requires_grad_(False)  # pyright: ignore  # a frozen matrix (F035)
    division = Alone(model)
    if ranks.world > 1:
        division = FullySharded(model, kind, ranks, "cpu") if shard else DataParallel(model, kind, ranks)
    optimizer = division.optimizer(lambda parameters: Hybrid(parameters, OptimConfig(kind=kind), RATES))
    return TrainState(model, optimizer, division=division)


def batch_of(step: int, ranks: Ranks = ALONE) -> Batch:
    """Twelve rows, of which some have hardly a target: the processes' shares count very differently."""
    tokens = torch.randint(1001, (12, 17), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[:5, 1 + step :] = -1
    targets[0] = -1
    share = 12 // ranks.world
    mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
    return Batch(tokens[mine, :-1].contiguous(), targets[mine], torch.arange(12)[mine])


def begin(folder: Path, kind: str) -> None:
    """The common state of a kind of optimizer: two steps of one process, with moments that are not zero."""
    state = state_of(kind, False)
    for step in range(2):
        train_step(state, batch_of(step), SCHEDULE)
    save_checkpoint(folder / kind, state, {})


def results(folder: Path, case: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The first step's weights by name, the second's as "next.", and the losses and norms of all steps."""
    kind, shard, micro_rows, clip = CASES[case]
    state = state_of(kind, shard, ranks)
    assert load_checkpoint(folder / kind, state) is not None
    found, metrics = dict[str, torch.Tensor](), []
    for _ in range(STEPS):
        with torch.no_grad():  # an evaluation before each step changes none of them
            state.model.token_nats(batch_of(7).inputs, batch_of(7).targets)
        metrics.append(train_step(state, batch_of(state.step, ranks), SCHEDULE, micro_rows=micro_rows, clip=clip))
        if len(metrics) == 1:
            found = {name: tensor.clone() for name, tensor in state.division.whole_weights().items()}
            save_checkpoint(folder / f"{case}-{ranks.world}", state, {})
        elif len(metrics) == 2:
            found |= {f"next.{name}": tensor.clone() for name, tensor in state.division.whole_weights().items()}
    replicas = state.division.own_weights()
    found["losses"] = torch.tensor([m.loss for m in metrics], dtype=torch.float64)
    found["norms"] = torch.tensor([m.grad_norm for m in metrics], dtype=torch.float64)
    found["tokens"] = torch.tensor([m.tokens for m in metrics])
    found["owned"] = torch.tensor([float(n) for n in ranks.texts(str(sum(t.numel() for t in replicas.values())))])
    return found


def resumed(folder: Path, case: str, written_by: int, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights after one more step from the checkpoint that ``written_by`` processes left."""
    kind, shard, micro_rows, clip = CASES[case]
    state = state_of(kind, shard, ranks)
    assert load_checkpoint(folder / f"{case}-{written_by}", state) is not None
    train_step(state, batch_of(state.step, ranks), SCHEDULE, micro_rows=micro_rows, clip=clip)
    return {name: tensor.clone() for name, tensor in state.division.whole_weights().items()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined("cpu") as ranks:
        for case in CASES:
            found = results(folder, case, ranks)
            again = {f"again.{name}": t for name, t in resumed(folder, case, ranks.world, ranks).items()}
            if ranks.first:
                save_file({**found, **again}, folder / f"{case}-{ranks.world}.safetensors")
        if ranks.world == 2:  # what four processes left is taken up by two
            for case in ("parallel", "sharded"):
                found = resumed(folder, case, 4, ranks)
                if ranks.first:
                    save_file(found, folder / f"{case}-4-2.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
