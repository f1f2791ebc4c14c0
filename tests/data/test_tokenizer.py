"""The tokenizer: exact bytes, special tokens out of reach of text, one file that only this format fits."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import pre_tokenizers

from data.texts import sentences
from xsalab.data import Tokenizer, tokenizer
from xsalab.data.tokenizer import SPECIAL_TOKENS

TEXTS = [*sentences(60), "Emoji 😀😃🎉 and 漢字, naïve café.\n" * 8, "x = 12345 + 67\n\n\n    return x\n" * 8]
TRAINED = Tokenizer.train(TEXTS, 370)
MODEL, ADDED = TRAINED._json["model"], TRAINED._json["added_tokens"]


def size_of(text: str) -> int:
    """Bytes of the text by the byte table over its encoding."""
    table = TRAINED.bytes_per_token()
    return sum(int(table[i]) for i in TRAINED.encode([text])[0])


@given(st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_and_its_bytes_add_up(text: str) -> None:
    """F069: the bytes are those of the text, for tokens that are part of a character too."""
    (ids,) = TRAINED.encode([text])
    assert TRAINED.decode(ids) == text
    assert size_of(text) == len(text.encode())
    assert not set(ids) & set(TRAINED.specials.values())


def test_emoji_bytes_add_up() -> None:
    """F069: a tokenizer trained without an emoji spells it in bytes of one each."""
    plain = Tokenizer.train(sentences(60), 300)
    (ids,) = plain.encode(["👩‍🚀"])
    assert plain.bytes_per_token()[ids].tolist() == [1] * len("👩‍🚀".encode())


def test_a_leading_space_is_counted_once() -> None:
    """F070: ten words, nine spaces."""
    assert size_of("the self of every row is a sum of values") == 40


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_the_name_of_a_special_token_is_ordinary_text(name: str) -> None:
    """F067: no crash and no special token, even where the corpus is full of the name."""
    for trained in (TRAINED, Tokenizer.train([name] * 50 + TEXTS, 370)):
        (ids,) = trained.encode([f"a{name}b {name}"])
        assert max(ids) < trained.vocab_size - len(SPECIAL_TOKENS)
        assert trained.decode(ids) == f"a{name}b {name}"


def test_special_tokens_have_the_last_ids() -> None:
    assert list(TRAINED.specials) == list(SPECIAL_TOKENS)
    assert list(TRAINED.specials.values()) == list(range(360, 370))
    assert (TRAINED.vocab_size, TRAINED.bos, TRAINED.pad) == (370, 360, 361)
    assert TRAINED.bytes_per_token().shape == (370,)
    assert TRAINED.bytes_per_token()[360:].tolist() == [0] * 10
    assert TRAINED.decode([TRAINED.bos, *TRAINED.encode(["hi"])[0]]) == "<|bos|>hi"


def test_the_byte_alphabet_is_the_library_s() -> None:
    ours = tokenizer.byte_alphabet()
    assert sorted(ours.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in map(chr, [*range(1, 0x800, 7), 0x20AC, 0x1F600]):
        assert "".join(piece for piece, _ in level.pre_tokenize_str(text)) == "".join(ours[b] for b in text.encode())


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("it's 12345", ["it", "'s", "Ġ", "12", "34", "5"]),
        ("a  b\n\n c", ["a", "Ġ", "Ġb", "ĊĊ", "Ġc"]),
        ("x+=1;\n", ["x", "+=", "1", ";Ċ"]),
    ],
)
def test_text_is_split_in_the_gpt4_style(text: str, pieces: list[str]) -> None:
    split = TRAINED._encoder.pre_tokenizer
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_long_texts_are_encoded_in_pieces_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(TEXTS) * 3
    whole = TRAINED.encode([text, "", "a"])
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 50)
    assert len(tokenizer._pieces(text)) > 100
    assert TRAINED.encode([text, "", "a"]) == whole


# Two libraries, one encoding

needs_tiktoken = pytest.mark.skipif(not importlib.util.find_spec("tiktoken"), reason="tiktoken is not installed")
ODD = st.sampled_from(
    [*"ab '\n\r\t1.²Ⅷ٣éß漢😀\u200d\u0301\u00a0\u2028\x00\x1c\x85", "'S", "  ", "\r\n", "<|bos|>", " the"]
)


def by_merges(text: str) -> list[int]:
    return TRAINED._encoder.encode(text, add_special_tokens=False).ids


@needs_tiktoken
@given(st.lists(st.one_of(ODD, st.characters(exclude_categories=["Cs"])), max_size=40).map("".join))
@settings(max_examples=200, deadline=None)
def test_ranks_encode_as_merges_do(text: str) -> None:
    """The faster library gives the ids of the one that trained, for any text."""
    assert TRAINED._by_rank is not None
    assert TRAINED.encode([text])[0] == by_merges(text)


@needs_tiktoken
def test_ranks_encode_whole_documents_as_merges_do() -> None:
    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8"), "\n" * 3000, "a" * 3000, " " * 3000 + "b"]:
        assert TRAINED.encode([text])[0] == by_merges(text)


@needs_tiktoken
def test_half_of_a_surrogate_pair_is_refused() -> None:
    """tiktoken's own answer is another character, which nobody wrote."""
    with pytest.raises(UnicodeEncodeError):
        TRAINED.encode(["a\ud800"])


