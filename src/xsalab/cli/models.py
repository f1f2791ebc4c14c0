"""Verbs for a trained run: sample, chat, sft, core, chatcore, diagnose, export."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import OUT, Json, Out, app, bar, console, note, say_lines, spelled, tell_plugins


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")],
    prompt: Annotated[str, typer.Argument(help="text to continue")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="how many to add")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="choose among the k likeliest; 0: among all")] = 50,
    seed: Annotated[int, typer.Option(help="of the choice of tokens")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="how many continuations; their seeds count up from --seed")] = 1,
    json_: Json = False,
) -> None:
    """Continue a text with a trained model.

    Example: xsalab sample out/experiments/quick/runs/base.xsa.s0 "def main(" --tokens 60

    Example: xsalab sample out/experiments/quick/runs/base.xsa.s0 "import " --samples 4 --json
    """
    from ..eval.generate import generate, generate_batch, stream_text
    from ..experiment.run import load_run
    from ..experiment.store import RunFolder

    tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
    model, corpus, _ = load_run(folder)
    tokenizer = corpus.tokenizer
    start = [tokenizer.bos, *tokenizer.encode([prompt])[0]]
    if len(start) + tokens > model.config.context:
        note(f"note: prompt and --tokens go beyond the {model.config.context} tokens that the model was trained on")
    if samples == 1:
        new = generate(model, start, tokens, temperature=temperature, top_k=top_k, seed=seed, stop=[tokenizer.bos])
        if not json_:
            print(prompt, end="", flush=True)
            for piece in stream_text(tokenizer.token_bytes[token] for token in new):
                print(piece, end="", flush=True)
            print()
            return
        every = [list(new)]
    else:
        seeds = range(seed, seed + samples)
        with bar("sampling", samples) as update:
            every = generate_batch(
                model, [start] * samples, tokens=tokens, temperature=temperature, top_k=top_k, seeds=seeds,
                stop=[tokenizer.bos], limit=len(start) + tokens, progress=lambda done, total: update(done),
            )  # fmt: skip
    made = [{"prompt": prompt, "tokens": ids, "text": tokenizer.decode(ids)} for ids in every]
    if json_:
        print(json.dumps(made[0] if samples == 1 else made, ensure_ascii=False))
        return
    for number, entry in enumerate(made):
        print(f"--- seed {seed + number}\n{prompt}{entry['text']}")


@app.command()
def chat(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder; RUN/sft is taken if there")],
    prompt: Annotated[str | None, typer.Option(help="one question, one answer, and no terminal")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="at most, of one answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")] = 0.6,
    top_k: Annotated[int, typer.Option(min=0, help="choose among the k likeliest; 0: among all")] = 50,
    seed: Annotated[int, typer.Option(help="of the choice of tokens")] = 0,
    json_: Json = False,
) -> None:
    """Talk with a trained model: fine-tuned where RUN/sft is there. Ctrl-C stops an answer, Ctrl-D leaves.

    Lines can be piped in as well; each is a question, or a command such as /clear (see /help).

    Example: xsalab chat out/experiments/quick/runs/base.xsa.s0

    Example: xsalab chat out/experiments/quick/runs/base.xsa.s0 --prompt "What is 12 * 3?" --json
    """
    from ..chat import ChatSettings, lines, open_chat, say, talk, which_model
    from ..experiment.store import RunFolder

    if json_ and prompt is None:
        raise ValueError("--json: needs --prompt TEXT; a conversation is not one JSON value")
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt: is empty; give a question, or leave it out to talk")
    chosen, words = which_model(folder)
    tell_plugins(chosen, RunFolder(chosen).read("config").get("plugins", {}).items())
    talking = open_chat(chosen, ChatSettings(tokens, temperature, top_k, seed))
    note(words)

    def write(text: str) -> None:
        if not json_:
            print(spelled(text), end="", flush=True)

    if prompt is not None:
        answer = say(talking, prompt, write, note)
        if json_:
            content = {"run": str(chosen), "prompt": prompt, "answer": answer.text, "tokens": answer.tokens}
            print(json.dumps({**content, "ended": answer.ended}, ensure_ascii=False))
        return
    terminal = sys.stdin.isatty()
    if terminal:
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    talk(talking, lines(terminal), write, note, terminal=terminal)


@app.command()
def sft(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")],
    data: Annotated[list[str], typer.Option(help="a file, folder or hub:smoltalk; may repeat; 'FILE x 4'")],
    epochs: Annotated[float | None, typer.Option(help="passes over the conversations; 1 where left out")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="sft.field=value; may repeat")] = None,
    json_: Json = False,
) -> None:
    """Fine-tune a finished run on conversations, into RUN/sft, or go on where that stopped.

    Example: xsalab sft out/experiments/quick/runs/base.xsa.s0 --data chats.jsonl --data "gsm8k_train.jsonl x 4"
    """
    from ..experiment.sft import fine_tune, sft_config
    from ..experiment.store import RunFolder

    config = sft_config(data, [*([f"sft.epochs={epochs}"] if epochs is not None else []), *(sets or ())])
    tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
    with ExitStack() as bars:
        update = bars.enter_context(bar("preparing the conversations", 1.0))

        def event(content: dict[str, Any]) -> None:
            nonlocal update
            if content["kind"] == "prepare":
                update(content["share"], content["stage"])
            elif content["kind"] == "data":
                bars.close()
                for line in content["lines"]:
                    note(line)
                update = bars.enter_context(bar("fine-tuning", content["steps"]))
            else:
                update(content["step"], f"fine-tuning, loss {content['loss']:.3f}")

        tuned = RunFolder(fine_tune(folder, config, event=event))
    values = [row["val_bpb"] for row in tuned.metrics() if "val_bpb" in row]
    if json_:
        content = {"folder": str(tuned.path), **tuned.status, "val_bpb_before": values[0] if values else None}
        print(json.dumps(content, ensure_ascii=False))
    elif tuned.state == "finished":
        change = f"{values[0]:.4f} bits per byte before, {values[-1]:.4f} after {tuned.status['steps']} steps"
        print(f"held-out answers: {change}")
        print(tuned.path)
    else:
        print(f"{tuned.path}: {tuned.state}, {tuned.status.get('message', '')}")
    if tuned.state == "diverged":
        raise typer.Exit(1)


@app.command()
def core(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder, or a nanochat checkpoint's")],
    bundle: Annotated[str, typer.Option(help="the evaluation bundle: a folder, a zip, or a zip's https address")] = "",
    sha256: Annotated[str, typer.Option(help="of the zip; an address needs it")] = "",
    tasks: Annotated[list[str] | None, typer.Option(help="one of the bundle's; may repeat; all where left out")] = None,
    max_per_task: Annotated[int, typer.Option(help="items of each task, the first in nanochat's order; 0: all")] = 0,
    longest: Annotated[str, typer.Option(help="prompts: 'reference' (10 contexts, as nanochat) or 'context'")] = (
        "reference"
    ),
    out: Out = OUT,
    json_: Json = False,
) -> None:
    """Ask a run the tasks of CORE, item by item; or go on where that stopped. Under torchrun the processes share them.

    Example: xsalab core out/experiments/quick/runs/base.xsa.s0 --bundle eval_bundle --max-per-task 100
    """
    import torch

    from ..eval.core import CoreConfig
    from ..experiment.core import ask_core
    from ..experiment.store import RunFolder
    from ..train.ranks import joined

    config = CoreConfig(bundle, sha256, tuple(tasks or ()), max_per_task, longest)
    tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
    with joined("cuda" if torch.cuda.is_available() else "cpu") as ranks, bar("asking", 1.0) as update:
        result = ask_core(
            folder, config, out=out, note=note, ranks=ranks,
            progress=lambda done, total, task: update(done / total, f"asking {task}"),
        )  # fmt: skip
    if not ranks.first:
        return
    content = result.as_json()
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    _task_table(content["tasks"])
    print(f"CORE {content['CORE']:.4f} (a model that guesses at random: {content['guessing']:.4f})")
    say_lines(content["notes"])
    print(content["folder"])


def _task_table(tasks: dict[str, dict[str, Any]]) -> None:
    """A benchmark's tasks: accuracy, what guessing gives, and what rules touched."""
    table = Table(box=None)
    for heading in ("task", "accuracy", "items", "chance", "baseline", "centred", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "task")
    for name, row in tasks.items():
        shares = (row["chance"], row["baseline"], row["centred"])
        counts = ", ".join(f"{count} {rule}" for rule, count in row["counts"].items())
        accuracy, *others = (f"{100 * share:.1f} %" for share in (row["accuracy"], *shares))
        table.add_row(name, accuracy, str(row["items"]), *others, counts)
    console.print(table)


