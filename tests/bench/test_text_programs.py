"""bench/tokenizer.py and bench/startup.py: what they read and when a first step counts."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import startup

from xsalab.experiment.design import expand, resolve
from xsalab.experiment.reading import load_experiment


@pytest.mark.parametrize("sizes", [startup.TINY, startup.FULL])
def test_the_experiment_is_the_one_of_the_target(tmp_path: Path, sizes: dict[str, int]) -> None:
    """Depth 4 × 256, context 512, vocabulary 8,192; two runs, so that they train in processes of their own."""
    file = tmp_path / "start.toml"
    file.write_text(startup.EXPERIMENT.format(source='"stdlib"', **sizes), encoding="utf-8")
    experiment = load_experiment(file, ["name=start-3"])
    configs = [resolve(experiment, cell) for cell in expand(experiment)]
    assert experiment.name == "start-3"
    assert len(configs) > 1
    for name in ("depth", "width", "heads", "context"):
        assert {getattr(config.model, name) for config in configs} == {sizes[name]}
    assert all(config.train.steps >= 1000 for config in configs), "no run may end before it is stopped"


def test_a_first_step_counts_when_its_row_is_whole(tmp_path: Path) -> None:
    """Neither a validation before it nor half a line."""
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    assert not startup._logged(tmp_path)
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 0, "val_bpb": 3.0}\n{"step": 0, "loss": 9', encoding="utf-8")
    assert not startup._logged(tmp_path)
    log.write_text('{"step": 0, "val_bpb": 3.0}\n{"step": 0, "loss": 9.0}\n', encoding="utf-8")
    assert startup._logged(tmp_path)


def test_the_shards_hold_every_document_once(tmp_path: Path) -> None:
    """The last documents are held out; nanochat's loader leaves out the last shard as well."""
    import tokenizer

    texts = [f"document {i}" for i in range(tokenizer.HELD_OUT + 5)]
    first, last = tokenizer.write_shards(tmp_path / "shards", texts)
    assert pq.read_table(first).column("text").to_pylist() == texts[:5]
    assert pq.read_table(last).column("text").to_pylist() == texts[5:]
