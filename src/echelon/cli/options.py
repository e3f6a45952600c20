"""Options that several commands share, and how results are printed."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from echelon.launching.torchrun import is_under_torchrun
from echelon.train import strict_json

JobFile = Annotated[
    Path | None, typer.Argument(metavar="[JOB.toml]", help="A job file; without one, the embedded default.")
]
PlanText = Annotated[
    str | None, typer.Option("--plan", help="The plan, like 'data=2', instead of the job's.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change one value of the job, like model.layers=12.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def is_first_rank() -> bool:
    """Whether this process prints on standard output: under torchrun, only rank 0 does."""
    return not is_under_torchrun() or os.environ["RANK"] == "0"


def console(as_json: bool) -> Console:
    """The console for a person; quiet if a program asked for JSON."""
    return Console(quiet=as_json or not is_first_rank(), highlight=False)


def print_json(value: dict[str, Any]) -> None:
    if is_first_rank():
        print(strict_json.dump(value))