@app.command()
def chatcore(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder; RUN/sft is taken if there")],
    data: Annotated[str, typer.Option(help="folder with arc_easy_test.jsonl, …; 'hub': downloaded once")] = "hub",
    tasks: Annotated[list[str] | None, typer.Option(help="one of the five; may repeat; all where left out")] = None,
    max_categorical: Annotated[int, typer.Option(help="items of ARC and MMLU each; 0: all")] = 0,
    max_generated: Annotated[int, typer.Option(help="items of GSM8K and HumanEval each; 0: all")] = 24,
    samples: Annotated[int, typer.Option(help="answers to a generated item; above 1 gives pass@k")] = 1,
    temperature: Annotated[float, typer.Option(help="of generated answers; 0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="choose among the k likeliest; 0: among all")] = 50,
    max_new_tokens: Annotated[int, typer.Option(help="of one answer; never more than the context")] = 512,
    k: Annotated[list[int] | None, typer.Option(min=1, help="of pass@k; may repeat; 1 and all where left out")] = None,
    seed: Annotated[int, typer.Option(help="of the choice of tokens")] = 0,
    batch_rows: Annotated[int, typer.Option(help="rows side by side; changes memory, never a score")] = 16,
    run_code: Annotated[bool, typer.Option("--run-code", help="HumanEval: run programs that the model wrote")] = False,
    unsafe_run_code: Annotated[
        bool, typer.Option("--unsafe-run-code", help="even where they cannot be shut in; see docs/sandbox.md")
    ] = False,
    json_: Json = False,
) -> None:
    """Ask a run the five tasks of ChatCORE, item by item; or go on where that stopped.

    Example: xsalab chatcore out/experiments/quick/runs/base.xsa.s0 --data chat --max-categorical 200 --run-code
    """
    from ..eval.chat_prompts import ChatCoreConfig
    from ..eval.chat_tasks import CHAT_TASKS
    from ..experiment.chatcore import ask_chat_core, chat_folder
    from ..experiment.store import RunFolder

    config = ChatCoreConfig(
        data=data, tasks=tuple(tasks or CHAT_TASKS), max_categorical=max_categorical, max_generated=max_generated,
        samples=samples, temperature=temperature, top_k=top_k, max_new_tokens=max_new_tokens, seed=seed,
        batch_rows=batch_rows, run_code=run_code or unsafe_run_code,
    )  # fmt: skip
    tell_plugins(folder, RunFolder(chat_folder(folder)[0]).read("config").get("plugins", {}).items())
    with bar("asking", 1.0) as update:
        result = ask_chat_core(
            folder, config, unsafe_code=unsafe_run_code, note=note,
            progress=lambda done, total, task: update(done / total, f"asking {task}"),
        )  # fmt: skip
    content = result.as_json(tuple(k or ()))
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    _task_table(content["tasks"])
    for name, row in content["tasks"].items():
        if samples > 1 or k:
            for number, value in row.get("pass_at", {}).items():
                print(f"{name} pass@{number}: " + (f"{100 * value:.1f} %" if value is not None else "not available"))
    for name in ("ChatCORE", "ChatCORE_cat"):
        if content[name] is not None:
            print(f"{name} {content[name]:.4f}")
    say_lines(content["notes"])
    print(content["folder"])


@app.command()
def diagnose(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of finished runs")],
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="validation rows of the model's context that are read; else as runs beside it, or 8"),
    ] = None,
    json_: Json = False,
) -> None:
    """Measure what attention does in every layer and head of finished runs, into RUN/mechanism/step-N.parquet.

    Example: xsalab diagnose out/experiments/quick/runs/base.xsa.s0

    Example: xsalab diagnose out/experiments/quick/runs/base.* --rows 32 --json
    """
    from ..experiment.diagnosing import diagnose_run
    from ..experiment.run import check_finished
    from ..experiment.store import RunFolder

    for folder in folders:  # before the first is measured
        check_finished(folder)
    made: list[dict[str, Any]] = []
    with bar("diagnosing", len(folders)) as update:
        for number, folder in enumerate(folders):
            update(number, f"diagnosing {folder.name}")
            tell_plugins(folder, RunFolder(folder).read("config").get("plugins", {}).items())
            diagnosed = diagnose_run(folder, rows or 0).as_json()
            for text in diagnosed["notes"]:
                note(f"{folder}: {text}")
            made.append(diagnosed)
    if json_:
        print(json.dumps(made, ensure_ascii=False, allow_nan=False))
        return
    for content in made:
        _layer_table(content)


