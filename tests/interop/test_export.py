from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from xsalab import model as model_package
from xsalab.data.chat import CHAT_TOKENS, render, render_prompt
from xsalab.data.corpus import TokenDocument
from xsalab.data.tokenizer import Tokenizer
from xsalab.eval.bits_per_byte import bits_per_byte
from xsalab.eval.generate import generate
from xsalab.experiment.plugins import import_plugins
from xsalab.interop import export as export_module
from xsalab.interop.export import export, write_folder
from xsalab.interop.export_code import flatten
from xsalab.interop.export_tokenizer import TEMPLATE, nanochat_tokenizer
from xsalab.interop.nanochat import NanochatTokenizer, read_checkpoint
from xsalab.model import GPT, ModelConfig, VariantChoice, native
from xsalab.model.variant import VARIANTS
from xsalab.train.checkpoint import load_tensors, save_tensors

PROGRAM = Path(__file__).with_name("lm_eval_program.py")
TOKENS = torch.randint(0, 290, (2, 20), generator=torch.Generator().manual_seed(1))
PROMPTS = [[285, 4, 9], [285, 70, 71, 72, 73, 74, 75], [285]]


def build(name: str = "xsa", options: dict[str, Any] | None = None, layers: str = "all", **changes: Any) -> GPT:
    """Every part at work, every parameter away from zero and one, and rows of padding in the vocabulary's tables."""
    numbers: dict[str, Any] = {
        "depth": 3, "width": 32, "heads": 4, "kv_heads": 2, "context": 32, "vocab_size": 297, "window_block": 4,
        "value_gate_channels": 4, "smear_channels": 8,
    }  # fmt: skip
    dtype = changes.pop("dtype", torch.float32)
    model = GPT(ModelConfig(**{**numbers, **changes}), VariantChoice(name, layers, options or {}), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(".strength.raw"):
                random = torch.Generator().manual_seed(sum(name.encode()))
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.15, generator=random))
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["the cat sat on the mat and the dog " * 20, "hello world 123 " * 10, "x = y + 1\n" * 8]
    return Tokenizer.train(texts, 297)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """transformers, which keeps the code of exports in a folder of this test run."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install xsalab[hf]")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path_factory.mktemp("path")))  # puts sys.path back at the end
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        yield transformers


Load = Callable[..., Any]


@pytest.fixture
def load(hf: ModuleType, tokenizer: Tokenizer, tmp_path: Path) -> Load:
    """A model written as an export and loaded by transformers: ``load(model, dtype=…)``."""
    count = iter(range(100))

    def write_and_load(model: GPT, *, chat: bool = False, plugins: Any = (), **options: Any) -> Any:
        folder = tmp_path / f"{tmp_path.name}{next(count)}"
        folder.mkdir()
        write_folder(model, tokenizer, folder, card="", chat=chat, plugins=plugins)
        loaded, report = hf.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True, **options
        )
        assert not any(report.values()), report
        assert type(loaded).__module__.startswith("transformers_modules.")
        return loaded

    return write_and_load


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = [[7] * (width - len(row)) + row if side == "left" else row + [7] * (width - len(row)) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    masks = mask if side == "left" else [row[::-1] for row in mask]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


# Weights and logits


SPREAD = {
    "fixed": ("xsa", {"alpha": 0.3}, "last:2"),
    "a layer": ("xsa", {"alpha": [0.1, 0.5, 0.9]}, "all"),
    "learned": ("xsa", {"alpha": {"learned": "tanh", "per": "head", "start": 0.4}}, "0,2"),
    "scheduled": ("xsa", {"alpha": {"from": 0.0, "to": 0.7, "between": [0.1, 0.4]}}, "all"),
    "projected": ("xsa", {"against": "projected"}, "with-ve"),
    "any": ("xsa", {"alpha": 1.5, "allow_any_alpha": True}, "all"),
}


@pytest.mark.parametrize("case", [*SPREAD, "standard", "self-masked", "head-gate", "sink"])
def test_every_layer_gives_the_run_s_numbers_to_the_last_bit(load: Load, case: str) -> None:
    """F162, F163: strength, layer set and choice of v travel, and no layer's output differs in one bit."""
    model = build(*SPREAD.get(case, (case,)))
    model.set_progress(1.0)
    loaded = load(model)
    assert asdict(loaded.network.choice) == asdict(model.choice)
    assert asdict(loaded.network.config) == asdict(model.config)
    seen: dict[str, list[Tensor]] = {"run": [], "export": []}
    for name, network in (("run", model), ("export", loaded.network)):
        for block in network.blocks:
            block.register_forward_hook(lambda module, inputs, output, name=name: seen[name].append(output))
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert len(seen["run"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen["run"], seen["export"], strict=True))
    if case == "scheduled":
        ends = [float(variant.strength.value) for variant in loaded.network.variants()]
        assert ends == pytest.approx([0.7] * 3)


