"""Packing and batches: no token is lost, and a batch comes from (rows, seed, step) alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xsalab.data import Rows, batch_at
from xsalab.data import rows as rows_module
from xsalab.data.rows import Packing, mixed, nanochat_rows, pack, pack_whole

BOS, PAD = 1, 0


def documents_of(lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents of these lengths in which no token occurs twice."""
    starts = np.cumsum([2, *lengths])
    return [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)]


def packed(lengths: Sequence[int], width: int, buffer: int = 10) -> tuple[np.ndarray, Packing]:
    packing = Packing()
    rows = list(pack(documents_of(lengths), bos=BOS, pad=PAD, width=width, buffer=buffer, packing=packing))
    return np.array(rows).reshape(-1, width), packing


# Packing

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths=LENGTHS, width=st.integers(2, 40), buffer=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_every_token_is_a_target_once_after_its_predecessor(lengths: list[int], width: int, buffer: int) -> None:
    """F062: no token of a document is lost, however long it is."""
    rows, packing = packed(lengths, width, buffer)
    pairs = Counter((int(a), int(b)) for row in rows for a, b in pairwise(row) if b not in (BOS, PAD))
    expected = Counter()
    for document in documents_of(lengths):
        expected.update(zip([BOS, *document[:-1].tolist()], document.tolist(), strict=True))
    assert pairs == expected
    assert packing.rows * width == packing.tokens + packing.repeated + packing.padding
    assert packing.tokens == sum(lengths) + len(lengths)
    assert packing.documents == len(lengths)
    assert packing.padding == int((rows == PAD).sum()) < width
    assert not (rows[:-1] == PAD).any()


def simple_pack(lengths: Sequence[int], width: int, buffer: int) -> np.ndarray:
    """The rule again, in lists and linear searches."""
    coming = [[BOS, *d.tolist()] for d in documents_of(lengths)]
    waiting: list[list[int]] = []
    rows: list[list[int]] = [[]]
    while True:
        while coming and len(waiting) < buffer:
            waiting.append(coming.pop(0))
        if not waiting:
            break
        if len(rows[-1]) == width:
            rows.append([])
        fitting = [d for d in waiting if len(d) <= width - len(rows[-1])]
        chosen = max(fitting, key=len) if fitting else waiting[0]
        waiting = [d for d in waiting if d is not chosen]
        while len(rows[-1]) + len(chosen) > width:
            space = width - len(rows[-1])
            rows[-1] += chosen[:space]
            chosen = chosen[space - 1 :]
            rows.append([])
        rows[-1] += chosen
    rows[-1] += [PAD] * (width - len(rows[-1]))
    return np.array(rows)


