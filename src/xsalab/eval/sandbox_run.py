"""One run of a program in a process of its own: started, talked to, killed in time. See ``sandbox.py``."""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from . import sandbox_child

MEMORY = 256 << 20  # bytes of address space a process; nanochat's limit (nanochat/execution.py)
FILE_SIZE, FOLDER_SIZE = 16 << 20, 32 << 20  # bytes
PROCESSES = 8  # threads count, and so do up to three of our own
OUTPUT = 4000  # bytes kept of what a program prints
START, GRACE = 60.0, 5.0  # seconds for the interpreter to start; for killed processes to be gone
Words = tuple[str, str]  # kind, text


@dataclass(frozen=True)
class Execution:
    """How one run ended. ``outcome``: "passed"; "wrong" (the check's assertion failed); "error" (another exception,
    out of memory as well); "exited" (ended before the check did, whatever its code); "timeout".

    ``detail``: what was raised, and the first ``OUTPUT`` bytes of what was printed; the program's own words.
    """

    passed: bool
    outcome: str
    detail: str


def run_once(method: str, program: str, check: str, seconds: float) -> tuple[Execution, bool]:
    """The execution, and whether all that it started is known to be gone."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds = {seconds}: the time limit of a program is a positive number")
    with (
        TemporaryDirectory(prefix="xsalab-", ignore_cleanup_errors=True)
        if method == "none"
        else nullcontext("/sandbox")
    ) as folder:
        process = subprocess.Popen(
            _command(method, seconds), cwd=folder if method == "none" else "/", env=_environment(folder),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        # Threads that may be left behind: whatever a program does with its pipes, this thread ends in time.
        words: SimpleQueue[Words] = SimpleQueue()
        printed: list[bytes] = []
        talking = threading.Thread(target=_converse, args=(process, program, check, words), daemon=True)
        reading = threading.Thread(target=_drain, args=(process, printed), daemon=True)
        try:
            talking.start()
            reading.start()
            started = outcome, text = _next(words, START, "no word from it")
            if outcome == "ready":
                outcome, text = _next(words, seconds, f"not done after {seconds:g} s")
        finally:
            _kill(process)
        reading.join(GRACE)
        if started[0] != "ready":
            raise OSError(f"{method}: it did not start: {_shown(started[1], printed)}")
        return Execution(outcome == "passed", outcome, _shown(text, printed)), not reading.is_alive()


def _shown(text: str, printed: list[bytes]) -> str:
    """What happened and what was printed, without signs that steer a terminal."""
    whole = f"{text[: sandbox_child.TEXT]}\n{b''.join(printed).decode('utf-8', 'replace')}".strip()
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in whole)


def _next(words: SimpleQueue[Words], seconds: float, late: str) -> Words:
    try:
        return words.get(timeout=seconds)
    except Empty:
        return "timeout", late


def _converse(process: subprocess.Popen[bytes], program: str, check: str, words: SimpleQueue[Words]) -> None:
    """Program, check and token, each sent when the one before has done its work; the outcome goes into ``words``."""
    assert process.stdin
    assert process.stdout
    token = secrets.token_hex(32)
    with process.stdout as answers, suppress(BrokenPipeError), process.stdin as questions:

        def ask(question: str) -> Any:
            with suppress(BrokenPipeError):  # its end is in the answer
                questions.write(json.dumps(question).encode() + b"\n")
                questions.flush()
            return _answer(answers.readline(1 << 16))

        ready = _answer(answers.readline(1 << 16))
        words.put((ready[0], ready[1]) if _is_words(ready) else ("error", "it does not speak the protocol"))
        for question, expected in ((program, "loaded"), (check, "done")):
            answer = ask(question)
            if answer != [expected, ""]:
                known = _is_words(answer) and answer[0] in ("wrong", "error", "exited")
                words.put((answer[0], answer[1]) if known else ("error", "the program wrote into the harness's pipe"))
                return
        answer = ask(token)
        given = isinstance(answer, str) and hmac.compare_digest(answer.encode("utf-8", "replace"), token.encode())
        words.put(("passed", "") if given else ("exited", "the tests ended and the token did not come back"))


def _answer(line: bytes) -> Any:
    if not line:
        return ["exited", "the process ended without a word"]
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_words(answer: Any) -> bool:
    return isinstance(answer, list) and len(answer) == 2 and all(isinstance(part, str) for part in answer)


def _drain(process: subprocess.Popen[bytes], printed: list[bytes]) -> None:
    """Reads what is printed until nobody is left to print; keeps the beginning and counts the rest."""
    assert process.stderr
    kept = total = 0
    with process.stderr as pipe:
        while piece := os.read(pipe.fileno(), 1 << 16):
            total += len(piece)
            if kept < OUTPUT:
                printed.append(piece[: OUTPUT - kept])
                kept += len(printed[-1])
    if total > kept:
        printed.append(b"\n... and %d bytes more" % (total - kept))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole group: pid 1 of the namespace is in it, and takes with it what has left the group."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so in the second way
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _command(method: str, seconds: float) -> list[str]:
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    # Packages without site: no .pth file runs, no editable install is on the path.
    packages = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
    paths = _readable(python, packages)
    config = {
        "method": method, "paths": paths, "packages": packages, "seconds": seconds, "memory": MEMORY,
        "file_size": FILE_SIZE, "folder_size": FOLDER_SIZE, "processes": PROCESSES,
    }  # fmt: skip
    bare = [python, "-u", "-B", "-P", "-s", "-S", "-X", "utf8"]  # not -I, which ignores PYTHONHASHSEED
    script = os.path.abspath(sandbox_child.__file__)
    if method != "bubblewrap":
        return [*bare, script, json.dumps(config)]
    user = str(sandbox_child.INSIDE)
    binds = [word for path in paths for word in ("--ro-bind", os.path.realpath(path), path)]
    return [
        shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL",
        "--uid", user, "--gid", user, *binds, "--ro-bind", script, "/runner.py",
        "--dev-bind", "/dev/null", "/dev/null", "--size", str(FOLDER_SIZE), "--tmpfs", "/sandbox",
        "--remount-ro", "/", "--chdir", "/sandbox", "--", *bare, "/runner.py", json.dumps(config),
    ]  # fmt: skip


def _readable(python: str, packages: list[str]) -> list[str]:
    """What a program may read: shared libraries, the standard library, installed packages, the interpreter."""
    wanted = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/nix/store", python, *packages}
    wanted |= {os.path.join(sys.base_prefix, "lib"), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    wanted |= {os.path.realpath(path) for path in wanted}
    there = [Path(path) for path in sorted(wanted) if os.path.exists(path)]
    return [str(path) for path in there if not any(parent in there for parent in path.parents)]


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours but what loading needs. A fixed hash seed: the same program, the same order of its sets."""
    passed_on = {name: os.environ[name] for name in ("SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder, "PATH": os.defpath}
    return {**passed_on, **threads, **own}
