"""The C++ kernels of csrc/: built on first use, proven in a process of their own, kept; or why PyTorch does the work.

A fast path asks ``takes(tensors)`` and else goes the plain way, which stays the oracle. ``load`` is called where a
model in bfloat16 is made, and where one of any dtype generates; ``takes`` itself never builds, so that a compiled graph
sees a constant.
``XSALAB_PLAIN=1`` in the environment, or ``with plain():``, switches all of them off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).parent.parent / "csrc"
LIBRARY = "xsalab_native.so"
FLAGS = ("-O3", "-std=c++20", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma")
FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-Wno-psabi")  # a sum is fused where it says so
ALLOWED_ERROR = 1e-6  # of the product, relative to the sum of its terms' sizes: float32 sums of 96 exact products

# What model files have to say about their operations once these are there: shapes, for torch.compile.
AFTER_LOADING: list[Callable[[], None]] = []

_loaded: bool = False
_reason: str | None = None  # None: not tried yet
_switched_on: bool = True


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels are there, switched on, and these are bfloat16 tensors of the CPU."""
    return _loaded and _switched_on and all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors)


def with_rows(x: Tensor) -> Tensor:
    """x, or a copy where its last axis is strided: kernels take any strides but there."""
    return x if x.stride(-1) == 1 else x.contiguous()


def reason() -> str:
    """Empty where the kernels are used; else in one line why they are not. Builds them where that was not tried yet."""
    load()
    return _reason or ""


def instructions() -> str:
    """ "AMX" or "AVX512-BF16" where the kernels are used, else "plain"."""
    return torch.ops.xsalab.instructions() if _loaded and _switched_on else "plain"


def describe() -> str:
    """One line for a person: which kernels are used, built now where need be, or why none."""
    return reason() or f"C++ kernels: {instructions()}, {cache_folder() / LIBRARY}"


@contextmanager
def plain() -> Iterator[None]:
    """Everything within goes through PyTorch: the oracle's way."""
    global _switched_on
    before, _switched_on = _switched_on, False
    try:
        yield
    finally:
        _switched_on = before


def load() -> bool:
    """Builds the kernels where they are not built yet, and loads them; asked once a process."""
    global _loaded, _reason
    if _reason is None:
        _reason = _cannot() or _build_and_load()
        _loaded = not _reason
        for register in AFTER_LOADING if _loaded else ():
            register()
    return _loaded


def _cannot() -> str:
    if os.environ.get("XSALAB_PLAIN", "") not in ("", "0"):
        return "XSALAB_PLAIN is set: everything runs through PyTorch"
    if not SOURCES.is_dir():
        return "the kernels' sources are not part of this copy"
    if not sys.platform.startswith("linux"):
        return f"the C++ kernels are for Linux, this is {sys.platform}"
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return "the processor has no AVX512-BF16: PyTorch's own kernels are used"
    return ""


def cache_folder() -> Path:
    """Where builds are kept: a folder for each state of sources, flags, torch and instruction set."""
    content = hashlib.sha256(repr((torch.__version__, FLAGS, torch.cpu.get_capabilities())).encode())
    for path in sorted(SOURCES.iterdir()):
        content.update(path.name.encode() + path.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "xsalab" / "native" / content.hexdigest()[:16]


def _build_and_load() -> str:
    folder = cache_folder()
    failure = folder.with_suffix(".failed")
    if failure.is_file():
        return f"{failure.read_text(encoding='utf-8')} (remove {failure} to try again)"
    try:
        if not (folder / LIBRARY).is_file():
            found = _build(folder)
            if found:
                failure.write_text(found, encoding="utf-8")
                return found
        torch.ops.load_library(folder / LIBRARY)
    except OSError as error:
        return f"the C++ kernels cannot be kept or loaded ({error}): PyTorch's own are used"
    return ""


def _build(folder: Path) -> str:
    """Builds and moves the result to ``folder`` in one step; one process builds at a time, the others wait and find it.
    A child does it, so that a wrong instruction ends the child alone. Returns why it failed, or nothing.
    """
    import fcntl  # there on Linux alone, as these kernels are

    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # gone with the process that holds it
        if (folder / LIBRARY).is_file():
            return ""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        child = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import build_here; build_here({str(folder)!r})"],
            capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False,
        )  # fmt: skip
    if child.returncode:
        told = [line for line in child.stderr.splitlines() if "error" in line.lower()] or child.stderr.splitlines()
        last = told[-1].strip() if told else f"exit status {child.returncode}"
        return f"the C++ kernels could not be built ({last}): PyTorch's own are used"
    return ""


def build_here(folder: str) -> None:
    """The child's part: compiles what changed, loads it, checks the product, and puts it into ``folder``."""
    from torch.utils import cpp_extension

    done = Path(folder)
    objects = done.parent / f"objects-{hashlib.sha256(repr((torch.__version__, FLAGS)).encode()).hexdigest()[:8]}"
    objects.mkdir(exist_ok=True)
    (objects / "lock").unlink(missing_ok=True)  # torch waits for ever for the lock of a build that was killed
    cpp_extension.load(
        name=LIBRARY.removesuffix(".so"),
        sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=list(FLAGS),
        build_directory=str(objects),
        is_python_module=False,
    )
    # OpenMP is compiled in but not linked: its calls go to the runtime that torch has loaded, whose threads they share.
    error = torch.ops.xsalab.product_error()
    if not error <= ALLOWED_ERROR:
        raise SystemExit(f"error: the product of {torch.ops.xsalab.instructions()} is wrong by {error:.1e}")
    if cache_folder() != done:
        raise SystemExit("error: the sources changed while they were compiled")
    with tempfile.TemporaryDirectory(dir=done.parent, prefix="new-") as work:
        (Path(work) / "done").mkdir()
        shutil.copy(objects / LIBRARY, Path(work) / "done" / LIBRARY)
        os.replace(Path(work) / "done", done)
