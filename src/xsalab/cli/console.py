"""What every verb needs: the application, its usual options, a bar, lines for the user, loading an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

app = typer.Typer(
    name="xsalab",
    help="Does a change to attention help, by how much, how surely, and at what cost?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
console = Console()
notes = Console(stderr=True)

File = Annotated[Path, typer.Argument(help="the experiment's TOML file", metavar="FILE.toml")]
Out = Annotated[Path, typer.Option("--out", help="folder for corpora and experiments")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, over the file's; may repeat")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON value for machines")]
Smoke = Annotated[bool, typer.Option("--smoke", help="a small trial of every stage, by the file's table [smoke]")]
OUT = Path("out")


def note(text: str) -> None:
    """A line for the user beside the result: to stderr, whole, however long its paths are."""
    notes.print(text, markup=False, highlight=False, soft_wrap=True)


def load(path: Path, sets: list[str] | None, plugins: bool = True, smoke: bool = False) -> Any:
    """The experiment; with ``plugins`` its variants' files are imported after their paths and hashes are printed."""
    from ..experiment.plugins import import_plugins, read_plugins
    from ..experiment.reading import load_experiment, read_tables

    if plugins:
        names = read_tables(path, sets or (), smoke).get("plugins", [])
        # what is no list of names is refused by load_experiment
        texts = read_plugins(path, [n for n in names if isinstance(n, str)] if isinstance(names, list) else [])
        tell_plugins(path.parent, texts)
        import_plugins(texts)
    return load_experiment(path, sets or (), known_variants=plugins, smoke=smoke)


def tell_plugins(folder: Path, texts: Iterable[tuple[str, str]]) -> None:
    """Says whose code is about to run, and which."""
    import hashlib

    for name, text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        note(f"plugin {folder / name}, sha256 {digest}")


@contextmanager
def bar(description: str, total: float) -> Iterator[Any]:
    """A progress bar with an ETA on a terminal; yields a function (completed, description)."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=notes, transient=True, disable=not notes.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(description, total=total)
        yield lambda completed, text=None: progress.update(task, completed=completed, description=text or description)


@contextmanager
def bars(description: str, total: float) -> Iterator[tuple[Any, Any]]:
    """As ``bar``, with a line below for each thing under way.

    Yields two functions: (completed), and (name, words, completed, total) for a line; without words it goes.
    """
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=notes, transient=True, disable=not notes.is_terminal,
    ) as progress:  # fmt: skip
        whole, lines = progress.add_task(description, total=total), dict[str, Any]()

        def line(name: str, words: str = "", completed: float = 0, total: float | None = None) -> None:
            if not words:
                if name in lines:
                    progress.remove_task(lines.pop(name))
                return
            if name not in lines:
                lines[name] = progress.add_task("", total=total)
            progress.update(lines[name], description=f"  {name} {words}", completed=completed, total=total)

        yield lambda completed: progress.update(whole, completed=completed), line


def spelled(text: str) -> str:
    """The text as stdout can write it: signs that its encoding lacks are spelled out."""
    encoding = console.encoding or "utf-8"
    if encoding.lower().startswith("utf"):
        return text
    from ..report import SPELLED

    return text.translate(SPELLED).encode(encoding, "replace").decode(encoding)


def say_lines(texts: Iterable[str]) -> None:
    """Each as one line, however long."""
    for text in texts:
        print(spelled(text))
