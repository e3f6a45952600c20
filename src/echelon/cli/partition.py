"""echelon partition"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.options import Json, console, print_json, read_count
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.quantities import read_bytes, show_bytes, show_runs, show_seconds

if TYPE_CHECKING:
    from echelon.planner import CostModel, Partition

T = TypeVar("T")

ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="A profile: echelon's JSON or PipeDream's graph.txt.")
]
Workers = Annotated[
    str, typer.Option(help="How many workers; in levels, innermost first: 4x2 is 4 in each of 2.")
]
Bandwidth = Annotated[
    str, typer.Option(help="Bytes per second at each level, like 1e9, 10Gb/s or 1e10,1.25e9.")
]
Memory = Annotated[str | None, typer.Option(help="Bytes of memory per worker, like 16GB.")]
Model = Annotated[str, typer.Option(help="echelon, or pipedream: that of its optimizer.")]
Straight = Annotated[bool, typer.Option("--straight", help="One worker per stage, no replicas.")]
Free = Annotated[bool, typer.Option("--free-activations", help="Transfers of activations take no time.")]
Microbatches = Annotated[
    str | None,
    typer.Option(
        metavar="INTEGER", help="How many share an update (echelon's model; default: one per worker)."
    ),
]


def partition(
    profile: ProfileFile,
    workers: Workers,
    bandwidth: Bandwidth,
    memory: Memory = None,
    cost_model: Model = "echelon",
    straight: Straight = False,
    free_activations: Free = False,
    microbatches: Microbatches = None,
    as_json: Json = False,
) -> None:
    """Split a profile's layers into the fastest stages with replicas, by a cost model."""
    from echelon.planner import partition as solve
    from echelon.planner import read_profile
    from echelon.planner.cost import read_bandwidths, read_workers
    from echelon.planner.partitioning import argument_errors

    errors: list[str] = []
    counts = _read("--workers", read_workers, workers, errors)
    rates = _read("--bandwidth", read_bandwidths, bandwidth, errors)
    size = None if memory is None else _read("--memory", read_bytes, memory, errors)
    number = read_count("--microbatches", microbatches, errors)
    model = _model(cost_model, free_activations, number, errors)
    layers = _read("", read_profile, profile, errors)
    if counts is not None and rates is not None:
        errors += argument_errors(counts, rates, model, size)
    raise_errors("echelon partition", errors)
    assert layers is not None
    assert counts is not None
    assert rates is not None
    activity, advice = f"splitting over {workers} workers", "levels, like 8x256, take less"
    with progress_on_screen(activity, advice) as progress:
        split = solve(
            layers, counts, rates, cost_model=model, memory=size, straight=straight, progress=progress
        )
    if as_json:
        print_json(split.to_dict())
    else:
        _show(split, counts, console(as_json))


def _read(option: str, reader: Callable[[Any], T], text: Any, errors: list[str]) -> T | None:
    try:
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"'{text}' must be written with the digits 0 to 9, and plain letters")
        return reader(text)
    except UserError as refusal:  # a profile lists all of its errors
        errors += [f"{text}: {error}" for error in refusal.errors] or [refusal.title]
    except ValueError as error:
        errors.append(f"{option} {error}")
    return None


def _model(name: str, free: bool, microbatches: int | None, errors: list[str]) -> "CostModel":
    from echelon.planner import MODELS, Echelon, PipeDream

    if name not in MODELS:
        errors.append(f"--cost-model '{name}' is not known{did_you_mean(name, MODELS)}")
    if microbatches is not None and name == PipeDream.name:
        errors.append(
            "--microbatches: pipedream's model updates after each one; drop it, or use echelon's model"
        )
    return PipeDream(free) if name == PipeDream.name else Echelon(free, microbatches)


def _show(split: "Partition", counts: tuple[int, ...], screen: Console) -> None:
    table = Table()
    for heading in ("stage", "layers", "replicas", "time", "limited by", "memory", "workers"):
        is_text = heading in ("layers", "limited by", "workers")
        table.add_column(heading, justify="left" if is_text else "right")
    for index, stage in enumerate(split.stages):
        first, count = stage.layers[0], len(stage.layers)
        table.add_row(
            str(index),
            # Text, not str: a name may be taken for markup.
            Text(first if count == 1 else f"{first} … {stage.layers[-1]} ({count})"),
            str(stage.replicas),
            show_seconds(stage.seconds),
            stage.limit,
            show_bytes(stage.memory_bytes),
            " ".join(show_runs(stage.workers)),
        )
    screen.print(table)
    if len(counts) > 1:
        screen.print(f"Workers are numbered machine by machine: 0 to {counts[0] - 1} are on the first.")
    if not split.exact:
        screen.print("The graph is too wide to try every split: there may be a faster one.")
    screen.print(
        f"A microbatch takes {show_seconds(split.pipeline_seconds)} ({split.cost_model}'s cost model), "
        f"{split.speedup_over_data_parallel:.2f} times as fast as data parallelism: [bold]{split.plan}[/]"
    )


_FIRST_REPORT, _WORTH_SAYING = 1.0, 5.0  # seconds


@contextmanager
def progress_on_screen(
    activity: str, advice: str, console: Console | None = None
) -> Iterator[Callable[[float], None]]:
    """Give a function that takes the part which is done. On standard error, it says once how long all of it
    takes; then, on a terminal, how much is left."""
    console = console or Console(stderr=True, highlight=False)
    began, is_said = time.monotonic(), False

    def progress(done: float) -> None:
        nonlocal is_said
        elapsed = time.monotonic() - began
        if elapsed < _FIRST_REPORT or done <= 0:
            return
        total = elapsed / done
        if not is_said and total > _WORTH_SAYING:
            console.print(f"{activity} takes about {show_seconds(total)}; {advice}", markup=False)
        is_said = True
        status.update(f"{activity}: {done:.0%}, about {show_seconds(total - elapsed)} left")

    with console.status(f"{activity} …") as status:
        yield progress
