from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xsalab.data.chat_rows import TokenConversation
from xsalab.data.corpus import TokenDocument
from xsalab.eval import ItemScore
from xsalab.eval.bits_per_byte import (
    answer_bits_per_byte,
    bits_per_byte,
    row_bits_per_byte,
    total_bpb,
    windows_of,
)
from xsalab.model import GPT, ModelConfig

BOS = 49
CONTEXT = 16
SIZES = np.array([1 + i % 4 for i in range(48)] + [0, 0])  # tokens 48 and 49 are special


def build(vocab_size: int = 50, **changes) -> GPT:
    """Weights that make every part of the model count."""
    config = ModelConfig(
        **{
            "depth": 2, "width": 32, "heads": 2, "context": CONTEXT, "vocab_size": vocab_size, "window": "SL",
            "window_block": 4, "value_gate_channels": 4, "smear_channels": 8, **changes,
        }
    )  # fmt: skip
    model, random = GPT(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=random)
    return model


def document(name: str, tokens: list[int] | np.ndarray, sizes: np.ndarray = SIZES) -> TokenDocument:
    tokens = np.asarray(tokens, dtype=np.uint16)
    return TokenDocument(name, tokens, int(sizes[tokens].sum()))


def corpus(lengths: list[int], seed: int = 0) -> list[TokenDocument]:
    random = np.random.default_rng(seed)
    return [document(f"d{i}", random.integers(0, 48, length)) for i, length in enumerate(lengths)]


def test_a_document_within_the_context_is_one_plain_pass() -> None:
    model, (one,) = build(), corpus([11])
    (score,) = bits_per_byte(model, [one], bos=BOS, bytes_per_token=SIZES, context=CONTEXT)
    targets = torch.from_numpy(one.tokens.astype(np.int64))
    inputs = torch.cat((torch.tensor([BOS]), targets[:-1]))
    with torch.no_grad():
        nats = F.cross_entropy(model(inputs[None])[0], targets, reduction="sum")
    assert (score.task, score.item, score.weight) == ("bpb", "d0", one.bytes)
    assert score.value == pytest.approx(nats.item(), rel=1e-6)


def test_a_long_document_is_scored_window_by_window() -> None:
    """Against a loop that takes each window by hand, one pass a window."""
    model, (one,), stride = build(), corpus([45]), 5
    (score,) = bits_per_byte(model, [one], bos=BOS, bytes_per_token=SIZES, context=CONTEXT, stride=stride)
    text = torch.cat((torch.tensor([BOS]), torch.from_numpy(one.tokens.astype(np.int64))))
    total, begin = 0.0, 0
    while True:
        window = text[begin : begin + CONTEXT + 1]
        with torch.no_grad():
            nats = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none").double()
        already = 0 if begin == 0 else CONTEXT - stride
        total += nats[already:].sum().item()
        if begin + CONTEXT >= 45:
            break
        begin += stride
    assert score.value == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("stride", [1, 3, 8, 15, 16])
def test_every_position_is_scored_exactly_once(stride: int) -> None:
    """F117: lengths around the context and the stride; a window is never longer than the context."""
    for length in range(1, 4 * CONTEXT + 2):
        counts: Counter[int] = Counter()
        for window in windows_of(0, length, CONTEXT, stride):
            assert window.start <= window.scored < window.end <= window.start + CONTEXT
            assert window.start == 0 or window.end - window.scored <= stride
            counts.update(range(window.scored, window.end))
        assert counts == Counter(range(length))


@pytest.mark.parametrize("stride", [3, 8, 16])
def test_a_uniform_model_pays_the_same_for_every_token(stride: int) -> None:
    """F117 end to end: nats divided by ln 50 count the scored positions, whatever the windows."""
    model = build()
    torch.nn.init.zeros_(model.head.weight)
    documents = corpus([1, 2, 7, 8, 9, 15, 16, 17, 18, 23, 24, 25, 31, 32, 33, 100])
    for score, one in zip(
        bits_per_byte(model, documents, bos=BOS, bytes_per_token=SIZES, context=CONTEXT, stride=stride),
        documents,
        strict=True,
    ):
        assert (score.item, score.weight) == (one.id, one.bytes)
        assert score.value / math.log(50) == pytest.approx(len(one.tokens), rel=1e-6)


