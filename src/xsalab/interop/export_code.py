"""The code of an export: the files of src/xsalab/model as they are, and the plugin that a variant comes from."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import model as model_package
from ..model import GPT
from ..model.variant import VARIANTS

ENTRY = "modeling_xsalab"
LAST_IMPORT = "from .xsa import Exclusive as Exclusive\n"  # of the wrapper: a plugin's import goes behind it
NEEDED = {"torch", "transformers", "numpy", "safetensors"}  # what is there wherever an export is loaded


def model_files(model: GPT, plugins: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The files of src/xsalab/model by name, and the one that the model's variant comes from."""
    source = Path(str(model_package.__file__)).parent
    files = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.py") if path.name != "__init__.py"}
    kind = VARIANTS[model.choice.name]
    if not kind.__module__.startswith(f"{model_package.__name__}."):
        found = [(name, text) for name, text in plugins if kind.__module__.endswith(f"_{Path(name).stem}")]
        if not found or "." in kind.__qualname__:
            raise ValueError(
                f"variant {model.choice.name!r} is {kind.__module__}.{kind.__qualname__}: an export copies variants of "
                "xsalab, and classes at the top level of a plugin's file"
            )
        module = "plugin_" + re.sub(r"\W", "_", Path(found[0][0]).stem)
        files[f"{module}.py"] = flatten(*found[0])
        wrapper, line = files[f"{ENTRY}.py"], f"from .{module} import {kind.__name__} as {kind.__name__}\n"
        assert LAST_IMPORT in wrapper, "the wrapper imports the variants of xsalab in a line of its own"
        files[f"{ENTRY}.py"] = wrapper.replace(LAST_IMPORT, LAST_IMPORT + line)
    return files


def flatten(name: str, text: str) -> str:
    """A plugin's text with ``from xsalab.model import …`` as imports of the files beside it.

    Raises ValueError for an import of something that is not there where an export is loaded.
    """
    lines = text.encode().split(b"\n")
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(imports, key=lambda node: -node.lineno):  # from below, so that line numbers stay right
        where = f"plugin {name}, line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and (fixed := _beside(node, where)):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            before, behind = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
            if before.strip():  # transformers finds imports at the beginning of a line alone
                raise ValueError(f"{where}: give the import of {node.module} a line of its own")
            lines[first : last + 1] = [before + line.encode() for line in fixed]
            lines[first + len(fixed) - 1] += behind
            continue
        full = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            full = ["." * node.level + (node.module or "")]
        for module in full:
            if module.partition(".")[0] not in NEEDED | set(sys.stdlib_module_names):
                raise ValueError(
                    f"{where}: imports {module}, but an export must load with torch and transformers alone; "
                    "import from xsalab.model, torch and the standard library"
                )
    return b"\n".join(lines).decode()


def _beside(node: ast.ImportFrom, where: str) -> list[str]:
    """``from xsalab.model import A, B`` as imports of the files that define them; [] for other modules."""
    parts = (node.module or "").split(".")
    if node.level or parts[0] != "xsalab" or parts[1:2] not in ([], ["model"]):
        return []
    names: dict[str, list[str]] = {}
    for alias in node.names:
        file = parts[2] if len(parts) == 3 else _homes().get(alias.name)
        if file is None:
            raise ValueError(f"{where}: {node.module} has no {alias.name} that an export could hold")
        names.setdefault(file, []).append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
    return [f"from .{file} import {', '.join(of)}" for file, of in names.items()]


def _homes() -> dict[str, str]:
    """Public name -> the file of src/xsalab/model that defines it."""
    tree = ast.parse(Path(str(model_package.__file__)).read_text(encoding="utf-8"))
    return {
        alias.name: str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
