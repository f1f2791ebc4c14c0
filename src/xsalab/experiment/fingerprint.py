"""What must agree within a pair: configuration, first weights, batches, text, software, device, our own code."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save as safetensors_bytes

from ..config import digest, dump
from ..data import Corpus
from ..eval.validation import evaluation_documents
from ..model import GPT, cuda
from ..model.native import instructions
from ..model.variant import VARIANTS
from ..train import TrainConfig, TrainState
from ..train.checkpoint import model_tensors
from .building import batches, compute_dtype
from .design import RunConfig
from .plugins import PLUGIN

CODE = ("model", "csrc", "data", "optim", "train", "eval")  # the folders whose code shapes a run's numbers


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the source text that shapes a run."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for folder in CODE:
        for path in sorted(path for path in (root / folder).iterdir() if path.suffix in (".py", ".cpp", ".h")):
            found.update(f"{folder}/{path.name}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


@lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """A digest of the host's name. Runs may come from several machines; then no claim is made about time."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def environment(train: TrainConfig, dtype: str, compiled: bool) -> dict[str, Any]:
    """The record that partners compare, by name."""
    if train.device == "cuda":
        kernels = "FlashAttention-3" if cuda.fa3_active() else "torch's flash attention"
    else:
        kernels = instructions() if dtype == "bfloat16" else "plain"
    device = torch.cuda.get_device_name() if train.device == "cuda" else processor()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": train.threads,
        "kernel": f"{train.attention}, {'compiled' if compiled else 'eager'}, {dtype}, {kernels}",
    }


def fingerprint(
    config: RunConfig, state: TrainState, corpus: Corpus, plugins: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """What a partner must agree with, taken before the first step."""
    rows = corpus.rows(config.model.context)
    batch_of = batches(config, rows)
    edges = [sorted(batch_of(step).row_ids.tolist()) for step in rows.edge_steps(config.train.steps)]
    documents = evaluation_documents(corpus, config.eval.max_bytes)
    return {
        "config": dump(config),
        "start": {name: _tensor_digest(tensor) for name, tensor in state.division.whole_parameters()},
        "rows": digest([rows.digest, *edges]),
        "corpus": digest(corpus.manifest.get("files", corpus.folder.name)),
        "evaluation": digest([[document.id, document.bytes] for document in documents]),
        **conditions(config, state, plugins),
    }


def conditions(config: RunConfig, state: TrainState, plugins: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Software, device, our own code, and the text of the plugin that the variant is from."""
    return {
        "environment": environment(config.train, compute_dtype(config), state.token_nats is not None),
        "code": code_digest(),
        "machine": machine(),
        # Of a variant from a plugin: a plugin that another arm needs is nothing to the arms without it.
        "plugins": {
            name: hashlib.sha256(text.encode()).hexdigest()[:16]
            for name, text in plugins
            if VARIANTS[config.variant.name].__module__.startswith(PLUGIN)
        },
    }


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(str(tuple(tensor.shape)).encode() + data.tobytes()).hexdigest()[:16]


def model_digest(model: GPT) -> str:
    """SHA-256 of all weights and of the variant that they are used with."""
    return digest([hashlib.sha256(safetensors_bytes(dict(model.state_dict()))).hexdigest(), dump(model.choice)])


def state_digest(state: TrainState) -> str:
    """SHA-256 of all weights: equal for two runs that agree to the bit."""
    return hashlib.sha256(safetensors_bytes(model_tensors(state))).hexdigest()
