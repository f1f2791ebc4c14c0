"""Variants from a user's own files: read, executed once a process, stored with the run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

PLUGIN = "xsalab_plugin_"  # begins the module name of a plugin


def read_plugins(experiment_path: Path, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(path as written, text) of each plugin, found beside the experiment's file. Runs nothing."""
    found = []
    for name in names:
        path = experiment_path.parent / name
        try:
            found.append((name, path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{experiment_path}: plugins: {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{experiment_path}: plugins: {path}: not UTF-8 (byte {error.start})") from None
    return tuple(found)


def import_plugins(plugins: Sequence[tuple[str, str]]) -> None:
    """Executes the plugins' text, which registers their variants. Once a process and text."""
    for name, text in plugins:
        _import_plugin(name, text)


@lru_cache(maxsize=64)
def _import_plugin(name: str, text: str) -> None:
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(PLUGIN + Path(name).stem, loader=None)  # pyright: ignore
    )
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, name, "exec"), module.__dict__)
    except Exception as error:
        line = error.__traceback__.tb_next.tb_lineno if error.__traceback__ and error.__traceback__.tb_next else "?"
        raise ValueError(f"plugin {name}, line {line}: {type(error).__name__}: {error}") from error
