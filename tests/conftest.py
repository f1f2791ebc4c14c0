"""What several test folders need: a tiny corpus, a tiny experiment, the command in this process, shared real data."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Shapes and dtypes in signatures are checked while the tests run; model/ has them in words, for exports.
install_import_hook(["xsalab.data", "xsalab.optim"], "beartype.beartype")

from toml_tables import write_tables  # noqa: E402

WORDS = ["token", "layer", "value", "head", "query", "row", "sum", "mean", "alpha", "the", "of", "and", "to", "in"]


def write_corpus(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Text files of a few lines; about 10 kB in all."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        lines = [
            " ".join(f"{draw.choice(WORDS)}{draw.randrange(20)}" for _ in range(8)) for _ in range(draw.randint(2, 11))
        ]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def few_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So little text that a tiny run passes over it several times."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "few", documents=12, seed=1)


TINY: dict[str, Any] = {
    "seeds": [0, 1],
    "data": {"validation_fraction": 0.15},
    "model": {"depth": 2, "width": 32, "heads": 2, "context": 32, "vocab_size": 300, "window_block": 8},
    "optim": {"warmup_steps": 2},
    "train": {"tokens": 1024, "batch_tokens": 256, "dtype": "float32", "checkpoint_steps": 2},
    "arms": {"standard": {}, "xsa": {"variant": "xsa"}},
    "controls": {"null": False, "twin": False, "timing": False},
}


@pytest.fixture
def write_experiment(tmp_path: Path, corpus_folder: Path) -> Callable[..., Path]:
    """Writes a tiny experiment as TOML: four steps of 256 tokens, two layers, two seeds, standard and xsa.

    ``changes`` by dotted name with double underscores, ``train__tokens=512``; None takes a name out.
    """

    def write(stem: str = "tiny", **changes: Any) -> Path:
        tables = {"name": stem, **TINY, "data": {**TINY["data"], "source": str(corpus_folder)}}
        return write_tables(tmp_path / f"{stem}.toml", tables, changes)

    return write


@dataclass
class Ran:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str
    argv: tuple[str, ...] = field(default=())

    def refused(self, *words: str) -> str:
        """The message of a mistake: exit code 2, nothing on stdout, one short text without a traceback."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err + self.out
        message = self.err[self.err.index("error: ") :].strip()
        assert len(message) < 700, message
        for word in words:
            assert word in message, f"{word!r} is not in: {message}"
        return message


@pytest.fixture
def xsalab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The installed command in this process, handling of mistakes included: ``xsalab("run", path)``."""
    from xsalab import cli

    def run(*arguments: object) -> Ran:
        import warnings

        argv = tuple(str(argument) for argument in arguments)
        monkeypatch.setattr(sys, "argv", ["xsalab", *argv])
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/nonexistent"))
        capsys.readouterr()
        code: Any = 0
        with warnings.catch_warnings():  # main() sets showwarning
            warnings.simplefilter("default")
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code
        out, err = capsys.readouterr()
        return Ran(0 if code is None else int(code), out, err, argv)

    return run


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out drawing and writing of the page, which takes longer than a tiny experiment."""
    from xsalab import report

    monkeypatch.setattr(report, "write_report", lambda experiment, store, *_: store.folder / "report.html")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text and a real nanochat run: the variable XSALAB_SHARED, or ../shared/data beside the repository."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("XSALAB_SHARED", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set XSALAB_SHARED to the folder that holds nanochat_d4")
    return folder
