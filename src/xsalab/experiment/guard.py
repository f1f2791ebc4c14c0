"""Runs a command and ends it, with all that it started, when the process that asked for it is gone or says so.

    python -I guard.py PROGRAM [ARGUMENT ...]        with a pipe as standard input, in a process group of its own

The pipe's end is the word to stop, whatever ended the process that holds it: a signal to that process alone would
leave the command running. First SIGTERM, so that a launcher can end its workers, then SIGKILL. Imports nothing of
xsalab and is no part of it while it runs: it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 5.0  # seconds between asking and killing
CANNOT_START = 127


def main() -> int:
    """The command's exit code; 128 and the signal's number where a signal ended it, as in a shell."""
    if os.name == "posix":  # a handler, which the command does not inherit as it would an ignored signal
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {sys.argv[1]}: {error.strerror}", flush=True)
        return CANNOT_START
    threading.Thread(target=end_with_pipe, args=(child.pid,), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def end_with_pipe(child: int) -> None:
    """Waits for the end of standard input, then ends the command's process group, this process included."""
    while os.read(0, 1):  # nothing is ever written to it
        pass
    if os.name != "posix":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(child)], check=False)
        return
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
