"""Triton without a GPU: tests under its interpreter, and a kernel compiled for an H100 with what came out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


def run_under_the_interpreter(file: str) -> None:
    """The tests of ``file`` in a process with TRITON_INTERPRET=1, none of them skipped."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", file]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    ran = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "runs in the process" not in ran.stdout, "none is skipped there"


class Compiled(NamedTuple):
    """Memory instructions of the PTX, registers a thread, and bytes spilled to the stack."""

    accesses: set[str]
    registers: int
    stack: int


def compile_for_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], options: Mapping[str, Any], folder: Path
) -> Compiled:
    """``types`` by parameter ("*bf16", "i32", "fp32"); pointers and what is "i32" are taken as multiples of 16."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    signature, values, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = types[name]
            if types[name].startswith("*") or types[name] == "i32":
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    binary = folder / "kernel.cubin"
    binary.write_bytes(found.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path  # pyright: ignore[reportAttributeAccessIssue]
    words = [tool, "--dump-resource-usage", str(binary)]
    usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
    return Compiled(set(re.findall(r"(?:ld|st)\.global\S*", found.asm["ptx"])), registers, stack)
