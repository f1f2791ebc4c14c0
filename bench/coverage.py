"""How often the 95 % interval of a benchmark's difference misses the truth: python bench/coverage.py [--experiments N]

Simulated arms whose truth is known go through the functions that judge real ones. Prints a Markdown table, which
docs/statistics.md quotes. An answer is right with probability

    g_t + (1 − g_t) · logistic(level_t + effect_t·[treatment] + u_i + v_arm,i + run_arm,s + task_arm,s,t)

in task t, on item i, at seed s: u is the item's difficulty for all, v what an arm makes of it, run and task what a seed
does to a run, of which partners share ``SHARED``; all are normal. One run an arm: the truth is the difference of these
two models over all items of the kind. Several: that of the arms, over all seeds and items.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsalab.stats import PairTable, mean_difference
from xsalab.stats.items import centred_values

CORE = (0.25, 0, 0, 0.25, 0.25, 0.5, 0.2, 0.5, 0.25, 0, 0.25, 0.5, 0.5, 0, 0.2, 0, 0, 0, 0, 0, 0.62, 0.091)  # guessing
CHAT = (0.25, 0.25, 0.25, 0.0, 0.0)
ALL = (24,) * 22  # items of each task
MIXED = (500, 500, 500, 500, 500, 100, 500, 500, 500, 500, 500, 273, 500, 500, 230, 500, 210, 32, 500, 88, 500, 500)
WIDE = (*(24, 50, 100, 1000) * 5, 24, 1000)
SEEDS = (3, 4, 6, 8, 12)
ITEM = 1.5  # standard deviation of an item's difficulty, in logits
SHARED = 0.3
Floats = NDArray[np.float64]
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(41)


@dataclass(frozen=True)
class World:
    """``items``: of each task. ``level``, ``effect``: in logits, one for all tasks or one each.

    ``arm``, ``run``, ``task``: standard deviations, in logits.
    """

    name: str
    items: tuple[int, ...]
    level: float | tuple[float, ...]
    guess: tuple[float, ...] = CORE
    effect: float | tuple[float, ...] = 0.0
    arm: float = 0.7
    run: float = 0.03
    task: float = 0.1

    def draw(self, rng: np.random.Generator, seeds: int) -> tuple[PairTable, float, float]:
        """An experiment, the difference of its models, and that of the arms."""
        guess, tasks = np.array(self.guess[: len(self.items)]), np.repeat(np.arange(len(self.items)), self.items)
        weight = 1 / (len(self.items) * (1 - guess))
        level = np.broadcast_to(np.array(self.level, dtype=float), (len(self.items),))
        means = np.stack([level, level + np.array(self.effect)])  # of the baseline, of the treatment
        items = rng.normal(0, ITEM, len(tasks)) + rng.normal(0, self.arm, (2, len(tasks)))
        luck = math.sqrt(SHARED) * rng.normal(size=(seeds, 1, len(self.items) + 1))
        luck = luck + math.sqrt(1 - SHARED) * rng.normal(size=(seeds, 2, len(self.items) + 1))
        logits = means + self.run * luck[..., :1] + self.task * luck[..., 1:]
        right = guess[tasks] + (1 - guess[tasks]) / (1 + np.exp(-(logits[:, :, tasks] + items)))
        answers = (rng.random(right.shape) < right).astype(float)
        names = tuple(f"task {t}" for t in tasks)
        baselines = {f"task {t}": float(b) for t, b in enumerate(guess)}
        values, ones = centred_values(answers, np.ones(len(tasks)), names, baselines)
        table = PairTable(
            tuple(range(seeds)), tuple(map(str, range(len(tasks)))), values[:, 0], values[:, 1], ones,
            "figure", 1.0, "items", names,
        )  # fmt: skip
        spread = ITEM**2 + self.arm**2
        models, arms = _logistic(logits, spread), _logistic(means, spread + self.run**2 + self.task**2)
        of_models, of_arms = (weight * (1 - guess) * (p[..., 1, :] - p[..., 0, :]) for p in (models, arms))
        return table, float(of_models.sum(axis=-1).mean()), float(of_arms.sum())


def _logistic(mean: Floats, variance: float) -> Floats:
    """The mean of 1 / (1 + exp(−x)) over normal x, by Gauss–Hermite quadrature."""
    x = mean[..., None] + math.sqrt(variance) * NODES
    return (WEIGHTS / WEIGHTS.sum() / (1 + np.exp(-x))).sum(axis=-1)


WORLDS = (
    World("22 tasks of 24 items", ALL, 0.0),
    World("… near chance", ALL, -3.0),
    World("… nearly all right", ALL, 3.5),
    World("22 tasks of 32 to 500", MIXED, 0.0),
    World("… near chance", MIXED, -3.5),
    World("… seeds matter", MIXED, 0.0, run=0.15, task=0.3),
    World("… an arm's own items matter", MIXED, 0.0, arm=2.5, run=0.02, task=0.05),
    World(
        "22 of 24 to 1,000, from chance to nearly all right, better", WIDE, tuple(np.linspace(-4, 4, 22)), effect=0.3
    ),
    World("5 of 164 to 1,000", (1000, 1000, 1000, 1000, 164), (0, -1, -1, -3, -3), CHAT),
    World("5 of 24", (24,) * 5, (0, -1, -1, -2, -2), CHAT),
    World("22 of 24, 2 % right, better", ALL, -6.0, (0.0,) * 22, 0.5),
    World("22 of 24 to 1,000, 2 % right, better", WIDE, -6.0, (0.0,) * 22, 0.5),
    World("22 of 24, 98 % right, worse", ALL, 6.0, effect=-0.5),
    World("22 of 32 to 500, one small task better", MIXED, 0.0, effect=(*(0.0,) * 5, 1.0, *(0.0,) * 16)),
    World("one task of 24", (24,), 0.0),
)


def misses(world: World, experiments: int, seed: int) -> list[int]:
    """How many intervals miss: of one run an arm, then of each number of seeds."""
    rng, found = np.random.default_rng(seed), [0] * (1 + len(SEEDS))
    for _ in range(experiments):
        table, _, arms = world.draw(rng, SEEDS[-1])
        one, models, _ = world.draw(rng, 1)
        tables = [PairTable(table.seeds[:n], table.items, table.baseline[:n], table.treatment[:n], table.weights,
                            "figure", 1.0, "items", table.strata) for n in SEEDS]  # fmt: skip
        for i, (pairs, truth) in enumerate([(one, models), *((pairs, arms) for pairs in tables)]):
            estimate = mean_difference(pairs)
            assert estimate.low is not None and estimate.high is not None, "a task has several items"  # noqa: PT018
            found[i] += not estimate.low <= truth <= estimate.high
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="How often a benchmark's 95 % interval misses the truth.")
    parser.add_argument("--experiments", type=int, default=2000, help="a world")
    experiments = parser.parse_args().experiments
    print(f"| tasks and items | 1 run | {' | '.join(f'{n} seeds' for n in SEEDS)} |\n|{'---|' * (2 + len(SEEDS))}")
    for number, world in enumerate(WORLDS):
        shares = [f"{100 * count / experiments:.1f}" for count in misses(world, experiments, number)]
        print(f"| {world.name} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
