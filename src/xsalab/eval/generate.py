"""Sampling, token by token, with a key/value cache; and text out of bytes that arrive in pieces."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..model import GPT, KVCache


def generate(
    model: GPT,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    cache: bool = True,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields up to ``tokens`` new token ids after ``prompt``; ends before ``stop``, which is not yielded.

    ``temperature`` 0 takes the likeliest token. ``top_k`` keeps the k likeliest, 0 all of them. The draws
    come from a generator of their own, on the CPU: a seed gives one text on every device, up to rounding.
    ``cache = False`` runs the whole sequence again for each token. Raises ValueError at once for an empty
    prompt, a token outside the vocabulary or a setting outside its range.
    """
    vocabulary = model.config.vocab_size
    if not prompt:
        raise ValueError("prompt is empty: it holds at least the start token")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ValueError(f"prompt holds token {max(prompt, key=abs)}; the vocabulary has tokens 0 to {vocabulary - 1}")
    if tokens < 0:
        raise ValueError(f"tokens = {tokens}: must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature}: must be a finite number of at least 0 (0: no chance)")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k}: must be at least 0 (0: all tokens)")
    return _continue(model, list(prompt), tokens, temperature, top_k, seed, cache, stop)


def _continue(
    model: GPT,
    sequence: list[int],
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    cache: bool,
    stop: int | None,
) -> Iterator[int]:
    random = torch.Generator().manual_seed(seed)
    store = KVCache(model.config.depth) if cache else None
    given = sequence
    for _ in range(tokens):
        token = pick(_last_logits(model, given, store), temperature, top_k, random)
        if token == stop:
            return
        yield token
        sequence.append(token)
        given = sequence if store is None else [token]


@torch.no_grad()
def _last_logits(model: GPT, tokens: list[int], store: KVCache | None) -> Float[Tensor, " vocab"]:
    # no_grad, not inference_mode: a rotary table that grows here must stay usable in training
    device = model.head.weight.device
    return model(torch.tensor([tokens], device=device), store)[0, -1].cpu()


def pick(logits: Float[Tensor, " vocab"], temperature: float, top_k: int, random: torch.Generator) -> int:
    """One token id from float32 logits."""
    if temperature == 0:
        return int(logits.argmax())
    # the largest at 0 first: a tiny temperature then gives −inf for the rest, never inf − inf
    scaled = (logits - logits.max()) / temperature
    if 0 < top_k < len(scaled):
        best, ids = scaled.topk(top_k)
        return int(ids[torch.multinomial(best.softmax(-1), 1, generator=random)])
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=random))


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
