"""One process of several that talk to each other: python talking.py FOLDER. The first prints one JSON value."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from divided import CONFIG, SCHEDULE, batch_of, state_of

from xsalab.eval.scoring import Prompt, score_prompts
from xsalab.experiment.run import agree
from xsalab.model import GPT, init_weights
from xsalab.train import checkpoint, train_step
from xsalab.train.ranks import ALONE, Ranks, joined


def prompts() -> list[Prompt]:
    """Eleven prompts of very different lengths, of which some begin alike."""
    drawn = torch.Generator().manual_seed(0)
    common = torch.randint(1001, (30,), generator=drawn).tolist()
    found = []
    for number in range(11):
        own = torch.randint(1001, (2 + 5 * (number % 4),), generator=drawn).tolist()
        tokens = (*common[: 30 if number % 2 else 3], *own)
        found.append(Prompt(tokens, len(tokens) - 2))
    return found


def scores(ranks: Ranks, few: int = 11) -> list[list[float]]:
    model = GPT(CONFIG)
    init_weights(model, 0)
    torch.nn.init.normal_(model.head.weight, 0, 0.5, torch.Generator().manual_seed(1))
    return [list(map(float, score)) for score in score_prompts(model, prompts()[:few], ranks=ranks)]


def told(work: Callable[[], Any]) -> list[str]:
    """The kind and the text of the error that ``work`` must raise."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def fail(ranks: Ranks, rank: int) -> int:
    if ranks.rank == rank:
        raise ValueError(f"trouble in {rank}")
    return ranks.rank


def save_on_a_full_disk(folder: Path, ranks: Ranks) -> list[str]:
    """The second process has no room for its second checkpoint."""
    state = state_of("hybrid", False, ranks)
    checkpoint.save_checkpoint(folder / "full", state, {})
    train_step(state, batch_of(0, ranks), SCHEDULE)
    whole = checkpoint.save_tensors

    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        if ranks.rank == 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "disk full", str(path))
        whole(tensors, path, metadata)

    checkpoint.save_tensors = full
    error = told(lambda: checkpoint.save_checkpoint(folder / "full", state, {}))
    checkpoint.save_tensors = whole
    return error


def everything(folder: Path, ranks: Ranks) -> dict[str, Any]:
    other = {"code": "b" if ranks.rank == 1 else "a", "config": {"x": 1}, "machine": f"host {ranks.rank}"}
    return {
        "sum": ranks.sum(np.array([1.5, ranks.rank])).tolist(),
        "counts": ranks.sum(np.array([ranks.rank, 2**40])).tolist(),
        "texts": ranks.texts("α" * ranks.rank),
        "each": ranks.each(lambda: {"rank": ranks.rank}),
        "lead": ranks.lead(lambda: ["first", ranks.rank]),
        "first fails": told(lambda: ranks.lead(lambda: fail(ranks, 0))),
        "second fails": told(lambda: ranks.each(lambda: fail(ranks, 1))),
        "agree": told(lambda: agree(ranks, {**other, "code": "a"})),
        "differ": told(lambda: agree(ranks, other)),
        "scores": scores(ranks),
        "one score": scores(ranks, few=1),
        "full disk": save_on_a_full_disk(folder, ranks),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined("cpu") as ranks:
        found = ranks.texts(json.dumps(everything(folder, ranks)))
        if ranks.first:
            print(json.dumps([json.loads(text) for text in found]))
    assert ranks is ALONE or ranks.world > 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
