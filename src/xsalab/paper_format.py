"""A document as a list of blocks, and the two ways to write it: Markdown, and LaTeX for its tables.

Every text from outside (names, TOML, messages) is escaped here and nowhere else. A Markdown table shows one row a line;
LaTeX tables need booktabs and no other package, and one that is too wide or too long is told in parts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

WIDEST = 9  # columns of a LaTeX table
LONGEST = 44  # rows of a LaTeX table
LONG_TEXT = 36  # characters from which on a LaTeX column breaks its lines


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""


@dataclass(frozen=True)
class Image:
    path: str
    alt: str


@dataclass(frozen=True)
class Table:
    """``fixed``: how many columns of text stand at the left, and are repeated where a table is told in parts."""

    label: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    fixed: int = 1


Block = Heading | Paragraph | Bullets | Code | Image | Table


def clean(text: str) -> str:
    """One line without control characters."""
    text = re.sub(r"\s+", " ", text).strip()
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


# Markdown


def markdown(blocks: Sequence[Block]) -> str:
    """The document as GitHub-flavoured Markdown; a table's caption stands above it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {markdown_text(text)}"
        case Paragraph(text, strong):
            return f"**{markdown_text(text)}**" if strong else _line_start(markdown_text(text))
        case Bullets(items):
            return "\n".join(f"- {_line_start(markdown_text(item))}" for item in items)
        case Code(text, language):
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
            body = "".join(c for c in text.rstrip("\n") if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
            return f"{fence}{language}\n{body}\n{fence}"
        case Image(path, alt):
            return f"![{markdown_text(alt)}](<{path}>)"
        case Table():
            sides = [":--" if i < block.fixed else "--:" for i in range(len(block.columns))]
            lines = [block.columns, sides, *block.rows]
            rows = [[cell if line is sides else markdown_text(cell) for cell in line] for line in lines]
            drawn = "\n".join(f"| {' | '.join(row)} |" for row in rows)
            return f"{_line_start(markdown_text(block.caption))}\n\n{drawn}"


def markdown_text(text: str) -> str:
    """The text, so that nothing in it is read as Markdown, HTML or mathematics."""
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", clean(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _line_start(text: str) -> str:
    """A line of text that begins no list, heading or rule."""
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", re.sub(r"^([-+#=])", r"\\\1", text))


# LaTeX

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", "*": "{*}", "-": "-{}", '"': "''",
    "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$", "→": r"$\to$",
    "∂": r"$\partial$", "∞": r"$\infty$", "√": r"$\surd$", "‖": r"$\|$", "Σ": r"$\Sigma$", "Δ": r"$\Delta$",
    "²": "$^2$", "–": "--", "—": "---", "“": "``", "”": "''", "‘": "`", "’": "'", "…": r"\ldots{}",
    "`": r"\textasciigrave{}",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\epsilon$", "λ": r"$\lambda$",
    "μ": r"$\mu$", "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$",
}  # fmt: skip
_LETTERS = "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿßÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝœŒ"


def latex_text(text: str) -> str:
    """The text for pdfLaTeX, with every special character escaped; a character that it has not is told by number."""
    return "".join(_latex_character(character) for character in clean(text))


def _latex_character(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    if character.isascii() or character in _LETTERS:
        return character
    return f"U+{ord(character):04X}"


def latex(blocks: Sequence[Block], title: str) -> str:
    """The tables of the document, each in a float of its own with caption and label.

    title: for the comment at the head, one line. The file is for \\input in an article with \\usepackage{booktabs}.
    """
    tables = [part for block in blocks if isinstance(block, Table) for part in _parts(block)]
    head = f"% {clean(title)}\n% In the preamble: \\usepackage{{booktabs}}. Then \\input this file; labels: tab:...\n"
    return head + "".join(f"\n{_latex(table)}" for table in tables)


def _parts(table: Table) -> list[Table]:
    """The table, or pieces of it that fit a page."""
    room = WIDEST - table.fixed
    free = range(table.fixed, len(table.columns))
    across = [tuple(free[i : i + room]) for i in range(0, len(free), room)] or [()]
    down = [table.rows[i : i + LONGEST] for i in range(0, len(table.rows), LONGEST)]
    pieces: list[Table] = []
    for rows in down:
        for chosen in across:
            kept = (*range(table.fixed), *chosen)
            columns = tuple(table.columns[i] for i in kept)
            pieces.append(replace(table, columns=columns, rows=tuple(tuple(row[i] for i in kept) for row in rows)))
    if len(pieces) == 1:
        return pieces
    return [
        replace(piece, label=f"{table.label}-{i}", caption=f"{table.caption} Part {i} of {len(pieces)}.")
        for i, piece in enumerate(pieces, 1)
    ]


def _latex(table: Table) -> str:
    size = r"\footnotesize" if len(table.columns) > 6 else r"\small"
    lines = [" & ".join(map(latex_text, row)) + r" \\" for row in table.rows]
    return "\n".join(
        [
            r"\begin{table}", r"\centering", size, r"\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{latex_text(table.caption)}}}", rf"\label{{tab:{_label(table.label)}}}",
            rf"\begin{{tabular}}{{{_sides(table)}}}", r"\toprule",
            " & ".join(map(latex_text, table.columns)) + r" \\", r"\midrule", *lines, r"\bottomrule", r"\end{tabular}",
            r"\end{table}", "",
        ]
    )  # fmt: skip


def _label(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", text).strip("-")


def _sides(table: Table) -> str:
    """Numbers to the right, texts to the left; long texts share what is left of the line."""
    longest = [max(len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]
    texts = sum(size > LONG_TEXT for size in longest)
    share = 0.8 * max(0.3, 1 - 0.09 * (len(longest) - texts)) / max(texts, 1)
    kinds = ("l" if i < table.fixed else "r" for i in range(len(longest)))
    sides = [rf"p{{{share:.2f}\linewidth}}" if n > LONG_TEXT else kind for n, kind in zip(longest, kinds, strict=True)]
    return "@{}" + "".join(sides) + "@{}"
