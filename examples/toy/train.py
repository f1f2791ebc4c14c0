"""A trainer of some thirty lines of code that knows nothing of xsalab: softmax regression by SGD, in numpy.

Writes one JSON line an epoch to OUT/metrics.jsonl, and the loss of every held-out example to OUT/scores.jsonl.
"""

import argparse
import json
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser()
for name, default in (("rate", 0.01), ("momentum", 0.0)):
    parser.add_argument(f"--{name}", type=float, default=default)
for name, default in (("seed", 0), ("shuffle", 0), ("epochs", 3), ("batch", 16)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

world = np.random.default_rng(1234)  # the data are the same for every seed
truth = world.normal(size=(20, 5))
x = world.normal(size=(1200, 20))
y = (x @ truth + world.gumbel(size=(1200, 5)) * 2).argmax(1)
train, held_out = slice(0, 800), slice(800, 1200)


def losses(weights: np.ndarray, part: slice) -> np.ndarray:
    """Nats of each example."""
    logits = x[part] @ weights
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), y[part]]


weights = np.random.default_rng(args.seed).normal(size=(20, 5)) * 0.5
velocity = np.zeros_like(weights)
order = np.random.default_rng([args.seed, args.shuffle])
with (args.out / "metrics.jsonl").open("w") as log:
    for epoch in range(args.epochs):
        for rows in order.permutation(800).reshape(-1, args.batch):
            p = np.exp(x[rows] @ weights)
            p /= p.sum(1, keepdims=True)
            velocity = args.momentum * velocity + x[rows].T @ (p - np.eye(5)[y[rows]]) / args.batch
            weights -= args.rate * velocity
        row = {"step": epoch, "train": losses(weights, train).mean(), "loss": losses(weights, held_out).mean()}
        log.write(json.dumps(row) + "\n")
(args.out / "scores.jsonl").write_text(
    "".join(json.dumps({"item": i, "value": v}) + "\n" for i, v in enumerate(losses(weights, held_out)))
)