def test_256_equal_bytes_cost_8_bits_each() -> None:
    """F115: bits, not nats. float32 holds ln 256 to 1e-8."""
    model, sizes = build(vocab_size=256), np.ones(256, dtype=np.int64)
    torch.nn.init.zeros_(model.head.weight)
    one = document("all", np.arange(256), sizes)
    scores = bits_per_byte(model, [one], bos=0, bytes_per_token=sizes, context=CONTEXT)
    assert total_bpb(scores) == pytest.approx(8.0, rel=1e-7)


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 16])
def test_the_result_does_not_depend_on_the_batch(batch_rows: int) -> None:
    """F106, F145: padding enters no score, and the same bytes are scored."""
    model, documents = build(), corpus([3, 40, 1, 16, 17, 9, 64, 30, 5])
    arguments = {"bos": BOS, "bytes_per_token": SIZES, "context": CONTEXT}
    want = bits_per_byte(model, documents, **arguments, batch_rows=7)
    got = bits_per_byte(model, documents, **arguments, batch_rows=batch_rows)
    assert [(score.item, score.weight) for score in got] == [(score.item, score.weight) for score in want]
    # products of matrices of another size add up in another order
    np.testing.assert_allclose([s.value for s in got], [s.value for s in want], rtol=1e-6)


def test_a_document_is_scored_alone() -> None:
    """Its neighbours in the batch change nothing."""
    model, documents = build(), corpus([12, 30, 7])
    arguments = {"bos": BOS, "bytes_per_token": SIZES, "context": CONTEXT, "batch_rows": 4}
    together = bits_per_byte(model, documents, **arguments)
    alone = [bits_per_byte(model, [one], **arguments)[0] for one in documents]
    np.testing.assert_allclose([s.value for s in together], [s.value for s in alone], rtol=1e-6)


def test_shapes_are_few() -> None:
    """Batches have one number of rows and at most four lengths: a compiled model is compiled four times."""
    model, shapes = build(), set()
    original = model.token_nats

    def watched(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tokens.shape))
        return original(tokens, targets)

    model.token_nats = watched  # type: ignore[method-assign]
    bits_per_byte(model, corpus(list(range(1, 60))), bos=BOS, bytes_per_token=SIZES, context=CONTEXT, batch_rows=3)
    assert shapes <= {(3, 4), (3, 8), (3, 12), (3, 16)}


def test_special_tokens_count_neither_loss_nor_bytes() -> None:
    """F114: a special token inside a document is read, and left out of both sums."""
    model = build()
    one = document("d", [1, 2, 48, 3, 4])
    (score,) = bits_per_byte(model, [one], bos=BOS, bytes_per_token=SIZES, context=CONTEXT)
    with torch.no_grad():
        nats = F.cross_entropy(
            model(torch.tensor([[BOS, 1, 2, 48, 3]]))[0], torch.tensor([1, 2, 48, 3, 4]), reduction="none"
        )
    assert score.value == pytest.approx(nats[[0, 1, 3, 4]].sum().item(), rel=1e-6)
    assert score.weight == SIZES[[1, 2, 3, 4]].sum()


def test_many_short_documents_do_not_raise_bits_per_byte() -> None:
    """F114: a uniform model costs the same however often a start token stands between documents."""
    model, sizes = build(), np.array([1] * 49 + [0])
    torch.nn.init.zeros_(model.head.weight)
    tokens = np.arange(40)
    results = []
    for cut in (1, 2, 8, 40):
        documents = [document(str(i), tokens[i : i + cut], sizes) for i in range(0, 40, cut)]
        results.append(total_bpb(bits_per_byte(model, documents, bos=BOS, bytes_per_token=sizes, context=CONTEXT)))
    np.testing.assert_allclose(results, math.log2(50), rtol=1e-6)


