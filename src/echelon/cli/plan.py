"""echelon plan: predict plans, search the best ones, try them here, compare predictions with known runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.options import Json, console, print_json, read_count
from echelon.cli.plan_view import show_errors, show_prediction, show_question, show_search
from echelon.errors import UserError, raise_errors
from echelon.launching.torchrun import is_under_torchrun
from echelon.quantities import show_bytes, show_seconds

if TYPE_CHECKING:
    from echelon.engine.dry_run import DryRun
    from echelon.planner.cluster.cluster import Cluster
    from echelon.planner.foresight.prediction import Prediction
    from echelon.planner.searching.search import Found, SearchResult
    from echelon.planner.shape.shape import ModelShape
    from echelon.train.rehearsal import Trial, Work

_PRECISIONS = ("bf16", "fp16", "fp32", "fp64")

Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="A preset, or a config.json of Hugging Face.")
]
ClusterText = Annotated[
    str | None, typer.Option("--cluster", help="Devices and their number, like h100:64; or a TOML file.")
]
Batch = Annotated[str | None, typer.Option(metavar="INTEGER", help="Sequences in a step, over all replicas.")]
Sequence = Annotated[
    str | None, typer.Option(metavar="INTEGER", help="Tokens in a sequence, if not the model's.")
]
PlanText = Annotated[str | None, typer.Option("--plan", help="Predict this plan only.")]
Precision = Annotated[str, typer.Option(help=f"Of the search: {', '.join(_PRECISIONS)}.")]
OptimizerName = Annotated[str, typer.Option("--optimizer", help="adamw, sgd, sm3 or adafactor.")]
Top = Annotated[str, typer.Option(metavar="INTEGER", help="How many plans to show.")]
Emit = Annotated[Path | None, typer.Option(help="Write a job file with the best plan, for echelon train.")]
Dry = Annotated[
    bool, typer.Option("--dry-run", help="Run a rank of the plan, without others: its bytes and messages.")
]
Rank = Annotated[str, typer.Option(metavar="INTEGER", help="Of the dry run.")]
Measure = Annotated[
    str | None,
    typer.Option(
        metavar="INTEGER", help="Run so many of the best plans here for a few steps, and sort them."
    ),
]
Validate = Annotated[
    Path | None, typer.Option(help="Compare predictions with the published runs of this CSV file.")
]


def plan(
    model: Model = None,
    cluster: ClusterText = None,
    batch: Batch = None,
    sequence: Sequence = None,
    plan_text: PlanText = None,
    precision: Precision = "bf16",
    optimizer: OptimizerName = "adamw",
    top: Top = "10",
    emit: Emit = None,
    dry_run: Dry = False,
    rank: Rank = "0",
    measure: Measure = None,
    validate: Validate = None,
    as_json: Json = False,
) -> None:
    """Predict memory and time of plans on a cluster, and find the fastest that fits."""
    if validate is not None:
        _validate(validate, as_json)
        return
    errors: list[str] = []
    if batch is None:
        errors.append("--batch: is missing; give the sequences of a step, like --batch 512")
    size, tokens = read_count("--batch", batch, errors), read_count("--sequence", sequence, errors)
    count, most = read_count("--top", top, errors), read_count("--measure", measure, errors)
    _check_choices(rank, precision, optimizer, dry_run or most is not None, errors)
    shape, machines = _inputs(model, cluster, errors)
    raise_errors("echelon plan", errors)
    assert shape is not None
    assert machines is not None
    assert size is not None
    assert count is not None
    screen = console(as_json)
    result: dict[str, Any] = {"model": shape.name}
    show_question(shape, machines, size, tokens, screen)
    if plan_text is not None:
        best: tuple[Found, ...] = (_predict(shape, machines, plan_text, size, tokens, optimizer),)
        result |= {"plan": best[0].plan, **best[0].prediction.to_dict()}
        show_prediction(best[0].prediction, screen)
    else:
        shown = max(count, most or 0)
        found = _search(shape, machines, size, tokens, precision=precision, optimizer=optimizer, top=shown)
        best = found.best
        result |= found.to_dict()
        show_search(found, screen)
    if best and (dry_run or most is not None):
        sizes, dry_rank = (size, tokens or shape.sequence), int(rank) if dry_run else None
        best, tried = _try_here(str(model), sizes, best, machines, dry_rank, most, screen)
        result |= tried
    if as_json:
        print_json(result)
    if not best:
        raise typer.Exit(1)
    _emit(emit, str(model), best[0].plan, size, tokens, optimizer)


def _check_choices(rank: str, precision: str, optimizer: str, is_run: bool, errors: list[str]) -> None:
    from echelon.planner.foresight.settings import ADAM, OPTIMIZERS

    if not (rank.isascii() and rank.isdecimal()):
        errors.append(f"--rank {rank}: must be an integer, at least 0")
    if precision not in _PRECISIONS:
        errors.append(f"--precision {precision}: must be one of {', '.join(_PRECISIONS)}")
    if optimizer not in OPTIMIZERS:
        errors.append(f"--optimizer {optimizer}: must be one of {', '.join(OPTIMIZERS)}")
    elif is_run and optimizer != ADAM:
        errors.append(f"--optimizer {optimizer}: --dry-run and --measure run with {ADAM}; drop them")


def _inputs(
    model: str | None, cluster: str | None, errors: list[str]
) -> tuple["ModelShape | None", "Cluster | None"]:
    from echelon.planner.cluster.read import device_names, read_cluster
    from echelon.planner.shape.huggingface import read_shape

    shape, machines = None, None
    try:
        if model is None:
            errors.append("MODEL: is missing; give a preset, like llama3-8b, or a config.json")
        else:
            shape = read_shape(model)
    except UserError as error:
        errors += error.errors or [error.title]
    try:
        if cluster is None:
            names = ", ".join(device_names())
            errors.append(f"--cluster: is missing; give a device and a number, like h100:64, of {names}")
        else:
            machines = read_cluster(cluster)
    except UserError as error:
        errors += error.errors or [error.title]
    return shape, machines


def _predict(
    shape: "ModelShape", machines: "Cluster", text: str, batch: int, sequence: int | None, optimizer: str
) -> "Found":
    from echelon.plan import Plan
    from echelon.planner.foresight.predict import predict
    from echelon.planner.searching.search import Found

    parsed = Plan.parse(text)
    return Found(str(parsed), predict(shape, parsed, machines, batch, sequence, optimizer))


def _search(
    shape: "ModelShape", machines: "Cluster", batch: int, sequence: int | None, **choices: Any
) -> "SearchResult":
    from echelon.planner.searching.search import search

    return search(shape, machines, batch, sequence=sequence, **choices)


def _try_here(
    model: str,
    sizes: tuple[int, int],
    best: tuple["Found", ...],
    machines: "Cluster",
    rank: int | None,
    most: int | None,
    screen: Console,
) -> tuple[tuple["Found", ...], dict[str, Any]]:
    """Run a rank of the best plan dry, and so many plans; return these in the order of what they took."""
    from echelon.train.rehearsal import Work, config_of_model, dry_run_of

    work, result = Work(config_of_model(model), *sizes), dict[str, Any]()
    if rank is not None:
        run = dry_run_of(work, best[0].plan, rank)
        show_dry_run(run, best[0].prediction, screen)
        result["dry_run"] = run.to_dict()
    if most is not None:
        trials, found = measure(work, best[:most], machines), {each.plan: each for each in best}
        show_trials(trials, best, screen)
        best = tuple(found[trial.plan] for trial in trials)
        result["measured"] = [each._asdict() for each in trials]
    return best, result


def _emit(
    path: Path | None, model: str, plan_text: str, batch: int, sequence: int | None, optimizer: str
) -> None:
    if path is None:
        return
    lines = [f'plan = "{plan_text}"', f"batch = {batch}"]
    lines += [f"sequence = {sequence}"] if sequence else []
    lines += ["", "[model]", _model_line(model), ""]
    lines += ["[optimizer]", f'name = "{optimizer}"', ""]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--emit {path}: cannot be written: {error}") from error


def _model_line(model: str) -> str:
    from echelon.models.build import presets

    if model in presets():
        return f'preset = "{model}"'
    path = Path(model)
    if not path.exists():
        raise UserError(f"--emit: '{model}' is only a shape, which echelon train cannot build; drop --emit")
    folder = path if path.is_dir() else path.parent
    return f"weights = {json.dumps(str(folder))}"


def _validate(path: Path, as_json: bool) -> None:
    from echelon.planner.validate.report import validate

    sources = validate(path)
    if as_json:
        print_json({"sources": {name: errors.to_dict() for name, errors in sources.items()}})
    show_errors(sources, console(as_json))


_HELD = ("parameters", "gradients", "optimizer", "activations", "buffers")


def show_dry_run(found: "DryRun", prediction: "Prediction", screen: Console) -> None:
    """Print bytes by category, predicted and by the code, and what the rank sends in a step."""
    from echelon.collectives.layout import Layout

    stage = Layout(found.plan).position(found.rank).pipeline
    memory = prediction.memory[max(at for at, first in enumerate(prediction.stages) if first <= stage)]
    table = Table(f"rank {found.rank}", "predicted", "code")
    for name in _HELD:
        table.add_row(name, show_bytes(getattr(memory, name)), show_bytes(found.memory.peak[name]))
    table.add_row("at the peak, all", show_bytes(memory.peak), show_bytes(found.memory.peak_total))
    if memory.host:
        table.add_row("host", show_bytes(memory.host), show_bytes(sum(found.memory.host_peak.values())))
    screen.print(table)
    moved = Table("axis", "operation", "of", "calls", "sent", "received")
    for (axis, operation, subject), each in found.moved[-1].items():
        sizes = (str(each.calls), show_bytes(each.sent), show_bytes(each.received))
        moved.add_row(axis, operation, subject, *sizes)
    screen.print(moved)
    screen.print(f"A step has {len(found.program)} instructions on this rank.")


def measure(work: "Work", best: tuple["Found", ...], cluster: "Cluster") -> list["Trial"]:
    """Run the best plans here; the fastest first, those that failed last."""
    import torch

    from echelon.planner.cluster.here import devices_here
    from echelon.planner.cluster.read import CPU
    from echelon.train.jobs.machine_fit import most_ranks_here
    from echelon.train.rehearsal import try_plans

    is_processor, gpus = cluster.device.name == CPU, torch.cuda.device_count()
    most = most_ranks_here() if is_processor else gpus
    errors = []
    if is_under_torchrun():
        errors.append("--measure starts its own ranks: run it without torchrun")
    if bool(gpus) == is_processor or cluster.count > most:
        here = f"{gpus} GPUs" if gpus else f"{devices_here()} cores; use --cluster cpu:{devices_here()}"
        asked = f"{cluster.device.name}:{cluster.count}"
        errors.append(f"--measure runs on this machine, which is not {asked}: it has {here}")
    raise_errors("echelon plan", errors)
    trials = try_plans(work, [each.plan for each in best])
    trials.sort(key=lambda trial: trial.seconds or float("inf"))
    if trials[0].seconds is None:
        raise UserError("--measure: no plan could be run", [f"{each.plan}: {each.error}" for each in trials])
    return trials


def show_trials(trials: list["Trial"], best: tuple["Found", ...], screen: Console) -> None:
    predictions = {each.plan: each.prediction for each in best}
    table = Table("plan", "measured", "predicted", "memory", "predicted")
    for trial in trials:
        prediction = predictions[trial.plan]
        if trial.seconds is None or trial.peak is None:
            table.add_row(Text(trial.plan), Text(trial.error), "", "", "")
            continue
        times = (show_seconds(trial.seconds), show_seconds(prediction.step_seconds))
        table.add_row(Text(trial.plan), *times, show_bytes(trial.peak), show_bytes(prediction.peak))
    screen.print(table)
    screen.print(f"The fastest here: {trials[0].plan}", markup=False)
