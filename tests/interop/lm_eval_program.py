"""Run as a program: lm-evaluation-harness over a folder of tasks with an exported model; prints its answers as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def answers(model: str, tasks: str, names: list[str], **options: Any) -> dict[str, list]:
    """Task -> one entry a document: what came back for its requests, and whether it counts as right."""
    evaluate: Any = lm_eval.simple_evaluate
    found = evaluate(
        model="hf",
        model_args={"pretrained": model, "trust_remote_code": True, "dtype": "float32", **options},
        tasks=names,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        num_fewshot=0,
        batch_size=3,
        bootstrap_iters=0,
        device="cpu",
    )
    return {
        task: [
            {"answers": entry["filtered_resps"], "acc": entry.get("acc")}
            for entry in sorted(entries, key=lambda entry: entry["doc_id"])
        ]
        for task, entries in found["samples"].items()
    }


def main(model: str, tasks: str) -> dict[str, list]:
    """Rolling scores put the start token in front themselves; the other requests leave that to the tokenizer."""
    others = answers(model, tasks, ["own_choice", "own_generate"])
    return others | answers(model, tasks, ["own_rolling"], add_bos_token=False)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
