"""ChatCORE: what a model answers in a chat, item by item.

    ChatCORE = mean over the five tasks of (accuracy − baseline) / (1 − baseline)

as nanochat defines it, with baselines ¼, ¼, ¼, 0, 0. ARC-Easy, ARC-Challenge and MMLU are categorical: the answer is
the letter, among the item's own, with the largest logit where the assistant's answer begins. Of equal largest logits
the first is taken, as there, and counted ("tied"). GSM8K and HumanEval are generated, with the calculator at hand.

``counts``, in items: "skipped" (lines that could not be used), "cut", "beyond context", "tied", "unfinished" (no end
within the tokens allowed), "no number" (GSM8K), and how programs failed that gave no wrong result (HumanEval): "error"
(they raised something), "exited", "timeout". Of several samples any counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch

from ..data.chat import check_chat_tokens
from ..data.storage import threaded
from ..model import GPT
from ..model.head import capped_logits
from ..stats.passk import mean_pass_at_k
from . import ItemScore, TaskAnswers, centred_mean
from .calculator import Calculator
from .chat_prompts import REACH, AnswerTokenizer, ChatCoreConfig, Prepared, prepare
from .chat_tasks import CATEGORICAL, CHAT_TASKS, HUB, final_number, program
from .generate import generate_batch
from .sandbox import Execution, Sandbox

NOT_RUN = "not run: "  # what a note begins with that says why a task has no answers
GENERATED_WORK = 20  # items of a categorical task that take about as long as one generated answer


def chat_core(
    model: GPT,
    tokenizer: AnswerTokenizer,
    folder: Path,
    config: ChatCoreConfig,
    *,
    sandbox: Sandbox | None = None,
    known: Callable[[str, str], TaskAnswers | None] = lambda task, key: None,
    progress: Callable[[float, float, str], None] = lambda done, total, task: None,
    note: Callable[[str, str], None] = lambda task, text: None,
) -> Iterator[tuple[TaskAnswers, str]]:
    """The answers of each task as soon as they are complete, with their key: a digest of all that they depend on
    beside the weights. What ``known(task, key)`` gives is not asked again.

    ``folder`` holds the items; ``Path("hub")``: the hub. HumanEval needs a ``sandbox`` where its answers are not
    known. ``progress`` is told work done, of how much, and the task. ``note(task, text)`` tells lines that were
    skipped, and, beginning with ``NOT_RUN``, why a task was left out: a missing file, a letter of several tokens, no
    sandbox.
    Raises ValueError at once where no task can be asked, and where the tokenizer was not made for chats.
    """
    check_chat_tokens(tokenizer, "tokenizer")
    if folder != Path(HUB) and not folder.is_dir():
        raise ValueError(f"data = '{folder}': no such folder; give one with arc_easy_test.jsonl, …, or 'hub'")
    tasks, reasons = [], []
    for name in CHAT_TASKS:
        if name not in config.tasks:
            continue
        try:
            asked = prepare(CHAT_TASKS[name], tokenizer, folder, config, model.config.context, note)
            if name == "HumanEval" and sandbox is None and known(name, asked.key) is None:
                raise ValueError("it runs programs that the model wrote, which must be allowed: --run-code")
            tasks.append(asked)
        except (OSError, ValueError) as error:
            note(name, f"{NOT_RUN}{error}")
            reasons.append(f"{name}: {error}")
    if not tasks:
        raise ValueError("no task of ChatCORE can be asked:\n" + "\n".join(reasons))
    return _answers(model, tokenizer, config, tasks, sandbox, known, progress)


def chat_core_means(answers: Iterable[TaskAnswers]) -> dict[str, float | None]:
    """ "ChatCORE" over the five tasks and "ChatCORE_cat" over the categorical ones; None where one is missing."""
    found = {answer.task: answer for answer in answers}
    groups = {"ChatCORE": CHAT_TASKS, "ChatCORE_cat": CATEGORICAL}
    return {
        name: centred_mean([found[task] for task in tasks]) if set(tasks) <= set(found) else None
        for name, tasks in groups.items()
    }


def pass_at(answers: TaskAnswers, ks: Sequence[int] = ()) -> dict[int, float | None]:
    """k -> pass@k of a generated task, None where k is larger than the samples. ``ks`` (): 1 and all samples."""
    counts = [(len(score.lengths), round(score.value * len(score.lengths))) for score in answers.scores]
    return mean_pass_at_k(counts, ks or sorted({1, *(samples for samples, _ in counts)}))


def _answers(
    model: GPT,
    tokenizer: AnswerTokenizer,
    config: ChatCoreConfig,
    tasks: Sequence[Prepared],
    sandbox: Sandbox | None,
    known: Callable[[str, str], TaskAnswers | None],
    progress: Callable[[float, float, str], None],
) -> Iterator[tuple[TaskAnswers, str]]:
    work = [len(asked.items) * (1 if asked.letters else GENERATED_WORK * config.samples) for asked in tasks]
    for number, asked in enumerate(tasks):
        name, before = asked.task.name, sum(work[:number])

        def tell(share: float, name: str = name, before: int = before, own: int = work[number]) -> None:
            progress(before + share * own, sum(work), name)

        tell(0.0)
        answers = known(name, asked.key)
        if answers is None and asked.letters:
            answers = _categorical(model, asked, config, tell)
        elif answers is None:
            answers = _generated(model, tokenizer, asked, config, sandbox, tell)
        tell(1.0)
        yield answers, asked.key


def _told(asked: Prepared, scores: Sequence[ItemScore], counts: Mapping[str, int]) -> TaskAnswers:
    """The answers with what was counted, zeros left out."""
    every = {"skipped": asked.skipped, "cut": sum(asked.cut), **counts}
    told = {name: count for name, count in every.items() if count}
    return TaskAnswers(asked.task.name, asked.task.baseline, asked.chance, tuple(scores), told)


# Categorical


def _categorical(model: GPT, asked: Prepared, config: ChatCoreConfig, tell: Callable[[float], None]) -> TaskAnswers:
    counts: Counter[str] = Counter()
    scores = []
    likelihoods = letter_likelihoods(
        model,
        asked.prompts,
        [[asked.letters[letter] for letter in item.letters] for item in asked.items],
        batch_rows=config.batch_rows,
        progress=lambda done: tell(done / len(asked.items)),
    )
    for item, prompt, cut, options in zip(asked.items, asked.prompts, asked.cut, likelihoods, strict=True):
        best = max(options)
        right = item.letters[options.index(best)] == item.reference
        counts["tied"] += options.count(best) > 1
        counts["beyond context"] += len(prompt) > model.config.context
        scores.append(ItemScore(asked.task.name, item.name, float(right), 1.0, options, cut, (1,) * len(options)))
    return _told(asked, scores, counts)


@torch.no_grad()
def letter_likelihoods(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    letters: Sequence[Sequence[int]],
    *,
    batch_rows: int = 16,
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, ...]]:
    """ln p of each of an item's ``letters`` (token ids) behind its prompt, over the whole vocabulary, in nats.

    The prompts of a batch are of like length and padded behind, where a causal model never looks from before.
    """
    # no_grad, not inference_mode: a rotary table that grows here must stay usable in training
    device, size = model.head.weight.device, model.config.vocab_size
    result: list[tuple[float, ...]] = [()] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), batch_rows):
        chosen = order[first : first + batch_rows]
        tokens = np.zeros((len(chosen), len(prompts[chosen[-1]])), dtype=np.int64)
        for row, i in enumerate(chosen):
            tokens[row, : len(prompts[i])] = prompts[i]
        last = torch.tensor([len(prompts[i]) - 1 for i in chosen], device=device)
        hidden = model.hidden(torch.from_numpy(tokens).to(device))[torch.arange(len(chosen), device=device), last]
        logits = capped_logits(hidden, model.head.weight, model.config.soft_cap)[:, :size]
        # in float64, so that two letters are equal here exactly where their logits are
        logs = logits.cpu().double().log_softmax(-1)
        for row, i in enumerate(chosen):
            result[i] = tuple(logs[row, letters[i]].tolist())
        progress(first + len(chosen))
    return result


# Generated


def _generated(
    model: GPT,
    tokenizer: AnswerTokenizer,
    asked: Prepared,
    config: ChatCoreConfig,
    sandbox: Sandbox | None,
    tell: Callable[[float], None],
) -> TaskAnswers:
    name, samples, context = asked.task.name, config.samples, model.config.context
    longest = config.longest_answer(context)
    new = generate_batch(
        model,
        [prompt for prompt in asked.prompts for _ in range(samples)],
        tokens=longest,
        temperature=config.temperature,
        top_k=config.top_k,
        seeds=[sample_seed(config.seed, name, item.name, s) for item in asked.items for s in range(samples)],
        stop=(tokenizer.specials["<|assistant_end|>"], tokenizer.bos),
        tool=Calculator(tokenizer),
        limit=REACH * context,
        batch_rows=config.batch_rows,
        progress=lambda done, total: tell(done / total),
    )
    texts = [tokenizer.decode(tokens) for tokens in new]
    outcomes = _judge_programs(asked, texts, samples, sandbox) if sandbox and name == "HumanEval" else None
    counts: Counter[str] = Counter()
    scores = []
    for number, (item, prompt, cut) in enumerate(zip(asked.items, asked.prompts, asked.cut, strict=True)):
        own = slice(number * samples, (number + 1) * samples)
        touched = {"unfinished" for tokens in new[own] if len(tokens) == longest}
        touched |= {"beyond context" for tokens in new[own] if len(prompt) + len(tokens) > context}
        if outcomes is None:
            numbers = [final_number(text) for text in texts[own]]
            right = [found == Decimal(item.reference) for found in numbers]
            touched |= {"no number" for found in numbers if found is None}
        else:
            right = [outcome.passed for outcome in outcomes[own]]
            touched |= {outcome.outcome for outcome in outcomes[own]} - {"passed", "wrong"}
        counts.update(touched)
        lengths = tuple(map(len, new[own]))
        scores.append(ItemScore(name, item.name, sum(right) / samples, 1.0, cut=cut, lengths=lengths))
    return _told(asked, scores, counts)


def sample_seed(seed: int, task: str, item: str, sample: int) -> int:
    """One number a sample, 63 bits, whatever else is asked beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{task}/{item}/{sample}".encode()).digest()[:8]) >> 1


def _judge_programs(asked: Prepared, texts: Sequence[str], samples: int, sandbox: Sandbox) -> list[Execution]:
    """One execution a text, in order; as many side by side as there are processors."""
    items = [item for item in asked.items for _ in range(samples)]
    runs = [(program(item.prompt, text), item.reference) for item, text in zip(items, texts, strict=True)]
    return list(threaded(lambda run: sandbox.run(*run), runs))
