"""The command: its verbs by file, each a few lines that call one function, and what becomes of an error.

experiments   data, check, run, status, report, train
models        sample, chat, sft, core, chatcore, diagnose, export
tools         plan, calibrate, align, compare

Exit codes: 0 done; 1 a check failed or a run diverged; 2 a mistake in what was asked; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from ..peers import Elsewhere, launched, rank
from . import experiments as experiments
from . import models as models
from . import tools as tools
from .console import app as app
from .console import note, notes

TOGETHER = {"train", "core"}  # verbs that several processes carry out together


def main() -> None:
    """Entry point: a user's mistake is one short message and exit code 2, never a traceback."""
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    notes.quiet = rank() > 0
    if launched() > 1 and not {*sys.argv[1:2]} & TOGETHER:
        if not rank():
            print(
                f"error: torchrun … xsalab {' '.join(sys.argv[1:2])}: only {', '.join(sorted(TOGETHER))} work as "
                "one of several processes; xsalab run starts those of a run itself: set train.processes",
                file=sys.stderr,
            )
        sys.exit(2)
    # Compiled kernels outlive the process, so that a second run starts at once.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "xsalab" / "inductor"))
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("XSALAB_TRACEBACK"):
            raise
        if not (rank() and isinstance(error, Elsewhere)):  # the process that failed says why
            print(f"{f'process {rank()}: ' if rank() else ''}error: {message(error)}", file=sys.stderr)
        sys.exit(2)
    except Interrupted:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which click takes for itself, with another exit code in each release."""


def _interrupt(number: int, frame: Any) -> None:
    raise Interrupted


def message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