def test_characters_of_several_tokens_count_their_raw_bytes() -> None:
    """F069, F070: an emoji in four byte tokens is 4 bytes, not four replacement signs of 3; a space is one byte."""
    table = {b"\xf0": 0, b"\x9f": 1, b"\xa6": 2, b"\x80": 3, b" the": 4, b"the": 5}
    sizes = np.array([len(token) for token in table] + [1] * 43 + [0])
    text = "the the \N{CRAB}".replace(" \N{CRAB}", "\N{CRAB}")
    tokens = np.array([5, 4, 0, 1, 2, 3])
    one = TokenDocument("crab", tokens, len(text.encode()))
    (score,) = bits_per_byte(build(), [one], bos=BOS, bytes_per_token=sizes, context=CONTEXT)
    assert score.weight == len(text.encode()) == 11


def test_totals_are_sums_over_sums() -> None:
    """F107: neither a mean of means nor of documents."""
    scores = [ItemScore("bpb", "a", 10 * math.log(2), 10), ItemScore("bpb", "b", 4000 * math.log(2), 1000)]
    assert total_bpb(scores) == pytest.approx(4010 / 1010)


@pytest.mark.parametrize("scores", [[], [ItemScore("bpb", "a", 0.0, 0.0)]], ids=["none", "empty"])
def test_no_bytes_is_an_error_and_no_number(scores: list[ItemScore]) -> None:
    """F075, F105."""
    with pytest.raises(ValueError, match="no bytes"):
        total_bpb(scores)


def test_nothing_to_evaluate_is_an_error() -> None:
    """F075, F105: no documents; a batch of empty documents; special tokens alone."""
    arguments = {"bos": BOS, "bytes_per_token": SIZES, "context": CONTEXT}
    with pytest.raises(ValueError, match="no documents"):
        bits_per_byte(build(), [], **arguments)
    for empty in ([document("a", []), document("b", [])], [document("a", [48, 48])]):
        with pytest.raises(ValueError, match="no bytes"):
            bits_per_byte(build(), empty, **arguments)


def test_an_empty_document_among_others_weighs_nothing() -> None:
    documents = [document("empty", []), *corpus([5])]
    scores = bits_per_byte(build(), documents, bos=BOS, bytes_per_token=SIZES, context=CONTEXT)
    assert scores[0] == ItemScore("bpb", "empty", 0.0, 0.0)
    assert scores[1].value > 0


def test_tokens_of_another_tokenizer_are_refused() -> None:
    one = TokenDocument("d7", np.array([1, 2, 3]), 1000)
    with pytest.raises(ValueError, match=r"document d7: its tokens stand for 9 bytes, its text has 1000"):
        bits_per_byte(build(), [one], bos=BOS, bytes_per_token=SIZES, context=CONTEXT)


@pytest.mark.parametrize("change", [{"context": 0}, {"stride": 0}, {"stride": 17}, {"batch_rows": 0}], ids=str)
def test_a_wrong_setting_is_refused(change: dict) -> None:
    arguments = {"bos": BOS, "bytes_per_token": SIZES, "context": CONTEXT, **change}
    with pytest.raises(ValueError, match="at least 1"):
        bits_per_byte(build(), corpus([5]), **arguments)


def test_gradients_are_left_on_and_none_is_made() -> None:
    model = build()
    bits_per_byte(model, corpus([5]), bos=BOS, bytes_per_token=SIZES, context=CONTEXT)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


# --- packed rows


def test_packed_rows_are_scored_as_they_lie() -> None:
    model, random = build(), np.random.default_rng(0)
    rows = random.integers(0, 50, (5, CONTEXT + 1)).astype(np.uint16)
    rows[:, 0] = BOS
    rows[2, 5:7] = BOS, 48
    scores = row_bits_per_byte(model, rows, SIZES, batch_rows=2)
    tokens = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        nats = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none").double().numpy()
    counted = SIZES[rows[:, 1:]] > 0
    assert counted.sum() < counted.size
    np.testing.assert_allclose([s.value for s in scores], np.where(counted, nats, 0).sum(1), rtol=1e-6)
    assert [s.weight for s in scores] == SIZES[rows[:, 1:]].sum(1).tolist()
    assert [s.item for s in scores] == ["0", "1", "2", "3", "4"]


