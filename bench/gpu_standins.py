"""Stands in for packages that xsalab imports and an image of PyTorch has not. Nothing that bench/gpu.py calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from typing import Any


class Anything(type):
    """A class that has every attribute, can be called, subscripted and derived from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __getitem__(cls, key: Any) -> Any:
        return Any


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up what xsalab imports and is not installed. Last in line: an installed package is found before."""

    NAMES = (
        "filelock", "huggingface_hub", "jaxtyping", "jinja2", "pyarrow", "pydantic", "rich", "safetensors", "scipy",
        "tokenizers", "typer", "yaml", "zstandard",
    )  # fmt: skip

    def __init__(self) -> None:
        self.used: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in self.NAMES:
            return None
        self.used.add(fullname.split(".")[0])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _made_up(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to carry out."""


def _made_up(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    # an exception where it is caught by name
    return Anything(name, (Exception,) if name.endswith(("Error", "Timeout")) else (), {})
