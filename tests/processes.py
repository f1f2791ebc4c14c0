"""Several processes that find each other, as torchrun starts them, without torchrun's own second of start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(command: Sequence[str | Path], world: int, seconds: float = 240, port: int = 0) -> list[tuple[int, str]]:
    """Exit code and output of ``world`` Python processes of one command, by rank. One that fails ends the others."""
    shared = {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, *map(str, command)], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        return [(child.wait() if out is None else child.returncode, out) for child in children
                for out in [child.communicate(timeout=seconds)[0]]]  # fmt: skip
    finally:
        for child in children:
            child.kill()