def test_the_head_is_its_own_and_saving_again_keeps_everything(load: Load, hf: ModuleType, tmp_path: Path) -> None:
    """F160: nothing is tied, missing or left over, over two journeys; rows of padding in the vocabulary come along."""
    model = build()
    loaded = load(model)
    assert not loaded.config.tie_word_embeddings
    assert loaded.network.embedding.weight.shape == (320, 32)
    assert not torch.equal(loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight)
    loaded.save_pretrained(tmp_path / "again")
    again, report = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", trust_remote_code=True, output_loading_info=True
    )
    assert not any(report.values())
    assert torch.equal(logits_of(again), logits_of(model))
    assert logits_of(again).shape == (2, 20, 297)


def test_weights_lie_where_products_round_as_in_the_run(load: Load) -> None:
    """Weights used where they lie in the mapped file, at any address, can give logits that differ by 1e-6."""
    model = build(width=128, vocab_size=1000, context=64)
    loaded = load(model)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in loaded.parameters())
    tokens = torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits_of(loaded, tokens), logits_of(model, tokens))


def test_bfloat16_computes_as_a_run_in_bfloat16_does(load: Load) -> None:
    """The variant's own parameters stay float32, as the masters are that a run casts at each use."""
    options = {"alpha": {"learned": "sigmoid", "start": 0.3}}
    model = build("xsa", options)
    twin = build("xsa", options, dtype=torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    for source in (model, twin):  # a run in float32, and one in bfloat16: its dtype is the default
        loaded = load(source, dtype=torch.bfloat16)
        kinds = {parameter.dtype for name, parameter in loaded.named_parameters() if ".variant." not in name}
        assert kinds == {torch.bfloat16}
        with native.plain():  # the kernels do not travel with an export
            assert torch.equal(logits_of(loaded), logits_of(twin))
    assert load(twin).dtype == torch.bfloat16


def test_a_fresh_model_of_the_configuration_can_train(load: Load, hf: ModuleType) -> None:
    loaded = load(build())
    fresh = hf.AutoModelForCausalLM.from_config(loaded.config, trust_remote_code=True)
    assert float(fresh.network.blocks[0].attention.w_o.weight.detach().abs().max()) == 0
    loss = fresh.train()(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(np.log(297), abs=0.1)
    assert float(fresh.network.head.weight.grad.abs().sum()) > 0


def test_tables_are_real_where_weights_are_not_yet(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """As releases before 5 load: each parameter goes to "meta" as it is made, and tables are never made again."""
    loaded = load(build(context=64))
    register = torch.nn.Module.register_parameter

    def to_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else torch.nn.Parameter(parameter.to("meta")))

    monkeypatch.setattr(torch.nn.Module, "register_parameter", to_meta)
    monkeypatch.setattr(type(loaded), "_init_weights", lambda self, module: None)
    empty = type(loaded)(loaded.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert torch.equal(empty.network.cos, loaded.network.cos)
    assert torch.equal(empty.network.sin, loaded.network.sin)


def test_a_file_without_one_of_the_weights_is_refused(hf: ModuleType, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """transformers would draw it anew, with a warning."""
    write_folder(build(), tokenizer, tmp_path, card="", chat=False)
    tensors = load_tensors(tmp_path / "model.safetensors")
    del tensors["network.blocks.1.mlp.w1.weight"]
    save_tensors(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="holds no weight of a Linear"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize("alpha", ["0", "0.5"])
def test_a_nanochat_checkpoint_gives_nanochat_s_own_logits(
    hf: ModuleType, nanochat_d4: Path, expected: dict[str, np.ndarray], tmp_path: Path, alpha: str
) -> None:
    """F162: rotary halves, caps and norms against numbers that nanochat wrote, plain and with α in its attention."""
    choice = VariantChoice("xsa", options={"alpha": float(alpha)})
    model, given = read_checkpoint(nanochat_d4, choice=choice)
    write_folder(model, nanochat_tokenizer(given), tmp_path, card="", chat=True)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    found = logits_of(loaded, torch.from_numpy(expected["tokens"]))[:, expected["positions"]]
    np.testing.assert_allclose(found, expected[f"logits_alpha_{alpha}"], atol=1e-4, rtol=0)
    if alpha == "0":
        prompt, greedy = expected["greedy_prompt"], expected["greedy_tokens"]
        batch = padded([prompt.tolist(), prompt[:9].tolist()], "left")
        length = len(greedy) - len(prompt)
        new = loaded.generate(**batch, max_new_tokens=length, do_sample=False, eos_token_id=None)
        assert new[0].tolist() == greedy.tolist()


# Padding, loss, generation


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(load: Load, side: str) -> None:
    """F145: positions, smear, windows, logits and loss of a row are those of the row alone."""
    model = build()
    loaded, batch = load(model), padded(PROMPTS, side)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        output = loaded(**batch, labels=labels)
        nats = [model.token_nats(torch.tensor([row[:-1]]), torch.tensor([row[1:]])) for row in PROMPTS[:2]]
    for i, row in enumerate(PROMPTS):
        own = output.logits[i][batch["attention_mask"][i] == 1]
        torch.testing.assert_close(own, logits_of(model, torch.tensor([row]))[0], atol=1e-5, rtol=0)
    assert float(output.loss) == pytest.approx(float(torch.cat(nats, 1).mean()), abs=1e-5)


@pytest.mark.parametrize("name", ["xsa", "sink"])
def test_generating_gives_the_run_s_tokens(load: Load, name: str) -> None:
    """With the cache and without, in a batch of different lengths and past the context: what our own loop gives."""
    model = build(name)
    loaded, batch = load(model), padded(PROMPTS, "left")
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    found = [loaded.generate(**batch, use_cache=cache, **options)[:, -40:].tolist() for cache in (True, False)]
    ours = [list(generate(model, row, 40, temperature=0)) for row in PROMPTS]
    assert found == [ours, ours]


def test_beams_are_the_same_with_the_cache(load: Load) -> None:
    """Rows of the cache follow the beams that go on."""
    loaded, batch = load(build()), padded(PROMPTS, "left")
    with_cache, without = (
        loaded.generate(**batch, num_beams=3, max_new_tokens=8, use_cache=cache, eos_token_id=None, do_sample=False)
        for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_a_second_turn_goes_on_from_the_cache(load: Load) -> None:
    """``generate`` hands over only what the cache does not hold, left padding included."""
    loaded, batch = load(build()), padded(PROMPTS, "left")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    first = loaded.generate(**batch, return_dict_in_generate=True, **options)
    mask = torch.cat((batch["attention_mask"], torch.ones(3, 7, dtype=torch.long)), 1)
    text = torch.cat((first.sequences, torch.tensor([[5, 6, 7]] * 3)), 1)
    held = first.cache if "cache" in first else first.past_key_values
    assert held.get_seq_length() == 10
    again = loaded.generate(text, attention_mask=mask, cache=held, **options)
    assert torch.equal(again, loaded.generate(text, attention_mask=mask, **options))


def test_what_is_not_offered_is_refused(load: Load, hf: ModuleType) -> None:
    loaded = load(build())
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 19\), it must be \(2, 20\)"):
        loaded(TOKENS, attention_mask=torch.ones(2, 19))
    with pytest.raises(ValueError, match="a cache of its own kind, got a DynamicCache"):
        loaded(TOKENS, cache=hf.DynamicCache())
    with pytest.raises(ValueError, match="put hooks on"):
        loaded(TOKENS, output_hidden_states=True)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        loaded.generate(TOKENS, prompt_lookup_num_tokens=2, max_new_tokens=2)
    with pytest.raises(ValueError, match="vocabulary of this model is fixed"):
        loaded.resize_token_embeddings(300)
    with pytest.raises(ValueError, match="cannot be shortened"):
        loaded(TOKENS, use_cache=True).cache.crop(1)
    assert isinstance(loaded(TOKENS, return_dict=False), tuple)
    assert loaded(TOKENS, logits_to_keep=1).logits.shape == (2, 1, 297)


# Tokens


SYSTEM = {"role": "system", "content": "Be short.\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}],
    "system": [SYSTEM, {"role": "user", "content": " hello"}, {"role": "assistant", "content": "world\n"}],
    "turns": [
        {"role": "user", "content": "x = y"},
        {"role": "assistant", "content": " + 1"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "  naïve 🙂 "},
    ],
    "literal": [
        {"role": "user", "content": "<|bos|> <|<|user_end|>|> <| |> <|assistant_start|>"},
        {"role": "assistant", "content": "<|assistant_end|><|pad|>"},
    ],
    "tools": [
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "th"},
                {"type": "text", "text": "e cat <|bos|>"},
                {"type": "python", "text": "1+<|python_end|>"},
                {"type": "python_output", "text": "2"},
                {"type": "text", "text": ""},
            ],
        },
    ],
}


@pytest.fixture(scope="module")
def exported_tokenizer(hf: ModuleType, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokens")
    write_folder(build(), tokenizer, folder, card="", chat=True)
    return hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("case", CHATS)
def test_the_chat_template_renders_what_training_read(exported_tokenizer: Any, tokenizer: Tokenizer, case: str) -> None:
    """Ids, not text: special tokens arise from the template alone, whatever is written in a message."""
    messages = CHATS[case]
    found = exported_tokenizer.apply_chat_template(messages, return_dict=False)
    assert found == render(messages, tokenizer).tokens
    question = messages[:-1]
    asked = exported_tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert asked == render_prompt(question, tokenizer)
    text = exported_tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert exported_tokenizer(text, add_special_tokens=False)["input_ids"] == asked


@pytest.mark.parametrize(
    ("messages", "prompt", "words"),
    [
        ([{"role": "assistant", "content": "a"}], False, "take turns"),
        ([SYSTEM], False, "no turn of a user"),
        ([{"role": "user", "content": "a"}, SYSTEM], False, "take turns"),
        (CHATS["one turn"], True, "ends with the user's turn"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], False, "a user's content is text"),
    ],
)
def test_the_chat_template_refuses_what_training_refuses(
    exported_tokenizer: Any, messages: list[dict[str, Any]], prompt: bool, words: str
) -> None:
    import jinja2

    with pytest.raises(jinja2.TemplateError, match=words):
        exported_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)


def test_the_start_token_comes_exactly_once(exported_tokenizer: Any, tokenizer: Tokenizer) -> None:
    """F140. Ordinary text gives our own ids behind it, also text that looks like a special token, on request."""
    for text in ("the cat", "  x = 1\n\n", "", "naïve 🙂 中文", "<|bos|> and <|pad|>"):
        ids = exported_tokenizer(text, split_special_tokens=True)["input_ids"]
        assert ids == [tokenizer.bos, *tokenizer.encode([text])[0]]
    assert exported_tokenizer("the", "cat")["input_ids"].count(tokenizer.bos) == 1
    assert exported_tokenizer.decode(exported_tokenizer("the cat")["input_ids"]) == "<|bos|>the cat"
    assert exported_tokenizer.decode(tokenizer.encode(["a  b ."])[0], skip_special_tokens=True) == "a  b ."


def test_a_batch_is_padded_on_the_left_with_the_padding_token(exported_tokenizer: Any, tokenizer: Tokenizer) -> None:
    batch = exported_tokenizer(["the cat sat", "x"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][1][0] == tokenizer.specials["<|pad|>"] == exported_tokenizer.pad_token_id
    assert batch["attention_mask"][1][0] == 0


def test_generation_ends_where_the_kind_of_model_ends(load: Load, tokenizer: Tokenizer) -> None:
    for chat, end in ((False, "<|bos|>"), (True, "<|assistant_end|>")):
        settings = load(build(), chat=chat).generation_config
        assert settings.eos_token_id == tokenizer.specials[end]
        assert settings.bos_token_id == tokenizer.bos
        assert settings.pad_token_id == tokenizer.specials["<|pad|>"]


def test_a_base_model_has_no_chat_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_folder(build(), tokenizer, tmp_path, card="", chat=False)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))


