"""Sampling, token by token, with a key/value cache, one prompt or many; and text out of bytes that arrive in pieces."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..model import GPT, KVCache
from ..model import native as kernels
from ..model.head import capped_logits
from .decode import Steps, Store, stepper

# All new tokens of one sample so far -> tokens that must follow now; most often none.
Tool = Callable[[Sequence[int]], Sequence[int]]
DRAWS = 64  # numbers of a stream at a time


def generate(
    model: GPT,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    cache: bool = True,
    stop: Collection[int] = (),
    tool: Tool | None = None,
) -> Iterator[int]:
    """Yields up to ``tokens`` new token ids after ``prompt``; ends before one of ``stop``, which is not yielded.

    ``temperature`` 0 takes the likeliest token. ``top_k`` keeps the k likeliest, 0 all of them. The draws
    come from a generator of their own, on the CPU: a seed gives one text on every device, up to rounding.
    ``cache = False`` runs the whole sequence again for each token. What ``tool`` wants takes the place of draws.
    Raises ValueError at once for an empty prompt, a token outside the vocabulary or a setting outside its range.
    """
    _check(model, [prompt], tokens, temperature, top_k, [seed])
    return _stream(model, list(prompt), tokens, _Sampler(temperature, top_k, tool), _Sample(seed), cache, stop)


def _stream(
    model: GPT,
    sequence: list[int],
    tokens: int,
    sampler: _Sampler,
    sample: _Sample,
    cache: bool,
    stop: Collection[int],
) -> Iterator[int]:
    store: Store | None = None
    steps: Steps | None = None
    for _ in range(tokens):
        if not cache:
            logits = _next_logits(model, [sequence], None)
        elif store is None:
            logits, store = _read(model, [tuple(sequence)])
        else:
            steps = steps or stepper(model)
            logits, store = steps(sequence[-1:], store)
        (token,) = sampler.take([sample], logits)
        if token in stop:
            return
        yield token
        sequence.append(token)


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seeds: Sequence[int] = (),
    stop: Collection[int] = (),
    tool: Tool | None = None,
    limit: int = 0,
    batch_rows: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[int]]:
    """What ``generate`` gives for each of ``prompts``, in their order, ``batch_rows`` of them at a time.

    ``seeds``: one a prompt, needed above temperature 0. A sample depends on its own prompt and seed and never on
    what else is in the batch, up to rounding of the logits. For several samples of one prompt give it several
    times; a batch runs it through the model once.

    ``limit`` bounds prompt and new tokens together; 0: the model's context. A sample that ``tokens`` or ``limit``
    ended has min(tokens, limit − len(prompt)) tokens; one that ended before a token of ``stop`` has fewer.
    ``progress`` is told how many samples are done, of how many.

    Raises ValueError, before anything is run, for what ``generate`` refuses, for a wrong number of seeds, and for a
    prompt that leaves no room within ``limit``.
    """
    _check(model, prompts, tokens, temperature, top_k, seeds)
    if batch_rows < 1 or limit < 0:
        raise ValueError(f"batch_rows = {batch_rows}, limit = {limit}: at least 1 row, and a limit of at least 0")
    if len(seeds) != len(prompts) and (seeds or temperature):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one a prompt (none at temperature 0)")
    limit = limit or model.config.context
    for number, prompt in enumerate(prompts):
        if len(prompt) >= limit:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, and prompt and answer together at most {limit}: "
                "shorten it, or raise the limit"
            )
    sampler = _Sampler(temperature, top_k, tool)
    samples = [_Sample(seed) for seed in seeds or [0] * len(prompts)]
    room = [min(tokens, limit - len(prompt)) for prompt in prompts]
    # like lengths together, so that little is padded, and equal prompts side by side
    waiting = deque(sorted(range(len(prompts) if tokens else 0), key=lambda i: (len(prompts[i]), tuple(prompts[i]))))
    rows: list[int] = []
    store: Store = KVCache(model.config.depth)
    steps: Steps | None = None
    while rows or waiting:
        if waiting and len(rows) <= batch_rows // 2:
            # Room for half a batch is filled at once. The rows in progress are read again: a pass over many tokens
            # costs about as much as a few steps, and a cache is never put together out of two.
            rows += [waiting.popleft() for _ in range(min(batch_rows - len(rows), len(waiting)))]
            logits, store = _read(model, [(*prompts[i], *samples[i].new) for i in rows])
        else:
            steps = steps or stepper(model)
            logits, store = steps([samples[i].new[-1] for i in rows], store)
        going = []
        for place, (i, token) in enumerate(zip(rows, sampler.take([samples[i] for i in rows], logits), strict=True)):
            if token in stop:
                samples[i].new.pop()
            elif len(samples[i].new) < room[i]:
                going.append(place)
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            progress(len(prompts) - len(rows) - len(waiting), len(prompts))
            if rows:
                store = store.select(torch.tensor(going, device=model.head.weight.device))
    return [sample.new for sample in samples]


def _check(
    model: GPT, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, top_k: int, seeds: Sequence[int]
) -> None:
    vocabulary = model.config.vocab_size
    for prompt in prompts:
        if not prompt:
            raise ValueError("prompt is empty: it holds at least the start token")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(
                f"prompt holds token {max(prompt, key=abs)}; the vocabulary has tokens 0 to {vocabulary - 1}"
            )
    if tokens < 0:
        raise ValueError(f"tokens = {tokens}: must be at least 0")
    check_temperature(temperature)
    if top_k < 0:
        raise ValueError(f"top_k = {top_k}: must be at least 0 (0: all tokens)")
    for seed in seeds:
        check_seed(seed)


def check_temperature(value: float) -> float:
    """The value. Raises ValueError where it is no temperature."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"temperature = {value}: must be a finite number of at least 0 (0: no chance)")
    return value


