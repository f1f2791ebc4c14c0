"""Evaluation bundles for tests: three tasks, one of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MC = [{"query": f"Question {n}?", "choices": [f"one {n}", f"two {n}", "three"], "gold": n % 3} for n in range(6)]
SCHEMA = [{"context_options": ["The cat", "The dogs"], "continuation": f"eats {n}.", "gold": n % 2} for n in range(4)]
LM = [{"context": f"After {n} comes  \n", "continuation": f"{n + 1}"} for n in range(5)]
TASKS: dict[str, dict[str, Any]] = {
    "choose": {"icl_task_type": "multiple_choice", "num_fewshot": [2], "items": MC},
    "which": {"icl_task_type": "schema", "num_fewshot": [0], "items": SCHEMA},
    "next": {"icl_task_type": "language_modeling", "num_fewshot": [1], "items": LM, "continuation_delimiter": ": "},
}


def write_bundle(folder: Path, tasks: dict[str, dict[str, Any]] = TASKS) -> Path:
    """core.yaml as JSON, which is YAML; items may be texts, written as they are."""
    entries = []
    for name, task in tasks.items():
        path = folder / "eval_data" / "own" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [item if isinstance(item, str) else json.dumps(item) for item in task["items"]]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        others = {key: value for key, value in task.items() if key != "items"}
        entries.append({"label": name, "dataset_uri": f"own/{name}.jsonl", **others})
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": entries}), encoding="utf-8")
    rows = "".join(f"{name},{33.3 if name == 'choose' else 0}\n" for name in tasks)
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{rows}", encoding="utf-8")
    return folder
