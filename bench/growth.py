"""How a training step's time grows: with the tokens of a batch, with depth, with context.

    python bench/growth.py [--rounds N] [--quick]

A step costs a + b · n: something fixed, and something for each of n tokens or layers. Three sizes that double, n, 2n
and 4n, take turns; growth over linear is the largest over what the line through the two smaller ones says:

    t(4n) / (3 t(2n) − 2 t(n))                          1 where it is linear

With context the tokens of a batch stay the same, so that all but attention should cost the same. Attention's own part,
the layers times what its kernel takes alone, forward and backward, on tensors of the same shape in the same rounds,
is taken out:

    (t(4n) − attention(4n)) / (t(n) − attention(n))     1 where only attention grows
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from kernels import attention_call, drawn
from measure import Ratio, Result, arguments, busy, emit, interleave, judge, of_rounds, parsed
from states import CONTEXT, HEAD, SMALL, VOCABULARY, config_of, stepper

from xsalab.model import native
from xsalab.train import TrainConfig

Times = dict[str, list[float]]


def each_round(times: Times, value: Callable[..., float], names: Sequence[str]) -> Ratio:
    """The median over rounds of what ``value`` makes of a round's seconds of these, with its interval."""
    rounds = len(times[names[0]]) // 2
    return of_rounds([value(*(sum(times[name][2 * i : 2 * i + 2]) / 2 for name in names)) for i in range(rounds)])


def over_linear(small: float, middle: float, large: float) -> float:
    """The largest over the line through the other two, at sizes n, 2n and 4n."""
    return large / (3 * middle - 2 * small)


def row(name: str, found: Ratio, times: Times, small: str, large: str, note: str) -> Result:
    """ours: the largest step, peer: the smallest."""
    own, other = (1e3 * statistics.median(times[key]) for key in (large, small))
    return judge(name, found, unit="ms", ours=own, peer=other, note=note)


def doubling(name: str, sides: dict[str, Callable[[], object]], rounds: int) -> Result:
    """The row of three sizes in ascending order."""
    times = interleave(sides, rounds, warmup=2, label=name)
    small, _, large = names = list(sides)
    return row(name, each_round(times, over_linear, names), times, small, large, ", ".join(names))


def with_context(rounds: int, tokens: int, contexts: Sequence[int], vocabulary: int) -> Result:
    """The row of context; ``tokens`` a batch."""
    name, (depth, width) = "growth with context, over linear without attention", SMALL
    sides: dict[str, Callable[[], object]] = {}
    for context in contexts:
        rows = tokens // context
        config = config_of(depth, width, context=context, rows=rows, vocabulary=vocabulary)
        sides[f"step {context}"] = stepper(config)[1]
        q, k, v = (drawn(rows, context, width // HEAD, HEAD, grad=True) for _ in range(3))
        grad = drawn(rows, context, width // HEAD, HEAD)
        sides[f"attention {context}"] = attention_call(q, k, v, grad, TrainConfig().attention)
    times = interleave(sides, rounds, warmup=2, label=name)
    small, large = contexts

    def rest(step_small: float, alone_small: float, step_large: float, alone_large: float) -> float:
        return (step_large - depth * alone_large) / (step_small - depth * alone_small)

    found = each_round(times, rest, list(sides))
    share = [
        depth * statistics.median(times[f"attention {n}"]) / statistics.median(times[f"step {n}"]) for n in contexts
    ]
    note = f"attention is {share[0]:.0%} of a step at {small} and {share[1]:.0%} at {large}"
    return row(name, found, times, f"step {small}", f"step {large}", note)


def main() -> None:
    """Measures and prints."""
    given = parsed(arguments(__doc__ or "", rounds=12))
    native.load()
    others = busy()
    depth, width = SMALL
    context, vocabulary = (32, 256) if given.quick else (CONTEXT, VOCABULARY)

    def steps(sizes: Iterable[tuple[str, int, int]]) -> dict[str, Callable[[], object]]:
        """Of each (name, depth, rows)."""
        return {
            label: stepper(config_of(layers, width, context=context, rows=rows, vocabulary=vocabulary))[1]
            for label, layers, rows in sizes
        }

    tokens = steps((f"{rows} × {context} tokens", depth, rows) for rows in (4, 8, 16))
    layers = steps((f"{n} layers", n, 8) for n in (2, 4, 8))  # even: half of them have a value embedding
    results = [
        doubling("growth with tokens, over linear", tokens, given.rounds),
        doubling("growth with depth, over linear", layers, given.rounds),
        with_context(given.rounds, 16 * context, (context // 2, 2 * context), vocabulary),
    ]
    emit(results, others, quick=given.quick)


if __name__ == "__main__":
    main()
