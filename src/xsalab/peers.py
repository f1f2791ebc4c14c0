"""What is known of a run's other processes before anything is imported: whether torchrun started several, and which
this is."""

from __future__ import annotations

import os


class Elsewhere(ValueError):
    """Another process failed, and this one stops with it. Its own message is the one to read."""


class Lost(Elsewhere):
    """Another process is gone without a word."""


def launched() -> int:
    """How many processes torchrun started together with this one; 1 where it is alone."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def rank() -> int:
    """Which of them this is, from 0 on."""
    return int(os.environ.get("RANK", "0")) if launched() > 1 else 0
