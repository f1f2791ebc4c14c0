"""THE WAY OUT: a trained model as a Hugging Face folder, which loads where xsalab is not installed.

config.json, model.safetensors        shape, variant and weights
modeling_xsalab.py, gpt.py, …          the network itself: src/xsalab/model, copied as it is
tokenizer.json, tokenizer_config.json  with the start token put in front once, and the chat template
generation_config.json, README.md, LICENSE

docs/export.md says what such a folder can and cannot do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.chat import check_chat_tokens, render, render_prompt
from ..data.tokenizer import BOS, Tokenizer
from ..files import explain_disk, make_folder, write_atomic
from ..model import GPT, native
from ..train.checkpoint import save_tensors
from .export_code import ENTRY, model_files
from .export_tokenizer import ASSISTANT_END, as_json, special_ids, tokenizer_files

NO_CARD = "No experiment's table came with this model."
NETWORK = "network."  # begins the name of each weight: where the wrapper keeps its GPT


@dataclass(frozen=True)
class Exported:
    """``logits``: how many a process without xsalab found equal to the last bit; 0: not proved, ``note`` says why."""

    folder: Path
    files: tuple[str, ...]
    bytes: int
    logits: int
    note: str


def export(
    model: GPT,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    card: str = "",
    chat: bool = False,
    plugins: Sequence[tuple[str, str]] = (),
) -> Exported:
    """Writes ``folder`` whole or not at all, after a process without xsalab has loaded it and found the same logits.

    ``card``: Markdown for the model card, such as the experiment's table. ``chat``: a fine-tuned model, which gets the
    chat template and ends at <|assistant_end|>. ``plugins``: (name, text) of the files that a variant may come from.
    A schedule of the variant is taken to its end.
    Raises ValueError where the folder holds something, the parts do not fit, or the proof fails.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder}: is there and not empty; give another folder, or delete it")
    if tokenizer.vocab_size > (rows := model.config.vocab_size):
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {rows}: they are no pair")
    if chat:
        check_chat_tokens(tokenizer, str(folder))
    model.set_progress(1.0)
    make_folder(folder.parent)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write_folder(model, tokenizer, temporary, card=card or NO_CARD, chat=chat, plugins=plugins)
        logits, note = _prove(model, tokenizer, temporary, chat)
        if folder.exists():
            folder.rmdir()
        os.replace(temporary, folder)
    except OSError as error:
        raise explain_disk(error, folder, 0) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    files = sorted(folder.iterdir())
    return Exported(
        folder, tuple(path.name for path in files), sum(path.stat().st_size for path in files), logits, note
    )


def write_folder(
    model: GPT, tokenizer: Tokenizer, folder: Path, *, card: str, chat: bool, plugins: Sequence[tuple[str, str]] = ()
) -> None:
    """The files of an export, into a folder that is there and empty; nothing is proved."""
    texts = {
        **model_files(model, plugins),
        **tokenizer_files(tokenizer, model.config.context, chat),
        "config.json": as_json(config_table(model, tokenizer, chat)),
        "generation_config.json": as_json(special_ids(tokenizer, chat)),
        "README.md": model_card(model, card, chat),
        "LICENSE": distribution("xsalab").read_text("licenses/LICENSE") or "",
    }
    for name, text in texts.items():
        write_atomic(folder / name, text)
    weights = {NETWORK + name: tensor for name, tensor in model.state_dict().items()}
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # not for its owner alone


def config_table(model: GPT, tokenizer: Tokenizer, chat: bool) -> dict[str, Any]:
    """config.json: all that the network is built from, and where its classes are."""
    return {
        "model_type": "xsalab",
        "architectures": ["XsalabForCausalLM"],
        "auto_map": {"AutoConfig": f"{ENTRY}.XsalabConfig", "AutoModelForCausalLM": f"{ENTRY}.XsalabForCausalLM"},
        "network": asdict(model.config),
        "attention": {"name": model.choice.name, "layers": model.choice.layers, "options": dict(model.choice.options)},
        "kernel": model.kernel,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        **special_ids(tokenizer, chat),
    }


# The card