@given(lengths=LENGTHS, width=st.integers(2, 40), buffer=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_packing_is_best_fit_and_cuts_the_oldest(lengths: list[int], width: int, buffer: int) -> None:
    np.testing.assert_array_equal(packed(lengths, width, buffer)[0], simple_pack(lengths, width, buffer))


def test_one_document_of_fifty_contexts_is_packed_whole() -> None:
    """F062: nothing of a long document is thrown away."""
    rows, packing = packed([50 * 64], width=65)
    assert rows.shape == (50, 65)
    assert rows[:, 1:].ravel().tolist() == documents_of([50 * 64])[0].tolist()
    assert rows[:, 0].tolist() == [BOS, *rows[:-1, -1].tolist()]
    assert packing.summary(65) == {
        "rows": 50, "documents": 1, "tokens": 3201, "repeated": 49, "padding": 0, "cut_documents": 1, "waste": 0.0
    }  # fmt: skip


def test_waste_is_the_share_of_padding() -> None:
    _, packing = packed([3], width=8)
    assert packing.summary(8)["waste"] == 0.5


def test_a_one_token_document_shifts_nothing() -> None:
    """F074: its token is predicted from the start token, and from nothing else."""
    rows, _ = packed([1, 3], width=6)
    assert rows.tolist() == [[BOS, 3, 4, 5, BOS, 2]]


# nanochat's packing


def simple_nanochat(lengths: Sequence[int], width: int) -> np.ndarray:
    coming = [[BOS, *d.tolist()] for d in documents_of(lengths)]
    waiting: list[list[int]] = []
    rows: list[list[int]] = []
    row: list[int] = []
    while True:
        while len(waiting) < 1000 and coming:
            waiting += coming[:128]
            coming = coming[128:]
        if not waiting:
            return np.array(rows)
        space = width - len(row)
        lengths_now = [len(d) if len(d) <= space else 0 for d in waiting]
        best = lengths_now.index(max(lengths_now)) if max(lengths_now) else -1
        if best < 0:
            best = min(range(len(waiting)), key=lambda i: len(waiting[i]))
        row += waiting.pop(best)[:space]
        if len(row) == width:
            rows.append(row)
            row = []


def test_nanochat_rows_follow_nanochat_s_rule() -> None:
    lengths = np.random.default_rng(1).integers(1, 90, 1500).tolist()
    rows = nanochat_rows(documents_of(lengths), BOS, 65)
    np.testing.assert_array_equal(rows, simple_nanochat(lengths, 65))
    assert (rows[:, 0] == BOS).all()
    np.testing.assert_array_equal(nanochat_rows(documents_of(lengths), BOS, 65, limit=7), rows[:7])
    assert nanochat_rows([], BOS, 65).shape == (0, 65)


# Batches

ROWS = Rows(np.arange(1, 70 * 9 + 1, dtype=np.uint16).reshape(70, 9), pad=0, digest="x")


def ids(step: int, rows: Rows = ROWS, seed: int = 0, batch_rows: int = 8, **options: object) -> list[int]:
    return batch_at(rows, seed=seed, step=step, batch_rows=batch_rows, **options).row_ids.tolist()  # type: ignore[arg-type]


def test_every_epoch_is_a_permutation_of_all_rows() -> None:
    """F055, F084: the pass over the end of the data goes on with the next epoch, in another order."""
    stream = [i for step in range(35) for i in ids(step)]  # 4 epochs of 70
    epochs = [stream[e * 70 : (e + 1) * 70] for e in range(4)]
    assert all(sorted(epoch) == list(range(70)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert ids(0, seed=1) != ids(0)


def test_a_batch_depends_on_its_step_alone() -> None:
    """F082, F084, F086: any step in any order, after any other, in a fresh cache, in the second epoch too."""
    straight = [ids(step) for step in range(20)]
    rows_module._epoch.cache_clear()
    assert [ids(step) for step in reversed(range(20))] == straight[::-1]
    assert ids(13, seed=5) != straight[13]
    assert ids(13) == straight[13]


def test_a_late_step_draws_one_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """F086: no walk through the samples before it."""
    drawn = []
    plain = rows_module._permutation
    monkeypatch.setattr(rows_module, "_permutation", lambda *key, **stream: drawn.append(key) or plain(*key, **stream))
    rows_module._epoch.cache_clear()
    assert len(ids(10**9, batch_rows=7)) == 7
    assert len(drawn) == 1


def test_the_order_of_rows_never_changes() -> None:
    """A new release of numpy, or of this file, must not train on other batches under the same seed."""
    assert ids(0) == [66, 0, 54, 43, 69, 38, 21, 2]
    assert ids(9, seed=3) == [9, 31, 27, 59, 30, 7, 32, 8]


def test_permuted_rows_are_the_same_set_in_another_order() -> None:
    plain, permuted = [ids(s) for s in range(30)], [ids(s, permute=True) for s in range(30)]
    assert [sorted(p) for p in permuted] == [sorted(p) for p in plain]
    assert sum(a != b for a, b in zip(plain, permuted, strict=True)) >= 29
    assert permuted == [ids(s, permute=True) for s in range(30)]


@pytest.mark.parametrize("permute", [False, True])
def test_ranks_share_the_global_batch(permute: bool) -> None:
    for step in (0, 8):
        shares = [ids(step, rank=rank, world=4, permute=permute) for rank in range(4)]
        assert [i for share in shares for i in share] == ids(step, permute=permute)
        assert {len(share) for share in shares} == {2}


def test_targets_are_the_next_tokens_and_padding_has_none() -> None:
    tokens = np.array([[1, 5, 6, 7], [1, 8, 0, 0]], dtype=np.uint16)
    batch = batch_at(Rows(tokens, pad=0, digest="x"), seed=0, step=0, batch_rows=2)
    order = np.argsort(batch.row_ids.numpy())
    assert batch.inputs[order].tolist() == [[1, 5, 6], [1, 8, 0]]
    assert batch.targets[order].tolist() == [[5, 6, 7], [8, -1, -1]]
    assert batch.inputs.dtype == batch.targets.dtype == batch.row_ids.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_rows = 71: the corpus packs into 70 rows of 9 tokens"):
        ids(0, batch_rows=71)
    with pytest.raises(ValueError, match=r"batch_rows = 0: "):
        ids(0, batch_rows=0)
    with pytest.raises(ValueError, match=r"batch_rows = 8 does not divide among 3 processes: use 6 or 9"):
        ids(0, world=3)
    with pytest.raises(ValueError, match=r"seed = -1"):
        ids(0, seed=-1)


# Conversations


def conversations_of(lengths: Sequence[int]) -> list[np.ndarray]:
    """(n, 2): tokens of which none occurs twice, and a mask over every second one."""
    return [np.stack((tokens, np.arange(len(tokens)) % 2), axis=1) for tokens in documents_of(lengths)]


def simple_whole(lengths: Sequence[int], width: int, buffer: int) -> list[list[list[int]]]:
    """nanochat's rule again (sft_data_generator_bos_bestfit), in lists and linear searches; one pass."""
    coming = [conversation.tolist() for conversation in conversations_of(lengths)]
    waiting: list[list[list[int]]] = []
    rows: list[list[list[int]]] = []
    while coming or waiting:
        row: list[list[int]] = []
        while True:
            while coming and len(waiting) < buffer:
                waiting.append(coming.pop(0))
            best = -1
            for i, conversation in enumerate(waiting):
                fits = len(conversation) <= width - len(row)
                if fits and (best < 0 or len(conversation) > len(waiting[best])):
                    best = i
            if best < 0:
                break
            row += waiting.pop(best)
        rows.append(row + [[PAD, 0]] * (width - len(row)))
    return rows


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), width=st.integers(20, 40), buffer=st.integers(1, 12)
)
@settings(max_examples=100, deadline=None)
def test_conversations_are_packed_whole_as_nanochat_does(lengths: list[int], width: int, buffer: int) -> None:
    """F076: none is cut or lost, every row begins with one, and the rest of a row is padding that counts nothing."""
    packing = Packing()
    rows = list(pack_whole(conversations_of(lengths), pad=PAD, width=width, buffer=buffer, packing=packing))
    assert [row.tolist() for row in rows] == simple_whole(lengths, width, buffer)
    assert (packing.documents, packing.tokens, packing.cut_documents) == (len(lengths), sum(lengths), 0)
    assert packing.rows * width == packing.tokens + packing.padding


def test_a_mask_takes_targets_out_and_leaves_inputs() -> None:
    """F078: a target counts where its own place in the mask is 1, whatever stands before it."""
    tokens = np.array([[1, 5, 6, 7], [1, 8, 9, 0]], dtype=np.uint16)
    mask = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], dtype=np.uint16)
    batch = batch_at(Rows(tokens, pad=0, digest="x", mask=mask), seed=0, step=0, batch_rows=2)
    order = np.argsort(batch.row_ids.numpy())
    assert batch.inputs[order].tolist() == [[1, 5, 6], [1, 8, 9]]
    assert batch.targets[order].tolist() == [[-1, 6, 7], [8, -1, -1]]


def test_sources_are_mixed_in_an_order_that_never_changes() -> None:
    assert mixed(10).tolist() == [6, 7, 9, 5, 1, 4, 8, 3, 0, 2]
    assert sorted(mixed(1000).tolist()) == list(range(1000))
