"""docs/known-faults.md says which test holds which fault, and cannot drift from the tests.

A test holds a fault when its docstring names the id. Rewrite the page with

    python tests/docs/test_known_faults.py

which also prints the faults that nothing holds yet.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "known-faults.md"

# id -> the fault in one line
FAULTS: dict[str, dict[str, str]] = {
    "Attention, cache, compilation": {
        "F001": "Exclusion written for equal head counts fails with grouped-query attention.",
        "F003": "With a cache the output of the new tokens meets values of another length or place.",
        "F005": "A layer that cannot take the change is skipped without a word.",
        "F006": "Nobody can say which value was removed where value embeddings are added.",
        "F007": "A value vector of zeros gives NaN gradients, from the root of a clamped square.",
        "F008": "A variant that averages over later positions scores well because the future leaks.",
        "F010": "A fallback kernel masks as causal whatever the caller asked.",
        "F011": "Decoding one token sees the whole history in a layer with a short window.",
        "F013": "A window of 0, −1 or None is taken as full, or as a width of zero.",
        "F014": "With more keys than queries the causal mask hides the wrong keys.",
        "F016": "A cache that grows in place shuffles what it holds.",
        "F017": "The cache has another dtype than the model computes in.",
        "F018": "A prompt longer than the training context runs out of the rotary table.",
        "F019": "Some head sizes crash a kernel or give wrong numbers in silence.",
        "F020": "Grouped heads crash on Apple GPUs.",
        "F023": "A Python number that changes each step recompiles the graph each time.",
        "F025": "A change on only some layers breaks whole-graph compilation.",
        "F026": "The window pattern is lost between pretraining and the chat stage.",
    },
    "Optimizer": {
        "F028": "A gradient of zeros becomes NaN in the orthogonalisation.",
        "F029": "A parameter that is no matrix reaches Muon and fails late.",
        "F030": "Embedding or head is trained by Muon because it has two dimensions.",
        "F032": "Fused query, key and value matrices are orthogonalised as one.",
        "F033": "The rate's factor for tall and wide matrices differs from the formula stated.",
        "F035": "A matrix without gradient moves by decay and old momentum.",
        "F037": "The number of matrices is no multiple of the number of processes.",
        "F038": "The optimizer cannot be built without a process group.",
        "F039": "Clipping by each process's own norm gives other results on more processes.",
        "F041": "Orthogonalisation runs in bfloat16 on a CPU in float32 as well.",
        "F042": "bfloat16 parameters meet float32 state in one operation.",
        "F043": "A new default of the library changes the results of an old configuration.",
        "F044": "Optimizer state cannot be saved or loaded on several processes.",
        "F045": "A vocabulary that does not divide fails at the start or deep in a step.",
    },
    "First weights, seeds, pairs": {
        "F047": "A parameter that no rule fills keeps what was in memory.",
        "F048": "The arms of a comparison draw from one stream and do not share their start.",
        "F051": "One seed is built in, so there is no spread to see.",
        "F052": "A deterministic mode crashes together with compilation and 8-bit floats.",
        "F053": "The best of several seeds is the headline.",
    },
    "Text, tokenizer, batches": {
        "F055": "Training stops or hangs after one pass over the text.",
        "F058": "The validation text changes when files are added.",
        "F059": "With a single shard the training side is empty.",
        "F060": "A file cut off by a broken download is found hours later.",
        "F062": "Packing drops the rest of long documents.",
        "F064": "Validation text is part of the training text.",
        "F067": "A special token's name in a text raises an error, or becomes the token.",
        "F069": "Bytes are counted on decoded text, wrong for tokens that are part of a character.",
        "F070": "A leading space is counted twice, or not at all, in bits per byte.",
        "F072": "The tokenizer ends up with fewer tokens than asked, in silence.",
        "F074": "An empty or missing text stops tokenising, or shifts documents.",
        "F075": "An evaluation without bytes divides by zero.",
        "F076": "A conversation longer than the context leaves a row without a target.",
        "F078": "The user's part of a conversation is trained on.",
        "F079": "Accumulation averages means over unequal numbers of tokens.",
        "F081": "A batch that does not divide ends in a bare assertion.",
    },
    "Checkpoints and resuming": {
        "F082": "After a resume documents are skipped or repeated.",
        "F084": "A resume in a later epoch loses its place.",
        "F086": "A resume walks through all earlier batches.",
        "F087": "The position of one process alone is stored.",
        "F089": "Packing begins anew, and otherwise, after a resume.",
        "F090": "A resume fails because no validation value exists yet.",
        "F091": "A run without validation during training fails at its end.",
        "F093": "A save that was killed leaves half a file that is loaded later.",
        "F095": "A checkpoint that misses a file is taken because its number is the highest.",
        "F096": "The newest step is found by text order, or a stray file is taken for one.",
        "F099": "A second run of the same name writes over the first.",
        "F100": "A failure in the last evaluation loses the whole training.",
        "F101": "Only one process makes the folder that all write to.",
        "F102": "Loading a file from elsewhere can run code.",
        "F104": "Weights saved in another dtype do not load on this device.",
    },
    "Validation": {
        "F105": "Validation runs over nothing and still reports a number.",
        "F106": "What is validated depends on the batch size.",
        "F107": "Means of batches are averaged although they hold unequal numbers of tokens.",
        "F110": "A batch is lost at each round of validation.",
        "F111": "Validation hangs: processes have unequal numbers of batches and wait for each other.",
        "F113": "A single process ends with an error at its exit.",
        "F114": "Special tokens count in the loss but not in the bytes.",
        "F115": "Nats are reported as bits.",
        "F117": "The last tokens of a text are scored more than once.",
        "F119": "An infinite loss at a masked place turns the total into NaN.",
        "F145": "A score depends on the batch size through padding.",
    },
    "Steps, logs, times": {
        "F120": "Schedules count micro-batches and run below their floor.",
        "F121": "One step fewer than asked is trained.",
        "F123": "A smoothed loss is wrong at its first points.",
        "F124": "Averaged weights of a short run are near the random start.",
        "F126": "An average of weights is kept in bfloat16.",
        "F127": "Averaged weights move the wrong way.",
        "F128": "Throughput is wrong by the accumulation factor.",
        "F130": "Overheads contain compilation and warm-up.",
        "F131": "The logged loss is that of the last micro-batch.",
        "F132": "Steps vanish from a log after a resume.",
        "F133": "A second offline run of a tracker writes over the first.",
    },
    "Benchmarks, chat, code": {
        "F135": "A benchmark's figure differs from published ones through other baselines.",
        "F136": "Few-shot examples are asked for where there are too few items.",
        "F137": "A continuation has no tokens of its own, or merges with the prompt.",
        "F139": "A loss is taken for a log-likelihood and the worst option chosen.",
        "F140": "The start token is missing, or there twice.",
        "F142": "The first token of a rolling score stands behind another token than in training.",
        "F144": "A cut keeps the examples and loses the question.",
        "F147": "A right number is marked wrong for a full stop or a currency sign.",
        "F149": "A program that ends itself before the tests counts as passed.",
        "F150": "Model-written code leaves its folder or opens a socket.",
        "F152": "A part of the problems fails; a k above the samples disappears.",
        "F153": "A time limit needs the main thread or whole seconds.",
        "F154": "The calculator reaches the language's own functions.",
        "F155": "All samples of one prompt begin alike.",
        "F157": "A chat dies or decays beyond the context.",
    },
    "Export": {
        "F160": "Tied or untied weights are missing or overwritten after loading.",
        "F162": "Rotary halves are paired differently in the export.",
        "F163": "The export differs in a sign, an order or a cap.",
    },
    "Text in and out": {
        "F158": "A character of several tokens is shown as replacement signs while streaming.",
        "F159": "Text is read or written in the system's encoding.",
    },
    "Statistics, report, machines": {
        "F164": "A p value is NaN where there is one pair, or no spread.",
        "F167": "Runs of several configurations are pooled in one mean.",
        "F168": "A speed-up is stated against another machine's time.",
        "F169": "The arms ran on different software.",
        "F170": "A name or a text in the report is not escaped and breaks or runs.",
        "F171": "Attention weights are missing under a fused kernel.",
        "F173": "A run's name breaks its path or leaves the folder.",
        "F174": "A full disk kills a run or leaves a short file.",
        "F176": "A call or dtype of one device fails on another.",
    },
}
# Why nothing holds it: what it is about does not exist here.
NOT_HERE: dict[str, str] = {
    "F010": "attention is causal always; there is no flag to ignore",
    "F020": "no Apple GPU path",
    "F032": "query, key and value matrices are separate",
    "F037": "one process a run",
    "F039": "one process a run",
    "F044": "one process a run",
    "F087": "one process a run",
    "F101": "one process a run",
    "F124": "no averaged weights",
    "F126": "no averaged weights",
    "F127": "no averaged weights",
}
HEAD = """# Known faults

