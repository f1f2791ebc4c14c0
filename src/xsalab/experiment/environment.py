"""What must agree within a pair besides the configuration: software, device, threads, kernels, our own code."""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch

from ..train import TrainConfig

CODE = ("model", "data", "optim", "train", "eval")  # the folders whose code shapes a run's numbers


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the source text that shapes a run."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).glob("*.py")):
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


def environment(train: TrainConfig, dtype: str, compiled: bool) -> dict[str, Any]:
    """The record that partners compare, by name. ``machine`` is a digest of the host's name, not the name."""
    device = torch.cuda.get_device_name() if train.device == "cuda" else processor()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "machine": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "device": device,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": train.threads,
        "kernel": f"{train.attention}, {'compiled' if compiled else 'eager'}, {dtype}",
    }