def test_packed_rows_do_not_depend_on_the_batch() -> None:
    """F106."""
    model, rows = build(), np.random.default_rng(0).integers(0, 50, (7, CONTEXT + 1))
    totals = [total_bpb(row_bits_per_byte(model, rows, SIZES, batch_rows=size)) for size in (1, 3, 4, 16)]
    np.testing.assert_allclose(totals, totals[0], rtol=1e-6)


def test_an_infinite_loss_where_nothing_is_counted_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """F119: the start token is impossible, its loss infinite; the sum over the others is finite."""
    model, rows = build(soft_cap=0.0), np.array([[BOS, 1, 2, BOS, 3, 4]])
    monkeypatch.setattr(model, "hidden", lambda tokens, cache=None: torch.ones(*tokens.shape, 32))
    torch.nn.init.constant_(model.head.weight[BOS], -3e38)
    tokens = torch.from_numpy(rows)
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
    assert losses.isinf().tolist() == [False, False, True, False, False]
    (score,) = row_bits_per_byte(model, rows, SIZES)
    assert score.value == pytest.approx(losses[[0, 1, 3, 4]].sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((0, 17), dtype=int), "no rows"),
        (np.zeros((3, 1), dtype=int), "no rows"),
        (np.full((2, 5), BOS), "no bytes"),
    ],
    ids=["none", "too-narrow", "special-alone"],
)
def test_rows_without_bytes_are_an_error(rows: np.ndarray, message: str) -> None:
    """F075, F105."""
    with pytest.raises(ValueError, match=message):
        row_bits_per_byte(build(), rows, SIZES)


# Answers


def conversations(lengths: list[int]) -> list[TokenConversation]:
    """The start token, then ordinary and special tokens, about half of them the assistant's, the last one surely."""
    random = np.random.default_rng(1)
    found = []
    for number, length in enumerate(lengths):
        tokens = random.choice([3, 20, 47, 48, 49], length).astype(np.uint16)
        mask = random.integers(0, 2, length).astype(np.uint16)
        tokens[0], mask[0], tokens[-1], mask[-1] = BOS, 0, 7, 1
        found.append(TokenConversation(f"c{number}", tokens, mask))
    return found


def test_answers_are_scored_by_the_assistant_s_own_text() -> None:
    """F078, F114: nats and bytes of its ordinary tokens alone, against one plain pass a conversation."""
    model, talks = build(), conversations([2, 17, 9, 13, 17])
    scores = answer_bits_per_byte(model, talks, SIZES, batch_rows=2)
    for talk, score in zip(talks, scores, strict=True):
        tokens = torch.from_numpy(talk.tokens.astype(np.int64))
        with torch.no_grad():
            nats = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none").double().numpy()
        counted = [i for i in range(1, len(tokens)) if talk.mask[i] and talk.tokens[i] < 48]
        assert (score.task, score.item) == ("sft", talk.id)
        assert score.weight == sum(SIZES[talk.tokens[i]] for i in counted)
        assert score.value == pytest.approx(sum(nats[i - 1] for i in counted), rel=1e-6)


def test_answers_do_not_depend_on_their_batch() -> None:
    """F145: alone, in twos and all together."""
    model, talks = build(), conversations([5, 17, 9, 2])
    one, two, all_ = (answer_bits_per_byte(model, talks, SIZES, batch_rows=rows) for rows in (1, 2, 16))
    for a, b, c in zip(one, two, all_, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-6)
        assert a.value == pytest.approx(c.value, rel=1e-6)


def test_answers_without_a_byte_are_an_error() -> None:
    """F075: no text of the assistant at all."""
    silent = TokenConversation("c", np.array([BOS, 3, 48], np.uint16), np.array([0, 0, 1], np.uint16))
    with pytest.raises(ValueError, match="no bytes to evaluate in 1 conversations"):
        answer_bits_per_byte(build(), [silent], SIZES)
    with pytest.raises(ValueError, match="no conversations"):
        answer_bits_per_byte(build(), [], SIZES)
