"""Running programs that a model wrote, where they can do no harm, and proving that they passed.

Every run is a new process. Linux namespaces, made by ourselves or by bubblewrap, give it a root of the interpreter's
folders alone (read only), an empty folder in memory, no network, no sight of other processes; limits bound its memory,
its files and the processes that it starts, and everything in it is killed at the time limit. A self-test attacks what
was set up before it is used; what does not hold is named. What is protected and what is not: docs/sandbox.md.

A program has passed when it gives back a random token that it was sent after the checks ran to their end. An exit
code proves nothing (``sys.exit(0)`` before the checks), nor does any text that was there for the program to print.
The protocol: ``sandbox_child.py``, which is what runs on the other side.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from .sandbox_run import START, Execution, run_once

PROTECTIONS = ("file system", "network", "processes", "memory", "file size")


@dataclass(frozen=True)
class Sandbox:
    """A way to run programs: ``method`` is "bubblewrap", "namespaces" or "none"; ``protections`` are what the
    self-test found to hold, ``missing`` the rest."""

    method: str
    protections: tuple[str, ...]
    missing: tuple[str, ...]

    @classmethod
    def open(cls, unsafe: bool = False) -> Sandbox:
        """The strongest isolation there is, self-tested once a process. ValueError where a protection is missing and
        ``unsafe`` does not accept that, or where the self-test shows that right and wrong are not told apart."""
        sandbox, reasons = _strongest()
        if sandbox.missing and not unsafe:
            raise ValueError(
                f"model-written code cannot be run safely here ({'; '.join(reasons)}). "
                f"Not protected: {', '.join(sandbox.missing)}. "
                "Install bubblewrap, or accept the risk with --unsafe-run-code; docs/sandbox.md"
            )
        return sandbox

    def run(self, program: str, check: str, *, seconds: float = 5.0) -> Execution:
        """Runs ``program`` as ``__main__``, then ``check``, which raises where the program is wrong, in its namespace.

        ``seconds`` count from when the interpreter has started. From any thread, any number at a time. Raises OSError
        where the system does not let the sandbox start: that says nothing about the program.
        """
        return run_once(self.method, program, check, seconds)[0]


_surveying = threading.Lock()


def _strongest() -> tuple[Sandbox, list[str]]:
    with _surveying:
        return _survey()


@cache
def _survey() -> tuple[Sandbox, list[str]]:
    """The first method that the self-test finds whole, else the one that lacks least; and what is wrong with others."""
    found: list[Sandbox] = []
    reasons = [] if sys.platform == "linux" else [f"{sys.platform} has no namespaces"]
    for method in _methods():
        try:
            failed = self_test(method)
        except OSError as error:
            reasons.append(str(error))
            continue
        broken = [f"{name}: no, {detail}" for name, detail in failed.items() if name not in PROTECTIONS]
        if broken:
            raise ValueError(
                f"programs cannot be judged here; self-test of the sandbox ({method}): {'; '.join(broken)}"
            )
        missing = tuple(name for name in PROTECTIONS if name in failed)
        found.append(Sandbox(method, tuple(name for name in PROTECTIONS if name not in failed), missing))
        if not missing:
            return found[-1], reasons
        reasons += [f"{method}: {name}: {failed[name]}" for name in missing if method != "none"]
    if not found:
        raise ValueError(f"no program can be run here: {'; '.join(reasons)}")
    return min(found, key=lambda sandbox: len(sandbox.missing)), reasons


def _methods() -> list[str]:
    """The methods to try, the best first. Bubblewrap is for systems that let it make namespaces and us not: it leaves
    a program the right to nested user namespaces, and root its user id, which no limit on processes binds."""
    if sys.platform != "linux":
        return ["none"]
    return ["namespaces", *(["bubblewrap"] if shutil.which("bwrap") else []), "none"]


CHECK = "assert f(1) == 2"
QUINE = "text = {0!r}\nprint(text.format(text))\nprint('passed')\ndef f(x):\n    return x\n"
JUDGED = (  # name, program, outcome
    ("a right program passes", "def f(x):\n    return x + 1\n", "passed"),
    ("a wrong program fails", "def f(x):\n    return x\n", "wrong"),
    ("an early exit by sys.exit fails", "import sys\nsys.exit(0)\n", "exited"),
    ("an early exit by os._exit fails", "import os\nos._exit(0)\n", "exited"),
    ("an early exit by exec fails", "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])\n", "exited"),
    ("a program that prints its source fails", QUINE.format(QUINE), "wrong"),
    ("an endless loop ends", "while True:\n    pass\n", "timeout"),
)
# Each attack is bounded, should nothing stop it. It raises where it was not refused.
ESCAPE = """
import os
assert os.listdir() == [], "its folder is not empty"
open("own", "w").write("x")
for path, mode in ((CANARY, "r"), ("/etc/passwd", "r"), (CANARY + ".new", "w"), ("/usr/lib/xsalab-new", "w")):
    try:
        open(path, mode).close()
    except OSError:
        continue
    raise AssertionError(f"{path} was opened with mode {mode}")
"""
CALL = """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=2)
except OSError:
    pass
else:
    raise AssertionError("a listening port was reached")
"""
BOMB = """
import os, time
children = 0
try:
    while children < 64:
        if not os.fork():
            time.sleep(20)
            os._exit(0)
        children += 1
except OSError:
    pass
assert children < 64, "64 processes were started"
"""
HOG = """
held = []
try:
    for _ in range(64):
        held.append(bytearray(1 << 25))
except MemoryError:
    held = []
else:
    raise AssertionError("2 GiB were given")
"""
FILE = """
try:
    with open("large", "wb", buffering=0) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
except OSError:
    pass
else:
    raise AssertionError("a file of 64 MiB was written")
"""


def self_test(method: str) -> dict[str, str]:
    """What did not hold, by name, with what happened instead. OSError where the method cannot be used here."""
    run = partial(run_once, method, check="", seconds=20.0)
    run("", seconds=START)  # raises where the method does not work at all
    with (
        TemporaryDirectory(prefix="xsalab-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        canary = Path(folder, "canary")
        canary.write_text("x", encoding="utf-8")
        attacks = (f"CANARY = {str(canary)!r}{ESCAPE}", f"PORT = {server.getsockname()[1]}{CALL}", BOMB, HOG, FILE)
        attacked = [pool.submit(run, attack) for attack in attacks]
        judged = [
            pool.submit(run, program, check=CHECK, seconds=0.3 if outcome == "timeout" else 20.0)
            for _, program, outcome in JUDGED
        ]
        failed: dict[str, str] = {}
        for (name, _, outcome), future in zip(JUDGED, judged, strict=True):
            execution = future.result()[0]
            if execution.outcome != outcome:
                failed[name] = f"{execution.outcome} {execution.detail}"
        for name, future in zip(PROTECTIONS, attacked, strict=True):
            execution, gone = future.result()
            if not execution.passed:
                failed[name] = execution.detail
            elif not gone:
                failed[name] = "a process was left"
        if os.listdir(folder) != ["canary"]:  # what we see ourselves counts more than what the attack says
            failed["file system"] = "a file was made outside"
        server.setblocking(False)
        with suppress(BlockingIOError):
            server.accept()[0].close()
            failed["network"] = "a connection arrived"
    return failed
