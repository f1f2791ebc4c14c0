"""An experiment whose text is prepared in shards: it trains before the last one is there, in matched pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.texts import sentences
from xsalab.data import preparing
from xsalab.experiment.fleet import begin_experiment
from xsalab.experiment.outcome import outcome
from xsalab.experiment.reading import load_experiment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "shards"
    path.mkdir()
    for number in range(7):
        table = pa.table({"text": sentences(12, number)})
        pq.write_table(table, path / f"shard_{number:05d}.parquet")
    return path


@pytest.fixture
def file(write_experiment: Callable[..., Path], folder: Path) -> Path:
    return write_experiment(data__source=str(folder), data__window=2, seeds=[0], model__vocab_size=280)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prepares in this process, as far as ``share`` says, instead of in workers that go on in the background."""
    found: dict[str, Any] = {"only_first": False, "asked": []}
    plain = preparing.prepare_shards

    def prepare_shards(corpus: Any, config: Any, contexts: Any, seeds: Any, **options: Any) -> None:
        found["asked"].append(options["whole"])
        if found["only_first"] and not options["whole"]:
            order = preparing.needed_order(len(corpus.manifest["shards"]), config.window, seeds)
            for context in contexts:
                pieces = preparing.Pieces(corpus.folder, corpus.manifest, context)
                pieces.folder.mkdir(parents=True, exist_ok=True)
                for number in order[: config.window]:
                    preparing.prepare_piece(corpus, config, set(), pieces, number)
            return
        plain(corpus, config, contexts, seeds, whole=True, jobs=1)

    monkeypatch.setattr("xsalab.experiment.fleet.prepare_shards", prepare_shards)
    return found


def test_runs_train_on_the_first_window_and_are_partners_of_later_ones(
    file: Path, lab: Callable[..., Any], folder: Path, here: dict[str, Any]
) -> None:
    """The fingerprint asks for no shard that is not there, and does not depend on which are."""
    here["only_first"] = True
    home = lab(data__source=str(folder), data__window=2, seeds=[0], model__vocab_size=280, train__tokens=512)
    early = home.run("standard")
    assert early.status["state"] == "finished"
    (corpora,) = json.loads((home.store.folder / "corpora.json").read_text(encoding="utf-8"))
    assert corpora["manifest"]["train"]["documents"] == 2 * 12
    here["only_first"] = False
    begin_experiment(home.experiment, home.out, all_shards=True)
    late = home.run("xsa")
    assert late.status["state"] == "finished"
    assert early.fingerprint()["rows"] == late.fingerprint()["rows"]
    assert here["asked"] == [False, True]
    (told,) = outcome(home.experiment, home.store)["corpora"]
    assert told["manifest"]["train"]["documents"] == 6 * 12
    assert told["packing"][0]["prepared"] == told["packing"][0]["shards"] == 6
    assert all(record["sha256"] for record in told["manifest"]["sources"].values())


def test_a_batch_larger_than_all_shards_is_refused_before_training(
    write_experiment: Callable[..., Path], folder: Path, tmp_path: Path, here: dict[str, Any]
) -> None:
    path = write_experiment(data__source=str(folder), data__window=2, model__vocab_size=280, train__batch_tokens=65536)
    with pytest.raises(ValueError, match=r"train\.batch_tokens = 65536: batch_rows = 2048: the corpus packs into \d+"):
        begin_experiment(load_experiment(path), tmp_path / "out")


def test_data_prepares_all_shards_and_tells(
    file: Path, tmp_path: Path, xsalab: Callable[..., Any], here: dict[str, Any]
) -> None:
    ran = xsalab("data", file, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "train: 72 documents" in ran.out
    assert "6 of 6 shards" in ran.out
    assert here["asked"] == [True]
    (entry,) = json.loads(xsalab("data", file, "--out", tmp_path / "out", "--json").out)
    assert entry["rows"][0]["prepared"] == 6
    assert entry["rows"][0]["sha256"]


@pytest.mark.slow
def test_run_prepares_the_rest_in_the_background(
    file: Path, tmp_path: Path, xsalab: Callable[..., Any], no_page: None
) -> None:
    """With real worker processes."""
    ran = xsalab("run", file, "--out", tmp_path / "out", "--jobs", "1")
    assert ran.code == 0, ran.err
    assert "better" in ran.out or "not decidable" in ran.out or "worse" in ran.out
    assert xsalab("data", file, "--out", tmp_path / "out").out.count("6 of 6 shards") == 1