def model_card(model: GPT, card: str, chat: bool) -> str:
    """README.md: what it is, how it is loaded, and what its experiment says."""
    config, choice = model.config, model.choice
    options = "".join(f", {option} = {json.dumps(value)}" for option, value in choice.options.items())
    attention = f"{choice.name} attention" + ("" if choice.name == "standard" else f"{options}, layers {choice.layers}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    use = _CHAT_USE if chat else _BASE_USE
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [xsalab, custom_code]
---

# {config.depth} layers, {attention}

A {"fine-tuned" if chat else "base"} model of {parameters:,} parameters, made with xsalab.
Width {config.width}, heads {config.heads}, context {config.context}, tokens {config.vocab_size:,}.

```python
{_LOAD}{use}```

{card.strip()}

## What to know

- The code in this folder is the network itself; torch and transformers are all that it needs. Licence of the code:
  LICENSE. Logits equal those of the run, in PyTorch and without C++ kernels, to the last bit on the same machine with
  the same number of threads.
- `tokenizer(text)` puts <|bos|> in front, once. Text that looks like a special token becomes one, as with every
  tokenizer of transformers, unless it is called with `split_special_tokens=True`.{_CHAT_NOTE if chat else ""}
- Padding may stand on either side. The cache is the model's own: no static or quantized cache, and no assisted
  generation.
"""


_LOAD = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
"""
_BASE_USE = """inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
"""
_CHAT_USE = """messages = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
"""
_CHAT_NOTE = """ The chat template keeps such text of
  a user as text."""


# The proof


def _prove(model: GPT, tokenizer: Tokenizer, folder: Path, chat: bool) -> tuple[int, str]:
    """(logits compared, "") or (0, why not). Raises ValueError where the folder does not give what the run gives."""
    if importlib.util.find_spec("transformers") is None:
        return 0, "written, not proved: transformers is not installed; pip install 'xsalab[hf]'"
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _write_expected(model, tokenizer, scratch, chat)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(scratch / "modules"),
            "TRANSFORMERS_VERBOSITY": "error",
            "CUDA_VISIBLE_DEVICES": "",
        }
        program = str(Path(__file__).with_name("proof.py"))
        done = subprocess.run(
            # -P: neither the program's folder nor the working directory is searched for modules
            [sys.executable, "-P", program, str(folder), name],
            stdin=subprocess.DEVNULL, capture_output=True, env=environment, encoding="utf-8", errors="replace",
        )  # fmt: skip
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ValueError(f"the export was written, could not be proved, and was removed: {reason[:400]}")
    found = json.loads(last)
    if found["faults"]:
        raise ValueError(f"the export is not the run's model, so it was removed: {'; '.join(found['faults'])[:400]}")
    return found["logits"], ""


TEXTS = ("Hello, world", "  two  spaces\n\nand 1234 lines\n", "naïve ångström, 中文, 🙂", "")
LITERAL = f"What does {BOS} mean, and {ASSISTANT_END}?"
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": LITERAL},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "A"},
            {"type": "text", "text": "B"},
            {"type": "python", "text": "1+1"},
            {"type": "python_output", "text": "2"},
        ],
    },
    {"role": "user", "content": " And 3?\n"},
]


def _write_expected(model: GPT, tokenizer: Tokenizer, folder: Path, chat: bool) -> None:
    """What the run's model and tokenizer give, computed here on the CPU: proof.py compares.

    In PyTorch, as in the export: the C++ kernels do not travel, and round otherwise.
    """
    length = min(model.config.context, 64)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    dtypes = dict.fromkeys((torch.float32, model.dtype))
    with native.plain():
        expected = {str(dtype).removeprefix("torch."): _logits(model, tokens, dtype) for dtype in dtypes}
    save_tensors({"tokens": tokens, **expected}, folder / "expected.safetensors")
    ids = tokenizer.encode(list(TEXTS))
    content = {
        "threads": torch.get_num_threads(),
        "dtypes": list(expected),
        "texts": [[text, [tokenizer.bos, *found]] for text, found in zip(TEXTS, ids, strict=True)],
        "conversations": [
            [CONVERSATION[:-1], False, render(CONVERSATION[:-1], tokenizer).tokens],
            [CONVERSATION, True, render_prompt(CONVERSATION, tokenizer)],
        ]
        if chat
        else [],
    }
    (folder / "expected.json").write_text(json.dumps(content), encoding="utf-8")


@torch.no_grad()
def _logits(model: GPT, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the same weights on the CPU, in this dtype."""
    twin = GPT(model.config, model.choice, dtype=dtype, kernel=model.kernel)
    twin.set_progress(1.0)
    twin.load_state_dict(model.state_dict())
    return twin(tokens)