def test_the_template_writes_every_special_token_that_conversations_are_made_of() -> None:
    assert set(re.findall(r"<\|\w+\|>", TEMPLATE)) == {"<|bos|>", *CHAT_TOKENS}


RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"he": 257, b"the": 258, b" the": 259, b"in": 260}


def test_nanochat_ranks_become_merges() -> None:
    """A token may be reached by one way only: "the" is th + e, as th has the lower rank."""
    given = NanochatTokenizer(RANKS, r" ?\p{L}+|\s+|.", {"<|bos|>": 261, "<|user_start|>": 262})
    ours = nanochat_tokenizer(given)
    texts = ["the thin heath in the inn", "naïve <|bos|> 🙂\n\n the", ""]
    assert ours.encode(texts) == given.encode(texts)
    assert ours.specials == given.specials
    assert ["t", "he"] not in ours.table()["model"]["merges"]
    broken = NanochatTokenizer({**RANKS, b"xyz": 261}, r"\p{L}+|.", {"<|bos|>": 262})
    with pytest.raises(ValueError, match="nanochat token 261 b'xyz': no merge"):
        nanochat_tokenizer(broken)


def test_a_real_nanochat_tokenizer_gives_equal_ids(nanochat_d4: Path) -> None:
    given = NanochatTokenizer.read(nanochat_d4 / "tokenizer.pkl")
    ours = nanochat_tokenizer(given)
    texts = [Path(__file__).read_text(encoding="utf-8"), (nanochat_d4.parent / "README.md").read_text(encoding="utf-8")]
    assert ours.encode(texts) == given.encode(texts)
    assert np.array_equal(ours.bytes_per_token(), given.bytes_per_token())


