"""The tokenizer of an export: tokenizer.json with the start token put in front, and the chat template in Jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ..data.tokenizer import BOS, PAD, Tokenizer, byte_alphabet
from .nanochat import NanochatTokenizer

ASSISTANT_END = "<|assistant_end|>"

# Two characters that Unicode reserves for a program's own use, and that no text holds. The first keeps special tokens
# apart from text that looks like one and is dropped before encoding; at the second, encoding begins anew.
BREAK, APART = "\ufdd0", "\ufdd1"


def as_json(content: Mapping[str, Any]) -> str:
    """The text of one file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def special_names(tokenizer: Tokenizer, chat: bool) -> dict[str, str]:
    """Start, end and padding. A base model's text ends where the next document starts."""
    end = ASSISTANT_END if chat else BOS
    return {"bos_token": BOS, "eos_token": end, "pad_token": PAD if PAD in tokenizer.specials else end}


def special_ids(tokenizer: Tokenizer, chat: bool) -> dict[str, int]:
    """The same by id."""
    return {f"{name}_id": tokenizer.specials[token] for name, token in special_names(tokenizer, chat).items()}


def tokenizer_files(tokenizer: Tokenizer, context: int, chat: bool) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    names = special_names(tokenizer, chat)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": [name for name in tokenizer.specials if name not in names.values()],
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # generation goes on at the right end of every row
        "clean_up_tokenization_spaces": False,
    }
    if chat:
        settings["chat_template"] = chat_template(tokenizer)
    return {
        "tokenizer.json": as_json(tokenizer_table(tokenizer)),
        "tokenizer_config.json": as_json(settings),
        "special_tokens_map.json": as_json(names),
    }


def tokenizer_table(tokenizer: Tokenizer) -> dict[str, Any]:
    """The run's tokenizer.json, with <|bos|> in front of every text, and with the two characters of the template."""
    table = tokenizer.table()
    start = {"SpecialToken": {"id": BOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    number = tokenizer.bos
    drop = {"type": "Replace", "pattern": {"String": BREAK}, "content": ""}
    split = {"type": "Split", "pattern": {"String": APART}, "behavior": "Removed", "invert": False}
    given = table.get("normalizer")
    return {
        **table,
        "normalizer": {"type": "Sequence", "normalizers": [given, drop]} if given else drop,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, table["pre_tokenizer"]]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, first],
            "pair": [start, first, second],
            "special_tokens": {BOS: {"id": BOS, "ids": [number], "tokens": [BOS]}},
        },
    }


TEMPLATE = """
{%- macro plain(text) -%}{{- text PLAIN -}}{%- endmacro -%}
{%- set seen = namespace(system="", turns=0) -%}
{{- "<|bos|>" -}}
{%- for message in messages -%}
  {%- set content = message["content"] -%}
  {%- if message["role"] == "system" and loop.first -%}
    {%- set seen.system = content ~ "\\n\\n" -%}
  {%- elif message["role"] != ("user" if seen.turns % 2 == 0 else "assistant") -%}
    {{- raise_exception("user and assistant take turns, the user begins; a system message may stand before") -}}
  {%- elif message["role"] == "user" -%}
    {%- if content is not string -%}{{- raise_exception("a user's content is text") -}}{%- endif -%}
    {{- "<|user_start|>" ~ plain(seen.system ~ content) ~ "<|user_end|>" -}}
    {%- set seen.system = "" -%}
    {%- set seen.turns = seen.turns + 1 -%}
  {%- else -%}
    {{- "<|assistant_start|>" -}}
    {%- if content is string -%}
      {{- plain(content) -}}
    {%- else -%}
      {%- for part in content -%}
        {%- if part["type"] == "text" -%}
          {{- plain(part["text"]) ~ "APART" -}}
        {%- elif part["type"] == "python" -%}
          {{- "<|python_start|>" ~ plain(part["text"]) ~ "<|python_end|>" -}}
        {%- elif part["type"] == "python_output" -%}
          {{- "<|output_start|>" ~ plain(part["text"]) ~ "<|output_end|>" -}}
        {%- else -%}
          {{- raise_exception("parts are of type text, python or python_output") -}}
        {%- endif -%}
      {%- endfor -%}
    {%- endif -%}
    {{- "<|assistant_end|>" -}}
    {%- set seen.turns = seen.turns + 1 -%}
  {%- endif -%}
{%- endfor -%}
{%- if not seen.turns -%}{{- raise_exception("no turn of a user") -}}{%- endif -%}
{%- if add_generation_prompt -%}
  {%- if seen.turns % 2 == 0 -%}{{- raise_exception("a prompt ends with the user's turn") -}}{%- endif -%}
  {{- "<|assistant_start|>" -}}
{%- endif -%}
""".strip()


def chat_template(tokenizer: Tokenizer) -> str:
    """``render`` and ``render_prompt`` of data/chat.py in Jinja. Text that looks like a special token stays text."""
    begins = dict.fromkeys(name[:2] for name in tokenizer.specials)
    if short := [name for name in begins if len(name) < 2]:
        raise ValueError(f"special token {short[0]!r} is one character: text could not be told from it in a template")
    plain = " ".join(f"| replace({json.dumps(b)}, {json.dumps(b[0] + BREAK + b[1])})" for b in begins)
    return TEMPLATE.replace("PLAIN", plain).replace("APART", json.dumps(APART)[1:-1])


# Another tokenizer


def nanochat_tokenizer(given: NanochatTokenizer) -> Tokenizer:
    """The same tokenizer with merges in place of ranks: what a tokenizer.json holds.

    A token merges from the two parts that merging by lower ranks alone leaves of its bytes. Raises ValueError for a
    token that no merge leads to, as in vocabularies that were not made by merging.
    """
    letters = byte_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ordered = sorted(given.ranks, key=given.ranks.__getitem__)
    merges: list[list[str]] = []
    for token in ordered:
        if len(token) > 1:
            parts = _merge(token, given.ranks)
            if len(parts) != 2:
                raise ValueError(f"nanochat token {given.ranks[token]} {token!r}: no merge of two tokens gives it")
            merges.append([spelled(part) for part in parts])
    split: Any = json.loads(given._split.__getstate__())
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for name, number in sorted(given.specials.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split,
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {spelled(token): given.ranks[token] for token in ordered}, "merges": merges,
        },
    }  # fmt: skip
    return Tokenizer(json.dumps(table))


def _merge(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The token's bytes merged by ranks below its own: of neighbours the pair of lowest rank first."""
    parts, limit = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        found = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        best = min(range(len(found)), key=found.__getitem__)
        if found[best] >= limit:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
