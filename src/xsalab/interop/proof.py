"""Run as a program by ``export``, with a folder to prove and a file of what is expected: nothing of xsalab is imported.

Loads the folder as anybody would, with transformers, and compares logits bit by bit and token ids one by one. Prints
one JSON value: how many logits were compared, and what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# ``import xsalab`` fails from here on, also where it is installed: the folder must hold all that it needs.
sys.modules["xsalab"] = None  # pyright: ignore


def main(folder: str, expected: Path) -> dict[str, Any]:
    """``expected``: tokens and logits by dtype in a safetensors file, texts and conversations with ids in JSON."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wanted = json.loads((expected / "expected.json").read_text(encoding="utf-8"))
    tensors = load_file(expected / "expected.safetensors")
    torch.set_num_threads(wanted["threads"])  # sums over threads round by their number
    faults: list[str] = []
    compared = 0
    for dtype in wanted["dtypes"]:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=getattr(torch, dtype), output_loading_info=True
        )
        model, report = loaded
        faults += [f"{kind}: {', '.join(map(str, names))}" for kind, names in report.items() if names]
        with torch.no_grad():
            logits = model(tensors["tokens"]).logits
        compared += logits.numel()
        if not torch.equal(logits, tensors[dtype]):
            off = float((logits - tensors[dtype]).abs().max())
            faults.append(f"logits in {dtype} differ from the run's, by up to {off:.3g}")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)  # read with its config, which is code
    for text, ids in wanted["texts"]:
        if tokenizer(text)["input_ids"] != ids:
            faults.append(f"the tokenizer gives other ids for {text!r}")
    for messages, prompt, ids in wanted["conversations"]:
        options = {"add_generation_prompt": prompt, "tokenize": False}
        if tokenizer(tokenizer.apply_chat_template(messages, **options), add_special_tokens=False)["input_ids"] != ids:
            faults.append(f"the chat template gives other ids for {json.dumps(messages)}")
    return {"logits": compared, "faults": faults}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