# The code


def relative_imports(text: str) -> set[str]:
    return set(re.findall(r"^\s*from\s+\.(\w+)\s+import", text, flags=re.MULTILINE))


def test_the_network_s_files_import_each_other_in_the_one_form_that_transformers_follows() -> None:
    """``from .file import name``; and the wrapper names every file it needs, as older releases look no further."""
    folder = Path(str(model_package.__file__)).parent
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, name
                assert node.module in texts, name
    needed, front = set(), {"modeling_xsalab"}
    while front:
        needed |= front
        front = {other for name in front for other in relative_imports(texts[name])} - needed
    assert needed == {"modeling_xsalab"} | relative_imports(texts["modeling_xsalab"])
    assert not any("modeling_xsalab" in relative_imports(text) for text in texts.values())


def test_the_network_s_files_import_nothing_that_may_be_missing() -> None:
    """transformers refuses an export for any import statement of a package that is not there, within functions too."""
    for path in Path(str(model_package.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                assert name.split(".")[0] in {"torch", "transformers", *sys.stdlib_module_names}, path.name


PLUGIN = '''"""Mine: from xsalab.model import Variant"""
from __future__ import annotations

import math
from xsalab.model import (
    QKV,  # a comment
    Attend, Site, Variant as Base,
    exclude_self, variant,
)

@variant("mine-own")
class Mine(Base):
    def __init__(self, site: Site, start: float = 0.5) -> None:
        from xsalab.model.layers import rms_norm
        super().__init__(site)
        import torch
        self.share = torch.nn.Parameter(torch.full((site.heads,), math.sqrt(start)))
        self.register_buffer("fixed", torch.linspace(0, 1, site.heads), persistent=False)
        self.norm = rms_norm

    def forward(self, t: QKV, attend: Attend):
        y = attend(t.q, t.k, t.v)
        return y.lerp(exclude_self(y, t.v), (self.share * self.fixed)[:, None])
'''


def test_a_variant_of_the_user_s_own_file_comes_along(load: Load) -> None:
    """Also what its constructor computes and no file holds: buffers that are not saved."""
    import_plugins([("mine.py", PLUGIN)])
    try:
        model = build("mine-own", {"start": 0.25})
        loaded = load(model, plugins=[("other.py", ""), ("mine.py", PLUGIN)])
        assert torch.equal(logits_of(loaded), logits_of(model))
        assert not torch.equal(logits_of(loaded), logits_of(build("standard")))
        with pytest.raises(ValueError, match="classes at the top level of a plugin's file"):
            load(model)
    finally:
        VARIANTS.pop("mine-own")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import einops\n", "line 1: imports einops"),
        ("\nfrom xsalab.data import Tokenizer\n", "line 2: imports xsalab.data"),
        ("import xsalab.model\n", "imports xsalab.model, but"),
        ("from .other import x\n", "imports .other"),
        ("from xsalab.model import nothing\n", "xsalab.model has no nothing"),
        ("import torch; from xsalab.model import Variant\n", "a line of its own"),
    ],
)
def test_a_plugin_that_an_export_cannot_hold_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        flatten("mine.py", text)


