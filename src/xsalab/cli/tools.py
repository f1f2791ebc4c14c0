"""Verbs around experiments: plan, calibrate, align, compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import OUT, File, Json, Out, Sets, Smoke, app, bar, console, load, say_lines, spelled


@app.command()
def plan(
    file: File,
    out: Out = OUT,
    effect: Annotated[str, typer.Option(help="the difference worth finding: 0.003, or 0.3% of the baseline")] = "",
    sd: Annotated[str, typer.Option(help="a stated sd of the paired differences: 0.0005, or 0.05%")] = "",
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="time a few steps where needed")] = True,
    price: Annotated[list[str] | None, typer.Option(help="of a GPU an hour: H100=2.5; may repeat")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that the hours by type of device are for")] = 8,
    sets: Sets = None,
    smoke: Smoke = False,
    json_: Json = False,
) -> None:
    """Say what an experiment will cost and what it can see, before anything is spent.

    Trains and writes nothing, runs no code of the experiment's plugins.

    Example: xsalab plan experiments/quick.toml --effect 0.3%
    """
    from ..experiment.stages import as_run
    from ..experiment.store import RunStore
    from ..plan import plan as make_plan
    from ..plan import print_plan
    from ..plan_devices import read_prices

    prices = read_prices(price or ())
    experiment = load(file, sets, plugins=False, smoke=smoke)
    store = RunStore.of(experiment, out)
    content = make_plan(
        as_run(experiment, store), store, effect=effect, sd=sd, measure=measure, prices=prices, gpus=gpus
    )
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
    else:
        print_plan(content, console)


@app.command()
def calibrate(
    experiments: Annotated[int, typer.Option(min=1, help="experiments a setting")] = 2000,
    jobs: Annotated[int, typer.Option(min=0, help="processes side by side; 0: one a core")] = 0,
    bank: Annotated[Path | None, typer.Option(help="a finished experiment to resample, not the shipped runs")] = None,
    out: Out = OUT,
    json_: Json = False,
) -> None:
    """Try the verdicts on thousands of experiments whose truth is known, and judge their errors.

    Exit code 1 if an error is larger, or an interval wider, than it says.

    Example: xsalab calibrate --experiments 2000
    """
    from ..calibrate import calibrate as run_calibration
    from ..calibrate import collect, markdown, read_bank, shipped_bank
    from ..experiment.stages import as_run
    from ..experiment.store import RunStore

    if bank is None:
        runs = shipped_bank()
    else:
        experiment = load(bank, None, plugins=False)
        store = RunStore.of(experiment, out)
        runs = read_bank(collect(as_run(experiment, store), store))
    with bar("calibrating", 1.0) as update:
        result = run_calibration(runs, experiments=experiments, jobs=jobs, progress=update)
    print(json.dumps(result, ensure_ascii=False, allow_nan=False) if json_ else markdown(result))
    if result["failed"]:
        raise typer.Exit(1)


@app.command()
def align(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="console log, CSV, JSON lines, event files, run folder")],
    reference: Annotated[Path | None, typer.Option(help="a log of raw values that saw the same batches")] = None,
    beta: Annotated[float | None, typer.Option(help="β of the exponential average, where it is known")] = None,
    form: Annotated[str, typer.Option(help="of that average: corrected or plain")] = "",
    metric: Annotated[str, typer.Option(help="which of the log's metrics")] = "loss",
    run: Annotated[str, typer.Option(help="which run, where the file holds several")] = "",
    out: Annotated[Path | None, typer.Option(help="write the aligned series to this CSV file")] = None,
    json_: Json = False,
) -> None:
    """Say which step convention and smoothing another tool's log has, undo both exactly, and write the result.

    Example: xsalab align console.log --out aligned.csv
    """
    from ..align import align as align_log
    from ..align import as_json, lines, write_table
    from ..interop.logs import read_log

    other = None if reference is None else read_log(reference)
    aligned = align_log(read_log(log, run), reference=other, beta=beta, form=form, metric=metric)
    if out is not None:
        write_table(aligned, out)
    if json_:
        print(json.dumps(as_json(aligned), ensure_ascii=False, allow_nan=False))
        return
    say_lines(lines(aligned))
    if out is not None:
        print(f"written: {out}")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="EXPERIMENT:ARM, run folders, a log, or a folder of logs")],
    b: Annotated[str, typer.Argument(metavar="B", help="the same: the baseline")],
    metric: Annotated[str, typer.Option(help="what is compared at the end of the runs")] = "val_bpb",
    higher: Annotated[bool, typer.Option("--higher-is-better", help="an accuracy, not a loss")] = False,
    margin: Annotated[float, typer.Option(help="a difference too small to matter, as a share of B's value")] = 0.001,
    json_: Json = False,
) -> None:
    """Compare runs that exist, xsalab's or other tools' logs, and say what the comparison cannot vouch for.

    Example: xsalab compare out/experiments/quick:xsa out/experiments/quick:standard
    """
    from ..compare import compare as compare_runs
    from ..compare import lines, terminal_table

    content = compare_runs(a, b, metric=metric, lower_is_better=not higher, margin=margin)
    if json_:
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
        return
    console.print(terminal_table(content, spelled))
    print()
    say_lines(lines(content))