def _layer_table(content: dict[str, Any]) -> None:
    """A diagnosis by layer, means over heads."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in (
        "layer", "cos", "energy", "removed", "self", "uniform", "first", "reach", "α", "dL/dα",
    ):  # fmt: skip
        table.add_column(spelled(heading), justify="right", overflow="fold")
    forms = {
        "energy_before": ".1%", "removed": ".1%", "self_weight": ".4f", "uniform": ".4f", "first_weight": ".4f",
        "reach": ".1f", "alpha": ".3f", "alpha_gradient": "+.5f",
    }  # fmt: skip
    for row in content["layers"]:
        cosines = (_cell(row[name], ".3f") for name in ("cos_before", "cos_after"))
        table.add_row(str(row["layer"]), " > ".join(cosines), *(_cell(row[name], form) for name, form in forms.items()))
    loss = f"{content['loss']:.4f} nats a token over {content['tokens']:,} tokens"
    print(f"{content['run']}: {content['steps']:,} steps, {loss}")
    console.print(table)
    print(content["file"])


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form).replace("%", " %")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run, RUN/sft, or a nanochat checkpoint")],
    to: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder")],
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="with chat template; left out: RUN/sft alone has one")
    ] = None,
    json_: Json = False,
) -> None:
    """Write a trained model as a Hugging Face folder that loads without xsalab, and prove that it does.

    Example: xsalab export out/experiments/quick/runs/base.xsa.s0 my-model
    """
    from ..experiment.card import experiment_card
    from ..experiment.core import is_checkpoint
    from ..experiment.run import load_run
    from ..experiment.store import RunFolder
    from ..interop.export import export as write_export
    from ..interop.export_tokenizer import nanochat_tokenizer
    from ..interop.nanochat import read_checkpoint, variant_note

    stored = RunFolder(folder).read("config")
    plugins = tuple(stored.get("plugins", {}).items())
    if not stored and is_checkpoint(folder):
        model, given = read_checkpoint(folder)
        note(variant_note(folder))
        tokenizer, card = nanochat_tokenizer(given), ""
    else:
        tell_plugins(folder, plugins)
        model, corpus, _ = load_run(folder)
        tokenizer, card = corpus.tokenizer, experiment_card(folder)
    chat = "sft" in stored if chat is None else chat
    note("writing, then loading it in a process without xsalab")
    made = write_export(model, tokenizer, to, card=card, chat=chat, plugins=plugins)
    if json_:
        print(json.dumps({**vars(made), "folder": str(made.folder)}, ensure_ascii=False))
        return
    print(f"{made.folder}: {len(made.files)} files, {made.bytes:,} bytes")
    print(f"proved: {made.logits:,} logits equal to the last bit without xsalab" if made.logits else made.note)