def check_seed(value: int) -> int:
    """The value. Raises ValueError where torch takes no such seed."""
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"seed = {value}: must be a whole number from −2^63 to 2^63 − 1")
    return value


class _Sample:
    """One text that grows: its new tokens, what is forced on it next, and its own stream of chance."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.drawn: list[float] = []  # the next ones, last first
        self.new: list[int] = []
        self.forced: deque[int] = deque()

    def chance(self) -> float:
        """The next number of the stream, in [0, 1)."""
        if not self.drawn:
            self.drawn = torch.rand(DRAWS, dtype=torch.float64, generator=self.random).tolist()[::-1]
        return self.drawn.pop()


@dataclass(frozen=True)
class _Sampler:
    """How the next tokens are found: what the tool wants, else a draw."""

    temperature: float
    top_k: int
    tool: Tool | None

    def take(self, samples: Sequence[_Sample], logits: Float[Tensor, "rows vocab"]) -> list[int]:
        """The next token of each sample, kept in its ``new``. A forced token uses up no chance."""
        if self.tool is not None:
            for sample in samples:
                if not sample.forced:
                    sample.forced.extend(self.tool(sample.new))
        chances = [0.0 if sample.forced or not self.temperature else sample.chance() for sample in samples]
        tokens = pick(logits, self.temperature, self.top_k, chances)
        for row, sample in enumerate(samples):
            if sample.forced:
                tokens[row] = sample.forced.popleft()
            sample.new.append(tokens[row])
        return tokens


def _read(model: GPT, sequences: Sequence[tuple[int, ...]]) -> tuple[Float[Tensor, "rows vocab"], KVCache]:
    """Logits behind each sequence, and the cache that goes on from there; equal sequences are run once."""
    distinct = list(dict.fromkeys(sequences))
    store = KVCache(model.config.depth)
    logits = _next_logits(model, distinct, store)
    if len(distinct) == len(sequences):
        return logits, store
    places = torch.tensor([distinct.index(sequence) for sequence in sequences])
    return logits[places], store.select(places.to(model.head.weight.device))


@torch.no_grad()
def _next_logits(model: GPT, rows: Sequence[Sequence[int]], store: KVCache | None) -> Float[Tensor, "rows vocab"]:
    """Logits behind the last token of each row, on the CPU; rows of different length are padded behind."""
    # no_grad, not inference_mode: a rotary table that grows here must stay usable in training
    device, lengths = model.head.weight.device, [len(row) for row in rows]
    longest = max(lengths)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    counts = torch.tensor(lengths, device=device)
    hidden = model.hidden(tokens, store)
    if store is not None and min(lengths) < longest:
        store.keep(counts)
    last = hidden[torch.arange(len(rows), device=device), counts - 1]
    return capped_logits(last, model.head.weight, model.config.soft_cap)[:, : model.config.vocab_size].cpu()


def pick(logits: Float[Tensor, "rows vocab"], temperature: float, top_k: int, chances: Sequence[float]) -> list[int]:
    """One token id a row, from float32 logits: the one at which the summed probabilities pass the row's chance.

    The tokens are summed by falling logit with ``top_k``, else by id; ``chances`` are multiples of 2⁻⁵³ in [0, 1), so
    that their product with a sum is always below that sum.
    """
    if temperature == 0:
        return logits.numpy().argmax(-1).tolist()  # ten times as fast as torch's here
    if not 0 < top_k < logits.shape[-1] and kernels.instructions() != "plain":
        return torch.ops.xsalab.decode_pick(logits, temperature, torch.tensor(chances, dtype=torch.float64)).tolist()
    logits, ids = logits.topk(top_k) if 0 < top_k < logits.shape[-1] else (logits, None)
    # the largest at 0 first: a tiny temperature then gives −inf for the rest, never inf − inf
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    sums = scaled.exp().cumsum(-1, dtype=torch.float64)
    passed = sums <= torch.tensor(chances, dtype=torch.float64)[:, None] * sums[:, -1:]
    places = passed.sum(-1, keepdim=True)
    return (places if ids is None else ids.gather(-1, places))[:, 0].tolist()


def stream_text(pieces: Iterable[bytes]) -> Iterator[str]:
    """Text as soon as it is whole: the bytes of a character that is not complete yet are held back.

    Bytes that can never become UTF-8 turn into U+FFFD, as does a character that the end cuts off.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        if text := decoder.decode(piece):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
