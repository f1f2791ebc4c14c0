"""FINE-TUNING: a finished run goes on with conversations, by the same loop, in RUN/sft.

Model, variant and α are the base run's: before the first step the logits are its logits, to the bit, and a scheduled α
stays at its end. The optimizer is new, as a run keeps its weights alone (nanochat goes on with its moments). Rates are
the base's times ``lr_fraction``, seed and kernels the base's own, so that the arms of a pair read the same batches.
What is left in RUN/sft is a run folder: ``load_run`` opens it, and its val_bpb is that of held-out answers, in bits a
byte of what the assistant itself writes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import build, config, digest, dump, parse_value, set_dotted
from ..data import Rows
from ..data.chat import check_chat_tokens
from ..data.chat_rows import ChatChoice, ChatData, changed_file, contents_of, prepare_conversations
from ..data.chat_sources import ChatSource
from ..eval.bits_per_byte import answer_bits_per_byte
from ..files import folder_lock, make_folder
from ..train import TrainConfig, TrainState
from ..train.checkpoint import load_model
from .building import batches, derived, open_corpus
from .design import RunConfig, config_differences
from .fingerprint import conditions
from .pairing import describe
from .plugins import import_plugins
from .run import LOCK_WAIT, begin_under, fresh_state, tidy, train_and_evaluate
from .store import RunFolder

FOLDER = "sft"  # of a run's folder
PATHS = ("sources", "validation")  # fields that say where, which is nobody's matter where the contents are the same
Event = Callable[[dict[str, Any]], None]
# Muon's momentum climbs and stays, as in nanochat's scripts/chat_sft.py.
MOMENTUM = {"momentum_start": 0.85, "momentum_peak": 0.95, "momentum_end": 0.95, "momentum_steps": 300}


@config
class SftConfig:
    """What a run is fine-tuned on, and how. The defaults are nanochat's (scripts/chat_sft.py).

    ``sources`` and ``validation``: files and folders of conversations, or "hub:smoltalk", "hub:mmlu", "hub:gsm8k";
    " x 4" behind a source takes it four times. Paths are relative to the working directory, those of an experiment's
    table [sft] to its file.
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...] = ()  # held out; (): by hash from the sources
    validation_fraction: float = 0.05  # share of the conversations that is held out by hash
    validation_conversations: int = 500  # at most so many are held out
    max_conversations: int = 0  # the first so many of each source; 0: all
    epochs: float = 1.0  # passes over the rows, repetitions included
    steps: int = 0  # in place of epochs; 0: by epochs
    batch_tokens: int = 0  # 0: as the base run
    lr_fraction: float = 0.8  # of every rate of the base run
    warmup: float = 0.0  # share of the steps
    warmdown: float = 0.5  # share of the steps
    final_lr: float = 0.0
    weight_decay: float = 0.0  # Muon's, or plain AdamW's
    eval_every: int = 0  # steps between evaluations; 0: before the first step and after the last

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources = []: give at least one file of conversations, or 'hub:smoltalk'")
        for name in PATHS:
            for text in getattr(self, name):
                try:
                    source = ChatSource.parse(text)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
                if name == "validation" and source.times != 1:
                    raise ValueError(f"validation = {text!r}: each conversation is scored once; leave out 'x'")
        for name in ("validation_fraction", "warmdown"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a share, above 0 and at most 1")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup = {self.warmup}: a share of the steps, at least 0 and below 1")
        for name in ("epochs", "lr_fraction"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a finite number above 0")
        for name, least in (
            ("validation_conversations", 1), ("max_conversations", 0), ("steps", 0), ("batch_tokens", 0),
            ("final_lr", 0), ("weight_decay", 0), ("eval_every", 0),
        ):  # fmt: skip
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")

    @property
    def choice(self) -> ChatChoice:
        """What is read and what is held out."""
        return ChatChoice(
            tuple(map(ChatSource.parse, self.sources)), tuple(map(ChatSource.parse, self.validation)),
            self.validation_fraction, self.validation_conversations, self.max_conversations,
        )  # fmt: skip


def sft_config(sources: Sequence[str], sets: Sequence[str] = ()) -> SftConfig:
    """From ``--data`` and ``--set sft.field=value``. ValueError naming the field."""
    tables: dict[str, Any] = {"sft": {"sources": list(sources)}}
    for assignment in sets:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip().startswith("sft."):
            raise ValueError(f"--set {assignment!r}: write it as sft.field=value")
        set_dotted(tables, name.strip(), parse_value(text.strip()), where="--set")
    return build(SftConfig, tables["sft"], "sft")


def fine_tune(run: Path, config: SftConfig, *, event: Event = lambda content: None) -> Path:
    """Fine-tunes the finished run OUT/experiments/NAME/runs/RUN, or goes on where it stopped; returns RUN/sft.

    Whether it finished or diverged, the folder's status says. event: {"kind": "prepare", "stage", "share"},
    {"kind": "data", "lines", "steps"}, {"kind": "step", "step", "steps", "loss"}.
    Raises ValueError where the base run is not finished, its tokenizer lacks the special tokens, the conversations do
    not suffice, or RUN/sft, finished or not, holds a run of another configuration, of other base weights, or of files
    with other contents (SHA-256), naming the difference. Files that are gone are not missed where the run is finished.
    """
    base, folder = RunFolder(run), RunFolder(run / FOLDER)
    stored = _finished(base)
    make_folder(folder.path)
    with folder_lock(folder.path, "run", LOCK_WAIT):
        known, asked = folder.read("config"), dump(config)
        if known and (found := _changed(known, config)):
            raise ValueError(
                f"{folder.path}: fine-tuned with another configuration: {describe(found)}. "
                "Give the same, or delete that folder"
            )
        if known and known["base"] != base.status["weights"]:
            raise ValueError(f"{folder.path}: began from other weights than {run} has now; delete that folder")
        if known and (changed := changed_file(known["sources"], config.choice)):
            raise ValueError(
                f"{changed}: other contents (SHA-256) than {folder.path} was fine-tuned on; "
                f"delete {folder.path} to fine-tune on the file as it is now"
            )
        if tidy(folder) in ("finished", "diverged"):
            return folder.path
        begin = time.perf_counter()
        import_plugins(tuple(stored["plugins"].items()))
        origin = build(RunConfig, stored["config"], str(run / "config.json"))
        torch.set_num_threads(origin.train.threads)
        home, context = run.resolve().parents[3], origin.model.context
        corpus = open_corpus(origin.data, origin.model.vocab_size, home)
        check_chat_tokens(corpus.tokenizer, str(corpus.folder / "tokenizer.json"))
        data = prepare_conversations(
            config.choice, corpus.tokenizer, context, home,
            lambda stage, share: event({"kind": "prepare", "stage": stage, "share": share}),
        )  # fmt: skip
        rows, held_out = data.rows(), data.held_out()
        own = tuning(origin, config, rows)
        event({"kind": "data", "lines": data.lines(), "steps": own.train.steps})
        state = fresh_state(own)
        with torch.no_grad():
            load_model(run / "model.safetensors", state)
        state.schedules_ended = True
        fingerprint = _fingerprint(own, asked, state, data, stored["plugins"])
        begin_under(folder, fingerprint)
        folder.write(
            "config",
            {
                "config": dump(own), "derived": derived(own), "plugins": stored["plugins"], "sft": asked,
                "base": base.status["weights"], "sources": data.manifest["key"]["sources"],
                "conversations": data.lines(),
            },
        )  # fmt: skip
        folder.write("fingerprint", fingerprint)
        sizes = corpus.tokenizer.bytes_per_token()
        train_and_evaluate(
            folder, state, own, rows,
            lambda model: answer_bits_per_byte(model, held_out, sizes, own.eval.batch_rows),
            begin=begin, event=event, score_first=True,
        )  # fmt: skip
    return folder.path


def _finished(base: RunFolder) -> dict[str, Any]:
    """config.json of a finished run of our own engine that was not fine-tuned itself. ValueError for any other."""
    stored = base.read("config")
    if not stored or len(base.path.resolve().parents) < 4:
        raise ValueError(
            f"{base.path}: no run here (config.json is missing); give a folder under out/experiments/…/runs"
        )
    if "command" in stored["config"]:
        raise ValueError(f"{base.path}: a command's run: its model is the command's own, and so is its fine-tuning")
    if FOLDER in stored:
        raise ValueError(f"{base.path}: is fine-tuned already; give the base run, {base.path.parent}")
    if base.state != "finished":
        raise ValueError(f"{base.path}: {base.state}, not finished: only a whole run is fine-tuned; run it to its end")
    return stored


def _changed(known: dict[str, Any], config: SftConfig) -> dict[str, tuple[Any, Any]]:
    """In what ``config`` is another than that of the run that is there; the same files elsewhere are the same."""
    found = config_differences(known["sft"], dump(config))
    if found and found.keys() <= {*PATHS} and known["sources"] == contents_of(config.choice):
        return {}
    return found


def tuning(origin: RunConfig, config: SftConfig, rows: Rows) -> RunConfig:
    """The base run's configuration with the optimizer's and the loop's numbers of fine-tuning on ``rows``.

    Raises ValueError where the rows do not fill a batch.
    """
    tokens = config.batch_tokens or origin.train.batch_tokens
    # one process, whatever the base run had: its batches are the same for any number
    whole = dataclasses.replace(origin.train, batch_tokens=tokens, processes=1, shard=False)
    try:
        batch = whole.batch_rows(origin.model.context)
    except ValueError as error:
        raise ValueError(f"sft.batch_tokens = {tokens}: {error}") from None
    if batch > len(rows):
        raise ValueError(
            f"sft.batch_tokens = {tokens}: {batch} rows a batch, but the conversations fill {len(rows)}; "
            f"use at most {len(rows) * origin.model.context}, or more conversations"
        )
    steps = config.steps or math.ceil(config.epochs * len(rows) / batch)
    optim = dataclasses.replace(
        origin.optim, lr_scale=origin.optim.lr_scale * config.lr_fraction, schedule="nanochat",
        warmup_steps=round(config.warmup * steps), warmdown=config.warmdown, final_lr=config.final_lr,
        weight_decay=config.weight_decay, plain_muon_weight_decay=config.weight_decay,
        adamw_weight_decay=config.weight_decay, **MOMENTUM,
    )  # fmt: skip
    train: TrainConfig = dataclasses.replace(whole, tokens=steps * tokens)
    scored = dataclasses.replace(origin.eval, every=config.eval_every)
    return dataclasses.replace(origin, optim=optim, train=train, eval=scored)


def _fingerprint(
    own: RunConfig, asked: dict[str, Any], state: TrainState, data: ChatData, plugins: dict[str, str]
) -> dict[str, Any]:
    """What a partner must agree with. Its start is the base run's end, which differs by the arm: none is named."""
    rows = data.rows()
    batch_of = batches(own, rows)
    edges = [sorted(batch_of(step).row_ids.tolist()) for step in (0, own.train.steps - 1)]
    return {
        "config": {**dump(own), "sft": {name: value for name, value in asked.items() if name not in PATHS}},
        "start": {},
        "rows": digest([rows.digest, *edges]),
        "corpus": digest(data.manifest["files"]),
        "evaluation": digest(data.manifest["files"]["held_out.bin"]["sha256"]),
        **conditions(own, state, tuple(plugins.items())),
    }
