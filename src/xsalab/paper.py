"""The report as texts: report.md, whole and compact enough to be committed, and report.tex, its tables for a paper.

Like the page they print what ``outcome`` says, from the store alone, and compute nothing. The order is the page's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from . import __version__
from .experiment.design import Experiment
from .experiment.store import RunStore
from .figures_paper import Picture, paper_figures, write_figures
from .files import write_atomic
from .paper_cells import Growing, Row, pair_name, titled
from .paper_format import Block, Bullets, Code, Heading, Image, Paragraph, Table, latex, markdown
from .paper_mechanism import mechanism, rates, stability
from .paper_quality import (
    benchmark_table,
    contrast_table,
    cost_table,
    equal_time,
    factor_table,
    first_table,
    published_table,
    seed_table,
)
from .report import Losses, setting

FORMATS = {"md": "report.md", "latex": "report.tex"}
Link = Callable[[Picture], str]


def write_paper(
    experiment: Experiment,
    store: RunStore,
    content: Row,
    curves: Losses,
    kind: str = "html",
    folder: Path | None = None,
) -> list[Path]:
    """Writes report.md ("md") or report.tex ("latex") beside the page, and the figures as SVG into ``folder``.

    content, curves: as ``outcome`` and ``report.losses`` gave them. Each file is whole or not there; the Markdown links
    the figures by relative paths. Gives the paths, the text's first. ValueError for another kind, a folder that cannot
    be written, or figures without matplotlib.
    """
    check_format(kind)
    pictures = paper_figures(content, curves) if folder else []
    files = write_figures(folder, pictures) if folder else []
    if kind == "html":
        return files
    path = store.folder / FORMATS[kind]
    places = {picture.name: quote(_relative(file, path.parent)) for picture, file in zip(pictures, files, strict=True)}
    blocks = document(content, experiment.path.name, pictures, lambda picture: places[picture.name])
    title = f"Tables of the experiment {content['name']}, made by xsalab {__version__}."
    write_atomic(path, markdown(blocks) if kind == "md" else latex(blocks, title))
    return [path, *files]


def _relative(file: Path, folder: Path) -> str:
    return Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()


def check_format(kind: str) -> None:
    """ValueError for a format that there is not."""
    if kind not in ("html", *FORMATS):
        raise ValueError(f"--format {kind}: no such format; use one of html, {', '.join(FORMATS)}")


def document(
    content: Row, file: str, pictures: Sequence[Picture] = (), link: Link = lambda picture: f"{picture.name}.svg"
) -> list[Block]:
    """The report as blocks. file: the TOML's name. link: a picture's address, as the text writes it."""

    def shown(section: str) -> list[Block]:
        return [Image(link(picture), picture.alt) for picture in pictures if picture.section == section]

    return [
        *_verdicts(content),
        *first_table(content),
        *benchmark_table(content),
        *contrast_table(content),
        *seed_table(content),
        *shown("intervals"),
        *equal_time(content),
        *titled("Training loss, and its difference", shown("curves")),
        *factor_table(content),
        *mechanism(content, shown("mechanism")),
        *stability(content, shown("stability")),
        *rates(content, shown("rates")),
        *cost_table(content),
        *published_table(content),
        *_matched(content),
        *_data(content),
        *_again(content, file),
    ]


def _verdicts(content: Row) -> Iterator[Block]:
    yield Heading(1, content["name"])
    yield from (Paragraph(line, strong=True) for line in content["headline"])
    if not content["headline"]:
        yield Paragraph("No verdict yet: no pair of runs is finished.", strong=True)
    states = [run["state"] for run in content["runs"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    warnings = [*([] if content["complete"] else [f"the experiment is not complete: {counts}"]), *content["warnings"]]
    if warnings:
        yield Paragraph("Before you believe the tables:")
        yield Bullets(tuple(warnings))
    primary, family = content["primary"], content["family"]
    margin = f"{primary['margin']:g} {content['metric']}" if primary["absolute"] else f"{100 * primary['margin']:g} %"
    declared = "Changed after the runs" if content["changed"] else "Declared before the runs"
    first = f"the primary contrast is {primary['contrast']}, margin {margin}" if primary["contrast"] else ""
    first = f"{declared}: {first}." if first else f"No primary contrast was declared; margin {margin}."
    share = f"{len(family)} contrast{'s share' if len(family) != 1 else ' has'} the error of 5 %"
    yield Paragraph(f"{first} {share}{' (Holm)' if len(family) > 1 else ''}. Runs: {counts}.")
    sentences = [
        (row["point"], row["sentence"])
        for row in content["contrasts"]
        if row["kind"] == "effect" and "sentence" in row and not any(row["sentence"] in s for s in content["headline"])
    ]
    if sentences:
        many = len(content["points"]) > 1
        yield Bullets(tuple(f"{point}: {text}" if many else text for point, text in sentences))


def _matched(content: Row) -> Iterator[Block]:
    yield Heading(2, "What was equal, and what differed")
    if content["engine"] == "xsalab":
        yield Paragraph(
            "The runs of a pair start from bit-identical weights wherever both arms have the parameter, see the same "
            "rows in the same batches, and share schedule, optimizer, precision, validation text, software and device, "
            "but for what follows. This was checked before training, by fingerprint."
        )
    else:
        yield Bullets(tuple(f"not checked: {line}" for line in content["unchecked"]))
    caption = f"{content['name']}: what differed within the pairs, by stored configurations and fingerprints."
    table = Growing(content, "matched", caption, ["contrast", "field", "treatment", "baseline"], [])
    for row in content["contrasts"]:
        for name, (treatment, baseline) in row["differs"].items():
            table.add(row["point"], pair_name(row), name, setting(treatment), setting(baseline))
    yield from table.blocks()


def _data(content: Row) -> Iterator[Block]:
    yield Heading(2, "Data and machine")
    for number, corpus in enumerate(content["corpora"], 1):
        m = corpus["manifest"]
        label = f"{content['name']}-data" + (f"-{number}" if len(content["corpora"]) > 1 else "")
        parts = (("training", m["train"]), ("validation (held out)", m["validation"]))
        rows = [(name, *(f"{part[key]:,}" for key in ("documents", "bytes", "tokens"))) for name, part in parts]
        caption = f"{content['name']}: text. Documents in both parts: {m['overlap']}."
        yield Table(label, caption, ("text", "documents", "bytes", "tokens"), tuple(rows), 1)
        yield Bullets(
            (
                f"source: {m['config']['source']}",
                f"how the text was split: {m['validation_rule']}",
                f"tokenizer: {m['tokenizer']}, {m['config']['vocab_size']:,} tokens",
                f"duplicates dropped before the split: {m['duplicates_dropped']:,}",
                f"unigram entropy: {m['unigram_bits_per_byte']:.3f} bits per byte",
                *(f"SHA-256 of {name}: {entry['sha256']}" for name, entry in m["files"].items()),
            )
        )
    names = list(dict.fromkeys(name for environment in content["environments"] for name in environment))
    rows = [(name, *(setting(e.get(name)) for e in content["environments"])) for name in names]
    if rows:
        columns = ["", *(f"machine {i}" if i > 1 else "machine" for i in range(1, len(content["environments"]) + 1))]
        caption = f"{content['name']}: machine and software of the runs."
        yield Table(f"{content['name']}-machine", caption, tuple(columns), tuple(rows), len(columns))
    if not content["corpora"] and not rows:
        yield Paragraph("Nothing is stored of data and machine yet.")


def _again(content: Row, file: str) -> Iterator[Block]:
    yield Heading(2, "Run it again")
    yield Paragraph(f"Save the text below as {file}, with xsalab {__version__} installed:")
    yield Code(f"xsalab check\nxsalab run {file}\nxsalab report {file} --format md", "sh")
    yield Code(content["toml"], "toml")