Faults that users and maintainers of related projects have met, and the tests that keep each out here. A fault is held
when a test's docstring names its id. Written by `python tests/docs/test_known_faults.py`; do not edit by hand.
"""


def holders() -> dict[str, list[str]]:
    """Fault id -> the tests whose docstring names it, as path::name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.lower().startswith("test"):
                for fault in sorted(set(re.findall(r"\bF\d{3}\b", ast.get_docstring(node) or ""))):
                    found.setdefault(fault, []).append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def missing(held: dict[str, list[str]]) -> list[str]:
    """Faults that no test holds and no reason excuses."""
    return [f"{fault}: {text}" for faults in FAULTS.values() for fault, text in faults.items()
            if fault not in held and fault not in NOT_HERE]  # fmt: skip


def expected_table() -> str:
    """The page as it should be."""
    held, parts = holders(), [HEAD]
    for title, faults in FAULTS.items():
        rows = [
            f"| {fault} | {text} | {'<br>'.join(f'`{test}`' for test in held[fault])} |"
            for fault, text in faults.items()
            if fault in held
        ]
        if rows:
            parts.append("\n".join([f"## {title}\n", "| id | fault | held by |", "|---|---|---|", *rows]) + "\n")
    described = {fault: text for faults in FAULTS.values() for fault, text in faults.items()}
    rows = [f"| {fault} | {described[fault]} | {why} |" for fault, why in NOT_HERE.items() if fault not in held]
    parts.append("\n".join(["## Without a test\n", "| id | fault | why |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == expected_table(), "run: python tests/docs/test_known_faults.py"


def test_every_id_that_a_test_names_is_described() -> None:
    described = {fault for faults in FAULTS.values() for fault in faults}
    unknown = {fault: tests for fault, tests in holders().items() if fault not in described}
    assert not unknown, "give these ids a line in FAULTS, or correct them in the tests"
    assert NOT_HERE.keys() <= described


def test_every_fault_is_held_or_has_a_reason() -> None:
    nothing_holds = missing(holders())
    assert not nothing_holds, "no test's docstring names:\n" + "\n".join(nothing_holds)


if __name__ == "__main__":
    PAGE.write_text(expected_table(), encoding="utf-8", newline="\n")
    print(f"{PAGE.relative_to(ROOT)} written")
    if nothing := missing(holders()):
        print("held by no test:", *nothing, sep="\n  ")
