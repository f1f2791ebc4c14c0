"""Which documents are scored: fixed by their names and texts, whatever the batch, the run or the time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xsalab.data import Corpus, DataConfig, TokenDocument, prepare
from xsalab.eval import ItemScore
from xsalab.eval.bits_per_byte import total_bpb
from xsalab.eval.validation import EvalConfig, check_evaluation, evaluate, evaluation_documents
from xsalab.model import GPT, ModelConfig, init_weights

CONFIG = ModelConfig(depth=2, width=32, heads=2, context=32, vocab_size=300, window_block=8)


@pytest.fixture(scope="module")
def corpus(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    config = DataConfig(source=str(corpus_folder), validation_fraction=0.3)
    return prepare(config, 300, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(CONFIG)
    init_weights(model, 0)
    return model


class Fixed:
    """A corpus of given documents."""

    def __init__(self, documents: list[TokenDocument]) -> None:
        self.documents = documents

    def validation_documents(self) -> list[TokenDocument]:
        return self.documents


def document(name: str, size: int) -> TokenDocument:
    return TokenDocument(name, np.zeros(size, dtype=np.uint16), size)


def test_the_choice_depends_on_names_and_sizes_alone() -> None:
    """The order of the source does not matter; as much as fits is taken, later small documents included."""
    documents = [document(f"{n}.txt:0", 10 + n) for n in range(20)]
    chosen = evaluation_documents(Fixed(documents), 100)  # pyright: ignore
    again = evaluation_documents(Fixed(documents[::-1]), 100)  # pyright: ignore
    assert [d.id for d in chosen] == [d.id for d in again]
    total = sum(d.bytes for d in chosen)
    left = [d for d in documents if d not in chosen]
    assert total <= 100 < total + min(d.bytes for d in left)


def test_a_larger_budget_keeps_what_was_chosen() -> None:
    documents = [document(f"{n}.txt:0", 10) for n in range(20)]
    small, large = ({d.id for d in evaluation_documents(Fixed(documents), n)} for n in (50, 120))  # pyright: ignore
    assert small < large


def test_one_document_is_scored_whatever_the_budget(corpus: Corpus, model: GPT) -> None:
    """F105: fewer bytes than the first document: that one is scored, never nothing."""
    config = EvalConfig(max_bytes=1)
    assert len(evaluation_documents(corpus, 1)) == 1
    assert len(evaluate(model, corpus, config)) == 1


def test_every_byte_of_the_chosen_documents_counts(corpus: Corpus, model: GPT) -> None:
    chosen = evaluation_documents(corpus, 3000)
    scores = evaluate(model, corpus, EvalConfig(max_bytes=3000))
    assert [(s.item, s.weight) for s in scores] == [(d.id, d.bytes) for d in chosen]
    assert len(chosen) > 2


@pytest.mark.parametrize("packing", ["documents", "nanochat"])
@pytest.mark.parametrize("batch_rows", [1, 5])
def test_the_score_does_not_depend_on_the_batch(packing: str, batch_rows: int, corpus: Corpus, model: GPT) -> None:
    """F106: the same tokens and the same bits per byte, up to rounding."""
    reference = evaluate(model, corpus, EvalConfig(packing=packing))
    found = evaluate(model, corpus, EvalConfig(packing=packing, batch_rows=batch_rows))
    assert [(s.item, s.weight) for s in found] == [(s.item, s.weight) for s in reference]
    assert total_bpb(found) == pytest.approx(total_bpb(reference), rel=1e-6)


def test_evaluating_twice_is_the_same_to_the_bit(corpus: Corpus, model: GPT) -> None:
    """F110: no state is carried from one evaluation to the next."""
    first: list[ItemScore] = evaluate(model, corpus, EvalConfig())
    assert evaluate(model, corpus, EvalConfig()) == first


def test_the_first_model_is_near_a_code_of_equal_tokens(corpus: Corpus, model: GPT) -> None:
    """At the start every token is about as likely: log2(vocabulary) bits a token over the bytes of all tokens."""
    scores = evaluate(model, corpus, EvalConfig())
    tokens = sum(len(d.tokens) for d in evaluation_documents(corpus, EvalConfig().max_bytes))
    expected = tokens * np.log2(CONFIG.vocab_size) / sum(score.weight for score in scores)
    assert total_bpb(scores) == pytest.approx(expected, rel=0.01)


def test_too_little_text_for_a_row_is_found_before_training(corpus: Corpus) -> None:
    """F105: packed as nanochat packs, less than one row is an error and not an empty table."""
    config = EvalConfig(packing="nanochat", max_bytes=10)
    check_evaluation(corpus, config, 32)  # the first document fills a short row
    with pytest.raises(
        ValueError, match=r"eval.packing = 'nanochat': 10 bytes .* no row of 1001 tokens; raise eval.max"
    ):
        check_evaluation(corpus, config, 1000)
    check_evaluation(corpus, dataclasses.replace(config, packing="documents"), 1000)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_bytes": 0}, "max_bytes = 0: must be at least 1"),
        ({"every": -1}, "every = -1: must be at least 0"),
        ({"stride": -1}, "stride = -1: must be at least 0"),
        ({"batch_rows": 0}, "batch_rows = 0: must be at least 1"),
        ({"packing": "rows"}, "packing = 'rows': use 'documents' or 'nanochat'"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvalConfig(**values)