def test_what_cannot_be_cut_is_left_to_the_library_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken gives up on a million white spaces: a piece beyond twice the limit never reaches it."""
    fresh = Tokenizer(json.dumps(TRAINED.table()))
    reached: list[str] = []

    def encode(text: str) -> list[int]:
        reached.append(text)
        return by_merges(text)

    fresh.__dict__["_by_rank"] = encode
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 50)
    texts = [" " * 101 + "x", "y" * 100, "z\n" * 200]
    assert fresh.encode(texts) == [by_merges(text) for text in texts]
    assert max(map(len, reached)) <= 100
    assert "".join(reached) == "".join(texts[1:])


def with_merges(*merges: tuple[str, str], **changes: object) -> Tokenizer:
    """A tokenizer of the 256 bytes and these merges, each of which makes a token."""
    tokens = [*tokenizer.byte_alphabet().values(), *dict.fromkeys(a + b for a, b in merges)]
    model = {**MODEL, "vocab": {token: i for i, token in enumerate(tokens)}, "merges": list(merges)}
    added = [{**token, "id": len(tokens) + i} for i, token in enumerate(ADDED)]
    return Tokenizer(json.dumps({**TRAINED._json, "model": model, "added_tokens": added, **changes}))


PLAIN_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def test_merging_by_rank_is_allowed_where_it_is_the_same() -> None:
    assert TRAINED._merges_by_rank()
    assert with_merges(("a", "b"), ("ab", "c"))._merges_by_rank()


@pytest.mark.parametrize(
    "other",
    [
        # "abc" is merged to "ab", "c" and never to its token, which ranks alone would make
        with_merges(("a", "b"), ("b", "c"), ("a", "bc")),
        # two merges make one token: the rank of the second is not its id
        with_merges(("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")),
        # another order than that of the ids
        with_merges(("a", "b"), ("c", "d"), model={**with_merges(("c", "d"), ("a", "b"))._json["model"],
                    "merges": [("a", "b"), ("c", "d")]}),
        with_merges(("a", "b"), pre_tokenizer=PLAIN_SPLIT),
        with_merges(("a", "b"), model={**with_merges(("a", "b"))._json["model"], "ignore_merges": True}),
    ],
)  # fmt: skip
def test_merging_by_rank_is_refused_where_it_may_differ(other: Tokenizer) -> None:
    assert not other._merges_by_rank()
    assert other._by_rank is None
    assert other.decode(other.encode(["abcd abc"])[0]) == "abcd abc"


@needs_tiktoken
def test_the_refused_would_differ() -> None:
    """The first of them, by tiktoken all the same: one token in place of two."""
    import tiktoken  # pyright: ignore[reportMissingImports]

    other = with_merges(("a", "b"), ("b", "c"), ("a", "bc"))
    ranks = {token: i for i, token in enumerate(other.token_bytes[:259])}
    encoding = tiktoken.Encoding("x", pat_str=tokenizer.SPLIT, mergeable_ranks=ranks, special_tokens={})
    assert len(encoding.encode_ordinary("abc")) == 1
    assert len(other.encode(["abc"])[0]) == 2


@pytest.mark.slow
def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    """Not the order of hashing, not the process: the text alone decides."""
    program = (
        "import sys; from data.texts import sentences; from xsalab.data import Tokenizer; "
        "Tokenizer.train(sentences(60), 330).save(sys.argv[1])"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run([sys.executable, "-c", program, str(tmp_path / seed)], check=True, env=environment)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_saved_tokenizer_comes_back_and_suits_hugging_face(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    theirs = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.digest == TRAINED.digest
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    for text in TEXTS:
        assert again.encode([text])[0] == TRAINED.encode([text])[0] == theirs.encode(text).ids
        assert theirs.decode(theirs.encode(text).ids) == text
    assert theirs.token_to_id("<|bos|>") == TRAINED.bos
    assert theirs.get_vocab_size() == TRAINED.vocab_size


# Bad input


def test_a_vocabulary_that_the_text_cannot_fill_is_refused() -> None:
    """F072: the largest possible one is named, and works."""
    with pytest.raises(ValueError, match=r"vocab_size = 4096: the training text allows at most \d+") as caught:
        Tokenizer.train(sentences(4), 4096)
    largest = int(str(caught.value).split("at most ")[1].split(";")[0])
    assert Tokenizer.train(sentences(4), largest).vocab_size == largest


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size = 265: must be at least 266"):
        Tokenizer.train(TEXTS, 265)
    assert Tokenizer.train(TEXTS, 266).vocab_size == 266


class Trap:
    """A pickle that would give itself away."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_a_pickle_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 5):
        (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(Trap(), protocol))
        with pytest.raises(ValueError, match=r"tokenizer\.pkl: (a binary file|not a tokenizer\.json)"):
            Tokenizer.load(tmp_path / "tokenizer.pkl")
    assert not (tmp_path / "executed").exists()