# The folder


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))


def test_without_transformers_it_says_what_is_not_proved(unproved: None, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()  # empty: no reason to refuse
    made = export(build(), tokenizer, tmp_path / "there", card="| arm | bpb |")
    assert made.logits == 0
    assert "not proved" in made.note
    assert "xsalab[hf]" in made.note
    assert "| arm | bpb |" in (tmp_path / "there" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "there" / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_a_folder_that_holds_something_is_left_alone(unproved: None, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="is there and not empty"):
        export(build(), tokenizer, tmp_path)
    with pytest.raises(ValueError, match="297 tokens, the model 290: they are no pair"):
        export(build(vocab_size=290), tokenizer, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("fault", ["disk", "proof"])
def test_it_is_written_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tmp_path: Path, fault: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def differs(*arguments: Any, **options: Any) -> subprocess.CompletedProcess:
        answer = {"logits": 1, "faults": ["logits in float32 differ"]}
        return subprocess.CompletedProcess([], 0, f"a line\n{json.dumps(answer)}\n", "")

    pytest.importorskip("transformers", reason="transformers is not installed: pip install xsalab[hf]")
    monkeypatch.setattr(*((export_module, "save_tensors", full) if fault == "disk" else (subprocess, "run", differs)))
    with pytest.raises(OSError if fault == "disk" else ValueError, match=r"disk full|is not the run's model.*differ"):
        export(build(), tokenizer, tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_export_proves_itself_in_a_process_without_xsalab(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Logits of both dtypes, ids and chat template, loaded by a process in which importing xsalab fails."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install xsalab[hf]")
    model = build("xsa", {"alpha": {"from": 0, "to": 0.7}}, dtype=torch.bfloat16)
    made = export(model, tokenizer, tmp_path / "new", chat=True)
    assert made.logits == 2 * 2 * 32 * 297
    assert made.note == ""
    assert "modeling_xsalab.py" in made.files
    stored = load_tensors(tmp_path / "new" / "model.safetensors")
    assert float(stored["network.blocks.0.attention.variant.strength.value"]) == pytest.approx(0.7)


def test_the_verb_writes_what_the_run_is(
    xsalab: Any, write_experiment: Any, no_page: None, unproved: None, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert xsalab("train", write_experiment(), "--arm", "xsa", "--seed", 0, "--out", out).code == 0
    (run,) = (out / "experiments" / "tiny" / "runs").iterdir()
    told = json.loads(xsalab("export", run, tmp_path / "new", "--json").out)
    assert told["folder"] == str(tmp_path / "new")
    assert set(told["files"]) == {path.name for path in (tmp_path / "new").iterdir()}
    assert "xsalab[hf]" in told["note"]
    config = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert config["attention"]["name"] == "xsa"
    xsalab("export", run, tmp_path / "new").refused("is there and not empty")
    xsalab("export", tmp_path / "nothing", tmp_path / "other").refused("no run here")


def test_the_verb_reads_a_nanochat_checkpoint(xsalab: Any, nanochat_d4: Path, unproved: None, tmp_path: Path) -> None:
    ran = xsalab("export", nanochat_d4, tmp_path / "new", "--chat")
    assert ran.code == 0, ran.err
    assert "not proved" in ran.out
    settings = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["pad_token"] == settings["eos_token"] == "<|assistant_end|>"
    assert "chat_template" in settings
    assert "standard attention, as no xsalab_variant.json lies beside it" in ran.err


def test_the_verb_exports_the_strength_that_the_checkpoint_s_file_names(
    xsalab: Any, nanochat_d4: Path, unproved: None, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(nanochat_d4, tmp_path / "run"))
    (folder / "xsalab_variant.json").write_text('{"steps": {"120": [0, 1, 1, 0.5]}}', encoding="utf-8")
    ran = xsalab("export", folder, tmp_path / "new")
    assert ran.code == 0, ran.err
    assert "XSA α = 0, 1, 1, 0.5 as xsalab_variant.json says" in ran.err
    config = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert config["attention"]["name"] == "xsa"
    assert config["attention"]["options"]["alpha"] == [0, 1, 1, 0.5]
    assert "xsa" in (tmp_path / "new" / "README.md").read_text(encoding="utf-8").split("---")[-1].replace("xsalab", "")


# Another harness


CHOICES = [
    ("The cat sat on the", [" mat", " dog", " hello world"], 0),
    ("x = ", ["y", "1"], 0),  # the space moves into the answer
    ("hello", [" world 123", " cat"], 0),
]
TEXTS = ["the cat sat on the mat", "hello world 123\n\nx = y + 1, naïve 🙂"]
TASK = """task: own_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
target_delimiter: ""
"""
TASKS = {
    "choice": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
    "doc_to_target: answer\nmetric_list: [{metric: acc}]\n",
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list: [{metric: bits_per_byte}]\n",
    "generate": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
    'generation_kwargs: {until: ["zzz"], max_gen_toks: 6, do_sample: false}\nmetric_list: [{metric: bypass}]\n',
}


def learn(model: GPT, tokenizer: Tokenizer, text: str) -> None:
    """Teaches the model one text by heart."""
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode([text])[0]]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model.token_nats(ids[:, :-1], ids[:, 1:]).mean().backward()
        optimizer.step()


@pytest.mark.slow
def test_lm_evaluation_harness_agrees_with_our_own_scores(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """F137, F139, F140, F142: the same tokens scored with the same sign behind one start token; the same bits; the
    same text generated in a batch that is padded on the left."""
    for name in ("transformers", "lm_eval", "accelerate"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install xsalab[dev]")
    model = build(context=64)
    learn(model, tokenizer, CHOICES[0][0] + " mat")
    (tmp_path / "model").mkdir()
    write_folder(model, tokenizer, tmp_path / "model", card="", chat=False)
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in CHOICES]
    for name, content in (("items", rows), ("texts", [{"text": text} for text in TEXTS])):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        file = tmp_path / ("texts.jsonl" if name == "rolling" else "items.jsonl")
        path = tmp_path / "tasks" / f"{name}.yaml"
        path.write_text(TASK.format(name=name, file=file) + text, encoding="utf-8")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, str(PROGRAM), str(tmp_path / "model"), str(tmp_path / "tasks")]
    done = subprocess.run(command, capture_output=True, env=environment, encoding="utf-8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])

    def ids(text: str) -> list[int]:
        return [tokenizer.bos, *tokenizer.encode([text])[0]]

    for (question, choices, _), row in zip(CHOICES, found["own_choice"], strict=True):
        for choice, (likelihood, _) in zip(choices, row["answers"], strict=True):
            whole, before = ids(question + choice), len(ids(question.rstrip()))
            with torch.no_grad():
                nats = model.token_nats(torch.tensor([whole[:-1]]), torch.tensor([whole[1:]]))[0, before - 1 :]
            assert len(nats) >= 1
            assert likelihood == pytest.approx(-float(nats.sum()), abs=1e-4)
    assert found["own_choice"][0]["acc"] == 1.0
    assert found["own_choice"][0]["answers"][0][0] > -1.0

    documents = [TokenDocument(text, np.array(ids(text)[1:], dtype=np.uint16), len(text.encode())) for text in TEXTS]
    scores = bits_per_byte(model, documents, bos=tokenizer.bos, bytes_per_token=tokenizer.bytes_per_token(), context=64)
    for row, score in zip(found["own_rolling"], scores, strict=True):
        assert -row["answers"][0] == pytest.approx(score.value, abs=1e-4)

    for (question, _, _), row in zip(CHOICES, found["own_generate"], strict=True):
        new = list(generate(model, ids(question), 6, temperature=0, stop=[tokenizer.bos]))
        assert row["answers"][0] == tokenizer.decode(new)