def changed(**changes: object) -> str:
    return json.dumps({**TRAINED._json, **changes})


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "KeyError"),
        ("[]", "TypeError"),
        ("nonsense", "JSONDecodeError"),
        (changed(model={**MODEL, "type": "WordPiece"}), "not BPE"),
        (changed(model={**MODEL, "dropout": 0.1}), "at random"),
        (changed(model={**MODEL, "vocab": {"a": 0}}), "not byte-level"),
        (changed(added_tokens=ADDED[1:]), "do not follow"),
        (changed(added_tokens=[{**t, "content": t["content"] + "x"} for t in ADDED]), "no <|bos|>"),
        (changed(truncation={"max_length": 3, "strategy": "LongestFirst", "stride": 0}), "cuts or pads"),
        (changed(normalizer={"type": "Lowercase"}), "does not give back"),
        (changed(normalizer={"type": "NFC"}), "does not give back"),
        (changed(normalizer={"type": "Nonsense"}), "not a tokenizer.json"),
        (changed(pre_tokenizer=PREFIXED), "does not give back"),
    ],
)
def test_a_foreign_tokenizer_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        Tokenizer.load(path)
    assert str(caught.value).startswith(f"{path}: not a tokenizer.json of xsalab")
    assert message in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.json: no such file"):
        Tokenizer.load(tmp_path / "nowhere.json")
